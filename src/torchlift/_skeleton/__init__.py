"""Record the construction of a module and replay it."""

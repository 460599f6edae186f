"""Construct a module with its parameters on meta, and construct again what is missing."""

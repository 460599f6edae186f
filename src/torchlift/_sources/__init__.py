"""The sources of a plan: tensors of a file, of memory, of another rank."""

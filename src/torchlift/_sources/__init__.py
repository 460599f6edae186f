"""What a plan draws from: tensors of a file, of memory, of another rank."""

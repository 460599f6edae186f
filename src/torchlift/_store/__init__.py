"""Read bytes of files and URLs: size, stamp and ranges. It does not know formats or tensors."""

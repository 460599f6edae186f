"""Where bytes are: a file, a URL; size, stamp, reads; no formats, no tensors."""

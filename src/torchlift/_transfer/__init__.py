"""Byte ranges of files and tensors: map, read, write."""

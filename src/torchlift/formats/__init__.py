"""On-disk formats, each read into the same `Index`; standard library only, no torch."""

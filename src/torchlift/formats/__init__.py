"""On-disk formats: each is read into an `Index`. Standard library only, without torch."""

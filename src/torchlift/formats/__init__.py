"""Read each format on disk into the same `Index`, with the standard library only."""

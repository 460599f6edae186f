"""Read and change a live module: slots, ties, names, hooks, DTensors, and the one undo."""

"""Tools of every room: texts, containers, interrupts, memory, and the start of processes."""

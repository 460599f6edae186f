"""What every room needs: texts, containers, interrupts, memory, and the start of processes."""

"""What a live module holds and how it changes."""

"""`open`, `Checkpoint` and `diff`: an index as a lazy mapping of tensors, without models."""

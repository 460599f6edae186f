"""`open`, `Checkpoint` and `diff`: an index as a lazy mapping of tensors; knows no models."""

from torchlift._checkpoint.checkpoint import Checkpoint, MappedViews, dtype_of, not_dense, open

__all__ = ["Checkpoint", "MappedViews", "dtype_of", "not_dense", "open"]

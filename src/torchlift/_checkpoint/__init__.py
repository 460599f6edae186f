"""`open`, `Checkpoint` and `diff`: an index as a lazy mapping of tensors; knows no models."""

from torchlift._checkpoint.checkpoint import (
    Checkpoint,
    MappedViews,
    dtype_of,
    not_dense,
    open,
    shared_records,
)
from torchlift._checkpoint.kinds import Allow, classes

__all__ = [
    "Allow", "Checkpoint", "MappedViews", "classes", "dtype_of", "not_dense",
    "open", "shared_records",
]  # fmt: skip

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
from torchlift._checkpoint.stats import TensorStats

__all__ = [
    "Allow", "Checkpoint", "MappedViews", "TensorStats", "classes", "dtype_of", "not_dense",
    "open", "shared_records",
]  # fmt: skip

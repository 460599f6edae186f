"""Byte ranges of files and tensors: map, read, write."""

from torchlift._transfer.files import Files, is_network
from torchlift._transfer.pages import allocate
from torchlift._transfer.reading import (
    BUDGET,
    Request,
    is_readable,
    read,
    requests_for,
    stage_bytes,
)

__all__ = [
    "BUDGET", "Files", "Request", "allocate", "is_network", "is_readable", "read", "requests_for",
    "stage_bytes",
]  # fmt: skip

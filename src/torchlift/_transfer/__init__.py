"""Byte ranges of files and tensors: map, read, write."""

from torchlift._transfer.files import Files, is_network
from torchlift._transfer.pages import allocate
from torchlift._transfer.pinned import Sender
from torchlift._transfer.reading import (
    BUDGET,
    STAGING,
    Request,
    is_readable,
    read,
    requests_for,
)

__all__ = [
    "BUDGET", "STAGING", "Files", "Request", "Sender", "allocate", "is_network", "is_readable",
    "read", "requests_for",
]  # fmt: skip

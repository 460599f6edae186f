"""On-disk formats, each read into the same `Index`; standard library only, no torch."""

from __future__ import annotations

from torchlift.formats.detect import read_index
from torchlift.formats.index import ITEMSIZE, Chunk, FileStamp, Index, Storage, TensorEntry

__all__ = ["ITEMSIZE", "Chunk", "FileStamp", "Index", "Storage", "TensorEntry", "read_index"]

"""On-disk formats, each read into the same `Index`. Standard library only: no torch, no unpickler."""

from __future__ import annotations

from torchlift.formats.index import ITEMSIZE, Chunk, FileStamp, Index, Storage, TensorEntry

__all__ = ["ITEMSIZE", "Chunk", "FileStamp", "Index", "Storage", "TensorEntry"]

"""On-disk formats, each read into the same `Index`; standard library only, no torch."""

from __future__ import annotations

from torchlift.formats.boxes import cut, row_major, steps_in_file
from torchlift.formats.detect import read_index
from torchlift.formats.flatten import select, under
from torchlift.formats.index import (
    AMBIGUOUS,
    ITEMSIZE,
    SUBCLASS,
    Array,
    Chunk,
    FileStamp,
    Index,
    Kind,
    Leaf,
    Record,
    Storage,
    TensorEntry,
    allowed,
    allowing,
    ambiguity,
    left_out,
    matching,
    of_model,
    require_kept,
    used_by,
)
from torchlift.formats.reader import Content, Reader
from torchlift.formats.sharded import put_together

__all__ = [
    "AMBIGUOUS", "ITEMSIZE", "SUBCLASS", "Array", "Chunk", "Content", "FileStamp", "Index", "Kind",
    "Leaf", "Reader", "Record", "Storage", "TensorEntry", "allowed", "allowing", "ambiguity", "cut",
    "left_out", "matching", "of_model", "put_together", "read_index", "require_kept", "row_major",
    "select", "steps_in_file", "under", "used_by",
]  # fmt: skip

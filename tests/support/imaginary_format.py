"""An imaginary format in one file: ``MINE``, lines of names, dtypes and shapes, then the values.

It shows how small a reader is. `tests/formats/test_imaginary_format.py` has its row of the table.
"""

from __future__ import annotations

import math

from torchlift.errors import FormatError
from torchlift.formats.index import ITEMSIZE, Chunk, Index, Storage, TensorEntry, row_major
from torchlift.formats.source import Source, dense_shape, parse_json
from torchlift.formats.unpickle import ENTRY

MAGIC = b"MINE"


def read_mine(source: Source) -> Index:
    """Read the index of a file.

    Raises:
        FormatError: If it is malformed or truncated.
    """
    length = int.from_bytes(source.read(4, 8), "little")
    source.check(12, length, "the header")
    at, entries, storages = 12 + length, dict[str, TensorEntry](), dict[str, Storage]()
    for key, row in parse_json(source.read(12, length), "the header").items():
        source.budget.spend(ENTRY + len(key), key)
        dtype, *sizes = row if isinstance(row, list) and row else [None]
        shape = dense_shape(sizes, key, "shape")
        if type(dtype) is not str or dtype not in ITEMSIZE:
            raise FormatError("a tensor has an unknown dtype", entry=key, found=repr(dtype)[:100])
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        source.check(at, nbytes, "a tensor", key)
        chunk = Chunk(source.path, at, nbytes, (0,) * len(shape), shape)
        chunks = (chunk,) if nbytes else ()
        entries[key] = TensorEntry(
            key, dtype, shape, row_major(shape), nbytes, "cpu", key, chunks
        )  # fmt: skip
        storages[key] = Storage(source.path, at, nbytes, "cpu")
        at += nbytes
    if at != source.size:
        raise FormatError("bytes follow the last tensor", expected=at, found=source.size)
    return Index(source.path, "mine", entries, storages, {source.path: source.stamp})

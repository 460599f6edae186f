"""Take up what a conversion that was killed has finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256

import torch

from torchlift._save.values import Value
from torchlift.errors import CheckpointError
from torchlift.formats import read_index
from torchlift.formats.layout import Layout
from torchlift.formats.verify import verify


def plan_of(values: Sequence[Value]) -> str | None:
    """Return what is equal where the same is written of the same files, unchanged.

    None where values are not in files: of memory nobody can tell later what it was.
    """
    digest, stamped = sha256(), set()
    for value in values:
        if isinstance(value.source, torch.Tensor) or value.views is None:
            return None
        index = value.views.index
        if id(index) not in stamped:  # two file objects may be called the same
            stamped.add(id(index))
            digest.update(repr(sorted(index.files.items(), key=str)).encode())
        digest.update(repr((value.source, str(value.dtype))).encode())
    return digest.hexdigest()


def is_whole(path: str, layout: Layout) -> bool:
    """Return whether a file is there that has this layout and whose checksums are right."""
    try:
        index, sums = read_index(path), []
        for stored, _ in layout.payloads:
            storage = index.storage_of(index.entries[stored.key])
            sums.append(0 if storage is None else storage.crc32 or 0)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != layout.nbytes:
                return False
            for offset, frame in layout.frame(sums):
                if os.pread(file.fileno(), len(frame), offset) != frame:
                    return False
        return verify(path).ok
    except (CheckpointError, OSError, KeyError):
        return False

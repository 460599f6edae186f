"""Requests for the pieces of a tensor that lies in several runs of bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchlift.boxes import rows, shortest_run
from torchlift.formats import TensorEntry
from torchlift.transfer import Request

#: Shorter runs, in bytes, are copied out of the map instead of being read one by one: the kernel
#: reads whole pages anyway.
SMALL_RUN = 4096


def is_readable(entry: TensorEntry) -> bool:
    """Whether a tensor's runs of bytes are long enough to be read one by one."""
    return shortest_run(entry) >= SMALL_RUN


def requests_for(
    entry: TensorEntry, flat: torch.Tensor, dtype: torch.dtype, *, fresh: bool = False
) -> Iterator[Request]:
    """One request for each run of bytes, or for all rows of a matrix that are cut alike.

    Args:
        entry: what to read.
        flat: receives it in row-major order; one-dimensional and contiguous, on any device.
        dtype: what the bytes in the file are.
        fresh: as in `Request`.

    Example:
        >>> from torchlift.formats import Chunk
        >>> half = Chunk("f", 8, 12, (0, 0), (2, 1), (2, 1))
        >>> entry = TensorEntry("w", "float32", (2, 1), (1, 1), 8, "cpu", "", (half,))
        >>> [(r.offset, r.rows, r.step) for r in requests_for(entry, torch.empty(2), torch.float32)]
        [(8, 2, 8)]
    """
    for first, many, step in rows(entry):
        numel = first.numel * many
        target, nbytes = flat[first.at : first.at + numel], numel * entry.itemsize
        yield Request(first.file, first.offset, nbytes, target, dtype, fresh, many, step)

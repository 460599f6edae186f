"""Which bytes of a file that all ranks write are this rank's to write."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchlift.boxes import cut, row_major, runs
from torchlift.distributed.layout import Spans, everything, is_dtensor
from torchlift.distributed.shards import held, spans
from torchlift.distributed.status import world_of
from torchlift.formats import Chunk, TensorEntry
from torchlift.layouts import Stored

_PIECE = 16 << 20  # bytes that are moved from an accelerator at a time


def parts_of(tensor: torch.Tensor, stored: Stored, turn: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The pieces of a tensor that this rank writes; no byte of it is another rank's, too.

    Args:
        tensor: a DTensor, or a plain tensor that every rank has.
        stored: the whole tensor.
        turn: a number that is the same on all ranks and differs from tensor to tensor; ranks that
            hold the same values take turns.

    Yields:
        (offset in the tensor's bytes, values as bytes, on the CPU).

    Raises:
        PlacementError: it holds partial sums.
    """
    local = held(tensor.detach()).resolve_conj().resolve_neg().contiguous().view(-1)
    mine, replica, replicas = _share(stored.key, tensor)
    if local.numel() == 0:
        return
    shape, itemsize = stored.shape, local.itemsize
    chunk = Chunk("", 0, stored.nbytes, (0,) * len(shape), shape)
    whole = TensorEntry(
        stored.key, stored.dtype, shape, row_major(shape), stored.nbytes, "cpu", "", (chunk,)
    )
    step = max(1, _PIECE // itemsize)
    for at, run in enumerate(runs(cut(whole, mine))):
        for block, first in enumerate(range(0, run.numel, step)):
            if (turn + at + block) % replicas == replica:
                start = run.at + first
                piece = local[start : start + min(step, run.numel - first)]
                yield run.offset + first * itemsize, piece.cpu().view(torch.uint8)


def _share(key: str, tensor: torch.Tensor) -> tuple[Spans, int, int]:
    """(this rank's part, its number among those that hold the same part, how many they are)."""
    if not is_dtensor(tensor):
        return everything(tensor.shape), *world_of()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or 0 not in mesh.mesh.flatten().tolist():
        # Of several meshes side by side that hold the same, the one with the first rank writes.
        return tuple(() for _ in tensor.shape), 0, 1
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + coordinate[axis]
            replicas *= mesh.size(axis)
    return spans(tensor, key), replica, replicas

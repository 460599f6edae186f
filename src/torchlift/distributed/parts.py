"""Which bytes of a file that all ranks write are this rank's to write."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchlift._model.dtensor import Spans, everything, held, is_dtensor, spans_of
from torchlift._model.ranks import world_of
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import cut, row_major, runs
from torchlift.formats.layout import Stored

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
    local = held(tensor).detach()
    mine, replica, replicas = _share(stored.key, tensor)
    if local.numel() == 0:
        return
    shape, itemsize = stored.shape, local.itemsize
    chunk = Chunk("", 0, stored.nbytes, (0,) * len(shape), shape)
    whole = TensorEntry(
        stored.key, stored.dtype, shape, row_major(shape), stored.nbytes, "cpu", "", (chunk,)
    )
    step = max(1, _PIECE // itemsize)
    window = _Window(local, step)
    for at, run in enumerate(runs(cut(whole, mine))):
        for block, first in enumerate(range(0, run.numel, step)):
            if (turn + at + block) % replicas == replica:
                piece = window.take(run.at + first, min(step, run.numel - first))
                yield run.offset + first * itemsize, piece.view(torch.uint8)


class _Window:
    """A tensor's values in row-major order on the CPU, some at a time.

    A whole tensor is never copied, however it lies in memory; and runs of a few bytes that follow
    each other cost one copy together.
    """

    def __init__(self, tensor: torch.Tensor, numel: int) -> None:
        self._tensor = tensor
        self._numel = numel
        self._is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._start, self._held = 0, torch.empty(0)
        self._buffer: torch.Tensor | None = None

    def take(self, start: int, numel: int) -> torch.Tensor:
        """Values number `start` and following, at most one window; valid until the next call."""
        at = start - self._start
        if at < 0 or at + numel > self._held.numel():
            stop = min(start + self._numel, self._tensor.numel())
            self._held = self._row_major(start, stop).cpu()
            self._start, at = start, 0
        return self._held[at : at + numel]

    def _row_major(self, start: int, stop: int) -> torch.Tensor:
        if self._is_plain:
            return self._tensor.view(-1)[start:stop]
        if self._buffer is None:  # one for all: the C library would hold on to five in a row
            numel = min(self._numel, self._tensor.numel())
            self._buffer = torch.empty(numel, dtype=self._tensor.dtype, device=self._tensor.device)
        made = self._buffer[: stop - start]
        _fill(made, self._tensor, start)
        return made


def _fill(target: torch.Tensor, source: torch.Tensor, start: int) -> None:
    """Copy the source's values number `start` and following, in row-major order, into a line."""
    if source.is_contiguous():
        target.copy_(source.view(-1)[start : start + target.numel()])
        return
    row, at = source[0].numel(), 0
    while at < target.numel():
        (first, inside), left = divmod(start + at, row), target.numel() - at
        if inside or left < row:
            count = min(row - inside, left)
            _fill(target[at : at + count], source[first], inside)
        else:
            rows = source[first : first + left // row]
            count = rows.numel()
            target[at : at + count].view(rows.shape).copy_(rows)
        at += count


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
    return spans_of(tensor, key), replica, replicas

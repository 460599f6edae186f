"""Tensors of a model that look into one memory: they do after the load if the file lets them.

Two parameters that only the file stores together are not among them: the model keeps them apart,
and over one memory they would train each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchlift.formats import Chunk, TensorEntry
from torchlift.slots import is_lazy

if TYPE_CHECKING:
    from torchlift.steps import Step


@dataclass(frozen=True, slots=True)
class Base:
    """The run of a file that several tensors look into, as one vector.

    Attributes:
        entry: that vector.
        first: whether it is counted with this tensor.
    """

    entry: TensorEntry
    first: bool

    def view(self, vector: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        """The tensor of `entry` as a view of the vector."""
        offset = entry.chunks[0].offset - self.entry.chunks[0].offset
        return vector.as_strided(entry.shape, entry.stride, offset // entry.itemsize)


def share(steps: Sequence[Step]) -> list[Step]:
    """Let tensors that share memory in the model and in the file do so after the load.

    Those that a rule sends to another device or dtype than the first are copies; a note says so.
    """
    aliased = Counter(step.entry.storage for step in steps if step.entry and step.entry.chunks)
    sets: dict[object, list[Step]] = {}
    for step in steps:
        if step.entry and aliased[step.entry.storage] > 1:
            sets.setdefault(_memory(step) or id(step), []).append(step)
    changed: dict[int, Step] = {}
    for together in sets.values():
        if len(together) > 1:
            changed.update(_together(together))
    return [changed.get(id(step), step) for step in steps]


def _memory(step: Step) -> object:
    """What steps have in common that look into one memory in the same way in model and file."""
    entry, tensor = step.entry, step.group.tensor
    if entry is None or len(entry.chunks) != 1 or step.in_place or step.handled:
        return None
    if type(tensor) not in (torch.Tensor, nn.Parameter) or is_lazy(tensor):
        return None
    chunk = entry.chunks[0]
    if chunk.offset % entry.itemsize or chunk.shape != entry.shape or any(chunk.start):
        return None
    if tuple(tensor.shape) != entry.shape or tuple(tensor.stride()) != entry.stride:
        return None
    distance = chunk.offset // entry.itemsize - tensor.storage_offset()
    memory = tensor.untyped_storage()._cdata
    return memory, entry.storage, chunk.file, entry.dtype, tensor.dtype, distance


def _together(steps: Sequence[Step]) -> Iterator[tuple[int, Step]]:
    parts: dict[object, list[Step]] = {}
    for step in steps:
        parts.setdefault((step.device, step.dtype), []).append(step)
    first = steps[0]
    for part in parts.values():
        entry = _span(part)
        owned = any(step.owned for step in part)
        for step in part:
            note = step.note
            if step.device != first.device:
                note = f"a copy: {first.key!r}, whose memory it shared, goes to {first.device}"
            elif step.dtype != first.dtype:
                note = f"a copy: {first.key!r}, whose memory it shared, becomes {first.dtype}"
            base = Base(entry, step is part[0]) if len(part) > 1 else None
            yield id(step), replace(step, base=base, owned=owned, note=note)


def _span(steps: Sequence[Step]) -> TensorEntry:
    entries = [step.entry for step in steps if step.entry is not None]
    chunks = [entry.chunks[0] for entry in entries]
    start = min(chunk.offset for chunk in chunks)
    nbytes = max(chunk.offset + chunk.nbytes for chunk in chunks) - start
    shape = (nbytes // entries[0].itemsize,)
    chunk = Chunk(chunks[0].file, start, nbytes, (0,), shape)
    return replace(entries[0], shape=shape, stride=(1,), nbytes=nbytes, chunks=(chunk,))


def unshare(steps: Sequence[Step]) -> Iterator[Step]:
    """Give mapped tensors that overlap in the file memory of their own, all but the first.

    Not those that share memory in the model too.
    """
    end: dict[str, int] = {}
    changed: dict[int, Step] = {}
    mapped = [
        (step.entry.chunks[0], step)
        for step in steps
        if step.entry
        and step.entry.chunks
        and not step.owned
        and not step.in_place
        and (step.base is None or step.base.first)
    ]
    for chunk, step in sorted(mapped, key=lambda item: (item[0].file, item[0].offset)):
        if chunk.offset < end.get(chunk.file, 0) and step.base is None:
            note = "shares bytes with another key of the file, which the model does not tie"
            changed[id(step)] = replace(step, source="read", owned=True, note=note)
        else:
            reach = step.base.entry.chunks[0] if step.base else chunk
            end[chunk.file] = max(end.get(chunk.file, 0), reach.offset + reach.nbytes)
    return (changed.get(id(step), step) for step in steps)

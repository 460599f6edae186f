"""What ranks must agree on before they write one file: the same names, and which share a storage.

A rank sees that two names are one tensor by their memory, but only where it holds some of it. So
each says what it sees, in a few bytes, and all draw the same conclusion from what all have said.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from torchlift._model.dtensor import held, is_dtensor
from torchlift.errors import PlacementError


class Outline(NamedTuple):
    """What one rank sees of a state dict.

    Attributes:
        digest: of all names, kinds and shapes, in order.
        groups: positions of names that are one tensor here.
        absent: a bit for each position, set where this rank holds no values.
    """

    digest: bytes
    groups: tuple[tuple[int, ...], ...]
    absent: int


def outline_of(state: Mapping[str, object], *notes: str) -> Outline:
    """Describe a state dict to the other ranks.

    Args:
        state: name -> tensor, or a value that is none.
        notes: what else has to be the same everywhere.
    """
    digest = hashlib.sha256(repr(notes).encode())
    found: dict[object, list[int]] = defaultdict(list)
    absent = 0
    for position, (key, value) in enumerate(state.items()):
        if not isinstance(value, torch.Tensor):
            digest.update(repr((key, None)).encode())
            continue
        digest.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
        local = held(value)
        if not local.numel():
            absent |= 1 << position
            continue
        spread = (value.device_mesh, value.placements) if is_dtensor(value) else None
        # A conjugate or negative view has the memory of its whole, and other values.
        shown = (local.dtype, local.is_conj(), local.is_neg(), local.shape, local.stride())
        layout = (*shown, tuple(value.shape), spread)
        found[local.device, local.data_ptr(), layout].append(position)
    groups = tuple(tuple(group) for group in found.values() if len(group) > 1)
    return Outline(digest.digest(), groups, absent)


def require_same(outlines: Sequence[Outline]) -> None:
    """Return when all ranks save the same names.

    Raises:
        PlacementError: they do not, on every rank.
    """
    other = [rank for rank, o in enumerate(outlines) if o.digest != outlines[0].digest]
    if other:
        raise PlacementError(
            "the ranks do not save the same tensors to the same format",
            expected="names, dtypes and whole shapes equal and in the same order on all ranks",
            found=f"rank {other[0]} differs from rank 0",
            hint="Give every rank the state dict of the whole model, with DTensors for its shards.",
        )


def shared_positions(outlines: Sequence[Outline]) -> dict[int, int]:
    """Position of a name -> position of the first name that is the same tensor.

    Two names share when some rank sees it and no rank that holds both sees otherwise.

    Example:
        >>> nothing, both = Outline(b"", (), 0b11), Outline(b"", ((0, 1),), 0)
        >>> shared_positions([nothing, both]), shared_positions([Outline(b"", (), 0), both])
        ({1: 0}, {})
    """
    first: dict[int, int] = {}
    for group in _joined(group for outline in outlines for group in outline.groups):
        if all(_agrees(outline, group) for outline in outlines):
            first.update(dict.fromkeys(group[1:], group[0]))
    return first


def _agrees(outline: Outline, group: Sequence[int]) -> bool:
    present = {position for position in group if not outline.absent >> position & 1}
    return len(present) < 2 or any(present <= set(own) for own in outline.groups)


def _joined(groups: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Groups that have a member in common become one."""
    joined: list[set[int]] = []
    for group in dict.fromkeys(groups):
        members = set(group)
        for other in [other for other in joined if other & members]:
            members |= other
            joined.remove(other)
        joined.append(members)
    return [sorted(members) for members in joined]

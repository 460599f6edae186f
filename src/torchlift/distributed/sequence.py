"""What the ranks of a mesh do with their DTensors, one after the other: the same on all of them.

A collective takes part in whatever the other ranks do at that time. A rank that asks for other
tensors, or for the same ones in another order, waits for ever, or gets parts of two as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from torchlift._model.dtensor import is_dtensor
from torchlift._model.ranks import Circle
from torchlift.distributed.gather import map_leaves
from torchlift.distributed.options import StateDictMismatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

#: The ranks of a mesh -> what they do with the tensors on it, in order.
Sequence = dict[str, list[str]]


def sequence(tree: Any, shared: Iterable[torch.Tensor] = ()) -> Sequence:
    """Return the DTensors of a state dict, described in order, for every mesh.

    Args:
        tree: nested dicts, lists and tuples.
        shared: tensors of the model, whose meshes are there even when `tree` has nothing on them.

    Example:
        >>> sequence({"weight": torch.ones(2)})
        {}
    """
    named: list[tuple[str, DTensor]] = []

    def note(leaf: Any, path: tuple[Any, ...]) -> None:
        if is_dtensor(leaf):
            named.append((".".join(map(str, path)), leaf))

    map_leaves(tree, note)
    meshes = [tensor.device_mesh for tensor in shared if is_dtensor(tensor)]
    meshes += [tensor.device_mesh for _, tensor in named]
    ranks = {mesh: _ranks(mesh) for mesh in set(meshes) if mesh.get_coordinate() is not None}
    found: Sequence = {text: [] for text in ranks.values()}
    for name, tensor in named:
        if tensor.device_mesh in ranks:
            found[ranks[tensor.device_mesh]].append(_described(name, tensor))
    return found


def digests(found: Sequence) -> dict[str, str]:
    """Return the same in few bytes: what a rank tells the others."""
    return {mesh: _digest("\n".join(steps)) for mesh, steps in found.items()}


def require_same(circle: Circle, mine: Sequence, told: dict[int, dict[str, str]]) -> None:
    """Check that ranks of one mesh are about to do the same.

    Args:
        circle: the processes that told each other; all of them call this.
        mine: what this one is about to do.
        told: rank -> its digests.

    Raises:
        StateDictMismatch: on every rank, when two of them differ.
    """
    first: dict[str, str] = {}
    if all(first.setdefault(m, d) == d for each in told.values() for m, d in each.items()):
        return
    # Names take room, and are exchanged only for the error.
    _, known = circle.exchange(None, mine)
    one, other, step, instead = _first_difference(known)
    raise StateDictMismatch(
        "the ranks do not ask for the same tensors in the same order",
        expected=f"{step} as on rank {one}",
        found=f"{instead} on rank {other}",
        hint="Pass the same options, submodules and optimizers on every rank.",
    )


def _first_difference(known: dict[int, Sequence]) -> tuple[int, int, str, str]:
    first: dict[str, int] = {}
    for rank, each in sorted(known.items()):
        for mesh, steps in each.items():
            other = known[first.setdefault(mesh, rank)][mesh]
            if steps != other:
                pairs = zip_longest(other, steps, fillvalue="nothing")
                step, instead = next((a, b) for a, b in pairs if a != b)
                return first[mesh], rank, step, instead
    raise AssertionError("ranks told different digests of the same")


def _described(name: str, tensor: DTensor) -> str:
    placements = ", ".join(map(str, tensor.placements))
    return f"{name} {list(tensor.shape)} of {tensor.dtype} placed {placements}"


def _ranks(mesh: DeviceMesh) -> str:
    return _digest(str(sorted(mesh.mesh.flatten().tolist())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

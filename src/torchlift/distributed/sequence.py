"""What the ranks of a mesh do with their DTensors, one after the other: the same on all of them.

A collective takes part in whatever the other ranks do at that time. A rank that asks for other
tensors, or for the same ones in another order, waits for ever, or takes shards of two for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch

from torchlift._model.dtensor import is_dtensor
from torchlift._model.ranks import Circle
from torchlift._system import leaves
from torchlift.distributed.options import StateDictMismatch

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
    named = [(path, leaf) for path, leaf in leaves(tree).items() if is_dtensor(leaf)]
    meshes = [tensor.device_mesh for tensor in shared if is_dtensor(tensor)]
    meshes += [tensor.device_mesh for _, tensor in named]
    ranks = {
        mesh: _digest(str(sorted(mesh.mesh.flatten().tolist())))
        for mesh in dict.fromkeys(meshes)
        if mesh.get_coordinate() is not None  # this rank is in it
    }
    found: Sequence = {text: [] for text in ranks.values()}
    for path, tensor in named:
        if tensor.device_mesh in ranks:
            what = f"{'.'.join(map(str, path))} {list(tensor.shape)} of {tensor.dtype}"
            where = ", ".join(map(str, tensor.placements))
            found[ranks[tensor.device_mesh]].append(f"{what} placed {where}")
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
    digest_of: dict[str, str] = {}
    if all(digest_of.setdefault(m, d) == d for each in told.values() for m, d in each.items()):
        return
    # Names take room, and are exchanged only for the error.
    _, known = circle.exchange(None, mine)
    first: dict[str, int] = {}
    for rank, each in sorted(known.items()):
        for mesh, steps in each.items():
            other = first.setdefault(mesh, rank)
            if steps != known[other][mesh]:
                pairs = zip_longest(known[other][mesh], steps, fillvalue="nothing")
                expected, found = next((a, b) for a, b in pairs if a != b)
                raise StateDictMismatch(
                    "the ranks do not ask for the same tensors in the same order",
                    expected=f"{expected} as on rank {other}",
                    found=f"{found} on rank {rank}",
                    hint="Pass the same options, submodules and optimizers on every rank.",
                )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

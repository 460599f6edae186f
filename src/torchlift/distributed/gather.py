"""Gather the DTensors of a state dict, after the ranks have compared what they are about to gather.

A rank that gathers other tensors, or the same ones in another order, would wait forever, or mix the
shards of two tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from torchlift._model.dtensor import (
    default_device,
    is_dtensor,
    local_tensor,
    overlaps,
    placed,
    spans_of,
    wrap,
)
from torchlift._model.gathering import Gatherer
from torchlift._model.ranks import rank, world_of
from torchlift._system.containers import leaves, map_leaves
from torchlift.distributed.options import StateDictMismatch, StateDictOptions

#: Digest of the ranks of a mesh -> the steps of these ranks with the tensors on it, in order.
Steps = dict[str, list[str]]


def steps_of(tree: Any, shared: Iterable[torch.Tensor] = ()) -> Steps:
    """Describe the DTensors of a state dict in order, for every mesh.

    Args:
        tree: Nested dicts, lists and tuples.
        shared: Tensors of the model. Their meshes count even if `tree` has nothing on them.

    Example:
        >>> steps_of({"weight": torch.ones(2)})
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
    found: Steps = {text: [] for text in ranks.values()}
    for path, tensor in named:
        if tensor.device_mesh in ranks:
            what = f"{'.'.join(map(str, path))} {list(tensor.shape)} of {tensor.dtype}"
            found[ranks[tensor.device_mesh]].append(f"{what} placed {placed(tensor)}")
    return found


def digests(steps: Steps) -> dict[str, str]:
    """Return the short form of steps that ranks exchange."""
    return {mesh: _digest("\n".join(lines)) for mesh, lines in steps.items()}


def require_same_steps(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse ranks of one mesh that are about to do different things.

    Args:
        by_rank: Rank -> the `digests` of its steps.

    Raises:
        StateDictMismatch: On every rank, if two ranks differ.
    """
    first: dict[str, int] = {}
    for who, each in sorted(by_rank.items()):
        for mesh, digest in each.items():
            other = first.setdefault(mesh, who)
            if digest != by_rank[other][mesh]:
                raise StateDictMismatch(
                    "the ranks do not select the same tensors in the same order",
                    expected=f"those of rank {other}",
                    found=f"others on rank {who}",
                    hint="Pass the same options, submodules and optimizers on every rank. If "
                    "ranks hold other layers, pass process_group= with the ranks of each pipeline "
                    "stage.",
                )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Gathering:
    """A state whose DTensors are gathered after the ranks have agreed.

    Its plain tensors are already on the CPU if they are offloaded, and all memory is allocated.

    Args:
        state: Nested dicts, lists and tuples. It is not changed.
        options: Its `full_state_dict` and `cpu_offload` count.
        keeps: Whether this rank keeps the result.

    Raises:
        RuntimeError: If this rank does not have the memory.
    """

    def __init__(self, state: Any, options: StateDictOptions, *, keeps: bool) -> None:
        sharded: list[tuple[str, torch.Tensor]] = []

        def sort_out(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not torch.is_tensor(leaf):
                return leaf
            if options.full_state_dict and is_dtensor(leaf):
                sharded.append((".".join(map(str, path)), leaf))
                return leaf
            return leaf.to("cpu") if options.cpu_offload and keeps else leaf

        changes = options.full_state_dict or options.cpu_offload
        self._state = map_leaves(state, sort_out) if changes else state
        device = "cpu" if options.cpu_offload else None
        kept: Literal["each", "none"] = "each" if keeps else "none"
        self._gatherer, self._keeps = Gatherer(sharded, device=device, keeps=kept), keeps
        self._gathers = options.full_state_dict

    def finish(self) -> Any:
        """Gather. All ranks take part, and those that do not keep the result get None."""
        whole = iter([*self._gatherer])
        if not self._keeps or not self._gathers:
            return self._state if self._keeps else None
        return map_tensors(self._state, lambda each: next(whole) if is_dtensor(each) else each)


class Relayout:
    """Values that are laid out like others on their mesh after the ranks have agreed.

    Args:
        values: DTensors by name, in the same order on all ranks.
        likes: DTensors with the layout for each name.

    Raises:
        RuntimeError: If this rank does not have the memory.
    """

    def __init__(self, values: dict[str, Any], likes: Mapping[str, Any]) -> None:
        self._gatherer = Gatherer([*values.items()], keeps="one")
        self._made = dict[str, torch.Tensor]()
        for name, value in values.items():
            shape, device = local_tensor(likes[name]).shape, default_device(value)
            local = torch.empty(shape, dtype=value.dtype, device=device)
            self._made[name] = wrap(likes[name], local)

    def finish(self) -> dict[str, Any]:
        """Return the values in their new layout. All ranks take part."""
        for (name, made), whole in zip(self._made.items(), self._gatherer, strict=True):
            assert whole is not None
            box = [(0, size) for size in whole.shape]
            for into, out_of in overlaps(spans_of(made, name), box):
                local_tensor(made)[into].copy_(whole[out_of])
        return self._made


def is_on_some_ranks(tensor: Any) -> bool:
    """Return whether other ranks may have another mesh, and this is a first replica on its own."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or mesh.size() == world_of()[1]:
        return False
    pairs = zip(tensor.placements, place, strict=True)
    return not any(each.is_partial() or (each.is_replicate() and at) for each, at in pairs)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Copy nested containers with every tensor replaced; other leaves stay as they are.

    Example:
        >>> map_tensors({"a": [torch.zeros(2), 3]}, lambda tensor: tensor.numel())
        {'a': [2, 3]}
    """
    return map_leaves(tree, lambda leaf, _: change(leaf) if torch.is_tensor(leaf) else leaf)


def require_within(state: Any) -> None:
    """Refuse to gather on a rank outside of the mesh of a tensor: it would get no values.

    Raises:
        StateDictMismatch: If a tensor has such a mesh.
    """
    for path, leaf in leaves(state).items():
        if is_dtensor(leaf) and leaf.device_mesh.get_coordinate() is None:
            raise StateDictMismatch(
                "this rank is not in the mesh of a tensor, and cannot gather it",
                entry=".".join(map(str, path)),
                found=f"rank {rank()}, and {leaf.device_mesh}",
                hint="Gather on the ranks of the mesh only, with process_group=.",
            )

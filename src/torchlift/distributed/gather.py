"""Gather the DTensors of a state dict, after the ranks have compared what they are about to gather.

A rank that gathers other tensors, or the same ones in another order, would wait forever, or mix the
shards of two tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchlift._model.dtensor import (
    is_dtensor,
    local_tensor,
    placed,
    shard_of_value,
    spread_of,
    wrap,
)
from torchlift._model.ranks import gather_whole, rank, with_sent_dtype
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


def finish(state: dict[str, Any], options: StateDictOptions, *, keeps: bool) -> dict[str, Any]:
    """Gather and offload the tensors of a state dict, one at a time. All ranks take part.

    Args:
        state: Nested dicts, lists and tuples. It is not changed.
        options: Its `full_state_dict` and `cpu_offload` count.
        keeps: Whether this rank keeps the result. Otherwise it returns an empty dict.
    """
    full, offload = options.full_state_dict, options.cpu_offload
    failed: list[RuntimeError] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor | None:
        whole = _whole(tensor) if full else tensor
        if not keeps or failed:
            return None
        try:
            return whole.to("cpu") if offload else whole
        except RuntimeError as error:  # out of memory: the other ranks still gather with this one
            failed.append(error)
            return None

    found: dict[str, Any] = map_tensors(state, gather) if full or offload else state
    if failed:
        raise failed[0]
    return found if keeps else {}


def relaid(value: Any, like: Any) -> Any:
    """Lay a DTensor out like another one on its mesh. All ranks of the mesh take part."""
    made = with_sent_dtype(value).redistribute(placements=like.placements)
    if spread_of(made) == spread_of(like):
        return made if made.dtype == value.dtype else wrap(made, made.to_local().view(value.dtype))
    # redistribute cannot change the order in which mesh dimensions shard.
    return wrap(like, shard_of_value(gather_whole(value), like, "a value"))


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


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor
    try:
        return gather_whole(tensor)
    # A ValueError: strided shards of a mesh of one dimension, which torch 2.11 does not know.
    except (NotImplementedError, ValueError) as error:
        raise StateDictMismatch(
            "the class of a tensor cannot join its shards",
            expected="shards of its first dimension, or a plain tensor",
            found=f"{type(local_tensor(tensor)).__name__} placed {placed(tensor)}",
            hint="Leave full_state_dict out. Each rank then gets its shard.",
        ) from error

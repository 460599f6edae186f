"""What ranks do with their DTensors together: the same on all of them, and then they gather.

A collective takes part in whatever the other ranks do at that time. A rank that asks for other
tensors, or for the same ones in another order, waits for ever, or takes shards of two for one.
State dicts without DTensors are made of them, or sent to the CPU, one tensor at a time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlift._model.dtensor import (
    Index,
    Spans,
    blocks,
    is_dtensor,
    overlaps,
    placed,
    shard_of_value,
    spans_at,
    spread_of,
    wrap,
)
from torchlift._model.ranks import RankGroup, has_group, rank
from torchlift._system import leaves, map_leaves
from torchlift.distributed.broadcast import BUDGET, wire
from torchlift.distributed.options import StateDictMismatch, StateDictOptions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

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
            found[ranks[tensor.device_mesh]].append(f"{what} placed {placed(tensor)}")
    return found


def run_alike(
    group: RankGroup, step: Callable[[], tuple[T, Sequence, Any]]
) -> tuple[T, dict[int, Any]]:
    """Take a step on every rank, and check that ranks of one mesh are about to do the same.

    Args:
        group: the processes; all of them call this.
        step: returns what it made, what this rank is about to do, and a value for the others.

    Returns:
        What the step made here, and the values of all ranks.

    Raises:
        StateDictMismatch: on every rank, when two differ, or when the step raised on one.
    """

    def run() -> tuple[tuple[T, Sequence], Any]:
        made, mine, value = step()
        # A rank tells few bytes: names take room, and are exchanged only for the error.
        return (made, mine), (value, {mesh: _digest("\n".join(mine[mesh])) for mesh in mine})

    (made, mine), told = group.run(run)
    first: dict[str, str] = {}
    digests = [item for _, each in told.values() for item in each.items()]
    if not all(first.setdefault(mesh, digest) == digest for mesh, digest in digests):
        raise _difference(group.exchange(mine))
    return made, {who: value for who, (value, _) in told.items()}


def _difference(known: dict[int, Sequence]) -> StateDictMismatch:
    """Return the error that names the first two ranks which differ, and in what."""
    first: dict[str, int] = {}
    for who, each in sorted(known.items()):
        for mesh, steps in each.items():
            other = first.setdefault(mesh, who)
            for expected, found in itertools.zip_longest(
                known[other][mesh], steps, fillvalue="nothing"
            ):
                if expected != found:
                    return StateDictMismatch(
                        "the ranks do not ask for the same tensors in the same order",
                        expected=f"{expected} as on rank {other}",
                        found=f"{found} on rank {who}",
                        hint="Pass the same options, submodules and optimizers on every rank.",
                    )
    raise AssertionError("digests differ, and what they were made of does not")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def finish(
    state: dict[str, Any], options: StateDictOptions, all_offload: bool = True
) -> dict[str, Any]:
    """Gather and offload what `state` holds, as the options say.

    Args:
        state: nested dicts, lists and tuples; it is not changed.
        options: `full_state_dict` and `cpu_offload` are looked at.
        all_offload: whether all ranks that gather have the same `cpu_offload` as this one; where
            one keeps its result, all gather every tensor, and those on other ranks drop it.

    Returns:
        With both options a complete dict on rank 0 and an empty one elsewhere; the memory this
        takes is the result on rank 0 plus a fixed budget, and the latter elsewhere.
    """
    if options.full_state_dict and options.cpu_offload and has_group():
        found: dict[str, Any] = map_tensors(state, _to_rank0 if all_offload else _kept_by_rank0)
        return found if rank() == 0 else {}
    if options.full_state_dict:
        state = map_tensors(state, _whole)
    if options.cpu_offload:
        state = map_tensors(state, lambda tensor: tensor.to("cpu"))
    return state


def relaid(value: DTensor, like: DTensor) -> DTensor:
    """Return a DTensor as another one on its mesh is laid out; the ranks of the mesh take part."""
    made = value.redistribute(placements=like.placements)
    if spread_of(made) == spread_of(like):
        return made
    # It cannot be asked for another order in which mesh dimensions shard.
    return wrap(like, shard_of_value(value.full_tensor(), like, "a value"))


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Copy nested containers with every tensor replaced; other leaves stay as they are.

    Example:
        >>> map_tensors({"a": [torch.zeros(2), 3]}, lambda tensor: tensor.numel())
        {'a': [2, 3]}
    """
    return map_leaves(tree, lambda leaf, _: change(leaf) if torch.is_tensor(leaf) else leaf)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor
    kind = tensor.device_mesh.device_type
    here = tensor if tensor.device.type == kind else tensor.to(kind)
    assert is_dtensor(here)
    return here.full_tensor()


def _kept_by_rank0(tensor: torch.Tensor) -> torch.Tensor | None:
    whole = _whole(tensor)
    return whole.to("cpu") if rank() == 0 else None


def _to_rank0(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the whole tensor on the CPU of rank 0, sent there block by block; None elsewhere."""
    if not is_dtensor(tensor):
        return tensor.to("cpu") if rank() == 0 else None
    mesh = tensor.device_mesh
    nearest = (mesh.mesh == 0).nonzero().tolist()
    if not nearest:  # rank 0 is not in this mesh, so nobody keeps the tensor
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        return _kept_by_rank0(tensor)
    local, device = tensor.to_local().detach(), wire(mesh.device_type)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if rank() == 0 else None
    # These hold every value once together; of replicas, rank 0's is preferred.
    axes = [
        [nearest[0][axis]] if placement.is_replicate() else range(mesh.shape[axis])
        for axis, placement in enumerate(tensor.placements)
    ]
    for coordinate in itertools.product(*axes):
        owner = int(mesh.mesh[coordinate])
        for there, here in _blocks(spans_at(tensor, coordinate), BUDGET // tensor.dtype.itemsize):
            if whole is not None and owner == 0:
                whole[here].copy_(local[there])
            elif whole is not None:
                values = torch.empty(whole[here].shape, dtype=whole.dtype, device=device)
                torch.distributed.recv(_bytes(values), src=owner)
                whole[here].copy_(values)
            elif owner == rank():
                torch.distributed.send(_bytes(local[there].to(device).contiguous()), dst=0)
    return whole


def _blocks(spans: Spans, limit: int) -> Iterator[tuple[Index, Index]]:
    """Yield, for blocks of at most `limit` elements, the index in the local and the whole tensor.

    The same on every rank, so that what one sends is what another receives.
    """
    for box in itertools.product(*spans):
        for block in blocks([stop - start for start, stop in box], limit):
            offsets = zip(box, block, strict=True)
            part = [(low + start, low + stop) for (low, _), (start, stop) in offsets]
            for local, _ in overlaps(spans, part):
                yield local, tuple(slice(*span) for span in part)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory as bytes: a backend need not know the dtype."""
    return tensor.view(-1).view(torch.uint8)

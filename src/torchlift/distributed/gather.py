"""State dicts without DTensors: gathered, or moved to the CPU, one tensor at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchlift._model.dtensor import Spans, blocks, is_dtensor, local_shape, spans_at
from torchlift._model.ranks import has_group, rank
from torchlift.distributed.moves import BUDGET, wire
from torchlift.distributed.options import StateDictOptions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def finish(
    state: dict[str, Any], options: StateDictOptions, all_offload: bool = True
) -> dict[str, Any]:
    """Gather and offload what `state` holds, as the options say.

    Args:
        state: nested dicts, lists and tuples; it is not changed.
        options: `full_state_dict` and `cpu_offload` are looked at.
        all_offload: whether every rank that gathers wants what this one does; where one wants its
            tensors for itself, all take part in that, and those on other ranks drop them.

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


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of nested containers with every tensor replaced; other leaves stay as they are.

    Example:
        >>> map_tensors({"a": [torch.zeros(2), 3]}, lambda tensor: tensor.numel())
        {'a': [2, 3]}
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(value, change) for value in tree]
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


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
    """The whole tensor on the CPU of rank 0, sent there in bounded pieces; None elsewhere."""
    if not is_dtensor(tensor):
        return tensor.to("cpu") if rank() == 0 else None
    mesh = tensor.device_mesh
    owners = _owners(tensor)
    if owners is None:  # rank 0 has no part in this mesh, so nobody wants the tensor
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        return _kept_by_rank0(tensor)
    local, device = tensor.to_local().detach(), wire(mesh.device_type)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if rank() == 0 else None
    for coordinate in owners:
        owner = int(mesh.mesh[tuple(coordinate)])
        if whole is not None:
            _collect(whole, spans_at(tensor, coordinate), local if owner == 0 else owner, device)
        elif owner == rank():
            _send(local, device)
    return whole


def _owners(tensor: DTensor) -> list[tuple[int, ...]] | None:
    """Coordinates that together hold every value once, rank 0's replica preferred."""
    mesh = tensor.device_mesh.mesh
    home = (mesh == 0).nonzero()
    if len(home) == 0:
        return None
    axes = [
        [int(home[0][axis])] if placement.is_replicate() else range(mesh.shape[axis])
        for axis, placement in enumerate(tensor.placements)
    ]
    return list(itertools.product(*axes))


def _collect(
    whole: torch.Tensor, spans: Spans, source: torch.Tensor | int, device: torch.device
) -> None:
    """Put one rank's part into `whole`: from its tensor, or as it arrives from that rank."""
    shape = local_shape(spans)
    for block in blocks(shape, BUDGET // whole.dtype.itemsize):
        size = [stop - start for start, stop in block]
        if isinstance(source, torch.Tensor):
            values = source[tuple(slice(*span) for span in block)]
        else:
            values = torch.empty(size, dtype=whole.dtype, device=device)
            torch.distributed.recv(_bytes(values), src=source)
        # Here the whole tensor is what is written, so the roles of the two indices change.
        for mine, theirs in _inverse(spans, block):
            whole[theirs].copy_(values[mine])


def _send(local: torch.Tensor, device: torch.device) -> None:
    for block in blocks(local.shape, BUDGET // local.dtype.itemsize):
        values = local[tuple(slice(*span) for span in block)]
        torch.distributed.send(_bytes(values.to(device).contiguous()), dst=0)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: a backend need not know the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _inverse(
    spans: Spans, block: tuple[tuple[int, int], ...]
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where a block of a local tensor goes in the whole one: (index in block, in the whole)."""
    dims = []
    for dim, (start, stop) in zip(spans, block, strict=True):
        at, pairs = 0, []
        for low, high in dim:
            first, last = max(at, start), min(at + high - low, stop)
            if first < last:
                theirs = slice(low + first - at, low + last - at)
                pairs.append((slice(first - start, last - start), theirs))
            at += high - low
        dims.append(pairs)
    return [
        (tuple(pair[0] for pair in combination), tuple(pair[1] for pair in combination))
        for combination in itertools.product(*dims)
    ]

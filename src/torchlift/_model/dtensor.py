"""Compute the part of a tensor that a rank holds, as ranges of indices; handle FSDP2's shards.

Nothing here communicates.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from torchlift._model.torch_private import dtensor_like, local_of, shard_order
from torchlift.errors import PlacementError
from torchlift.formats.boxes import Placement, narrowed, placed_spans, shape_of_spans
from torchlift.formats.boxes import Span as Span
from torchlift.formats.boxes import overlaps as boxes_overlaps
from torchlift.formats.index import TensorEntry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Most of what is asked about is one of these, and a load asks eight times a tensor.
_PLAIN = frozenset({torch.Tensor, nn.Parameter})

#: For each dimension the ranges of the whole tensor that follow each other in the local one.
Spans = tuple[tuple[Span, ...], ...]

# A model has many tensors and few shapes.
_placed_spans = lru_cache(1024)(placed_spans)
local_shape = lru_cache(1024)(shape_of_spans)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Say whether a value is a DTensor, without importing them where nobody has: that takes time.

    Example:
        >>> is_dtensor(torch.zeros(2))
        False
    """
    if type(value) in _PLAIN:
        return False
    # Another thread may be in the middle of importing them.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def everything(shape: Sequence[int]) -> Spans:
    """Return the spans of a tensor that is not sharded.

    Example:
        >>> everything((4, 2))
        (((0, 4),), ((0, 2),))
    """
    return tuple(((0, size),) for size in shape)


def spans_of(tensor: torch.Tensor, key: str | None = None) -> Spans:
    """Return the ranges of the whole tensor that this rank holds, in each dimension.

    Args:
        tensor: a DTensor, or a plain tensor, which is whole.
        key: what an error is about.

    Raises:
        PlacementError: If its values are partial sums, or its shape contradicts its placements.
    """
    if not is_dtensor(tensor):
        return everything(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(() for _ in tensor.shape)
    try:
        found = spans_at(tensor, coordinate)
    except PlacementError as error:
        error.entry = key
        raise
    present = tuple(local_of(tensor).shape)
    if local_shape(found) != present:
        raise PlacementError(
            "the shape of the local tensor does not match its placements",
            entry=key,
            expected=f"{list(local_shape(found))} for {tensor.placements}",
            found=list(present),
            hint="Distribute the tensor with distribute_tensor or fully_shard.",
        )
    return found


def spans_at(tensor: DTensor, coordinate: Sequence[int]) -> Spans:
    """Return what the rank at `coordinate` of the mesh holds of `tensor`."""
    return shard_spans(
        tensor.shape,
        tensor.device_mesh.shape,
        tensor.placements,
        coordinate,
        shard_order(tensor),
    )


def shard_spans(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
    order: tuple[tuple[int, ...], ...] = (),
) -> Spans:
    """Return the ranges of a tensor that one rank of a mesh holds.

    Args:
        shape: The shape of the whole tensor.
        mesh: The sizes of the mesh dimensions.
        placements: One for each mesh dimension: Shard, a strided shard or Replicate.
        coordinate: The place of the rank in the mesh.
        order: For each sharded tensor dimension, the mesh dimensions in the order in which they
            shard it. Empty: from the outermost to the innermost.

    Returns:
        For each tensor dimension, its ranges in the order of the local tensor.

    Raises:
        PlacementError: If a placement does not hold values of its own, such as Partial.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> shard_spans((5, 2), (2, 2), (Replicate(), Shard(0)), (0, 1))
        (((3, 5),), ((0, 2),))
    """
    whole, sizes, at = tuple(shape), tuple(mesh), tuple(coordinate)
    return _placed_spans(whole, sizes, tuple(map(_placement, placements)), at, order)


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Placement()
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise PlacementError(
            "each rank has a partial sum of this tensor only, so it cannot be loaded or saved",
            found=placement,
            hint="Redistribute it to Replicate() or Shard() first.",
        )
    return Placement(dim, int(getattr(placement, "split_factor", 1) or 1))


def blocks(shape: Sequence[int], limit: int) -> Iterator[tuple[Span, ...]]:
    """Yield blocks of a tensor, contiguous in memory and of at most `limit` elements.

    Example:
        >>> list(blocks((3, 4), 8))
        [((0, 2), (0, 4)), ((2, 3), (0, 4))]
        >>> list(blocks((2, 4), 2))[:2]
        [((0, 1), (0, 2)), ((0, 1), (2, 4))]
    """
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    whole = tuple((0, size) for size in shape[axis:])
    if axis == 0:
        yield whole
        return
    rows = max(1, limit // inner)
    for outer in itertools.product(*map(range, shape[: axis - 1])):
        fixed = tuple((i, i + 1) for i in outer)
        for start in range(0, shape[axis - 1], rows):
            yield (*fixed, (start, min(start + rows, shape[axis - 1])), *whole)


Slices = tuple[slice, ...]


def overlaps(spans: Spans, block: Sequence[Span]) -> Iterator[tuple[Slices, Slices]]:
    """Yield where a block of the whole tensor goes: (index in the local one, index in the block).

    Example:
        >>> list(overlaps((((2, 4),),), [(3, 9)]))
        [((slice(1, 2, None),), (slice(0, 1, None),))]
    """
    starts, sizes = [start for start, _ in block], [stop - start for start, stop in block]
    for *firsts, shape in boxes_overlaps(spans, starts, sizes):
        into, out_of = (
            tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))
            for first in firsts
        )
        yield into, out_of


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, and any other tensor itself.

    Example:
        >>> import torch
        >>> local_tensor(torch.zeros(2))
        tensor([0., 0.])
    """
    return local_of(tensor) if is_dtensor(tensor) else tensor


def default_device(tensor: torch.Tensor) -> torch.device:
    """Return the default device of a shard: its own, or that of its mesh if it is on meta."""
    assert is_dtensor(tensor)
    if not tensor.is_meta:
        return tensor.device
    kind = tensor.device_mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=kind).device


def shard_of_entry(entry: TensorEntry, tensor: torch.Tensor, key: str) -> TensorEntry:
    """Return the entry of what this rank holds: the byte ranges of its shard and no others.

    Raises:
        PlacementError: see `spans_of`.
    """
    if len(entry.shape) != tensor.dim():
        return entry  # a scalar saved with shape [1], which has no parts
    part = narrowed(entry, spans_of(tensor, key))
    if not part.chunks:  # a rank outside the mesh, or an empty shard: its shape may be (0,)
        shape = tuple(local_tensor(tensor).shape)
        return part._replace(shape=shape, stride=tuple(local_tensor(tensor).stride()))
    return part


def shard_of_value(value: torch.Tensor, tensor: torch.Tensor, key: str) -> torch.Tensor:
    """Return what this rank holds of a whole tensor, as a contiguous one of its own."""
    local = torch.empty(local_tensor(tensor).shape, dtype=value.dtype, device=value.device)
    whole = [(0, size) for size in value.shape]
    with torch.no_grad():  # the value may be a parameter
        for into, out_of in overlaps(spans_of(tensor, key), whole):
            local[into].copy_(value[out_of])
    return local


def wrap(
    like: torch.Tensor, local: torch.Tensor, requires_grad: bool = False, parameter: bool = False
) -> DTensor:
    """Wrap a local tensor as a DTensor with the layout of `like`. The dtype may differ.

    Args:
        like: A DTensor.
        local: The local tensor.
        requires_grad: Whether the new DTensor requires gradients.
        parameter: Whether to make a parameter. `nn.Parameter` would detach it, which takes tens of
            microseconds.
    """
    made: DTensor = dtensor_like(like, local, grad=requires_grad, parameter=parameter)
    return made


def unwrap(made: torch.Tensor, like: torch.Tensor, key: str) -> torch.Tensor:
    """Return the local tensor of what a transform returned for the DTensor that it got.

    Raises:
        PlacementError: If it is not a DTensor of the same layout.
    """
    assert is_dtensor(like)
    if is_dtensor(made) and spread_of(made) == spread_of(like):
        return local_of(made)
    layout = f"a DTensor with placements {placed(like)}"
    found = f"placements {placed(made)}" if is_dtensor(made) else type(made).__name__
    raise PlacementError(
        "transform got a DTensor and returned another layout",
        entry=key,
        expected=layout,
        found=found,
        hint="Return tensor.redistribute(placements=...), which communicates, or use operations "
        "that keep the layout.",
    )


def first_rank(tensor: torch.Tensor) -> int | None:
    """Return the first rank of a DTensor's mesh, or None for a plain tensor.

    Example:
        >>> first_rank(torch.zeros(2)) is None
        True
    """
    return int(tensor.device_mesh.mesh.min()) if is_dtensor(tensor) else None


def spread_of(tensor: object) -> tuple[object, ...] | None:
    """Return mesh, placements and order: if equal, a rank holds the same part of two DTensors.

    Placements alone are not enough: the order in which they shard one dimension may differ.

    Example:
        >>> spread_of(torch.zeros(2)) is None
        True
    """
    if not is_dtensor(tensor):
        return None
    return tensor.device_mesh, tensor.placements, shard_order(tensor)


def placed(tensor: DTensor) -> str:
    """Return a DTensor's placements as text, and in which order they shard where that differs."""
    order = [axes for axes in shard_order(tensor) if axes != tuple(sorted(axes))]
    text = f"({', '.join(map(str, tensor.placements))})"
    return f"{text} sharded by the mesh dimensions {order}" if order else text


def layout_of(tensor: torch.Tensor) -> str | None:
    """Say how a DTensor is laid out, or None for a plain tensor.

    Example:
        >>> layout_of(torch.zeros(2)) is None
        True
    """
    if not is_dtensor(tensor):
        return None
    return f"{placed(tensor)} on {tensor.device_mesh}"


# ---- FSDP2: its sharded parameters in their slots, and its hooks


def is_fsdp(hook: Any) -> bool:
    """Say whether ``fully_shard`` registered a hook. Such hooks do not read a state dict.

    Example:
        >>> is_fsdp(print)
        False
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return False
    # The package in which FSDP2 lies is private; wherever it moves, a public method moves along.
    package = kind.reshard.__module__.rpartition(".")[0]
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(f"{package}.")


def reshard(modules: Iterable[nn.Module]) -> None:
    """Put FSDP2's sharded parameters back into their slots.

    A forward pass outside of training may have left whole ones there, which are not those that the
    optimizer and the state dict know. torch does this in hooks of ``state_dict``.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        for module in modules:
            if isinstance(module, kind):
                module.reshard()


def refresh_shards(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 register its shards again after they were put back.

    FSDP2 gathers from its own references to their memory. Without this, the next forward pass would
    use the values of a load that was undone.
    """
    for module in modules:
        for hook in module._load_state_dict_post_hooks.values():
            if is_fsdp(hook):
                hook(module, None)

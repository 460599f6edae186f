"""What a rank holds of a distributed tensor, and which bytes of a checkpoint that is.

Nothing here communicates: a placement and a rank's place in the mesh say everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchlift.boxes import cut
from torchlift.distributed.layout import Spans, is_dtensor, local_shape, spans_at
from torchlift.errors import PlacementError
from torchlift.formats import TensorEntry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

is_sharded = is_dtensor


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor on this rank: a DTensor's local shard, or the tensor itself.

    Example:
        >>> import torch
        >>> held(torch.zeros(2))
        tensor([0., 0.])
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def home(tensor: torch.Tensor) -> torch.device:
    """The device on which a shard comes to live where nobody says otherwise: that of its mesh."""
    assert is_dtensor(tensor)
    if not tensor.is_meta:
        return tensor.device
    kind = tensor.device_mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=kind).device


def spans(tensor: torch.Tensor, key: str) -> Spans:
    """The ranges of the whole tensor that this rank holds, in each dimension.

    Args:
        tensor: a DTensor.
        key: what an error is about.

    Raises:
        PlacementError: its values are partial sums, or it is not laid out as its placements say.
    """
    assert is_dtensor(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(() for _ in tensor.shape)
    try:
        found = spans_at(tensor, coordinate)
    except PlacementError as error:
        error.entry = key
        raise
    present = tuple(tensor._local_tensor.shape)
    if local_shape(found) != present:
        raise PlacementError(
            "the local shard has not the shape that its placements say",
            entry=key,
            expected=f"{list(local_shape(found))} for {tensor.placements}",
            found=list(present),
            hint="Distribute the tensor with distribute_tensor or fully_shard.",
        )
    return found


def shard_of_entry(entry: TensorEntry, tensor: torch.Tensor, key: str) -> TensorEntry:
    """The entry of what this rank holds: the byte ranges of its shard and no others.

    Raises:
        PlacementError: see `spans`.
    """
    if len(entry.shape) != tensor.dim():
        return entry  # a scalar saved with shape [1], which has no parts
    part = cut(entry, spans(tensor, key))
    if not part.chunks:  # a rank outside the mesh, or an empty shard: its shape may be (0,)
        shape = tuple(held(tensor).shape)
        return dataclasses.replace(part, shape=shape, stride=tuple(held(tensor).stride()))
    return part


def shard_of_value(value: torch.Tensor, tensor: torch.Tensor, key: str) -> torch.Tensor:
    """What this rank holds of a whole tensor, as a contiguous one of its own."""
    if is_dtensor(value):
        return value._local_tensor
    if value.dim() != tensor.dim():
        return value
    return take(value, spans(tensor, key)).reshape(held(tensor).shape)


def take(value: torch.Tensor, ranges: Spans) -> torch.Tensor:
    """The part of a tensor that lies in these ranges, contiguous.

    Example:
        >>> import torch
        >>> take(torch.arange(6).view(2, 3), (((0, 2),), ((0, 1), (2, 3))))
        tensor([[0, 2],
                [3, 5]])
    """
    for dim, found in enumerate(ranges):
        parts = [value.narrow(dim, start, stop - start) for start, stop in found]
        if len(parts) == 1:
            value = parts[0]
        else:
            value = torch.cat(parts, dim) if parts else value.narrow(dim, 0, 0)
    return value.contiguous()


def dressed(
    like: torch.Tensor, local: torch.Tensor, requires_grad: bool = False, parameter: bool = False
) -> DTensor:
    """`local` as the shard of a DTensor that is laid out as `like`; the dtype may differ.

    Args:
        like: a DTensor.
        local: the shard.
        requires_grad: of the new DTensor.
        parameter: whether it is to be a parameter: what `nn.Parameter` makes of a DTensor, without
            the detaching that every operation on one takes tens of microseconds for.
    """
    assert is_dtensor(like)
    from torch.distributed.tensor import DTensor

    spec = like._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = dataclasses.replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    # Not DTensor.from_local: it moves a shard that is offloaded to the CPU back to the mesh's
    # device, and it cannot say in which order mesh dimensions cut.
    made: Any = DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]
    if parameter:
        made._is_param = True
    return made  # type: ignore[no-any-return]


def undressed(made: torch.Tensor, like: torch.Tensor, key: str) -> torch.Tensor:
    """The local shard of what a transform returned for the DTensor that it got.

    Raises:
        PlacementError: it is not a DTensor of the same layout.
    """
    assert is_dtensor(like)
    if is_dtensor(made) and (made.device_mesh, made.placements) == (
        like.device_mesh,
        like.placements,
    ):
        return made._local_tensor
    layout = f"a DTensor with placements {_text(like.placements)}"
    found = f"placements {_text(made.placements)}" if is_dtensor(made) else type(made).__name__
    raise PlacementError(
        "transform got a DTensor, because the parameter is one, and returned another layout",
        entry=key,
        expected=layout,
        found=found,
        hint="Return tensor.redistribute(placements=...), which communicates, or do the work with "
        "operations that keep the layout.",
    )


def _text(placements: Sequence[object]) -> str:
    return f"({', '.join(map(str, placements))})"

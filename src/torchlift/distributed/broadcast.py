"""Send the tensors of rank 0 to all ranks, one at a time. Each rank keeps its own slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchlift._model.dtensor import is_dtensor, local_shape, spans_of, wrap
from torchlift._model.handlers import oddity
from torchlift._sources.tensors import Copy, place, whole_copy
from torchlift.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Sent:
    """A complete tensor of rank 0, as other ranks describe it before it arrives.

    Attributes:
        index: Its place in the order in which rank 0 sends tensors.
        shape, dtype: The shape and the dtype of the complete tensor.
    """

    index: int
    shape: torch.Size
    dtype: torch.dtype


class Inbox:
    """The memory of this rank for what rank 0 sends.

    Args:
        tensors: The tensors on rank 0, their descriptions on the others.
        kind: Device type of the model.
        process_group: The ranks that take part. Default: all.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor | Sent], kind: str, process_group: Any
    ) -> None:
        self._tensors, self._group = tensors, process_group
        self._targets: dict[int, list[Copy]] = {}
        size = max(map(_nbytes, tensors), default=0)
        self._stage = torch.empty(size, dtype=torch.uint8, device=_wire(kind, process_group))

    def room_for(self, sent: Sent, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return a new tensor that will have the values: this rank's slice of a DTensor.

        Args:
            sent: The tensor of rank 0.
            like: The tensor that it is for, if there is one.
            device: The device of the new tensor.
        """
        if not is_dtensor(like) or like.shape != sent.shape:
            local = torch.empty(sent.shape, dtype=sent.dtype, device=device)
            self._targets.setdefault(sent.index, []).append(whole_copy(local, local))
            return local
        spans = spans_of(like)
        local = torch.empty(local_shape(spans), dtype=sent.dtype, device=device)
        self._targets.setdefault(sent.index, []).append(Copy(local, local, spans))
        return wrap(like, local)

    def receive(self) -> None:
        """Receive all tensors. All ranks take part."""
        for index, tensor in enumerate(self._tensors):
            stage = self._stage[: _nbytes(tensor)]
            values = stage.view(tensor.dtype).view(tensor.shape)
            if isinstance(tensor, torch.Tensor):  # on rank 0
                values.copy_(tensor)
            if stage.numel():
                torch.distributed.broadcast(stage, 0, self._group)
            for target in self._targets.get(index, ()):
                place(values, [(0, size) for size in values.shape], target)


def _nbytes(tensor: torch.Tensor | Sent) -> int:
    return tensor.dtype.itemsize * math.prod(tensor.shape)


def _wire(kind: str, group: Any = None) -> torch.device:
    """Return the device on which a process group sends tensors of a model on `kind`."""
    backends = torch.distributed.get_backend_config(group).split(",")
    kinds = [backend.partition(":")[0] for backend in backends]
    if kind not in kinds:
        kind = kinds[0]
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def sendable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor that can be sent as bytes.

    Raises:
        PlacementError: If it is on meta, sparse, quantized or a subclass such as DTensor.

    Example:
        >>> sendable(torch.ones(2), "weight")
        tensor([1., 1.])
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    odd = oddity(tensor)
    if not plain or odd:
        raise PlacementError(
            "broadcast_from_rank0 can send complete plain tensors only",
            entry=name,
            found=f"a tensor that is {odd}" if odd else type(tensor).__name__,
            hint="Load it without broadcast_from_rank0, or make it a plain tensor first.",
        )
    return tensor.detach()

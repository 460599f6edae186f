"""Tensors that rank 0 sends to all ranks. Each rank keeps its own slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchlift._model.handlers import is_wrapper, oddity
from torchlift._model.ranks import rank
from torchlift._sources.opening import StateSource
from torchlift._sources.tensors import (
    Copy,
    MemoryTensor,
    Sent,
    copy_overlapping_sources,
    copy_values,
    place,
    whole_copy,
)
from torchlift.errors import PlacementError


class BroadcastSource(StateSource):
    """The state dict of rank 0. Its tensors are sent when they are needed, one at a time.

    Args:
        state: Key -> a description of a tensor (`Sent`), or another value.
        versions: See `StateSource`.
        tensors: The tensors on rank 0, their descriptions on the others.
        device: Where ranks receive values that the model's own code reads.
        kind: Device type of the model.
        process_group: The ranks that take part. Default: all.
    """

    collective = True

    def __init__(
        self,
        state: Mapping[str, Any],
        versions: Mapping[str, Mapping[str, object]] | None,
        tensors: Sequence[torch.Tensor | Sent],
        device: torch.device,
        kind: str,
        process_group: Any = None,
    ) -> None:
        super().__init__(state, versions, whole=True)
        self._tensors, self._device = tensors, device
        self._group = process_group
        self._wire = _wire(kind, self._group)
        self._stage = torch.empty(0)

    def reserve(self) -> None:
        """Allocate memory for the largest tensor, before the ranks agree to start."""
        if self._stage.numel() == 0:
            size = max((_nbytes(each) for each in self._tensors), default=0)
            self._stage = torch.empty(size, dtype=torch.uint8, device=self._wire)

    def receive(self, keys: Sequence[str]) -> None:
        """Receive complete tensors. All ranks take part, also those that need none."""
        copies = []
        arriving: dict[int, torch.Tensor] = {}
        received: dict[str, MemoryTensor] = {}
        try:
            self.reserve()
            for key in keys:
                sent = self.candidates[key]
                assert isinstance(sent, Sent)
                if sent.index not in arriving:
                    target = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
                    arriving[sent.index] = target
                    copies.append(whole_copy(sent, target))
                received[key] = MemoryTensor(key, arriving[sent.index])
        except RuntimeError:  # out of memory: the other ranks would wait for this one
            self._choose((), failed=True)
            raise
        self.fill(copies)
        self.candidates = {**self.candidates, **received}

    def fill(self, copies: Sequence[Copy]) -> None:
        """Execute the copies. All ranks take part, and each may need other tensors."""
        local = [item for item in copies if isinstance(item.source, torch.Tensor)]
        copy_values(copy_overlapping_sources(local))
        needed: dict[int, list[Copy]] = {}
        for item in copies:
            if isinstance(item.source, Sent):
                needed.setdefault(item.source.index, []).append(item)
        self.reserve()
        chosen = self._choose(needed)
        tensors = {index: self._tensors[index] for index in chosen}
        if rank() == 0:
            tensors = _clone_overwritten(tensors, needed)
        for index, tensor in tensors.items():
            values = self._broadcast(tensor)
            for item in needed.get(index, ()):
                place(values, [(0, size) for size in values.shape], item)

    def _broadcast(self, tensor: torch.Tensor | Sent) -> torch.Tensor:
        """Return the values of a tensor of rank 0, in memory that the next one overwrites."""
        sent = self._stage[: _nbytes(tensor)]
        values = sent.view(tensor.dtype).view(tensor.shape)
        if rank() == 0:
            assert isinstance(tensor, torch.Tensor)
            values.copy_(tensor)
        if sent.numel():
            torch.distributed.broadcast(sent, 0, self._group)
        return values

    def _choose(self, needed: Iterable[int], failed: bool = False) -> list[int]:
        """Return the numbers of the tensors that any rank needs. All ranks take part.

        Raises:
            PlacementError: If another rank failed.
        """
        flags = torch.zeros(len(self._tensors) + 1, dtype=torch.uint8, device=self._wire)
        flags[list(needed)] = 1
        flags[-1] = int(failed)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, self._group)
        *chosen, any_failed = flags.tolist()
        if any_failed and not failed:
            raise PlacementError("a rank does not have enough memory for a tensor of rank 0")
        return [index for index, flag in enumerate(chosen) if flag]


def _nbytes(tensor: torch.Tensor | Sent) -> int:
    return tensor.dtype.itemsize * math.prod(tensor.shape)


def _clone_overwritten(
    tensors: Mapping[int, torch.Tensor | Sent], needed: Mapping[int, Sequence[Copy]]
) -> dict[int, torch.Tensor | Sent]:
    """Clone the tensors that the copy of another one would overwrite before they are sent."""
    written: dict[int, set[int]] = {}
    for index, copies in needed.items():
        for item in copies:
            written.setdefault(_storage_of(item.target), set()).add(index)
    return {
        index: tensor.clone()
        if isinstance(tensor, torch.Tensor) and written.get(_storage_of(tensor), set()) - {index}
        else tensor
        for index, tensor in tensors.items()
    }


def _storage_of(tensor: torch.Tensor) -> int:
    return 0 if is_wrapper(tensor) else tensor.untyped_storage().data_ptr()


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

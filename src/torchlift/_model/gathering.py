"""Gather DTensors into memory that is allocated before the ranks communicate.

A rank that runs out of memory inside of a collective ends the process on gloo, and leaves the other
ranks waiting on NCCL. So `Gatherer` allocates everything when it is made. The ranks then agree, and
gather into this memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from torchlift._model.dtensor import (
    Spans,
    local_shape,
    local_tensor,
    overlaps,
    spans_at,
    spans_of,
)
from torchlift._model.handlers import is_wrapper
from torchlift.errors import PlacementError


class _Job(NamedTuple):
    """A DTensor to gather.

    Attributes:
        tensor: The DTensor.
        axes: The mesh dimensions that divide it.
        spans: The ranges of each piece, in the order of these dimensions.
        width: The elements of the largest piece.
        room: The memory of the result, or None if this rank does not keep it.
    """

    tensor: Any
    axes: list[int]
    spans: list[Spans]
    width: int
    room: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device on which the mesh communicates."""
        return torch.empty(0, device=self.tensor.device_mesh.device_type).device

    @property
    def is_torchs(self) -> bool:
        """Whether torch gathers it: the sum of all ranks, or a class with its own collectives."""
        return not self.spans

    @property
    def stage(self) -> int:
        """The bytes for all pieces, and for those of the gather before the last one."""
        if not self.axes:
            return 0
        total = len(self.spans) * self.width
        last: int = self.tensor.device_mesh.shape[self.axes[0]]
        return (total + total // last) * int(self.tensor.itemsize)

    @classmethod
    def of(cls, key: str, tensor: Any) -> _Job:
        """Find the pieces of a DTensor on its mesh."""
        if tensor.is_meta:
            raise PlacementError("a tensor on meta does not have values to gather", entry=key)
        if any(each.is_partial() for each in tensor.placements) or is_wrapper(local_tensor(tensor)):
            return cls(tensor, [], [], 0)
        mesh, spans = tensor.device_mesh, [spans_of(tensor, key)]
        pairs = enumerate(zip(tensor.placements, mesh.shape, strict=True))
        axes = [axis for axis, (each, size) in pairs if not each.is_replicate() and size > 1]
        if axes:
            here = list(mesh.get_coordinate())
            spans.clear()
            for place in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
                for axis, at in zip(axes, place, strict=True):
                    here[axis] = at
                spans.append(spans_at(tensor, here))
        return cls(tensor, axes, spans, max(math.prod(local_shape(each)) for each in spans))


class Gatherer:
    """Gather DTensors one after another. Iterate over it once, on all ranks.

    Attributes:
        keys: The names.

    Yields:
        Each complete tensor, or None on a rank that does not keep it. If a rank has all of a
        tensor, this is its local tensor, unless it goes to another device.

    Args:
        tensors: Names and DTensors, in the same order on all ranks of their meshes. This rank must
            be in all of these meshes.
        device: The device of the results. Default: the device of the mesh.
        keeps: ``"each"``: each result has its own memory. ``"one"``: it is valid until the next
            one. ``"none"``: this rank helps the others only.

    Raises:
        PlacementError: If a tensor is on meta, or its shape contradicts its placements.
        RuntimeError: If this rank does not have the memory.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.Tensor]],
        *,
        device: torch.device | str | None = None,
        keeps: Literal["each", "one", "none"] = "each",
    ) -> None:
        jobs = [_Job.of(*each) for each in tensors]
        self.keys, self._device = [key for key, _ in tensors], device
        self._stages = _allocate((job.device, job.stage) for job in jobs)
        shared = keeps == "one"
        sizes = ((device or job.device, job.tensor.nbytes) for job in jobs if shared and job.axes)
        self._shared = _allocate((torch.device(where), size) for where, size in sizes)
        self._jobs = [job._replace(room=self._room(job, keeps)) for job in jobs]

    def _room(self, job: _Job, keeps: str) -> torch.Tensor | None:
        tensor, where = job.tensor, torch.device(self._device or job.device)
        if keeps == "none" or job.is_torchs:
            return None
        if not job.axes:
            return local_tensor(tensor).detach().to(where)
        if keeps == "one":
            return self._shared[where][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=where)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        for job in self._jobs:
            if job.is_torchs:
                yield _gather_by_torch(job).to(self._device or job.device)
                continue
            if job.axes:
                self._gather(job)
            yield job.room

    @torch.no_grad()
    def _gather(self, job: _Job) -> None:
        """Gather the bytes of all pieces: over the last mesh dimension first."""
        if not job.width:
            return
        tensor, stage = job.tensor, self._stages[job.device]
        total, piece = (count * job.width * tensor.itemsize for count in (len(job.spans), 1))
        dist: Any = torch.distributed
        # torch 2.13 renames this function, and warns of the old name.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        halves = itertools.cycle((0, total) if len(job.axes) % 2 == 0 else (total, 0))
        local, start = local_tensor(tensor), next(halves)
        here = stage[start : start + piece]
        here.view(tensor.dtype)[: local.numel()].view(local.shape).copy_(local)
        for axis in reversed(job.axes):
            start = next(halves)  # the result of the last gather is at 0
            made = stage[start : start + here.numel() * tensor.device_mesh.shape[axis]]
            group = tensor.device_mesh.get_group(axis)
            all_gather(made, here, group=group)
            here = made
        if job.room is None:
            return
        whole = [(0, size) for size in tensor.shape]
        parts = here.view(tensor.dtype).view(-1, job.width)
        for spans, part in zip(job.spans, parts, strict=True):
            shape = local_shape(spans)
            values = part[: math.prod(shape)].view(shape)
            for out_of, into in overlaps(spans, whole):
                job.room[into].copy_(values[out_of])


def _allocate(sizes: Any) -> dict[torch.device, torch.Tensor]:
    """Allocate the largest number of bytes of each device."""
    largest: dict[torch.device, int] = {}
    for device, size in sizes:
        largest[device] = max(largest.get(device, 0), size)
    return {
        device: torch.empty(size, dtype=torch.uint8, device=device)
        for device, size in largest.items()
    }


def _gather_by_torch(job: _Job) -> torch.Tensor:
    tensor = job.tensor
    # FSDP2 may offload parameters to the host. The collective needs them on the mesh.
    here = tensor if tensor.device.type == job.device.type else tensor.to(job.device)
    try:
        whole: torch.Tensor = here.full_tensor()
    except NotImplementedError as error:
        raise PlacementError(
            "the class of a tensor cannot join its shards",
            expected="shards of its first dimension, or a plain tensor",
            found=f"{type(local_tensor(tensor)).__name__} placed {tensor.placements}",
            hint="Leave full_state_dict out. Each rank then gets its shard.",
        ) from error
    return whole

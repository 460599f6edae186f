"""Values that rank 0 sends to all ranks, each of which keeps its own slices of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchlift._model.dtensor import Span, blocks
from torchlift._plan import (
    Candidate,
    Copy,
    Sent,
    StateSource,
    apart,
    copy_values,
    place,
    whole_copy,
)
from torchlift.errors import PlacementError

#: Bytes in flight at once, in two buffers of half the size: one is filled while the other travels.
BUDGET = 64 * 2**20
_ALIGNMENT = 16


class BroadcastSource(StateSource):
    """The state dict of rank 0, whose tensors travel when they are needed.

    Args:
        state: key -> what rank 0 sends (`Sent`), or a value that is no tensor.
        versions: as in `StateSource`.
        tensors: what rank 0 sends: the tensors there, their descriptions elsewhere.
        device: where values are received that the model's own code looks at.
        kind: device type of the model.
    """

    collective = True

    def __init__(
        self,
        state: Mapping[str, Any],
        versions: Mapping[str, Mapping[str, object]] | None,
        tensors: Sequence[torch.Tensor | Sent],
        device: torch.device,
        kind: str,
    ) -> None:
        super().__init__(state, versions, whole=True)
        self._tensors, self._device, self._kind = tensors, device, kind
        self._received: dict[int, torch.Tensor] = {}

    def receive(self, keys: Sequence[str]) -> None:
        """Receive whole tensors; all ranks take part, also those that need none."""
        copies = []
        for key in keys:
            sent = self.candidates[key].value
            assert isinstance(sent, Sent)
            target = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
            self._received[sent.index] = target
            copies.append(whole_copy(sent, target))
        self.fill(copies)

    def tensor(  # noqa: D102
        self, candidate: Candidate, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(candidate.value, Sent):
            value = self._received[candidate.value.index]
            candidate = Candidate(candidate.key, value=value)
        return super().tensor(candidate, like)

    def fill(self, copies: Sequence[Copy]) -> None:
        """Execute the copies; all ranks take part."""
        here = [item for item in copies if isinstance(item.source, torch.Tensor)]
        copy_values(apart(here))
        sent = [item for item in copies if isinstance(item.source, Sent)]
        broadcast(sent, self._tensors, self._kind)


def broadcast(
    copies: Sequence[Copy],
    tensors: Sequence[torch.Tensor | Sent],
    kind: str = "cpu",
) -> None:
    """Fill every target with what rank 0 sends; all ranks of the process group take part.

    Small tensors share a bucket and large ones are cut, so that a rank never holds more than
    `BUDGET` bytes beside its own slices, and the number of messages depends on the bytes only.
    torch sends tensors one by one and each one whole (pytorch/pytorch#149640).

    Args:
        copies: what this rank takes; other ranks may take something else.
        tensors: what rank 0 sends: the tensors there, their descriptions elsewhere.
        kind: device type of the model.
    """
    device = wire(kind)
    taken = torch.zeros(len(tensors), dtype=torch.uint8, device=device)
    by_index: dict[int, list[Copy]] = {}
    for item in copies:
        assert isinstance(item.source, Sent)
        by_index.setdefault(item.source.index, []).append(item)
    taken[list(by_index)] = 1
    torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
    chosen = [index for index, flag in enumerate(taken.tolist()) if flag]
    _exchange(list(_buckets(chosen, tensors, BUDGET // 2)), tensors, by_index, device)


@dataclass(frozen=True, slots=True)
class _Part:
    index: int
    block: tuple[Span, ...]
    start: int
    nbytes: int


def _exchange(
    buckets: list[list[_Part]],
    tensors: Sequence[torch.Tensor | Sent],
    taken: dict[int, list[Copy]],
    device: torch.device,
) -> None:
    size = max((bucket[-1].start + bucket[-1].nbytes for bucket in buckets), default=0)
    stages = [torch.empty(size, dtype=torch.uint8, device=device) for _ in buckets[:2]]
    pending: tuple[torch.distributed.Work | None, list[_Part], torch.Tensor] | None = None
    for turn, bucket in enumerate(buckets):
        stage = stages[turn % 2]
        if torch.distributed.get_rank() == 0:
            for part in bucket:
                source = tensors[part.index]
                assert isinstance(source, torch.Tensor)
                _view(stage, part, source.dtype).copy_(source[_slices(part.block)])
        used = stage[: bucket[-1].start + bucket[-1].nbytes]
        work = torch.distributed.broadcast(used, src=0, async_op=True)
        if pending:
            _receive(*pending, tensors, taken)
        pending = (work, bucket, stage)
    if pending:
        _receive(*pending, tensors, taken)


def _receive(
    work: torch.distributed.Work | None,
    bucket: list[_Part],
    stage: torch.Tensor,
    tensors: Sequence[torch.Tensor | Sent],
    taken: dict[int, list[Copy]],
) -> None:
    if work is not None:
        work.wait()
    for part in bucket:
        for item in taken.get(part.index, ()):
            place(_view(stage, part, tensors[part.index].dtype), part.block, item)


def _buckets(
    chosen: Sequence[int], tensors: Sequence[torch.Tensor | Sent], limit: int
) -> Iterator[list[_Part]]:
    """The same on every rank, because it follows from shapes and dtypes alone."""
    bucket: list[_Part] = []
    used = 0
    for index in chosen:
        item = tensors[index].dtype.itemsize
        for block in blocks(tensors[index].shape, limit // item):
            nbytes = item
            for start, stop in block:
                nbytes *= stop - start
            used += -used % _ALIGNMENT
            if bucket and used + nbytes > limit:
                yield bucket
                bucket, used = [], 0
            bucket.append(_Part(index, block, used, nbytes))
            used += nbytes
    if bucket:
        yield bucket


def _view(stage: torch.Tensor, part: _Part, dtype: torch.dtype) -> torch.Tensor:
    flat = stage[part.start : part.start + part.nbytes].view(dtype)
    return flat.view([stop - start for start, stop in part.block])


def _slices(block: Sequence[Span]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in block)


def wire(kind: str) -> torch.device:
    """The device on which the process group takes tensors of a model that lives on `kind`."""
    kinds = [part.partition(":")[0] for part in torch.distributed.get_backend_config().split(",")]
    if kind not in kinds:
        kind = kinds[0]
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def sendable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Check that a tensor can travel as bytes.

    Raises:
        PlacementError: it is sparse, quantized or a subclass such as DTensor.

    Example:
        >>> sendable(torch.ones(2), "weight")
        tensor([1., 1.])
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
        raise PlacementError(
            "broadcast_from_rank0 sends whole plain tensors",
            entry=name,
            found=f"{type(tensor).__name__} with layout {tensor.layout}",
            hint="Load it without broadcast_from_rank0, or make it a plain tensor first.",
        )
    return tensor.detach()

"""Values that rank 0 sends to all ranks, each of which keeps its own slices of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchlift._model import Span, blocks, is_wrapper, local_shape, oddity, rank, ranks_of
from torchlift._sources import (
    Copy,
    MemoryTensor,
    Sent,
    StateSource,
    apart,
    copy_values,
    place,
    whole_copy,
)
from torchlift._transfer import Sender
from torchlift.errors import PlacementError

T = TypeVar("T")

#: Bytes in flight at once, in two buffers of half the size: one is filled while the other travels.
BUDGET = 64 * 2**20
ALIGNMENT = 16


class BroadcastSource(StateSource):
    """The state dict of rank 0, whose tensors travel when they are needed.

    Args:
        state: key -> what rank 0 sends (`Sent`), or a value that is no tensor.
        versions: as in `StateSource`.
        tensors: what rank 0 sends: the tensors there, their descriptions elsewhere.
        device: where values are received that the model's own code looks at.
        kind: device type of the model.
        process_group: the ranks that take part; by default all.
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
        self._group = carrier(process_group)
        self._wire = wire(kind, self._group)
        self._stages: list[torch.Tensor] = []
        self._arriving: dict[int, torch.Tensor] = {}

    def reserve(self) -> None:
        """Take the two buffers of all buckets, before the ranks agree to go on."""
        if self._stages:
            return
        limit = BUDGET // 2
        sizes = [each.dtype.itemsize * math.prod(each.shape) + ALIGNMENT for each in self._tensors]
        size = max(min(sum(sizes), limit), *(each.dtype.itemsize for each in self._tensors), 0, 0)
        count = 2 if sum(sizes) > limit else 1
        self._stages = [
            torch.empty(size, dtype=torch.uint8, device=self._wire) for _ in range(count)
        ]

    def receive(self, keys: Sequence[str]) -> None:
        """Receive whole tensors; all ranks take part, also those that need none."""
        copies = []
        arriving: dict[int, torch.Tensor] = {}
        here: dict[str, MemoryTensor] = {}
        try:
            self.reserve()
            for key in keys:
                sent = self.candidates[key]
                assert isinstance(sent, Sent)
                if sent.index not in arriving:
                    target = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
                    arriving[sent.index] = target
                    copies.append(whole_copy(sent, target))
                here[key] = MemoryTensor(key, arriving[sent.index])
        except RuntimeError:  # no memory: the others are not to wait for this rank
            self._choose((), failed=True)
            raise
        self.fill(copies)
        self.candidates = {**self.candidates, **here}

    def fill(self, copies: Sequence[Copy]) -> None:
        """Execute the copies; all ranks take part, and each may take something else.

        Small tensors share a bucket and large ones are sent in blocks, so that a rank never holds
        more than `BUDGET` bytes beside its own slices, and the number of messages depends on the
        bytes only. torch sends tensors one by one and each one whole (pytorch/pytorch#149640).
        """
        copy_values(apart([item for item in copies if isinstance(item.source, torch.Tensor)]))
        taken: dict[int, list[Copy]] = {}
        for item in copies:
            if isinstance(item.source, Sent):
                taken.setdefault(item.source.index, []).append(item)
        for bucket, stage in self._travel(self._choose(taken)):
            for block in bucket:
                for item in taken.get(block.index, ()):
                    self._place(block, stage, item)

    def _place(self, block: _Block, stage: torch.Tensor, item: Copy) -> None:
        if not is_wrapper(item.target):
            place(block.view(stage), block.spans, item)
            return
        # Which slices its class takes only it knows: it gets all of this rank's values at once.
        device, plain = item.target.device, self._arriving.pop(id(item), None)
        if plain is None:
            plain = torch.empty(local_shape(item.spans), dtype=block.dtype, device=device)
        place(block.view(stage), block.spans, item._replace(target=plain))
        shape = self._tensors[block.index].shape
        if all(stop == size for (_, stop), size in zip(block.spans, shape, strict=True)):
            item.target.copy_(plain)
        else:
            self._arriving[id(item)] = plain

    def _choose(self, taken: Iterable[int], failed: bool = False) -> list[int]:
        """Return the numbers of the tensors that any rank takes; all ranks take part.

        Raises:
            PlacementError: another rank failed.
        """
        flags = torch.zeros(len(self._tensors) + 1, dtype=torch.uint8, device=self._wire)
        flags[list(taken)] = 1
        flags[-1] = int(failed)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, self._group)
        *chosen, any_failed = flags.tolist()
        if any_failed and not failed:
            raise PlacementError("a rank has not enough memory for what rank 0 sends")
        return [index for index, flag in enumerate(chosen) if flag]

    def _travel(self, chosen: Sequence[int]) -> Iterator[tuple[list[_Block], torch.Tensor]]:
        """Yield each bucket when it has arrived, with the next one on its way."""
        buckets = list(_buckets(chosen, self._tensors, BUDGET // 2))
        self.reserve()
        before: tuple[Any, list[_Block], torch.Tensor] | None = None
        with Sender(self._stages if rank() == 0 else ()) as sender:
            for turn, bucket in enumerate([*buckets, None]):
                now = None
                if bucket is not None:
                    stage = self._stages[turn % len(self._stages)]
                    for block in bucket if rank() == 0 else ():
                        source = self._tensors[block.index]
                        assert isinstance(source, torch.Tensor)
                        index = tuple(slice(*span) for span in block.spans)
                        sender.copy(source[index], block.view(stage))
                    sender.flush()
                    used = stage[: bucket[-1].stop]
                    now = torch.distributed.broadcast(used, 0, self._group, True), bucket, stage
                if before is not None:
                    work, arrived, stage = before
                    if work is not None:
                        work.wait()
                    yield arrived, stage
                before = now


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a tensor in a bucket, whose bytes are from `start` to `stop`."""

    index: int
    spans: tuple[Span, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def view(self, stage: torch.Tensor) -> torch.Tensor:
        """Return the block as a view of the memory of its bucket."""
        flat = stage[self.start : self.stop].view(self.dtype)
        return flat.view([stop - start for start, stop in self.spans])


def _buckets(
    chosen: Sequence[int], tensors: Sequence[torch.Tensor | Sent], limit: int
) -> Iterator[list[_Block]]:
    """Yield what travels together: the same on every rank, as shapes and dtypes are."""
    items = (
        ((index, spans, dtype), dtype.itemsize * math.prod(stop - start for start, stop in spans))
        for index in chosen
        for dtype in [tensors[index].dtype]
        for spans in blocks(tensors[index].shape, limit // dtype.itemsize)
    )
    for message in packed(items, limit):
        yield [_Block(*block, start, stop) for block, start, stop in message]


def packed(items: Iterable[tuple[T, int]], limit: int) -> Iterator[list[tuple[T, int, int]]]:
    """Yield messages of at most `limit` bytes: items, each with where its bytes start and stop.

    Example:
        >>> list(packed([("a", 4), ("b", 4), ("c", 20)], 32))
        [[('a', 0, 4), ('b', 16, 20)], [('c', 0, 20)]]
    """
    message: list[tuple[T, int, int]] = []
    used = 0
    for item, nbytes in items:
        used += -used % ALIGNMENT
        if message and used + nbytes > limit:
            yield message
            message, used = [], 0
        message.append((item, used, used + nbytes))
        used += nbytes
    if message:
        yield message


def carrier(process_group: Any) -> Any:
    """Return the process group that carries weights of the ranks of another one.

    The default one where they are all ranks: what is named for agreements may be gloo, and slow.
    """
    if process_group is not None and ranks_of(process_group) == ranks_of():
        return None
    return process_group


def wire(kind: str, group: Any = None) -> torch.device:
    """Return the device on which a process group takes tensors of a model on `kind`."""
    backends = torch.distributed.get_backend_config(group).split(",")
    kinds = [backend.partition(":")[0] for backend in backends]
    if kind not in kinds:
        kind = kinds[0]
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def sendable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Check that a tensor can travel as bytes.

    Raises:
        PlacementError: it is on meta, sparse, quantized or a subclass such as DTensor.

    Example:
        >>> sendable(torch.ones(2), "weight")
        tensor([1., 1.])
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    odd = oddity(tensor)
    if not plain or odd:
        raise PlacementError(
            "broadcast_from_rank0 sends whole plain tensors",
            entry=name,
            found=f"a tensor that is {odd}" if odd else type(tensor).__name__,
            hint="Load it without broadcast_from_rank0, or make it a plain tensor first.",
        )
    return tensor.detach()

"""Values that rank 0 sends to all ranks, each of which keeps its own slices of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torchlift._model.dtensor import Span, blocks, local_shape
from torchlift._model.handlers import is_wrapper, oddity
from torchlift._model.ranks import rank, ranks_of
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
from torchlift._transfer.pinned import Sender
from torchlift.errors import PlacementError

T = TypeVar("T")

#: Bytes in flight at once, in two buffers of half the size: one is filled while the other travels.
BUDGET = 64 * 2**20


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
        """Take the two buffers of all blocks, before the ranks agree to go on."""
        if self._stages:
            return
        limit = BUDGET // 2
        sizes = [each.dtype.itemsize * math.prod(each.shape) for each in self._tensors]
        size = min(max(sizes, default=0), limit)
        self._stages = [torch.empty(size, dtype=torch.uint8, device=self._wire) for _ in range(2)]

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

        Large tensors are sent in blocks, so that a rank never holds more than `BUDGET` bytes beside
        its own slices: torch sends each one whole (pytorch/pytorch#149640).
        """
        copy_values(
            copy_overlapping_sources(
                [item for item in copies if isinstance(item.source, torch.Tensor)]
            )
        )
        taken: dict[int, list[Copy]] = {}
        for item in copies:
            if isinstance(item.source, Sent):
                taken.setdefault(item.source.index, []).append(item)
        for index, block, values in self._travel(self._choose(taken)):
            for item in taken.get(index, ()):
                self._place(values, block, self._tensors[index].shape, item)

    def _place(
        self, values: torch.Tensor, block: Sequence[Span], shape: Sequence[int], item: Copy
    ) -> None:
        if not is_wrapper(item.target):
            place(values, block, item)
            return
        # Which slices its class takes only it knows: it gets all of this rank's values at once.
        device, plain = item.target.device, self._arriving.pop(id(item), None)
        if plain is None:
            plain = torch.empty(local_shape(item.spans), dtype=values.dtype, device=device)
        place(values, block, item._replace(target=plain))
        if all(stop == size for (_, stop), size in zip(block, shape, strict=True)):
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

    def _travel(
        self, chosen: Sequence[int]
    ) -> Iterator[tuple[int, tuple[Span, ...], torch.Tensor]]:
        """Yield each block of a tensor when it has arrived, with the next one on its way."""
        self.reserve()
        all_blocks = (
            (index, block)
            for index in chosen
            for each in [self._tensors[index]]
            for block in blocks(each.shape, BUDGET // 2 // each.dtype.itemsize)
        )
        before: tuple[Any, tuple[int, tuple[Span, ...], torch.Tensor]] | None = None
        with Sender(self._stages if rank() == 0 else ()) as sender:
            for turn, (index, block) in enumerate(all_blocks):
                tensor, shape = self._tensors[index], [stop - start for start, stop in block]
                sent = self._stages[turn % 2][: tensor.dtype.itemsize * math.prod(shape)]
                view = sent.view(tensor.dtype).view(shape)
                if rank() == 0:
                    assert isinstance(tensor, torch.Tensor)
                    sender.copy(tensor[tuple(slice(*span) for span in block)], view)
                    sender.flush()
                work = torch.distributed.broadcast(sent, 0, self._group, True)
                if before is not None:
                    yield self._arrived(*before)
                before = work, (index, block, view)
            if before is not None:
                yield self._arrived(*before)

    @staticmethod
    def _arrived(work: Any, block: T) -> T:
        if work is not None:
            work.wait()
        return block


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

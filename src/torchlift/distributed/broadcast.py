"""Values that rank 0 sends to all ranks, each of which keeps its own slices of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchlift._model.dtensor import Span, blocks, local_shape
from torchlift._model.handlers import is_wrapper, oddity
from torchlift._model.ranks import rank, ranks_of
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
from torchlift._transfer import Sender
from torchlift.errors import PlacementError

#: Bytes of the longest block that travels: a rank takes no more beside its own slices.
LONGEST = 32 * 2**20


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
        self._received: dict[int, torch.Tensor] = {}
        self._stage: torch.Tensor | None = None
        self._arriving: dict[int, torch.Tensor] = {}

    def reserve(self) -> None:
        """Take the memory of all blocks, before the ranks agree to go on."""
        if self._stage is None:
            sizes = [(math.prod(each.shape), each.dtype.itemsize) for each in self._tensors]
            longest = max((min(many, LONGEST // each) * each for many, each in sizes), default=0)
            self._stage = torch.empty(longest, dtype=torch.uint8, device=self._wire)

    def receive(self, keys: Sequence[str]) -> None:
        """Receive whole tensors; all ranks take part, also those that need none."""
        copies = []
        try:
            self.reserve()
            for key in keys:
                sent = self.candidates[key].value
                assert isinstance(sent, Sent)
                target = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
                self._received[sent.index] = target
                copies.append(whole_copy(sent, target))
        except RuntimeError:  # no memory: the others are not to wait for this rank
            self._choose((), failed=True)
            raise
        self.fill(copies)

    def tensor(  # noqa: D102
        self, candidate: Candidate, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(candidate.value, Sent):
            value = self._received[candidate.value.index]
            candidate = Candidate(candidate.key, value=value)
        return super().tensor(candidate, like)

    def fill(self, copies: Sequence[Copy]) -> None:
        """Execute the copies; all ranks take part, and each may take something else.

        Large tensors are sent in blocks, so that a rank never holds more than `LONGEST` bytes
        beside its own slices: torch's own function sends each whole (pytorch/pytorch#149640), which
        of 256 MiB took as much memory on each rank, and longer. Small ones do not share a message:
        for 300 of 4 KB that saved 0.06 s, and for 100 of 2.4 MB it cost 0.2, since rank 0 had to
        copy all of it.
        """
        copy_values(apart([item for item in copies if isinstance(item.source, torch.Tensor)]))
        taken: dict[int, list[Copy]] = {}
        for item in copies:
            if isinstance(item.source, Sent):
                taken.setdefault(item.source.index, []).append(item)
        sources: dict[int, Any] = dict(enumerate(self._tensors))
        if rank() == 0:
            # What is sent from where it lies must not be what one before it is copied to.
            own = [item._replace(source=sources[at]) for at in taken for item in taken[at]]
            kept = {id(item.target): item.source for item in apart(own)}
            for at, items in taken.items():
                sources[at] = kept.get(id(items[0].target), sources[at])
        self.reserve()
        stage = self._stage
        assert stage is not None
        with Sender([stage] if rank() == 0 else ()) as sender:
            for index in self._choose(taken):
                whole = sources[index]
                for block in blocks(whole.shape, LONGEST // whole.dtype.itemsize):
                    shape = [stop - start for start, stop in block]
                    room = stage[: math.prod(shape) * whole.dtype.itemsize]
                    values = room.view(whole.dtype).view(shape)
                    if isinstance(whole, torch.Tensor):
                        part = whole[tuple(slice(*span) for span in block)]
                        if (
                            part.is_contiguous()
                            and part.device == self._wire
                            and not (part.is_conj() or part.is_neg())
                        ):
                            values, room = part, part.view(-1).view(torch.uint8)
                        else:
                            sender.copy(part, values)
                            sender.flush()
                    torch.distributed.broadcast(room, 0, self._group)
                    for item in taken.get(index, ()):
                        self._place(values, block, item, whole.shape)

    def _place(
        self, values: torch.Tensor, block: Sequence[Span], item: Copy, shape: Sequence[int]
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

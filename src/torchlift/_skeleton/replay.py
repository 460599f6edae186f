"""Runs what a `Tape` recorded, for some tensors only, on a real device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from torchlift._skeleton.recording import Device, Draws, Key, Op, Recording, Ref, tensors_in
from torchlift.errors import PlacementError


class Run:
    """Real memory for the storages of a tape, filled by running the calls that wrote them."""

    def __init__(self, recording: Recording, device: torch.device) -> None:
        self.recording = recording
        self.device = device
        self.memory: dict[Key, torch.UntypedStorage] = {}
        self._generators: dict[Key, torch.Generator] = {}
        self._stream: Key | None = None
        self._outer = torch.Tensor()

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The real tensor for a recorded one, as its storage is at this point of the run."""
        storage = self.memory.get(ref.key)
        if storage is None:
            storage = self.memory[ref.key] = self._initial(ref.key)
        empty = torch.empty(0, dtype=ref.dtype, device=self.device)
        return empty.set_(storage, ref.offset, ref.shape, ref.stride)

    def _initial(self, key: Key) -> torch.UntypedStorage:
        real = self.recording.tracks[key].real
        if real is None:
            raise PlacementError("was made by a call that a skeleton cannot record")
        # A copy: replaying twice must not share memory, nor write to what the caller owns.
        source = torch.empty(0, dtype=torch.uint8, device=real.device).set_(real.untyped_storage())
        return source.to(self.device, copy=True).untyped_storage()

    def run(self, op: Op) -> None:
        """Execute one recorded call and keep the storages it makes."""
        if op.random and op.stream != self._stream:
            self._draw_from(op.stream)
        with _default_dtype(op.dtype):
            result = op.call(*self.value(op.args), **self.value(op.kwargs))
        if not op.made:
            return
        for position, tensor in enumerate(tensors_in(result)):
            ref = op.made.get(position)
            if ref is not None:
                self.memory[ref.key] = _laid_out(tensor, ref).untyped_storage()

    def _draw_from(self, stream: Key | None) -> None:
        """Go on with the random numbers after a seed of the constructor's, or with the caller's."""
        if self._stream is None:
            self._outer = torch.default_generator.get_state()
        if stream is None:
            torch.default_generator.set_state(self._outer)
        else:
            torch.manual_seed(self.recording.randomness.seeds[stream])
        self._stream = stream

    def _generator(self, draws: Draws) -> torch.Generator:
        """A generator like the constructor's, which stays as it is for the next replay."""
        made = self._generators.get(draws.key)
        if made is None:
            made = self._generators[draws.key] = torch.Generator(self.device)
            if self.device.type == "cpu":
                made.set_state(draws.state)
            else:
                made.manual_seed(draws.seed)  # a state belongs to one kind of device
        return made

    def close(self) -> None:
        """Leave the caller's random numbers as if the constructor had not seeded."""
        if self._stream is not None:
            self._draw_from(None)

    def value(self, value: Any) -> Any:
        """A recorded argument with real tensors and devices in it."""
        kind = type(value)
        if kind is Ref:
            return self.tensor(value)
        if value is Device:
            return self.device
        if kind is Draws:
            return self._generator(value)
        if kind is tuple or kind is list:
            return kind(self.value(item) for item in value)
        if kind is dict:
            return {key: self.value(item) for key, item in value.items()}
        return value


def _laid_out(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    """`tensor` with the strides that meta predicted; kernels may choose others."""
    if tensor.stride() == ref.stride and tensor.storage_offset() == ref.offset:
        return tensor
    made = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=tensor.device)
    return made.copy_(tensor)


def replay_all(
    recording: Recording, wanted: Sequence[Ref], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Make the wanted tensors, yielding (position in `wanted`, tensor) as each is finished.

    Calls run in the order in which the constructor made them, and when the whole module is wanted
    none is left out, not even those whose result was dropped (the head of a model that ties it): so
    the random numbers are those of plain construction with the same seed. What no later call needs
    is freed at once.
    """
    calls = slice_of(recording, [(ref.key, len(recording.ops)) for ref in wanted])
    if len(wanted) == recording.tensors:
        needed = set(calls)
        calls = [
            at
            for at in range(len(recording.ops))
            if at in needed or _is_real(recording, recording.ops[at])
        ]
    last: dict[Key, int] = {}
    for at in calls:
        for key in (*recording.ops[at].reads, *recording.ops[at].writes):
            last[key] = at
    finishing: dict[int, list[int]] = {}
    for position, ref in enumerate(wanted):
        finishing.setdefault(last.get(ref.key, -1), []).append(position)
    run = Run(recording, device)
    with quiet(device), closing(run):
        for position in finishing.get(-1, ()):
            yield position, run.tensor(wanted[position])
        for at in calls:
            op = recording.ops[at]
            run.run(op)
            for position in finishing.get(at, ()):
                yield position, run.tensor(wanted[position])
            for key in (*op.reads, *op.writes):
                if last[key] == at:
                    run.memory.pop(key, None)


def _is_real(recording: Recording, op: Op) -> bool:
    # On a meta device that it asked for itself, a constructor draws no numbers.
    return any(recording.tracks[key].device.type != "meta" for key in op.writes)


def slice_of(recording: Recording, wanted: Iterable[tuple[Key, int]]) -> list[int]:
    """Positions of the calls that decide these storages' contents before these times, in order."""
    needed: set[int] = set()
    known: dict[Key, int] = {}
    todo = list(wanted)
    while todo:
        key, before = todo.pop()
        if known.get(key, -1) >= before:
            continue
        known[key] = before
        for at in recording.tracks[key].writers:
            if at >= before:
                break
            if at not in needed:
                needed.add(at)
                todo += [(read, at) for read in recording.ops[at].reads]
                todo += [(write, at) for write in recording.ops[at].writes]
    return sorted(needed)


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """Run recorded calls on a device, without gradients and warnings."""
    # What the calls warn of (a no-op initialiser of an empty tensor) concerns construction.
    with torch.no_grad(), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        if torch.get_default_device().type == "meta":
            # The initialisers that torch writes in Python make helpers on the default device.
            stack.enter_context(device)
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""Runs what a `Recorder` wrote down, for some tensors only, on a real device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from torchlift._skeleton.recording import (
    META,
    Call,
    Device,
    GeneratorState,
    Key,
    Recording,
    Ref,
    tensors_in,
)
from torchlift.errors import PlacementError


class Run:
    """Real memory for the storages of a recording, filled by running the calls that wrote them."""

    def __init__(self, recording: Recording, device: torch.device) -> None:
        self.recording = recording
        self.device = device
        self.memory: dict[Key, torch.UntypedStorage] = {}
        self._generators: dict[Key, torch.Generator] = {}
        self._stream: Key | None = None
        self._callers = torch.Tensor()  # state of torch's default generator

    def tensor(self, ref: Ref) -> torch.Tensor:
        """Return the real tensor for a recorded one, as its storage is at this point."""
        storage = self.memory.get(ref.key)
        if storage is None:
            storage = self.memory[ref.key] = self._initial(ref.key)
        empty = torch.empty(0, dtype=ref.dtype, device=self.device)
        return empty.set_(storage, ref.offset, ref.shape, ref.stride)

    def _initial(self, key: Key) -> torch.UntypedStorage:
        real = self.recording.storages[key].real
        if real is None:
            raise PlacementError("was made by a call that a skeleton cannot record")
        # A copy: replaying twice must not share memory, nor write to what the caller owns.
        source = torch.empty(0, dtype=torch.uint8, device=real.device).set_(real.untyped_storage())
        return source.to(self.device, copy=True).untyped_storage()

    def run(self, call: Call) -> None:
        """Execute one recorded call and keep the storages that it makes."""
        if call.random and call.stream != self._stream:
            self._draw_from(call.stream)
        result = call.func(*self.value(call.args), **self.value(call.kwargs))
        for ref, tensor in zip(call.made, tensors_in(result) if call.made else (), strict=False):
            if ref is not None:
                self.memory[ref.key] = _laid_out(tensor, ref).untyped_storage()

    def _draw_from(self, stream: Key | None) -> None:
        """Go on with the random numbers after a seed of the constructor's, or with the caller's."""
        if self._stream is None:
            self._callers = torch.default_generator.get_state()
        if stream is None:
            torch.default_generator.set_state(self._callers)
        else:
            torch.manual_seed(self.recording.seeds[stream])
        self._stream = stream

    def _generator(self, recorded: GeneratorState) -> torch.Generator:
        """Return a generator like the constructor's, which stays as it is for the next replay."""
        made = self._generators.get(recorded.key)
        if made is None:
            made = self._generators[recorded.key] = torch.Generator(self.device)
            if self.device.type == "cpu":
                made.set_state(recorded.state)
            else:
                made.manual_seed(recorded.seed)  # a state belongs to one kind of device
        return made

    def close(self) -> None:
        """Leave the caller's random numbers as if the constructor had not seeded."""
        if self._stream is not None:
            self._draw_from(None)

    def value(self, value: Any) -> Any:
        """Return a recorded argument with real tensors, devices and generators in it."""
        kind = type(value)
        if kind is Ref:
            return self.tensor(value)
        if value is Device:
            return self.device
        if kind is GeneratorState:
            return self._generator(value)
        if kind is tuple or kind is list:
            return kind(self.value(item) for item in value)
        if kind is dict:
            return {key: self.value(item) for key, item in value.items()}
        return value


def _laid_out(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    """Return a tensor with the strides that meta predicted; kernels may choose others."""
    found = tensor.stride(), tensor.storage_offset(), tensor.dtype
    if found == (ref.stride, ref.offset, ref.dtype):
        return tensor
    made = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=tensor.device)
    return made.copy_(tensor)


def replay(
    recording: Recording, refs: Sequence[Ref], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Make tensors, yielding (position in `refs`, tensor) as each is finished.

    Calls run in the order in which the constructor made them, and when the whole module is asked
    for none is left out, not even those whose result was dropped (the head of a model that ties
    it): so the random numbers are those of plain construction with the same seed. What no later
    call needs is freed at once.
    """
    calls = recording.calls
    order = calls_behind(recording, [(ref.key, len(calls)) for ref in refs])
    if len(refs) == recording.tensors:
        needed = set(order)
        order = [at for at in range(len(calls)) if at in needed or _is_real(recording, calls[at])]
    last = {key: at for at in order for key in (*calls[at].reads, *calls[at].writes)}
    finishing: dict[int, list[int]] = {}
    for position, ref in enumerate(refs):
        finishing.setdefault(last.get(ref.key, -1), []).append(position)
    run = Run(recording, device)
    with undisturbed(device), closing(run):
        for position in finishing.get(-1, ()):
            yield position, run.tensor(refs[position])
        for at in order:
            call = calls[at]
            run.run(call)
            for position in finishing.get(at, ()):
                yield position, run.tensor(refs[position])
            for key in (*call.reads, *call.writes):
                if last[key] == at:
                    run.memory.pop(key, None)


def _is_real(recording: Recording, call: Call) -> bool:
    # On a meta device that it asked for itself, a constructor draws no numbers.
    return any(recording.storages[key].device != META for key in call.writes)


def calls_behind(recording: Recording, storages: Iterable[tuple[Key, int]]) -> list[int]:
    """Return positions of the calls that decide these storages' contents before these times."""
    needed: set[int] = set()
    known, writers = dict[Key, int](), recording.writers()
    todo = list(storages)
    while todo:
        key, before = todo.pop()
        if known.get(key, -1) >= before:
            continue
        known[key] = before
        for at in writers.get(key, ()):
            if at >= before:
                break
            if at not in needed:
                needed.add(at)
                call = recording.calls[at]
                todo += [(other, at) for other in (*call.reads, *call.writes)]
    return sorted(needed)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run recorded calls on a device, without gradients; nothing that other threads see changes."""
    with torch.no_grad(), ExitStack() as stack:
        if torch.get_default_device().type == "meta":
            # The initialisers that torch writes in Python make helpers on the default device.
            stack.enter_context(device)
        yield

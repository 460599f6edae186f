"""Runs what a `Recorder` wrote down, for some tensors only, on a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchlift._model.torch_private import unseen_storage
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
        source = torch.empty(0, dtype=torch.uint8, device=real.device).set_(unseen_storage(real))
        return unseen_storage(source.to(self.device, copy=True))

    def run(self, call: Call) -> None:
        """Execute one recorded call and keep the storages that it makes."""
        result = call.func(*self.value(call.args), **self.value(call.kwargs))
        for ref, tensor in zip(call.made, tensors_in(result) if call.made else (), strict=False):
            if ref is not None:
                self.memory[ref.key] = unseen_storage(_laid_out(tensor, ref))

    def run_in_order(
        self,
        order: Sequence[int],
        *,
        kept: Set[Key] = frozenset(),
        before: Callable[[int], None] = lambda at: None,
    ) -> Iterator[int]:
        """Execute calls, yield the position of each, and free memory that later ones do not need.

        Args:
            order: Positions of the calls.
            kept: Storages that are not freed.
            before: Function that gets each position before its call.
        """
        calls = self.recording.calls
        last = {key: at for at in order for key in (*calls[at].reads, *calls[at].writes)}
        for at in order:
            before(at)
            self.run(calls[at])
            yield at
            for key in (*calls[at].reads, *calls[at].writes):
                if last[key] == at and key not in kept:
                    self.memory.pop(key, None)

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
    """Return a tensor with the strides of the recording, since kernels may choose others."""
    found = tensor.stride(), tensor.storage_offset(), tensor.dtype
    if found == (ref.stride, ref.offset, ref.dtype):
        return tensor
    made = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=tensor.device)
    return made.copy_(tensor)


def replay(
    recording: Recording, refs: Sequence[Ref], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Make tensors, and yield (position in `refs`, tensor) when each is finished.

    Calls run in the order of the constructor. If `refs` are all tensors of the module, every call
    runs, also one whose result was dropped, such as the head of a model that ties it. The random
    numbers are then those of plain construction with the same seed. Memory that later calls do not
    need is freed at once.
    """
    calls = recording.calls
    order = recording.calls_behind([(ref.key, len(calls)) for ref in refs])
    if len(refs) == recording.tensors:
        needed = set(order)
        order = [at for at in range(len(calls)) if at in needed or is_real(recording, calls[at])]
    last = {key: at for at in order for key in (*calls[at].reads, *calls[at].writes)}
    finishing: dict[int, list[int]] = {}
    for position, ref in enumerate(refs):
        finishing.setdefault(last.get(ref.key, -1), []).append(position)
    run = Run(recording, device)
    with undisturbed(device):
        for position in finishing.get(-1, ()):
            yield position, run.tensor(refs[position])
        for at in run.run_in_order(order):
            for position in finishing.get(at, ()):
                yield position, run.tensor(refs[position])


def seeded_error(entry: str | None = None) -> PlacementError:
    """Return the error for random numbers that a constructor draws after it has seeded torch."""
    return PlacementError(
        "the constructor seeds torch's random numbers, which a skeleton cannot replay",
        entry=entry,
        hint="Draw from a generator instead: generator=torch.Generator().manual_seed(...). Or seed "
        "before torchlift.materialize or torchlift.load. Or build the model without "
        "torchlift.skeleton.",
    )


def lost_error(entry: str | None = None) -> PlacementError:
    """Return the error for memory that other code than torch has written to."""
    return PlacementError(
        "the constructor wrote to the memory of a tensor without torch, for example through NumPy",
        entry=entry,
        hint="Write with torch in the constructor. Copy an array: torch.tensor(array) instead of "
        "torch.from_numpy(array). Or build the model without torchlift.skeleton.",
    )


def is_real(recording: Recording, call: Call) -> bool:
    """Return whether a call makes or changes memory, as far as the constructor knows."""
    # On a meta device that it asked for itself, a constructor draws no numbers.
    return any(recording.storages[key].device != META for key in call.writes)


def state_of(device: torch.device) -> torch.Tensor:
    """Return the state of the default generator that a replay on a device draws from."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run recorded calls on a device, without gradients and without effect on other threads."""
    with torch.no_grad(), ExitStack() as stack:
        if torch.get_default_device().type == "meta":
            # The initialisers that torch writes in Python make helpers on the default device.
            stack.enter_context(device)
        yield

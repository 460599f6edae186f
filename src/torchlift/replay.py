"""Runs what a `Tape` recorded, for some tensors only, on a real device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchlift.calls import Device, Key, Op, Ref, tensors_in
from torchlift.errors import PlacementError
from torchlift.tape import Tape


class _Run:
    """Real memory for the storages of a tape, filled by running the calls that wrote them."""

    def __init__(self, tape: Tape, device: torch.device) -> None:
        self.tape = tape
        self.device = device
        self.memory: dict[Key, torch.UntypedStorage] = {}

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The real tensor for a recorded one, as its storage is at this point of the run."""
        storage = self.memory.get(ref.key)
        if storage is None:
            storage = self.memory[ref.key] = self._initial(ref.key)
        empty = torch.empty(0, dtype=ref.dtype, device=self.device)
        return empty.set_(storage, ref.offset, ref.shape, ref.stride)

    def _initial(self, key: Key) -> torch.UntypedStorage:
        real = self.tape.tracks[key].real
        if real is None:
            raise PlacementError("was made by a call that a skeleton cannot record")
        # A copy: replaying twice must not share memory, nor write to what the caller owns.
        source = torch.empty(0, dtype=torch.uint8).set_(real.untyped_storage())
        return source.to(self.device, copy=True).untyped_storage()

    def run(self, op: Op) -> None:
        """Execute one recorded call and keep the storages it makes."""
        result = op.call(*self.value(op.args), **self.value(op.kwargs))
        if not op.made:
            return
        for position, tensor in enumerate(tensors_in(result)):
            ref = op.made.get(position)
            if ref is not None:
                self.memory[ref.key] = _laid_out(tensor, ref).untyped_storage()

    def value(self, value: Any) -> Any:
        """A recorded argument with real tensors and devices in it."""
        kind = type(value)
        if kind is Ref:
            return self.tensor(value)
        if value is Device:
            return self.device
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
    tape: Tape, wanted: Sequence[Ref], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Make the wanted tensors, yielding (position in `wanted`, tensor) as each is finished.

    Calls run in the order in which the constructor made them, and when the whole module is wanted
    none is left out, not even those whose result was dropped (the head of a model that ties it): so
    the random numbers are those of plain construction with the same seed. What no later call needs
    is freed at once.
    """
    if len(wanted) == tape.tensors:
        calls: Sequence[int] = range(len(tape.ops))
    else:
        calls = _slice(tape, [(ref.key, len(tape.ops)) for ref in wanted])
    last: dict[Key, int] = {}
    for at in calls:
        for key in (*tape.ops[at].reads, *tape.ops[at].writes):
            last[key] = at
    finishing: dict[int, list[int]] = {}
    for position, ref in enumerate(wanted):
        finishing.setdefault(last.get(ref.key, -1), []).append(position)
    run = _Run(tape, device)
    with _quiet():
        for position in finishing.get(-1, ()):
            yield position, run.tensor(wanted[position])
        for at in calls:
            op = tape.ops[at]
            with _default_dtype(op.dtype):
                run.run(op)
            for position in finishing.get(at, ()):
                yield position, run.tensor(wanted[position])
            for key in (*op.reads, *op.writes):
                if last[key] == at:
                    run.memory.pop(key, None)


def _slice(tape: Tape, wanted: Iterable[tuple[Key, int]]) -> list[int]:
    """Positions of the calls that decide these storages' contents before these times, in order."""
    needed: set[int] = set()
    known: dict[Key, int] = {}
    todo = list(wanted)
    while todo:
        key, before = todo.pop()
        if known.get(key, -1) >= before:
            continue
        known[key] = before
        for at in tape.tracks[key].writers:
            if at >= before:
                break
            if at not in needed:
                needed.add(at)
                todo += [(read, at) for read in tape.ops[at].reads]
                todo += [(write, at) for write in tape.ops[at].writes]
    return sorted(needed)


def call_for_real(
    tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, list[tuple[torch.Tensor, int]]]:
    """One call on the CPU with real values, and its tensor arguments with their versions before.

    Random numbers drawn on the way are not taken from the caller's: asking does not change them.
    """
    run = _Run(tape, torch.device("cpu"))
    refs = list(_refs((args, kwargs)))
    with _quiet(), torch.random.fork_rng(devices=()):
        for at in _slice(tape, [(ref.key, len(tape.ops)) for ref in refs]):
            with _default_dtype(tape.ops[at].dtype):
                run.run(tape.ops[at])
        real_args, real_kwargs = run.value(args), run.value(kwargs)
        real = [(tensor, tensor._version) for tensor in tensors_in((real_args, real_kwargs))]
        return func(*real_args, **real_kwargs), real


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)


@contextmanager
def _quiet() -> Iterator[None]:
    # What the calls warn of (a no-op initialiser of an empty tensor) concerns construction.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
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

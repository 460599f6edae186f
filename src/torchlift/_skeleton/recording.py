"""The recording of a construction: a `Recorder` writes it and a replay reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

#: Tells storages of one recording apart: the address of a meta storage that lives as long as the
#: recorder does, or a negative number for a source of random numbers.
Key = int
META = torch.device("meta")


class Device:
    """Stands in a recorded call where a device was: replay puts its target there."""


class Ref(NamedTuple):
    """One tensor: a view of a storage.

    Attributes:
        key: which storage.
        dtype, shape, stride, offset: the view, in elements.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class GeneratorState(NamedTuple):
    """Stands in a recorded call where a generator of the constructor's own was.

    Attributes:
        key: A storage that every draw reads and writes, so that the order of draws is kept.
        seed, state: The state in which the constructor left the generator.
    """

    key: Key
    seed: int
    state: torch.Tensor


@dataclass(slots=True)
class Call:
    """One recorded call.

    Attributes:
        func: The function. Its arguments have `Ref` for a tensor and `Device` for a device.
        reads: Storages that it reads.
        writes: Storages that it makes or changes.
        made: Its tensor results in their order, or None for one without a storage of its own.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    made: tuple[Ref | None, ...]


class Storage(NamedTuple):
    """The facts about one storage, or about many equal ones.

    Attributes:
        device: The device that the constructor sees.
        real: The real tensor with this memory, if it came from outside of the torch API.
    """

    device: torch.device
    real: torch.Tensor | None = None


@dataclass
class Recording:
    """The calls of a construction, and the storages that they wrote.

    Attributes:
        calls: The calls, in the order of the constructor.
        storages: The facts about each storage.
        is_seeded: Whether the constructor seeded torch's default generator.
        lost: Storages with unknown values. torch did not make their memory, and other code wrote
            there after torch read it, or torch wrote through one of two views.
        tensors: Number of tensors of the finished module that these calls made.
    """

    calls: list[Call] = field(default_factory=list)
    storages: dict[Key, Storage] = field(default_factory=dict)
    is_seeded: bool = False
    lost: set[Key] = field(default_factory=set)
    tensors: int = 0
    _writers: dict[Key, list[int]] = field(default_factory=dict)
    _listed: int = 0

    def writers(self) -> dict[Key, list[int]]:
        """Return storage -> positions of the calls that wrote it. The list is made on first use."""
        for at in range(self._listed, len(self.calls)):
            for key in self.calls[at].writes:
                self._writers.setdefault(key, []).append(at)
        self._listed = len(self.calls)
        return self._writers

    def calls_behind(self, storages: Iterable[tuple[Key, int]]) -> list[int]:
        """Return positions of the calls that decide these storages' contents before these times."""
        needed: set[int] = set()
        known, writers = dict[Key, int](), self.writers()
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
                    call = self.calls[at]
                    todo += [(other, at) for other in (*call.reads, *call.writes)]
        return sorted(needed)

    def lost_behind(self, key: Key) -> set[Key]:
        """Return the storages with unknown values among a storage and those that it is made of."""
        if not self.lost:
            return set()
        behind = self.calls_behind([(key, len(self.calls))])
        return self.lost & {key, *(read for at in behind for read in self.calls[at].reads)}

    def new_source(self) -> Key:
        """Add a storage that stands for a source of random numbers: each draw writes it."""
        key = -len(self.storages) - 1
        self.storages[key] = Storage(META)
        return key


class Construction:
    """The construction of one tensor of a skeleton: a place in a recording.

    Attributes:
        recording: The recorded construction of the module.
        ref: The tensor in the recording.
        copy: An object for each deep copy of the module. Its tensors are made from the same place
            in the same recording, but must not share memory with the original's.
    """

    __slots__ = ("copy", "recording", "ref")

    def __init__(self, recording: Recording, ref: Ref, copy: object = None) -> None:
        self.recording = recording
        self.ref = ref
        self.copy = copy

    def __deepcopy__(self, memo: dict[Any, Any]) -> Construction:
        return Construction(self.recording, self.ref, memo.setdefault(Construction, object()))

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled skeleton is a plain module on meta: calls cannot be written to a file.
        return (type(None), ())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a call's arguments or result, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)

"""What a recorded call is made of: the data that a `Tape` writes and a replay reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Key = int
META = torch.device("meta")
#: Arguments of these types are recorded as they are; most are, so they are told apart first.
SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.memory_format})


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


class Draws(NamedTuple):
    """Stands in a recorded call where a generator of the constructor's own was.

    Attributes:
        key: a storage that every draw reads and writes, so that the order of draws is kept.
        seed, state: the generator as the constructor left it; recording draws nothing.
    """

    key: Key
    seed: int
    state: torch.Tensor


@dataclass(slots=True)
class Op:
    """One recorded call.

    Attributes:
        call: what to call; tensors among the arguments are `Ref`, devices `Device`.
        reads: storages it looks at.
        writes: storages it makes or changes.
        made: its tensor results with a storage of their own, by position among its results.
        dtype: torch's default dtype at the time.
        random: whether it draws from torch's default generator.
        stream: since which `Tape.seed` it draws, None if the constructor had not seeded.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    made: dict[int, Ref]
    dtype: torch.dtype
    random: bool = False
    stream: Key | None = None


@dataclass(slots=True)
class Track:
    """What a tape knows of one storage.

    Attributes:
        storage: the meta storage; holding it keeps its address, which is the key, from reuse.
        writers: positions in `Tape.ops` of the calls that wrote it.
        device: where the constructor believes it to be.
        real: the tensor whose memory it stands for, if it came from outside the torch API.
    """

    storage: torch.UntypedStorage
    device: torch.device
    writers: list[int] = field(default_factory=list)
    real: torch.Tensor | None = None


def key_of(tensor: torch.Tensor) -> Key | None:
    """What tells this tensor's storage from others, or None for tensors without one storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors and wrapper subclasses


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a call's result, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def keys_of(tensors: Iterable[torch.Tensor]) -> list[Key]:
    """The storages of those that have one."""
    return [key for key in map(key_of, tensors) if key is not None]


def version_of(tensor: torch.Tensor) -> int:
    """How often it has been written to."""
    return -1 if tensor.is_inference() else tensor._version


def device_from(asked: torch.device | str | int) -> torch.device:
    """A device by name or number; a number needs no accelerator here, unlike `torch.device`."""
    return torch.device("cuda", asked) if type(asked) is int else torch.device(asked)


class Randomness:
    """The sources of random numbers that a `Tape` has seen.

    Attributes:
        stream: the storage for torch's default generator since the constructor seeded it; None
            while it draws the caller's numbers, in whatever order a replay needs them.
        seeds: such storages -> the seed.
    """

    def __init__(self, tracks: dict[Key, Track]) -> None:
        self.stream: Key | None = None
        self.seeds: dict[Key, int] = {}
        self._tracks = tracks
        self._keys: set[Key] = set()
        self._generators: dict[torch.Generator, Draws] = {}

    def seed(self, seed: int | None) -> None:
        """The constructor seeds torch's default generator; None: it goes back to before."""
        self.stream = None
        if seed is not None:
            self.stream = self._order()
            self.seeds[self.stream] = seed

    def of(self, generator: torch.Generator) -> Draws:
        """What stands for a generator of the constructor's own, in the state that it is in."""
        state = generator.get_state()
        known = self._generators.get(generator)
        if known is None or not torch.equal(known.state, state):
            known = Draws(self._order(), generator.initial_seed(), state)
            self._generators[generator] = known
        return known

    def among(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Those of the storages that stand for random numbers."""
        return tuple(key for key in keys if key in self._keys)

    def _order(self) -> Key:
        storage = torch.empty(0, device=META).untyped_storage()
        key = int(storage._cdata)
        self._tracks[key] = Track(storage, META)
        self._keys.add(key)
        return key


class Recording:
    """What is known of a construction once it is over: the calls, and the storages they wrote.

    Attributes:
        ops: the calls, in order.
        tracks: what is known of each storage.
        tensors: how many tensors of the finished module were made by these calls.
        randomness: the sources of random numbers among them.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tracks: dict[Key, Track] = {}
        self.tensors = 0
        self.randomness = Randomness(self.tracks)

"""Where a constructor's random numbers come from: the caller's, those after a seed, a generator's.

Recording draws nothing. What a call will draw depends on the calls that draw before it from the
same place, and so each place is a storage (of no bytes) that every draw reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchlift.calls import META, Draws, Key, Track


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

"""The parent's side of a comparison: rounds of child processes, medians, one table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torchlift.bench.ways import WAYS, Way
from torchlift.formats import Index, read_index
from torchlift.measure import ChildError, in_child

_SETUP = """\
from torchlift.bench import loading
job = loading.prepare(*args)
way = getattr(loading, args[2])
"""
_CODE = "state = way(job)"
_FINISH = "result = loading.digest(state)"


@dataclass
class Result:
    """What one way took, one number per round.

    Attributes:
        way: the way.
        seconds: wall time of each round: opening, building on meta where it does that, loading.
        added_anonymous: peak of each round above what was there before, in bytes of RAM owned.
        added_file_backed: the same for page cache mapped, in bytes.
        digest: a checksum of what was loaded, see ``torchlift.bench.loading.digest``.
        error: why it failed, or "".
    """

    way: Way
    seconds: list[float] = field(default_factory=list)
    added_anonymous: list[float] = field(default_factory=list)
    added_file_backed: list[float] = field(default_factory=list)
    digest: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float:
        """Seconds of the middle round; nan when it failed."""
        return median(self.seconds) if self.seconds and not self.error else float("nan")


@dataclass(frozen=True)
class Comparison:
    """All ways on one file. ``str()`` gives a table, `to_dict` what JSON can hold.

    Attributes:
        path: the checkpoint.
        format: its format.
        tensors: how many tensors it has.
        nbytes: bytes of unique storage.
        cold: whether the file's pages were dropped from the page cache before each run.
        baseline: name of the way that the others are compared with.
        results: name -> result, in the order of `torchlift.bench.WAYS`.
    """

    path: str
    format: str
    tensors: int
    nbytes: int
    cold: bool
    baseline: str
    results: dict[str, Result]

    @property
    def different(self) -> list[str]:
        """Names of the ways whose values are not the baseline's; a cast is allowed for."""
        loaded = {n: r for n, r in self.results.items() if r.digest and not r.error}
        reference = loaded.get(self.baseline) or next(iter(loaded.values()), None)
        if reference is None:
            return []
        found = []
        for name, result in loaded.items():
            kind = result.way.cast or reference.way.cast or "exact"
            if result.digest[kind] != reference.digest[kind]:
                found.append(name)
        return found

    def speedup(self, name: str) -> float:
        """How many times faster than the baseline; nan when one of the two failed."""
        return self.results[self.baseline].median / self.results[name].median

    def to_dict(self) -> dict[str, Any]:
        """Plain data: sizes in bytes, times in seconds, every round on its own."""
        return {
            "path": self.path,
            "format": self.format,
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "cold": self.cold,
            "baseline": self.baseline,
            "different": self.different,
            "results": {name: self._row(name) for name in self.results},
        }

    def _row(self, name: str) -> dict[str, Any]:
        result = self.results[name]
        return {
            "summary": result.way.summary,
            "median_seconds": result.median,
            "seconds": result.seconds,
            "speedup": self.speedup(name),
            "bytes_per_second": self.nbytes / result.median if result.way.reads else None,
            "added_anonymous": result.added_anonymous,
            "added_file_backed": result.added_file_backed,
            "error": result.error,
        }

    def __str__(self) -> str:
        rounds = max((len(result.seconds) for result in self.results.values()), default=0)
        lines = [
            f"{self.path}: {self.format}, {self.tensors} tensors, {self.nbytes / 1e6:.1f} MB; "
            f"{'cold' if self.cold else 'warm'} page cache, {rounds} rounds",
            f"{'way':<39}{'median s':>10}{'best s':>9}{'speed':>8}{'MB/s':>8}  peak anonymous",
        ]
        lines += [self._line(name) for name in self.results]
        lines.append(f"speed: medians compared with {self.results[self.baseline].way.summary}")
        if self.different:
            lines.append(f"different values loaded by: {', '.join(self.different)}")
        else:
            lines.append("all ways loaded equal values (some elements of every tensor compared)")
        return "\n".join(lines)

    def _line(self, name: str) -> str:
        result = self.results[name]
        if result.error:
            return f"{result.way.summary:<40}  failed: {result.error}"
        rate = f"{self.nbytes / 1e6 / result.median:.0f}" if result.way.reads else "mapped"
        return (
            f"{result.way.summary:<39}{result.median:>10.4f}{min(result.seconds):>9.4f}"
            f"{_times(self.speedup(name)):>8}{rate:>8}"
            f"{max(result.added_anonymous) / 2**20:>12.1f} MiB"
        )


def _times(speed: float) -> str:
    return f"{speed:.2g}x" if speed < 1 else f"{speed:.1f}x" if speed < 100 else f"{speed:.0f}x"


def compare(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    only: Iterable[str] | None = None,
    baseline: str | None = None,
    repeat: int = 5,
    cold: bool = False,
    timeout: float = 600.0,
    on_run: Callable[[Result, int], object] | None = None,
) -> Comparison:
    """Load a checkpoint in every way that fits it, each time in a fresh process.

    The ways take turns, round after round, so that a machine that slows down slows all of them.
    Imports are not part of the time, and neither is the check that all ways loaded equal values.
    Where a way needs a model, one is made up from the names and shapes in the file.

    Args:
        path: a checkpoint that `torchlift.open` reads.
        root: load only this container of it.
        only: names of `torchlift.bench.WAYS`; None takes all that can read the file.
        baseline: name of the way to compare with; None takes the first.
        repeat: number of rounds.
        cold: drop the file from the page cache before each run (Linux); otherwise it is read once
            beforehand, so that every run finds it there.
        timeout: seconds per run.
        on_run: called with the result so far and the round after every run.

    Returns:
        times, memory and what was loaded.

    Raises:
        FormatError: not a checkpoint that torchlift reads.
        ValueError: an unknown name, or no way is left.

    Example:
        >>> import os, tempfile
        >>> from torchlift import bench
        >>> path = os.path.join(tempfile.mkdtemp(), "small.pt")
        >>> _ = bench.make_checkpoint(path, nbytes=1 << 20, tensors=4)
        >>> result = bench.compare(path, only=["torch-load", "torchlift-mmap"], repeat=1)
        >>> sorted(result.results), result.different
        (['torch-load', 'torchlift-mmap'], [])
    """
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, not {repeat}")
    index = read_index(path)
    ways = _select(index.format, only, baseline)
    if not cold:
        _warm(index)
    results = {way.name: Result(way) for way in ways}
    for turn in range(repeat):
        for result in results.values():
            if not result.error:
                _run(result, os.fspath(path), root, cold, timeout)
                if on_run is not None:
                    on_run(result, turn)
    first = baseline or ways[0].name
    return Comparison(
        index.path, index.format, len(index.entries), index.nbytes, cold, first, results
    )


def _select(format: str, only: Iterable[str] | None, baseline: str | None) -> Sequence[Way]:
    names = None if only is None else [*only]
    known = [way.name for way in WAYS]
    for name in [*(names or ()), *([baseline] if baseline else ())]:
        if name not in known:
            raise ValueError(f"there is no way called {name!r}; there are {', '.join(known)}")
    wanted = set(known if names is None else names) | ({baseline} if baseline else set())
    ways = [way for way in WAYS if way.name in wanted and way.supports(format)]
    missing = (set(names or ()) | ({baseline} if baseline else set())) - {way.name for way in ways}
    if missing:
        why = f"cannot read a {format} checkpoint here"
        raise ValueError(f"{', '.join(sorted(missing))} {why}")
    if not ways:
        raise ValueError("there is nothing to compare: no way was asked for")
    return ways


def _run(result: Result, path: str, root: str | None, cold: bool, timeout: float) -> None:
    way = result.way
    args = (path, root, way.function, way.needs, cold)
    try:
        child = in_child(_CODE, *args, setup=_SETUP, finish=_FINISH, timeout=timeout)
    except ChildError as error:
        result.error = _reason(str(error))
        return
    result.seconds.append(child.seconds)
    result.added_anonymous.append(child.memory.added_anonymous)
    result.added_file_backed.append(child.memory.added_file_backed)
    result.digest = child.value


def _reason(text: str) -> str:
    """The line of a traceback that says what happened; long messages go on below it."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1]


def _warm(index: Index) -> None:
    buffer = bytearray(8 << 20)
    for name in index.files:
        with open(name, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

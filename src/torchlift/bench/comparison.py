"""The ways to load, and the parent's side of comparing them: rounds of processes, one table.

This does not import torch: what each way does is in ``loading``, which the child processes import.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal

from torchlift.formats import Index, read_index
from torchlift.measure import ChildError, in_child, memory


@dataclass(frozen=True)
class Way:
    """One way to get a checkpoint's tensors into memory.

    Attributes:
        name: what ``--only`` selects.
        summary: what it does, for a reader.
        function: its name in ``torchlift.bench.loading``; called with a ``Job``, it returns the
            loaded module or state dict, or None where there is nothing to compare.
        formats: values of ``Index.format`` that it reads; empty for all.
        package: a package that it needs and torchlift does not.
        reads: whether every byte is in memory afterwards. A mapped checkpoint is read as it is
            used, so its megabytes per second would mean nothing.
        cast: ``"bfloat16"`` where floating-point numbers are cast to it.
    """

    name: str
    summary: str
    function: str
    formats: tuple[str, ...] = ()
    package: str = ""
    reads: bool = True
    cast: Literal["", "bfloat16"] = ""

    def supports(self, format: str) -> bool:
        """Return whether it reads this format and what it needs is installed."""
        installed = not self.package or find_spec(self.package) is not None
        return installed and (not self.formats or format in self.formats)


_TORCH = ("torch-zip", "torch-legacy")
_SAFE, _PACKAGE = ("safetensors",), "safetensors"

#: In the order of the report; the first one that reads the file is the baseline.
WAYS: tuple[Way, ...] = (
    Way("torch-load", "torch.load", "torch_load", _TORCH),
    Way("safetensors-clone", "load_file + clone", "safetensors_clone", _SAFE, _PACKAGE),
    Way("safetensors-file", "load_file", "safetensors_file", _SAFE, _PACKAGE, reads=False),
    Way("torch-build", "build + torch.load + load_state_dict", "torch_build", _TORCH),
    Way("torch-assign", "torch.load + meta + assign", "torch_assign", _TORCH),
    Way("torch-mmap", "torch.load(mmap=True) + meta + assign", "torch_mmap", _TORCH, reads=False),
    Way("safetensors-model", "build + load_model", "safetensors_model", _SAFE, _PACKAGE),
    Way("torchlift-mmap", 'torchlift.load(source="mmap")', "torchlift_mmap", reads=False),
    Way("torchlift-read", 'torchlift.load(source="read")', "torchlift_read"),
    Way("torchlift-bf16", "torchlift.load(dtype=bfloat16)", "torchlift_bf16", cast="bfloat16"),
    Way("limit-read", "raw read into warm buffers", "limit_read"),
    Way("limit-copy", "raw copy between warm buffers", "limit_copy"),
)


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

    def has_values_of(self, other: Result) -> bool:
        """Return whether both loaded the same values, cast if one of them casts."""
        kind = self.way.cast or other.way.cast or "exact"
        return self.digest[kind] == other.digest[kind]


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
        return [n for n, r in loaded.items() if reference and not r.has_values_of(reference)]

    def speedup(self, name: str) -> float:
        """Return how many times faster than the baseline it is; nan when one of the two failed."""
        return self.results[self.baseline].median / self.results[name].median

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: sizes in bytes, times in seconds, every round on its own."""
        results = {name: self._row(name) for name in self.results}
        return {**vars(self), "different": self.different, "results": results}

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
    """Load a checkpoint in every way that fits it, each time in a new process.

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
    reference = baseline or ways[0].name
    tensors, nbytes = len(index.entries), index.nbytes
    return Comparison(index.path, index.format, tensors, nbytes, cold, reference, results)


def _select(format: str, only: Iterable[str] | None, baseline: str | None) -> list[Way]:
    """Return the ways that are named, or all that can read the format."""
    known = {way.name: way for way in WAYS}
    if only is None:
        only = [way.name for way in WAYS if way.supports(format)]
    names = [*only, *([baseline] if baseline else [])]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no way called {name!r}; there are {', '.join(known)}")
        if not known[name].supports(format):
            reads, package = " or ".join(known[name].formats), known[name].package
            needs = f" with the package {package} installed" if package else ""
            raise ValueError(f"{name} cannot read a {format} checkpoint: it reads {reads}{needs}")
    if not names:
        raise ValueError("there is nothing to compare: no way was asked for")
    return [way for way in WAYS if way.name in names]


def _run(result: Result, path: str, root: str | None, cold: bool, timeout: float) -> None:
    way = result.way
    args = (path, root, way.function, way.package, cold)
    try:
        seconds, anonymous, mapped, digest = in_child(_load, *args, timeout=timeout).value
    except ChildError as error:
        result.error = _reason(str(error))
        return
    result.seconds.append(seconds)
    result.added_anonymous.append(anonymous)
    result.added_file_backed.append(mapped)
    result.digest = digest


def _load(
    path: str, root: str | None, function: str, package: str, cold: bool
) -> tuple[float, float, float, dict[str, str]]:
    """Load in one way, in the child; return seconds, anonymous and mapped bytes, the digest."""
    from torchlift.bench import loading

    job = loading.prepare(path, root, function, package, cold)
    way = getattr(loading, function)
    with memory(sampler="process") as use:
        start = time.perf_counter()
        state = way(job)
        seconds = time.perf_counter() - start
    return seconds, use.added_anonymous, use.added_file_backed, loading.digest(state)


def _reason(text: str) -> str:
    """Return the line of a traceback that names the error; long messages go on below it."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1]


def _warm(index: Index) -> None:
    for name in index.files:
        with open(name, "rb", buffering=0) as file:
            while file.read(8 << 20):
                pass

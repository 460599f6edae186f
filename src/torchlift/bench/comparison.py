"""Compare ways to load: run each in child processes, and make a table.

This process does not import torch. The child processes do.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torchlift._store.places import is_url, place_of
from torchlift.bench import machine
from torchlift.bench.ways import WAYS, Task, Way
from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index
from torchlift.measure import ChildError, in_child, memory


@dataclass
class Result:
    """Time and memory of one way, one number for each round.

    Attributes:
        way: The way.
        seconds: Wall time to open the file, build the model and load it.
        added_anonymous: Peak of anonymous memory above the start, in bytes.
        added_file_backed: Peak of file-backed memory above the start, in bytes.
        digest: Checksums of the loaded values. See ``torchlift.bench.loading.digest``.
        error: Reason of a failure, or an empty text.
        cached: Bytes of the files in the page cache at the start. nan if it is not known.
    """

    way: Way
    seconds: list[float] = field(default_factory=list)
    added_anonymous: list[float] = field(default_factory=list)
    added_file_backed: list[float] = field(default_factory=list)
    digest: dict[str, str] = field(default_factory=dict)
    error: str = ""
    cached: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the seconds. nan if a run failed."""
        return median(self.seconds) if self.seconds and not self.error else float("nan")

    def has_values_of(self, other: Result) -> bool:
        """Return whether both loaded the same values, cast if one of them casts."""
        kind = self.way.cast or other.way.cast or "exact"
        return self.digest[kind] == other.digest[kind]


@dataclass(frozen=True)
class Comparison:
    """The results of all ways on one file. ``str()`` gives a table, `to_dict` plain data.

    Attributes:
        path: Path of the checkpoint.
        format: Format of the checkpoint.
        tensors: Number of tensors.
        nbytes: Bytes of unique storage.
        cold: Whether the file was dropped from the page cache before each run.
        baseline: Name of the way that the others are compared with.
        results: Name -> result, in the order of `torchlift.bench.WAYS`.
        device: Device that the tensors were loaded to.
        cast: Dtype of floating-point tensors in all ways, or an empty text.
        machine: Cores, memory in bytes, system, and versions of the packages.
    """

    path: str
    format: str
    tensors: int
    nbytes: int
    cold: bool
    baseline: str
    results: dict[str, Result]
    device: str = "cpu"
    cast: str = ""
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def different(self) -> list[str]:
        """Names of the ways that loaded other values than the baseline, apart from a cast."""
        loaded = {n: r for n, r in self.results.items() if r.digest and not r.error}
        reference = loaded.get(self.baseline) or next(iter(loaded.values()), None)
        return [n for n, r in loaded.items() if reference and not r.has_values_of(reference)]

    def speedup(self, name: str) -> float:
        """Return the speed relative to the baseline. nan if one of the two failed."""
        return self.results[self.baseline].median / self.results[name].median

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: sizes in bytes, and times in seconds for every round."""
        results = {name: self._row(name) for name in self.results}
        return {**vars(self), "different": self.different, "results": results}

    def _row(self, name: str) -> dict[str, Any]:
        result = self.results[name]
        return {
            "summary": result.way.summary,
            "median_seconds": result.median,
            "seconds": result.seconds,
            "speedup": self.speedup(name),
            "bytes_per_second": self._rate(result),
            "added_anonymous": result.added_anonymous,
            "added_file_backed": result.added_file_backed,
            "cached": [None if n != n else n for n in result.cached],
            "error": result.error,
        }

    def _rate(self, result: Result) -> float | None:
        """Return bytes per second, or None if the way only maps the file."""
        reads = result.way.reads or self.cast or self.device != "cpu"
        return self.nbytes / result.median if reads else None

    def __str__(self) -> str:
        rounds = max((len(result.seconds) for result in self.results.values()), default=0)
        to = "" if self.device == "cpu" else f", to {self.device}"
        to += f", cast to {self.cast}" if self.cast else ""
        lines = [
            f"{self.path}: {self.format}, {self.tensors} tensors, {self.nbytes / 1e6:.1f} MB{to}; "
            f"{'cold' if self.cold else 'warm'} page cache, {rounds} rounds",
            f"{'way':<39}{'median s':>10}{'lowest - highest':>18}{'speed':>8}{'MB/s':>8}"
            "  peak anonymous",
        ]
        lines += [self._line(name) for name in self.results]
        lines.append(f"speed: medians compared with {self.results[self.baseline].way.summary}")
        lines.append(self._cache_line())
        if self.different:
            lines.append(f"different values loaded by: {', '.join(self.different)}")
        else:
            lines.append("all ways loaded equal values (some elements of every tensor compared)")
        return "\n".join(lines)

    def _line(self, name: str) -> str:
        result = self.results[name]
        if result.error:
            return f"{result.way.summary:<40}  failed: {result.error}"
        found = self._rate(result)
        rate = f"{found / 1e6:.0f}" if found else "mapped"
        spread = f"{min(result.seconds):.4f} - {max(result.seconds):.4f}"
        return (
            f"{result.way.summary:<39}{result.median:>10.4f}{spread:>18}"
            f"{_times(self.speedup(name)):>8}{rate:>8}"
            f"{max(result.added_anonymous) / 2**20:>12.1f} MiB"
        )

    def _cache_line(self) -> str:
        """Describe the state of the page cache at the start of the runs."""
        how = "fsync and posix_fadvise(DONTNEED)" if self.cold else "a read of all files"
        counted = [n for result in self.results.values() for n in result.cached if n == n]
        if not counted:
            return f"page cache: after {how}; what was in it then could not be counted"
        least, most = min(counted) / 1e6, max(counted) / 1e6
        return f"page cache: after {how}, {least:.1f} to {most:.1f} MB of the files were in it"


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
    cast: str = "",
    device: str = "cpu",
    ways: Sequence[Way] = WAYS,
    timeout: float = 600.0,
    on_run: Callable[[Result, int], object] | None = None,
) -> Comparison:
    """Load a checkpoint in every way that fits it, each time in a new process.

    The ways take turns in each round, so a machine that slows down affects all of them. The time
    does not include imports, nor the check that all ways loaded equal values. If a way needs a
    model, it is made from the names and shapes in the file.

    Args:
        path: A checkpoint that `torchlift.open` reads.
        root: Container to load. See :ref:`arg-root`.
        only: Names of `torchlift.bench.WAYS`. Default: all that can read the file.
        baseline: Name of the way to compare with. Default: the first.
        repeat: Number of rounds.
        cold: Whether to drop the file from the page cache before each run (Linux). Default: the
            file is read once at the start, so that every run finds it in the page cache.
        cast: Dtype of floating-point tensors in every way, such as ``"bfloat16"``.
        device: Device to load to, such as ``"cuda"``.
        ways: The ways to choose from. Add a `Way` of your own to compare your loader.
        timeout: Seconds per run.
        on_run: Function of the result so far and the round, called after every run.

    Returns:
        Times, memory and checksums of all ways.

    Raises:
        FormatError: If torchlift cannot read the checkpoint.
        ValueError: If a name is not known, or no way can read the file.

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
    if is_url(path):
        raise FormatError(
            "a URL cannot be compared, because most loaders cannot read it",
            file=place_of(path),
            hint="Copy the file to this machine first.",
        )
    index = read_index(path)
    kind = _kind(index)
    chosen = _select(ways, kind, only, baseline, device, cast)
    if not cold:
        _warm(index)
    results = {way.name: Result(way) for way in chosen}
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-", dir=_near(index.path)) as scratch:
        task = Task(os.fspath(path), root, index.nbytes, scratch, cold, device, cast)
        for turn in range(repeat):
            for result in results.values():
                if not result.error:
                    _run(result, task, timeout)
                    if on_run is not None:
                        on_run(result, turn)
    return Comparison(
        index.path,
        index.format,
        len(index.entries),
        index.nbytes,
        cold,
        baseline or chosen[0].name,
        results,
        device,
        cast,
        machine.describe(["torch", *sorted({way.package for way in chosen} - {""})]),
    )


def _kind(index: Index) -> str:
    """Return the format. Shards that are torch files are ``"sharded-torch"``."""
    safe = all(name.endswith(".safetensors") for name in index.files)
    return index.format if index.format != "sharded" or safe else "sharded-torch"


def _near(path: str) -> str | None:
    """Return the folder of a checkpoint, which is on the same disk, or None if it is read-only."""
    folder = os.path.dirname(os.path.abspath(path))
    return folder if os.access(folder, os.W_OK) else None


def _select(
    ways: Sequence[Way],
    format: str,
    only: Iterable[str] | None,
    baseline: str | None,
    device: str,
    cast: str,
) -> list[Way]:
    """Select the ways by name, or all that can read the format."""
    known = {way.name: way for way in ways}
    if only is None:
        only = [way.name for way in ways if not way.obstacle(format, device, cast)]
    names = [*only, *([baseline] if baseline else [])]
    for name in names:
        if name not in known:
            more = ". tools/bench.py in torchlift's repository has more libraries"
            raise ValueError(
                f"{name!r} is not a known way. Known: {', '.join(known)}"
                f"{more if ways is WAYS else ''}"
            )
        why = known[name].obstacle(format, device, cast)
        if why:
            raise ValueError(f"{name} cannot read a {format} checkpoint here: {why}")
    if not names:
        raise ValueError("only= is empty. Pass the name of a way")
    return [way for way in ways if way.name in names]


def _run(result: Result, task: Task, timeout: float) -> None:
    """Run a way in a child and record its time and memory, or the reason of a failure."""
    try:
        measured = in_child(_measure, result.way, task, timeout=timeout).value
    except ChildError as error:
        result.error = _reason(str(error))
        return
    result.digest = measured.pop("digest")
    for name, number in measured.items():
        getattr(result, name).append(number)


def _measure(way: Way, task: Task) -> dict[str, Any]:
    """Load in the child, and return the fields of a `Result` for one round."""
    from torchlift.bench import loading

    job = loading.Job(task)
    run = loading.prepare(way, job)
    if task.cold:
        machine.drop_pages(job.files)
    cached = machine.cached_bytes(job.files)
    with memory(sampler="process") as use:
        start = time.perf_counter()
        state = run()
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "added_anonymous": use.added_anonymous,
        "added_file_backed": use.added_file_backed,
        "cached": cached,
        "digest": loading.digest(state),
    }


def _reason(text: str) -> str:
    """Return the line of a traceback that names the error. A long message continues below it."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1]


def _warm(index: Index) -> None:
    for name in index.files:
        with open(name, "rb", buffering=0) as file:
            while file.read(8 << 20):
                pass

"""Compare ways to load: run each in child processes, and make a table.

This process does not import torch. The child processes do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torchlift._store.places import is_url, place_of
from torchlift._system.memory import c_function
from torchlift._system.text import printable
from torchlift.bench.ways import WAYS, Way
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
        cached: Bytes of the files in the page cache at the start. nan if it is not known.
        digest: Checksum of the loaded values. See ``torchlift.bench.loading.digest``.
        error: Reason of a failure, or an empty text.
    """

    way: Way
    seconds: list[float] = field(default_factory=list)
    added_anonymous: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    digest: str = ""
    error: str = ""

    @property
    def median(self) -> float:
        """Median of the seconds. nan if a run failed."""
        return median(self.seconds) if self.seconds and not self.error else float("nan")


@dataclass(frozen=True)
class Comparison:
    """The results of all ways on one file. ``str()`` gives a table, `to_dict` plain data.

    Attributes:
        path: Path of the checkpoint.
        format: Format of the checkpoint.
        tensors: Number of tensors.
        nbytes: Bytes of unique storage.
        cold: Whether the file was dropped from the page cache before each run.
        results: Name -> result, in the order of the ways. The first is the baseline.
        device: Device that the tensors were loaded to.
        cast: Dtype of floating-point tensors in all ways, or an empty text.
    """

    path: str
    format: str
    tensors: int
    nbytes: int
    cold: bool
    results: dict[str, Result]
    device: str = "cpu"
    cast: str = ""

    @property
    def different(self) -> list[str]:
        """Names of the ways that loaded other values than the first way did."""
        loaded = {n: r.digest for n, r in self.results.items() if r.digest and not r.error}
        reference = next(iter(loaded.values()), "")
        return [name for name, digest in loaded.items() if digest != reference]

    def speedup(self, name: str) -> float:
        """Return the speed relative to the first way. nan if one of the two failed."""
        return next(iter(self.results.values())).median / self.results[name].median

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: sizes in bytes, and times in seconds for every round."""
        results = {
            name: {
                "summary": result.way.summary,
                "median_seconds": result.median,
                "seconds": result.seconds,
                "speedup": self.speedup(name),
                "bytes_per_second": self._rate(result),
                "added_anonymous": result.added_anonymous,
                "cached": [None if n != n else n for n in result.cached],
                "error": result.error,
            }
            for name, result in self.results.items()
        }
        return {**vars(self), "different": self.different, "results": results}

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
        lines.append(
            f"speed: medians compared with {next(iter(self.results.values())).way.summary}"
        )
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
            f"{self.speedup(name):>7.3g}x{rate:>8}"
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


def compare(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    only: Iterable[str] | None = None,
    repeat: int = 5,
    cold: bool = False,
    cast: str = "",
    device: str = "cpu",
    ways: Sequence[Way] = WAYS,
    progress: bool = False,
) -> Comparison:
    """Load a checkpoint in every way that fits it, each time in a new process.

    The ways take turns in each round, so a machine that slows down affects all of them. The time
    does not include imports, nor the check that all ways loaded equal values. If a way needs a
    model, it is made from the names and shapes in the file.

    Args:
        path: A checkpoint that `torchlift.open` reads.
        root: Container to load. See :ref:`arg-root`.
        only: Names of `torchlift.bench.WAYS`. Default: all that can read the file.
        repeat: Number of rounds.
        cold: Whether to drop the file from the page cache before each run (Linux). Default: the
            file is read once at the start, so that every run finds it in the page cache.
        cast: Dtype of floating-point tensors in every way, such as ``"bfloat16"``.
        device: Device to load to, such as ``"cuda"``.
        ways: The ways to choose from. Add a `Way` of your own to compare your loader.
        progress: Whether to print a line on stderr after each run.

    Returns:
        Times, memory and checksums of all ways.

    Raises:
        FormatError: If torchlift cannot read the checkpoint.
        ValueError: If a name is not known, or no way can read the file.

    Example:
        >>> import os, tempfile, torch
        >>> from torchlift import bench
        >>> path = os.path.join(tempfile.mkdtemp(), "small.pt")
        >>> torch.save({"weight": torch.ones(256, 256)}, path)
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
    chosen = _select(ways, _kind(index), only, device, cast)
    if not cold:
        _warm(index)
    results = {way.name: Result(way) for way in chosen}
    for turn in range(repeat):
        for result in results.values():
            if not result.error:
                _run(result, place_of(path), root, cold, device, cast)
                if progress:
                    _print_progress(result, turn)
    size = len(index.entries), index.nbytes
    return Comparison(index.path, index.format, *size, cold, results, device, cast)


def _print_progress(result: Result, turn: int) -> None:
    outcome = result.error or f"{result.seconds[-1]:.4f} s"
    print(printable(f"round {turn + 1}: {result.way.summary}: {outcome}"), file=sys.stderr)


def _kind(index: Index) -> str:
    """Return the format. Shards that are torch files are ``"sharded-torch"``."""
    safe = all(name.endswith(".safetensors") for name in index.files)
    return index.format if index.format != "sharded" or safe else "sharded-torch"


def _select(
    ways: Sequence[Way], format: str, only: Iterable[str] | None, device: str, cast: str
) -> list[Way]:
    """Select the ways by name, or all that can read the format."""
    if only is None:
        return [way for way in ways if not way.obstacle(format, device, cast)]
    known = {way.name: way for way in ways}
    names = [*only]
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


def _run(result: Result, path: str, root: str | None, cold: bool, device: str, cast: str) -> None:
    """Run a way in a child and record its time and memory, or the reason of a failure."""
    try:
        measured: Result = in_child(_measure, result.way, path, root, cold, device, cast).value
    except ChildError as error:
        result.error = _reason(str(error))
        return
    result.seconds += measured.seconds
    result.added_anonymous += measured.added_anonymous
    result.cached += measured.cached
    result.digest = measured.digest


def _measure(way: Way, path: str, root: str | None, cold: bool, device: str, cast: str) -> Result:
    """Load in the child, and return the result of one round."""
    from torchlift.bench import loading

    job = loading.Job(path, root, device, cast)
    run = loading.prepare(way, job)
    if cold:
        drop_pages(job.files)
    cached = cached_bytes(job.files)
    with memory() as use:
        start = time.perf_counter()
        state = run()
        seconds = time.perf_counter() - start
    return Result(way, [seconds], [use.added_anonymous], [cached], loading.digest(state))


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


# ---- the page cache


def drop_pages(files: Sequence[str]) -> None:
    """Drop the files from the page cache.

    Raises:
        OSError: If the operating system cannot do this.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError(
            "this operating system cannot drop a file from the page cache. Leave out --cold"
        )
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the kernel cannot drop pages that are not written yet
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_bytes(files: Sequence[str]) -> float:
    """Count the bytes of the files that are in the page cache, or return nan if it is not known.

    mincore counts them on a private map. It reports every page of a file that the user may not
    write to as resident, so the result for such a file is nan.
    """
    return float(sum(_count_cached(file) for file in files))


def _count_cached(name: str) -> float:
    size = os.path.getsize(name)
    if not size:
        return 0.0
    if platform.system() != "Linux" or not os.access(name, os.W_OK):
        return float("nan")
    pages = bytearray(-(-size // mmap.PAGESIZE))
    flags = (ctypes.c_char * len(pages)).from_buffer(pages)
    with open(name, "rb") as file:
        # A private map that nobody writes to: ctypes cannot take the address of a read-only map.
        area = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    first = ctypes.c_char.from_buffer(area)
    failed = c_function("mincore")(ctypes.byref(first), ctypes.c_size_t(size), flags)
    resident = sum(page & 1 for page in pages)
    return float("nan") if failed else float(min(resident * mmap.PAGESIZE, size))

"""Reading a process's memory from the kernel, many times a second, in bounded space.

Standard library only, and importable without the package around it: `meter` also starts this very
file as a script, as the helper process that watches from outside.

What was measured (2 cores, Linux 6.18), and why it is done this way:

- One read of ``/proc/PID/status`` through a descriptor that stays open takes 7 us and 1 us to
  parse. ``statm`` takes 1 us but adds shared memory to file-backed memory. ``smaps_rollup`` walks
  the page tables: 110 us for an empty process, 8.8 ms per GiB in use, so it is not used.
- Kernels 6.2 to 6.16 keep the counters per CPU and add them up approximately: off by at most
  ``max(32, 2 x CPUs) x CPUs`` pages, which is 256 KiB with 2 CPUs and 32 MiB with 64. Newer ones
  add up exactly: 16,384 single-page touches by a thread that moved between CPUs gave error 0.
"""

from __future__ import annotations

import marshal
import os
import re
import select
import sys
import time
from array import array
from typing import IO, NamedTuple

_FIELDS = (b"VmHWM", b"RssAnon", b"RssFile", b"RssShmem")
_PATTERN = re.compile(rb"\n(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB")
_WIDTH = 4  # numbers per sample


class Sample(NamedTuple):
    """Resident memory at one moment.

    Attributes:
        seconds: when; since the start of the block in a timeline, on the clock of
            `time.monotonic` in a snapshot.
        anonymous: bytes of RAM the process owns. Pages in swap are not counted.
        file_backed: bytes of page cache it maps: the kernel may drop and reread them.
        shared: bytes of shared memory it maps (tmpfs, ``share_memory_()``).
    """

    seconds: float
    anonymous: float
    file_backed: float
    shared: float

    @property
    def resident(self) -> float:
        """All of it, in bytes."""
        return self.anonymous + self.file_backed + self.shared


class Reader:
    """An open view of one process's memory counters; the calling process's when pid is None.

    Where the operating system has no ``/proc``, every number is nan: it cannot be known there which
    part of the memory is owned and which is mapped, and a guess would pass for a measurement.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.open(f"/proc/{pid or 'self'}/status", os.O_RDONLY)
        except OSError:
            if os.path.exists("/proc/self/status"):
                raise

    def read(self) -> tuple[Sample, float]:
        """Take a sample.

        Returns:
            the sample, and the largest resident size the process ever had, in bytes.

        Raises:
            ProcessLookupError: the process is gone.
        """
        if self._fd is None:
            nan = float("nan")
            return Sample(time.monotonic(), nan, nan, nan), nan
        # A user in hundreds of groups pushes the lines down by kilobytes.
        found = dict(_PATTERN.findall(os.pread(self._fd, 1 << 16, 0)))
        if len(found) < len(_FIELDS):  # a zombie has no memory lines
            raise ProcessLookupError("the process has no memory any more")
        high, anonymous, file_backed, shared = (int(found[name]) * 1024 for name in _FIELDS)
        return Sample(time.monotonic(), anonymous, file_backed, shared), high

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Timeline:
    """Samples in order, at most ``limit`` of them however long it runs, with exact peaks.

    An hour at one sample per millisecond as Python objects would take 700 MB, which the thing
    measured would then be blamed for. A run of equal samples is stored as its two ends. When the
    limit is reached, of each two neighbours the larger survives, and from then on of each
    2, 4, 8... new ones. Peaks are kept apart and miss no sample.
    """

    def __init__(self, limit: int = 4096) -> None:
        self.peaks = [float("-inf")] * _WIDTH  # resident, anonymous, file-backed, shared
        self.high = 0.0
        self._limit = limit
        self._rows = array("d")
        self._stride = 1
        self._largest: Sample | None = None  # of the samples since the last that was kept
        self._skipped = 0

    def add(self, sample: Sample, high: float = 0.0) -> None:
        """Append a sample; ``high`` is the process's largest resident size so far, in bytes."""
        resident = sample.resident
        values = (resident, sample.anonymous, sample.file_backed, sample.shared)
        # Not max(): it would keep the initial -inf where every number is nan.
        self.peaks = [p if p > v else v for p, v in zip(self.peaks, values, strict=True)]
        self.high = self.high if self.high > high else high
        if self._largest is None or resident >= self._largest.resident:
            self._largest = sample
        self._skipped += 1
        if self._skipped >= self._stride:
            self._append(self._largest)
            self._largest, self._skipped = None, 0

    def _append(self, sample: Sample) -> None:
        rows = self._rows
        values = array("d", sample)
        if len(rows) >= 2 * _WIDTH and rows[-3:] == rows[-7:-4] == values[1:]:
            rows[-_WIDTH] = sample.seconds
            return
        rows.extend(values)
        if len(rows) >= self._limit * _WIDTH:
            kept = self.samples()
            self._rows = array("d")
            for left, right in zip(kept[0::2], kept[1::2], strict=False):
                self._rows.extend(right if right.resident > left.resident else left)
            self._stride *= 2

    def samples(self) -> list[Sample]:
        """What is kept, oldest first; times on the clock of `time.monotonic`."""
        rows = self._rows.tolist()
        return [Sample(*rows[i : i + _WIDTH]) for i in range(0, len(rows), _WIDTH)]

    def dump(self, file: IO[bytes]) -> None:
        """Write the timeline to a pipe between two processes on one machine."""
        marshal.dump((self.peaks, self.high, self._rows.tobytes()), file)
        file.flush()

    @classmethod
    def read(cls, file: IO[bytes]) -> Timeline:
        """Read what `dump` wrote.

        Raises:
            EOFError: the other side ended.
        """
        timeline = cls()
        try:
            timeline.peaks, timeline.high, rows = marshal.load(file)
        except EOFError as error:
            raise EOFError("the memory sampler ended early") from error
        timeline._rows.frombytes(rows)
        return timeline


def watch(pid: int, interval: float) -> None:
    """Sample another process until it ends or stdin closes.

    Each byte that comes from stdin asks for everything seen so far, which goes to stdout.

    Args:
        pid: the process to watch.
        interval: pause between samples, in seconds.
    """
    requests = sys.stdin.fileno()
    reader, timeline = Reader(pid), Timeline()
    while True:
        asked = bool(select.select([requests], [], [], interval)[0])
        # EOF is how this process learns that its parent is done, or was killed.
        if asked and not os.read(requests, 1):
            return
        try:
            timeline.add(*reader.read())
        except ProcessLookupError:
            return
        if asked:
            timeline.dump(sys.stdout.buffer)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))

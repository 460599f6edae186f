"""Read the memory of a process from the kernel many times a second, in bounded space.

This file uses the standard library only, because `meter` also starts it as a script: the helper
process that watches from outside.

Measurements (2 cores, Linux 6.18) that led to this implementation:

- One sample from ``/proc/PID/status`` takes 17 us, opening it and parsing included. ``statm`` would
  take less but adds shared memory to file-backed memory. ``smaps_rollup`` walks the page tables:
  110 us for an empty process, 8.8 ms per GiB in use, so it is not used.
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
from typing import NamedTuple

# In the kernel's order; a zombie has none of these lines.
_PATTERN = re.compile(rb"(?s)" + rb".*?\nRss\w+:\s+(\d+)" * 3)
#: One sample per millisecond for an hour would take 700 MB. 4096 samples take 0.8 MB.
MOST_SAMPLES = 4096


class Sample(NamedTuple):
    """Resident memory at one moment.

    Attributes:
        seconds: Time since the start of the block. In a snapshot, the time of `time.monotonic`.
        anonymous: Bytes of RAM that the process owns. Pages in swap do not count.
        file_backed: Bytes of page cache that it maps. The kernel may drop and reread them.
        shared: Bytes of shared memory that it maps (tmpfs, ``share_memory_()``).
    """

    seconds: float
    anonymous: float
    file_backed: float
    shared: float

    @property
    def resident(self) -> float:
        """The sum, in bytes."""
        return self.anonymous + self.file_backed + self.shared


def read(pid: int | None = None) -> Sample:
    """Sample a process. Default: this process.

    Without ``/proc`` (macOS, Windows) every number is nan, because owned and mapped memory cannot
    be separated there.

    Raises:
        ProcessLookupError: If the process has ended.
    """
    try:
        file = os.open(f"/proc/{pid or 'self'}/status", os.O_RDONLY)
    except FileNotFoundError:
        if os.path.exists("/proc/self/status"):
            raise ProcessLookupError("the process is gone") from None
        nan = float("nan")
        return Sample(time.monotonic(), nan, nan, nan)
    try:
        # A user in hundreds of groups pushes the lines down by kilobytes.
        found = _PATTERN.search(os.read(file, 1 << 16))
    finally:
        os.close(file)
    if found is None:
        raise ProcessLookupError("the process has ended")
    anonymous, file_backed, shared = (int(number) * 1024 for number in found.groups())
    return Sample(time.monotonic(), anonymous, file_backed, shared)


class Timeline:
    """Samples in order of time, in bounded space, with exact peaks.

    At the limit, the larger one of each two neighbours is kept, and later only one of each 2, 4,
    8... new samples.

    Attributes:
        samples: The samples that were kept, oldest first, with times of `time.monotonic`.
        peak: The highest of all samples in each field.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.peak = Sample(0.0, 0, 0, 0)
        self._count = 0
        self._stride = 1

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.peak = Sample(*map(max, zip(self.peak, sample, strict=True)))
        self._count += 1
        if self._count % self._stride == 0:
            self.samples.append(sample)
        if len(self.samples) == MOST_SAMPLES:
            pairs = zip(self.samples[0::2], self.samples[1::2], strict=True)
            self.samples = [max(pair, key=lambda seen: seen.resident) for pair in pairs]
            self._stride *= 2


def watch(pid: int, interval: float) -> None:
    """Sample another process until it ends or stdin closes.

    For each byte on stdin, it writes the peak and all samples so far to stdout.

    Args:
        pid: The process to watch.
        interval: Seconds between samples.
    """
    requests = sys.stdin.fileno()
    timeline = Timeline()
    while True:
        asked = bool(select.select([requests], [], [], interval)[0])
        # EOF means that the parent has finished or was killed.
        if asked and not os.read(requests, 1):
            return
        try:
            timeline.add(read(pid))
        except ProcessLookupError:
            return
        if asked:
            rows = [tuple(sample) for sample in timeline.samples]
            marshal.dump((tuple(timeline.peak), rows), sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))

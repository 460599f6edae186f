"""`memory`: measure the memory of this process over time while a block runs."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import threading
from typing import NamedTuple

from torchlift.measure import sampling
from torchlift.measure.sampling import Sample


class Mark(NamedTuple):
    """A labelled moment of a timeline.

    Attributes:
        seconds: Seconds since the start of the block.
        label: Its name.
        anonymous: Bytes of RAM that the process owned.
        file_backed: Bytes of page cache that it mapped.
    """

    seconds: float
    label: str
    anonymous: float
    file_backed: float


_running: list[MemoryUse] = []
#: Two threads that ask one helper at the same time would mix its answers.
_asking = threading.Lock()


class MemoryUse:
    """The memory of a process during a block, made by `memory`. All sizes are in bytes.

    You can read it during the block and after it, and send it to another process. A number is nan
    if the operating system does not separate owned from mapped memory (macOS, Windows).

    Attributes:
        baseline: The sample at the start of the block, at 0 seconds.
        marks: The moments that `mark` recorded, in order.
    """

    def __init__(self, interval: float) -> None:
        self.baseline = Sample(0.0, 0, 0, 0)
        self.marks: list[Mark] = []
        self._interval = interval
        self._helper: subprocess.Popen[bytes] | None = None  # while the block runs
        self._taken: list[Sample] = []  # baseline, marks, end: samples of the block itself
        self._start = 0.0
        self._seen: list[Sample] = []
        self._peaks: list[Sample] = []  # the highest of all samples in each field

    def __enter__(self) -> MemoryUse:
        if self._taken:
            raise RuntimeError("a memory() block can be entered only once. Make a new one")
        if os.path.exists("/proc/self/status"):  # without it, a helper sees nothing
            # -I -S: the user's environment and site-packages must not change or slow down the
            # helper. It starts in 15 ms.
            script = [sys.executable, "-I", "-S", sampling.__file__]
            self._helper = subprocess.Popen(
                [*script, str(os.getpid()), str(self._interval)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self._update()
        first = sampling.read()
        self._start = first.seconds
        self.baseline = self._take(first)
        _running.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _running.remove(self)
        try:
            self._update()
        except (EOFError, OSError):  # the helper was killed
            if kind is None:  # the block's own exception matters more
                raise
        finally:
            if self._helper is not None:
                self._helper.communicate()
            self._helper = None
            self._take(sampling.read())

    def _update(self) -> None:
        """Get all samples so far from the helper."""
        if self._helper is None:
            return
        requests, answers = self._helper.stdin, self._helper.stdout
        assert requests is not None
        assert answers is not None
        with _asking:
            os.write(requests.fileno(), b"?")
            peak, rows = marshal.load(answers)
        self._peaks, self._seen = [Sample(*peak)], [Sample(*row) for row in rows]

    def _take(self, sample: Sample) -> Sample:
        sample = sample._replace(seconds=sample.seconds - self._start)
        self._taken.append(sample)
        return sample

    def mark(self, label: str) -> Mark:
        """Record this moment with a name and a sample.

        Args:
            label: Text for the annotation in a figure.

        Returns:
            The mark.

        Example:
            >>> from torchlift import measure
            >>> with measure.memory() as use:
            ...     mark = use.mark("nothing happened yet")
            >>> use.marks == [mark]
            True
        """
        now = self._take(sampling.read())
        mark = Mark(now.seconds, label, now.anonymous, now.file_backed)
        self.marks.append(mark)
        return mark

    @property
    def timeline(self) -> list[Sample]:
        """All samples and marks in order of time, at most about 4000."""
        self._update()
        seen = [sample._replace(seconds=sample.seconds - self._start) for sample in self._seen]
        return sorted({*self._taken, *(sample for sample in seen if sample.seconds > 0)})

    @property
    def peak_anonymous(self) -> float:
        """Peak of anonymous memory (RAM that the process owns)."""
        self._update()
        return max(sample.anonymous for sample in [*self._taken, *self._peaks])

    @property
    def peak_file_backed(self) -> float:
        """Peak of file-backed memory (page cache that the process maps)."""
        self._update()
        return max(sample.file_backed for sample in [*self._taken, *self._peaks])

    @property
    def added_anonymous(self) -> float:
        """Peak of anonymous memory above the baseline."""
        return self.peak_anonymous - self.baseline.anonymous

    @property
    def added_file_backed(self) -> float:
        """Peak of file-backed memory above the baseline."""
        return self.peak_file_backed - self.baseline.file_backed

    @property
    def seconds(self) -> float:
        """Duration of the block until its end, or until now."""
        is_running = self in _running
        return sampling.read().seconds - self._start if is_running else self._taken[-1].seconds

    def __repr__(self) -> str:
        if not self._taken:
            return "MemoryUse(not started)"
        return (
            f"MemoryUse(anonymous +{self.added_anonymous / 2**20:.1f} MiB, "
            f"file-backed +{self.added_file_backed / 2**20:.1f} MiB, {self.seconds:.3f} s)"
        )


def mark(label: str) -> Mark:
    """Record this moment in the current measurement.

    Call it in a function that `in_child` runs. The marks are then in ``child.memory.marks``.

    Args:
        label: Text for the annotation in a figure.

    Returns:
        The mark.

    Raises:
        RuntimeError: If no measurement is running.

    Example:
        >>> from torchlift import measure
        >>> def work():
        ...     block = bytearray(2**24)
        ...     measure.mark("block")
        >>> child = measure.in_child(work)
        >>> [mark.label for mark in child.memory.marks]
        ['block']
    """
    if not _running:
        raise RuntimeError(
            "mark() must be called in a memory() block or in a function of in_child()"
        )
    return _running[-1].mark(label)


def memory(*, interval: float = 0.002) -> MemoryUse:
    """Measure the memory of this process while a block runs.

    A helper process reads the kernel's counters of this process, so it also sees what happens while
    C code holds the interpreter lock. It takes 15 ms to start. Blocks can be nested and can run in
    several threads. Each measures the complete process. Memory that the allocator keeps after a
    ``free`` counts, because the process still owns it.

    Args:
        interval: Seconds between two samples.

    Returns:
        A context manager that gives a `MemoryUse`.

    Raises:
        ValueError: If the interval is not positive.

    Example:
        >>> from torchlift import measure
        >>> with measure.memory() as use:
        ...     block = bytearray(b"x" * 2**24)
        >>> 16 <= use.added_anonymous / 2**20 < 40
        True
    """
    if not interval > 0:
        raise ValueError(f"interval must be positive seconds, not {interval!r}")
    return MemoryUse(interval)

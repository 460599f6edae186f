"""`memory`: measure the memory of this process over time while a block runs."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from torchlift.measure import sampling
from torchlift.measure.sampling import Sample, Timeline


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


class _ThreadSampler:
    """A daemon thread of this process.

    It needs the interpreter lock. ``bytearray(1 << 30)`` holds the lock for 1.6 s without a sample.
    `torch.load` and tensor copies release the lock, and were sampled every 1 to 9 ms.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._timeline = Timeline()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchlift-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self.collect()

    def collect(self) -> Timeline:
        with self._lock:
            self._timeline.add(*sampling.read())
        return self._timeline

    def stop(self) -> Timeline:
        self._ended.set()
        self._thread.join()
        return self.collect()


class _ProcessSampler:
    """A helper process that reads this process's counters. It needs no interpreter lock."""

    def __init__(self, interval: float) -> None:
        # -I -S: the user's environment and site-packages must not change or slow down the helper.
        # It starts in 15 ms.
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", sampling.__file__, str(os.getpid()), str(interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()
        self.collect()

    def collect(self) -> Timeline:
        requests, answers = self._helper.stdin, self._helper.stdout
        assert requests is not None
        assert answers is not None
        timeline = Timeline()
        with self._lock:
            os.write(requests.fileno(), b"?")
            timeline.peaks, timeline.high, rows = marshal.load(answers)
        timeline.samples = [Sample(*row) for row in rows]
        return timeline

    def stop(self) -> Timeline:
        try:
            return self.collect()
        finally:
            self._helper.communicate()


_running: list[MemoryUse] = []


class MemoryUse:
    """The memory of a process during a block, made by `memory`. All sizes are in bytes.

    You can read it during the block and after it. A number is nan if the operating system does not
    separate owned from mapped memory (see `snapshot`).

    Attributes:
        baseline: The sample at the start of the block, at 0 seconds.
        marks: The moments that `mark` recorded, in order.
    """

    def __init__(self, sampler: Callable[[], _ThreadSampler | _ProcessSampler]) -> None:
        self.baseline = Sample(0.0, 0, 0, 0)
        self.marks: list[Mark] = []
        self._start_sampler = sampler
        self._sampler: _ThreadSampler | _ProcessSampler | None = None  # while the block runs
        self._taken: list[Sample] = []  # baseline, marks, end: samples of the block itself
        self._start = 0.0
        self._final = Timeline()

    def __enter__(self) -> MemoryUse:
        if self._taken:
            raise RuntimeError("a memory() block can be entered only once. Make a new one")
        self._sampler = self._start_sampler()
        first = snapshot()
        self._start = first.seconds
        self.baseline = self._take(first)
        _running.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._sampler is not None
        _running.remove(self)
        try:
            self._final = self._sampler.stop()
        except (EOFError, OSError):  # the helper was killed
            if kind is None:  # the block's own exception matters more
                raise
        finally:
            self._sampler = None
            self._take(snapshot())

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
        now = self._take(snapshot())
        mark = Mark(now.seconds, label, now.anonymous, now.file_backed)
        self.marks.append(mark)
        return mark

    def _timeline(self) -> Timeline:
        return self._final if self._sampler is None else self._sampler.collect()

    @property
    def timeline(self) -> list[Sample]:
        """All samples and marks in order of time, at most about 4000."""
        start, taken = self._start, self._taken
        seen = [s._replace(seconds=s.seconds - start) for s in self._timeline().samples]
        return sorted({*taken, *(s for s in seen if s.seconds > 0)})

    def _peak(self, field: int) -> float:
        return max(self._timeline().peaks[field], *(sample[field] for sample in self._taken))

    @property
    def peak_anonymous(self) -> float:
        """Peak of anonymous memory (RAM that the process owns)."""
        return self._peak(1)

    @property
    def peak_file_backed(self) -> float:
        """Peak of file-backed memory (page cache that the process maps)."""
        return self._peak(2)

    @property
    def added_anonymous(self) -> float:
        """Peak of anonymous memory above the baseline."""
        return self.peak_anonymous - self.baseline.anonymous

    @property
    def added_file_backed(self) -> float:
        """Peak of file-backed memory above the baseline."""
        return self.peak_file_backed - self.baseline.file_backed

    @property
    def unseen(self) -> float:
        """Upper limit for a peak between two samples that was missed.

        The kernel records the largest resident size of a process. If it is above the highest
        sample, the samples missed a peak, or the peak was before the block. 0 proves that nothing
        was missed.
        """
        highest = max(self._timeline().peaks[0], *(sample.resident for sample in self._taken))
        return max(0.0, self._timeline().high - highest)

    @property
    def seconds(self) -> float:
        """Duration of the block until its end, or until now."""
        now = snapshot().seconds - self._start
        return now if self._sampler is not None else self._taken[-1].seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists and numbers for JSON. `from_dict` reads it."""
        timeline = self._timeline()
        return {
            "taken": [list(sample) for sample in self._taken],
            "marks": [list(mark) for mark in self.marks],
            "timeline": [list(sample) for sample in self.timeline],
            "peaks": timeline.peaks,
            "high": timeline.high,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryUse:
        """Make the finished measurement that `to_dict` wrote."""
        use = cls(lambda: _ThreadSampler(1.0))  # never started
        use._taken = [Sample(*row) for row in data["taken"]]
        use.baseline = use._taken[0]
        use.marks = [Mark(*row) for row in data["marks"]]
        use._final.samples = [Sample(*row) for row in data["timeline"]]
        use._final.peaks, use._final.high = list(data["peaks"]), data["high"]
        return use

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


def memory(
    *, interval: float = 0.002, sampler: Literal["thread", "process"] = "thread"
) -> MemoryUse:
    """Measure the memory of this process while a block runs.

    The cost is low: a block takes 0.15 ms, and a pure Python loop ran 1 % slower. Blocks can be
    nested and can run in several threads. Each measures the complete process. Memory that the
    allocator keeps after a ``free`` counts, because the process still owns it.

    Args:
        interval: Seconds between two samples.
        sampler: ``"thread"`` uses a thread of this process. It cannot sample while C code holds the
            interpreter lock, and `MemoryUse.unseen` limits the error. ``"process"`` uses a helper
            process, which takes 15 ms to start. Use it for a number that you publish.

    Returns:
        A context manager that gives a `MemoryUse`.

    Raises:
        ValueError: If the interval is not positive, or the sampler is not known.

    Example:
        >>> from torchlift import measure
        >>> with measure.memory(sampler="process") as use:
        ...     block = bytearray(b"x" * 2**24)
        >>> 16 <= use.added_anonymous / 2**20 < 40
        True
    """
    if not interval > 0:
        raise ValueError(f"interval must be positive seconds, not {interval!r}")
    if sampler not in ("thread", "process"):
        raise ValueError(f'sampler must be "thread" or "process", not {sampler!r}')
    # Without /proc a helper sees nothing, and Windows cannot select() on a pipe.
    outside = sampler == "process" and os.path.exists("/proc/self/status")
    return MemoryUse(partial(_ProcessSampler if outside else _ThreadSampler, interval))


def snapshot() -> Sample:
    """Return the memory of this process now, in bytes.

    Returns:
        Anonymous, file-backed and shared bytes. Without ``/proc`` (macOS, Windows) every number is
        nan, because owned and mapped memory cannot be separated there.

    Example:
        >>> from torchlift import measure
        >>> now = measure.snapshot()
        >>> now.resident == now.anonymous + now.file_backed + now.shared
        True
    """
    return sampling.read()[0]

"""Memory measurement: what it must see, what it must not blame, and what it leaves behind."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest
from in_code import in_code

from torchlift import measure
from torchlift.measure import sampling

MIB = 2**20

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="owned and mapped are told apart by /proc"
)


def added_mib(child: measure.ChildResult) -> tuple[float, float]:
    """What a child added, anonymous and file-backed, in MiB."""
    return child.memory.added_anonymous / MIB, child.memory.added_file_backed / MIB


def test_touched_memory_is_counted_as_anonymous_to_within_2_mib() -> None:
    """100 MiB written in a new process raise its anonymous peak by 100 MiB, nothing else."""
    anonymous, mapped = added_mib(in_code("block = bytearray(100 << 20)"))
    assert anonymous == pytest.approx(100, abs=2)
    assert mapped < 2


def test_memory_that_is_only_reserved_is_not_counted() -> None:
    """An anonymous mapping costs nothing until it is touched."""
    anonymous, _ = added_mib(in_code("m = mmap.mmap(-1, 1 << 30)", setup="import mmap"))
    assert anonymous < 2


def test_a_mapped_file_is_counted_as_file_backed_to_within_2_mib(tmp_path) -> None:
    """Touching a mapped file raises file-backed memory by its size and anonymous by nothing."""
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(64 * MIB))
    code = """
with open(args[0], "rb") as file:
    m = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
result = sum(m[i] for i in range(0, len(m), 4096))
"""
    anonymous, mapped = added_mib(in_code(code, str(path), setup="import mmap"))
    assert mapped == pytest.approx(64, abs=2)
    assert anonymous < 2


def test_a_spike_of_20_ms_is_caught() -> None:
    """Memory that is gone again after 20 ms is in the peak, though not in the end value."""
    code = "block = bytearray(80 << 20); time.sleep(0.02); del block"
    use = in_code(code, setup="import time").memory
    assert use.added_anonymous / MIB == pytest.approx(80, abs=2)
    assert use.timeline[-1].anonymous - use.baseline.anonymous < 2 * MIB


def test_a_spike_inside_c_code_that_holds_the_lock_is_caught_by_the_helper_process() -> None:
    """A helper process sees what happens while no thread of this process can run."""
    # hash() of a temporary bytes object: made, read for some 100 ms, and freed under the lock.
    code = "result = hash(b'x' * (300 << 20))"
    anonymous, _ = added_mib(in_code(code))
    assert anonymous == pytest.approx(300, abs=4)


def test_numbers_can_be_read_during_the_block_and_stay_after_it() -> None:
    """Peaks grow while the block runs and do not change once it has ended."""
    # In a process of its own: this one may give back what an earlier test left, just then.
    code = """
import time, torchlift.measure
with torchlift.measure.memory() as use:
    before = use.peak_anonymous
    block = bytearray(b"x" * (32 << 20))
    during = use.peak_anonymous
after = use.peak_anonymous
time.sleep(0.01)
result = [before, during, after, use.peak_anonymous]
"""
    before, during, after, later = in_code(code).value
    assert before + 30 * MIB < during <= after == later


def test_a_timeline_runs_from_zero_to_the_end_and_contains_the_marks() -> None:
    """Samples are in order, the first is the baseline at 0 s, every mark is one of them."""
    with measure.memory() as use:
        time.sleep(0.01)
        use.mark("first")
        use.mark("second")
    seconds = [sample.seconds for sample in use.timeline]
    assert seconds == sorted(seconds)
    assert use.timeline[0] == use.baseline
    assert seconds[0] == 0.0
    assert seconds[-1] == use.seconds
    assert [mark.label for mark in use.marks] == ["first", "second"]
    assert {mark.seconds for mark in use.marks} <= set(seconds)


def test_an_exception_passes_through_and_nothing_is_left_running() -> None:
    """The block's own exception arrives, and the helper and its descriptors are gone."""
    descriptors = len(os.listdir("/proc/self/fd"))
    use = measure.memory()
    with pytest.raises(KeyError, match="mine"), use:
        raise KeyError("mine")
    assert use._helper is None
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_timeline_stays_small_and_keeps_its_peaks() -> None:
    """Very many samples are kept as a few, and a single high one among them is the peak."""
    timeline = sampling.Timeline()
    for i in range(100_000):
        high = {1001: 400, 77_777: 5_000}.get(i, i % 50)
        timeline.add(sampling.Sample(i, high, i % 7, 0))
    kept = timeline.samples
    assert 400 in [sample.anonymous for sample in kept]  # of two neighbours the larger one
    assert len(kept) < sampling.MOST_SAMPLES
    assert timeline.peak[1:] == (5_000, 6, 0)
    assert [s.seconds for s in kept] == sorted(s.seconds for s in kept)


def test_where_nothing_can_be_known_every_number_is_nan(monkeypatch) -> None:
    """Without /proc the numbers are nan, which no comparison passes, and nothing raises."""

    def missing(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(sampling.os, "open", missing)
    monkeypatch.setattr(sampling.os.path, "exists", lambda _: False)
    with measure.memory() as use:
        use.mark("still works")
    numbers = (use.peak_anonymous, use.added_anonymous, use.peak_file_backed)
    assert all(math.isnan(number) for number in numbers)
    assert not use.added_anonymous < 10 * MIB
    assert "nan" in repr(use)


def test_a_child_returns_its_value_output_and_time() -> None:
    """Value, printed text and seconds come back; print does not disturb the answer."""
    code = "print('out'); print('err', file=sys.stderr); result = {'sum': sum(args)}"
    child = in_code(code, 1, 2, 3, setup="import sys")
    assert child.value == {"sum": 6}
    assert (child.stdout, child.stderr) == ("out\n", "err\n")
    assert 0 < child.seconds < 60


def test_what_cannot_be_sent_is_told_before_anything_starts() -> None:
    """And an error of the function comes back with its traceback."""
    with pytest.raises(TypeError, match="an argument cannot be sent to another process"):
        measure.in_child(len, threading.Lock())
    with pytest.raises(measure.ChildError, match="ZeroDivisionError"):
        measure.in_child(lambda: 1 / 0)


def test_a_value_that_cannot_be_sent_back_is_told() -> None:
    """The child says what the function returned, and why it cannot travel."""
    with pytest.raises(measure.ChildError, match="the returned value cannot be sent"):
        measure.in_child(threading.Lock)


def test_a_function_in_a_child_can_mark_its_timeline() -> None:
    """It has no `MemoryUse` in its hands."""

    def work():
        measure.mark("start")
        block = bytearray(32 * MIB)
        measure.mark("block")
        return len(block)

    child = measure.in_child(work)
    start, block = child.memory.marks
    assert (start.label, block.label) == ("start", "block")
    assert 30 * MIB < block.anonymous - start.anonymous < 40 * MIB
    with pytest.raises(RuntimeError, match="called in a memory"):
        measure.mark("nothing is measured")


def test_a_block_can_be_entered_only_once() -> None:
    """Entering a second time would mix two measurements; it says so."""
    use = measure.memory()
    with use:
        pass
    with pytest.raises(RuntimeError, match="entered only once"), use:
        pass


def test_an_interval_that_makes_no_sense_is_refused() -> None:
    """The message names the value."""
    with pytest.raises(ValueError, match="positive seconds, not 0"):
        measure.memory(interval=0)

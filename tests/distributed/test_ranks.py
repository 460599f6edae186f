"""A function on several ranks: what comes back, what is printed, and how a failure is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchlift._system import zygote
from torchlift.distributed import on_ranks
from torchlift.measure import ChildError, in_child

pytestmark = pytest.mark.distributed


def leave_their_numbers(folder: str) -> None:
    """Say which processes run, and hang."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(100)


def running(folder: Path) -> set[str]:
    """The processes that left their numbers in a folder and still run."""
    return {path.name for path in folder.iterdir() if Path("/proc", path.name).exists()}


# ---- what comes back

SCRIPT = """
import dataclasses, os
import torch
import torch.distributed as dist
import beside
import torchlift
from torchlift._system import zygote
from torchlift.distributed import on_ranks
from torchlift.measure import ChildError, in_child

OFFSET = 10

@dataclasses.dataclass
class Found:
    total: torch.Tensor
    text: str

def shifted(tensor):
    return tensor + OFFSET

def add(tensor):
    print("rank", dist.get_rank(), "starts,", torch.get_num_threads(), "thread")
    os.system("echo a child of rank $RANK")
    assert torchlift.skeleton
    total = shifted(tensor * dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return Found(total, f"{beside.WORD} {os.environ['WORD']} {os.environ['RANK']}")

for found in on_ranks(2, add, torch.ones(2), environment={"WORD": "hello"}):
    print(type(found) is Found, found.total.tolist(), found.text)
"""


def test_a_script_s_own_functions_run_on_each_rank_and_their_results_come_back(tmp_path) -> None:
    """With the globals, classes and modules they refer to; prints and results in order of ranks."""
    tmp_path.joinpath("beside.py").write_text("WORD = 'beside'", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "rank 0 starts, 1 thread",
        "a child of rank 0",
        "rank 1 starts, 1 thread",
        "a child of rank 1",
        "True [21.0, 21.0] beside hello 0",
        "True [21.0, 21.0] beside hello 1",
    ]


# ---- what goes wrong on a rank


def test_a_rank_that_raises_is_named_with_its_traceback(capsys) -> None:
    """The rank that waited for it is ended, and is not blamed for losing its neighbour."""

    def raises_on_one() -> None:
        print("before")
        if dist.get_rank() == 1:
            raise LookupError("nothing here")
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 failed\n\[rank 1\] Traceback") as caught:
        on_ranks(2, raises_on_one)
    text = str(caught.value)
    assert text.endswith("LookupError: nothing here")
    assert len(re.findall(r"^  File ", text, re.MULTILINE)) == 1
    assert "in raises_on_one" in text
    assert capsys.readouterr().out == "before\nbefore\n"


def test_an_error_of_all_ranks_is_told_for_each(tmp_path, monkeypatch) -> None:
    """Here: a result that cannot be sent back. Nothing is left in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        on_ranks(2, threading.Lock)
    text = "TypeError: what the function returned cannot be sent to another process: TypeError: "
    first, *others = str(caught.value).splitlines()
    assert first == "ranks 0, 1 of 2 failed"
    assert [line[:9] + line[9:].startswith(text) * "..." for line in others] == [
        "[rank 0] ...",
        "[rank 1] ...",
    ]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("torchlift-")]


def test_a_rank_that_dies_is_named_with_what_it_wrote_to_stderr() -> None:
    """The launcher knows the exit code; the last words are the rank's."""

    def dies() -> None:
        if dist.get_rank() == 1:
            print("last words", file=sys.stderr)
            os._exit(3)
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 died with exit code 3\nlast words"):
        on_ranks(2, dies)


def test_a_rank_that_ends_early_leaves_no_result() -> None:
    """An exit that looks like success is none."""
    with pytest.raises(RuntimeError, match=r"^rank 0 of 1 left no result"):
        on_ranks(1, os._exit, 0)


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="looks for them in /proc")
@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_that_hang_are_ended_after_the_timeout(tmp_path, fork) -> None:
    """The error names those that were not done, and no process is left."""
    seconds = 4 if fork else 30
    in_child(os.getpid)  # the process that forks takes some of the time to start
    with pytest.raises(TimeoutError, match=f"^ranks 0, 1 of 2 not done after {seconds} s$"):
        on_ranks(2, leave_their_numbers, str(tmp_path), timeout=seconds, fork=fork)
    assert len([*tmp_path.iterdir()]) == 2
    assert running(tmp_path) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="nothing forks elsewhere")
def test_the_time_counts_from_the_call(monkeypatch) -> None:
    """Also while the process that forks imports torch, which takes seconds, or for ever."""
    monkeypatch.setattr(zygote, "_zygote", None)
    with monkeypatch.context() as patched:
        endless = [sys.executable, "-c", "import time; time.sleep(200)"]
        patched.setattr(zygote, "_command", lambda *_: endless)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^ranks 0, 1 of 2 not done after 0\.5 s$"):
            on_ranks(2, dist.get_rank, timeout=0.5)
        with pytest.raises(ChildError, match=r"not done after 0\.5 s"):
            in_child(os.getpid, timeout=0.5)
        assert time.monotonic() - start < 100
        zygote._end_zygote()


@pytest.mark.skipif(sys.platform != "linux", reason="nothing forks elsewhere")
@pytest.mark.slow
def test_a_call_that_was_too_short_does_not_stop_the_start(monkeypatch) -> None:
    """The next one waits for the same process."""
    monkeypatch.setattr(zygote, "_zygote", None)
    with pytest.raises(TimeoutError):
        on_ranks(1, dist.get_rank, timeout=0.01)
    started = zygote._zygote
    assert on_ranks(2, dist.get_rank) == [0, 1]
    assert zygote._zygote is started
    zygote._end_zygote()


KILLED = """
import os, pathlib, sys, time
from torchlift._system import zygote
from torchlift.distributed import on_ranks
from torchlift.measure import ChildError, in_child

def hang(path):
    pathlib.Path(path, str(os.getpid())).touch()
    time.sleep(100)

on_ranks(2, hang, sys.argv[1], fork=sys.argv[2] == "True")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="looks for them in /proc")
@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_leave_when_their_caller_is_killed(tmp_path, fork) -> None:
    """Nobody can ask them to: a socket or a pipe closes."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(fork)]
    with subprocess.Popen(command) as caller:
        end = time.monotonic() + 120
        while len([*tmp_path.iterdir()]) < 2:
            assert time.monotonic() < end
            assert caller.poll() is None
            time.sleep(0.05)
        caller.send_signal(signal.SIGKILL)
    while running(tmp_path):
        assert time.monotonic() < end, running(tmp_path)
        time.sleep(0.05)


# ---- what is refused before anything starts


@pytest.mark.parametrize("count", [0, -2, True, 2.0, "2", None])
def test_a_count_that_is_none_is_refused(count) -> None:
    """A bool counts nothing, and text is not converted."""
    with pytest.raises(ValueError, match=f"a whole number of processes from 1 on, not {count!r}"):
        on_ranks(count, dist.get_rank)


def test_a_timeout_that_leaves_no_time_is_refused() -> None:
    """Zero would end the ranks before they start."""
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds, not 0"):
        on_ranks(2, dist.get_rank, timeout=0)
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds, not '5'"):
        on_ranks(2, dist.get_rank, timeout="5")  # type: ignore[arg-type]


def test_a_variable_that_is_no_text_is_refused_by_its_name() -> None:
    """A number is a common mistake."""
    with pytest.raises(TypeError, match="environment variable PORT must be text, not 80"):
        on_ranks(2, dist.get_rank, environment={"PORT": 80})  # type: ignore[dict-item]


def test_a_function_that_cannot_be_sent_is_refused_by_its_name() -> None:
    """A lock belongs to one process, and so does a function that refers to it."""
    lock = threading.Lock()

    def locked() -> bool:
        return lock.locked()

    with pytest.raises(TypeError, match=r"locked, what it refers to.*cannot pickle '_thread.lock'"):
        on_ranks(2, locked)
    with pytest.raises(TypeError, match="or an argument cannot be sent to another process"):
        on_ranks(2, torch.is_tensor, lock)

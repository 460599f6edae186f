"""A function on several ranks: what comes back, what is printed, and how a failure is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchlift.distributed import on_ranks
from torchlift.measure import in_child

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
from torchlift.distributed import on_ranks

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


def test_a_rank_that_dies_is_named_with_what_it_wrote_to_stderr() -> None:
    """The launcher knows the exit code; the last words are the rank's."""

    def dies() -> None:
        if dist.get_rank() == 1:
            print("last words", file=sys.stderr)
            os._exit(3)
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 died with exit code 3\nlast words"):
        on_ranks(2, dies)


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_that_hang_are_ended_after_the_timeout(tmp_path, fork) -> None:
    """The error names those that were not done, and no process is left."""
    seconds = 4 if fork else 30
    in_child(os.getpid)  # the process that forks takes some of the time to start
    with pytest.raises(TimeoutError, match=f"^ranks 0, 1 of 2 not done after {seconds} s$"):
        on_ranks(2, leave_their_numbers, str(tmp_path), timeout=seconds, fork=fork)
    assert len([*tmp_path.iterdir()]) == 2
    assert running(tmp_path) == set()


KILLED = """
import os, pathlib, sys, time
from torchlift.distributed import on_ranks

def hang(path):
    pathlib.Path(path, str(os.getpid())).touch()
    time.sleep(100)

on_ranks(2, hang, sys.argv[1], fork=sys.argv[2] == "True")
"""


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


COUNT, TIME = (
    "a whole number of processes from 1 on, not",
    "timeout must be more than 0 seconds, not",
)


@pytest.mark.parametrize(
    ("count", "words", "error", "says"),
    [
        *((count, {}, ValueError, f"{COUNT} {count!r}") for count in (0, -2, True, 2.0, "2", None)),
        (2, {"timeout": 0}, ValueError, f"{TIME} 0"),
        (2, {"timeout": "5"}, ValueError, f"{TIME} '5'"),
        (2, {"environment": {"PORT": 80}}, TypeError, "variable PORT must be text, not 80"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_by_name(count, words, error, says) -> None:
    """A bool counts nothing, text is not converted, and zero would end the ranks at once."""
    with pytest.raises(error, match=says):
        on_ranks(count, dist.get_rank, **words)


def test_a_function_that_cannot_be_sent_is_refused_by_its_name() -> None:
    """A lock belongs to one process, and so does a function that refers to it."""
    lock = threading.Lock()

    def locked() -> bool:
        return lock.locked()

    with pytest.raises(TypeError, match=r"locked, what it refers to.*cannot pickle '_thread.lock'"):
        on_ranks(2, locked)
    with pytest.raises(TypeError, match="or an argument cannot be sent to another process"):
        on_ranks(2, torch.is_tensor, lock)

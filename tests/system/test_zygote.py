"""Processes that the zygote forks: what they inherit, what they measure, and how they end."""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from torchlift import load, skeleton
from torchlift._system import zygote
from torchlift._system.memory import c_function
from torchlift.measure import ChildError, in_child, mark

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing forks elsewhere")


# ---- what a child has


def test_a_child_is_forked_and_the_next_one_from_the_same_process() -> None:
    """Otherwise every test here would pass without a zygote."""
    parents = {in_child(os.getppid).value for _ in range(2)}
    assert len(parents) == 1
    assert os.getpid() not in parents
    assert in_child(os.getppid, fork=False).value == os.getpid()


def test_a_child_has_the_folder_the_variables_and_the_path_of_the_call(tmp_path, monkeypatch):
    """Not those of the time when the zygote started."""
    in_child(os.getpid)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHLIFT_SOMETHING", "of the caller")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def look() -> tuple[str, str | None, str | None, str]:
        names = ("TORCHLIFT_SOMETHING", "ANOTHER")
        return (os.getcwd(), *map(os.environ.get, names), sys.path[0])

    for env, other in (None, None), ({"ANOTHER": "of the call"}, "of the call"):
        found = in_child(look, env=env).value
        assert found == (str(tmp_path), "of the caller", other, str(tmp_path))


def test_a_child_has_as_many_threads_as_the_variable_says() -> None:
    """torch reads OMP_NUM_THREADS when it is imported, which a forked process has behind it."""
    for count in 1, 2:
        child = in_child(torch.get_num_threads, env={"OMP_NUM_THREADS": str(count)})
        assert child.value == min(count, len(os.sched_getaffinity(0)))


def test_a_child_has_the_limits_and_the_cores_of_the_caller() -> None:
    """As they are now: a measurement may be of one core."""
    cores, limit = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)

    def look() -> tuple[set[int], int, int]:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return os.sched_getaffinity(0), files, torch.get_num_threads()

    in_child(os.getpid)
    try:
        os.sched_setaffinity(0, {min(cores)})
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, limit[1]))
        assert in_child(look).value == ({min(cores)}, 400, 1)
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_child_has_the_masks_of_the_caller() -> None:
    """Of new files and of signals, and the signals that it ignores: also as they are now."""

    def look() -> tuple[int, set[int], bool]:
        ignored = signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
        return os.umask(0), signal.pthread_sigmask(signal.SIG_BLOCK, ()), ignored

    before = in_child(look).value
    mask = os.umask(0o27)
    handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        assert [in_child(look, fork=fork).value for fork in (True, False)] == [
            (0o27, {*blocked, signal.SIGUSR1}, True)
        ] * 2
        assert in_child(os.getppid).value != os.getpid(), "it is forked all the same"
    finally:
        os.umask(mask)
        signal.signal(signal.SIGUSR2, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert in_child(look).value == before


def give_up_privileges() -> None:
    """Call what a sandbox calls: no program that this process starts may get more rights."""
    assert c_function("prctl")(38, 1, 0, 0, 0) == 0


def lower_a_limit() -> None:
    """Lower the hard limit, which a child of another process could not raise again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))


def change_user() -> None:
    """Give up root, but for the way back."""
    os.setgroups([4242])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 0)


IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
CHANGES = {
    "privileges": give_up_privileges,
    "limit": lower_a_limit,
    "nice": partial(os.nice, 3),
    "out of memory": partial(Path("/proc/self/oom_score_adj").write_text, "900", "utf-8"),
    "groups": partial(os.setgroups, [4242]),
    "user": change_user,
}
OF_ROOT = {"groups", "user"}


FACTS = """
import os, resource
lines = open("/proc/self/status").read().splitlines()
rights = [line for line in lines if line.startswith(("Cap", "NoNewPrivs", "Groups"))]
ids = os.getresuid()[:2] + os.getresgid()[:2]
facts = str([rights, ids, os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)])
print(facts, flush=True)
"""


@pytest.mark.parametrize(
    "changes",
    [["privileges"], ["limit"], ["user"], [*CHANGES],
     *(pytest.param([name], marks=pytest.mark.slow) for name in ("nice", "groups"))],
    ids=", ".join,
)  # fmt: skip
def test_a_child_has_no_right_that_the_caller_gave_up(changes: list[str]) -> None:
    """The zygote has them still, so a new interpreter starts, or none if it may not be run."""
    if not IS_ROOT and OF_ROOT.issuperset(changes):
        pytest.skip("needs root")

    def look(out: int) -> str:
        with zygote.start("builtins:exec", FACTS, stdout=out, stderr=out) as child:
            assert child.wait() == 0
        return os.pread(out, 4096, 0).decode().splitlines()[-1]

    def inside() -> list[str]:
        with tempfile.TemporaryFile() as file:  # this user may not open one later
            found, scope = [look(file.fileno())], dict[str, str]()
            for name in changes:
                if IS_ROOT or name not in OF_ROOT:
                    CHANGES[name]()
            exec(FACTS, scope)
            try:
                found.append(look(file.fileno()))
            except PermissionError as error:
                if error.filename != sys.executable:
                    raise
                found.append(scope["facts"])
        if IS_ROOT:
            os.seteuid(0)  # to hand back the result
        return [*found, scope["facts"]]

    before, found, expected = in_child(inside).value
    assert before != found == expected


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_caller_that_ignores_the_end_of_children_gets_their_results(fork: bool) -> None:
    """The system then keeps no status of them, not even for the zygote, unless it asks for it."""

    def inside() -> list[object]:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # before the zygote starts
        found = [in_child(abs, -number, fork=fork).value for number in (1, 2)]
        with pytest.raises(ChildError, match="ZeroDivisionError") as caught:
            in_child(divmod, 1, 0, fork=fork)
        return [*found, caught.value.returncode if fork else 1]

    assert in_child(inside).value == [1, 2, 1]


def test_children_draw_different_random_numbers() -> None:
    """As new processes do."""

    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]

    pairs = zip(in_child(draw).value, in_child(draw).value, strict=True)
    assert all(one != other for one, other in pairs)


# ---- what it measures


def load_and_work(folder: str) -> float:
    """Map a file, own some memory, load a model both ways, and compute."""
    with open(Path(folder, "mapped"), "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    total = sum(mapped[at] for at in range(0, len(mapped), 4096))
    block = bytearray(96 * MIB)
    path = Path(folder, "model.pt")
    read = skeleton(nn.Linear, 2048, 4096)
    load(read, path, source="read")
    seen = skeleton(nn.Linear, 2048, 4096)
    load(seen, path, source="mmap")
    total += len(block) + float(read.weight.sum() + seen.weight.sum())
    mark("all of it")  # a sample: this peak lasts for a millisecond, which a busy machine misses
    return total


def test_a_forked_process_measures_what_a_new_one_measures(tmp_path: Path) -> None:
    """Anonymous and file-backed bytes, within 2 MiB or 2 %: libraries count for neither."""
    tmp_path.joinpath("mapped").write_bytes(bytes(64 * MIB))
    torch.save(nn.Linear(2048, 4096).state_dict(), tmp_path / "model.pt")
    forked, new = (
        in_child(load_and_work, str(tmp_path), fork=fork).memory for fork in (True, False)
    )
    for kind in "added_anonymous", "added_file_backed":
        one, other = getattr(forked, kind), getattr(new, kind)
        assert one == pytest.approx(other, rel=0.02, abs=2 * MIB), kind
    assert forked.added_anonymous / MIB == pytest.approx(96 + 32, abs=4)
    assert forked.added_file_backed / MIB == pytest.approx(64 + 32, abs=4)


# ---- how it ends


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_child_that_fails_is_one_error_with_its_last_output(fork: bool) -> None:
    """Whether it raises, leaves, is killed or hangs."""

    def end(how: str) -> None:
        print("the last words")
        if how == "raise":
            raise LookupError("nothing here")
        if how == "leave":
            sys.exit(3)
        if how == "die":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)

    for how, text, code in [
        ("raise", "LookupError: nothing here", 1),
        ("leave", "exited with status 3", 3),
        ("die", "killed by signal 15", -15),
        ("hang", "not done after", None),
    ]:
        with pytest.raises(ChildError, match=text) as caught:
            in_child(end, how, fork=fork, timeout=60 if how != "hang" else 1 if fork else 20)
        assert caught.value.returncode == code
        assert caught.value.stdout == "the last words\n"
        assert "_system/zygote.py" not in str(caught.value)


def test_a_child_that_is_over_ran_its_exit_functions_and_its_threads_to_the_end(tmp_path):
    """It ends as an interpreter does."""

    def work() -> None:
        import atexit

        global pool  # nobody shuts it down: its threads wait for work until the interpreter ends
        pool = ThreadPoolExecutor(1)
        pool.submit(abs, -1)
        atexit.register(tmp_path.joinpath("at exit").touch)
        threading.Timer(0.2, tmp_path.joinpath("in a thread").touch).start()

    in_child(work)
    assert {path.name for path in tmp_path.iterdir()} == {"at exit", "in a thread"}


def test_when_the_zygote_is_killed_its_child_is_one_error_and_the_next_call_works() -> None:
    """The system kills what has most memory, and gives no reason."""
    before = in_child(os.getppid).value

    def kill_it() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(ChildError, match="killed by signal 9"):
        in_child(kill_it)
    after = in_child(os.getppid).value
    assert after not in (before, os.getpid())


INTERRUPTED = """
import os, pathlib, sys, time
from torchlift.measure import in_child

def hang(path):
    os.system(f"sleep 100 & echo $! > {path}/shell")
    pathlib.Path(path, "child").write_text(str(os.getpid()))
    time.sleep(100)

try:
    in_child(hang, sys.argv[1], fork=sys.argv[2] == "True")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_caller(tmp_path: Path, fork: bool, number: int) -> None:
    """Nor does what the child has started: after Ctrl-C, and after a kill that nobody hears."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(fork)]
    # In a group of its own, as a program at a terminal is: Ctrl-C is sent to all of the group.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as caller:
        end = time.monotonic() + 60
        while not tmp_path.joinpath("child").exists() or not tmp_path.joinpath("child").read_text():
            assert time.monotonic() < end
            assert caller.poll() is None
            time.sleep(0.02)
        numbers = [tmp_path.joinpath(name).read_text().strip() for name in ("child", "shell")]
        assert all(Path("/proc", each).exists() for each in numbers)
        (os.killpg if number == signal.SIGINT else os.kill)(caller.pid, number)
        printed, _ = caller.communicate()
    assert printed == ("interrupted\n" if number == signal.SIGINT else "")
    while [each for each in numbers if _runs(each)]:
        assert time.monotonic() < end, numbers
        time.sleep(0.02)


def _runs(number: str) -> bool:
    """Whether a process is there and no zombie, which nobody in a container may wait for."""
    try:
        return ") Z" not in Path("/proc", number, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- who starts it


def test_threads_start_children_beside_each_other() -> None:
    """Each gets the result of its own."""
    found: dict[int, int] = {}

    def call(number: int) -> None:
        found[number] = in_child(abs, -number).value

    threads = [threading.Thread(target=call, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(6)}


def test_a_fork_of_the_caller_and_a_child_have_a_zygote_of_their_own() -> None:
    """Two processes that read one socket would take each other's answers."""
    ours = in_child(os.getppid).value

    def inside() -> list[int]:
        theirs = in_child(os.getppid).value
        if not os.fork():
            os._exit(in_child(os.getppid).value == theirs)
        return [os.wait()[1], os.getpid(), theirs, in_child(os.getppid).value]

    status, number, theirs, again = in_child(inside).value
    assert (status, again) == (0, theirs)
    assert len({ours, number, theirs, os.getpid()}) == 4

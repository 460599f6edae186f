"""Run a function on several processes of this machine, from where no other process can import it.

A function that is defined in a cell of a notebook is such a function: it travels by value, with all
that it refers to. This module is also what runs on every rank:

    python -m torchlift.distributed.ranks FOLDER SECONDS

All meet in a folder. The caller leaves the file ``call`` there; each rank leaves what it printed,
and its value in ``RANK.value`` or its traceback in ``RANK.error``. Then it waits to be ended, since
another rank may still talk to it, and would fail for no reason of its own.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from typing_extensions import TypeVarTuple, Unpack  # typing has them from Python 3.11 on

from torchlift._system import packed

T = TypeVar("T")
# Not a ParamSpec, which leaves no room for options beside the arguments.
Ts = TypeVarTuple("Ts")

# Seconds that a rank which failed waits for the others, so that an error of all is told by all.
_GRACE = 1.0
# Seconds that every clock here can count to, in milliseconds of 32 bits: eleven days.
_LONGEST = 1e6


def on_ranks(
    count: int,
    function: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Run ``function(*args)`` on processes of this machine that form a process group.

    Made for notebooks and examples: the function may be defined in a cell, in a script, or inside
    of another function. It is sent with all that it refers to there; modules, and what they define,
    are imported on each rank. The group is ``gloo``, on the CPU, and each process has one thread.

    What the ranks print is printed here when all are done, one rank after the other. Their stderr,
    with the warnings, is shown only if a rank dies. The functions are sent with cloudpickle:
    ``pip install "torchlift[recipes]"``.

    Args:
        count: how many processes.
        function: called on each of them, when the group is there.
        *args: its arguments, the same on each rank.
        timeout: seconds for all of it, the start of the processes included. No process is left
            behind.
        environment: variables for the processes, beside those of this one.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        ValueError: `count` is not a whole number from 1 on, or `timeout` is not above 0.
        TypeError: the function or an argument cannot be sent to another process, or a variable is
            no text.
        ModuleNotFoundError: it takes cloudpickle, which is not installed.
        RuntimeError: a rank raised, or died. The message has its number and its traceback; the
            other ranks are ended.
        TimeoutError: not all ranks were done in time.

    Example:
        >>> import torch.distributed as dist
        >>> from torchlift.distributed import on_ranks
        >>> on_ranks(2, dist.get_rank)
        [0, 1]
    """
    _check(count, function, timeout, environment or {})
    timeout = min(timeout, _LONGEST)
    name = getattr(function, "__qualname__", repr(function))
    call = packed((function, args), f"{name}, what it refers to, or an argument")
    with tempfile.TemporaryDirectory(prefix="torchlift-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        folder.joinpath("call").write_bytes(call)
        try:
            codes = _run(folder, timeout, count, environment or {})
        finally:
            for rank in range(count):
                print(_text(folder / f"{rank}.stdout"), end="")
        results = _results(folder)
        for rank, code in codes.items():  # it died, and the others failed because of that
            printed = _text(folder / f"{rank}.stderr")
            raise RuntimeError(f"{_ranks([rank], count)} {_death(code)}\n{printed}".rstrip())
        failed = [rank for rank, path in sorted(results.items()) if path.suffix == ".error"]
        if failed:
            texts = [f"\n[rank {rank}] {_text(results[rank])}".rstrip() for rank in failed]
            raise RuntimeError(f"{_ranks(failed, count)} failed{''.join(texts)}")
        if len(results) < count:
            late = _ranks({*range(count)} - {*results}, count)
            raise TimeoutError(f"{late} not done after {timeout:g} s")
        return [pickle.loads(results[rank].read_bytes()) for rank in range(count)]


# ---- the caller


def _check(
    count: object, function: object, timeout: object, environment: Mapping[str, object]
) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count must be a whole number of processes from 1 on, not {count!r}")
    if not callable(function):
        raise TypeError(f"on_ranks calls a function on each rank, and {function!r} is none")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, not {timeout!r}")
    for name, value in environment.items():
        if not isinstance(value, str):
            raise TypeError(f"a variable of the environment is text, and {name} is {value!r}")


def _run(
    folder: Path, timeout: float, count: int, environment: Mapping[str, str]
) -> dict[int, int]:
    """Run all ranks and end them; return the exit codes of those that died without a result.

    Each inherits a pipe as stdin, into which nothing is ever written. It is closed when this
    process is gone, in whatever way: a rank that reads from it then knows that it should leave.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Modules that a script has beside it, or a test runner added, are found on the ranks too.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # In the order in which a rank and its child processes print, whatever the locale can write.
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        **environment,
        # What torchrun tells its ranks.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 would listen on that port
        "WORLD_SIZE": str(count),
    }
    command = [sys.executable, "-m", "torchlift.distributed.ranks", str(folder), str(timeout)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with (
                open(folder / f"{rank}.stdout", "wb") as stdout,
                open(folder / f"{rank}.stderr", "wb") as stderr,
            ):
                ranks.append(
                    subprocess.Popen(
                        command,
                        env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=stdout,
                        stderr=stderr,
                        # An interrupt of a terminal is for the caller, which then ends the rest.
                        start_new_session=True,
                    )
                )
        return _wait(folder, timeout, ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started is ended with it
            process.communicate()


def _wait(folder: Path, timeout: float, ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Return when all ranks have left a result, one has died, or the time is up."""
    end, in_grace = time.monotonic() + timeout, False
    while True:
        results = _results(folder)
        codes = {rank: process.poll() for rank, process in enumerate(ranks) if rank not in results}
        died = {rank: code for rank, code in codes.items() if code is not None}
        if died or not codes or time.monotonic() >= end:
            return died
        if not in_grace and any(path.suffix == ".error" for path in results.values()):
            end, in_grace = min(end, time.monotonic() + _GRACE), True
        time.sleep(0.02)


def _results(folder: Path) -> dict[int, Path]:
    """Return rank -> the file with the value or the traceback of each rank that is done."""
    done = [path for path in folder.iterdir() if path.suffix in (".value", ".error")]
    return {int(path.stem): path for path in done}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _ranks(which: Collection[int], count: int) -> str:
    return f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, sorted(which)))} of {count}"


def _death(exit_code: int) -> str:
    if exit_code == 0:
        return "left no result"
    if exit_code > 0:
        return f"died with exit code {exit_code}"
    return f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"


# ---- a rank


def _serve(folder: Path, timeout: float) -> None:
    """Call the function on this rank, leave its result, and wait to be ended."""
    lifeline = threading.Thread(target=_leave_with_the_caller, args=[os.dup(0)], daemon=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function is to see nothing of the pipe
    lifeline.start()
    try:
        suffix, result = ".value", _call(folder, timedelta(seconds=timeout))
    except BaseException as failure:
        suffix, result = ".error", _traceback(failure).encode(errors="backslashreplace")
    part = folder / f"{os.environ['RANK']}.part"
    part.write_bytes(result)
    part.replace(part.with_suffix(suffix))
    lifeline.join()


def _leave_with_the_caller(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


def _call(folder: Path, timeout: timedelta) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    function, args = pickle.loads(folder.joinpath("call").read_bytes())
    return packed(function(*args), "what the function returned")


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file, and of what it sends results with."""
    frames, ours = error.__traceback__, (__file__, inspect.getfile(packed))
    while frames and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), float(sys.argv[2]))

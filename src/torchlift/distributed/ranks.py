"""Run a function on several processes of this machine, from where no other process can import it.

A function that is defined in a cell of a notebook is such a function: it travels by value, with all
that it refers to. The same module is what torch's launcher runs, in a process of its own, and what
runs on every rank:

    python -m torchlift.distributed.ranks launch FOLDER SECONDS COUNT
    python -m torchlift.distributed.ranks rank FOLDER SECONDS

The launcher does not run in the caller's process, nor does it start the ranks from a function: it
would replace the caller's signal handlers, could not be ended after a timeout, and each rank would
run the caller's script once more, as ``multiprocessing`` does.

All meet in a folder. The caller leaves the file ``call`` there; each rank leaves ``RANK.result``,
what it raised or returned; the launcher leaves what they printed, and the exit codes of ranks that
failed in ``failed``.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Seconds that a rank which failed waits for the others, so that an error of all is told by all.
_GRACE = 1.0
# Seconds for the launcher to end its ranks: it needs a fraction of one, unless they refuse.
_PATIENCE = 10.0
# Seconds that every clock here can count to, in milliseconds of 32 bits: eleven days.
_LONGEST = 1e6
_MODULE = "torchlift.distributed.ranks"  # when it is run, its __name__ is another
# The file that says that a rank is about to leave after an error.
_OVER = "over"


def on_ranks(
    count: int,
    function: Callable[..., T],
    *args: object,
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
        ModuleNotFoundError: cloudpickle is not installed.
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
    call = _packed((function, args), f"{name}, what it refers to, or an argument")
    with tempfile.TemporaryDirectory(prefix="torchlift-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        folder.joinpath("call").write_bytes(call)
        try:
            _run(folder, timeout, count, environment or {})
        except subprocess.TimeoutExpired:
            late = _ranks(sorted({*range(count)} - {*_results(folder)}), count)
            raise TimeoutError(f"{late} not done after {timeout:g} s") from None
        finally:
            for rank in range(count):
                print(_printed(folder, rank, "stdout"), end="")
        _raise_failures(folder, count)
        return [pickle.loads(value) for _, (_, value) in sorted(_results(folder).items())]


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


def _run(folder: Path, timeout: float, count: int, environment: Mapping[str, str]) -> None:
    """Run the launcher, and end it and its ranks after `timeout` seconds.

    The ranks inherit a pipe as stdin, into which nothing is ever written. It is closed when this
    process is gone, in whatever way: a rank that reads from it then knows that it should leave.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Modules that a script has beside it, or a test runner added, are found on the ranks too.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # In the order in which a rank and its child processes print, whatever the locale can write.
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        **environment,
    }
    command = [sys.executable, "-m", _MODULE, "launch", str(folder), str(timeout), str(count)]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # An interrupt of a terminal or a notebook is for the caller, which then ends the rest.
            start_new_session=True,
        ) as launcher,
    ):
        assert launcher.stdin is not None
        try:
            launcher.wait(timeout)
        finally:
            # To kill its process group would not do: it starts each rank in a session of its own.
            launcher.stdin.close()
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_PATIENCE)
            launcher.kill()


def _results(folder: Path) -> dict[int, tuple[str, bytes]]:
    """Return rank -> (traceback or an empty text, pickled value) of the ranks that are done."""
    return {int(path.stem): pickle.loads(path.read_bytes()) for path in folder.glob("*.result")}


def _raise_failures(folder: Path, count: int) -> None:
    """Raise one error for all that raised, died, or left no result."""
    results, codes = _results(folder), folder / "failed"
    exits = json.loads(codes.read_bytes()) if codes.exists() else []
    failed = {rank: text for rank, (text, _) in sorted(results.items()) if text}
    for rank, code in sorted(exits):
        if rank not in failed:  # it died, and then the others fail for no reason of their own
            printed = _printed(folder, rank, "stderr")
            raise RuntimeError(f"{_ranks([rank], count)} {_death(code)}\n{printed}".rstrip())
    if failed:
        texts = "".join(f"\n[rank {rank}] {text}".rstrip() for rank, text in failed.items())
        raise RuntimeError(f"{_ranks([*failed], count)} failed{texts}")
    missing = [rank for rank in range(count) if rank not in results]
    if missing:
        log = folder.joinpath("log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{_ranks(missing, count)} left no result\n{log}".rstrip())


def _printed(folder: Path, rank: int, stream: str) -> str:
    """Return what a rank printed, from where torch's launcher has put it."""
    return "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in folder.glob(f"*/attempt_0/{rank}/{stream}.log")
    )


def _ranks(which: Sequence[int], count: int) -> str:
    return f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))} of {count}"


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"died with exit code {exit_code}"
    return f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"


# ---- the caller and a rank


def _packed(content: object, what: str) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "on_ranks sends functions to other processes with cloudpickle, and cloudpickle is not "
            'installed: pip install "torchlift[recipes]"',
            name="cloudpickle",
        ) from error
    try:
        packed: bytes = cloudpickle.dumps(content)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from None
    return packed


# ---- the launcher


def _launch(name: str, timeout: str, count: str) -> None:
    """Start the ranks and wait for them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = DefaultLogsSpecs(name, redirects=Std.ALL)
    config = LaunchConfig(1, 1, int(count), logs, run_id="ranks", max_restarts=0)
    config.rdzv_backend, config.rdzv_endpoint = "c10d", "localhost:0"  # on a free port
    try:
        elastic_launch(config, sys.executable)("-m", _MODULE, "rank", name, timeout)
    except ChildFailedError as error:
        codes = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        Path(name, "failed").write_text(json.dumps(codes), encoding="utf-8")


# ---- a rank


def _live(name: str, timeout: str) -> None:
    """Call the function on this rank, and leave its result; it does not return."""
    folder = Path(name)
    _leave_with_the_caller()
    error, value = "", b""
    try:
        value = _call(folder, timedelta(seconds=float(timeout)))
    except BaseException as failure:
        error = _traceback(failure)
    if folder.joinpath(_OVER).exists():
        os._exit(0)  # another rank has failed and left: this one is not to blame for losing it
    part = folder / f"{os.environ['RANK']}.part"
    part.write_bytes(pickle.dumps((error, value)))
    part.replace(part.with_suffix(".result"))
    _wait_for_all(folder, _GRACE if error else float(timeout))
    if error:
        folder.joinpath(_OVER).touch()
    # The group's threads may still run when the interpreter is torn down, and then abort.
    os._exit(bool(error))


def _leave_with_the_caller() -> None:
    """Watch the pipe that is this rank's stdin, of which the function is to see nothing."""
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _call(folder: Path, timeout: timedelta) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    function, args = pickle.loads(folder.joinpath("call").read_bytes())
    return _packed(function(*args), "what the function returned")


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _wait_for_all(folder: Path, seconds: float) -> None:
    """Stay while another rank may still talk to this one.

    A barrier of the group would not do: the function may have destroyed the group.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and not folder.joinpath(_OVER).exists():
        if len(list(folder.glob("*.result"))) == int(os.environ["WORLD_SIZE"]):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        _launch(*sys.argv[2:])
    else:
        _live(*sys.argv[2:])

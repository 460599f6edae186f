"""Run a function on several processes of this machine, from where no other process can import it.

A function that is defined in a cell of a notebook is such a function: it travels by value, with all
that it refers to. The same module is what runs on every rank:

    python -m torch.distributed.run ... -m torchlift.distributed.ranks FOLDER SECONDS

The two sides meet in a folder. The caller leaves the file ``call`` there; each rank leaves what it
printed in ``RANK.out`` and ``RANK.err``, and in the end either ``RANK.value`` or ``RANK.error``.
"""

from __future__ import annotations

import os
import pickle
import re
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
from types import ModuleType
from typing import TypeVar

from torchlift.distributed.launch import launch_command, run_and_end

T = TypeVar("T")

# Seconds that a rank which failed waits for the others, so that an error of all is told by all.
_GRACE = 1.0
# Seconds in which the launcher surely sees that a rank failed: it looks ten times a second.
_LOOK = 10.0
# Seconds that every clock here can count to, in milliseconds of 32 bits: eleven days.
_LONGEST = 1e6
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
        command = launch_command(count, "-m", __name__, place, str(timeout))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        try:
            log = run_and_end(command, {**variables, **(environment or {})}, timeout)
        except subprocess.TimeoutExpired:
            late = _ranks(_without_value(folder, count), count)
            raise TimeoutError(f"{late} not done after {timeout:g} s") from None
        finally:
            for rank in range(count):
                print(_text(folder, rank, "out"), end="")
        _raise_failures(folder, count, log)
        return [pickle.loads(_file(folder, rank, "value").read_bytes()) for rank in range(count)]


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


def _python_path() -> str:
    """Modules that a script has beside it, or a test runner added, are found on the ranks too."""
    return os.pathsep.join(filter(None, sys.path))


def _raise_failures(folder: Path, count: int, log: str) -> None:
    failed = {rank: _text(folder, rank, "error") for rank in range(count)}
    failed = {rank: text for rank, text in failed.items() if text}
    # The launcher alone sees how a rank died. The others then fail too, for no reason of their own.
    first = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", log, re.DOTALL)
    if first and int(first[1]) not in failed:
        said = _text(folder, int(first[1]), "err")
        died = f"{_ranks([int(first[1])], count)} {_death(int(first[2]))}"
        raise RuntimeError(f"{died}\n{said}".rstrip())
    if failed:
        texts = "".join(f"\n[rank {rank}] {text}".rstrip() for rank, text in failed.items())
        raise RuntimeError(f"{_ranks(failed, count)} failed{texts}")
    missing = _without_value(folder, count)
    if missing:
        raise RuntimeError(f"{_ranks(missing, count)} left no result\n{log}".rstrip())


def _without_value(folder: Path, count: int) -> list[int]:
    return [rank for rank in range(count) if not _file(folder, rank, "value").exists()]


def _ranks(which: Sequence[int] | Mapping[int, object], count: int) -> str:
    return f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))} of {count}"


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"died with exit code {exit_code}"
    return f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"


# ---- both


def _packed(content: object, what: str) -> bytes:
    dumps = _cloudpickle().dumps
    try:
        packed: bytes = dumps(content)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from None
    return packed


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "on_ranks sends functions to other processes with cloudpickle, and cloudpickle is not "
            'installed: pip install "torchlift[recipes]"',
            name="cloudpickle",
        ) from error
    module: ModuleType = cloudpickle
    return module


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"{rank}.{kind}"


def _text(folder: Path, rank: int, kind: str) -> str:
    with suppress(FileNotFoundError):
        return _file(folder, rank, kind).read_text(encoding="utf-8", errors="replace")
    return ""


# ---- a rank


def _main(name: str, timeout: str) -> None:
    """The life of a rank. It does not return."""
    folder, rank = Path(name), int(os.environ["RANK"])
    _leave_with_the_caller()
    _redirect(folder, rank)
    try:
        kind, content = "value", _call(folder, timedelta(seconds=float(timeout)))
    except BaseException as error:
        kind, content = "error", _traceback(error).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    if folder.joinpath(_OVER).exists():
        # Another rank has failed and left: the launcher ends this one, and must see that one first.
        time.sleep(_LOOK)
    _write(_file(folder, rank, kind), content)
    _wait_for_all(folder, _GRACE if kind == "error" else float(timeout))
    if kind == "error":
        folder.joinpath(_OVER).touch()
    # The group's threads may still run when the interpreter is torn down, and then abort.
    os._exit(kind == "error")


def _leave_with_the_caller() -> None:
    lifeline = os.dup(0)

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _redirect(folder: Path, rank: int) -> None:
    """The streams themselves: what C code and child processes print is kept as well."""
    with (
        open(os.devnull, "rb") as nothing,
        open(_file(folder, rank, "out"), "wb") as out,
        open(_file(folder, rank, "err"), "wb") as err,
    ):
        for number, file in enumerate((nothing, out, err)):
            os.dup2(file.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )


def _call(folder: Path, timeout: timedelta) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    function, args = pickle.loads(folder.joinpath("call").read_bytes())
    return _packed(function(*args), "what the function returned")


def _traceback(error: BaseException) -> str:
    """Without the frames of this file."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _write(path: Path, content: bytes) -> None:
    """Under its name only when it is complete: others look whether it is there."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def _wait_for_all(folder: Path, seconds: float) -> None:
    """Nobody leaves while another one may still talk to it.

    A barrier of the group would not do: the function may have destroyed the group.
    """
    end = time.monotonic() + seconds
    count = int(os.environ["WORLD_SIZE"])
    while time.monotonic() < end and not folder.joinpath(_OVER).exists():
        if sum(path.suffix in (".value", ".error") for path in folder.iterdir()) == count:
            return
        time.sleep(0.02)


if __name__ == "__main__":
    _main(*sys.argv[1:])

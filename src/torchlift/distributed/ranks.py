"""Run a function on several processes of this machine, from where no other process can import it.

A function from a notebook cell is such a function: it is sent by value, with everything that it
refers to.

The caller and the ranks share a folder. The caller leaves the file ``call`` there. Each rank leaves
what it printed, and its value in ``RANK.value`` or its traceback in ``RANK.error``. Then the rank
waits to be ended: another rank may still talk to it.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from torchlift._system.zygote import Child, format_error, packed, start

T = TypeVar("T")
# Not a ParamSpec, which leaves no room for options beside the arguments.
Ts = TypeVarTuple("Ts")

# Seconds that a rank which failed waits for the others, so that an error of all is told by all.
_GRACE = 1.0
# Seconds that every clock here can count to, in milliseconds of 32 bits: eleven days.
_LONGEST = 1e6


def on_ranks(
    count: int,
    function: Callable[[*Ts], T],
    *args: *Ts,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    fork: bool = True,
) -> list[T]:
    """Run ``function(*args)`` on processes of this machine that form a process group.

    Made for notebooks and examples: the function may be defined in a cell, in a script or inside
    another function. It is sent with everything that it refers to there, by cloudpickle
    (``pip install "torchlift[recipes]"``). Modules are imported on each rank. The group is
    ``gloo``, on the CPU, and each process has one thread.

    When all ranks are done, their output is printed here, one rank after the other. Their stderr,
    with the warnings, is shown only if a rank dies.

    Args:
        count: Number of processes.
        function: Called on each rank, in the process group.
        *args: Its arguments, the same on each rank.
        timeout: Seconds for everything, the start included. No process is left behind.
        environment: Environment variables to add.
        fork: Whether ranks may be forked from a process that has imported torch. Pass False to
            start new interpreters, as `torchlift.measure.in_child` does.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        ValueError: If `count` is below 1 or not an integer, or `timeout` is not above 0.
        TypeError: If the function or an argument cannot be sent to another process, or a variable
            is not text.
        ModuleNotFoundError: If cloudpickle is not installed.
        RuntimeError: If a rank raised or died. The message has its number and its traceback. The
            other ranks are ended.
        TimeoutError: If a rank was not done in time.

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
            codes = _run(folder, timeout, count, environment or {}, fork)
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
    folder: Path, timeout: float, count: int, environment: Mapping[str, str], fork: bool
) -> dict[int, int]:
    """Run all ranks and end them; return the exit codes of those that died without a result."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    variables = {
        "OMP_NUM_THREADS": "1",
        **environment,
        # What torchrun tells its ranks.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 would listen on that port
        "WORLD_SIZE": str(count),
    }
    with ExitStack() as stack:
        ranks = []
        for rank in range(count):
            with (
                open(folder / f"{rank}.stdout", "wb") as stdout,
                open(folder / f"{rank}.stderr", "wb") as stderr,
            ):
                child = start(
                    f"{__name__}:_serve",
                    str(folder),
                    timeout,
                    environment={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=stdout.fileno(),
                    stderr=stderr.fileno(),
                    fork=fork,
                )
            ranks.append(stack.enter_context(child))
        return _wait(folder, timeout, ranks)


def _wait(folder: Path, timeout: float, ranks: Sequence[Child]) -> dict[int, int]:
    """Return when all ranks have left a result, one has died, or the time is up."""
    end, in_grace = time.monotonic() + timeout, False
    while True:
        results = _results(folder)
        codes = {rank: child.wait(0) for rank, child in enumerate(ranks) if rank not in results}
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


def _serve(folder: str, timeout: float) -> None:
    """Call the function on this rank, leave its result, and wait to be ended."""
    try:
        suffix, result = ".value", _call(Path(folder), timedelta(seconds=timeout))
    except BaseException as failure:
        text = format_error(failure, __file__)
        suffix, result = ".error", text.encode(errors="backslashreplace")
    part = Path(folder, f"{os.environ['RANK']}.part")
    part.write_bytes(result)
    part.replace(part.with_suffix(suffix))
    while True:
        signal.pause()


def _call(folder: Path, timeout: timedelta) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    function, args = pickle.loads(folder.joinpath("call").read_bytes())
    return packed(function(*args), "what the function returned")

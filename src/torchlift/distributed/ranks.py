"""Run a function on several processes of this machine, also a function from a notebook cell.

The caller and the ranks share a folder. The caller writes the function and its arguments to the
file ``call``. Each rank writes its output, and its value to ``RANK.value`` or its traceback to
``RANK.error``. Then the rank waits until the caller ends it: another rank may still need it.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

from torchlift._system.zygote import Child, format_error, packed, start

T = TypeVar("T")
# Not a ParamSpec: it does not permit options next to the arguments.
Ts = TypeVarTuple("Ts")

# Seconds that the caller waits after an error, so that it also receives those of other ranks.
_GRACE = 1.0
# The longest timeout in seconds, eleven days: some clocks count milliseconds in 32 bits.
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

    The function may be defined in a notebook cell, in a script or inside another function. It is
    sent with everything that it refers to, by cloudpickle. The group is ``gloo``, on the CPU, and
    each process has one thread. The output of all ranks is printed at the end. Their stderr is
    shown only if a rank dies.

    Args:
        count: Number of processes.
        function: The function to call on each rank.
        *args: Its arguments, equal on each rank.
        timeout: Seconds for everything, including the start. No process is left behind.
        environment: Environment variables to add. They start new interpreters, because libraries
            read some variables only once.
        fork: Whether ranks may be forked from a process that has imported torch. False starts new
            interpreters.

    Returns:
        The value that each rank returned, in the order of ranks.

    Raises:
        ValueError: If `count` is below 1 or not an integer, or `timeout` is not above 0.
        TypeError: If the function or an argument cannot be sent, or a variable is not text.
        RuntimeError: If a rank raised or died. The message has its number and its traceback.
        TimeoutError: If a rank was not done in time.

    Example:
        >>> import torch.distributed as dist
        >>> from torchlift.distributed import on_ranks
        >>> on_ranks(2, dist.get_rank)
        [0, 1]
    """
    _check(count, timeout, environment or {})
    end = time.monotonic() + min(timeout, _LONGEST)
    name = getattr(function, "__qualname__", repr(function))
    call = packed((function, args), f"{name}, what it refers to, or an argument")
    with tempfile.TemporaryDirectory(prefix="torchlift-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        folder.joinpath("call").write_bytes(call)
        try:
            died, results = _run(folder, end, count, environment or {}, fork)
        finally:
            for rank in range(count):
                print(_text(folder / f"{rank}.stdout"), end="")
        for rank, code in died.items():  # a dead rank is the cause of the others' errors
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


def _check(count: object, timeout: object, environment: Mapping[str, object]) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count must be a whole number of processes from 1 on, not {count!r}")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, not {timeout!r}")
    for name, value in environment.items():
        if not isinstance(value, str):
            raise TypeError(f"environment variable {name} must be text, not {value!r}")


class _Outcome(NamedTuple):
    """The state of the ranks before they are ended.

    Attributes:
        died: Rank -> exit code, of those that died without a result.
        results: Rank -> its file with the value or the traceback. A rank that is ended later may
            still write the error that another one causes by its end.
    """

    died: dict[int, int]
    results: dict[int, Path]


def _run(
    folder: Path, end: float, count: int, environment: Mapping[str, str], fork: bool
) -> _Outcome:
    """Run all ranks, and end them."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    variables = {
        "OMP_NUM_THREADS": "1",
        **environment,
        # torchrun sets these variables.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 would listen on that port
        "WORLD_SIZE": str(count),
    }
    ranks: list[Child] = []
    with ExitStack() as stack, suppress(TimeoutError):  # it is up before all of them have started
        for rank in range(count):
            left = end - time.monotonic()
            with (
                open(folder / f"{rank}.stdout", "wb") as stdout,
                open(folder / f"{rank}.stderr", "wb") as stderr,
            ):
                child = start(
                    f"{__name__}:_serve",
                    str(folder),
                    left,
                    environment={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=stdout.fileno(),
                    stderr=stderr.fileno(),
                    fork=fork and not environment,
                    timeout=left,
                )
            ranks.append(stack.enter_context(child))
        return _wait(folder, end, ranks)
    return _Outcome({}, {})


def _wait(folder: Path, end: float, ranks: Sequence[Child]) -> _Outcome:
    """Return when all ranks have written a result, one has died, or the time is up."""
    in_grace = False
    while True:
        results = _results(folder)
        codes = {rank: child.wait(0) for rank, child in enumerate(ranks) if rank not in results}
        died = {rank: code for rank, code in codes.items() if code is not None}
        if died or not codes or time.monotonic() >= end:
            return _Outcome(died, results)
        if not in_grace and any(path.suffix == ".error" for path in results.values()):
            end, in_grace = min(end, time.monotonic() + _GRACE), True
        time.sleep(0.02)


def _results(folder: Path) -> dict[int, Path]:
    """Return rank -> the file with its value or its traceback, for ranks that are done."""
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

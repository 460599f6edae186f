"""`in_child`: run a function in a new process and measure its time and memory.

A process that has already loaded something hides costs: imports are done, the allocator has free
pages, and file pages are mapped. Measure a number that you publish in a new process.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

from torchlift._system.memory import c_function, trim
from torchlift._system.zygote import format_error, packed, start
from torchlift.measure.meter import MemoryUse, memory


class ChildError(RuntimeError):
    """The child process failed, was killed, or ran out of time.

    Attributes:
        returncode: Its exit status, negative for a signal. None if it ran out of time.
        stdout: Its standard output.
        stderr: Its standard error, with the traceback.
    """

    def __init__(self, reason: str, returncode: int | None, stdout: str, stderr: str) -> None:
        super().__init__(f"{reason}\n{stderr.rstrip()}" if stderr.strip() else reason)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


@dataclass(frozen=True)
class ChildResult:
    """The result of a function in a child process.

    Attributes:
        value: The value that the function returned.
        seconds: Time of the function, without the start of the process.
        memory: Memory during that time. The baseline is taken after the start.
        stdout: Its standard output.
        stderr: Its standard error.
    """

    value: Any
    seconds: float
    memory: MemoryUse
    stdout: str
    stderr: str


def in_child(
    function: Callable[..., Any],
    *args: object,
    timeout: float = 600.0,
    env: Mapping[str, str] | None = None,
    fork: bool = True,
) -> ChildResult:
    """Run a function in a new process and measure its time and memory from outside.

    The function may be defined in a notebook cell, in a script or inside another function. It is
    sent with everything that it refers to, by cloudpickle.

    The measurement begins when the libraries are imported and their pages are mapped. File-backed
    memory therefore counts the files that the function maps. To measure a part of the function, use
    `memory` inside.

    Args:
        function: Called with the arguments.
        *args: Anything that pickle can send.
        timeout: Seconds for everything, including the start. Then the child is killed.
        env: Environment variables to add. They start a new interpreter, because libraries read
            some variables only once.
        fork: Whether the child may be forked from a process that has imported torch, which takes
            20 ms. NumPy's own linear algebra has one thread in a forked child. Pass False to start
            a new interpreter: to time an import. A new interpreter also starts if forking is not
            possible: outside of Linux, or if torch finds an accelerator.

    Returns:
        The value, the seconds and the memory.

    Raises:
        ChildError: If the child raised (the message has its traceback), was killed by a signal, or
            ran out of time.
        TypeError: If the function, an argument or the result cannot be sent.

    Example:
        >>> import time
        >>> from torchlift import measure
        >>> def work(size):
        ...     block = bytearray(size)
        ...     time.sleep(0.05)  # memory that is freed within a millisecond is not seen
        ...     return len(block)
        >>> child = measure.in_child(work, 2**24)
        >>> child.value, 16 <= child.memory.added_anonymous / 2**20 < 24
        (16777216, True)
    """
    name = getattr(function, "__qualname__", repr(function))
    call = packed((function, args), f"{name}, an object it refers to, or an argument")
    end, status = time.monotonic() + min(timeout, _LONGEST), None
    with tempfile.TemporaryDirectory(prefix="torchlift-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        printed = folder / "stdout", folder / "stderr"
        with (
            open(printed[0], "wb") as stdout,
            open(printed[1], "wb") as stderr,
            suppress(TimeoutError),  # the time is up before the child has started
            start(
                f"{__name__}:_measure",
                call,
                str(folder / "answer"),
                environment=env,
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
                fork=fork and not env,
                timeout=end - time.monotonic(),
            ) as child,
        ):
            status = child.wait(end - time.monotonic())
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in printed]
        if status is None:
            how = f"was not done after {timeout:g} s"
        elif status < 0:
            how = f"was killed by signal {-status}"
        else:
            how = f"exited with status {status}"
        answer = folder / "answer"
        if status == 0 and not answer.exists():
            how = "did not return a result"
        elif status == 0:
            value, seconds, use = pickle.loads(answer.read_bytes())
            return ChildResult(pickle.loads(value), seconds, use, *texts)
    raise ChildError(f"the child process {how}", status, *texts)


def _measure(call: bytes, answer: str) -> None:
    """Call the function in the child and write the answer."""
    try:
        function, args = pickle.loads(call)
        _map_libraries()
        trim()  # else memory that the imports freed hides what the function allocates
        with memory(interval=0.001) as use:
            start = time.perf_counter()
            value = function(*args)
            seconds = time.perf_counter() - start
        sent = packed(value, "the returned value")
    except Exception as error:
        print(format_error(error, __file__), end="", file=sys.stderr)
        sys.exit(1)
    Path(answer).write_bytes(pickle.dumps((sent, seconds, use)))


_LONGEST = 1e6  # seconds, which fit in milliseconds of 32 bits
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ [1-9]\d* +/.*\.so\b")
_POPULATE_READ = 22  # of madvise, since Linux 5.14


def _map_libraries() -> None:
    """Map all pages of the libraries. Otherwise they count as the function's when it uses them.

    A fork does not inherit mapped pages of files. A new interpreter has those that imports touched.
    GPU libraries are left out: they take several GB, and work on the CPU never touches them.
    """
    if not os.path.exists("/proc/self/maps"):
        return
    from ctypes import c_size_t, c_void_p, string_at

    populate = c_function("madvise")
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        found = _MAPPING.match(line)
        if found and "nvidia" not in line and "cuda" not in line:
            first, last = int(found[1], 16), int(found[2], 16)
            if populate(c_void_p(first), c_size_t(last - first), _POPULATE_READ) != 0:
                for page in range(first, last, PAGESIZE):
                    string_at(page, 1)

"""`in_child`: run a function in a new process and bring back its result, its time and its memory.

A process that has already loaded something hides costs: imports are done, the allocator has free
pages, file pages are mapped. A headline number therefore comes from a process of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlift._system import packed
from torchlift.measure.meter import MemoryUse, memory

# sys.path travels along: a script's or a notebook's own folder is on it only by accident of how
# the parent was started. Safe paths (-P) are not an option on Python 3.10.
_BOOTSTRAP = """\
import pickle, sys
sys.path[:], *request = pickle.load(sys.stdin.buffer)
from torchlift.measure.child import _serve
_serve(*request)
"""


class ChildError(RuntimeError):
    """The child process failed, was killed, or ran out of time.

    Attributes:
        returncode: its exit status, negative for a signal; None when it ran out of time.
        stdout: what it had printed.
        stderr: what it had printed there, the traceback included.
    """

    def __init__(self, reason: str, returncode: int | None, stdout: str, stderr: str) -> None:
        super().__init__(f"{reason}\n{stderr.rstrip()}" if stderr.strip() else reason)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


@dataclass(frozen=True)
class ChildResult:
    """What a child process did.

    Attributes:
        value: what the function returned.
        seconds: time of the function itself, without the start of the process.
        memory: its memory during that time; the baseline comes after the start.
        stdout: what it printed.
        stderr: what it printed there.
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
    interval: float = 0.001,
    env: Mapping[str, str] | None = None,
) -> ChildResult:
    """Run a function in a new Python process and measure it there, from outside.

    The function may be defined in a cell of a notebook, in a script, or inside of another function:
    it is sent with all that it refers to, by cloudpickle (``pip install "torchlift[recipes]"``); a
    function of a module that can be imported does without. Modules that it refers to are imported
    before the measurement begins. To measure a part of it, use `memory` inside.

    Args:
        function: called with the arguments.
        *args: anything that can be sent.
        timeout: seconds until the child is killed.
        interval: pause between memory samples, in seconds.
        env: environment variables to add.

    Returns:
        The value, the seconds and the memory.

    Raises:
        ChildError: the child ended with an error (its message has the traceback), was killed by a
            signal, or ran out of time.
        TypeError: the function, an argument, or what the child returns cannot be sent.
        ModuleNotFoundError: it takes cloudpickle to send the function, which is not installed.

    Example:
        >>> import time
        >>> from torchlift import measure
        >>> def work(size):
        ...     block = bytearray(size)
        ...     time.sleep(0.05)  # what is taken and given back within a millisecond is not seen
        ...     return len(block)
        >>> child = measure.in_child(work, 2**24)
        >>> child.value, 16 <= child.memory.added_anonymous / 2**20 < 24
        (16777216, True)
    """
    name = getattr(function, "__qualname__", repr(function))
    call = packed((function, args), f"{name}, what it refers to, or an argument", "in_child")
    with tempfile.TemporaryDirectory(prefix="torchlift-") as folder:
        answer = Path(folder, "answer")
        child = _run(pickle.dumps((sys.path, call, interval, answer)), timeout, env or {})
        value, seconds, use = pickle.loads(answer.read_bytes())
    return ChildResult(pickle.loads(value), seconds, MemoryUse.from_dict(use), *child)


def _run(request: bytes, timeout: float, env: Mapping[str, str]) -> tuple[str, str]:
    """Run a child to its end and return what it printed, or raise `ChildError`.

    An interrupted call leaves none running.
    """
    status: int | None
    try:
        child = subprocess.run(
            [sys.executable, "-c", _BOOTSTRAP],
            input=request,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **env},
            check=False,
        )
        status, printed = child.returncode, (child.stdout, child.stderr)
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    except subprocess.TimeoutExpired as error:
        status, printed = None, (error.stdout or b"", error.stderr or b"")
        how = f"was still running after {timeout:g} s"
    stdout, stderr = (text.decode("utf-8", "replace") for text in printed)
    if status != 0:
        raise ChildError(f"the child process {how}", status, stdout, stderr)
    return stdout, stderr


def _serve(call: bytes, interval: float, answer: Path) -> None:
    """Call the function in the child and write the answer."""
    function, args = pickle.loads(call)
    with memory(interval=interval, sampler="process") as use:
        start = time.perf_counter()
        value = function(*args)
        seconds = time.perf_counter() - start
    sent = packed(value, "what the function returned", "in_child")
    answer.write_bytes(pickle.dumps((sent, seconds, use.to_dict())))

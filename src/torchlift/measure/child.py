"""`in_child`: run a function in a new process and bring back its result, its time and its memory.

A process that has already loaded something hides costs: imports are done, the allocator has free
pages, file pages are mapped. A headline number therefore comes from a process of its own.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlift.distributed.ranks import packed
from torchlift.measure.meter import MemoryUse, memory

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# sys.path travels along: a script's or a notebook's own folder is on it only by accident of how
# the parent was started. Safe paths (-P) are not an option on Python 3.10.
_BOOTSTRAP = """\
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
from torchlift.measure.child import _serve
_serve(request)
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
        value: what the function returned, or the code's variable ``result``.
        seconds: time of the code or function itself, without start and setup.
        memory: its memory during that time; the baseline comes after start and setup.
        stdout: what it printed.
        stderr: what it printed there.
    """

    value: Any
    seconds: float
    memory: MemoryUse
    stdout: str
    stderr: str


def in_child(
    function: Callable[..., Any] | str,
    *args: object,
    setup: str = "",
    finish: str = "",
    timeout: float = 600.0,
    interval: float = 0.001,
    env: Mapping[str, str] | None = None,
) -> ChildResult:
    """Run a function in a new Python process and measure it there, from outside.

    The function may be defined in a cell of a notebook, in a script, or inside of another function:
    it is sent with all that it refers to, by cloudpickle (``pip install "torchlift[recipes]"``).
    Modules that it refers to are imported before the measurement begins.

    Args:
        function: called with the arguments. Or its name, ``"package.module:function"``; or Python
            source, which finds the arguments in ``args``, may call ``use.mark(label)`` and leaves
            what it is to return in ``result``.
        *args: anything that can be sent; for a name or source, plain JSON data.
        setup: Python source to run first, neither timed nor measured: imports, mostly. The code
            sees its names.
        finish: Python source to run last, again outside the measurement: it can look at what the
            code made and leave a summary of it in ``result``.
        timeout: seconds until the child is killed.
        interval: pause between memory samples, in seconds.
        env: environment variables to add.

    Returns:
        The value, the seconds and the memory.

    Raises:
        ChildError: the child ended with an error (its message has the traceback), was killed by a
            signal, or ran out of time.
        TypeError: the function, an argument, or what the child returns cannot be sent.
        ModuleNotFoundError: a function is to be sent and cloudpickle is not installed.

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
    call, code = None, "result = call(*args)"
    if not isinstance(function, str):
        name = getattr(function, "__qualname__", repr(function))
        call = _sent((function, args), f"{name}, what it refers to, or an argument")
        args = ()
    elif _FUNCTION.fullmatch(function):
        setup = f"import pkgutil\ncall = pkgutil.resolve_name({function!r})\n{setup}"
    else:
        code = function
    with tempfile.TemporaryDirectory(prefix="torchlift-") as folder:
        answer_file = Path(folder, "answer.json")
        request = {
            "code": code, "setup": setup, "finish": finish, "args": args,
            "interval": interval, "path": sys.path, "answer": str(answer_file), "call": call,
        }  # fmt: skip
        child = _run(json.dumps(request), timeout, env or {})
        answer = json.loads(answer_file.read_text(encoding="utf-8"))
    use, value = MemoryUse.from_dict(answer["memory"]), answer["value"]
    if call is not None:
        value = _received(value)
    return ChildResult(value, answer["seconds"], use, child.stdout, child.stderr)


def _sent(content: object, what: str) -> str:
    return base64.b64encode(packed(content, what, "in_child")).decode("ascii")


def _received(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _run(request: str, timeout: float, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a child to its end, or raise `ChildError`; an interrupted call leaves none running."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _BOOTSTRAP],
            input=request,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **env},
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        # These are bytes, or None, even where an encoding is given.
        printed = [
            (text or b"").decode("utf-8", "replace") for text in (error.stdout, error.stderr)
        ]
        reason = f"the child process was still running after {timeout:g} s"
        raise ChildError(reason, None, *printed) from None
    status = child.returncode
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        raise ChildError(f"the child process {how}", status, child.stdout, child.stderr)
    return child


def _serve(request: dict[str, Any]) -> None:
    """Run the request in the child and write the answer."""
    setup, code, finish = (
        compile(request[name], f"<{name}>", "exec") for name in ("setup", "code", "finish")
    )
    names: dict[str, Any] = {"__name__": "__torchlift_child__", "args": request["args"]}
    if request["call"] is not None:
        names["call"], names["args"] = _received(request["call"])
    exec(setup, names)
    with memory(interval=request["interval"], sampler="process") as names["use"]:
        start = time.perf_counter()
        exec(code, names)
        seconds = time.perf_counter() - start
    use = names["use"]
    names.setdefault("result", None)
    exec(finish, names)
    value = names["result"]
    if request["call"] is not None:
        value = _sent(value, "what the function returned")
    answer = {"value": value, "seconds": seconds, "memory": use.to_dict()}
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")

"""`in_child`: run code in a fresh process and bring back its result, its time and its memory.

A process that has already loaded something hides costs: imports are done, the allocator has free
pages, file pages are mapped. A headline number therefore comes from a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlift.measure.meter import MemoryUse, memory

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# sys.path travels along: a script's or a notebook's own folder is on it only by accident of how
# the parent was started. Safe paths (-P) are not an option on Python 3.10.
_BOOTSTRAP = """\
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    request = json.load(file)
sys.path[:] = request["path"]
from torchlift.measure.child import _serve
_serve(request, sys.argv[2])
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
        value: what the function returned, or the code's variable ``result``; plain JSON data.
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
    code: str,
    *args: object,
    setup: str = "",
    finish: str = "",
    timeout: float = 600.0,
    interval: float = 0.001,
    env: Mapping[str, str] | None = None,
) -> ChildResult:
    """Run code in a fresh Python process and measure it there, from outside.

    Args:
        code: Python source, which finds the arguments in ``args``, may call ``use.mark(label)`` and
            leaves what it wants to return in ``result``; or ``"package.module:function"``, imported
            during setup and called with the arguments.
        *args: plain JSON data (a path as `str`).
        setup: Python source to run first, neither timed nor measured: imports, mostly. The code
            sees its names.
        finish: Python source to run last, again outside the measurement: it can look at what the
            code made and leave a summary of it in ``result``.
        timeout: seconds until the child is killed.
        interval: pause between memory samples, in seconds.
        env: environment variables to add.

    Returns:
        the value, the seconds and the memory.

    Raises:
        ChildError: the child ended with an error (its message has the traceback), was killed by a
            signal, or ran out of time.
        TypeError: an argument, or what the child returns, is not JSON data.

    Example:
        >>> from torchlift import measure
        >>> child = measure.in_child("data = bytearray(args[0]); result = len(data)", 2**24)
        >>> child.value, 16 <= child.memory.added_anonymous / 2**20 < 24
        (16777216, True)
    """
    request = {
        "code": code, "setup": setup, "finish": finish, "args": args,
        "interval": interval, "path": sys.path,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="torchlift-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-c", _BOOTSTRAP, str(asked), str(answered)]
        stdout, stderr = _run(command, timeout, {**os.environ, **(env or {})})
        answer = json.loads(answered.read_text(encoding="utf-8"))
    use = MemoryUse.from_dict(answer["memory"])
    return ChildResult(answer["value"], answer["seconds"], use, stdout, stderr)


def _run(command: list[str], timeout: float, env: dict[str, str]) -> tuple[str, str]:
    """Run to the end; give the output as text, or raise `ChildError`."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            reason = f"the child process was still running after {timeout:g} s"
            raise ChildError(reason, None, stdout, stderr) from None
        except BaseException:  # an interrupted notebook cell must not leave the child running
            process.kill()
            raise
    status = process.returncode
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        raise ChildError(f"the child process {how}", status, stdout, stderr)
    return stdout, stderr


def _serve(request: dict[str, Any], answer: str) -> None:
    """The child's side."""
    namespace: dict[str, Any] = {"__name__": "__torchlift_child__", "args": request["args"]}
    exec(compile(request["setup"], "<setup>", "exec"), namespace)
    call = _callable(request["code"], namespace)
    use = memory(interval=request["interval"], sampler="process")
    with use:
        namespace["use"] = use
        start = time.perf_counter()
        value = call(*request["args"])
        seconds = time.perf_counter() - start
    if request["finish"]:
        namespace["result"] = value
        exec(compile(request["finish"], "<finish>", "exec"), namespace)
        value = namespace["result"]
    with open(answer, "w", encoding="utf-8") as file:
        json.dump({"value": value, "seconds": seconds, "memory": use.to_dict()}, file)


def _callable(code: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    if _FUNCTION.fullmatch(code):
        module, _, name = code.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]
    compiled = compile(code, "<code>", "exec")

    def run(*_: object) -> Any:
        exec(compiled, namespace)
        return namespace.get("result")

    return run

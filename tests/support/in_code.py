"""Source text in a new process, where a test must tell setup from what is measured."""

from __future__ import annotations

import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forked import run

from torchlift import measure


def in_code(
    code: str,
    *args: object,
    setup: str = "",
    finish: str = "",
    timeout: float = 600.0,
    **words: Any,
) -> measure.ChildResult:
    """Run `setup`, then the measured `code`, then `finish`, which share names.

    They find the arguments in ``args`` and the measurement in ``use``, and leave ``result``.
    """
    child = measure.in_child(_run, code, args, setup, finish, timeout=timeout, **words)
    value, seconds, use = child.value
    memory = measure.MemoryUse.from_dict(use)
    return replace(child, value=value, seconds=seconds, memory=memory)


def in_forked(code: str, *args: object, setup: str = "", finish: str = "") -> measure.ChildResult:
    """Do the same in a forked process: where what is measured is no import."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "work")
        path.write_bytes(pickle.dumps((code, args, setup, finish)))
        done = run(Path(__file__), path)
        assert done.returncode == 0, done.stderr
        value, seconds, use = pickle.loads(path.read_bytes())
    memory = measure.MemoryUse.from_dict(use)
    return measure.ChildResult(value, seconds, memory, done.stdout, done.stderr)


def _run(code: str, args: tuple[object, ...], setup: str, finish: str) -> tuple[Any, float, Any]:
    names: dict[str, Any] = {"__name__": "__torchlift_child__", "args": args}
    exec(setup, names)
    with measure.memory(sampler="process") as names["use"]:
        start = time.perf_counter()
        exec(code, names)
        seconds = time.perf_counter() - start
    use = names["use"].to_dict()
    exec(finish, names)
    return names.get("result"), seconds, use


if __name__ == "__main__":
    work = Path(sys.argv[1])
    work.write_bytes(pickle.dumps(_run(*pickle.loads(work.read_bytes()))))

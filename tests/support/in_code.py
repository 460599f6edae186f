"""Source text in a new process, where a test must tell setup from what is measured."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

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
    return replace(child, value=value, seconds=seconds, memory=use)


def _run(code: str, args: tuple[object, ...], setup: str, finish: str) -> tuple[Any, float, Any]:
    names: dict[str, Any] = {"__name__": "__torchlift_child__", "args": args}
    exec(setup, names)
    with measure.memory() as names["use"]:
        start = time.perf_counter()
        exec(code, names)
        seconds = time.perf_counter() - start
    exec(finish, names)
    return names.get("result"), seconds, names["use"]

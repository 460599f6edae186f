"""Interrupt a call at every one of its steps: of a process of its own, in case that it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torchlift

_OURS = next(iter(torchlift.__path__))
#: Between two steps that are interrupted; 1 interrupts every one, and takes an hour.
EVERY = int(os.environ.get("TORCHLIFT_INTERRUPT_EVERY", "0"))


def run_interrupted(script: Path, *words: object, every: int) -> None:
    """Run a script that interrupts itself at every so many steps, and require that it ends well."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), *map(str, words), str(EVERY or every)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


class Step:
    """Count the steps of our code in a call, and interrupt at one of them.

    Args:
        nth: the number of that step, from 1 on; 0 for none.
        files: ends of the paths of source files whose steps count.
        raw: raise at once, whoever holds interrupts back, as a second Ctrl-C does. Then the steps
            are calls, or else opcodes.
    """

    def __init__(self, nth: int, files: tuple[str, ...], *, raw: bool) -> None:
        self.nth, self.files, self.raw = nth, files, raw
        self.count = 0
        self.at = ""
        self._known: dict[CodeType, bool] = {}

    def run(self, call: Callable[[], object]) -> bool:
        """Call it; return whether it ended with an interrupt."""
        sys.settrace(self._called)
        try:
            call()
        except KeyboardInterrupt:  # not kept: with its traceback it would keep what it has ended
            return True
        finally:
            sys.settrace(None)
        return False

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = code.co_filename.endswith(self.files)
        if not self._known[code]:
            return None
        self._step(frame)
        frame.f_trace_opcodes = not self.raw
        return None if self.raw else self._inside

    def _inside(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self._step(frame)
        return self._inside

    def _step(self, frame: FrameType) -> None:
        self.count += 1
        if self.count == self.nth:
            self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if self.raw:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

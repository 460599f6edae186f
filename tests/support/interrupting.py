"""Interrupt a call at every one of its steps: of a process of its own, in case that it hangs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch
from forked import run

#: Between two steps that are interrupted; 1 interrupts every one, and takes an hour.
EVERY = int(os.environ.get("TORCHLIFT_INTERRUPT_EVERY", "0"))
Words = tuple[object, ...]


@cache
def interrupted(script: Path, runs: tuple[Words, ...]) -> dict[Words, str]:
    """Run a script that interrupts itself, once for each of the words that it takes.

    Returns:
        Words -> what went wrong, or an empty text.
    """
    with TemporaryDirectory() as out:
        done = run(script, json.dumps(runs), out)
        assert done.returncode == 0, done.stderr
        texts = [Path(out, f"{number}.txt").read_text("utf-8") for number in range(len(runs))]
    return dict(zip(runs, texts, strict=True))


def in_turn(run: Callable[..., None]) -> None:
    """Call it with each of the words, a folder and the steps between interrupts: a script's body.

    Each in a process that is forked from the one that has imported torch.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    for number, (*words, every) in enumerate(json.loads(sys.argv[1])):
        folder, errors = Path(sys.argv[2], str(number)), Path(sys.argv[2], f"{number}.txt")
        folder.mkdir()
        pid = os.fork()
        if not pid:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
            run(*words, folder, EVERY or every)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not status:
            errors.write_text("", encoding="utf-8")
        elif not errors.read_text(encoding="utf-8"):
            errors.write_text(f"it ended with the status {status}", encoding="utf-8")


class Step:
    """Count the steps of our code in a call, and interrupt at one of them.

    Args:
        nth: the number of that step, from 1 on; 0 for none.
        files: ends of the paths of source files whose steps count.
        raw: raise at once, whoever holds interrupts back, as a second Ctrl-C does. Then the steps
            are calls, or else opcodes.
        again: how many steps after each interrupt another one comes.
        keep: keep the tracebacks in `kept`, as a notebook does.
    """

    def __init__(
        self,
        nth: int,
        files: tuple[str, ...],
        *,
        raw: bool,
        again: tuple[int, ...] = (),
        keep: bool = False,
    ) -> None:
        self.nth, self.files, self.raw = nth, files, raw
        self.all = {*accumulate((nth, *again))}
        self.keep, self.kept = keep, list[BaseException]()
        self.count = 0
        self.at = ""
        self._known: dict[CodeType, bool] = {}

    def run(self, call: Callable[[], object]) -> bool:
        """Call it; return whether it ended with an interrupt."""
        sys.settrace(self._called)
        try:
            call()
        except KeyboardInterrupt as interrupt:  # with its traceback it keeps what it has ended
            self.kept += [interrupt] * self.keep
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
        if self.count in self.all:
            self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if self.raw:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

"""The body of a process: saves that are interrupted at every step, each followed by a good one."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from interrupting import Step, in_turn
from save_states import number_of, state_of

import torchlift

FILES = (
    "_transfer/write.py", "_save/files.py", "_save/mesh.py", "_save/saving.py", "_model/ranks.py",
    "_save/pickling.py", "_system/interrupts.py", "contextlib.py",
)  # fmt: skip
WAYS = {
    "torch-zip": ("x.pt", {}),
    "sharded": ("x.safetensors.index.json", {"max_shard_size": 100}),
    "dcp": ("x", {"format": "dcp"}),
}


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(item for item in found if "/fd" not in item)


def files(folder: Path) -> list[Path]:
    """All that is in a folder."""
    return sorted(folder.rglob("*"))


def is_there(path: Path) -> bool:
    """Whether a checkpoint has appeared."""
    return path.exists() and (path.suffix != "" or (path / ".metadata").exists())


def require_unlocked(folder: Path, at: str) -> None:
    """Nobody holds the lock of a folder."""
    own = os.open(folder, os.O_RDONLY)
    try:
        flock(own, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise AssertionError(f"{at}: the folder is locked") from None
    finally:
        os.close(own)


def main(way: str, how: str, first: Any, folder: Path, every: int) -> None:
    """Interrupt a save at each step in turn. After each, a new save is whole and leaves nothing.

    Args:
        way: What saves.
        how: "raw" raises at once, and "signal" sends a signal.
        first: The first step. An older checkpoint is there if it is even. "again": the first one,
            with another interrupt or two after each, and with tracebacks that a notebook keeps.
        folder: An empty folder.
        every: The steps from one interrupt to the next.
    """
    raw, twice = how == "raw", first == "again"
    nth, there = (1, True) if twice else (first, first % 2 == 0)
    name, options = WAYS.get(way, WAYS["sharded"])
    to, source, draw = folder / "to", folder / "source.pt", random.Random(1)
    path = to / name
    to.mkdir()
    torchlift.save(state_of(2), source)

    def save(number: float) -> None:
        if way == "convert":
            torchlift.convert(source, path, overwrite=True, **options)
        else:
            torchlift.save(state_of(number), path, **options)

    if there:
        save(1)
    before, opened, hold = len(files(to)), descriptors(), signal.getsignal(signal.SIGINT)
    start = nth
    while True:
        faulthandler.dump_traceback_later(300, exit=True)
        gaps = tuple(draw.randint(1, 40) for _ in range(draw.randint(1, 2) if twice else 0))
        step = Step(nth, FILES, raw=raw, again=gaps, keep=twice)
        met = step.run(lambda: save(2))
        # The second interrupt may hit what gives the handler back. Ctrl-C works all the same.
        assert twice or signal.getsignal(signal.SIGINT) is hold, step.at
        if step.count < nth:
            break
        at = f"{step.at} {nth} {gaps}"
        if way in WAYS and (there or is_there(path)):
            assert number_of(path) in (1, 2), at
        if not raw and not twice:
            assert met, f"{at}: the interrupt was lost"
            assert not [each for each in files(to) if each.suffix == ".part"], at
            assert there or is_there(path) or len(files(to)) == before, f"{at}: {files(to)}"
        ctrl_c = Step(0, FILES, raw=raw)
        assert ctrl_c.run(lambda: signal.raise_signal(signal.SIGINT)), f"{at}: Ctrl-C is held back"
        require_unlocked(path if path.is_dir() else to, at)
        save(1)
        assert number_of(path) == (2 if way == "convert" else 1), at
        assert not [each for each in files(to) if each.suffix == ".part"], at
        if not there:
            for each in reversed(files(to)):
                each.rmdir() if each.is_dir() else each.unlink()
        assert len(files(to)) == before, f"{at}: {files(to)}"
        step.kept.clear()
        gc.collect()
        if raw or not twice:  # else also between two opcodes, where Python delivers none
            assert descriptors() == opened, f"{at}: {descriptors()}"
        nth += every
    faulthandler.cancel_dump_traceback_later()
    assert nth > start


if __name__ == "__main__":
    in_turn(main)

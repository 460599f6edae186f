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

import torch
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


def again(way: str, raw: bool, folder: Path, every: int) -> None:
    """Interrupt a save two or three times and keep the tracebacks, as a notebook does.

    Then nobody has the folder's lock, and a new save in this process is whole and leaves nothing.
    """
    name, options = WAYS.get(way, WAYS["sharded"])
    path, source, draw = folder / name, folder / "source.pt", random.Random(1)
    torchlift.save(state_of(2), source)

    def save(number: float) -> None:
        if way == "convert":
            torchlift.convert(source, path, overwrite=True, **options)
        elif way == "keeper":
            with torchlift.Keeper(folder / "run", background=False) as keeper:
                keeper.resume()
                keeper.save(1, model=torch.nn.Linear(2, 2), number=number)
        else:
            torchlift.save(state_of(number), path, **options)

    save(1)
    before, opened, nth = len(files(folder)), descriptors(), 1
    while True:
        faulthandler.dump_traceback_later(300, exit=True)
        gaps = tuple(draw.randint(1, 40) for _ in range(draw.randint(1, 2)))
        step = Step(nth, FILES, raw=raw, again=gaps, keep=True)
        step.run(lambda: save(2))
        if step.count < nth:
            break
        at = f"{step.at} {nth} {gaps}"
        ctrl_c = Step(0, FILES, raw=raw)
        assert ctrl_c.run(lambda: signal.raise_signal(signal.SIGINT)), f"{at}: Ctrl-C is held back"
        own = os.open(path.parent if way != "dcp" else path, os.O_RDONLY)
        try:
            flock(own, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise AssertionError(f"{at}: the folder is locked") from None
        os.close(own)
        save(3)
        if way == "keeper":
            with torchlift.Keeper(folder / "run") as keeper:
                kept = keeper.latest()
            assert kept is not None, at
            assert torchlift.open(kept).objects["number"] == 3, at
            for each in (folder / "run").glob("*"):
                os.unlink(each)
            save(1)
        else:
            assert number_of(path) == (2 if way == "convert" else 3), at
        left = [each.name for each in files(folder) if each.name.endswith(".part")]
        assert not left, f"{at}: {left}"
        assert len(files(folder)) == before, f"{at}: {files(folder)}"
        step.kept.clear()
        gc.collect()
        if raw:  # else also between two opcodes, where Python delivers none: one may stay open
            assert descriptors() == opened, f"{at}: {descriptors()}"
        nth += every
    assert nth > 1


def main(way: str, how: str, first: Any, folder: Path, every: int) -> None:
    """Interrupt every step from `first` on in turn; print how many there were."""
    raw = how == "raw"
    if first == "again":
        return again(way, raw, folder, every)
    name, options = WAYS[way]
    path = folder / name
    there = first % 2 == 0
    if there:
        torchlift.save(state_of(1), path, **options)
    before, opened, hold = len(files(folder)), descriptors(), signal.getsignal(signal.SIGINT)
    nth, cut = first, 0
    while True:
        faulthandler.dump_traceback_later(300, exit=True)
        step = Step(nth, FILES, raw=raw)
        met = step.run(lambda: torchlift.save(state_of(2), path, **options))
        assert signal.getsignal(signal.SIGINT) is hold, step.at
        if step.count < nth:
            break
        if not raw:
            assert met, f"{step.at}: the interrupt was lost"
            left = [p for p in files(folder) if p.name.endswith(".part")]
            assert not left, f"{step.at}: {left}"
        cut += 1
        gc.collect()
        assert descriptors() == opened, f"{step.at}: {descriptors()}"
        exists = path.exists() and (way != "dcp" or (path / ".metadata").exists())
        if there or exists:
            assert number_of(path) in (1, 2), step.at
        if not there and not exists and not raw:
            assert len(files(folder)) == before, f"{step.at}: {files(folder)}"
        torchlift.save(state_of(1), path, **options)
        assert number_of(path) == 1
        if not there:
            good = len(files(folder))
            assert not [p for p in files(folder) if p.name.endswith(".part")], step.at
            for each in reversed(files(folder)):
                each.rmdir() if each.is_dir() else each.unlink()
            assert good == expected(way), f"{step.at}: {good}"
        assert len(files(folder)) == before, f"{step.at}: {files(folder)}"
        nth += every
    faulthandler.cancel_dump_traceback_later()
    assert cut


def expected(way: str) -> int:
    """How many files and folders a checkpoint has."""
    return {"torch-zip": 1, "sharded": 4, "dcp": 3}[way]


if __name__ == "__main__":
    in_turn(main)

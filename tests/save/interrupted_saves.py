"""The body of a process: saves that are interrupted at every step, each followed by a good one."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from pathlib import Path

import torch
from interrupting import Step, in_turn

import torchlift

FILES = (
    "_transfer/write.py", "_save/files.py", "_save/mesh.py", "_save/saving.py", "_model/ranks.py",
    "_system/interrupts.py", "contextlib.py",
)  # fmt: skip
WAYS = {
    "torch-zip": ("x.pt", {}),
    "sharded": ("x.safetensors.index.json", {"max_shard_size": 100}),
    "dcp": ("x", {"format": "dcp", "max_shard_size": 600}),
    "replaced": ("y.safetensors", {}),
}


def state_of(number: float) -> dict[str, torch.Tensor]:
    """A state of which every value says which one it is."""
    return {f"t{at}": torch.full((20,), number) for at in range(3)}


def number_of(path: Path) -> float:
    """Which state a checkpoint is, all of it."""
    assert torchlift.verify(path).ok, path
    with torchlift.open(path) as ckpt:
        (number,) = {value for tensor in ckpt.values() for value in tensor.unique().tolist()}
    return number


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


def main(way: str, how: str, first: int, folder: Path, every: int) -> None:
    """Interrupt every step from `first` on in turn; print how many there were."""
    raw = how == "raw"
    name, options = WAYS[way]
    path = folder / name
    there = first % 2 == 0 or way == "replaced"
    if there:
        torchlift.save(state_of(1), path, **options)
        if way == "replaced":  # by shards, whose index supersedes it
            options = {"max_shard_size": 100}
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
        heads = [path] if exists else [p for p in files(folder) if p.name.endswith("index.json")]
        if there or heads:
            assert number_of(heads[0]) in (1, 2), step.at
        if not there and not heads and not raw:
            assert len(files(folder)) == before, f"{step.at}: {files(folder)}"
        if way == "replaced":
            for each in files(folder):
                os.unlink(each)
            torchlift.save(state_of(1), path)
        else:
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
    return {"torch-zip": 1, "sharded": 4, "dcp": 5}[way]


if __name__ == "__main__":
    in_turn(main)

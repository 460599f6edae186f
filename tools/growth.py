"""How the cost of loading grows with the number of tensors, modules or shards.

The files are small: what is measured is the price of each tensor, module or file, not of its bytes.
"""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from generated import Stack, make_checkpoint
from torch import nn

import torchlift
from torchlift.measure import ChildError, in_child

_TENSOR, _LAYER, _SHARD = 1024, 64, 64 << 10  # bytes of one of them
_FILE, _SAFE, _SET = "model.pt", "model.safetensors", "model.safetensors.index.json"
_NESTED = "nested.pt"


class Nested(nn.Module):
    """The layers of a `Stack`, a hundred to a list."""

    def __init__(self, tensors: int, rows: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Stack(min(100, tensors - first), rows, width).layers for first in range(0, tensors, 100)
        )


# ---- the ways: each loads what is in the folder, so many tensors, modules or shards


def _torch_tensors(folder: Path, count: int) -> object:
    return torch.load(folder / _FILE, mmap=True)


def _safetensors_tensors(folder: Path, count: int) -> object:
    from safetensors.torch import load_file

    return load_file(folder / _SAFE)


def _torchlift_tensors(folder: Path, count: int, name: str = _FILE) -> object:
    return torchlift.open(folder / name).state_dict()


def _torch_modules(folder: Path, count: int, nested: bool = False) -> object:
    with torch.device("meta"):
        model = Nested(count, 4, 4) if nested else Stack(count, 4, 4)
    state = torch.load(folder / (_NESTED if nested else _FILE), mmap=True)
    model.load_state_dict(state, assign=True)
    return model


def _torchlift_modules(folder: Path, count: int) -> object:
    model = torchlift.skeleton(Stack, count, 4, 4)
    torchlift.load(model, folder / _FILE)
    return model


def _safetensors_shards(folder: Path, count: int) -> object:
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = Stack(count, 128, 128)
    state: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    model.load_state_dict(state, assign=True)
    return model


def _accelerate_shards(folder: Path, count: int) -> object:
    from accelerate import load_checkpoint_in_model

    with torch.device("meta"):
        model = Stack(count, 128, 128)
    load_checkpoint_in_model(model, folder, device_map={"": "cpu"})
    return model


def _torchlift_shards(folder: Path, count: int) -> object:
    model = torchlift.skeleton(Stack, count, 128, 128)
    torchlift.load(model, folder)
    return model


#: What grows -> how far, and the ways by name.
GROWTHS: dict[str, tuple[tuple[int, ...], dict[str, Callable[[Path, int], object]]]] = {
    "tensors": (
        (1_000, 10_000, 100_000, 400_000),
        {
            "torch.load(mmap=True)": _torch_tensors,
            "torchlift.open, state_dict()": _torchlift_tensors,
            "safetensors load_file": _safetensors_tensors,
            "torchlift.open, safetensors": partial(_torchlift_tensors, name=_SAFE),
        },
    ),
    "modules": (
        (1_000, 3_000, 10_000, 50_000),
        {
            "meta, torch.load(mmap=True), assign": _torch_modules,
            "the same, 100 modules to a list": partial(_torch_modules, nested=True),
            "torchlift.skeleton, load": _torchlift_modules,
        },
    ),
    "shards": (
        (10, 100, 1_000),
        {
            "load_file of each, meta, assign": _safetensors_shards,
            "accelerate load_checkpoint_in_model": _accelerate_shards,
            "torchlift.skeleton, load": _torchlift_shards,
        },
    ),
}


def _make(what: str, count: int, folder: Path) -> None:
    """Write what the ways read."""
    if what == "tensors":
        size = count * _TENSOR
        make_checkpoint(folder / _FILE, nbytes=size, tensors=count)
        make_checkpoint(folder / _SAFE, nbytes=size, tensors=count, format="safetensors")
    elif what == "modules":
        make_checkpoint(folder / _FILE, nbytes=count * _LAYER, tensors=count)
        torch.save(Nested(count, 4, 4).state_dict(), folder / _NESTED)
    else:
        whole = folder.with_suffix(".pt")
        make_checkpoint(whole, nbytes=count * _SHARD, tensors=count)
        torchlift.convert(whole, folder / _SET, max_shard_size=_SHARD)


def _measure(way: Callable[[Path, int], object], small: Path, folder: Path, count: int) -> float:
    """Load in a child, once a little before, so that what is imported on first use is imported."""
    way(small, 2)
    gc.collect()
    start = time.perf_counter()
    loaded = way(folder, count)
    seconds = time.perf_counter() - start
    del loaded  # not before
    return seconds


@dataclass(frozen=True)
class Growth:
    """Seconds by size, of each way. ``str()`` gives a table, `to_dict` what JSON can hold.

    Attributes:
        what: ``"tensors"``, ``"modules"`` or ``"shards"``.
        sizes: how many of them, ascending.
        seconds: way -> for each size the seconds of every round; fewer sizes where it was left out.
        left_out: way -> why it was not run any further.
        machine: as in `Comparison`.
    """

    what: str
    sizes: tuple[int, ...]
    seconds: dict[str, list[list[float]]]
    left_out: dict[str, str]
    machine: dict[str, Any]

    def exponent(self, way: str) -> float:
        """Return the power of the number that the cost grew with at the end: 1 linear, 2 square."""
        took = [median(rounds) for rounds in self.seconds[way]]
        if len(took) < 2:
            return float("nan")
        first, last = self.sizes[len(took) - 2 : len(took)]
        return math.log(took[-1] / took[-2]) / math.log(last / first)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, every round on its own."""
        grows = {way: self.exponent(way) for way in self.seconds}
        known = {way: power if power == power else None for way, power in grows.items()}
        return {**vars(self), "sizes": list(self.sizes), "exponents": known}

    def __str__(self) -> str:
        head = "".join(f"{size:>12,}" for size in self.sizes)
        lines = [f"seconds by the number of {self.what}, medians", f"{'way':<38}{head}  grows with"]
        for way, sizes in self.seconds.items():
            cells = [f"{median(rounds):.4f}" for rounds in sizes]
            cells += ["-"] * (len(self.sizes) - len(cells))
            row = "".join(f"{cell:>12}" for cell in cells)
            power = f"n^{self.exponent(way):.1f}" if len(sizes) > 1 else "?"
            lines.append(f"{way:<38}{row}{power:>12}")
        lines += [f"left out: {way}: {why}" for way, why in self.left_out.items()]
        return "\n".join(lines)


def grow(
    what: str,
    *,
    sizes: Sequence[int] | None = None,
    repeat: int = 3,
    timeout: float = 60.0,
    on_run: Callable[[str], object] | None = None,
) -> Growth:
    """Measure how the cost of loading grows with a number, each run in a new process.

    Args:
        what: ``"tensors"`` of 1 KB in one file, ``"modules"`` of one linear layer each, or
            ``"shards"`` of 64 KiB.
        sizes: how many of them; None takes 1,000 to 400,000 tensors, 1,000 to 50,000 modules, 10 to
            1,000 shards.
        repeat: number of rounds at each size.
        timeout: seconds that a run may take; a way that takes longer is not run any further.
        on_run: called with a line of text after every run.

    Returns:
        the seconds of each way.

    Raises:
        ValueError: nothing grows by that name, or a size is none.
    """
    if what not in GROWTHS:
        raise ValueError(
            f"there is nothing called {what!r} to grow; there are {', '.join(GROWTHS)}"
        )
    known, ways = GROWTHS[what]
    steps = tuple(sorted(known if sizes is None else sizes))
    if repeat < 1 or not steps or steps[0] < 1:
        raise ValueError(f"{repeat} rounds of {list(steps)} {what}: each must be at least 1")
    seconds: dict[str, list[list[float]]] = {way: [] for way in ways}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-") as name:
        small = Path(name, "small")
        small.mkdir()
        in_child(_make, what, 2, small)
        for count in steps:
            folder = Path(name, str(count))
            folder.mkdir()
            in_child(_make, what, count, folder)
            for turn in range(repeat):
                for way, function in ways.items():
                    if way in left_out:
                        continue
                    try:
                        took = in_child(_measure, function, small, folder, count, timeout=timeout)
                    except ChildError as error:
                        why = str(error).strip().splitlines()[-1]
                        left_out[way] = f"at {count:,} {what}: {why}"
                        seconds[way] = [rounds for rounds in seconds[way] if len(rounds) == repeat]
                        continue
                    if turn == 0:
                        seconds[way].append([])
                    seconds[way][-1].append(took.value)
                    if on_run is not None:
                        on_run(f"{count:,} {what}: {way}: {took.value:.4f} s")
            shutil.rmtree(folder)
            folder.with_suffix(".pt").unlink(missing_ok=True)
    packages = ["torch", "safetensors", "accelerate"]
    return Growth(what, steps, seconds, left_out, machine.describe(packages))

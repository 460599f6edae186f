"""Measure what the first page of the site and the README claim, and make their table from it.

    python tools/measured.py           measure, on a machine that does nothing else, and write all
    python tools/measured.py --table   write the README's table anew from the committed numbers

``docs/_includes/bench.json`` is what ``torchlift bench --json`` prints, ``timeline.json`` is the
memory of a process over time. Both are committed, so that no number on a page was typed by hand.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from generated import Stack, make_checkpoint
from torch import nn

import torchlift
from torchlift.measure import in_child, mark

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "docs" / "_includes" / "bench.json"
TIMELINE = ROOT / "docs" / "_includes" / "timeline.json"
README = ROOT / "README.md"
BYTES = 2 << 30
START = "<!-- measured table: start -->\n"
POINTS = 80  # of a line in the picture

#: The ways of the table, as code, and what each does wrong without a word: of tied weights, buffers
#: that are not in the file, an optimizer that exists already, the device and the file's safety. A
#: test loads such a model in each way.
WAYS = {
    "torch-build": ("build, `torch.load`, `load_state_dict`", "nothing"),
    "torch-assign": ("`torch.load`, meta, assign", "ties, optimizer"),
    "torch-mmap": ("`torch.load(mmap=True)`, meta, assign", "ties, optimizer"),
    "torchlift-mmap": ('`torchlift.load(source="mmap")`', "nothing"),
    "torchlift-read": ('`torchlift.load(source="read")`', "nothing"),
    "torchlift-bf16": ("`torchlift.load(dtype=torch.bfloat16)`", "nothing"),
}


class Row(NamedTuple):
    """One way of the table: what it is, how long it took, what it owned, what it got wrong."""

    way: str
    seconds: str
    anonymous: str
    wrong: str


def rows() -> list[Row]:
    """The measured table, from the committed numbers."""
    results = json.loads(BENCH.read_text(encoding="utf-8"))["results"]
    table = []
    for name, (way, wrong) in WAYS.items():
        seconds = results[name]["seconds"]
        spread = f"{short(min(seconds))} to {short(max(seconds))}"
        mebibytes = max(results[name]["added_anonymous"]) / 2**20
        anonymous = f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.1f} MiB"
        table.append(Row(way, f"{short(median(seconds))} ({spread})", anonymous, wrong))
    return table


def short(seconds: float) -> str:
    """Two significant digits."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def conditions() -> str:
    """What the table was measured on."""
    bench = json.loads(BENCH.read_text(encoding="utf-8"))
    machine = json.loads(TIMELINE.read_text(encoding="utf-8"))["machine"]
    rounds = len(next(iter(bench["results"].values()))["seconds"])
    return (
        f"A file of {bench['nbytes'] / 1e9:.1f} GB ({bench['tensors']} float32 tensors) in the "
        f"page cache, loaded into a model on {machine}. Each way ran in {rounds} new processes. "
        "The table has the median, the fastest and the slowest run, with building the model."
    )


def markdown() -> str:
    """The table as the README has it, with what it was measured on."""
    lines = [textwrap.fill(conditions(), 110), ""]
    lines += ["| way | seconds | anonymous memory at the peak | silently wrong |"]
    lines += ["|---|---:|---:|---|"]
    for row in rows():
        mark = "**" if "torchlift" in row.way else ""
        lines.append(f"| {mark}{row.way}{mark} | {row.seconds} | {row.anonymous} | {row.wrong} |")
    return "\n".join(lines)


# ---- the picture: how each way loads a Stack, in a process of its own


def build_and_copy(path: str, shape: tuple[int, int, int]) -> nn.Module:
    model = Stack(*shape)
    model.load_state_dict(torch.load(path))
    return model


def assign(path: str, shape: tuple[int, int, int], **options: bool) -> nn.Module:
    with torch.device("meta"):
        model = Stack(*shape)
    model.load_state_dict(torch.load(path, **options), assign=True)
    return model


def lift(path: str, shape: tuple[int, int, int], source: str) -> nn.Module:
    model = torchlift.skeleton(Stack, *shape)
    torchlift.load(model, path, source=source)
    return model


def between_marks(way: Callable[..., nn.Module], path: str, shape: tuple[int, int, int]) -> None:
    """Load between two marks: before the first, what is imported on first use is imported."""
    small = os.path.join(os.path.dirname(path), "small.pt")
    way(small, (2, 4, 4))
    gc.collect()
    mark("begin")
    model = way(path, shape)
    mark("ready")
    del model  # not before


LINES = {
    "build, torch.load, load_state_dict": build_and_copy,
    "torch.load, meta, assign": assign,
    'torchlift.load(source="read")': partial(lift, source="read"),
    'torchlift.load(source="mmap")': partial(lift, source="mmap"),
    "torch.load(mmap=True), meta, assign": partial(assign, mmap=True),
}
RUNS = 3  # of each way, for the picture; drawn is the one in the middle


def compare(path: str) -> dict[str, Any]:
    """Return what ``torchlift bench --json`` prints, with the cast as one more way."""
    cast = run_bench(path, "--only", "torchlift-read", "--cast", "bfloat16")
    found = run_bench(path, "--only", ",".join(WAYS.keys() - {"torchlift-bf16"}))
    found["results"]["torchlift-bf16"] = cast["results"]["torchlift-read"] | {
        "summary": "torchlift.load(dtype=bfloat16)"
    }
    return found | {"path": os.path.basename(path)}  # a temporary folder's name helps nobody


def run_bench(path: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torchlift", "bench", path, "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def record(path: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Anonymous memory of each way over time, in seconds and bytes."""
    folder = Path(path).parent
    torch.save(Stack(2, 4, 4).state_dict(), folder / "small.pt")
    lines = {}
    for name, way in LINES.items():
        runs = [in_child(between_marks, way, path, shape).memory for _ in range(RUNS)]
        runs.sort(key=lambda run: run.marks[1].seconds - run.marks[0].seconds)
        memory = runs[RUNS // 2]
        begin, ready = (mark.seconds for mark in memory.marks)
        samples = [sample for sample in memory.timeline if begin <= sample.seconds <= ready]
        start = samples[0].anonymous
        step = max(1, len(samples) // POINTS)
        groups = [samples[at : at + step] for at in range(0, len(samples), step)]
        kept = [max(group, key=lambda sample: sample.anonymous) for group in groups]
        lines[name] = [
            [round(sample.seconds - begin, 4), max(0, round(sample.anonymous - start))]
            for sample in [*kept, samples[-1]]
        ]
    machine = f"{len(os.sched_getaffinity(0))} cores of a virtual machine"
    return {"machine": machine, "nbytes": os.path.getsize(path), "lines": lines}


def main(arguments: list[str]) -> int:
    if "--table" not in arguments:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "generated.ckpt")
            shape = make_checkpoint(path, nbytes=BYTES)
            BENCH.write_text(json.dumps(compare(path), indent=2) + "\n", encoding="utf-8")
            TIMELINE.write_text(json.dumps(record(path, shape)) + "\n", encoding="utf-8")
    before, start, rest = README.read_text(encoding="utf-8").partition(START)
    after = rest[rest.index("\n\n", rest.index("\n|")) :]
    README.write_text(before + start + markdown() + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure what a framework costs with torchlift and without, for the page on frameworks.

    python tools/frameworks.py [--rounds 3]

Runs the recipes on frameworks as scripts, in turns, and keeps what they print of both sides in
``docs/_includes/frameworks.json``. `tools/measured_pages.py` makes the table of it. On a machine
that does nothing else a round takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes" / "07_frameworks"
FOUND = ROOT / "docs" / "_includes" / "frameworks.json"
PACKAGES = "torch", "transformers", "peft", "pytorch-lightning", "accelerate"

#: Recipe -> what it measures, and the first words of each line that it prints of a way -> the way.
JOBS = {
    "plot_01_from_pretrained": (
        "transformers: load a Llama, compute one answer",
        {
            "torch.load, .pt": "``torch.load``, ``load_state_dict``",
            "from_pretrained, its own files": "``from_pretrained``, its own files",
            "from_pretrained, mapped .pt": "``from_pretrained`` of `torchlift.open`",
        },
    ),
    "plot_02_lora": (
        "PEFT: merge an adapter",
        {
            "merge_and_unload": "``merge_and_unload``",
            "merge_while_loading": "`torchlift.load`",
            "merge_into_a_file": "`torchlift.convert`, into a file",
        },
    ),
    "plot_03_dcp_torchtitan": (
        "DCP: load or save on two ranks",
        {
            "load DCP: FileSystemReader": "load with torch's ``FileSystemReader``",
            "load DCP: CheckpointReader": "load with ``CheckpointReader``",
            "save DCP: FileSystemWriter": "save with torch's ``FileSystemWriter``",
            "save DCP: CheckpointWriter": "save with ``CheckpointWriter``",
        },
    ),
    "plot_04_lightning": (
        "Lightning: resume, and train 30 steps",
        {"Lightning": "Lightning", "torchlift": "``CheckpointIO``, ``RankStates``"},
    ),
    "plot_05_transformers_trainer": (
        "transformers: a step of the Trainer that saves",
        {"Trainer": "Trainer", "torchlift": "``KeeperCallback``"},
    ),
    "plot_06_accelerate": (
        "accelerate: resume",
        {"accelerate": "``load_state``", "torchlift": "``AcceleratorKeeper``"},
    ),
}


def measure(recipe: str) -> dict[str, tuple[float, int | None]]:
    """Run a recipe, and return seconds and MiB that it printed, by the first words of a line."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TMPDIR": folder, "MPLBACKEND": "agg"}
        command = [sys.executable, str(RECIPES / f"{recipe}.py")]
        done = subprocess.run(
            command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, check=True
        )
    return {way: read_line(done.stdout, way) for way in JOBS[recipe][1]}


def read_line(printed: str, way: str) -> tuple[float, int | None]:
    """Return the last seconds of a line, without a spread in parentheses, and its MiB.

    A line goes on where the next one begins with blanks.
    """
    line = re.search(rf"^{re.escape(way)} .*(?:\n .*)*", printed, re.MULTILINE)
    if line is None:
        raise SystemExit(f"no line begins with {way!r} in:\n{printed}")
    text = re.sub(r"\(.*?\)", "", line[0])
    memory = re.search(r"(\d+) MiB", text)
    return float(re.findall(r"([\d.]+) s\b", text)[-1]), int(memory[1]) if memory else None


def main() -> int:
    """Measure all and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    runs = [{recipe: measure(recipe) for recipe in JOBS} for _ in range(rounds)]
    results = {
        recipe: {way: [run[recipe][way] for run in runs] for way in ways}
        for recipe, (_, ways) in JOBS.items()
    }
    found = {"results": results, "machine": machine.describe(PACKAGES)}
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

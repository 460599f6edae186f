"""Ctrl-C at every step of a save: it ends, nothing stays locked, and the next save is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Between two steps that are interrupted; 1 interrupts every one, and takes an hour.
EVERY = int(os.environ.get("TORCHLIFT_INTERRUPT_EVERY", "0"))


@pytest.mark.parametrize(
    ("way", "raw", "every"),
    [
        ("torch-zip", "", 251),
        ("sharded", "", 499),
        ("dcp", "", 997),
        ("replaced", "", 499),
        ("torch-zip", "raw", 13),
        ("sharded", "raw", 29),
    ],
)
@pytest.mark.parametrize("first", [1, 2])
def test_an_interrupt_at_any_step_ends_a_save_and_leaves_nothing(
    tmp_path: Path, way: str, raw: str, every: int, first: int
) -> None:
    """With an older checkpoint and without one: whole, no file, no lock and no descriptor more."""
    script = Path(__file__).with_name("interrupted_saves.py")
    paths = [str(script.parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), way, str(tmp_path), raw or "signal", str(first),
         str(EVERY or every)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=None if EVERY else 200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

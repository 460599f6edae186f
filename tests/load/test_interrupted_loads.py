"""Ctrl-C at every step of a load in place: all of the model is loaded, or nothing has changed."""

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
        ("plain", "signal", 1999),
        ("hooked", "signal", 4999),
        ("failing", "signal", 7993),
        ("planned", "signal", 4999),
        ("plain", "raw", 97),
        ("hooked", "raw", 293),
        ("failing", "raw", 293),
    ],
)
def test_an_interrupt_at_any_step_leaves_a_model_whole_and_nothing_locked(
    tmp_path: Path, way: str, raw: str, every: int
) -> None:
    """With hooks that write and without: the next load works, from another thread too."""
    script = Path(__file__).with_name("interrupted_loads.py")
    paths = [str(script.parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), way, str(tmp_path), raw, str(EVERY or every)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=None if EVERY else 200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

"""Ctrl-C at every step of a Keeper on one process: the next one saves and resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Between two steps that are interrupted; 1 interrupts every one.
EVERY = int(os.environ.get("TORCHLIFT_INTERRUPT_EVERY", "0"))


@pytest.mark.parametrize(
    ("way", "raw", "every"),
    [
        ("save", "signal", 1999),
        ("close", "signal", 61),
        ("resume", "signal", 1999),
        ("save", "raw", 97),
        ("close", "raw", 3),
        ("resume", "raw", 97),
    ],
)
def test_an_interrupt_at_any_step_leaves_nothing_that_stops_the_next_keeper(
    tmp_path: Path, way: str, raw: str, every: int
) -> None:
    """Nothing is locked, the model is resumed or as it was, and no file stays."""
    script = Path(__file__).with_name("interrupted_keepers.py")
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

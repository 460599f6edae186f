"""Ctrl-C at every step of a Keeper on one process: the next one saves and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupting import run_interrupted


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
    run_interrupted(script, way, tmp_path, raw, every=every)

"""Ctrl-C at every step of a load in place: all of the model is loaded, or nothing has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupting import run_interrupted


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
    run_interrupted(script, way, tmp_path, raw, every=every)

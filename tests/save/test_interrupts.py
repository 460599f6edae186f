"""Ctrl-C at every step of a save: it ends, nothing stays locked, and the next save is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupting import run_interrupted


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
    run_interrupted(script, way, tmp_path, raw or "signal", first, every=every)

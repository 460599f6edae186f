"""Ctrl-C at every step of a save: it ends, nothing stays locked, and the next save is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupting import interrupted

SCRIPT = Path(__file__).with_name("interrupted_saves.py")
#: Way, how it is interrupted, the first step that is, and the steps from one to the next.
RUNS = tuple(
    (way, how, first, every)
    for way, how, every in [
        ("torch-zip", "signal", 251),
        ("sharded", "signal", 499),
        ("dcp", "signal", 997),
        ("replaced", "signal", 499),
        ("torch-zip", "raw", 13),
        ("sharded", "raw", 29),
    ]
    for first in (1, 2)
)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_interrupt_at_any_step_ends_a_save_and_leaves_nothing(
    run: tuple[str, str, int, int],
) -> None:
    """With an older checkpoint and without one: whole, no file, no lock and no descriptor more."""
    assert interrupted(SCRIPT, RUNS)[run] == ""

"""Ctrl-C at every step of a load in place: all of the model is loaded, or nothing has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupting import interrupted

SCRIPT = Path(__file__).with_name("interrupted_loads.py")
#: Way, how it is interrupted, and the steps from one interrupt to the next.
RUNS = (
    ("plain", "signal", 1999),
    ("hooked", "signal", 4999),
    ("failing", "signal", 7993),
    ("planned", "signal", 4999),
    ("plain", "raw", 97),
    ("hooked", "raw", 293),
    ("failing", "raw", 293),
)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_interrupt_at_any_step_leaves_a_model_whole_and_nothing_locked(run):
    """With hooks that write and without: the next load works, from another thread too."""
    assert interrupted(SCRIPT, RUNS)[run] == ""

"""Ctrl-C at every step of a Keeper on one process: the next one saves and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupting import interrupted

pytestmark = pytest.mark.slow


SCRIPT = Path(__file__).with_name("interrupted_keepers.py")
#: Way, how it is interrupted, and the steps from one interrupt to the next.
RUNS = (
    ("save", "signal", 1999),
    ("close", "signal", 61),
    ("resume", "signal", 1999),
    ("save", "raw", 97),
    ("close", "raw", 3),
    ("resume", "raw", 97),
)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_interrupt_at_any_step_leaves_nothing_that_stops_the_next_keeper(
    run: tuple[str, str, int],
) -> None:
    """Nothing is locked, the model is resumed or as it was, and no file stays."""
    assert interrupted(SCRIPT, RUNS)[run] == ""

"""Ctrl-C at every step of a save: it ends, nothing stays locked, and the next save is whole."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from interrupting import Step, interrupted

import torchlift
from torchlift._save.layouts import _lay_out_item

SCRIPT = Path(__file__).with_name("interrupted_saves.py")
#: Way, how it is interrupted, the first step that is, and the steps from one to the next.
RUNS = tuple(
    (way, how, first, every)
    for way, how, every in [
        ("torch-zip", "signal", 251),
        ("sharded", "signal", 499),
        ("dcp", "signal", 997),
        ("torch-zip", "raw", 13),
        ("sharded", "raw", 29),
    ]
    for first in (1, 2)
)
#: The same, of saves that are interrupted two or three times, with tracebacks that are kept.
AGAIN = tuple(
    (way, how, "again", every)
    for way, how, every in [
        ("torch-zip", "raw", 7),
        ("sharded", "raw", 17),
        ("dcp", "raw", 29),
        ("convert", "raw", 41),
        ("sharded", "signal", 499),
        ("dcp", "signal", 997),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_interrupt_at_any_step_ends_a_save_and_leaves_nothing(
    run: tuple[str, str, int, int],
) -> None:
    """With an older checkpoint and without one: whole, no file, no lock and no descriptor more."""
    assert interrupted(SCRIPT, RUNS)[run] == ""


@pytest.mark.slow
@pytest.mark.parametrize("run", AGAIN, ids=str)
def test_two_or_three_interrupts_leave_no_lock_and_the_next_save_works(
    run: tuple[str, str, str, int],
) -> None:
    """Also while a notebook keeps the tracebacks, and with them what the saves have left."""
    assert interrupted(SCRIPT, AGAIN)[run] == ""


# ---- inside of torch's own writer

STATE = {"w": torch.ones(3), "plain": {"list": [1, {"set"}, "text"]}, "epoch": 5}


def save_by(door: str, folder: Path) -> None:
    """Save in one of the ways in which torch writes the pickle."""
    _lay_out_item.cache_clear()  # else torch writes the first time only
    if door == "file":
        torchlift.save(STATE, folder / "x.pt")
    if door == "folder":
        torchlift.save(STATE, folder / "x", format="dcp")
    if door == "convert":
        torchlift.convert(folder / "src.pt", folder / "x.pt", overwrite=True)


@pytest.mark.parametrize("again", [(), (1,)], ids=["once", "twice"])
@pytest.mark.parametrize("door", ["file", "folder", "convert"])
def test_an_interrupt_inside_of_the_writer_of_torch_is_a_keyboard_interrupt(
    door: str, again: tuple[int, ...], tmp_path: Path
) -> None:
    """torch completes its archive all the same, and that error would hide the interrupt."""
    torchlift.save(STATE, tmp_path / "src.pt")
    for nth in count(1):
        step = Step(nth, ("_save/pickling.py",), raw=True, again=again)
        ended = step.run(lambda: save_by(door, tmp_path))
        if step.count < nth:
            break
        assert ended, step.at
    assert nth > 10

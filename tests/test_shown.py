"""What results show of themselves: printed, at the end of a cell, in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from small_models import saved
from torch import nn

import torchlift
from torchlift import remap
from torchlift.distributed.optimizer_slots import OptimizerReport

#: A name that a page, a terminal or a reader would obey.
EVIL = "<b>evil</b>\x1b[2J"


def results(folder: Path) -> dict[str, Any]:
    """One of each, of a model of 300 layers and a file with a name to fear."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    state = {**model.state_dict(), EVIL: torch.ones(2)}
    path = saved(state, folder)
    budgets = {"cuda:0": "2KiB", "cpu": None}
    return {
        "checkpoint": torchlift.open(path),
        "diff": torchlift.diff(path, {**state, EVIL: torch.zeros(2)}),
        "verify": torchlift.verify(path),
        "plan": torchlift.plan(model, path, strict=False),
        "report": torchlift.load(model, path, strict=False),
        "optimizer": OptimizerReport(loaded=["a"], missing_keys=[EVIL] * 300),
        "fit": remap.fit(path, budgets, rename=lambda key: "0.evil" if key == EVIL else key),
    }


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Made once, since nothing changes them."""
    return results(tmp_path_factory.mktemp("shown"))


NAMES = ("checkpoint", "diff", "verify", "plan", "report", "optimizer", "fit")
each = pytest.mark.parametrize("name", NAMES)


@each
def test_html_says_what_is_printed_and_names_no_colour(shown, name) -> None:
    """Escaped, well formed, and left to the page's theme, light or dark."""
    page, told = shown[name]._repr_html_(), str(shown[name]).splitlines()
    root = ElementTree.fromstring(page)
    tags = {"div", "style", "code", "table", "thead", "tr", "th", "td"}
    assert {e.tag for e in root.iter()} <= tags
    assert [e.attrib for e in root.iter() if e.attrib] == [{"class": "torchlift-summary"}]
    assert not re.search(r"color|background|#[0-9a-f]{3}|rgb|\x1b", page)
    texts = [text for e in root.iter() if e.tag != "style" for text in (e.text, e.tail) if text]
    assert told[0] in texts
    assert {word for text in texts for word in text.split()} >= set(told[-1].split()[-1:])
    if name in ("checkpoint", "diff", "optimizer", "plan", "report"):
        assert any("<b>evil</b>\\x1b[2J" in text for text in texts)


@each
def test_the_last_line_of_a_cell_is_short(shown, name) -> None:
    """It clips what is long, and moves no cursor."""
    assert "\x1b" not in repr(shown[name])
    assert len(repr(shown[name])) < 1500 or name == "fit"

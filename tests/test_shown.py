"""What results show of themselves: printed, at the end of a cell, in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

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


class Page(HTMLParser):
    """Collects tags, attributes and text; complains of what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, str | None] = {}
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] != "style":
            self.texts.append(data)


@each
def test_html_says_what_is_printed_and_names_no_colour(shown, name) -> None:
    """Escaped, well formed, and left to the page's theme, light or dark."""
    result = shown[name]
    page = result._repr_html_()
    found = Page(page)
    assert found.tags <= {"div", "style", "code", "table", "thead", "tr", "th", "td"}
    assert found.attributes == {"class": "torchlift-summary"}
    assert not re.search(r"color|background|#[0-9a-f]{3}|rgb|\x1b", page)
    told = str(result).splitlines()
    assert found.texts[0] == told[0]
    assert {word for text in found.texts for word in text.split()} >= set(told[-1].split()[-1:])
    if name in ("checkpoint", "diff", "optimizer", "plan", "report"):
        assert any("<b>evil</b>\\x1b[2J" in text for text in found.texts)


@each
def test_the_last_line_of_a_cell_is_short(shown, name) -> None:
    """The summary, which clips what is long; a map of devices can be typed in again."""
    text = repr(shown[name])
    assert "\x1b" not in text
    if name == "fit":
        assert text.startswith("by_key({")
        return
    assert len(text) < 1500
    assert name == "checkpoint" or text == str(shown[name])

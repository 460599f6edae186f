"""An index shown as text, HTML and JSON."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import tensor, write_zip

from torchlift._system import human
from torchlift.formats import read_index
from torchlift.formats.summary import to_html, to_json, to_text


@pytest.fixture
def index(tmp_path):
    base = torch.zeros(1024, 256)
    state = {"model": {"w": base, "tied": base, "half": torch.ones(3, dtype=torch.bfloat16)},
             "epoch": 3, "loss": float("nan"), "evil": print, "raw": b"x", "ids": {1}}  # fmt: skip
    torch.save(state, tmp_path / "x.pt")
    return read_index(tmp_path / "x.pt")


def test_text_says_what_a_reader_asks_first(index):
    """Format, counts, sizes, dtypes, tags, aliases, objects and blocked names are in the text."""
    text = to_text(index)
    for part in ("torch-zip", "262,147", "1.0 MiB", "float32 (2), bfloat16 (1)", "cpu (3)",
                 "model.w = model.tied", "epoch = 3", "builtins.print", "1024 x 256"):  # fmt: skip
        assert part in text


def test_rows_limit_the_table(index):
    """The rest is counted."""
    text = to_text(index, rows=1)
    assert "... and 2 more tensors" in text
    assert "model.half" not in text
    assert "model.half" not in to_html(index, rows=1)
    assert to_text(index, rows=0)


def test_json_is_complete_and_strict(index):
    """Every value survives a strict encoder."""
    found = json.loads(json.dumps(to_json(index), allow_nan=False))
    assert [t["key"] for t in found["tensors"]] == ["model.w", "model.tied", "model.half"]
    assert found["objects"] == {"epoch": 3, "loss": "nan", "raw": "b'x'", "ids": "{1}"}
    assert found["aliases"] == [["model.w", "model.tied"]]
    assert found["tensors"][0]["chunks"][0]["nbytes"] == 1 << 20
    assert found["parameters"] == 262_147


def test_hostile_names_are_escaped(tmp_path):
    """Escape sequences, line breaks and markup in a file reach neither terminal nor page."""
    evil = "\x1b[2J\n<script>alert(1)</script>\u202e"
    state = {evil: tensor(location=evil), "o" + evil: evil, "long" * 1000: tensor()}
    index = read_index(write_zip(tmp_path / "x.pt", state))
    text, page = to_text(index), to_html(index)
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b" in text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert max(map(len, text.splitlines())) < 400
    json.dumps(to_json(index))


def test_an_empty_checkpoint_is_shown(tmp_path):
    """No table, no division by zero."""
    index = read_index(write_zip(tmp_path / "x.pt", {}))
    assert "tensors     0" in to_text(index)
    assert to_html(index)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 70, "1048576.0 PiB"),
    ],
)
def test_sizes_are_in_the_unit_that_fits(nbytes, text):
    """Binary units, one decimal."""
    assert human(nbytes) == text

"""An index shown as text, HTML and JSON."""

from __future__ import annotations

import json
import re

import pytest
import torch
from checkpoint_files import write_safetensors
from hypothesis import given
from hypothesis import strategies as st

from torchlift._system.text import human
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index, TensorEntry
from torchlift.formats.summary import _Cells, to_json, to_text


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


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (dict.fromkeys("ab", torch.zeros(2)), r"b +8 B +float32 +2 += a\n"),
        ({"a": torch.zeros(1024)[:2]}, r"a +8 B +float32 +2 +part of 4.0 KiB\n"),
        ({"e": torch.ones(1).expand(1000)}, r"e +4 B +float32 +1000 +repeated to 3.9 KiB\n"),
        ({}, r"tensors +0\n"),
    ],
    ids=["tied", "a small view", "broadcast", "empty"],
)
def test_a_line_says_what_a_tensor_shares(tmp_path, state, line):
    """Whose memory it is, what it drags along, and how little of it is stored."""
    torch.save(state, tmp_path / "x.pt")
    assert re.search(line, to_text(read_index(tmp_path / "x.pt")) + "\n")


def lines(index):
    """Name, number, bytes and note of every line of tensors."""
    return [(row[0], row[1], row[2], row[-1]) for row in _Cells(index).lines()]


def write(path, **sizes):
    """A file of float32 vectors with these keys, whose underscores are dots."""
    header, at = {}, 0
    for name, size in sizes.items():
        places = [at, at := at + 4 * size]
        header[name.replace("_", ".")] = {"dtype": "F32", "shape": [size], "data_offsets": places}
    return read_index(write_safetensors(path, header, bytes(at)))


def test_tensors_that_differ_only_in_numbers_are_one_line(tmp_path):
    """In whatever order the file has them. Another shape has its own line."""
    sizes = {f"h_{i}_{name}": 2 for i in (0, 1, 10, 2, 3) for name in "wb"}
    index = write(tmp_path / "x", **sizes, h_4_w=2, h_4_b=3, v_0=1, v_1=1, h1_w=2, only_one_x=1)
    assert lines(index) == [
        ("h.*.w", "6", "48 B", ""),
        ("h.*.b", "5", "40 B", ""),
        ("h.4.b", "", "12 B", ""),
        ("v.*", "2", "8 B", ""),
        ("h1.w", "", "8 B", ""),
        ("only.one.x", "", "4 B", ""),
    ]


@given(st.dictionaries(st.text("a0.1", max_size=8), st.integers(1, 2), max_size=12))
def test_every_tensor_is_in_one_line(sizes):
    """The lines count all tensors, and a line of one tensor has its name."""
    entries = {
        key: TensorEntry(key, "int8", (size,), (1,), size, "cpu", key, ())
        for key, size in sizes.items()
    }
    found = _Cells(Index("x", "npz", entries, {}, {})).lines()
    assert sum(int(count or 1) for _, count, *_ in found) == len(sizes)
    assert {name for name, count, *_ in found if not count} <= sizes.keys()


def test_json_is_complete_and_strict(index):
    """Every value survives a strict encoder."""
    found = json.loads(json.dumps(to_json(index), allow_nan=False))
    assert [t["key"] for t in found["tensors"]] == ["model.w", "model.tied", "model.half"]
    assert found["objects"] == {"epoch": 3, "loss": "nan", "raw": "b'x'", "ids": "{1}"}
    assert found["aliases"] == [["model.w", "model.tied"]]
    assert found["tensors"][0]["chunks"][0]["nbytes"] == 1 << 20
    assert found["elements"] == 262_147


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"),
     (1 << 70, "1048576.0 PiB"), (1023.7, "1.0 KiB"), (2**30 - 1, "1.0 GiB")],
)  # fmt: skip
def test_sizes_are_in_the_unit_that_fits(nbytes, text):
    """Binary units, one decimal; the unit is that of the number as it is shown."""
    assert human(nbytes) == text

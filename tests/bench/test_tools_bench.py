"""`tools/bench.py`: limits of the machine, other libraries, growth, and charts."""

from __future__ import annotations

import errno
import json
import os
import sys

import bench
import pytest
import torch
from generated import make_checkpoint

MIB = 2**20


@pytest.mark.slow
def test_the_tool_compares_peers_and_the_best_plain_reader(tmp_path, monkeypatch, capsys) -> None:
    """The JSON has a row for each way, and names the libraries that are not installed."""
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    monkeypatch.setattr(bench, "PLAIN_READERS", bench.PLAIN_READERS[:3])
    path, chart = tmp_path / "small.safetensors", tmp_path / "chart.svg"
    make_checkpoint(path, nbytes=MIB, tensors=4, format="safetensors")
    assert bench.main([str(path), "--repeat", "2", "--json", "--plot", str(chart)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["different"] == []
    assert data["left_out"]["tensorizer"] == "the package tensorizer is not installed"
    assert not [row["error"] for row in data["results"].values() if row["error"]]
    row = data["results"]["limit-plain"]
    assert row["readers"][row["best_reader"]] == row["seconds"]
    assert len(row["readers"]) == 3
    assert data["machine"]["versions"]["torch"] == torch.__version__
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == []
    assert "<svg" in chart.read_text(encoding="utf-8")


@pytest.mark.parametrize("reader", bench.PLAIN_READERS, ids=bench.name_of)
def test_a_plain_reader_reads_every_byte(tmp_path, reader) -> None:
    """Also of files that end in the middle of a page, and of one that is empty."""
    contents = {"a": os.urandom(20 * MIB + 4097), "b": b"", "c": os.urandom(100)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in contents]
    try:
        areas = bench.read_once(files, reader)
    except OSError as error:
        if error.errno == errno.EINVAL and reader[1]:
            pytest.skip("this file system does not read directly")
        raise
    for area, content in zip(areas, contents.values(), strict=True):
        assert area[: len(content)] == content

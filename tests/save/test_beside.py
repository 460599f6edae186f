"""What is beside a checkpoint that is saved: what it supersedes goes, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

import torchlift

ONE, TWO = ({"a": torch.full((100,), float(at)), "b": torch.zeros(100)} for at in (1, 2))
NAME = "model.safetensors"
INDEX = NAME + ".index.json"


def write_index(folder: Path, name: str, *files: str) -> None:
    """An index that names files."""
    weight_map = {f"k{at}": file for at, file in enumerate(files)}
    (folder / name).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def first(path: Path) -> float:
    """The number of a state."""
    with torchlift.open(path) as ckpt:
        return float(ckpt["a"][0])


def test_what_an_old_index_names_is_removed_only_where_it_is_a_shard_of_it(tmp_path: Path) -> None:
    """An index may name anything, and a journal too."""
    for name in ("optimizer.pt", "other-00001-of-00001.safetensors", "thesis.txt"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
    old = "model-00001-of-00007.safetensors"
    (tmp_path / old).touch()
    write_index(tmp_path, INDEX, "optimizer.pt", "other-00001-of-00001.safetensors", old)
    journal = tmp_path / f".{INDEX}.files.torchlift-abcdef12.part"
    journal.write_text('"thesis.txt"\n', encoding="utf-8")
    torchlift.save(ONE, tmp_path, format="sharded")
    assert first(tmp_path) == 1
    left = set(os.listdir(tmp_path))
    assert {"optimizer.pt", "other-00001-of-00001.safetensors", "thesis.txt"} < left
    assert old not in left
    assert journal.name not in left


def test_shards_that_another_index_names_stay(tmp_path: Path) -> None:
    """Two indexes of one folder may share them."""
    torchlift.save(ONE, tmp_path, format="sharded")
    copy = (tmp_path / INDEX).read_bytes()
    (tmp_path / "model.bin.index.json").write_bytes(copy)
    torchlift.save(TWO, tmp_path, format="sharded")
    assert first(tmp_path / "model.bin.index.json") == 1
    assert first(tmp_path / INDEX) == 2
    (tmp_path / "model.bin.index.json").write_text("[]", encoding="utf-8")
    torchlift.save(ONE, tmp_path, format="sharded")
    assert first(tmp_path / INDEX) == 1

"""What is beside a checkpoint that is saved: what it supersedes goes, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import torchlift
from torchlift.errors import CheckpointError

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


def test_the_one_file_goes_when_its_shards_are_there(tmp_path: Path) -> None:
    """Else who opens it, transformers for one, would get the older values."""
    path = tmp_path / NAME
    torchlift.save(ONE, path)
    torchlift.save(TWO, path, max_shard_size=500)
    assert not path.exists()
    assert first(tmp_path) == first(tmp_path / INDEX) == 2
    torchlift.save(ONE, path)
    torchlift.save(TWO, tmp_path, format="sharded")
    assert sorted(os.listdir(tmp_path)) == ["model-00001-of-00001.safetensors", INDEX]


@pytest.mark.parametrize("size", [None, "1MB"])
def test_shards_go_when_the_one_file_is_there(tmp_path: Path, size: str | None) -> None:
    """The index first: a reader of the folder takes it rather than the file."""
    torchlift.save(TWO, tmp_path / NAME, max_shard_size=500)
    (tmp_path / "model-notes.txt").touch()
    torchlift.save(ONE, tmp_path / NAME, max_shard_size=size)
    assert first(tmp_path) == first(tmp_path / NAME) == 1
    assert sorted(os.listdir(tmp_path)) == ["model-notes.txt", NAME]
    write_index(tmp_path, INDEX, NAME)
    torchlift.save(TWO, tmp_path / NAME)
    assert first(tmp_path) == 2


def test_what_is_superseded_stays_until_the_new_one_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an error says so where it cannot be removed."""

    def denied(*args: object) -> None:
        raise PermissionError(13, "denied")

    torchlift.save(ONE, tmp_path / NAME)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", denied)
        with pytest.raises(CheckpointError, match="cannot be written"):
            torchlift.save(TWO, tmp_path, format="sharded")
    assert os.listdir(tmp_path) == [NAME]
    unlink = os.unlink
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda p: denied() if str(p).endswith(NAME) else unlink(p))
        with pytest.raises(CheckpointError, match="new checkpoint is in place, but an older one"):
            torchlift.save(TWO, tmp_path, format="sharded")
    assert first(tmp_path / INDEX) == 2


def test_a_folder_with_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    """A reader of the folder would take that one; nothing is written."""
    for old, new in (("dcp", "sharded"), ("sharded", "dcp")):
        folder = tmp_path / old
        torchlift.save(ONE, folder, format=old)
        before = os.listdir(folder)
        with pytest.raises(CheckpointError, match="a checkpoint of another format"):
            torchlift.save(TWO, folder, format=new)
        assert os.listdir(folder) == before
        assert first(folder) == 1


def test_a_conversion_does_not_supersede_without_being_told(tmp_path: Path) -> None:
    """The one file and the shards of its name are one checkpoint."""
    torchlift.save(ONE, tmp_path / NAME)
    with pytest.raises(CheckpointError, match="it is the source itself"):
        torchlift.convert(tmp_path / NAME, tmp_path, format="sharded")
    torchlift.convert(tmp_path / NAME, tmp_path, format="sharded", dtype="float64", overwrite=True)
    assert not (tmp_path / NAME).exists()
    with pytest.raises(CheckpointError, match="there is something of this name"):
        torchlift.convert(tmp_path, tmp_path / NAME)
    assert first(tmp_path) == 1

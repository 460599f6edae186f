"""What is beside a checkpoint that is saved: its own older files go, and nothing else does."""

from __future__ import annotations

import json
import os
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

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


def test_a_child_that_is_forked_meanwhile_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader's workers live on; the next writer does not wait for them."""
    copies: list[int] = []
    true = os.open

    def forked(*args: Any) -> int:
        descriptor = true(*args)
        copies.append(os.dup(descriptor))  # which shares the lock, as a child's copy does
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", forked)
        torchlift.save(ONE, tmp_path, format="sharded")
    assert len(copies) > 5
    for copy in copies:
        own = os.open(f"/proc/self/fd/{copy}", os.O_RDONLY)
        flock(own, LOCK_EX | LOCK_NB)
        os.close(own)
    for copy in copies:
        os.close(copy)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.pt", {}),
        (NAME, {}),
        (NAME, {"max_shard_size": 1}),
        (NAME, {"max_shard_size": "1MB"}),
        (INDEX, {}),
        ("d", {"format": "dcp"}),
    ],
)
def test_missing_folders_are_made_and_gone_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """For every format alike, by a conversion too."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a" / "b" / name
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
            torchlift.save(ONE, path, **options)
    assert os.listdir(tmp_path) == []
    torchlift.save(ONE, path, **options)
    other = tmp_path / "c" / name
    torchlift.convert(path if path.exists() else path.parent, other, **options)
    assert first(other if other.exists() else other.parent) == 1


def test_a_folder_with_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    """A reader of the folder would take that one; nothing is written."""
    pairs = ("dcp", "sharded"), ("sharded", "dcp"), ("dcp", "safetensors"), ("safetensors", "dcp")
    for old, new in pairs:
        folder = tmp_path / f"{old} {new}"
        folder.mkdir()
        torchlift.save(ONE, folder, format=old)
        before = os.listdir(folder)
        with pytest.raises(CheckpointError, match="a checkpoint of another format"):
            torchlift.save(TWO, folder, format=new)
        assert os.listdir(folder) == before
        assert first(folder) == 1


def debris(folder: Path) -> Path:
    """The path of the journal that a killed save has left."""
    return folder / f".{INDEX}.files.torchlift-abcdef12.part"


def test_a_damaged_journal_does_not_stop_a_save(tmp_path: Path) -> None:
    """What can be read of it counts."""
    left = "model-00003-of-00009.safetensors"
    (tmp_path / left).touch()
    content = b"\0" * 4096 + b'\n5\n{"a"\n\xff\xfe\n[1]\n' + json.dumps(left).encode() + b'\n"cut'
    debris(tmp_path).write_bytes(content)
    torchlift.save(ONE, tmp_path, format="sharded")
    assert sorted(os.listdir(tmp_path)) == ["model-00001-of-00001.safetensors", INDEX]


def test_a_journal_is_kept_as_long_as_nobody_can_tell_what_is_needed(tmp_path: Path) -> None:
    """The next save that can read the index removes what the journal names."""
    left = "model-00003-of-00009.safetensors"
    (tmp_path / left).touch()
    debris(tmp_path).write_text(json.dumps(left) + "\n", encoding="utf-8")
    (tmp_path / INDEX).write_text("damaged", encoding="utf-8")
    torchlift.save(ONE, tmp_path, format="sharded")
    assert debris(tmp_path).exists()
    torchlift.save(TWO, tmp_path, format="sharded")
    assert len(os.listdir(tmp_path)) == 2
    assert first(tmp_path) == 2


def test_names_of_shards_do_not_come_back(tmp_path: Path) -> None:
    """Who has read an index before two saves finds its shards gone, rather than other values."""
    seen: set[str] = set()
    for at in range(4):
        report = torchlift.save(ONE if at % 2 else TWO, tmp_path, format="sharded")
        assert not seen & set(report.files[:-1])
        seen.update(report.files[:-1])


@pytest.mark.parametrize("size", [None, 10, "1GB"])
def test_a_folder_that_is_there_is_written_into(tmp_path: Path, size: int | str | None) -> None:
    """As save_pretrained does, whatever becomes of the shards; and by a conversion, too."""
    state = {"a": torch.ones(3), "b": torch.zeros(3)}
    for number, folder in enumerate((tmp_path / "to", tmp_path / "to.safetensors")):
        folder.mkdir()
        report = torchlift.save(state, folder, format="safetensors", max_shard_size=size)
        assert report.path.startswith(f"{folder}/model.safetensors")
        assert torchlift.diff(folder, state).equal
        other = tmp_path / f"other{number}"
        other.mkdir()
        torchlift.convert(folder, other, format="safetensors", max_shard_size=size)
        assert torchlift.diff(folder, other).equal
    assert len(os.listdir(tmp_path)) == 4


def test_an_old_shard_that_cannot_be_removed_is_told_and_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says that the new checkpoint is in place."""
    path, unlink = tmp_path / "x.safetensors.index.json", os.unlink
    torchlift.save({"w": torch.ones(3)}, path)
    (shard,) = tmp_path.glob("*.safetensors")

    def denied(name: str) -> None:
        if str(name) == str(shard):
            raise PermissionError(13, "denied")
        unlink(name)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", denied)
        with pytest.raises(CheckpointError, match=r"new checkpoint is in place, .*denied"):
            torchlift.save({"w": torch.zeros(3)}, path)
    assert torchlift.open(path)["w"].tolist() == [0, 0, 0]
    torchlift.save({"w": torch.ones(3)}, path)
    assert len(os.listdir(tmp_path)) == 2

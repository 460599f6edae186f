"""The consolidated file of one process, and of ranks of which some are killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import Forked
from full_disk import file_size_limit
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchlift
from torchlift.distributed import CheckpointWriter, save_consolidated
from torchlift.errors import CheckpointError


def test_the_file_is_an_ordinary_one(tmp_path: Path) -> None:
    """safetensors reads it, with every dtype, empty tensors, scalars, views and metadata."""
    state = {
        "b": torch.arange(3, dtype=torch.int8),
        "a": torch.randn(4, 6).t(),
        "bf16": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    path = tmp_path / "x.safetensors"
    wrote = save_consolidated(state, path, metadata={"step": "7"})
    assert wrote == sum(value.nbytes for value in state.values())
    found = load_file(path)
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    with safe_open(path, "pt") as file:
        assert file.metadata().items() >= {"step": "7", "format": "pt"}.items()
    assert torchlift.verify(path).ok
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_torch_file_is_what_torch_save_writes(tmp_path: Path) -> None:
    """Byte for byte, but for torch's hash and for equal names, which the pickle has once here."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    save_consolidated(model, tmp_path / "x.pt")
    torch.save(model.state_dict(), tmp_path / "archive")
    with ZipFile(tmp_path / "x.pt") as ours, ZipFile(tmp_path / "archive") as theirs:
        assert ours.namelist() == theirs.namelist()
        for name in set(ours.namelist()) - {"archive/data.pkl", "archive/.data/serialization_id"}:
            assert ours.read(name) == theirs.read(name), name
    one, two = (torch.load(tmp_path / name) for name in ("x.pt", "archive"))
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert list(one) == list(two)
    assert one._metadata == two._metadata


def test_the_suffix_or_the_caller_says_the_format(tmp_path: Path) -> None:
    """The content follows; without either, the message has the ways out."""
    for name, format, expected in [
        ("a.PT", None, "torch-zip"),
        ("a.ckpt", None, "torch-zip"),
        ("a.bin", "safetensors", "safetensors"),
        ("a", "torch-zip", "torch-zip"),
    ]:
        save_consolidated({"w": torch.ones(2)}, tmp_path / name, format=format)
        assert torchlift.open(tmp_path / name).format == expected
        assert torch.equal(torchlift.open(tmp_path / name)["w"], torch.ones(2))
    with pytest.raises(
        ValueError, match=r"suffix '\.x' .* Name the file \.safetensors or \.pt, or"
    ):
        save_consolidated({"w": torch.ones(2)}, tmp_path / "a.x")
    with pytest.raises(
        ValueError, match=r"format='zip': expected one of safetensors, torch-zip, sharded, dcp"
    ):
        save_consolidated({"w": torch.ones(2)}, tmp_path / "a.pt", format="zip")
    with pytest.raises(ValueError, match="does not store metadata"):
        save_consolidated({"w": torch.ones(2)}, tmp_path / "a.pt", metadata={"a": "b"})


def test_more_files_than_a_process_may_open_are_written(tmp_path: Path) -> None:
    """Each is open for as long as it is written; after an error none is left, nor open."""
    resource = pytest.importorskip("resource")
    state = {f"w{number}": torch.ones(10) for number in range(60)}
    gc.collect()  # files that cycles of earlier tests hold would be closed meanwhile
    opened = os.listdir("/dev/fd")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, opened)) + 30, before[1]))
    try:
        torchlift.save(state, tmp_path, format="sharded", max_shard_size=40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert torchlift.verify(tmp_path).ok
    assert torchlift.open(tmp_path).state_dict().keys() == state.keys()
    files = os.listdir(tmp_path)
    larger = {**state, "z": torch.ones(10_000)}
    with file_size_limit(10_000), pytest.raises(CheckpointError, match="File too large"):
        torchlift.save(larger, tmp_path, format="sharded", max_shard_size=40)
    assert sorted(os.listdir(tmp_path)) == sorted(files)
    assert len(os.listdir("/dev/fd")) == len(opened)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # it is not, for dcp.save
@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (os.unlink, "not complete; expected .* bytes; found no file"),
        (lambda path: os.truncate(path, 10), "not complete; expected .* bytes; found 10 bytes"),
    ],
)
def test_a_directory_without_a_file_of_its_ranks_does_not_appear(
    tmp_path: Path, lose: Callable[[Path], None], message: str
) -> None:
    """Every file is looked at before the one that names them."""

    class Losing(CheckpointWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            done = super().write_data(plan, planner)
            (written,) = tmp_path.glob(".__0_0*")
            lose(written)
            return done

    with pytest.raises(CheckpointException, match=message):
        dcp.save({"w": torch.ones(9)}, storage_writer=Losing(tmp_path), no_dist=True)
    assert not os.listdir(tmp_path)


KILLED = Path(__file__).with_name("worker_killed.py")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize(
    ("victims", "where", "name"),
    [
        ("0", "write", "x.pt"),
        ("1", "write", "x.safetensors.index.json"),
        ("1", "write", "dcp"),
        ("0", "replace", "x.pt"),
        ("0,1", "write", "x.safetensors.index.json"),  # nobody is left to remove what was begun
        ("0,1", "fsync", "x.pt"),
    ],
)
def test_kill_9_in_the_middle_of_a_save(
    tmp_path: Path, victims: str, where: str, name: str
) -> None:
    """The old one is whole, the survivor raises soon, and what is left the next save removes."""
    folder = tmp_path / "saved"
    folder.mkdir()
    path = folder / name
    format = "dcp" if name == "dcp" else None
    torchlift.save({"w": torch.ones(2)}, path, format=format)
    before = files_in(folder)
    ranks = [Forked(KILLED, tmp_path, rank, 2, victims, where, name) for rank in range(2)]
    ends = [rank.wait(timeout=120) for rank in ranks]
    assert ends == [-signal.SIGKILL if str(rank) in victims else 0 for rank in range(2)]
    for rank in range(2):
        if str(rank) not in victims:
            message, seconds = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
            assert name == "dcp" or "another rank died or does not answer" in message
            assert seconds < 40
    left = files_in(folder)
    assert {name: left[name] for name in before} == before
    assert (left.keys() == before.keys()) == (len(victims) == 1)
    torchlift.save({"w": torch.zeros(2)}, path, format=format)
    after = files_in(folder)
    assert len(after) == len(before)
    assert not any(".torchlift-" in name for name in after)
    with torchlift.open(path) as found:
        assert torch.equal(found["w"], torch.zeros(2))


def files_in(folder: Path) -> dict[str, bytes]:
    files = filter(Path.is_file, folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}

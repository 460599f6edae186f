"""Saves of more files than may be open, without a file of a rank, and of ranks that are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import Forked
from torch.distributed.checkpoint.api import CheckpointException

import torchlift
from torchlift.distributed import CheckpointWriter


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

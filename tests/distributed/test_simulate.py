"""The bytes that each rank of FSDP reads, by arithmetic and on meshes of every shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_workers
from small_models import Tied
from torch import nn

import torchlift
from torchlift import remap
from torchlift.distributed import simulate
from torchlift.errors import MismatchError

WORKERS = Path(__file__).with_name("workers_simulate.py")


def test_rows_are_cut_in_chunks(tmp_path: Path) -> None:
    """The last ranks get fewer rows or none, and every rank reads a tensor without dimensions."""
    torch.save(
        {"w": torch.ones(6, 8), "b": torch.ones(6), "n": torch.ones(()), "e": torch.ones(0, 3)},
        tmp_path / "m.pt",
    )
    assert simulate(tmp_path / "m.pt", 4) == (76, 76, 76, 4)
    assert simulate(tmp_path / "m.pt", 1) == (192 + 24 + 4,)


def test_a_tie_is_read_once(tmp_path: Path) -> None:
    """Both names of it are one tensor of the model."""
    torchlift.save(Tied(), tmp_path / "tied.pt")
    assert sum(simulate(tmp_path / "tied.pt", 2)) == Tied().head.weight.nbytes


def test_root_and_rename_choose_the_tensors(tmp_path: Path) -> None:
    """A rule that matches nothing is an error, as in a load."""
    state = {f"module.{key}": value for key, value in nn.Linear(4, 6).state_dict().items()}
    path = tmp_path / "saved.pt"
    torch.save({"model": state, "moments": torch.zeros(1000)}, path)
    assert sum(simulate(path, 3, root="model", rename=remap.strip("module"))) == 120
    assert simulate(path, 2, root="model", rename={"module.bias": None}) == (48, 48)
    with torchlift.open(path, root="model") as ckpt:
        assert simulate(ckpt, 3) == (40, 40, 40)
    with pytest.raises(MismatchError, match="matches no key"):
        simulate(path, 2, root="model", rename=remap.strip("net"))


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "2", 2**20 + 1])
def test_a_number_of_ranks_that_means_nothing_is_refused(tmp_path: Path, ranks) -> None:
    """Before the file is opened."""
    with pytest.raises(ValueError, match="expected a number from 1 to 1,048,576"):
        simulate(tmp_path / "nowhere.pt", ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_reads_the_bytes_of_its_own_shards(tmp_path: Path, ranks: int) -> None:
    """On meshes of one to three dimensions: FSDP, HSDP, TP and FSDP over TP, on uneven sizes."""
    out = tmp_path / str(ranks)
    out.mkdir()
    checks = run_workers(WORKERS, ranks, out)
    assert len(checks) >= 7  # none was skipped
    assert {check: text for check, text in checks.items() if text} == {}
    records = json.loads((out / "records").read_text(encoding="utf-8"))
    assert len(records) >= len(checks) - 1
    for real in records:
        if real["mesh"] == f"fsdp={ranks}" and "elsewhere" not in real["path"]:
            computed = simulate(real["path"], ranks, rename={"gaps": None})
            buffer = 36 if real["path"].endswith(".pt") else 20  # of 5 numbers, with 4 gaps or none
            assert real["bytes"] == [nbytes + buffer for nbytes in computed]

"""A part of a checkpoint, loaded into DTensors: every rank leaves out the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift.distributed import on_ranks


def on_a_rank(path: str) -> list[Any]:
    """Load a part into a sharded model; ask for what is not there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for value in model.parameters():
        nn.init.zeros_(value)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    report = torchlift.load(model, path, include=["0.*"])
    try:
        torchlift.load(model, path, exclude=["2.*"])
    except torchlift.MismatchError as error:
        refused = "no key fits the pattern '2.*'" in str(error)
    sums = [float(value.to_local().sum()) for value in model.parameters()]
    return [report.missing_keys, sorted(report.loaded), refused, sums]


@pytest.mark.distributed
def test_all_ranks_leave_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out keeps its local values; a pattern that fits nothing is an error of all."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    torch.save({key: torch.ones_like(value) for key, value in state.items()}, tmp_path / "x.pt")
    one, two = on_ranks(
        2, on_a_rank, str(tmp_path / "x.pt"), environment={"PYTHONWARNINGS": "ignore"}
    )
    want = [["1.weight", "1.bias"], ["0.bias", "0.weight"], True, [8.0, 2.0, 0.0, 0.0]]
    assert one == two == want

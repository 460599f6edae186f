"""Optimizer state that lies in the files of several ranks: each rank reads its own slices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.tensor import Placement, Shard, distribute_tensor

import torchlift
from torchlift import measure
from torchlift.distributed import get_optimizer_state_dict, load_optimizer

MIB = 1 << 20


def sharded(placement: Placement, rows: int) -> tuple[nn.Module, Any]:
    """A model of one weight of `rows` KiB, sharded over all ranks, and Adam, never stepped.

    Which also has a parameter that belongs to no module.
    """
    model = nn.Linear(256, rows, bias=False, device="meta")
    mesh = cpu_mesh()
    weight = distribute_tensor(torch.zeros(rows, 256), mesh, [placement])
    model.weight = nn.Parameter(weight)
    alpha = nn.Parameter(torch.ones(1))
    return model, torch.optim.Adam([*model.parameters(), alpha], foreach=False)


def stepped(placement: Placement, rows: int, scale: float = 1.0) -> tuple[nn.Module, Any]:
    """One that took a step, after which no two moments are equal."""
    model, optimizer = sharded(placement, rows)
    numbers = torch.arange(float(rows * 256)).view(rows, 256).mul_(scale)
    weight: Any = model.weight
    weight.grad = distribute_tensor(numbers, weight.device_mesh, weight.placements)
    optimizer.param_groups[0]["params"][1].grad = torch.full((1,), scale)
    optimizer.step()
    weight.grad = None
    return model, optimizer


def saved(folder: Path, rows: int) -> None:
    model, optimizer = stepped(Shard(0), rows)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def moments(optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


@on(2)
def test_a_rank_adds_its_shards_and_little_more(folder: Path) -> None:
    """Moments of 192 MiB in the files of two ranks: each adds its 96 and 64 at most."""
    rows = 96 << 10
    saved(folder, rows)
    for make in (sharded, stepped):  # in fresh state and over a live one
        model, optimizer = make(Shard(0), rows)
        with measure.memory() as use:
            load_optimizer(model, optimizer, folder, root="optimizer")
        assert use.added_anonymous < (96 + 64) * MIB, use


@on(2)
def test_each_rank_takes_its_slices_in_any_layout(folder: Path) -> None:
    """In new state and in a live one, which keeps its tensors; a file that changed changes none."""
    rows = 7
    saved(folder, rows)
    expected = {
        key: value.full_tensor() for key, value in moments(stepped(Shard(0), rows)[1]).items()
    }
    for placement in (Shard(0), Shard(1)):
        for make in (sharded, stepped):
            model, optimizer = make(placement, rows, *([0.5] if make is stepped else []))
            before = (
                {key: id(value) for key, value in moments(optimizer).items()}
                if optimizer.state
                else {}
            )
            report = load_optimizer(model, optimizer, folder, root="optimizer")
            assert report.loaded == ["weight", "param_groups.0.params.1"], report
            *_, of_alpha = optimizer.state.values()
            assert float(of_alpha["exp_avg"]) == pytest.approx(0.1), of_alpha
            now = moments(optimizer)
            for key, value in now.items():
                assert torch.equal(value.full_tensor(), expected[key]), (placement, key)
                assert value.placements == (placement,)
            # Whoever holds a live one, such as a captured graph, sees the new values in it.
            assert not before or before == {key: id(value) for key, value in now.items()}
    model, optimizer = stepped(Shard(1), rows, 0.5)
    kept = {key: value.full_tensor() for key, value in moments(optimizer).items()}
    with torchlift.open(folder) as ckpt:
        dist.barrier()
        if dist.get_rank() == 0:
            (file,) = Path(folder).glob("__1_*.distcp")
            os.truncate(file, file.stat().st_size - 1)
        dist.barrier()
        with pytest.raises(torchlift.CheckpointError, match="distcp"):
            load_optimizer(model, optimizer, ckpt, root="optimizer")
    for key, value in moments(optimizer).items():
        assert torch.equal(value.full_tensor(), kept[key]), key

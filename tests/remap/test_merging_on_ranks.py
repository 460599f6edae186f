"""Merged and split tensors on two ranks: each reads the bytes of its own shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchlift
from torchlift import remap
from torchlift.errors import CheckpointError

RULE = (
    remap.merge(["{e}.gate", "{e}.up"], "gate_up", stack=0, cat=1)
    | remap.merge("{e}.down", "down", stack=0, transpose=(0, 1))
    | remap.split("qkv", ["q", "k", "v"], chunk=0, sizes=(2, 1, 1))
)


class Net(nn.Module):
    """Fused experts and attention that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(3, 2048, 8))
        self.down = nn.Parameter(torch.zeros(3, 1024, 8))
        self.q = nn.Parameter(torch.zeros(12, 8))
        self.k = nn.Parameter(torch.zeros(6, 8))
        self.v = nn.Parameter(torch.zeros(6, 8))


def state() -> dict[str, torch.Tensor]:
    """The same values on every rank."""
    torch.manual_seed(0)
    made = {f"{e}.{name}": torch.randn(1024, 8) for e in range(3) for name in ("gate", "up")}
    made |= {f"{e}.down": torch.randn(8, 1024) for e in range(3)}
    return made | {"qkv": torch.randn(24, 8)}


def expected() -> dict[str, torch.Tensor]:
    """What torch makes of them."""
    old = state()
    stacks = {
        name: torch.stack([old[f"{e}.{name}"] for e in range(3)]) for name in ("gate", "up", "down")
    }
    q, k, v = old["qkv"].split([12, 6, 6])
    whole = torch.cat([stacks["gate"], stacks["up"]], 1)
    return {"gate_up": whole, "down": stacks["down"].mT, "q": q, "k": k, "v": v}


def fsdp(model: nn.Module) -> Any:
    return fully_shard(model)


def columns(dim: int) -> Any:
    def wrap(model: nn.Module) -> nn.Module:
        for name, value in list(model.named_parameters()):
            at = min(dim, value.dim() - 1)
            sharded = distribute_tensor(value.data, cpu_mesh(), [Shard(at)])
            setattr(model, name, nn.Parameter(sharded))
        return model

    return wrap


def assert_values(model: nn.Module) -> None:
    for name, value in expected().items():
        found: Any = getattr(model, name)
        assert torch.equal(found.full_tensor(), value), name


@on(2)
def test_shards_are_read_from_files(folder: Path) -> None:
    """Every rank reads the bytes of its shards, from a file and from what ranks have written."""
    path = folder / "model.pt"
    if dist.get_rank() == 0:
        torch.save(state(), path)
    dist.barrier()
    for wrap in (fsdp, columns(1), columns(2)):
        for start in (Net, lambda: torchlift.skeleton(Net)):
            model = wrap(start())
            report = torchlift.load(model, path, rename=RULE, source="read")
            assert_values(model)
            local = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
            assert report.bytes_read == local, (report.bytes_read, local)
    # One rank lacks an expert: all of them say so.
    lacking = {k: v for k, v in state().items() if k != "1.up" or dist.get_rank() == 0}
    model = fsdp(Net())
    with pytest.raises(CheckpointError, match=r"1\.up"):
        torchlift.load(model, lacking, rename=RULE)


@on(2)
def test_shards_are_taken_of_a_state_dict() -> None:
    """Each rank copies its slices out of whole tensors in memory; of sharded ones none is made."""
    for wrap in (fsdp, columns(1)):
        for start in (Net, lambda: torchlift.skeleton(Net)):
            model = wrap(start())
            torchlift.load(model, state(), rename=RULE)
            assert_values(model)
    sharded = {key: distribute_tensor(v, cpu_mesh(), [Shard(0)]) for key, v in state().items()}
    with pytest.raises(CheckpointError, match="only plain tensors can be"):
        torchlift.load(fsdp(Net()), sharded, rename=RULE)

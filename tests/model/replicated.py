"""What every rank of the test of replicas checks: a load into a model that several train."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlift
from torchlift import PlacementError, swap
from torchlift._model.holders import Hold


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A few steps on inputs that differ between the ranks."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.full((2, 4), float(dist.get_rank() + step))
        model(inputs).square().sum().backward()
        optimizer.step()


def agree(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


def replicas_stay_replicas() -> None:
    """Load with every mode under the wrapper, and train on."""
    path = Path(sys.argv[1], "model.pt")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    reference = copy.deepcopy(model)
    reference.load_state_dict(torch.load(path))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    train(replica, optimizer, 2)
    blockers = swap.preflight(model)
    assert {item.key for item in blockers} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for item in blockers:
        assert item.kinds == {Hold.REDUCER}, item
    with pytest.raises(PlacementError, match="hooks of a DistributedDataParallel module"):
        torchlift.load(model, path, mode="swap")
    with pytest.raises(PlacementError, match="Load before you wrap the module"):
        torchlift.load(model, path, dtype=torch.float64)
    # Something else that holds a parameter does not hide the hooks.
    view = model[2].bias.view(1, 2)
    assert swap.preflight(model)[3].kinds == {Hold.VIEW, Hold.REDUCER}
    last = {"2.bias": "2.bias"}.get
    with pytest.raises(PlacementError, match="Load before you wrap the module"):
        torchlift.load(model, path, rename=last, dtype=torch.float64, strict=False)
    assert view._base is model[2].bias
    del view
    report = torchlift.load(replica, path, rename=lambda key: "module." + key)
    assert set(report.mode.values()) == {"copy"}
    other = DistributedDataParallel(reference)
    train(replica, optimizer, 5)
    train(other, torch.optim.SGD(other.parameters(), lr=0.01), 5)
    for mine, wanted in zip(replica.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    assert agree(replica)


if __name__ == "__main__":
    main({"replicas": replicas_stay_replicas})

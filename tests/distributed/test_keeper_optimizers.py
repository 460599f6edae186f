"""A Keeper resumes optimizers of every kind: the next losses are the same bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_kinds import ADAMS, MATRICES, ONE_PROCESS, Net, losses
from ranks import cpu_mesh, on
from torch.distributed.fsdp import fully_shard

import torchlift

#: Each rank has codes of its own shard, which are plain tensors.
ON_MESH = {**ADAMS, **MATRICES, "8 bits": ONE_PROCESS["8 bits"]}


def require_equal_losses(name: str, steps: int, folder: Path, *, shards: bool) -> None:
    """Save and resume a model and its optimizers; compare the next three losses."""

    def made(seed: int) -> dict[str, Any]:
        model = Net(seed)
        if shards:
            fully_shard(model, mesh=cpu_mesh())
        found = ONE_PROCESS[name](model)
        optimizers = found if isinstance(found, list) else [found]
        return {"model": model, **{f"optimizer_{n}": one for n, one in enumerate(optimizers)}}

    def step(run: dict[str, Any], count: int) -> list[float]:
        model, *optimizers = run.values()
        return losses(model, optimizers, count)

    run, again = made(0), made(1)
    step(run, steps)
    with torchlift.Keeper(folder) as keeper:
        keeper.save(steps, run)
        expected = step(run, 3)
        assert keeper.resume(again) == steps
    assert step(again, 3) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_the_next_losses_are_the_same_in_one_process(name: str, steps: int, tmp_path: Path) -> None:
    """Before the first step and after some."""
    require_equal_losses(name, steps, tmp_path, shards=False)


@on(2, name=ONE_PROCESS)
def test_the_next_losses_are_the_same_on_ranks_with_all_of_a_model(name: str, folder: Path) -> None:
    """Every rank has the whole state, and the folder stores it once."""
    require_equal_losses(name, 3, folder, shards=False)
    if dist.get_rank() == 0:
        index = torchlift.open(folder / "step-000000003")._index
        assert not [key for key in index.hidden if key.startswith("ranks.1.")]


@on(2, name=ON_MESH)
def test_the_next_losses_are_the_same_on_ranks_with_shards(name: str, folder: Path) -> None:
    """Also of state that is whole on every rank, or is no DTensor at all."""
    require_equal_losses(name, 3, folder, shards=True)


def test_sparse_gradients_go_on(tmp_path: Path) -> None:
    """Adam of an embedding's rows makes its state in a step."""
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = torch.nn.Embedding(6, 4, sparse=True)
        runs.append({"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())})

    def step(run: dict[str, Any]) -> torch.Tensor:
        run["model"](torch.tensor([1, 3])).square().sum().backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        return run["model"].weight.detach().clone()

    run, again = runs
    step(run)
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, run)
        assert keeper.resume(again) == 1
    for _ in range(3):
        assert torch.equal(step(run), step(again))

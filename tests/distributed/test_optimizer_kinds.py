"""Optimizers of every kind go on as if nothing had happened, on as many processes or on others."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from optimizer_kinds import ADAMS, MATRICES, ONE_PROCESS, STEPPED, Net, losses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchlift
import torchlift.distributed as ours
from torchlift.distributed import on_ranks

ON_MESH = {**ADAMS, **MATRICES}


def state_of(model: Any, optimizers: Any) -> dict[str, Any]:
    model_state, optimizer_state = ours.get_state_dict(model, optimizers)
    return {"model": model_state, "optimizers": optimizer_state}


def resumed(path: Any, model: Any, optimizers: Any) -> list[float]:
    """Load everything into a new model and its optimizers, and return the next five losses."""
    torchlift.load(model, path, root="model")
    report = ours.load_optimizer(model, optimizers, path, root="optimizers")
    assert report.missing_keys == report.unexpected_keys == []
    return losses(model, optimizers, 5)


@pytest.mark.parametrize("name", ONE_PROCESS)
@pytest.mark.parametrize("steps", [0, 3])
def test_the_next_losses_are_the_same_in_one_process(name: str, steps: int, tmp_path: Path) -> None:
    """To the bit, before the first step and after some; out of a file."""
    model = Net()
    optimizers = ONE_PROCESS[name](model)
    losses(model, optimizers, steps)
    torchlift.save(state_of(model, optimizers), tmp_path / "saved.pt")
    other = Net(seed=1)
    found = resumed(tmp_path / "saved.pt", other, ONE_PROCESS[name](other))
    assert found == losses(model, optimizers, 5)


class Found(NamedTuple):
    """What two ranks found, by the name of an optimizer.

    Attributes:
        expected: the losses of the job that went on.
        on_two: those of one that was resumed on two ranks.
        from_one: those of one that was resumed from a checkpoint of one process.
    """

    expected: list[float]
    on_two: list[float]
    from_one: list[float]


def sharded(seed: int = 0) -> Any:
    return fully_shard(Net(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def run_on_two(folder: str) -> dict[str, Found]:
    found = {}
    for name, make in ON_MESH.items():
        model = sharded()
        optimizers = make(model)
        losses(model, optimizers, 3)
        path = os.path.join(folder, f"two {name}")
        torchlift.save(state_of(model, optimizers), path, format="dcp")
        others = [sharded(seed=1), sharded(seed=2)]
        on_two = resumed(path, others[0], make(others[0]))
        fresh = make(others[1])
        if name in STEPPED:
            losses(others[1], fresh, 3)
        from_one = resumed(os.path.join(folder, f"one {name}.pt"), others[1], fresh)
        found[name] = Found(losses(model, optimizers, 5), on_two, from_one)
    return found


class Results(NamedTuple):
    """What a process alone found, and two ranks.

    Attributes:
        alone: the losses of a process alone.
        on_one: those of one that was resumed from a checkpoint of two ranks.
        on_two: see `Found`.
    """

    alone: dict[str, list[float]]
    on_one: dict[str, list[float]]
    on_two: dict[str, Found]


@cache
def results() -> Results:
    with TemporaryDirectory() as folder:
        alone, on_one = {}, {}
        for name, make in ON_MESH.items():
            model = Net()
            optimizers = make(model)
            losses(model, optimizers, 3)
            torchlift.save(state_of(model, optimizers), os.path.join(folder, f"one {name}.pt"))
            alone[name] = losses(model, optimizers, 5)
        on_two = on_ranks(2, run_on_two, folder)
        assert on_two[0] == on_two[1]
        for name, make in ON_MESH.items():
            model = Net(seed=3)
            on_one[name] = resumed(os.path.join(folder, f"two {name}"), model, make(model))
        return Results(alone, on_one, on_two[0])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return results()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ON_MESH)
def test_the_next_losses_are_the_same_on_as_many_ranks_and_on_others(
    name: str, found: Results
) -> None:
    """To the bit, except where a mesh multiplies matrices in another order."""
    on_two = found.on_two[name]
    assert on_two.on_two == on_two.expected
    # Muon multiplies them in bfloat16.
    close = partial(pytest.approx, rel=1e-3) if name in MATRICES else list[float]
    assert found.on_one[name] == close(on_two.expected)
    assert on_two.from_one == close(found.alone[name])

"""Optimizers of every kind go on as if nothing had happened, on as many processes or on others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_kinds import ADAMS, MATRICES, ONE_PROCESS, STEPPED, Net, losses
from ranks import cpu_mesh, on, saves, worlds
from state_models import FLAT, FROM_0, ON_0, WHOLE, set_both
from torch.distributed.fsdp import fully_shard
from wrapped_models import cloned

import torchlift
import torchlift.distributed as ours
from torchlift.distributed import StateDictOptions

ON_MESH = {**ADAMS, **MATRICES}
#: Their states have the form of AdamW or of SGD with momentum, and go through two doors.
ALIKE = "Adam", "AdamW, foreach", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Lion"
#: Saves a model and its optimizers into a folder, and returns what loads them into others.
Door = Callable[[Any, Any, Path], Callable[..., object]]


def made(name: str, seed: int, *, shards: bool = True) -> tuple[Any, Any]:
    """A model, which several ranks shard, and its optimizers."""
    model = Net(seed)
    if shards and dist.get_world_size() > 1:
        fully_shard(model, mesh=cpu_mesh())
    return model, ONE_PROCESS[name](model)


def keep(model: Any, optimizers: Any, folder: Path) -> Callable[..., object]:
    def named(model: Any, optimizers: Any) -> dict[str, Any]:
        each = optimizers if isinstance(optimizers, list) else [optimizers]
        return {"model": model, **{f"optimizer_{n}": one for n, one in enumerate(each)}}

    def resume(*to: Any) -> None:
        with keeper:
            assert keeper.resume(named(*to)) == 1

    keeper = torchlift.Keeper(folder)
    keeper.save(1, named(model, optimizers))
    return resume


def save(model: Any, optimizers: Any, path: Path) -> Callable[..., object]:
    states = dict(zip(("model", "optimizers"), ours.get_state_dict(model, optimizers), strict=True))
    torchlift.save(states, path, format="torch-zip" if dist.get_world_size() == 1 else "dcp")
    return partial(load, path)


def load(path: Path, model: Any, optimizers: Any) -> None:
    torchlift.load(model, path, root="model")
    report = ours.load_optimizer(model, optimizers, path, root="optimizers")
    assert report.missing_keys == report.unexpected_keys == []


def get(read: StateDictOptions, write: StateDictOptions, *run: Any) -> Callable[..., object]:
    *run, _ = run
    states = cloned(ours.get_state_dict(*run, options=read))
    return lambda *to: set_both(*to, states, options=write)


DOORS: dict[str, Door] = {
    "keeper": keep,
    "file": save,
    "as it is": partial(get, StateDictOptions(), StateDictOptions()),
    "flat": partial(get, FLAT, FLAT),
    "whole": partial(get, WHOLE, WHOLE),
    "on rank 0": partial(get, ON_0, FROM_0),
}


@on(1, name=ONE_PROCESS)
@on(2, name=[*ON_MESH, "8 bits"])
def test_the_next_losses_are_the_same(name: str, folder: Path) -> None:
    """To the bit, before the first step and after some, through every door."""
    doors = [*DOORS][: 2 if name in ALIKE else None]
    for way, steps in [*product(doors, (3,)), *product(doors[:3], (0,))]:
        if dist.get_world_size() > 1 and name == "8 bits" and way != "keeper":
            continue  # codes of each rank's own shard are plain tensors, which only a Keeper keeps
        run, again = made(name, 0), made(name, 1)
        losses(*run, steps)
        into = DOORS[way](*run, folder / f"{way}-{steps}")
        expected = losses(*run, 3)
        into(*again)
        assert losses(*again, 3) == expected, (way, steps)
        assert len(set(expected)) > 1


@on(2, name=("AdamW", "Muon and AdamW", "8 bits"))
def test_a_state_that_every_rank_has_is_kept_once(name: str, folder: Path) -> None:
    """The folder does not have it again for the second rank."""
    run, again = (made(name, seed, shards=False) for seed in (0, 1))
    losses(*run, 3)
    resume = keep(*run, folder)
    expected = losses(*run, 3)
    resume(*again)
    assert losses(*again, 3) == expected
    index = torchlift.open(folder / "step-000000001")._index
    assert not [key for key in index.hidden if key.startswith("ranks.1.")]


@saves(1, 2)
def writes_runs(saved: Path) -> None:
    for name in ON_MESH:
        run, path = made(name, 0), saved / f"{name}-{dist.get_world_size()}"
        losses(*run, 3)
        save(*run, path)
        expected = losses(*run, 5)
        if dist.get_rank() == 0:
            torch.save(expected, f"{path}.losses")


@on(1, 2, name=ON_MESH)
def test_the_next_losses_are_the_same_on_another_number_of_ranks(name: str, saved: Path) -> None:
    """To the bit, except where a mesh multiplies matrices in another order."""
    # Muon multiplies them in bfloat16.
    close = partial(pytest.approx, rel=1e-3) if name in MATRICES else list[float]
    for ranks in {*worlds()} - {dist.get_world_size()}:
        again = made(name, 2)
        if ranks == 1 and name in STEPPED:
            losses(*again, 3)
        load(saved / f"{name}-{ranks}", *again)
        assert losses(*again, 5) == close(torch.load(saved / f"{name}-{ranks}.losses"))

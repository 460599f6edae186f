"""The state of optimizers that never stepped: read without a step, and worth the first one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from state_models import equal, step, two_layers

import torchlift.distributed as ours

MAKERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "NAdam": torch.optim.NAdam,
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "LBFGS": torch.optim.LBFGS,
    "SparseAdam": torch.optim.SparseAdam,
}


@pytest.mark.parametrize("name", MAKERS)
def test_reading_the_state_takes_no_step(name: str) -> None:
    """torch steps with zero gradients, and Adam counts it (pytorch/pytorch#164929)."""
    model = two_layers()
    optimizer = MAKERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    found = ours.get_optimizer_state_dict(model, optimizer)
    assert equal(dict(model.state_dict()), dict(before[0]))
    assert equal(optimizer.state_dict(), before[1])
    assert not calls
    assert all(param.grad is None for param in model.parameters())
    for state in found["state"].values():
        assert state.get("step", 0) == 0
    del scheduler


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"LBFGS", "SparseAdam"}))
def test_a_state_read_before_the_first_step_continues_like_a_new_optimizer(name: str) -> None:
    """Saved, loaded and stepped, it gives the weights that the first step gives."""
    results = []
    for loaded in (False, True):
        model = two_layers()
        optimizer = MAKERS[name](model.parameters())
        if loaded:
            saved = ours.get_optimizer_state_dict(model, MAKERS[name](model.parameters()))
            ours.set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
        step(model, optimizer, 3)
        results.append((dict(model.state_dict()), optimizer.state_dict()["state"]))
    assert equal(*results)


def test_a_parameter_that_never_had_a_gradient_is_saved_like_the_others() -> None:
    """torch leaves it out, and then cannot load what it saved."""
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    saved = ours.get_optimizer_state_dict(model, optimizer)
    assert saved["state"]["0.weight"]["step"] == 1
    assert saved["state"]["1.bias"]["step"] == 0
    ours.set_optimizer_state_dict(model, torch.optim.Adam(model.parameters()), saved)


def test_what_a_new_optimizer_gave_is_kept_by_it_and_not_copied() -> None:
    """Reading, ``dcp.load`` into what was read, and loading takes the memory of one state."""
    model = two_layers()
    optimizer, other = (torch.optim.Adam(model.parameters()) for _ in range(2))
    saved = ours.get_optimizer_state_dict(model, optimizer)
    ours.set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.state[model[0].weight]["exp_avg"] is saved["state"]["0.weight"]["exp_avg"]
    ours.set_optimizer_state_dict(model, other, saved)
    assert other.state[model[0].weight]["exp_avg"] is not saved["state"]["0.weight"]["exp_avg"]

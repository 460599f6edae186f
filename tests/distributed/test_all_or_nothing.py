"""A load that somebody's own code refuses leaves model, optimizer and state dict as they were."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from hooked_models import BAD_VALUES, TROUBLES, attributes, layers, state_for
from state_models import same, set_both, step
from torch import nn

import torchlift.distributed as ours
from torchlift.distributed import StateDictOptions

FULL = [{}, {"full_state_dict": True}]


def trained(model: nn.Module, seed: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 2 + seed)
    return optimizer


def states_for(model: nn.Module) -> tuple[Any, Any]:
    other = layers()
    states = ours.get_optimizer_state_dict(other, trained(other, 1))
    return state_for(model), copy.deepcopy(states)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


@pytest.mark.parametrize("options", FULL, ids=["as it is", "whole"])
@pytest.mark.parametrize("name", TROUBLES)
def test_a_refusal_leaves_everything_as_it_was(name: str, options: dict[str, Any]) -> None:
    """Values, objects, attributes, extra state, and what the optimizer holds."""
    make, says = TROUBLES[name]
    model = make()
    optimizer = trained(model)
    states = states_for(model)
    before, kept = everything(model, optimizer), attributes(model)
    given = copy.deepcopy(states)
    moments = [dict(state) for state in optimizer.state.values()]
    with pytest.raises((RuntimeError, ValueError), match=says):
        set_both(model, optimizer, states, options=StateDictOptions(**options))
    assert same(everything(model, optimizer), before)
    for now, then in zip(attributes(model), kept, strict=True):
        assert now.keys() == then.keys()
        assert all(_alike(now[key], then[key]) for key in now), name
    for now, then in zip(optimizer.state.values(), moments, strict=True):
        assert all(now[key] is then[key] for key in then)
    assert same(states, given)


def _alike(now: Any, then: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(now[key] is then[key] for key in now)
    return now is then or (isinstance(now, list) and now == then)


@pytest.mark.parametrize("name", TROUBLES)
def test_a_model_on_meta_stays_there(name: str) -> None:
    """What was put in place is taken out again."""
    make, _ = TROUBLES[name]
    model = make().to("meta")
    tensors = dict(model.state_dict(keep_vars=True))
    with pytest.raises((RuntimeError, ValueError)):
        ours.set_model_state_dict(model, state_for(model))
    for key, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is tensors[key] or not isinstance(tensor, torch.Tensor), key
        assert getattr(tensor, "is_meta", True)


class Own(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("no")


class Late(torch.optim.Adam):
    """Refuses the state that it is given last, which a copy of it does not show."""

    real: object = None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if self.real is self:
            raise ValueError("no")


@pytest.mark.parametrize("kind", [Own, Late])
def test_an_optimizer_that_refuses_leaves_the_model_alone(kind: Any) -> None:
    """Its hooks and its own ``load_state_dict`` run last."""
    model = layers()
    optimizer = kind(model.parameters())
    step(model, optimizer)
    optimizer.real = optimizer
    states = states_for(model)
    states[1]["param_groups"][0]["lr"] = 7.0
    before, groups = everything(model, optimizer), optimizer.param_groups
    with pytest.raises(ValueError, match="no"):
        set_both(model, optimizer, states)
    assert same(everything(model, optimizer), before)
    assert optimizer.param_groups is groups
    with pytest.raises(ValueError, match="no"):
        ours.set_optimizer_state_dict(model, optimizer, states[1])
    assert same(everything(model, optimizer), before)


BAD: dict[str, Any] = {
    **BAD_VALUES,
    "number": lambda _: 1.0,
    "no dimension": lambda _: torch.tensor(1.0),
    "list": lambda value: [value],
    "none": lambda _: None,
}


@pytest.mark.filterwarnings("ignore")  # tensors that are nested, or on their way out of torch
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_a_value_that_cannot_be_copied_is_found_before_anything_changes(
    name: str, strict: bool
) -> None:
    """The last of a model's values, and of an optimizer's that has stepped or has not."""
    options = StateDictOptions(strict=strict)
    model = layers()
    bad = BAD[name](model[0].weight.detach())
    is_shape = name in ("shape", "no dimension")
    says = "shape|size mismatch" if is_shape else "cannot be copied.*found an? [a-zA-Z]+"
    before = copy.deepcopy(dict(model.state_dict()))
    state: dict[str, Any] = {key: value + 1 for key, value in model.state_dict().items()}
    state["0.weight"] = bad
    with pytest.raises(ours.StateDictMismatch, match=says):
        ours.set_model_state_dict(model, dict(reversed(state.items())), options=options)
    assert same(dict(model.state_dict()), before)
    optimizers = [trained(model), torch.optim.Adam(model.parameters())]
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, optimizers[0]))
    for moments in saved["state"].values():
        moments["exp_avg"].add_(1)
    saved["state"]["0.weight"]["exp_avg_sq"] = bad
    saved["param_groups"][0]["lr"] = 7.0
    for optimizer in optimizers:
        kept = everything(model, optimizer)
        expected = "the saved state is not a tensor" if not torch.is_tensor(bad) else says
        with pytest.raises(ours.StateDictMismatch, match=expected):
            ours.set_optimizer_state_dict(model, optimizer, saved, options=options)
        assert same(everything(model, optimizer), kept)
        step(model, optimizer)


class Interrupting(torch.optim.Adam):
    """Ctrl-C when it is given its state, which comes last."""

    armed = False

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if Interrupting.armed:
            Interrupting.armed = False
            interrupt()


def interrupt(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("early", [True, False])
def test_an_interrupt_in_the_middle_leaves_all_loaded_or_nothing(early: bool) -> None:
    """It comes before anything has changed, or when everything has: half has no backup."""
    model = layers()
    optimizer = Interrupting(model.parameters())
    step(model, optimizer)
    states = states_for(model)
    before = everything(model, optimizer)
    Interrupting.armed = not early
    if early:
        model.register_load_state_dict_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        set_both(model, optimizer, states)
    if early:
        assert same(everything(model, optimizer), before)
        return
    assert same(dict(model.state_dict()), dict(states[0]))
    assert same(ours.get_optimizer_state_dict(model, optimizer)["state"], states[1]["state"])

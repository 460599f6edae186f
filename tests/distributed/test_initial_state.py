"""The initial state of optimizers: read without a step, and worth the first one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizer_kinds import ONE_PROCESS, Net
from state_models import FLAT, PARTIAL, same, step, two_layers

import torchlift.distributed as ours


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_reading_the_state_takes_no_step(name: str) -> None:
    """torch steps with zero gradients, and Adam counts it (pytorch/pytorch#164929)."""
    model = Net()
    made = ONE_PROCESS[name](model)
    optimizers, calls = made if isinstance(made, list) else [made], list[object]()
    schedulers = [torch.optim.lr_scheduler.ConstantLR(each) for each in optimizers]
    before = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    for each in optimizers:
        each.register_step_pre_hook(lambda *_: calls.append(1))
    found = ours.get_optimizer_state_dict(model, optimizers)
    assert same(dict(model.state_dict()), dict(before[0]))
    assert same([each.state_dict() for each in optimizers], before[1])
    assert not calls
    assert all(param.grad is None for param in model.parameters())
    for state in found["state"].values():
        assert state.get("step", 0) == 0
    del schedulers


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


class Master(torch.optim.Optimizer):
    """Steps copies of the weights in float32, which its ``_init_group`` makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def _init_group(self, group: dict[str, Any], masters: list[torch.Tensor]) -> None:
        for param in group["params"]:
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    state["master"] = param.detach().float().clone()
                masters.append(state["master"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._init_group(group, [])
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["master"] -= group["lr"] * param.grad.float()
                    param.copy_(self.state[param]["master"])


class ScheduleFree(torch.optim.Optimizer):
    """Makes its state in ``step`` only, from the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["z"] = param.clone()
                state["z"] -= group["lr"] * param.grad
                param.lerp_(state["z"], 0.5)


class Wrapper(torch.optim.Optimizer):
    """Holds another optimizer and steps it, and has a state of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["seen"] = torch.ones(1)


class Forwarding(torch.optim.Optimizer):
    """Holds another optimizer, whose state and methods it shows as its own (Accelerate's does)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class ForwardingAdam(Forwarding, torch.optim.Adam):
    """The same, and it looks like an Adam to those who ask for its class."""


INNER = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "ScheduleFree": ScheduleFree,
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", [Wrapper, Forwarding, ForwardingAdam])
def test_reading_a_wrapper_does_not_train_what_it_holds(wrapper: Any, inner: str) -> None:
    """A step of a wrapper, or of a copy of it, is a step of the optimizer inside."""
    model = two_layers()
    optimizer = INNER[inner](model.parameters())
    wrapped = wrapper(optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    grads = [param.grad for param in model.parameters()]
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    found = ours.get_optimizer_state_dict(model, wrapped)
    ours.set_optimizer_state_dict(model, wrapped, copy.deepcopy(found))
    assert same((dict(model.state_dict()), optimizer.state_dict()), before)
    assert [param.grad for param in model.parameters()] == grads
    assert all(same(grad, torch.ones_like(grad)) for grad in grads)
    assert found["state"] == {}


@pytest.mark.parametrize("make", [Master, ScheduleFree])
def test_initial_state_is_made_from_the_weights(make: Any) -> None:
    """Read, loaded and stepped, they are where a first step takes them, not at zero."""
    results = []
    for loaded in (False, True):
        model = two_layers().bfloat16()
        optimizer = make(model.parameters())
        if loaded:
            saved = ours.get_optimizer_state_dict(model, optimizer)
            ours.set_optimizer_state_dict(model, optimizer, saved)
        step(model, optimizer, 2)
        results.append((dict(model.state_dict()), optimizer.state_dict()["state"]))
    assert same(*results)
    model = two_layers()
    found = ours.get_optimizer_state_dict(model, Master(model.parameters()))["state"]
    for name, weight in model.state_dict().items():
        assert same(found[name]["master"], weight)
        assert found[name]["master"].data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, ScheduleFree])
@pytest.mark.parametrize("options", [ours.StateDictOptions(), PARTIAL, FLAT], ids=str)
def test_what_only_a_step_can_make_is_left_out_not_missed_and_reported(
    make: Any, options: ours.StateDictOptions
) -> None:
    """Nobody can say whether there should be any state."""
    model = two_layers()
    optimizer = make(model.parameters())
    assert ours.get_optimizer_state_dict(model, optimizer)["state"] == {}
    saved = ours.get_optimizer_state_dict(model, optimizer, options=options)
    report = ours.set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert report.left_out == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (report.missing_keys, report.loaded) == ([], [])
    assert "without a state, which the first step makes (4): 0.weight" in str(report)

"""Hooks that change their module before it is loaded: as in torch, and without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import saved
from torch import nn

import torchlift
from torchlift.errors import MismatchError


class Prepares(nn.Module):
    """A hook gives the module what the checkpoint needs: a size, a tensor, a child, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.other = nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", None)
        self.calls = 0
        self.register_load_state_dict_pre_hook(self.prepare)

    @staticmethod
    def prepare(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.weight = nn.Parameter(torch.zeros(state[prefix + "weight"].shape))
        module.scale = torch.zeros_like(state[prefix + "scale"])
        module.child = nn.Linear(2, 2, bias=False)
        module.calls += 1


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """What `Prepares` grows into."""
    return {
        "weight": torch.arange(5.0),
        "other": torch.ones(2),
        "scale": torch.ones(1),
        "child.weight": torch.ones(2, 2),
    }


def snapshot(model: nn.Module) -> list[Any]:
    """Everything of a module that a hook of `Prepares` changes."""
    items = [*model.state_dict(keep_vars=True).items(), *model._modules.items()]
    return [*[(name, id(item)) for name, item in items], model.calls, model.scale]


@pytest.mark.parametrize("mode", ["auto", "assign", "copy", "swap"])
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_a_load_fills_what_a_hook_has_put_in_place(tmp_path, state, mode, live):
    """The new tensors, not those that the module had before; a plan tells, and changes nothing."""
    path = saved(state, tmp_path)
    model = Prepares() if live else torchlift.skeleton(Prepares)
    before = snapshot(model)
    plan = torchlift.plan(model, path, mode=mode)
    assert snapshot(model) == before
    report = torchlift.load(model, path, mode=mode)
    assert list(report.loaded) == list(plan.loaded)
    assert model.calls == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def fails(*_: Any) -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize("where", ["names", "transform", "post-hook"])
def test_a_failed_load_takes_back_what_a_hook_changed(tmp_path, state, where):
    """Whenever it fails, the module has the tensors, children and attributes that it had."""
    model, options = Prepares(), {}
    error: tuple[type[Exception], ...] = (RuntimeError,)
    if where == "names":
        del state["other"]
        error = (MismatchError,)
    elif where == "transform":
        options["transform"] = fails
    else:
        model.register_load_state_dict_post_hook(fails)
    path = saved(state, tmp_path)
    before, values = snapshot(model), [p.clone() for p in model.parameters()]
    with pytest.raises(error):
        torchlift.load(model, path, **options)
    assert snapshot(model) == before
    assert all(map(torch.equal, model.parameters(), values))
    assert not hasattr(model, "child")

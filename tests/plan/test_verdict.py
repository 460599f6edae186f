"""Code of the model that writes before the verdict, and after it: no trace of a plan or a failure.

Post-hooks run once, when the values are there, and may excuse names; then it is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_doors import look
from small_models import saved
from torch import nn

import torchlift
from torchlift.distributed import set_model_state_dict
from torchlift.errors import MismatchError, PlacementError


def bump(module: Any, *_: object) -> None:
    """A hook that writes to its module in place."""
    with torch.no_grad():
        module.bias.add_(1)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": bump,
    "through data": lambda module: module.bias.data.mul_(2),
    "through NumPy": lambda module: module.bias.detach().numpy().__iadd__(1),
    "a function": lambda module: torch._foreach_add_([module.bias.detach()], 1),
    "batch norm": lambda module: nn.functional.batch_norm(
        torch.rand(3, 2), module.mean, module.var, training=True
    ),
    "an index": lambda module: module.mean.__setitem__(0, 7.0),
    "other data": lambda module: setattr(module.bias, "data", torch.ones(2)),
    "another parameter": lambda module: setattr(module, "bias", nn.Parameter(torch.ones(2))),
    "an attribute": lambda module: setattr(module, "calls", 1),
    "a list": lambda module: module.events.append(1),
    "a dict in a dict": lambda module: module.facts["inner"].update(a=2),
    "a plain tensor": lambda module: module.plain.add_(1),
    "a flag": lambda module: module.bias.requires_grad_(False),
    "a gradient": lambda module: [
        p.grad.zero_() for p in module.parameters() if p.grad is not None
    ],
    "no gradient": lambda module: setattr(module.weight, "grad", None),
}


class Rich(nn.Linear):
    """A layer with one of everything that a hook may write to."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("var", torch.ones(2), persistent=False)
        self.events: list[int] = []
        self.facts = {"inner": {"a": 1}}
        self.plain = torch.zeros(2)
        self.weight.grad = torch.ones(2, 2)


def everything(model: nn.Module) -> list[Any]:
    """All of it, with gradients, containers and the plain tensors."""
    grads = [
        (p.grad is None, None if p.grad is None else p.grad.tolist()) for p in model.parameters()
    ]
    return [look(model), grads, [id(p.grad) for p in model.parameters()]]


def doors(model: nn.Module, state: dict[str, Any], path: Any) -> list[Callable[[], object]]:
    return [
        lambda: torchlift.load(model, state),
        lambda: torchlift.load(model, path),
        lambda: torchlift.load(model, path, mode="swap"),
        lambda: torchlift.load(model, path, mode="assign"),
        lambda: set_model_state_dict(model, state),
    ]


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("how", WRITES)
def test_what_a_hook_writes_is_gone_after_a_plan_and_after_a_failed_load(tmp_path, how, when):
    """Whatever it writes to, through every door that loads."""
    model = nn.Sequential(Rich(), nn.Linear(2, 2))
    hook = WRITES[how]
    if when == "pre":
        model[0].register_load_state_dict_pre_hook(lambda module, *_: (hook(module), None)[1])
    else:
        model[0].register_load_state_dict_post_hook(lambda module, keys: (hook(module), None)[1])
    state = {"0.weight": torch.rand(2, 2), "0.bias": torch.rand(2)}
    path, before = saved(state, tmp_path), everything(model)
    for door in doors(model, state, path):
        with pytest.raises(MismatchError, match=r"1\.weight"):
            door()
        assert everything(model) == before
    planned = torchlift.plan(model, path, strict=False)
    assert planned.missing_keys == ["1.weight", "1.bias"]
    assert everything(model) == before


def test_a_plan_runs_the_post_hooks_that_may_excuse_names(tmp_path) -> None:
    """Its verdict is that of the load; it runs each hook once, and the model is as it was."""
    calls: list[int] = []

    def excuse(module: Any, keys: Any) -> None:
        calls.append(1)
        bump(module[0])
        keys.unexpected_keys.remove("old")

    model = nn.Sequential(nn.Linear(2, 2))
    model.register_load_state_dict_post_hook(excuse)
    path, before = (
        saved({"0.weight": torch.ones(2, 2), "old": torch.ones(1)}, tmp_path),
        look(model),
    )
    plan = torchlift.plan(model, path, strict=False)
    assert (plan.missing_keys, plan.unexpected_keys, calls) == (["0.bias"], [], [1])
    assert look(model) == before
    with pytest.raises(MismatchError, match=r"missing \(1\): 0\.bias"):
        torchlift.plan(model, path)
    assert look(model) == before


class Reaching(nn.Linear):
    """Loads itself, and runs what it is given before."""

    before: Callable[[], object]

    def _load_from_state_dict(self, *rest: Any) -> None:
        self.before()
        super()._load_from_state_dict(*rest)


@pytest.mark.parametrize("code", ["pre-hook", "pre-hook of the root", "override", "raises"])
def test_code_that_writes_into_another_module_before_the_verdict_is_refused(tmp_path, code):
    """The error names the tensor, no other one has changed, and the way out works."""
    model = nn.Sequential(Rich(), Reaching(2, 2), nn.Linear(2, 2))
    write = lambda *_: bump(model[0])  # noqa: E731
    model[1].before = write if code in ("override", "raises") else lambda: None
    hook = None
    if code.startswith("pre-hook"):
        owner = model if "root" in code else model[2]
        hook = owner.register_load_state_dict_pre_hook(write)
    if code == "raises":
        model[2].register_load_state_dict_pre_hook(lambda *_: {}["nothing"])
    state = {key: torch.rand(value.shape) for key, value in model.state_dict().items()}
    path = saved(state, tmp_path)
    for door in [lambda: torchlift.plan(model, path), *doors(model, state, path)]:
        before = {name: look(nn.ModuleList([each])) for name, each in model.named_children()}
        with pytest.raises((PlacementError, MismatchError), match="may have changed") as caught:
            door()
        assert caught.value.entry == "0.bias"
        assert "register_load_state_dict_post_hook" in str(caught.value.hint)
        assert all(look(nn.ModuleList([model[at]])) == before[str(at)] for at in (1, 2))
    if hook is None:
        return
    hook.remove()
    model.register_load_state_dict_post_hook(lambda *_: bump(model[0]))
    torchlift.load(model, path)
    assert torch.equal(model[0].bias, state["0.bias"] + 1)


def test_extra_state_that_writes_into_another_module_is_refused() -> None:
    """Nothing could take its write back; what it writes to its own module is kept."""

    class Stated(nn.Linear):
        def get_extra_state(self) -> object:
            return "here"

        def set_extra_state(self, state: Any) -> None:
            bump(model[1])

    model = nn.Sequential(Stated(2, 2), nn.Linear(2, 2))
    with pytest.raises(PlacementError, match=r"'1\.bias': loading code"):
        torchlift.load(model, {**model.state_dict(), "1.weight": torch.zeros(2, 2)})

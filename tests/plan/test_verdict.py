"""Code of the model that writes before the verdict, and after it: no trace of a plan or a failure.

Post-hooks run once, when the values are there, and may excuse names; then it is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_loads import look
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
def test_what_a_hook_writes_is_gone_after_a_plan_and_after_a_failed_load(
    tmp_path, how: str, when: str
) -> None:
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
    if when == "post":
        assert torchlift.plan(model, path).missing_keys == ["1.weight", "1.bias"]
    else:
        torchlift.plan(model, path, strict=False)
    assert everything(model) == before


def test_what_a_hook_writes_through_a_closure_to_another_module_is_taken_back(tmp_path) -> None:
    """Also to one that was loaded by then: its loaded value goes, too."""
    model = nn.Sequential(Rich(), nn.Linear(2, 2))
    model[1].register_load_state_dict_post_hook(lambda *_: bump(model[0]))
    before = everything(model)
    with pytest.raises(MismatchError, match=r"1\.weight"):
        torchlift.load(model, {"0.weight": torch.rand(2, 2), "0.bias": torch.rand(2)})
    assert everything(model) == before


def test_a_post_hook_runs_once_where_names_may_be_missing() -> None:
    """What it adds is added once, as in torch."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_load_state_dict_post_hook(bump)
    state = {"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)}
    torchlift.load(model, state, allow_missing=["1.*"])
    assert model[0].bias.tolist() == [1, 1]


def test_a_shared_module_with_a_post_hook_ends_as_in_torch() -> None:
    """Its hook runs for each name, and each name brings the values again."""
    ours, theirs = (nn.Sequential(*[nn.Linear(2, 2)] * 2) for _ in range(2))
    state = {key: torch.zeros_like(value) for key, value in ours.state_dict().items()}
    for model in (ours, theirs):
        model[0].register_load_state_dict_post_hook(bump)
    torchlift.load(ours, state)
    theirs.load_state_dict(state)
    assert ours[0].bias.tolist() == theirs[0].bias.tolist() == [1, 1]


def test_post_hooks_run_in_the_order_of_torch() -> None:
    """Children in their order, and each before its parent."""
    orders = []
    for load in (torchlift.load, nn.Module.load_state_dict):
        model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
        seen: list[str] = []
        for name, module in model.named_modules():
            module.register_load_state_dict_post_hook(lambda *_, n=name, s=seen: s.append(n))
        load(model, model.state_dict())
        orders.append(seen)
    assert orders[0] == orders[1] == ["0", "1.0", "1", "2", ""]


def test_a_plan_runs_no_post_hook_and_lists_the_names_that_one_may_excuse(tmp_path) -> None:
    """They are missing and unexpected, and the plan does not fail for them."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_load_state_dict_post_hook(lambda *_: pytest.fail("it ran"))
    path = saved({"0.weight": torch.ones(2, 2), "old": torch.ones(1)}, tmp_path)
    plan = torchlift.plan(model, path)
    assert (plan.missing_keys, plan.unexpected_keys) == (["0.bias"], ["old"])


def test_a_pre_hook_that_writes_to_what_torch_has_loaded_by_then_is_refused() -> None:
    """torch keeps what it writes; here the values come later, and would be put in its place."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_load_state_dict_pre_hook(lambda *_: bump(model[0]))
    before = look(model)
    with pytest.raises(PlacementError, match=r"'0\.bias': loading code of '1'.*post_hook"):
        torchlift.load(model, model.state_dict())
    assert look(model) == before


def test_a_graph_from_before_a_failed_load_goes_backward() -> None:
    """What was written and taken back counts as no write."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_load_state_dict_post_hook(bump)
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(MismatchError):
        torchlift.load(model, {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    loss.backward()
    assert model[1].weight.grad is not None


def test_a_hook_of_a_module_that_loads_itself_sees_and_changes_that_module() -> None:
    """A parameter of another size, which it makes, is the one that is loaded."""

    class Own(nn.Linear):
        def _load_from_state_dict(self, *rest: Any) -> None:
            super()._load_from_state_dict(*rest)

    def grow(module: Any, state: Any, prefix: str, *_: Any) -> None:
        module.weight = nn.Parameter(torch.zeros(state[prefix + "weight"].shape))

    model = nn.Sequential(Own(2, 2, bias=False))
    model[0].register_load_state_dict_pre_hook(grow)
    torchlift.load(model, {"0.weight": torch.ones(3, 2)})
    assert model[0].weight.tolist() == [[1, 1]] * 3


def test_a_module_hears_the_version_of_its_own_also_without_tensors_of_its_own(tmp_path) -> None:
    """The root, of which every tensor is in a child, has one, too."""
    seen = []
    model = nn.Sequential(nn.Linear(1, 1))
    model._version = 5
    model.register_load_state_dict_pre_hook(lambda m, s, p, metadata, *_: seen.append(metadata))
    torchlift.load(model, saved(model.state_dict(), tmp_path))
    assert [one["version"] for one in seen] == [5]

"""Running a constructor again: what is made is what construction makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from constructions import FACTORIES, Made
from same_model import all_tensors, assert_same_tensors
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from zoo import same

import torchlift

every_construction = pytest.mark.parametrize("name", list(FACTORIES))
# torch deprecates the old normalisations, but models are full of them.
old_ways = pytest.mark.filterwarnings(
    "ignore:.*(weight_norm|spectral_norm).*:FutureWarning",
    "ignore:Sparse invariant checks",  # of torch 2.11 also where they are asked for
)


def built(build: Callable[[Any], object]) -> Any:
    """A skeleton of a module whose constructor is `build`."""
    return torchlift.skeleton(Made, build)


@old_ways
@every_construction
def test_a_replay_with_a_seed_is_the_construction_with_that_seed(name: str) -> None:
    """All values, strides, kinds and ties are those of the constructor; random ones too."""
    factory = FACTORIES[name]
    torch.manual_seed(0)
    wanted = factory()
    torch.manual_seed(0)
    model = torchlift.skeleton(factory)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(0)
    torchlift.materialize(model)
    assert_same_tensors(model, wanted)


@old_ways
@every_construction
def test_every_tensor_replayed_alone_is_the_one_that_is_replayed_with_all(name: str) -> None:
    """The history of one tensor is complete: it needs nothing that was made for another."""
    factory = FACTORIES[name]
    torch.manual_seed(0)
    wanted = factory()
    torch.manual_seed(1)  # a seed of its own, or a few coins may fall alike by chance
    other = factory()
    model = torchlift.skeleton(factory)
    random = {
        key
        for (key, one), two in zip(
            all_tensors(wanted).items(), all_tensors(other).values(), strict=True
        )
        if not same(one, two)
    }
    for key in reversed(list(all_tensors(model))):
        torchlift.materialize(model, names=[key])
        tensor = all_tensors(model)[key]
        assert not tensor.is_meta
        assert tensor.stride() == all_tensors(wanted)[key].stride()
        if key not in random:
            assert same(tensor, all_tensors(wanted)[key]), key


@pytest.mark.parametrize("name", ["every_sampler", "orthogonal", "Transformer"])
def test_a_skeleton_leaves_the_random_state_alone(name: str) -> None:
    """Nothing is drawn for a skeleton, not even to answer a constructor's questions."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torchlift.skeleton(FACTORIES[name])
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_in_attributes_lists_and_dicts_are_made_too() -> None:
    """Nothing that a module holds stays on meta, and an alias of a parameter stays one."""
    factory = FACTORIES["plain_attributes"]
    torch.manual_seed(0)
    wanted: Any = factory()
    model: Any = torchlift.skeleton(factory)
    torch.manual_seed(0)
    torchlift.materialize(model)
    assert same(model.table, wanted.table)
    assert same(model.nested[0], wanted.nested[0])
    assert same(model.nested[1]["x"][0], wanted.nested[1]["x"][0])
    assert model.nested[1]["x"][1] == "text"
    assert same(model.derived, wanted.derived)
    assert model.alias is model.linear.weight


class Shares(nn.Module):
    """Takes over a weight and a layer of another model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.weight, self.base, self.new = base.weight, base, nn.Linear(2, 2)


BASE = nn.Linear(2, 2)


class SharesTheGlobal(Shares):
    """The same, of a model of its file."""

    def __init__(self) -> None:
        super().__init__(BASE)


WAYS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "argument": lambda base: (Shares, base),
    "closure": lambda base: (lambda: Shares(base),),
    "global": lambda _: (lambda: Shares(BASE),),
    "global of a class": lambda _: (SharesTheGlobal,),
    "partial": lambda base: (partial(Shares, base),),
    "method": lambda base: (MethodType(Shares, base),),
    "options": lambda base: (lambda given: Shares(given.base), SimpleNamespace(base=base)),
    "parameter": lambda base: (
        lambda weight: Shares(nn.ParameterDict({"weight": weight})), base.weight
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_the_caller_stay_as_they_are(way: str) -> None:
    """They are live, before and after. The factory runs once, so the new layer is real."""
    base = BASE if "global" in way else nn.Linear(2, 2)
    before = base.weight.detach().clone()
    model: Any = torchlift.skeleton(*WAYS[way](base))
    assert model.weight is model.base.weight is base.weight
    assert torch.equal(base.weight, before)
    assert torchlift.materialize(model) == []
    assert not model.new.weight.is_meta


def test_an_error_in_the_constructor_arrives_unchanged_and_leaves_torch_clean() -> None:
    """The very exception object comes out, and no mode is left."""
    raised = KeyError("mine")

    def build(m: Any) -> None:
        m.linear = nn.Linear(2, 2)
        raise raised

    with pytest.raises(KeyError) as caught:
        built(build)
    assert caught.value is raised
    assert _get_current_function_mode_stack() == []
    assert torch.ones(1).device.type == "cpu"

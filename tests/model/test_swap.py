"""Swapping is refused before anything changes, and the message says who is in the way."""

from __future__ import annotations

import weakref

import pytest
import torch
from small_models import Mixed, Tied, Two, saved, unchanged
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import torchlift
from torchlift import PlacementError, swap
from torchlift._model.holders import Hold


class Average:
    """Something that follows a parameter, as an average of weights does."""

    def __init__(self, followed):
        self.followed = followed


class Aliased(nn.Module):
    """A module with a buffer over the memory of another module's parameter."""

    def __init__(self, parameter):
        super().__init__()
        self.register_buffer("alias", parameter.detach())


def hundred() -> nn.ParameterList:
    """A module of 100 parameters."""
    return nn.ParameterList([nn.Parameter(torch.full((2,), float(i))) for i in range(100)])


WEAK, SHARED = "a weak reference to it exists", "another tensor shares its memory"
#: Who holds a parameter: how, the reason that is given, and the tensors that are listed.
HOLDERS = {
    "a weak reference": (lambda one: {"it": weakref.ref(one)}, WEAK, ()),
    "the value of a weak dict": (lambda one: weakref.WeakValueDictionary({"it": one}), WEAK, ()),
    "the key of torch's weak dict": (lambda one: WeakIdKeyDictionary({one: 1}), WEAK, ()),
    "a view that autograd knows": (
        lambda one: [one.view(2, 1)], "a view of it is alive",
        ("a view of shape [2, 1] made by ViewBackward0",),
    ),
    "a detached tensor": (lambda one: {"it": one.detach()}, SHARED, ("a tensor of shape [2]",)),
    "a buffer of another module": (Aliased, SHARED, ("a tensor of shape [2]",)),
    "the result of a forward pass": (
        lambda one: (one * 2).sum(),
        "its AccumulateGrad node is alive, in the graph of what was computed from it", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("hold", HOLDERS)
def test_one_held_parameter_among_a_hundred_leaves_all_of_them_as_they_were(tmp_path, hold):
    """The error names the key, the reason, a tensor that holds it and the way out."""
    model = hundred()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    path = saved({f"{i}": torch.full((2,), -1.0) for i in range(100)}, tmp_path)
    take, reason, holders = HOLDERS[hold]
    held = Average(take(model[77]))
    (blocker,) = swap.preflight(model)
    assert blocker == swap.Blocker("77", reason, holders)
    assert blocker.kinds == {Hold(reason)}
    with unchanged(model), pytest.raises(PlacementError) as caught:
        torchlift.load(model, path, mode="swap")
    assert str(caught.value) == (
        f"'77': cannot be swapped: {reason}. Nothing was changed"
        + "".join(f"; found held by {holder}" for holder in holders)
        + ". "
        'Release the holders, which swap.preflight lists. Or pass mode="auto", which copies in '
        "place where it must."
    )
    del held, caught
    assert swap.preflight(model) == []
    assert set(torchlift.load(model, path, mode="swap").mode.values()) == {"swap"}
    assert all(parameter.eq(-1).all() for parameter in model)
    assert optimizer.param_groups[0]["params"][77] is model[77]


def trained() -> nn.Module:
    """An optimizer, a list of parameters, a tie, a gradient and a finished backward pass."""
    model = Tied()
    model.__dict__["listed"] = list(model.parameters())
    model.__dict__["optimizer"] = torch.optim.Adam(model.listed)
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    model.optimizer.step()
    return model


def expanded(base: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("ids", base.expand(2, -1))
    return model


def held_by_garbage() -> nn.Module:
    """A cycle that nothing reaches any more."""
    model = Two()
    cycle = Average(weakref.ref(model.a))
    cycle.itself, cycle.view = cycle, model.b.view(-1)
    return model


@pytest.mark.parametrize(
    "make",
    [trained, lambda: torch.optim.swa_utils.AveragedModel(trained()), lambda: nn.LSTM(2, 3),
     lambda: expanded(torch.arange(4)), held_by_garbage],
)  # fmt: skip
def test_everyday_holders_are_not_in_the_way(make):
    """References of a recurrent layer to its own weights are released."""
    assert swap.preflight(make()) == []


def test_a_holder_beside_an_everyday_one_is_in_the_way():
    """Python shares one reference object; and somebody may have what a buffer was expanded from."""
    base, model = torch.arange(4), nn.LSTM(2, 3)
    (blocker,) = swap.preflight(expanded(base))
    assert blocker.reason == SHARED
    holder = Average(weakref.ref(model.weight_hh_l0))
    (blocker,) = swap.preflight(model)
    assert blocker.key == "weight_hh_l0"
    assert holder.followed() is model.weight_hh_l0


def test_a_preflight_changes_nothing():
    """Neither values nor gradients nor the number of references."""
    model = Mixed()
    model.scale.sum().backward()
    uses = [tensor._use_count() for tensor in model.parameters()]
    held = model.scale.view(-1)
    with unchanged(model):
        assert len(swap.preflight(model)) == 1
    del held
    assert [tensor._use_count() for tensor in model.parameters()] == uses


def test_only_what_the_checkpoint_provides_is_examined(tmp_path):
    """A tensor that stays as it is may be held by anybody."""
    model = Two()
    held = model.b.view(-1)
    path = saved({"a": torch.ones(2, 3)}, tmp_path)
    torchlift.load(model, path, mode="swap", allow_missing=["b"])
    assert model.a.eq(1).all()
    assert held.eq(0).all()

"""Swapping is refused before anything changes, and the message says who is in the way."""

from __future__ import annotations

import weakref

import pytest
import torch
from small_models import Mixed, Tied, Two, randomised, saved, state_of
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


class Slotted(nn.Parameter):
    """A parameter class that keeps an attribute in a slot."""

    __slots__ = ("rank",)


class Selfish(torch.Tensor):
    """A class that returns the tensor itself when it is loaded."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.module_load:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def thousand() -> nn.ParameterList:
    """A module of 1,000 parameters."""
    return nn.ParameterList([nn.Parameter(torch.full((2,), float(i))) for i in range(1000)])


def hold_weakly(model):
    """A weak reference at an attribute."""
    return Average({"it": weakref.ref(model[777])})


def hold_in_a_weak_dict(model):
    """The value of a dict of weak references."""
    values = weakref.WeakValueDictionary()
    values["it"] = model[777]
    return Average(values)


def hold_as_a_weak_key(model):
    """The key of torch's own dict of weak keys."""
    keys = WeakIdKeyDictionary()
    keys[model[777]] = 1
    return Average(keys)


def hold_a_view(model):
    """A view that autograd knows."""
    return Average([model[777].view(2, 1)])


def hold_detached(model):
    """Another tensor over the same memory, as `state_dict` gives."""
    return Average({"it": model[777].detach()})


def hold_in_a_buffer(model):
    """A buffer of another module."""
    return Aliased(model[777])


def hold_a_graph(model):
    """The result of a forward pass."""
    return Average((model[777] * 2).sum())


HOLDERS = {
    hold_weakly: ("a weak reference to it exists", ()),
    hold_in_a_weak_dict: ("a weak reference to it exists", ()),
    hold_as_a_weak_key: ("a weak reference to it exists", ()),
    hold_a_view: (
        "a view of it is alive",
        ("a view of shape [2, 1] made by ViewBackward0",),
    ),
    hold_detached: (
        "another tensor shares its memory",
        ("a tensor of shape [2]",),
    ),
    hold_in_a_buffer: (
        "another tensor shares its memory",
        ("a tensor of shape [2]",),
    ),
    hold_a_graph: (
        "its AccumulateGrad node is alive, in the graph of what was computed from it",
        (),
    ),
}


@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
def test_one_held_parameter_among_a_thousand_leaves_all_of_them_as_they_were(tmp_path, hold):
    """The error names the key, the reason, a tensor that holds it and the way out."""
    model = thousand()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    path = saved({f"{i}": torch.full((2,), -1.0) for i in range(1000)}, tmp_path)
    reason, holders = HOLDERS[hold]
    before = state_of(model)
    held = hold(model)
    (blocker,) = swap.preflight(model)
    assert blocker == swap.Blocker("777", reason, holders)
    assert blocker.kinds == {Hold(reason)}
    with pytest.raises(PlacementError) as caught:
        torchlift.load(model, path, mode="swap")
    assert str(caught.value) == (
        f"'777': cannot be swapped: {reason}. Nothing was changed"
        + "".join(f"; found held by {holder}" for holder in holders)
        + ". "
        'Release the holders, which swap.preflight lists. Or pass mode="auto", which copies in '
        "place where it must."
    )
    assert state_of(model) == before
    del held, caught
    assert swap.preflight(model) == []
    assert set(torchlift.load(model, path, mode="swap").mode.values()) == {"swap"}
    assert all(parameter.eq(-1).all() for parameter in model)
    assert optimizer.param_groups[0]["params"][777] is model[777]


def test_a_class_with_slots_is_named():
    """torch exchanges only objects whose classes have the same slots."""
    model = Two()
    model.a = Slotted(torch.zeros(2, 3))
    (blocker,) = swap.preflight(model)
    assert blocker.kinds == {Hold.CLASS}
    assert str(blocker) == "a: its class Slotted has slots that a plain tensor lacks: rank"


def test_a_class_that_returns_its_own_input_is_refused_with_a_way_out(tmp_path):
    """Exchanged with itself, a tensor would keep its old values without a word."""
    model = Two()
    model.b = nn.Parameter(torch.zeros(2, 3).as_subclass(Selfish))
    path = saved({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path)
    with pytest.raises(PlacementError, match="module_load of Selfish must return a new") as caught:
        torchlift.load(model, path, mode="swap")
    assert caught.value.entry == "b"
    assert not model.a.any()
    torchlift.load(model, path, mode="copy")
    assert model.b.eq(1).all()


def test_everyday_holders_are_not_in_the_way():
    """An optimizer, a list of parameters, a tie, a gradient and a finished backward pass."""
    model = Tied()
    listed = list(model.parameters())
    optimizer = torch.optim.Adam(listed)
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert swap.preflight(model) == []
    assert swap.preflight(averaged) == []


def test_a_recurrent_layers_references_to_its_own_weights_are_not_in_the_way():
    """Theirs are released; somebody else's is not, although Python shares the reference object."""
    model = nn.LSTM(2, 3)
    assert swap.preflight(model) == []
    holder = Average(weakref.ref(model.weight_hh_l0))
    (blocker,) = swap.preflight(model)
    assert blocker.key == "weight_hh_l0"
    assert holder.followed() is model.weight_hh_l0


def test_a_state_dict_keeps_what_it_was_taken_for(tmp_path):
    """It holds tensors over the same memory and is not in the way: its values are the old ones."""
    model = Mixed()
    state = model.state_dict()
    path = saved(randomised(model), tmp_path)
    assert swap.preflight(model) == []
    torchlift.load(model, path, mode="swap")
    assert state["scale"].eq(0.5).all()
    assert not model.scale.eq(0.5).any()
    state = model.state_dict()
    held = Average(state["scale"][:1])
    (blocker,) = swap.preflight(model)
    assert blocker.holders == ("a tensor of shape [1]",)
    assert held.followed.shape == (1,)


def test_an_expanded_buffer_is_not_held_by_what_it_was_expanded_from():
    """Unless somebody still has that."""
    model = nn.Module()
    model.register_buffer("ids", torch.arange(4).expand(2, -1))
    assert swap.preflight(model) == []
    base = torch.arange(4)
    model.register_buffer("ids", base.expand(2, -1))
    (blocker,) = swap.preflight(model)
    assert blocker.reason == "another tensor shares its memory"
    assert base.shape == (4,)


def test_what_only_garbage_holds_is_free():
    """A cycle that nothing reaches any more holds nobody back."""
    model = Two()
    cycle = Average(weakref.ref(model.a))
    cycle.itself, cycle.view = cycle, model.b.view(-1)
    del cycle
    assert swap.preflight(model) == []


def test_a_preflight_changes_nothing():
    """Neither values nor gradients nor the number of references."""
    model = Mixed()
    model.scale.sum().backward()
    before = state_of(model)
    uses = [tensor._use_count() for tensor in model.parameters()]
    held = model.scale.view(-1)
    assert len(swap.preflight(model)) == 1
    del held
    assert state_of(model) == before
    assert [tensor._use_count() for tensor in model.parameters()] == uses


def test_several_reasons_and_holders_come_together():
    """One entry per tensor says everything."""
    model = Two()
    held = (weakref.ref(model.a), weakref.WeakSet([model.a]), model.a.detach(), model.a.view(-1))
    (blocker,) = swap.preflight(model)
    assert blocker.key == "a"
    assert blocker.reason == (
        "a weak reference to it exists; a view of it is alive; another tensor shares its memory"
    )
    assert set(blocker.holders) == {
        "a view of shape [6] made by ViewBackward0",
        "a tensor of shape [2, 3]",
    }
    assert blocker.kinds == {Hold.WEAK_REFERENCE, Hold.VIEW, Hold.MEMORY}
    assert held


def test_an_error_lists_what_else_is_held(tmp_path):
    """Up to three more by name, and how many there are."""
    model = thousand()
    held = [parameter.detach() for parameter in model]
    path = saved(randomised(model), tmp_path)
    with pytest.raises(PlacementError) as caught:
        torchlift.plan(model, path, mode="swap")
    text = str(caught.value)
    assert text.startswith("'0': cannot be swapped, as 999 more of the module's tensors: another")
    assert "; 1: another tensor shares its memory" in text
    assert len(text) < 2000
    assert held


def test_only_what_the_checkpoint_provides_is_examined(tmp_path):
    """A tensor that stays as it is may be held by anybody."""
    model = Two()
    held = model.b.view(-1)
    path = saved({"a": torch.ones(2, 3)}, tmp_path)
    torchlift.load(model, path, mode="swap", allow_missing=["b"])
    assert model.a.eq(1).all()
    assert held.eq(0).all()

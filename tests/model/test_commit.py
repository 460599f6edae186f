"""`place`: one tensor into one slot, and everything back when something fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Mixed, Tied, Two, state_of
from torch import nn

from torchlift._model.commit import Commit, check_writable, repeats, successor_of
from torchlift._model.slots import Group, Slot, collect
from torchlift.errors import PlacementError


class Sentinel(Exception):
    """What a test raises to make a commit fail."""


def group_of(model: nn.Module, name: str) -> Group:
    """The group that contains a name."""
    return next(group for group in collect(model) if name in group.names)


def test_a_parameter_subclass_stays_one():
    """The class of a parameter is part of the model."""

    class Marked(nn.Parameter):
        pass

    made = successor_of(Marked(torch.zeros(2)), torch.ones(2))
    assert type(made) is Marked
    assert made.requires_grad


def test_integers_are_never_asked_for_a_gradient():
    """A successor without floating-point values does not require one."""
    made = successor_of(nn.Parameter(torch.zeros(2)), torch.ones(2, dtype=torch.int8))
    assert type(made) is nn.Parameter
    assert not made.requires_grad


@pytest.mark.parametrize("error", [Sentinel, KeyboardInterrupt, SystemExit])
def test_leaving_by_an_error_takes_everything_back(error):
    """Objects, memory, values, gradients and requires_grad are as they were."""
    model = Mixed()
    model.scale.sum().backward()
    tied = Tied()
    before, tied_before = state_of(model), state_of(tied)

    def fail(commit: Commit) -> None:
        commit.assign(group_of(model, "scale"), torch.ones(3))
        commit.swap(group_of(model, "inner.0.weight"), torch.ones(4, 3, dtype=torch.bfloat16))
        commit.swap(group_of(model, "scale"), torch.zeros(3))
        commit.assign(group_of(tied, "head.weight"), torch.ones(5, 3))
        commit.assign(group_of(model, "steps"), torch.tensor(9))
        commit.swap(group_of(model, "frequencies"), torch.ones(4))
        raise error

    with pytest.raises(error), Commit() as commit:
        fail(commit)
    assert state_of(model) == before
    assert state_of(tied) == tied_before
    assert tied.embed.weight is tied.head.weight


def test_recurrent_layers_keep_their_flat_weights_in_step():
    """A layer that lists its weights elsewhere lists the new ones, and after an error the old."""
    model = nn.LSTM(2, 3)
    old = model.weight_ih_l0
    with Commit() as commit:
        commit.assign(group_of(model, "weight_ih_l0"), torch.ones(12, 2))
    assert any(weight is model.weight_ih_l0 for weight in model._flat_weights)
    new = model.weight_ih_l0
    assert new is not old

    def fail() -> None:
        with Commit() as commit:
            commit.assign(group_of(model, "weight_ih_l0"), torch.zeros(12, 2))
            raise Sentinel

    with pytest.raises(Sentinel):
        fail()
    assert any(weight is new for weight in model._flat_weights)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 3).t(),
        torch.zeros(10)[::3],
        torch.zeros(1, 5).expand(1, 5),
        torch.zeros(0).expand(5, 0),
        torch.zeros(()),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "sliced", "single", "empty", "scalar", "channels"],
)
def test_views_without_repetition_may_be_written(value):
    """Strides alone are no reason to refuse."""
    check_writable(Group(value, (Slot("w", nn.Module(), "w", True),)))
    assert not repeats(value.shape, value.stride())


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=4))
def test_a_view_that_passes_has_no_two_elements_in_one_place(sizes):
    """The cheap test never misses an overlap."""
    shape, stride = [size for size, _ in sizes], [step for _, step in sizes]
    places = [
        sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    if not repeats(shape, stride):
        assert len(set(places)) == len(places)


class Stubborn(nn.Linear):
    """Extra state that can be set once."""

    def get_extra_state(self) -> object:
        return self.training

    def set_extra_state(self, state: object) -> None:
        if state is True:
            raise LookupError("not back")


def test_what_cannot_be_taken_back_is_named_and_the_rest_is_taken_back():
    """The error that ended the commit stays, with a note of what is in doubt."""
    model, other = Two(), Stubborn(1, 1)
    before = state_of(model)

    def fail() -> None:
        with Commit() as commit:
            commit.keep_values(model.a, "a")
            commit.when_undone(lambda: other.set_extra_state(True), "the extra state of Stubborn")
            with torch.no_grad():
                model.a.fill_(7)
            raise Sentinel

    with pytest.raises(Sentinel) as caught:
        fail()
    assert state_of(model) == before
    (note,) = caught.value.__notes__
    assert "in doubt: the extra state of Stubborn: LookupError: not back" in note


def test_an_undo_that_no_error_asked_for_says_what_is_in_doubt():
    """As a plan's does."""
    commit = Commit()
    other = Stubborn(1, 1)
    commit.when_undone(lambda: other.set_extra_state(True), "the extra state of Stubborn")
    with pytest.raises(PlacementError, match=r"not be put back as before: .*of Stubborn: LookupE"):
        commit.undo()


def test_a_meta_tensor_that_was_filled_is_on_meta_again_after_an_error():
    """The exchange of content is exchanged back."""
    model = Two().to("meta")
    before = state_of(model)

    def fail() -> None:
        with Commit() as commit:
            commit.swap(group_of(model, "a"), torch.ones(2, 3))
            assert not model.a.is_meta
            raise Sentinel

    with pytest.raises(Sentinel):
        fail()
    assert state_of(model) == before

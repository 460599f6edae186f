"""`place`: one tensor into one slot, and everything back when something fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Two, unchanged
from torch import nn

from torchlift._model.commit import Commit, repeats, successor_of
from torchlift.errors import PlacementError


class Sentinel(Exception):
    """What a test raises to make a commit fail."""


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

    def fail() -> None:
        with Commit() as commit:
            commit.keep_values(model.a, "a")
            commit.when_undone(lambda: other.set_extra_state(True), "the extra state of Stubborn")
            with torch.no_grad():
                model.a.fill_(7)
            raise Sentinel

    with unchanged(model), pytest.raises(Sentinel) as caught:
        fail()
    (note,) = caught.value.__notes__
    assert "in doubt: the extra state of Stubborn: LookupError: not back" in note


def test_an_undo_that_no_error_asked_for_says_what_is_in_doubt():
    """As a plan's does."""
    commit = Commit()
    other = Stubborn(1, 1)
    commit.when_undone(lambda: other.set_extra_state(True), "the extra state of Stubborn")
    with pytest.raises(PlacementError, match=r"not be put back as before: .*of Stubborn: LookupE"):
        commit.undo()

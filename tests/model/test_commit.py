"""`place`: one tensor into one slot, and everything back when something fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Two, unchanged
from torch import nn

from torchlift._model.commit import Commit, repeats


class Sentinel(Exception):
    """What a test raises to make a commit fail."""


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

"""Who raises what when ranks agree, without any rank."""

from __future__ import annotations

import pytest
import torch

from torchlift._model.ranks import RankGroup, portable, raise_first, tensors_of, world_of
from torchlift.distributed.options import StateDictMismatch
from torchlift.errors import CheckpointError, FormatError, MismatchError


def test_without_a_group_everybody_agrees() -> None:
    """One process is always of one mind; its errors pass through unchanged."""
    assert world_of() == (0, 1)
    model = torch.nn.Linear(2, 2)
    group = RankGroup.of_model(tensors_of(model), collective=True)
    with group.together() as agree:
        assert agree(True)
    with pytest.raises(FormatError, match=r"^bad$"), group.together():
        raise FormatError("bad")


def test_without_an_error_nothing_is_raised() -> None:
    """Nobody met anything."""
    raise_first({0: None, 1: None}, None)


def test_the_first_rank_s_error_is_everybody_s() -> None:
    """Same class, same attributes, the rank in its text; the original is not changed."""
    met = MismatchError("does not fit", file="f.pt", missing_keys=["a"])
    other = FormatError("cut")
    for own in (None, met):
        with pytest.raises(MismatchError) as caught:
            raise_first({0: None, 1: met, 2: other}, own)
        assert str(caught.value) == "f.pt: on rank 1 (and 1 other): does not fit"
        assert caught.value.missing_keys == ["a"]
        assert caught.value.__cause__ is own
    assert met.reason == "does not fit"


def test_what_all_met_is_left_to_each() -> None:
    """A wrong name of a file is the same everywhere, and needs no rank in its text."""
    met = FormatError("no such file")
    raise_first({0: met, 1: met}, met)


def test_a_mistake_of_the_program_stays_what_it_is() -> None:
    """On the rank that made it a TypeError is raised as such; others hear of it."""
    raise_first({0: None, 1: CheckpointError("TypeError: x")}, TypeError("x"))
    with pytest.raises(CheckpointError, match="on rank 1: TypeError: x"):
        raise_first({0: None, 1: CheckpointError("TypeError: x")}, None)


def test_others_get_an_error_that_the_caller_s_except_knows() -> None:
    """The state dict functions raise what is a RuntimeError too, whatever another rank met."""
    met = FormatError("cut", file="f.pt", hint="Fetch it again.")
    with pytest.raises(StateDictMismatch) as caught:
        raise_first({0: None, 3: met}, None, StateDictMismatch)
    assert str(caught.value) == "f.pt: on rank 3: cut. Fetch it again."
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.missing_keys == []


def test_a_group_of_one_raises_what_it_met() -> None:
    """There is nobody to tell, so nothing is wrapped."""
    assert RankGroup.of_all().run(lambda: ("made", 5)) == ("made", {0: 5})
    with pytest.raises(KeyError):
        RankGroup.of_model([], []).run(lambda: {}["x"])


def test_what_went_wrong_first_is_raised_when_the_others_are_lost() -> None:
    """A time-out says nothing of why; the argument that was wrong does."""

    def wrong() -> tuple[None, None]:
        raise TypeError("wrong")

    group = RankGroup(["no process group"])
    group._talking = ["no process group"]
    with pytest.raises(TypeError, match="wrong") as caught:
        group.run(wrong)
    assert caught.value.__cause__ is not None


def test_an_error_whose_own_text_fails_is_told_by_its_class() -> None:
    """Or the other ranks would wait for one that raised while it told them."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert portable(Wordless()).reason == "Wordless"

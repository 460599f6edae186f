"""What of a source is taken: `include`, `exclude`, and `rename` as a dict of names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import saved, unchanged
from torch import nn
from zoo import Stated

import torchlift
from torchlift import MismatchError, remap
from torchlift.cli import main


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 3)
        self.head = nn.Linear(3, 2)


def state() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 7) for key, value in Net().state_dict().items()}


def _several(folder: Path) -> list[Any]:
    first = {key: torch.zeros_like(value) for key, value in state().items()}
    return [first, saved(state(), folder), {"head.bias": state()["head.bias"]}]


GIVEN: dict[str, Callable[[Path], Any]] = {
    "path": lambda folder: saved(state(), folder),
    "memory": lambda _: state(),
    "several": _several,
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_left_out_keeps_its_live_value(given: str, wrapped: bool, tmp_path: Path) -> None:
    """From every kind of source, and no warning: who names it knows."""
    for words in ({"include": ["encoder.*"]}, {"exclude": ["head.weight", "head.b*"]}):
        model = Net()
        head = model.head.weight.detach().clone()
        target = torch.compile(model, backend="eager") if wrapped else model
        given_now = GIVEN[given](tmp_path)
        plan = torchlift.plan(target, given_now, **words)  # type: ignore[arg-type]
        report = torchlift.load(target, given_now, **words)  # type: ignore[arg-type]
        assert plan.missing_keys == report.missing_keys == ["head.weight", "head.bias"]
        assert list(report.loaded) == ["encoder.weight", "encoder.bias"]
        assert (report.unexpected_keys, report.replayed) == ([], [])
        assert torch.equal(model.head.weight, head)
        assert bool((model.encoder.weight == 7).all())


def test_on_meta_it_is_replayed_and_warned_of() -> None:
    """Unless it is allowed by name, too: nobody trains on with new numbers unawares."""
    with pytest.warns(UserWarning, match=r"2 parameters got no value.*head\.weight, head\.bias"):
        report = torchlift.load(torchlift.skeleton(Net), state(), exclude=["head.*"])
    assert report.replayed == ["head.weight", "head.bias"]
    model = torchlift.skeleton(Net)
    torchlift.load(model, state(), exclude=["head.*"], allow_missing=["head.*"])
    assert not model.head.weight.is_meta


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ({"exclude": ["encode.*"]}, MismatchError, r"no key fits the pattern 'encode\.\*'"),
        ({"exclude": ["*"]}, MismatchError, "the patterns leave out everything"),
        ({"include": "encoder.*"}, TypeError, r"include='encoder\.\*': expected patterns"),
    ],
)
def test_a_pattern_that_fits_nothing_is_an_error(given, words, error, says, tmp_path) -> None:
    """And so is a choice that leaves no tensor, before anything changes."""
    model = Net()
    for call in (torchlift.plan, torchlift.load):
        with unchanged(model), pytest.raises(error, match=says):
            call(model, GIVEN[given](tmp_path), **words)


def test_a_name_that_no_key_would_give_is_missing_as_ever() -> None:
    """Only what the whole source has can be left out."""
    part = {key: value for key, value in state().items() if key != "head.bias"}
    with pytest.raises(MismatchError) as caught:
        torchlift.load(Net(), part, include=["encoder.*"])
    assert caught.value.lists == ["missing (1): head.bias"]


def test_nothing_that_fits_is_an_error_although_all_is_left_out() -> None:
    """A load of nothing would report success."""
    source = {**state(), "other": torch.ones(1)}
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"nothing in the .* fits .*include=") as caught:
            torchlift.load(
                Net(), source, include=["other"], allow_unexpected=["other"], strict=strict
            )
        assert caught.value.lists[0].startswith("left out (4): encoder.weight")


def test_patterns_are_of_the_names_below_the_root_and_before_they_are_renamed() -> None:
    """As `convert` has them."""
    source = {"model": {f"module.{key}": value for key, value in state().items()}}
    model, strip = Net(), remap.strip("module.")
    report = torchlift.load(model, source, root="model", include=["module.encoder.*"], rename=strip)
    assert report.missing_keys == ["head.weight", "head.bias"]
    for words in ({"include": ["encoder.*"]}, {"include": ["model.module.encoder.*"]}):
        with pytest.raises(MismatchError, match="no key fits"):
            torchlift.load(model, source, root="model", rename=strip, **words)  # type: ignore[arg-type]


def test_an_extra_state_is_left_out_whole(tmp_path: Path) -> None:
    """A module never gets half of it."""
    extra = {"scale": torch.ones(1), "step": 3}
    for given in (saved(Stated(extra).state_dict(), tmp_path), Stated(extra).state_dict()):
        model = Stated()
        report = torchlift.load(model, given, exclude=["*.scale"])
        assert report.missing_keys == ["_extra_state"]
        assert model.extra is None
        torchlift.load(model, given)
        assert model.extra == extra


def test_names_may_be_renamed_by_a_dict(tmp_path: Path) -> None:
    """Those that it does not have stay; None drops; one that fits nothing is an error."""
    old = {"enc.w" if key == "encoder.weight" else key: v for key, v in state().items()}
    torch.save({**old, "step": 3}, tmp_path / "x.pt")
    for given in (tmp_path / "x.pt", {**old, "step": 3}):
        model = Net()
        names = {"enc.w": "encoder.weight", "step": None}
        assert torchlift.load(model, given, rename=names).renamed == {"enc.w": "encoder.weight"}
        assert torchlift.plan(model, given, rename=names).missing_keys == []
        assert bool((model.encoder.weight == 7).all())
        for call in (torchlift.plan, torchlift.load):
            with pytest.raises(MismatchError, match=r"'enc\.v'.*Did you mean 'enc\.w'"):
                call(model, given, rename={"enc.v": "encoder.weight"})
    out = tmp_path / "y.safetensors"
    torchlift.convert(tmp_path / "x.pt", out, rename={"enc.w": "encoder.weight"})
    assert sorted(torchlift.open(out)) == sorted(state())
    with pytest.raises(MismatchError, match="rename has a key that the checkpoint lacks"):
        torchlift.convert(tmp_path / "x.pt", out, rename={"nothing": "x"}, overwrite=True)


class Bracketed(nn.Module):
    """Modules whose names have brackets."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("blocks[0]", nn.Linear(1, 1))
        self.add_module("blocks[1]", nn.Linear(1, 1))


@pytest.mark.parametrize("pattern", ["blocks[0].*", "blocks[0].weight", "*[0].weight", "b*[0].w*t"])
def test_brackets_of_a_pattern_stand_for_themselves_in_every_argument(pattern, tmp_path):
    """Beside stars, too: in loads, in plans and in the command."""
    state, path = Bracketed().state_dict(), tmp_path / "m.pt"
    torch.save(state, path)
    fitting = {key for key in state if "[0]" in key and (".*" in pattern or "weight" in key)}
    rest = {key: value for key, value in state.items() if key not in fitting}
    report = torchlift.load(Bracketed(), path, include=[pattern])
    assert report.loaded.keys() == fitting
    report = torchlift.load(Bracketed(), path, exclude=[pattern])
    assert report.loaded.keys() == rest.keys()
    given = {**rest, **{f"x.{key}": state[key] for key in fitting}}
    report = torchlift.load(
        Bracketed(), given, allow_missing=[pattern], allow_unexpected=[f"x.{pattern}"]
    )
    assert {*report.missing_keys} == fitting
    assert {*report.unexpected_keys} == {f"x.{key}" for key in fitting}
    assert torchlift.plan(Bracketed(), path, include=[pattern]).loaded.keys() == fitting
    for option, keys in (("--include", fitting), ("--exclude", rest.keys())):
        done = main(
            ["convert", str(path), str(tmp_path / "new.pt"), option, pattern, "--overwrite"]
        )
        assert (done, torchlift.open(tmp_path / "new.pt").keys()) == (0, keys)


def test_all_that_a_key_would_be_split_into_may_be_missing(tmp_path: Path) -> None:
    """Not only the first name that it gives."""
    torch.save({"both": torch.ones(5, 3), "encoder.weight": torch.ones(3, 2)}, tmp_path / "x.pt")
    rename = remap.split("both", ["head.weight", "encoder.more"], chunk=0, sizes=[2, 3])
    model = Net()
    model.encoder.bias = None
    model.head.bias = None
    model.encoder.more = nn.Parameter(torch.zeros(3, 3))
    for given in (tmp_path / "x.pt", torch.load(tmp_path / "x.pt")):
        report = torchlift.load(model, given, rename=rename, exclude=["both"])
        assert sorted(report.missing_keys) == ["encoder.more", "head.weight"]
        assert torchlift.load(model, given, rename=rename).missing_keys == []

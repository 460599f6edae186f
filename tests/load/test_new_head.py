"""Another shape under ``ignore_mismatched`` and ``allow_missing``, and a new head."""

from __future__ import annotations

import ast
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift.errors import Argument, Hint, MismatchError


def net(classes: int = 3, width: int = 4) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(2, 2),
            body=nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)),
            head=nn.Linear(width, classes),
        )
    )


def follow(hint: str | None) -> dict[str, Any]:
    """Return the arguments that a hint names, with their values."""
    assert isinstance(hint, Hint)
    found = [one for one in hint.fragments if isinstance(one, Argument)]
    return {one.name: ast.literal_eval(one.value) for one in found}


@pytest.fixture(params=["file", "memory", "wrapped", "skeleton", "not strict"])
def load(request: Any, tmp_path: Path) -> Any:
    """Load a state with three classes into a model with five, through several doors."""

    def run(state: Any, model: nn.Module | None = None, **words: Any) -> Any:
        model, given = net(5) if model is None else model, state
        if request.param != "memory":
            given = tmp_path / "model.safetensors"
            torchlift.save(dict(state), given)
        if request.param == "wrapped":
            model = nn.DataParallel(model)
        if request.param == "skeleton" and model is not None:
            model = torchlift.skeleton(net, 5)
        if request.param == "not strict":
            words = {"strict": False, **words}
        torchlift.plan(model, given, **words)
        return torchlift.load(model, given, **words)

    return run


def test_a_tensor_that_is_skipped_must_be_allowed_by_name_if_one_is_named(load: Any) -> None:
    """A body of another width counted as missing, without an error."""
    state = net(3).state_dict()
    new = {"ignore_mismatched": True, "allow_missing": ["head.*"]}
    assert load(state, **new).missing_keys == ["head.weight", "head.bias"]
    other = {**state, "stem.weight": torch.ones(7, 2)}
    with pytest.raises(MismatchError) as caught:
        load(other, **new)
    assert caught.value.mismatched == {"stem.weight": ((2, 2), (7, 2))}
    new |= follow(caught.value.hint)
    assert new["allow_missing"] == ["head.*", "stem.weight"]
    assert load(other, **new).missing_keys == ["stem.weight", "head.weight", "head.bias"]
    assert load(other, ignore_mismatched=True).missing_keys == new_names(other)


def new_names(state: Any) -> list[str]:
    return [
        name for name, tensor in net(5).state_dict().items() if tensor.shape != state[name].shape
    ]


@pytest.mark.parametrize("more", [{}, {"ignore_mismatched": True}])
def test_a_pattern_of_names_that_nothing_has_is_an_error(load: Any, more: Any) -> None:
    """As in ``include`` and ``exclude``. A name that the checkpoint has may be listed."""
    state = net(5).state_dict()
    for right in ("head.*", "*", "body.1.num_batches_tracked", "stem._extra_state"):
        assert not load(state, allow_missing=[right], **more).missing_keys
    with pytest.raises(MismatchError) as caught:
        load(state, allow_missing=["head.*", "haed.*"], **more)
    assert caught.value.entry == "haed.*"
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("change", "patterns"),
    [
        ({}, ["head.*"]),
        ({"body.0.weight": torch.ones(9, 2)}, ["body.0.weight", "head.*"]),
        ({"stem.weight": torch.ones(9, 2), "stem.bias": torch.ones(9)}, ["stem.*", "head.*"]),
    ],
)
def test_the_way_out_for_a_new_head_names_it(load: Any, change: Any, patterns: Any) -> None:
    """Its patterns match what has another shape, and nothing else."""
    state = {**net(3).state_dict(), **change}
    with pytest.raises(MismatchError) as caught:
        load(state)
    words = follow(caught.value.hint)
    assert words == {"ignore_mismatched": True, "allow_missing": patterns}
    report = load(state, **words)
    assert report.missing_keys == new_names(state)
    assert {*report.loaded} == {*state} - {*new_names(state)}
    missing = {key: value for key, value in state.items() if key != "body.1.weight"}
    with pytest.raises(MismatchError):
        load(missing, **words, strict=True)


def test_the_way_out_has_the_names_of_the_model_and_the_caller_s_own_patterns() -> None:
    """A rename or a merge changes nothing about it."""
    state = {f"module.{key}": value for key, value in net(3).state_dict().items()}
    del state["module.stem.bias"]
    words: Any = {"rename": torchlift.remap.strip("module."), "allow_missing": ["stem.bias"]}
    with pytest.raises(MismatchError) as caught:
        torchlift.load(net(5), state, **words)
    words |= follow(caught.value.hint)
    assert words["allow_missing"] == ["stem.bias", "head.*"]
    report = torchlift.load(net(5), state, **words)
    assert report.missing_keys == ["stem.bias", "head.weight", "head.bias"]

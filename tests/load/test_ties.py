"""Ties: two names that are one tensor in the model, and aliases that only the file has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from small_models import saved, unchanged
from torch import nn

import torchlift

MODES = ("assign", "copy", "swap", "auto")
SOURCES = ("mmap", "read")

every_way = pytest.mark.parametrize(("mode", "source"), list(product(MODES, SOURCES)))


#: A head that is the embedding.
Tied = partial(zoo.Tied, 5, 4)


def target(factory: Callable[[], nn.Module], live: bool) -> Any:
    """A model to load into."""
    return factory() if live else torchlift.skeleton(factory)


@every_way
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_either_name_of_a_tie_is_enough(name: str, mode: Any, source: Any, tmp_path: Path) -> None:
    """A file that was saved without the duplicate loads, whichever of the two it kept."""
    weight = torch.randn(5, 4)
    path = saved({name: weight}, tmp_path)
    for live in (False, True):
        model = target(Tied, live)
        report = torchlift.load(model, path, mode=mode, source=source)
        assert (report.missing_keys, report.tied) == ([], (("embed.weight", "head.weight"),))
        assert set(report.loaded) == {"embed.weight", "head.weight"}
        assert model.embed.weight is model.head.weight
        assert torch.equal(model.embed.weight, weight)


@every_way
@pytest.mark.parametrize("live", [False, True], ids=["skeleton", "live"])
def test_names_of_a_tie_with_different_values_are_an_error_that_names_both(
    live, mode, source, tmp_path
):
    """Neither value is chosen silently, and the model has not changed."""
    state = {"embed.weight": torch.ones(5, 4), "head.weight": torch.zeros(5, 4)}
    path = saved(state, tmp_path)
    model = target(Tied, live)
    with unchanged(model), pytest.raises(torchlift.MismatchError) as caught:
        torchlift.load(model, path, mode=mode, source=source)
    text = str(caught.value)
    assert "'embed.weight': the model ties two keys that have different values" in text
    assert "expected the values of 'head.weight'" in text
    assert "rename=" in text


@pytest.mark.parametrize(
    ("door", "dtype", "change"),
    [
        ("memory", torch.float32, lambda values: values.view(torch.int32)),
        ("memory", torch.complex64, torch.conj),
        ("file", torch.complex64, torch.conj),
    ],
)
def test_the_same_bytes_are_not_the_same_values(door, dtype, change, tmp_path):
    """Of another dtype they are other numbers, and conjugated, too."""
    values, model = torch.randn(5, 4, dtype=dtype), Tied()
    model.embed.weight = model.head.weight = nn.Parameter(torch.zeros(5, 4, dtype=dtype))
    state = {"embed.weight": values, "head.weight": change(values)}
    with pytest.raises(torchlift.MismatchError, match="ties two keys that have different values"):
        torchlift.load(model, state if door == "memory" else saved(state, tmp_path))
    torchlift.load(model, {"embed.weight": values, "head.weight": values.view(5, 4)})


def test_equal_values_in_different_layouts_are_no_conflict(tmp_path: Path) -> None:
    """Two copies of one value agree, NaN and strides aside."""
    values = torch.arange(20.0).view(5, 4)
    values[0, 0] = torch.nan
    path = saved({"embed.weight": values, "head.weight": values.t().contiguous().t()}, tmp_path)
    model = torchlift.skeleton(Tied)
    torchlift.load(model, path)
    assert torch.equal(model.embed.weight[1:], values[1:])
    assert model.head.weight is model.embed.weight


def aliased() -> nn.ModuleDict:
    """Two parameters over one memory, as older models tie their heads."""
    made = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("one", "two")})
    made["two"].weight.data = made["one"].weight.data
    return made


@pytest.mark.parametrize(
    ("is_live", "words"), [(True, {}), (False, {}), (False, {"dtype": "float64"})]
)
def test_a_parameter_over_the_memory_of_another_needs_no_value_of_its_own(tmp_path, words, is_live):
    """It is missing, as in torch, but has the values of the other one."""
    path = saved({"one.weight": torch.full((3, 3), 2.0)}, tmp_path)
    model = target(aliased, is_live)
    report = torchlift.load(model, path, allow_missing=["two.weight"], **words)
    one, two = model["one"].weight, model["two"].weight
    assert report.missing_keys == ["two.weight"]
    assert report.replayed == []
    assert one is not two
    assert one.data_ptr() == two.data_ptr()
    assert two.eq(2).all()
    assert two.dtype == one.dtype


@every_way
def test_a_tie_made_after_the_skeleton_counts(mode: Any, source: Any, tmp_path: Path) -> None:
    """What is tied is read from the module at the time of the load."""
    model = torchlift.skeleton(zoo.Two, 4, 2)
    model.b = model.a
    torchlift.load(model, saved({"b": torch.ones(4, 2)}, tmp_path), mode=mode, source=source)
    assert model.b is model.a
    assert model.a.eq(1).all()


def test_missing_parameters_over_one_memory_are_constructed_as_one() -> None:
    """Both have the values of the constructor."""
    model = torchlift.skeleton(lambda: nn.Sequential(aliased(), nn.Linear(2, 2)))
    report = torchlift.load(model, nn.Linear(2, 2).state_dict(prefix="1."), allow_missing=["0.*"])
    assert report.replayed == ["0.one.weight", "0.two.weight"]
    one, two = model[0]["one"].weight, model[0]["two"].weight
    assert one is not two
    assert one.data_ptr() == two.data_ptr()
    assert one.abs().sum() > 0

"""Checkpoints of many small tensors: what each of them costs, counted in calls."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zoo import on_meta

import torchlift
from torchlift._plan.match import Match, check_names
from torchlift._plan.rules import Options
from torchlift.errors import MismatchError


def many(count: int) -> nn.Module:
    """Parameters on meta, by number."""
    return on_meta({str(number): torch.empty(2, 3) for number in range(count)})


def saved(count: int, folder: Path, suffix: str = "pt") -> Path:
    state = {str(number): torch.full((2, 3), float(number)) for number in range(count)}
    path = folder / f"{count}.{suffix}"
    (torch.save if suffix == "pt" else save_file)(state, path)
    return path


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Count the calls of functions of Python, and those of C by name."""
    found: Counter[str] = Counter()

    def note(_: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            found["python" if event == "call" else function.__name__] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def price(run: Callable[[int], Callable[[], object]]) -> dict[str, float]:
    """Return the calls that one tensor more takes."""
    few, many = calls_of(run(100)), calls_of(run(300))
    return {name: (many[name] - few[name]) / 200 for name in many}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_mapped_tensor_takes_few_calls(tmp_path: Path, suffix: str) -> None:
    """One map, one tensor over it, and a few calls of Python."""

    def run(count: int) -> Callable[[], object]:
        ckpt = torchlift.open(saved(count, tmp_path, suffix))
        assert len(list(ckpt.entries.values())) == count
        return ckpt.state_dict

    found = price(run)
    assert (found["frombuffer"], found.get("set_", 0)) == (1, 0)
    assert found["python"] < 16


def test_a_tensor_that_is_loaded_takes_a_sixth_of_the_calls_that_a_decision_on_it_would(tmp_path):
    """A plan decides once for all that are alike: 148 calls of Python for each before.

    What is only mapped is not asked either for what it would read, cast or copy.
    """

    def run(count: int) -> Callable[[], object]:
        ckpt, model = torchlift.open(saved(count, tmp_path)), many(count)
        return lambda: torchlift.load(model, ckpt)

    assert price(run)["python"] <= 28


def test_what_hangs_on_a_tensor_on_meta_stays_with_it(tmp_path: Path) -> None:
    """Attributes and hooks, also of one that is loaded in one step with the others."""
    model, seen = many(4), []
    parameters = dict(model.named_parameters())
    parameters["1"].note = "mine"
    parameters["2"].register_hook(lambda grad: seen.append(grad.shape))
    view = parameters["3"].view(-1)
    torchlift.load(model, saved(4, tmp_path))
    assert (model.get_parameter("1").note, parameters["1"].sum().item()) == ("mine", 6.0)
    model.get_parameter("2").sum().backward()
    assert seen == [(2, 3)]
    assert view.is_meta
    assert not model.get_parameter("3").is_meta


def test_a_load_that_fails_late_leaves_all_of_them_on_meta(tmp_path: Path) -> None:
    """With what hung on them, and as the same objects."""

    def refuse(module: nn.Module, keys: object) -> None:
        raise RuntimeError("late")

    model = torchlift.skeleton(lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    model[0].weight.note = "mine"
    path = tmp_path / "x.pt"
    torch.save({k: torch.ones(v.shape) for k, v in model.state_dict().items()}, path)
    before = list(model.parameters())
    hook = model.register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="late"):
        torchlift.load(model, path)
    after = list(model.parameters())
    assert all(one is two for one, two in zip(before, after, strict=True))
    assert all(tensor.is_meta and tensor.requires_grad for tensor in after)
    assert (type(after[0]), after[0].note) == (nn.Parameter, "mine")
    hook.remove()
    torchlift.load(model, path)
    assert model[0].weight.note == "mine"
    assert model(torch.ones(1, 2)).shape == (1, 3)
    assert torchlift.materialize(model) == []


def test_a_report_keeps_no_model(tmp_path: Path) -> None:
    """It can be copied. The model goes without a collection, because nothing is in a cycle."""
    model = many(3)
    report = torchlift.load(model, saved(3, tmp_path))
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert copy.deepcopy(report) == report
    assert [item.entry for item in report.loaded.values()] == ["0", "1", "2"]
    assert report.loaded["1"] is report.loaded["1"]
    assert (report.nbytes, set(report.source.values())) == (72, {"mmap"})


def test_names_that_do_not_fit_are_compared_a_bounded_number_of_times() -> None:
    """Where none of 100,000 names fitted, the error took 98 s: each was compared with each."""
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    matched = Match(
        missing=[Name(f"m.{number}") for number in range(1000)],
        unexpected=[Name(f"k.{number}") for number in range(1000)],
    )
    with pytest.raises(MismatchError, match="missing \\(1000\\)"):
        check_names(matched, Options())
    assert compared < 20_000

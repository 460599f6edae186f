"""Many small tensors that are loaded in one step: what hangs on them, and what fails late."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zoo import on_meta

import torchlift


def many(count: int) -> nn.Module:
    """Parameters on meta, by number."""
    return on_meta({str(number): torch.empty(2, 3) for number in range(count)})


def saved(count: int, folder: Path, suffix: str = "pt") -> Path:
    state = {str(number): torch.full((2, 3), float(number)) for number in range(count)}
    path = folder / f"{count}.{suffix}"
    (torch.save if suffix == "pt" else save_file)(state, path)
    return path


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

"""Which parameters `load_optimizer` loads: `include`, `exclude` and `allow_missing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import torchlift
from torchlift.errors import StateDictMismatch


def trained(lr: float, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zoo.two_layers(steps)
    groups = [{"params": [*model[0].parameters()], "lr": lr}, {"params": [*model[1].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=lr / 2)
    zoo.step(model, optimizer, steps)
    return model, optimizer


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(optimizer.state[p]["step"]) for p in model.parameters()]


def test_what_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    """State and hyperparameters, from a file with numbers, one with names, and from memory."""
    model, optimizer = trained(0.1, 3)
    torch.save(optimizer.state_dict(), tmp_path / "numbers.pt")
    named = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
    torch.save(named, tmp_path / "names.pt")
    choices: list[dict[str, Any]] = [{"include": ["0.*"]}, {"exclude": ["1.*"]}]
    for given in (tmp_path / "numbers.pt", tmp_path / "names.pt", named):
        for words in choices:
            live, other = trained(0.7, 1)
            report = torchlift.load_optimizer(live, other, given, **words)
            assert report.loaded == ["0.weight", "0.bias"]
            assert report.missing_keys == ["1.weight", "1.bias"]
            assert steps_of(live, other) == [3, 3, 1, 1]
            assert [group["lr"] for group in other.param_groups] == [0.1, 0.35]


def test_patterns_that_fit_nothing_and_states_that_are_missing_are_errors(tmp_path: Path) -> None:
    """Before anything changes; what may be missing is allowed by name."""
    model, optimizer = trained(0.1, 3)
    whole = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
    live, other = trained(0.7, 1)
    torch.save(whole, tmp_path / "whole.pt")
    with pytest.raises(StateDictMismatch, match=r"whole\.pt: no key fits the pattern '2\.\*'"):
        torchlift.load_optimizer(live, other, tmp_path / "whole.pt", include=["2.*"])
    with pytest.raises(TypeError, match=r"exclude='1\.\*': expected patterns"):
        torchlift.load_optimizer(live, other, whole, exclude="1.*")
    part = {
        "state": {name: whole["state"][name] for name in ("0.weight", "0.bias")},
        "param_groups": whole["param_groups"][:1],
    }
    with pytest.raises(StateDictMismatch, match=r"1\.weight"):
        torchlift.load_optimizer(live, other, part)
    with pytest.raises(StateDictMismatch) as caught:
        torchlift.load_optimizer(live, other, part, allow_missing=["1.weight"])
    assert caught.value.missing_keys == ["1.bias"]
    assert steps_of(live, other) == [1, 1, 1, 1]
    report = torchlift.load_optimizer(live, other, part, allow_missing=["1.*"])
    assert report.missing_keys == ["1.weight", "1.bias"]
    assert steps_of(live, other) == [3, 3, 1, 1]


def test_nothing_that_matches_is_an_error(tmp_path: Path) -> None:
    """However much may be missing, as in `load`; the optimizer is as before."""
    model, optimizer = trained(0.1, 3)
    saved = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
    groups = [{**g, "params": [f"x.{name}" for name in g["params"]]} for g in saved["param_groups"]]
    renamed = {"state": {f"x.{n}": s for n, s in saved["state"].items()}, "param_groups": groups}
    torch.save(renamed, tmp_path / "other.pt")
    live, other = trained(0.7, 1)
    choices: list[dict[str, Any]] = [{"strict": False}, {"allow_missing": ["*"]}]
    for given in (renamed, tmp_path / "other.pt"):
        for words in choices:
            with pytest.raises(StateDictMismatch, match=r"nothing .* matches.*found x\.0\.weight"):
                torchlift.load_optimizer(live, other, given, **words)
    assert steps_of(live, other) == [1, 1, 1, 1]


def test_a_list_with_an_optimizer_that_never_stepped_is_found(tmp_path: Path) -> None:
    """Lightning's: SGD without momentum has groups alone, in a list without any tensor."""
    model = nn.Linear(2, 1)
    state = {"optimizer_states": [torch.optim.SGD(model.parameters(), lr=0.3).state_dict()]}
    torch.save(state, tmp_path / "last.ckpt")
    for given in (state, tmp_path / "last.ckpt"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torchlift.load_optimizer(model, optimizer, given)
        assert optimizer.param_groups[0]["lr"] == 0.3

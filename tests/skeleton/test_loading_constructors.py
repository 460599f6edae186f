"""Constructors that load weights of their own, as LPIPS, resemblyzer and timm do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift


def into_a_child(net: nn.Module, path: Path) -> None:
    net.load_state_dict(torch.load(path, map_location="cpu"), strict=False)


def mapped_and_assigned(net: nn.Module, path: Path) -> None:
    net.load_state_dict(torch.load(path, mmap=True), assign=True)


def as_parameters(net: nn.Module, path: Path) -> None:
    state = torch.load(path)
    net.weight = nn.Parameter(state["weight"] * 2, requires_grad=False)
    net.bias.data = state["bias"]
    net.scale = float(state["weight"].mean())


class Loads(nn.Module):
    """Random weights, then loaded ones, then what is computed of both."""

    def __init__(self, way: Callable[[nn.Module, Path], None], path: Path) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.net = nn.Linear(3, 2)
        way(self.net, path)
        self.register_buffer("mean", self.net.weight.detach().mean(0) + self.before.bias.detach())
        self.after = nn.Linear(2, 2)


WAYS = [into_a_child, mapped_and_assigned, as_parameters]


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def path(request: Any, tmp_path: Path) -> Path:
    torch.manual_seed(5)
    state, zipped = nn.Linear(3, 2).state_dict(), request.param
    torch.save(state, tmp_path / "net.pth", _use_new_zipfile_serialization=zipped)
    return tmp_path / "net.pth"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_constructor_may_load(way: Any, default: str, path: Path, capsys: Any) -> None:
    """All of it is on meta and replays to the same values, or takes those of a checkpoint."""
    if way is mapped_and_assigned and path.read_bytes()[:2] != b"PK":
        pytest.skip("torch maps zip files only")
    torch.manual_seed(1)
    expected = Loads(way, path)
    torch.manual_seed(1)
    with torch.device(default):
        model = torchlift.skeleton(Loads, way, path)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert torch.equal(torch.load(path)["weight"], torch.load(path)["weight"])
    torch.manual_seed(1)
    torchlift.materialize(model)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert getattr(model.net, "scale", None) == getattr(expected.net, "scale", None)
    other = torchlift.skeleton(Loads, way, path)
    torchlift.load(other, {name: tensor + 1 for name, tensor in expected.state_dict().items()})
    assert torch.equal(other.net.weight, expected.net.weight + 1)

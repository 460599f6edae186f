"""Versions of modules, by which their loading code knows older values, travel with the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift


class Counting(nn.Module):
    """A module that takes a count without its version for one of an older release."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(5))
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}count"] = torch.tensor(99)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _count(source: Any, model: nn.Module | None = None, root: str | None = None) -> int:
    model = Counting() if model is None else model
    torchlift.load(model, source, root=root)
    return int(next(m for m in model.modules() if isinstance(m, Counting)).count)


@pytest.mark.parametrize("nested", [False, True])
def test_versions_go_where_the_names_of_their_modules_go(tmp_path: Path, nested: bool) -> None:
    """Below a prefix that a rename replaces, in flat files and in training files."""
    state: Any = nn.ModuleDict({"old": Counting(), "norm": nn.BatchNorm1d(2)}).state_dict()
    torch.save({"net": state, "epoch": 1} if nested else state, tmp_path / "old.pt")
    old, new = ("net.old", "net.inner.new") if nested else ("old", "inner.new")

    def rename(key: str) -> str:
        return key.replace(f"{old}.", f"{new}.")

    torchlift.convert(tmp_path / "old.pt", tmp_path / "new.pt", rename=rename)
    inner = nn.ModuleDict({"new": Counting()})
    model = nn.ModuleDict({"inner": inner, "norm": nn.BatchNorm1d(2)})
    root = "net" if nested else None
    assert _count(tmp_path / "new.pt", model, root) == 5
    found = torchlift.open(tmp_path / "new.pt", root=root)._index.module_versions
    assert found["inner.new"] == found["norm"] == {"version": 2}
    assert "old" not in found


def test_the_state_dict_of_a_checkpoint_has_the_versions_as_torchs_has(tmp_path: Path) -> None:
    """So that it can be saved again, and loaded by torch, also with assign=True."""
    torch.save(Counting().state_dict(), tmp_path / "a.pt")
    with torchlift.open(tmp_path / "a.pt") as ckpt:
        state: Any = ckpt.state_dict()
        assert state._metadata == Counting().state_dict()._metadata  # type: ignore[attr-defined]
        model = Counting()
        model.load_state_dict(state, assign=True)
        assert model.count == 5
        torchlift.save(state, tmp_path / "b.pt")
        assert ckpt._index.module_versions == {"": {"version": 2}}
    assert _count(tmp_path / "b.pt") == 5


@pytest.mark.parametrize("format", ["safetensors", "sharded", "dcp"])
def test_what_has_no_place_for_versions_says_so(tmp_path: Path, format: str) -> None:
    """Of a save and of a conversion; a torch file loses nothing."""
    told = "versions of modules, by which they know older values: a has 2"
    model = nn.ModuleDict({"a": Counting(), "b": nn.Linear(2, 2)})
    assert torchlift.save(model, tmp_path / "x", format=format).lost == {"(versions)": told}
    assert torchlift.save(model, tmp_path / "x.pt").lost == {}
    report = torchlift.convert(tmp_path / "x.pt", tmp_path / "y", format=format)
    assert report.lost == {"(versions)": told}


class Stateful(Counting):
    """With state of its own in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = [1, torch.ones(1), {"a": 2}]

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = [*state, "set"]


def sources_of(path: Path) -> dict[str, Any]:
    """One state dict through every door of a conversion."""
    state = torch.load(path)
    return {"file": path, "checkpoint": torchlift.open(path), "memory": state,
            "files": [path, {"module.extra": torch.ones(1)}], "list": [state]}  # fmt: skip


@pytest.mark.parametrize("door", ["file", "checkpoint", "memory", "files", "list"])
@pytest.mark.parametrize("renamed", [False, True])
def test_versions_and_lists_of_state_come_through_every_door(
    door: str, renamed: bool, tmp_path: Path
) -> None:
    """Also where every name changes, as of a model that was saved inside of a wrapper."""
    torch.save(nn.ModuleDict({"module": Stateful()}).state_dict(), tmp_path / "old.pt")
    given = sources_of(tmp_path / "old.pt")[door]
    rename = torchlift.remap.strip("module.") if renamed else None
    report = torchlift.convert(given, tmp_path / "new.pt", rename=rename)
    assert report.lost == {}
    found = torch.load(tmp_path / "new.pt")
    assert found._metadata["" if renamed else "module"] == {"version": 2}
    model = Stateful()
    torchlift.load(model, tmp_path / "new.pt", root=None if renamed else "module",
                   allow_unexpected=["extra"])  # fmt: skip
    assert (model.count, model.state) == (5, [1, torch.ones(1), {"a": 2}, "set"])

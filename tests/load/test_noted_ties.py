"""Ties that safetensors.torch.save_model notes in the metadata of a file (keras-hub#3075)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from range_server import serving
from safetensors.torch import save_file, save_model
from torch import nn

import torchlift


class Tied(nn.Module):
    """An embedding, and a head of the same weight."""

    def __init__(self, tied: bool = True, size: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(size, size)
        self.body = nn.Linear(size, size)
        self.head = nn.Linear(size, size, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def untied() -> Tied:
    return Tied(tied=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tied model as safetensors saves it: one of the two names is in the metadata alone."""
    torch.manual_seed(0)
    save_model(Tied(), str(tmp_path / "model.safetensors"), {"format": "pt", "note": "body.weight"})
    assert "head.weight" not in torchlift.open(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def assert_filled(model: Any, path: Path, prefix: str = "") -> None:
    wanted = torchlift.open(path)["emb.weight"]
    assert torch.equal(model.emb.weight, wanted)
    assert torch.equal(model.head.weight, wanted)
    assert model.emb.weight is not model.head.weight
    assert model.emb.weight.data_ptr() != model.head.weight.data_ptr()


DOORS = {
    "path": lambda path: path,
    "checkpoint": torchlift.open,
    "layers": lambda path: [{"body.weight": torch.zeros(3, 3)}, path],
}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("mode", ["auto", "copy", "assign"])
@pytest.mark.parametrize("source", ["mmap", "read"])
@pytest.mark.parametrize("door", DOORS)
def test_a_noted_tie_fills_both_parameters_of_an_untied_model(door, source, mode, live, saved):
    """Each gets memory of its own; the file has the keys that safetensors gives it."""
    if mode == "copy" and not live:
        mode = "auto"
    model = untied() if live else torchlift.skeleton(untied)
    planned = torchlift.plan(model, DOORS[door](saved), mode=mode, source=source)
    report = torchlift.load(model, DOORS[door](saved), mode=mode, source=source)
    assert_filled(model, saved)
    for found in (planned, report):
        assert found.loaded["head.weight"].entry == "emb.weight"
        assert not {*found.missing_keys, *found.unexpected_keys}
    with torch.no_grad():
        model.head.weight.zero_()
    assert model.emb.weight.any()
    with torchlift.open(saved) as ckpt:
        assert set(ckpt) == {"emb.weight", "body.weight", "body.bias"}
        assert ckpt.metadata == {"format": "pt", "note": "body.weight", "head.weight": "emb.weight"}


def test_a_tied_model_stays_tied(saved: Path) -> None:
    """One tensor, loaded once."""
    model = torchlift.skeleton(Tied)
    report = torchlift.load(model, saved)
    assert model.head.weight is model.emb.weight
    assert report.loaded["head.weight"] is report.loaded["emb.weight"]


def test_a_noted_tie_is_found_behind_a_url_and_in_a_set(saved: Path, tmp_path: Path) -> None:
    """In shards, whose headers have the note each, and where names have a prefix."""
    state = dict(torchlift.open(saved))
    notes = {"format": "pt", "head.weight": "emb.weight"}
    folder = tmp_path / "set"
    folder.mkdir()
    names = {
        "body.weight": "a.safetensors",
        "body.bias": "a.safetensors",
        "emb.weight": "b.safetensors",
    }
    for file in ("a.safetensors", "b.safetensors"):
        save_file({k: state[k] for k in names if names[k] == file}, folder / file, notes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with serving(tmp_path) as server:
        for ckpt in (folder, server.url("model.safetensors")):
            model = torchlift.skeleton(untied)
            torchlift.load(model, ckpt)
            assert_filled(model, saved)
    save_file(
        {f"model.{key}": value for key, value in state.items()}, tmp_path / "prefixed.safetensors",
        {"model.head.weight": "model.emb.weight"},
    )  # fmt: skip
    strip = torchlift.remap.strip("model.")
    for options in ({"root": "model"}, {"rename": strip}, {"rename": lambda key: key[6:]}):
        model = untied()
        torchlift.load(model, tmp_path / "prefixed.safetensors", **options)
        assert_filled(model, saved)


def test_patterns_and_renames_leave_a_noted_name_out(saved: Path) -> None:
    """As if it were a key: `exclude`, and a rename that drops it."""
    for options in (
        {"exclude": ["head.*"]},
        {"include": ["emb.*", "body.*"]},
        {"rename": lambda key: None if key == "head.weight" else key, "allow_missing": ["head.*"]},
    ):
        model = untied()
        before = model.head.weight.clone()
        report = torchlift.load(model, saved, **options)
        assert torch.equal(model.head.weight, before)
        assert report.missing_keys == ["head.weight"]


def test_a_conversion_keeps_the_keys_and_the_note(saved: Path, tmp_path: Path) -> None:
    """What the new file gives a model is what the old one gives it."""
    torchlift.convert(saved, tmp_path / "new.safetensors")
    model = untied()
    torchlift.load(model, tmp_path / "new.safetensors")
    assert_filled(model, saved)
    assert torchlift.diff(saved, tmp_path / "new.safetensors").equal

"""What a load leaves mapped, and says so: its file may be overwritten while the model lives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import Two, saved
from torch import nn

import torchlift
from torchlift.distributed import get_optimizer_state_dict, set_optimizer_state_dict

LINE = 'these bytes are the file\'s; never overwrite it in place, or load with source="read"'


def overwrite(path: Path) -> None:
    """Write over every byte in place; what is mapped sees it, and would die of a truncation."""
    with path.open("r+b") as file:
        file.write(b"\x01" * path.stat().st_size)


def mapped_line(result: object) -> str:
    return next((line.strip() for line in str(result).splitlines() if "mapped:" in line), "")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(64, 64), "b": torch.randn(64, 64)}


@pytest.mark.parametrize("mode", ["auto", "assign", "copy", "swap"])
@pytest.mark.parametrize("kind", ["plain", "untouched by a transform", "one tensor", "lazy"])
def test_live_model_keeps_its_values_when_the_file_is_overwritten(tmp_path, state, mode, kind):
    """In every mode: what had memory of its own is not tied to a file without being asked for."""
    model = Two(64, 64)
    if kind == "one tensor":  # the two look into one run of the file, as in the model
        both = torch.randn(2, 64, 64)
        state = {"a": both[0], "b": both[1]}
        memory = torch.zeros(2, 64, 64)
        model.a, model.b = nn.Parameter(memory[0]), nn.Parameter(memory[1])
    if kind == "lazy":
        model.a = nn.UninitializedParameter()
    options = {"transform": lambda _, tensor: tensor} if "transform" in kind else {}
    path = saved(state, tmp_path)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    try:
        report = torchlift.load(model, path, mode=mode, **options)
    except torchlift.PlacementError:
        assert (kind, mode) == ("one tensor", "swap")  # each is in the way of the other
        return
    overwrite(path)
    assert all(torch.equal(getattr(model, name), value) for name, value in expected.items())
    assert mapped_line(report) == ""
    assert not any(item.is_mapped for item in report.loaded.values())


def test_live_model_is_mapped_where_that_is_asked_for(tmp_path, state):
    """By the argument, or by a rule that leaves a tensor on disk."""
    path = saved(state, tmp_path)
    for options, count in (
        ({"source": "mmap", "mode": "assign"}, "2 tensors, 32.0 KiB"),
        ({"device": lambda entry: "disk" if entry.key == "a" else None}, "1 tensor, 16.0 KiB"),
    ):
        report = torchlift.load(Two(64, 64), path, **options)
        assert mapped_line(report) == f"mapped: {count}: {LINE}"


def test_skeleton_stays_mapped_and_the_report_says_whose_bytes_they_are(tmp_path, state):
    """In one line, of the plan and of the report; a cast tensor is no longer the file's."""
    path = saved(state, tmp_path)
    rule = lambda entry: torch.float64 if entry.key == "b" else None  # noqa: E731
    for options, count in (({}, "2 tensors, 32.0 KiB"), ({"dtype": rule}, "1 tensor, 16.0 KiB")):
        for function in (torchlift.plan, torchlift.load):
            result = function(torchlift.skeleton(Two, 64, 64), path, **options)
            assert mapped_line(result) == f"mapped: {count}: {LINE}"
    read = torchlift.load(torchlift.skeleton(Two, 64, 64), path, source="read")
    assert mapped_line(read) == ""


def test_optimizer_keeps_its_state_when_the_file_is_overwritten(tmp_path: Path) -> None:
    """Setting a state copies what it is given, also what is mapped."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    path = saved(state, tmp_path)
    fresh = torch.optim.Adam(model.parameters())
    for target in (optimizer, fresh):  # copied in place; and into what is new
        set_optimizer_state_dict(model, target, torch.load(path, mmap=True))
    expected = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    overwrite(path)
    for target in (optimizer, fresh):
        for name, value in expected.items():
            assert torch.equal(target.state[model.weight][name], value)


class Codebook(nn.Module):
    """Takes a tensor as extra state, and another one in loading code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.extra = {"table": [torch.zeros(4)]}
        self.seen = torch.zeros(4)

    def get_extra_state(self) -> object:
        """What is saved besides the weight."""
        return self.extra

    def set_extra_state(self, state: object) -> None:
        """Keep what is given."""
        self.extra = state

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.seen = state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_live_module_that_keeps_what_it_is_loaded_from_keeps_no_map(tmp_path: Path) -> None:
    """Extra state, and what an override puts into an attribute."""
    saved_one, model = Codebook(), Codebook()
    with torch.no_grad():
        saved_one.weight.fill_(3)
    saved_one.extra = {"table": [torch.full((4,), 5.0)]}
    path = saved(saved_one.state_dict(), tmp_path)
    torchlift.load(model, path)
    overwrite(path)
    found = [model.weight.tolist(), model.extra["table"][0].tolist(), model.seen.tolist()]
    assert found == [[3.0] * 4, [5.0] * 4, [3.0] * 4]

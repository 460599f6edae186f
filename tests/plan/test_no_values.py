"""Weights of shape [0], as a ZeRO-3 model has them that was saved as it is: they have no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import saved
from torch import nn
from zero_files import Zero

import torchlift
from torchlift import MismatchError
from torchlift.distributed import (
    StateDictOptions,
    set_model_state_dict,
)

#: What leads nowhere, and what is the way out.
WRONG = ("another configuration", "ignore_mismatched", "strict=False", "allow_missing")
RIGHT = ("zero_to_fp32.py", "stage3_gather_16bit_weights_on_model_save")


class Model(nn.Module):
    """Parameters, of which DeepSpeed keeps the small ones whole, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 3)])
        self.norm = nn.BatchNorm1d(3)


def partitioned(keep: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The state of a model whose parameters are empty, but for some."""
    return {
        name: value.clone() if keep(name) else torch.empty(0, dtype=value.dtype)
        for name, value in Model().state_dict().items()
    }


STATES: dict[str, Callable[[str], bool]] = {
    "all": lambda name: False,
    "but buffers": lambda name: "running" in name or "num" in name,
    "but small ones": lambda name: "bias" in name or "norm" in name,
    "one": lambda name: name != "layers.1.weight",
}


#: A way to pass a state.
SOURCES: dict[str, Callable[[dict[str, torch.Tensor], Path], Any]] = {
    "a torch file": saved,
    "a file of a wrapped model": lambda state, folder: saved(
        {f"module.{key}": value for key, value in state.items()}, folder
    ),
    "memory": lambda state, folder: state,
    "dcp": lambda state, folder: written(state, folder, "dcp"),
    "sharded": lambda state, folder: written(state, folder, "sharded"),
}


def written(state: dict[str, torch.Tensor], folder: Path, format: str) -> Path:
    torchlift.save(state, folder / format, format=format)
    return folder / format


def refuse(call: Callable[[], object]) -> MismatchError:
    """Return the error that says that there are no values, and how to get them."""
    with pytest.raises(MismatchError) as caught:
        call()
    for word in RIGHT:
        assert word in str(caught.value)
    for word in WRONG:
        assert word not in str(caught.value)
    assert "[0]" in str(caught.value)
    assert caught.value.mismatched["layers.1.weight"] == ((3, 7), (0,))
    return caught.value


@pytest.mark.parametrize("kept", STATES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_door_says_that_there_are_no_values(kept: str, source: str, tmp_path: Path) -> None:
    """And nothing of the model changes."""
    state, model = partitioned(STATES[kept]), Model()
    given = SOURCES[source](state, tmp_path)
    how = {"rename": torchlift.remap.strip("module.")} if "wrapped" in source else {}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for other in ({}, {"strict": False}, {"allow_missing": ["*"]}, {"dtype": "bfloat16"}):
        refuse(lambda other=other: torchlift.load(model, given, **how, **other))
        refuse(lambda other=other: torchlift.plan(model, given, **how, **other))
    refuse(lambda: torchlift.load(torchlift.skeleton(Model), given, **how))
    refuse(lambda: set_model_state_dict(model, state))
    refuse(lambda: set_model_state_dict(model, state, options=StateDictOptions(strict=False)))
    assert torchlift.diff(before, model.state_dict()).equal


def test_the_way_out_loads_the_values(tmp_path: Path) -> None:
    """DeepSpeed's folder; what its script makes of it; and a model that was saved gathered."""
    torch.manual_seed(0)
    trained = Model()
    groups = [{name: value.detach() for name, value in trained.named_parameters()}]
    zero = Zero(3, 2, groups, buffers=dict(trained.named_buffers()))
    folder = zero.write(tmp_path / "deepspeed")
    part = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    refuse(lambda: torchlift.load(Model(), part, root="module"))
    gathered = tmp_path / "pytorch_model.bin"
    torch.save(trained.state_dict(), gathered)
    for way in (folder, gathered):
        model = Model()
        torchlift.load(model, way)
        for name, value in trained.named_parameters():
            assert torch.equal(model.get_parameter(name), value), name


class Empty(nn.Module):
    """A parameter and a buffer that have no values, and one that has."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(rows))
        self.register_buffer("also", torch.empty(rows, 4))
        self.some = nn.Parameter(torch.full((2,), float(rows)))


def test_a_parameter_of_shape_0_loads_and_other_sizes_are_called_that(tmp_path: Path) -> None:
    """The model has no values there either. A file that has some is another model's."""
    torch.save(Empty().state_dict(), tmp_path / "x.pt")
    model = Empty()
    assert {*torchlift.load(model, tmp_path / "x.pt").loaded} == {"none", "also", "some"}
    set_model_state_dict(model, Empty().state_dict())
    torch.save(Empty(3).state_dict(), tmp_path / "3.pt")
    with pytest.raises(MismatchError) as caught:
        torchlift.load(model, tmp_path / "3.pt")
    assert not any(word in str(caught.value) for word in RIGHT)
    skipped = torchlift.load(model, tmp_path / "3.pt", ignore_mismatched=True)
    assert {*skipped.mismatched} == {"none", "also"}

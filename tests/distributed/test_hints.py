"""Hints of the state dict functions and of the Keeper: each is followed, and works."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from state_models import trained
from torch import nn

import torchlift
import torchlift.distributed as ours


class FourBit(nn.Linear):
    """Writes names that it does not read, as a 4-bit layer of bitsandbytes does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(2)


def test_names_that_a_layer_writes_and_does_not_read_have_a_way_in() -> None:
    """By the function's own option."""
    model = nn.Sequential(FourBit(2, 2))
    state = ours.get_model_state_dict(model)
    with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight\.absmax'.*Pass strict=False"):
        ours.set_model_state_dict(model, state)
    lenient = ours.StateDictOptions(strict=False)
    found = ours.set_model_state_dict(model, state, options=lenient)
    assert found.unexpected_keys == ["0.weight.absmax"]


def test_a_dict_of_optimizers_has_its_values_passed() -> None:
    """It is not taken for one optimizer."""
    model, optimizer = trained()
    optimizers: Any = {"adam": optimizer}
    calls: list[Any] = [
        lambda: ours.get_optimizer_state_dict(model, optimizers),
        lambda: ours.set_optimizer_state_dict(model, optimizers, {}),
        lambda: ours.get_state_dict(model, optimizers),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"not dict: pass its values\(\)"):
            call()
    assert ours.get_optimizer_state_dict(model, optimizers.values())["state"]


@pytest.mark.parametrize(
    ("generator", "expression"),
    [
        (numpy.random.default_rng(1), "generator.bit_generator.state"),
        (numpy.random.RandomState(1), "generator.get_state(legacy=False)"),
        (torch.Generator(), "generator.get_state()"),
        (random.Random(1), "generator.getstate()"),
    ],
    ids=["numpy", "numpy before 1.17", "torch", "random"],
)
def test_a_generator_is_saved_by_its_state(generator: Any, expression: str, tmp_path: Path) -> None:
    """The hint was to make a tensor of it, or to remove it."""
    with pytest.raises(torchlift.PlacementError, match="cannot be stored") as caught:
        torchlift.save({"generator": generator}, tmp_path / "run.pt")
    assert caught.value.hint == f"Save its state, which is plain data: {expression}."
    state = eval(expression, {"generator": generator})
    torchlift.save({"generator": state}, tmp_path / "run.pt")
    found = torchlift.open(tmp_path / "run.pt").tree()["generator"]
    assert type(found) is type(state)

"""Loads inside inference mode, and of models that were made there."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from small_models import saved
from torch import nn

import torchlift
from torchlift.errors import PlacementError

MODES = ("assign", "copy", "swap", "auto")


class Hooked(nn.Linear):
    """Has loading code of its own, of both kinds."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(lambda *_: None)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize(("mode", "source"), list(product(MODES, ("mmap", "read"))))
@pytest.mark.parametrize("factory", [nn.Linear, Hooked])
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_a_model_loaded_in_inference_mode_can_be_trained(tmp_path, factory, mode, source, live):
    """Tensors of inference mode get no gradients, and nothing says so."""
    path = saved(nn.Linear(4, 3).state_dict(), tmp_path)
    model = factory(4, 3) if live else torchlift.skeleton(factory, 4, 3)
    dtype = None if mode == "copy" and live else torch.float64
    with torch.inference_mode():
        torchlift.load(model, path, mode=mode, source=source, dtype=dtype)
    assert not model.weight.is_inference()
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize(
    ("built", "made"), [(torch.inference_mode, torch.no_grad), (nullcontext, torch.inference_mode)]
)
def test_what_is_made_in_any_mode_can_be_trained(built, made):
    """Also without a file: parameters require their gradients."""
    with built():
        model = torchlift.skeleton(nn.Linear, 4, 3)
    with made():
        torchlift.materialize(model)
    assert not model.weight.is_inference()
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_inference_mode_is_changed_there_only(tmp_path, mode):
    """Outside, torch refuses half-way; assigning works, since the tensors are new."""
    path = saved(nn.Linear(4, 3).state_dict(), tmp_path)
    with torch.inference_mode():
        model = nn.Linear(4, 3)
        before = [tensor.clone() for tensor in model.parameters()]
    if mode == "assign":
        torchlift.load(model, path, mode=mode)
    else:
        with pytest.raises(PlacementError, match=r"'weight': .* because it was made in inference"):
            torchlift.load(model, path, mode=mode)
        assert all(map(torch.equal, model.parameters(), before))
        with torch.inference_mode():
            torchlift.load(model, path, mode=mode)
    assert torch.equal(model.weight, torchlift.open(path)["weight"])

"""Forty real architectures: a loaded skeleton is the model that normal construction makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, floating_outputs
from same_model import assert_same_tensors, scrambled
from torch import nn
from zoo import same

import torchlift

pytestmark = pytest.mark.slow

every_family = pytest.mark.parametrize("family", list(FAMILIES))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order: what is compared is the weights, not the scheduling of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(family: str) -> nn.Module:
    """The model as normal construction makes it, with a seed."""
    cls, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    return cls(config)


def skeleton(family: str) -> nn.Module:
    """The same model without storage."""
    cls, config, _ = FAMILIES[family]
    return torchlift.skeleton(cls, config)


def inputs_for(family: str) -> dict[str, torch.Tensor]:
    """The same inputs at every call."""
    torch.manual_seed(1)
    return FAMILIES[family][2]()


def forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Every floating-point output of a forward pass, with the random choices of one seed."""
    torch.manual_seed(2)
    np.random.seed(2)  # models drop whole layers by this generator
    outputs = list(floating_outputs(model(**inputs)))
    assert outputs
    return outputs


def train(model: nn.Module, optimizer: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """One step of training; the loss."""
    model.train()
    loss = sum(output.square().mean() for output in forward(model, inputs) if output.requires_grad)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    optimizer.step()
    return loss.detach()


def optimizer_over(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose step depends on every bit of the gradients and the weights."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@every_family
def test_a_loaded_skeleton_computes_and_trains_like_the_original(family, tmp_path):
    """Outputs, loss, gradients and the step of an optimizer that was built before the load."""
    wanted = scrambled(reference(family))
    torch.save(wanted.state_dict(), tmp_path / "model.pt")
    model = skeleton(family)
    optimizer = optimizer_over(model)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    report = torchlift.load(model, tmp_path / "model.pt", source="mmap")

    assert set(report.mode.values()) == {"swap"}
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert_same_tensors(model, wanted)
    inputs = inputs_for(family)
    with torch.no_grad():
        pairs = zip(forward(model.eval(), inputs), forward(wanted.eval(), inputs), strict=True)
        assert all(same(found, expected) for found, expected in pairs)
    expected_loss = train(wanted, optimizer_over(wanted), inputs)
    assert same(train(model, optimizer, inputs), expected_loss)
    assert_same_tensors(model, wanted)


@every_family
def test_materialize_with_a_seed_is_normal_construction_with_that_seed(family: str) -> None:
    """Nothing but the constructor is needed to get the very same random weights."""
    wanted = reference(family)
    model = skeleton(family)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(0)
    torchlift.materialize(model)
    assert_same_tensors(model, wanted)

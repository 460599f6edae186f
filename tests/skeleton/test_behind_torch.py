"""Constructors that read and write memory behind torch's back, and that ask for random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from constructions import Made
from same_model import all_tensors
from torch import nn
from zoo import same

import torchlift
from torchlift.errors import PlacementError

Build = Callable[[Any], object]
of_quantised = pytest.mark.filterwarnings(
    "ignore:.*quantized tensor creation functions:UserWarning",
    "ignore:.*torch.ao.quantization is deprecated:DeprecationWarning",
)


def zeros(m: Any) -> torch.Tensor:
    """A parameter that random numbers lie around."""
    m.before = nn.Linear(2, 2)
    m.w = nn.Parameter(torch.zeros(3, 4))
    return m.w.data


def drawn(m: Any) -> torch.Tensor:
    """The same, of random numbers."""
    m.before = nn.Linear(2, 2)
    m.w = nn.Parameter(torch.randn(3, 4))
    return m.w.data


# -- writes -----------------------------------------------------------------------------------


def through_numpy(m: Any) -> None:
    zeros(m).numpy()[:] = 7


# -- questions about random numbers -----------------------------------------------------------


def an_integer(m: Any) -> None:
    drawn(m)
    m.count = int(torch.randint(2, 1000, (1,)))
    m.after = nn.Linear(m.count, 2)


def several_of_them(m: Any) -> None:
    drawn(m)
    m.rates = [torch.rand(1).item(), *torch.rand(2).tolist()]
    m.order = torch.randperm(5).tolist()
    m.middle = nn.Linear(2, 2)
    weight = m.middle.weight.detach()
    m.sums = [float(weight.sum()), float(m.w.data.sum()), float(weight.sum())]
    m.after = nn.Linear(2, 2)


def a_mask(m: Any) -> None:
    m.register_buffer("positive", drawn(m)[drawn(m) > 0])
    m.after = nn.Linear(2, 2)


BUILDS = [through_numpy, several_of_them, a_mask]


def plain_values(module: nn.Module) -> dict[str, Any]:
    """What a module remembers beside tensors and modules."""
    found = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return {k: v for k, v in found.items() if isinstance(v, (int, float, list, np.ndarray))}


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_each_skeleton_has_the_values_of_the_built_model(build: Build) -> None:
    """To the bit, with the same seed; what the constructor saw, too. No random number is taken."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    models = [torchlift.skeleton(Made, build) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    wanted = Made(build)
    for model in models:
        assert all(parameter.is_meta for parameter in model.parameters())
        torch.manual_seed(0)
        torchlift.materialize(model)
        assert same(all_tensors(model), all_tensors(wanted))
        np.testing.assert_equal(plain_values(model), plain_values(wanted))


# -- seeds, shapes and quantised layers --------------------------------------------------------


def seeded() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("names", [None, "1"])
def test_a_factory_that_seeds_torch_has_its_values(names: str | None) -> None:
    """All of them if all are made; a part of them is drawn from the seed."""
    model = torchlift.skeleton(seeded)
    made = torchlift.materialize(model, names=names)
    again = torchlift.skeleton(seeded)
    assert torchlift.materialize(again, names=names) == made
    for name in made:
        assert torch.equal(model.get_parameter(name), again.get_parameter(name))
        if names is None:
            assert torch.equal(model.get_parameter(name), seeded().get_parameter(name))


def test_a_size_that_is_drawn_after_a_parameter_is_an_error_by_shape() -> None:
    """A skeleton draws no numbers for its parameters, so that the next ones differ."""
    model: Any = torchlift.skeleton(Made, an_integer)
    with pytest.raises(PlacementError, match="another model when it ran again") as caught:
        torchlift.materialize(model)
    assert caught.value.entry == "after.weight"
    state = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
    torchlift.load(model, state)
    assert model.after.weight.shape == (2, model.count)


def quantised_dynamically() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 3)), {nn.Linear}, dtype=torch.qint8
    )


def quantised_by_tensor() -> nn.Module:
    made = nn.Linear(2, 2)
    made.register_buffer("q", torch.quantize_per_tensor(made.weight.detach(), 0.1, 2, torch.quint8))
    return made


@of_quantised
@pytest.mark.parametrize("factory", [quantised_dynamically, quantised_by_tensor])
def test_a_constructor_may_quantise(factory: Any) -> None:
    """The skeleton has the quantised tensors of the built model."""
    torch.manual_seed(0)
    wanted = factory()
    torch.manual_seed(0)
    model = torchlift.skeleton(factory)
    torch.manual_seed(0)
    torchlift.materialize(model)
    for name, tensor in all_tensors(wanted).items():
        assert torch.equal(all_tensors(model)[name], tensor), name

"""Modules that take the shape of the file, have none yet, or keep their weights packed."""

from __future__ import annotations

import pytest
import torch
from small_models import saved
from torch import nn
from zoo import same

import torchlift
from torchlift.errors import PlacementError


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_the_state_of_a_lazy_module_without_a_shape_is_refused_by_name() -> None:
    """There are no values in it."""
    with pytest.raises(PlacementError, match=r"'weight'.*does not have a shape"):
        torchlift.load(nn.Linear(3, 4), nn.LazyLinear(4).state_dict())


# ---- the report of weights that a module keeps packed


def dynamic() -> nn.Module:
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})


def embedding() -> nn.Module:
    return nn.Sequential(torch.ao.nn.quantized.Embedding(4, 16))


def convolution() -> nn.Module:
    return nn.Sequential(torch.ao.nn.quantized.Conv2d(2, 3, 3), nn.BatchNorm2d(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("make", [dynamic, embedding, convolution])
def test_the_report_counts_the_tensors_that_modules_keep_packed(make, memory, tmp_path) -> None:
    """A plan and a load count every tensor of the checkpoint; their texts do, too."""
    wanted = make()
    path = saved(wanted.state_dict(), tmp_path)
    given = wanted.state_dict() if memory else path
    entries = torchlift.open(path).entries
    model = make()
    planned, report = torchlift.plan(model, given), torchlift.load(model, given)
    assert same(model, wanted)
    for verb, found in ("plan: ", planned), ("loaded ", report):
        assert {item.entry for item in found.loaded.values()} == entries.keys()
        assert found.nbytes > 0
        assert str(found).startswith(f"{verb}{len(entries)} tensor")
        assert not {*found.missing_keys, *found.unexpected_keys}
    assert planned.to_dict()["loaded"] == len(entries)

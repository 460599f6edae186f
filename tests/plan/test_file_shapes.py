"""Modules that take the shape of the file, have none yet, or keep their weights packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import saved
from torch import nn

import torchlift
from torchlift.errors import PlacementError


class Bank(nn.Module):
    """A memory bank that becomes as large as the one that is loaded."""

    def __init__(self, size: int = 0, how: str = "assign") -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(size, 2))
        self.how = how

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        shape = state[prefix + "bank"].shape
        if self.how == "assign":
            self.bank = torch.zeros(shape)
        else:
            self.bank.resize_(shape)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("how", ["assign", "resize"])
@pytest.mark.parametrize("mode", ["auto", "copy", "swap", "assign"])
@pytest.mark.parametrize("memory", [True, False])
def test_a_buffer_that_takes_the_shape_of_the_file_is_loaded(tmp_path, how, mode, memory) -> None:
    """As in load_state_dict; it is the model's own, and a plan leaves the old one."""
    wanted = torch.rand(5, 2)
    given = {"bank": wanted.clone()} if memory else saved({"bank": wanted}, tmp_path)
    model = Bank(how=how)
    torchlift.plan(model, given, mode=mode)
    assert model.bank.shape == (0, 2)
    torchlift.load(model, given, mode=mode)
    assert torch.equal(model.bank, wanted)
    if memory:
        model.bank.zero_()
        assert torch.equal(given["bank"], wanted)


def test_a_failed_load_gives_the_old_size_back() -> None:
    """With the same tensor."""
    model = nn.Sequential(Bank(), nn.Linear(1, 1))
    bank = model[0].bank
    with pytest.raises(torchlift.MismatchError, match="missing"):
        torchlift.load(model, {"0.bank": torch.ones(5, 2)})
    assert model[0].bank is bank
    assert bank.shape == (0, 2)


def test_observers_of_torch_ao_are_loaded() -> None:
    """They resize what they have seen."""
    wanted = torch.ao.quantization.PerChannelMinMaxObserver()
    wanted(torch.randn(4, 3))
    made = torch.ao.quantization.PerChannelMinMaxObserver()
    torchlift.load(made, wanted.state_dict())
    assert torch.equal(made.min_val, wanted.min_val)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_int8_modules_of_torch_ao_load_from_memory_and_from_a_file(tmp_path, kind) -> None:
    """Their loading code asks for a tuple of packed weights, and for a dtype."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no int8 kernels here")

    def make() -> nn.Module:
        if kind is nn.Embedding:
            return nn.Sequential(torch.ao.nn.quantized.Embedding(4, 16))
        plain = nn.Sequential(nn.ReLU(), nn.Linear(3, 4))
        return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})

    wanted = make()
    inputs = torch.tensor([0, 3]) if kind is nn.Embedding else torch.ones(2, 3)
    path = saved(wanted.state_dict(), tmp_path)
    for source in wanted.state_dict(), path, [path], [path, wanted.state_dict()]:
        made = make()
        torchlift.load(made, source)
        assert torch.equal(made(inputs), wanted(inputs))


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
    for verb, found in ("plan: ", planned), ("loaded ", report):
        assert {item.entry for item in found.loaded.values()} == entries.keys()
        assert found.nbytes > 0
        assert str(found).startswith(f"{verb}{len(entries)} tensor")
        assert not {*found.missing_keys, *found.unexpected_keys}
    assert planned.to_dict()["loaded"] == len(entries)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_weights_count_as_something_that_fits(tmp_path) -> None:
    """Also if the rest of the model is missing."""
    plain = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(1, 1, 1))
    model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    given = model.state_dict()
    del given["1.weight"], given["1.bias"]
    report = torchlift.load(model, given, strict=False, allow_missing=["1*"])
    assert len(report.loaded) == 4

"""A load of quantised weights: their scales are taken, applied by the caller, or the load fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import F8, scaling, write_fp8
from small_models import unchanged
from torch import nn

import torchlift
from torchlift import MismatchError, PlacementError


def fp8(path: Path) -> torch.Tensor:
    """Write a quantised layer with a bias."""
    return write_fp8(path, "0", **{"0.bias": torch.rand(300)})


def plain(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(200, 300, dtype=dtype))


class Scaled(nn.Module):
    """A layer that applies the scales itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(300, 200, dtype=F8), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(3, 2))
        self.bias = nn.Parameter(torch.empty(300, dtype=torch.bfloat16))


WAYS: dict[str, dict[str, Any]] = {
    "strict": {},
    "allowed": {"allow_unexpected": ["*_scale_inv"]},
    "not strict": {"strict": False},
    "left out": {"exclude": ["*_scale_inv"]},
    "dropped": {"rename": {"0.weight_scale_inv": None}},
    "dtype": {"dtype": "float32", "strict": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("call", [torchlift.load, torchlift.plan])
def test_codes_never_become_values_of_a_plain_model(tmp_path, way, is_live, call):
    """Whatever the caller allows. The error never advises to allow the scales."""
    path = tmp_path / "model.safetensors"
    fp8(path)
    model = plain() if is_live else torchlift.skeleton(plain)
    with unchanged(model), pytest.raises(MismatchError) as error:
        call(model, path, **WAYS[way])
    assert "allow_unexpected" not in str(error.value.hint)
    assert "exclude=['*weight_scale_inv']" in str(error.value.hint)
    assert any("0.weight with 0.weight_scale_inv" in line for line in error.value.lists)


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("memory", [True, False])
def test_the_way_out_loads_the_values(tmp_path: Path, is_live: bool, memory: bool) -> None:
    """A transform that applies the scales, and a pattern that leaves them out."""
    path = tmp_path / "model.safetensors"
    values = fp8(path)
    with torchlift.open(path) as ckpt:
        given: Any = ckpt.state_dict() if memory else ckpt
        model = plain() if is_live else torchlift.skeleton(plain)
        torchlift.load(
            model, given, transform=scaling(ckpt), exclude=["*weight_scale_inv"], dtype="bfloat16"
        )
    assert torch.equal(model[0].weight, values.bfloat16())


def test_a_transform_that_leaves_the_codes_is_refused(tmp_path: Path) -> None:
    """It would put codes into the model, with or without a cast."""
    path = tmp_path / "model.safetensors"
    fp8(path)
    for model in (plain(), torchlift.skeleton(plain)):
        with pytest.raises(PlacementError) as error:
            torchlift.load(model, path, transform=lambda _, t: t, exclude=["*_scale_inv"])
        assert error.value.entry == "0.weight"


@pytest.mark.parametrize("dtype", [None, "bfloat16", lambda _: "bfloat16", "model"])
def test_a_model_with_the_scales_gets_both(tmp_path: Path, dtype: Any) -> None:
    """Codes are not cast, and the scales keep their dtype, which the report says."""
    path = tmp_path / "model.safetensors"
    fp8(path)
    model = torchlift.skeleton(lambda: nn.Sequential(Scaled()))
    if dtype in (None, "model"):
        torchlift.load(model, path, dtype=dtype)
    else:
        with pytest.raises(PlacementError) as error:
            torchlift.load(model, path, dtype=dtype)
        assert error.value.entry == "0.weight"
        rule = lambda entry: None if entry.dtype == "float8_e4m3fn" else "bfloat16"  # noqa: E731
        report = torchlift.load(model, path, dtype=rule)
        assert report.loaded["0.weight_scale_inv"].note
        assert model[0].bias.dtype == torch.bfloat16
    state = torchlift.open(path).state_dict()
    assert torch.equal(model[0].weight.view(torch.uint8), state["0.weight"].view(torch.uint8))
    assert model[0].weight_scale_inv.dtype == torch.float32


GPTQ = {
    "0.qweight": torch.ones(25, 300, dtype=torch.int32),
    "0.qzeros": torch.ones(2, 38, dtype=torch.int32),
    "0.scales": torch.ones(2, 300, dtype=torch.float16),
    "0.g_idx": torch.ones(200, dtype=torch.int32), "0.bias": torch.ones(300),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"allow_unexpected": ["*"]}])
def test_other_quantised_weights_are_named(options: dict[str, Any]) -> None:
    """A plain model takes none of them. The error says so, and what they are."""
    with pytest.raises(MismatchError) as error:
        torchlift.load(plain(), GPTQ, **options)
    assert any(line.startswith("quantised (1)") for line in error.value.lists)
    assert "allow_unexpected" not in str(error.value.hint)


def test_names_that_only_need_a_rename_still_get_that_hint(tmp_path: Path) -> None:
    """A quantised model and its own file, saved from inside of a wrapper."""
    path = tmp_path / "model.safetensors"
    fp8(path)
    state = {f"module.{key}": value for key, value in torchlift.open(path).state_dict().items()}
    model = torchlift.skeleton(lambda: nn.Sequential(Scaled()))
    with pytest.raises(MismatchError) as error:
        torchlift.load(model, state)
    assert "remap.strip('module.')" in str(error.value.hint)

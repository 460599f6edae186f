"""Casts that overflow: counted in the report, and refused with ``check="finite"``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift import IntegrityError

INF = float("inf")


def large(path: Path) -> dict[str, torch.Tensor]:
    """Write small and large tensors. Three finite values are too large for float16."""
    w = torch.zeros(1500, 2000)
    w[0, 0], w[1499, 1999], w[1, 1], w[2, 2] = 1e5, -1e5, INF, float("nan")
    state = {"w": w, "small": torch.tensor([70000.0, 65519.0, -INF]), "fits": torch.ones(5)}
    state["empty"] = torch.ones(0, 3)
    torch.save(state, path)
    return state


DOORS = ["file", "memory", "transform", "transposed", "safetensors"]


@pytest.mark.parametrize("door", DOORS)
def test_a_conversion_counts_values_that_overflow(tmp_path: Path, door: str) -> None:
    """Infinite values and NaN of the source do not count. The values are those of torch."""
    src, dst = tmp_path / "m.pt", tmp_path / "new.pt"
    state = large(src)
    if door == "transposed":
        state["w"] = state["w"].t()
        torch.save(state, src)
    if door == "safetensors":
        src = tmp_path / "m.safetensors"
        torchlift.save(state, src)
    transform = (lambda _, tensor: tensor) if door == "transform" else None
    given: Any = state if door == "memory" else src
    report = torchlift.convert(given, dst, dtype="float16", transform=transform)
    assert report.overflowed == {"w": 2, "small": 1}
    assert "overflowed" in str(report)
    made = torch.load(dst)
    for key, value in state.items():
        assert torch.equal(made[key].nan_to_num(7), value.half().nan_to_num(7)), key
    assert not torchlift.convert(src, tmp_path / "same.pt").overflowed


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_block_of_a_device_does_not_change_what_is_counted(tmp_path: Path, device: str) -> None:
    """People construct a model in such a block, and load in it."""
    src = tmp_path / "m.pt"
    torch.save({"weight": torch.full((3, 4), 1e5), "bias": torch.ones(3)}, src)
    with torch.device(device):
        model = nn.Linear(4, 3)
        report = torchlift.load(model, src, dtype="float16", device="cpu")
    assert report.overflowed == {"weight": 12}
    assert model.weight.isinf().all()
    assert model.bias.dtype == torch.float16


@pytest.mark.parametrize(
    ("stored", "becomes", "value"),
    [
        ("float32", "bfloat16", torch.finfo(torch.float32).min), ("float64", "float32", 1e300),
        ("bfloat16", "float16", 1e38), ("float32", "float8_e4m3fn", 1000.0),
        ("float16", "float8_e5m2", 60000.0 + 5000), ("float8_e5m2", "float8_e4m3fn", 1024.0),
    ],
)  # fmt: skip
def test_each_narrower_dtype_counts(
    tmp_path: Path, stored: str, becomes: str, value: float
) -> None:
    """Also if the dtype has no infinity: torch then takes its largest value."""
    w = torch.tensor([1.0, value], dtype=torch.float64).to(getattr(torch, stored))
    path, make = tmp_path / "m.pt", partial(torchlift.skeleton, nn.Linear, 2, 1, bias=False)
    torch.save({"weight": w[None]}, path)
    report = torchlift.convert(path, tmp_path / "new.pt", dtype=becomes)
    assert report.overflowed == {"weight": 1}
    assert torchlift.load(make(), path, dtype=becomes).overflowed == {"weight": 1}
    for door in (partial(torchlift.convert, path, tmp_path / "no.pt"),
                 partial(torchlift.load, make(), path)):  # fmt: skip
        with pytest.raises(IntegrityError) as error:
            door(dtype=becomes, check="finite")
        assert sum(error.value.not_finite["weight"]) == 1


@pytest.mark.parametrize("format", ["new.pt", "new.safetensors", "folder"])
def test_a_check_refuses_what_is_not_finite_before_the_file_appears(
    tmp_path: Path, format: str
) -> None:
    """With the counts of each tensor. The way out of the hint, another dtype, works."""
    src, dst = tmp_path / "m.pt", tmp_path / format
    torch.save({"w": torch.tensor([1e5, 1.0]), "v": torch.ones(3)}, src)
    how: Any = {"format": "dcp"} if format == "folder" else {}
    with pytest.raises(IntegrityError) as error:
        torchlift.convert(src, dst, dtype="float16", check="finite", **how)
    assert error.value.not_finite == {"w": (0, 1)}
    assert not dst.exists()
    assert len([*tmp_path.iterdir()]) == 1
    report = torchlift.convert(src, dst, dtype="bfloat16", check="finite", **how)
    assert not report.overflowed
    torch.save({"w": torch.tensor([float("nan")])}, src)
    with pytest.raises(IntegrityError) as error:
        torchlift.convert(src, tmp_path / "other.pt", check="finite")
    assert error.value.not_finite == {"w": (1, 0)}

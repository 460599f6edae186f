"""Quantised tensors and their scales in a conversion: never cast apart from each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import scaling, write_fp8
from safetensors.torch import load_file, save_file

import torchlift
from torchlift import PlacementError, remap
from torchlift.cli import main


def deepseek(path: Path) -> dict[str, torch.Tensor]:
    """Write a quantised layer and a norm. Return what the values are."""
    norm = torch.rand(200)
    return {"l.weight": write_fp8(path, "l", **{"norm.weight": norm}), "norm.weight": norm}


@pytest.mark.parametrize("dst", ["new.pt", "new.safetensors", "new.safetensors.index.json"])
@pytest.mark.parametrize("is_left_out", [False, True])
def test_codes_are_not_cast_without_their_scales(
    tmp_path: Path, dst: str, is_left_out: bool
) -> None:
    """Whatever is written, and also if the scales are left out. The way out is followed."""
    src = tmp_path / "model.safetensors"
    values = deepseek(src)
    without = ["*_scale_inv"] if is_left_out else []
    with pytest.raises(PlacementError) as error:
        torchlift.convert(src, tmp_path / dst, dtype="bfloat16", exclude=without)
    assert (error.value.entry, error.value.found) == ("l.weight", "float8_e4m3fn")
    assert "l.weight_scale_inv" in error.value.reason
    assert "exclude=['*weight_scale_inv']" in str(error.value.hint)
    assert not (tmp_path / dst).exists()
    ckpt = torchlift.open(src)
    report = torchlift.convert(
        ckpt, tmp_path / dst, dtype="bfloat16", transform=scaling(ckpt),
        exclude=["*weight_scale_inv"],
    )  # fmt: skip
    made = torchlift.open(tmp_path / dst)
    assert {*made} == {*values}
    assert not report.quantised
    for key, value in values.items():
        assert torch.equal(made[key], value.bfloat16()), key


def drop_scales(key: str) -> str | None:
    return None if key.endswith("_scale_inv") else f"model.{key}"


@pytest.mark.parametrize("how", [{"exclude": ["*_scale_inv"]}, {"rename": drop_scales}])
def test_a_scale_that_is_left_out_alone_is_listed(tmp_path: Path, how) -> None:
    """The codes are kept, and are no values without it, whether a pattern or a rename drops it."""
    deepseek(path := tmp_path / "old.safetensors")
    report = torchlift.convert(path, tmp_path / "new.safetensors", **how)
    assert "l.weight_scale_inv" in report.lost
    assert "the values of l.weight, which is kept, are wrong without it" in str(report)
    report = torchlift.convert(path, tmp_path / "kept.safetensors", exclude=["l.*"])
    assert "l.weight_scale_inv" not in report.lost


def test_a_rule_that_leaves_codes_leaves_their_scales(tmp_path: Path) -> None:
    """The other way out: the file stays quantised, and only other tensors are cast."""
    src, dst = tmp_path / "model.safetensors", tmp_path / "new.safetensors"
    deepseek(src)
    rule = lambda entry: None if entry.dtype == "float8_e4m3fn" else "float16"  # noqa: E731
    report = torchlift.convert(src, dst, dtype=rule)
    old, new = load_file(src), load_file(dst)
    assert [*report.cast] == ["norm.weight"]
    assert report.quantised == {"l.weight": ("l.weight_scale_inv",)}
    for key in ("l.weight", "l.weight_scale_inv"):
        assert new[key].dtype == old[key].dtype
        assert torch.equal(new[key].view(torch.uint8), old[key].view(torch.uint8))


INTEGERS = {
    "bitsandbytes": {"l.weight": torch.ones(4, 8, dtype=torch.int8), "l.SCB": torch.ones(4)},
    "nf4": {
        "l.weight": torch.ones(512, 1, dtype=torch.uint8), "l.weight.absmax": torch.ones(16),
    },
    "gptq": {
        "l.qweight": torch.ones(8, 16, dtype=torch.int32),
        "l.scales": torch.ones(2, 16, dtype=torch.float16),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("door", ["file", "memory", "list", "renamed", "command"])
def test_integers_and_their_scales_stay_as_they_are(tmp_path: Path, kind: str, door: str) -> None:
    """A kernel takes the scale in the dtype in which its library saved it."""
    state = {**INTEGERS[kind], "norm": torch.ones(8)}
    src, dst = tmp_path / "m.safetensors", tmp_path / "new.safetensors"
    save_file(state, src)
    if door == "command":
        assert main(["convert", str(src), str(dst), "--dtype", "bfloat16", "--json"]) == 0
    else:
        sources: Any = {"memory": state, "list": [src, {"other": torch.ones(1)}]}
        rename = remap.rules([(r"^l\.", "layers.0.")]) if door == "renamed" else None
        given = sources.get(door, src)
        report = torchlift.convert(given, dst, dtype="bfloat16", rename=rename)
        assert len(report.quantised) == 1
        assert "quantised" in str(report)
    found = load_file(dst)
    assert found["norm"].dtype == torch.bfloat16
    for key, value in INTEGERS[kind].items():
        assert found[key.replace("l.", "layers.0.", door == "renamed")].dtype == value.dtype


def test_a_transform_that_leaves_the_codes_is_refused(tmp_path: Path) -> None:
    """It may change other tensors only. The codes would then be cast without their scales."""
    src = tmp_path / "model.safetensors"
    deepseek(src)
    with pytest.raises(PlacementError) as error:
        torchlift.convert(
            src, tmp_path / "new.pt", dtype="bfloat16", transform=lambda _, tensor: tensor
        )
    assert error.value.entry == "l.weight"

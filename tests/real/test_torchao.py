"""torchao's classes, through files: quantised checkpoints and quantised models, each with each."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift

pytest.importorskip("torchao")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8Tensor,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerRow,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "float8": Float8WeightOnlyConfig(),
    "int8-dynamic": Int8DynamicActivationInt8WeightConfig(),
    "intx": IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "int8-intx": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int3),
}
#: What a caller allows beside the class of the weight, as the error lists it.
INSIDE: dict[str, list[type]] = {"int8-dynamic": [QuantizeTensorToInt8Kwargs, PerRow]}
X = torch.linspace(-1, 1, 384).view(3, 128)


def plain(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))


def quantised(name: str, seed: int = 1) -> nn.Sequential:
    model = plain(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, CONFIGS[name])
    return model


def targets(name: str) -> dict[str, Any]:
    """A skeleton and a live model of each kind, of other values."""
    with torch.device("meta"):
        on_meta = quantised(name, 2)
    return {
        "skeleton": torchlift.skeleton(plain),
        "quantised skeleton": torchlift.skeleton(quantised, name),
        "quantised on meta": on_meta,
        "quantised": quantised(name, 2),
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CONFIGS), ("int8", {"source": "read"}), ("int8", {"mode": "assign"})],
)
def test_a_quantised_checkpoint_fills_plain_and_quantised_models(name, options, tmp_path):
    """As torch.load and load_state_dict(assign=True) do, for the class that is named."""
    expected, path = quantised(name), tmp_path / "q.pt"
    torch.save(expected.state_dict(), path)
    kind, more = type(expected[0].weight), INSIDE.get(name, [])
    with pytest.raises(
        torchlift.UnsafeError, match=rf"'0\.weight'.*allow_classes=\[{kind.__name__}\]"
    ):
        torchlift.load(torchlift.skeleton(plain), path)
    if more:
        names = ", ".join(rf"[\w.]*\.{item.__name__}" for item in more)
        with pytest.raises(
            torchlift.UnsafeError, match=rf"allow_classes does not list.*found {names}\. "
        ):
            torchlift.load(torchlift.skeleton(plain), path, allow_classes=[kind])
    reference = plain(3)
    reference.load_state_dict(torch.load(path, weights_only=True), assign=True)
    for what, model in targets(name).items():
        plan = torchlift.plan(model, path, allow_classes=[kind, *more], **options)
        report = torchlift.load(model, path, allow_classes=[kind, *more], **options)
        assert plan.mode == report.mode
        assert type(model[0].weight) is kind, what
        assert model[0].weight.dtype == reference[0].weight.dtype
        assert torch.equal(model(X), expected(X)), what
        assert torch.equal(model(X), reference(X)), what


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CONFIGS), ("int8", {"mode": "swap"}), ("int8", {"mode": "assign"})],
)
def test_a_float_checkpoint_never_makes_a_quantised_model_plain(name, options, tmp_path):
    """The class says how, or one error names the weight, and nothing changes."""
    path = tmp_path / "f.pt"
    torch.save(plain().state_dict(), path)
    for what, model in targets(name).items():
        if what == "skeleton":
            continue
        kind = type(model[0].weight)
        with torch.no_grad():  # a graph would keep the biases from being swapped
            # A constructor that seeds torch runs for real, so that only plain tensors are on meta.
            before = None if any(one.is_meta for one in model.parameters()) else model(X)
        with pytest.raises(torchlift.PlacementError, match=r"'0\.weight'.*transform="):
            torchlift.load(model, path, **options)
        assert type(model[0].weight) is kind
        assert before is None or torch.equal(model(X), before)


@pytest.mark.parametrize("what", ["skeleton", "quantised skeleton", "quantised"])
def test_a_float_checkpoint_is_quantised_as_it_is_loaded(what: str, tmp_path: Path) -> None:
    """By a transform, or by a handler of the class: bit for bit what quantising later gives."""
    expected, path = quantised("int8"), tmp_path / "f.pt"
    torch.save(plain().state_dict(), path)

    def quantise(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return Int8Tensor.from_hp(tensor, PerRow()) if key.endswith("weight") else tensor

    model = targets("int8")[what]
    torchlift.load(model, path, transform=quantise)
    assert torch.equal(model(X), expected(X))

    def load_int8(destination: Any, source: Any, assign: bool) -> Any:
        return Int8Tensor.from_hp(source, PerRow())

    if what != "skeleton":
        model = targets("int8")[what]
        with torchlift.swap.module_load(Int8Tensor, load_int8):
            torchlift.load(model, path)
        assert torch.equal(model(X), expected(X))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantised_model_is_saved_as_torch_saves_it(name: str, tmp_path: Path) -> None:
    """A file of `save` is read as one of `torch.save`: by torch, and where it fills a model."""
    model, path = quantised(name), tmp_path / "q.pt"
    torchlift.save(model, path)
    allowed = [type(model[0].weight), *INSIDE.get(name, [])]
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    ours, theirs = torchlift.open(path), torchlift.open(tmp_path / "torch.pt")
    assert (ours.blocked, list(ours)) == (theirs.blocked, list(theirs))
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint
    assert unsafe(path) == unsafe(tmp_path / "torch.pt")
    found = torch.load(path, weights_only=False)
    assert type(found["0.weight"]) is type(model[0].weight)
    assert list(found) == list(model.state_dict())
    live = quantised(name, 2)
    torchlift.load(live, path, allow_classes=allowed)
    assert torch.equal(live(X), model(X))
    for where in ("x.safetensors", "folder"):
        with pytest.raises(
            torchlift.PlacementError, match=r"'0.weight': cannot be stored in a .*found"
        ):
            torchlift.save(model, tmp_path / where, format="dcp" if where == "folder" else None)
    assert not (tmp_path / "folder").exists()

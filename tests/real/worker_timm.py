"""Checks of timm's models, for `test_timm`; prints what failed as JSON."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import torchlift

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import timm
    from safetensors.torch import save_file

MODELS = {
    "resnet10t": {"num_classes": 5},
    "vit_tiny_patch16_224": {"num_classes": 5, "depth": 2, "img_size": 32},
    "convnext_atto": {"num_classes": 5, "depths": (1, 1, 1, 1)},
    "mobilenetv3_small_050": {"num_classes": 5},
}
X = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)


def made(name: str, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return timm.create_model(name, **{**MODELS[name], **options})


def same(one: Any, two: Any) -> None:
    states = one.state_dict(), two.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, value in states[1].items():
        assert torch.equal(states[0][key], value), key
    buffers = dict(two.named_buffers())
    for key, value in one.named_buffers():
        assert torch.equal(value, buffers[key]), key
    with torch.no_grad():
        found, expected = one.eval()(X), two.eval()(X)
    pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
    for a, b in pairs:  # a tensor's address may change the last bits of a sum
        torch.testing.assert_close(a, b)


def a_checkpoint_loads_as_create_model_does(name: str, path: Path) -> None:
    saved = made(name, 1)
    torch.save(saved.state_dict(), path / "x.pth")
    save_file(saved.state_dict(), path / "x.safetensors")
    for file in ("x.pth", "x.safetensors"):
        expected = made(name, 2, checkpoint_path=str(path / file))
        for model in (made(name, 3), torchlift.skeleton(made, name, 3)):
            torchlift.load(model, path / file)
            same(model, expected)


def a_skeleton_replays_what_create_model_makes(name: str, path: Path) -> None:
    expected = made(name, 7)
    torch.manual_seed(7)
    model = torchlift.skeleton(timm.create_model, name, **MODELS[name])
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    torchlift.materialize(model)
    same(model, expected)


CHECKS = (
    a_checkpoint_loads_as_create_model_does,
    a_skeleton_replays_what_create_model_makes,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for check in CHECKS:
        for name in MODELS:
            try:
                check(name, Path(mkdtemp()))
                found[f"{check.__name__} {name}"] = ""
            except Exception:
                found[f"{check.__name__} {name}"] = traceback.format_exc()
    json.dump(found, sys.stdout)

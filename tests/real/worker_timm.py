"""Checks of timm's models, for `test_timm`."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import zoo

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
    return timm.create_model(name, **MODELS[name], **options)


def same(one: Any, two: Any) -> None:
    for kind in ("state_dict", "named_buffers"):
        states = (dict(getattr(model, kind)()) for model in (one, two))
        assert zoo.same(*states)
    with torch.no_grad():  # a tensor's address may change the last bits of a sum
        torch.testing.assert_close(one.eval()(X), two.eval()(X))


def a_checkpoint_loads_as_create_model_does(name: str, path: Path) -> None:
    saved = made(name, 1)
    torch.save(saved.state_dict(), path / "x.pth")
    save_file(saved.state_dict(), path / "x.safetensors")
    for file in ("x.pth", "x.safetensors"):
        expected = made(name, 2, checkpoint_path=str(path / file))
        for model in (made(name, 3), torchlift.skeleton(made, name, 3)):
            torchlift.load(model, path / file)
            same(model, expected)


def a_skeleton_replays_what_create_model_makes(name: str) -> None:
    expected = made(name, 7)
    torch.manual_seed(7)
    model = torchlift.skeleton(timm.create_model, name, **MODELS[name])
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    torchlift.materialize(model)
    same(model, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in MODELS:
        a_checkpoint_loads_as_create_model_does(name, Path(mkdtemp()))
        a_skeleton_replays_what_create_model_makes(name)

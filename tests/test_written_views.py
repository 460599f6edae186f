"""A tensor of a checkpoint is the caller's to write to: every function still uses the file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlift


def base() -> dict[str, torch.Tensor]:
    weight = torch.arange(12.0).view(3, 4)
    return {"weight": weight, "tied": weight, "bias": torch.ones(3)}


def odd() -> dict[str, torch.Tensor]:
    """Tensors that a load or a save does not copy as one run of bytes."""
    weight = torch.arange(12.0).view(3, 4)
    complexes = torch.arange(4.0).to(torch.complex64) * (1 + 2j)
    return {
        "weight": weight.t(),
        "view": weight[1:, ::2],
        "conjugate": complexes.conj(),
        "sparse": torch.eye(3).to_sparse(),
        "bias": torch.ones(3),
    }


def write(state: dict[str, torch.Tensor], folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind.endswith(".npz"):
        np.savez(path, **{key: value.numpy() for key, value in state.items()})
    else:
        torchlift.save(state, path, format="dcp" if kind == "dcp" else None)
    return path


FILES: dict[str, Callable[[Path], Path]] = {
    "torch file": lambda folder: write(base(), folder, "a.pt"),
    "odd tensors": lambda folder: write(odd(), folder, "a.pt"),
    "safetensors": lambda folder: write(base(), folder, "a.safetensors"),
    "DCP": lambda folder: write(base(), folder, "dcp"),
    "npz": lambda folder: write(base(), folder, "a.npz"),
}


def load(ckpt: Any, folder: Path) -> object:
    model = nn.Module()
    for key, value in ckpt.state_dict().items():
        if not value.is_sparse:
            model.register_buffer(key, torch.zeros_like(value))
    torchlift.load(model, ckpt, source="read", strict=False)
    return torchlift.digest(model)


def load_mapped(ckpt: Any, folder: Path) -> object:
    shape = ckpt["weight"].shape
    model = torchlift.skeleton(lambda: nn.ParameterDict({"weight": torch.zeros(shape)}))
    torchlift.load(model, ckpt, include=["weight"])
    return torchlift.digest(model)


def write_with(function: Any, **words: Any) -> Callable[[Any, Path], object]:
    def run(ckpt: Any, folder: Path) -> object:
        function(ckpt, folder / "out.pt", **words)
        return torchlift.digest(folder / "out.pt")

    return run


USES: dict[str, Callable[[Any, Path], object]] = {
    "load": load,
    "load, mapped": load_mapped,
    "convert": write_with(torchlift.convert),
    "convert to float64": write_with(torchlift.convert, dtype="float64"),
    "convert and transform": write_with(torchlift.convert, transform=lambda _, tensor: tensor),
    "convert from a list": lambda ckpt, folder: write_with(torchlift.convert)([ckpt], folder),
    "save": write_with(torchlift.save),
    "digest": lambda ckpt, _: torchlift.digest(ckpt),
    "stats": lambda ckpt, _: str(ckpt.stats("weight")),
    "pickle": lambda ckpt, _: torchlift.digest(pickle.loads(pickle.dumps(ckpt)).state_dict()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("file", FILES)
def test_a_change_of_a_tensor_does_not_reach_what_a_function_makes(
    file: str, use: str, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    path = FILES[file](tmp_path / "src")
    with torchlift.open(path) as ckpt:
        right = USES[use](ckpt, tmp_path)
    (tmp_path / "out.pt").unlink(missing_ok=True)
    with torchlift.open(path) as ckpt:
        for key in ckpt:
            ckpt[key].coalesce().values().add_(1) if ckpt[key].is_sparse else ckpt[key].add_(1)
        assert USES[use](ckpt, tmp_path) == right


@pytest.mark.parametrize("file", FILES)
def test_a_change_shows_in_the_mapping_as_in_a_dict(file: str, tmp_path: Path) -> None:
    """The file stays as it is, and so does every other checkpoint of it."""
    path = FILES[file](tmp_path)
    content = path.read_bytes() if path.is_file() else b""
    with torchlift.open(path) as ckpt, torchlift.open(path) as other:
        right = other["bias"].clone()
        ckpt["bias"].add_(1)
        assert torch.equal(ckpt["bias"], right + 1)
        assert torch.equal(ckpt.state_dict()["bias"], right + 1)
        assert torch.equal(other["bias"], right)
        change = torchlift.diff(ckpt, path)
        assert change.equal
        assert not torchlift.diff(ckpt.state_dict(), path).equal
    assert not content or path.read_bytes() == content

"""The consolidated file, written by one process; by several, see test_load."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import torchlift
from torchlift.distributed import save_consolidated
from torchlift.errors import CheckpointError, PlacementError


def test_the_file_is_an_ordinary_one(tmp_path: Path) -> None:
    """safetensors reads it, with every dtype, empty tensors, scalars, views and metadata."""
    state = {
        "b": torch.arange(3, dtype=torch.int8),
        "a": torch.randn(4, 6).t(),
        "bf16": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    path = tmp_path / "x.safetensors"
    wrote = save_consolidated(state, path, metadata={"step": "7"})
    assert wrote == sum(value.nbytes for value in state.values())
    found = load_file(path)
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "7"}
    assert torchlift.verify(path).ok
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_saving_over_the_file_that_is_mapped_keeps_both_right(tmp_path: Path) -> None:
    """The old file lives on for whoever maps it."""
    path = tmp_path / "x"
    save_consolidated({"w": torch.ones(1000)}, path)
    model = torchlift.skeleton(nn.Linear, 1000, 1, bias=False)
    torchlift.load(model, path, rename=lambda key: "weight", transform=lambda key, t: t[None])
    save_consolidated({"w": model.weight.detach() * 2}, path)
    assert torch.equal(model.weight, torch.ones(1, 1000))
    assert torch.equal(load_file(path)["w"], torch.full((1, 1000), 2.0))


@pytest.mark.parametrize(
    "bad", [torch.empty(2, device="meta"), torch.zeros(2, dtype=torch.complex128)]
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, bad: torch.Tensor
) -> None:
    """The message names the tensor; the old file is as it was, and alone."""
    path = tmp_path / "x"
    save_consolidated({"w": torch.ones(2)}, path)
    before = path.read_bytes()
    with pytest.raises(PlacementError, match=r"'bad': cannot be stored in a safetensors file"):
        save_consolidated({"w": torch.zeros(2), "bad": bad}, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """It fails loudly and names the file."""
    with pytest.raises(CheckpointError, match=r"nowhere/x: the file cannot be written"):
        save_consolidated({"w": torch.ones(2)}, tmp_path / "nowhere" / "x")


def test_a_file_size_limit_leaves_no_debris(tmp_path: Path) -> None:
    """A full disk, as far as a test can have one."""
    resource = pytest.importorskip("resource")
    import signal

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(CheckpointError, match="the file cannot be written"):
            save_consolidated({"w": torch.ones(10_000)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []

"""CheckpointReader in one process: torch's own load, over files that are not torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchlift
from torchlift.distributed import CheckpointReader
from torchlift.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def expected() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = dict(nn.Linear(2048, 3).state_dict())
    return {**state, "half": torch.randn(5).half(), "scalar": torch.tensor(2.5)}


def write(kind: str, folder: Path) -> Path:
    state, path = expected(), folder / kind
    if kind == "torch":
        torch.save({"model": state, "step": 7}, path)
    elif kind == "safetensors":
        save_file({f"model.{key}": value for key, value in state.items()}, path)
    else:
        dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_every_format_is_read(tmp_path: Path, kind: str) -> None:
    """Into contiguous tensors, into views with gaps, and with a cast on the way."""
    state = {key: torch.zeros_like(value) for key, value in expected().items()}
    state["weight"] = torch.zeros(3, 4096)[:, ::2]
    state["half"] = torch.zeros(5, dtype=torch.float64)
    dcp.load(state, storage_reader=CheckpointReader(write(kind, tmp_path), root="model"))
    for key, value in expected().items():
        assert torch.equal(state[key], value.to(state[key].dtype)), key


def test_objects_and_an_open_checkpoint(tmp_path: Path) -> None:
    """What is not a tensor comes too, and a checkpoint that is open already will do."""
    with torchlift.open(write("torch", tmp_path)) as ckpt:
        state = {"step": 0, "model": {"scalar": torch.zeros(())}}
        dcp.load(state, storage_reader=CheckpointReader(ckpt))
    assert state == {"step": 7, "model": {"scalar": torch.tensor(2.5)}}


def test_another_checkpoint_can_be_named_in_the_call(tmp_path: Path) -> None:
    """As with torch's own reader, checkpoint_id decides."""
    first = write("torch", tmp_path)
    other = tmp_path / "other"
    torch.save({"model": {"scalar": torch.tensor(1.5)}}, other)
    state = {"scalar": torch.zeros(())}
    dcp.load(state, checkpoint_id=other, storage_reader=CheckpointReader(first, root="model"))
    assert state["scalar"] == 1.5


def test_a_bad_file_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    """Where there is nobody to wait, the constructor says so."""
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(FormatError, match="junk"):
        CheckpointReader(tmp_path / "junk")


def test_a_key_that_is_not_there_is_an_error_of_torch(tmp_path: Path) -> None:
    """The planner compares the names, and says which is missing."""
    reader = CheckpointReader(write("torch", tmp_path), root="model")
    with pytest.raises(CheckpointException, match=r"Missing key.*absent"):
        dcp.load({"absent": torch.zeros(1)}, storage_reader=reader)

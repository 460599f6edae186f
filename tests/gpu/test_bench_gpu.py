"""Loaders of other libraries on an accelerator, when the user passes its type without a number."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from bench import ways_for
from generated import make_checkpoint

from torchlift.bench import WAYS, Way, loading

pytestmark = pytest.mark.gpu

_NAMES = [way.name for way in ways_for("cuda", "", "")["peers"] if way.name != "tensorizer"]


def digest_of(way: Way, path: Path, device: torch.device) -> str:
    """Load in one way, check the device of each tensor, and return a checksum."""
    job = loading.Job(str(path), device=device.type)
    with warnings.catch_warnings():  # fastsafetensors warns if GPUDirect Storage is missing
        warnings.simplefilter("ignore")
        state = loading.prepare(way, job)()
    assert state is not None
    tensors = state.state_dict() if isinstance(state, torch.nn.Module) else state
    assert {value.device for value in tensors.values()} == {device}
    return loading.digest(state)


@pytest.mark.parametrize("name", _NAMES)
def test_a_loader_gets_the_number_of_the_device(tmp_path, accelerator, name) -> None:
    """fastsafetensors and InstantTensor refuse a device without a number."""
    path = tmp_path / "model.safetensors"
    make_checkpoint(path, nbytes=8 << 20, tensors=4, format="safetensors")
    (ours,) = (way for way in WAYS if way.name == "torchlift-read")
    peers = ways_for("cuda", "", str(tmp_path))["peers"]
    (peer,) = (way for way in peers if way.name == name)
    if why := peer.obstacle("safetensors", accelerator.type):
        pytest.skip(why)
    assert digest_of(peer, path, accelerator) == digest_of(ours, path, accelerator)

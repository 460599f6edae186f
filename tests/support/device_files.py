"""Checkpoints with the location tags of other machines, and what a map puts on each device."""

from __future__ import annotations

import struct
from pathlib import Path

from checkpoint_files import tensor, write_zip
from torch import nn

from torchlift._model.slots import collect
from torchlift.remap import ByKey

#: Tags as the backends write them: `torch.serialization.location_tag` of each, and private ones.
TAGS = (
    "cpu", "cuda:0", "cuda:1", "cuda:7", "mps", "xpu:0", "hpu", "hpu:0", "npu:3", "mtia:0", "meta",
    "privateuseone:0", "somebodys_chip:2",
)  # fmt: skip


def write_tagged(path: Path, *tags: str) -> Path:
    """A torch zip file of one float32 tensor per tag: ``w0`` of four zeros, ``w1`` of ones..."""
    content = {
        f"w{i}": tensor((4,), (1,), storage=str(i), location=tag) for i, tag in enumerate(tags)
    }
    storages = {str(i): struct.pack("<4f", *[float(i)] * 4) for i in range(len(tags))}
    return write_zip(path, content, storages=storages)


def used(model: nn.Module, device_map: ByKey[str]) -> dict[str, int]:
    """Device -> bytes of the model's tensors there, each counted once: not by the code tested."""
    found: dict[str, int] = {}
    for group in collect(model):
        devices = {device_map.at(name) for name in group.names}
        assert len(devices) == 1, f"{group.names} on {devices}"
        (device,) = devices
        assert device is not None, group.names
        found[device] = found.get(device, 0) + group.tensor.nbytes
    return found

"""Devices as a caller writes them: strings, numbers, `torch.device`, and ``"disk"``."""

from __future__ import annotations

import difflib
import re

import torch

from torchlift._model.devices import DISK
from torchlift.errors import PlacementError

Device = torch.device | str | int

#: A device type and perhaps a number, or the tag that a backend writes into a file.
TAG = re.compile(r"[A-Za-z_]\w*(?::\d+)?")

_KNOWN = (
    "cpu", "cuda", "hip", "hpu", "ipu", "maia", "meta", "mps", "mtia", "npu", "vulkan", "xla",
    "xpu", DISK,
)  # fmt: skip
# A name that torch does not know may be a backend that this machine lacks. One that is as close as
# this to a known one is a slip of the pen: "cuda0" (0.89), "cdua" (0.75); "npu" and "cpu" are 0.67.
_SLIP = 0.7


def checked(value: object, entry: str) -> Device:
    """`value`, once it can be a device of some machine; it need not be one of this.

    Raises:
        PlacementError: it cannot; the error names `entry`.
    """
    if isinstance(value, torch.device):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    hint = None
    if isinstance(value, str):
        kind = value.partition(":")[0]
        near = difflib.get_close_matches(kind, _KNOWN, n=1, cutoff=_SLIP)
        if TAG.fullmatch(value) and (kind in _KNOWN or not near):
            return value
        hint = f"Did you mean {near[0]!r}?" if near and near[0] != kind else None
    raise PlacementError(
        "is mapped to something that is no device",
        entry=entry,
        expected='a device such as "cpu" or "cuda:0", or "disk"',
        found=repr(value),
        hint=hint,
    )


def spelled(device: Device) -> str:
    """One spelling per device: ``cuda:1`` for 1 and for ``torch.device("cuda", 1)``.

    A number means an accelerator of this machine, and CUDA where there is none.
    """
    if isinstance(device, int):
        found = torch.accelerator.current_accelerator()
        return f"{found.type if found is not None else 'cuda'}:{device}"
    return str(device)


def is_accelerator(device: str) -> bool:
    """Whether it is neither the host nor the disk."""
    return device.partition(":")[0] not in ("cpu", DISK)

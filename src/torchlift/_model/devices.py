"""Check the devices that a caller selects, before anything is moved there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

import torch

from torchlift.errors import PlacementError

#: Where a device rule puts what stays mapped from the file, whatever the other arguments say.
DISK = "disk"

Device = torch.device | str | int


#: A device type and perhaps a number, or the tag that a backend writes into a file.
DEVICE_TAG = re.compile(r"[A-Za-z_]\w*(?::\d+)?")

_KNOWN = (
    "cpu", "cuda", "hip", "hpu", "ipu", "maia", "meta", "mps", "mtia", "npu", "vulkan", "xla",
    "xpu", DISK,
)  # fmt: skip
#: What people call devices -> what torch calls them.
_OTHERWISE = {"gpu": ["cuda"], "nvidia": ["cuda"], "host": ["cpu"], "ram": ["cpu"], "tpu": ["xla"]}
# A name that torch does not know may be a backend that this machine lacks. One that is as close as
# this to a known one is a slip of the pen: "cuda0" (0.89), "cdua" (0.75); "npu" and "cpu" are 0.67.
_SLIP = 0.7


def usable_device(asked: object, entry: str, *, present: bool = True) -> torch.device:
    """Return `asked` as a device with its index, after making an empty tensor there.

    Args:
        asked: The caller's device. ``"disk"`` is the CPU, where the file is mapped.
        entry: The entry that an error names.
        present: Whether this machine must have it. If False, no tensor is made there.

    Raises:
        PlacementError: If it is not a device, or this machine does not have it.
    """
    try:
        device = torch.device("cpu" if asked == DISK else asked)  # type: ignore[call-overload]
        if device.type == "meta":
            raise RuntimeError("a meta tensor holds no values")
        if device.type == "cpu":
            return torch.device("cpu")
        return torch.empty(0, device=device).device if present else device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        if not present and isinstance(asked, (str, int)):
            try:
                return torch.device(spelled_device(checked_device(asked, entry)))
            except RuntimeError:
                return torch.device("privateuseone")  # a backend that this torch cannot even name
        hint = 'Choose a device of this machine, such as device="cpu".'
        if isinstance(asked, Mapping):
            hint = "Wrap it: remap.by_key(...) for names, remap.by_location(...) for tags."
        raise PlacementError(
            "cannot be moved to the selected device",
            entry=entry,
            found=f"{asked!r} ({str(error).splitlines()[0]})",
            hint=hint,
        ) from error


def checked_device(value: object, entry: str) -> Device:
    """Return `value` if it can be a device of some machine, not necessarily of this one.

    Raises:
        PlacementError: If it cannot be a device. The error names `entry`.
    """
    if isinstance(value, torch.device):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    hint = None
    if isinstance(value, str):
        kind = value.partition(":")[0]
        near = difflib.get_close_matches(kind, _KNOWN, n=1, cutoff=_SLIP)
        near = _OTHERWISE.get(kind.lower(), near)
        if DEVICE_TAG.fullmatch(value) and (kind in _KNOWN or not near):
            return value
        hint = f"Did you mean {near[0]!r}?" if near and near[0] != kind else None
    raise PlacementError(
        "the value for it is not a device",
        entry=entry,
        expected='a device such as "cpu" or "cuda:0", or "disk"',
        found=repr(value),
        hint=hint,
    )


def spelled_device(device: Device) -> str:
    """Return the one spelling of a device: ``cuda:1`` for 1 and ``torch.device("cuda", 1)``.

    A number means an accelerator of this machine, and CUDA where there is none.
    """
    if isinstance(device, int):
        found = torch.accelerator.current_accelerator()
        return f"{found.type if found is not None else 'cuda'}:{device}"
    return str(device)

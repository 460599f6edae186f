"""Check the devices that a caller selects, before anything is moved there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

import torch

from torchlift.errors import PlacementError

#: Where a device rule puts what stays mapped from the file, whatever the other arguments say.
DISK = "disk"

Device = torch.device | str | int


#: A device type and perhaps a number, or the tag that a backend writes into a file.
DEVICE_TAG = re.compile(r"[A-Za-z_]\w*(?::\d+)?")
#: Devices that torch can name only after their package was imported.
_PLUGINS = "npu", "mlu", "musa", "gcu", "txda", "spyre"


def usable_device(asked: object, entry: str, *, present: bool = True) -> torch.device:
    """Return `asked` as a device with its index, after making an empty tensor there.

    Args:
        asked: The caller's device. ``"disk"`` is the CPU, where the file is mapped.
        entry: The entry that an error names.
        present: Whether this machine must have it. If False, an index counts as it is.

    Raises:
        PlacementError: If it is not a device, or this machine does not have it.
    """
    try:
        device: torch.device = torch.device("cpu" if asked == DISK else asked)  # type: ignore[call-overload]
        if device.type == "meta":
            raise RuntimeError("a meta tensor holds no values")
        if device.type == "cpu":
            return torch.device("cpu")
        if not present and device.index is not None:
            return device
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        if not present and isinstance(asked, (str, int, torch.device)):
            known = spelled_device(checked_device(asked, entry))
            is_plugin = known.partition(":")[0] in _PLUGINS
            return torch.device("privateuseone" if is_plugin else known)
        hint = 'Choose a device of this machine, such as device="cpu".'
        if isinstance(asked, Mapping):
            hint = "Wrap it: remap.by_key(...) for names, remap.by_location(...) for tags."
        raise PlacementError(
            "cannot be moved to the selected device",
            entry=entry or None,  # the map's entry for all names
            found=f"{asked!r} ({str(error).splitlines()[0]})",
            hint=hint,
        ) from error


def checked_device(value: object, entry: str) -> Device:
    """Return `value` if it can be a device of some machine, not necessarily of this one.

    Raises:
        PlacementError: If torch does not know such a device. The error names `entry`.
    """
    if isinstance(value, torch.device):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        if DEVICE_TAG.fullmatch(value) and value.partition(":")[0] in _PLUGINS:
            return value
        with suppress(RuntimeError):
            torch.device("cpu" if value == DISK else value)
            return value
    raise PlacementError(
        "the value for it is not a device",
        entry=entry,
        expected="a device such as 'cpu', 'cuda' or 'cuda:1', or 'disk'",
        found=repr(value),
    )


def spelled_device(device: Device) -> str:
    """Return the one spelling of a device: ``cuda:1`` for 1 and ``torch.device("cuda", 1)``.

    A number means an accelerator of this machine, and CUDA where there is none.
    """
    if isinstance(device, int):
        found = torch.accelerator.current_accelerator()
        return f"{found.type if found is not None else 'cuda'}:{device}"
    return str(device)

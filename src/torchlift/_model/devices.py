"""Devices that a caller asks for: checked before anything goes there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchlift.errors import PlacementError

#: Where a device rule puts what stays mapped from the file, whatever the other arguments say.
DISK = "disk"


def usable_device(asked: object, entry: str, *, present: bool = True) -> torch.device:
    """`asked` as a device with an index, once a tensor could be made on it.

    Args:
        asked: what a caller gave; ``"disk"`` is the CPU, where the file is mapped.
        entry: what an error is about.
        present: False for any device, whether or not this machine has it.

    Raises:
        PlacementError: it is no device, or not one of this machine.
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
            return torch.device("privateuseone")  # a backend that this torch cannot even name
        hint = 'Choose a device of this machine, such as device="cpu".'
        if isinstance(asked, Mapping):
            hint = "Wrap it: remap.by_key(...) for names, remap.by_location(...) for tags."
        raise PlacementError(
            "cannot go to the device that was asked for",
            entry=entry,
            found=f"{asked!r} ({str(error).splitlines()[0]})",
            hint=hint,
        ) from error

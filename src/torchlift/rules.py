"""What a caller asked for: the arguments of `plan` and `load`, and how a rule becomes an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from torchlift.errors import PlacementError
from torchlift.formats import TensorEntry
from torchlift.match import Rename
from torchlift.slots import Group

DeviceRule = torch.device | str | int | Callable[[TensorEntry], "torch.device | str | int"] | None
DtypeRule = torch.dtype | Callable[[TensorEntry], "torch.dtype | None"] | None
AnyMode = Literal["auto", "assign", "copy", "swap"]
AnySource = Literal["auto", "mmap", "read"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that `plan` and `load` share; see there."""

    rename: Rename | None = None
    device: DeviceRule = None
    dtype: DtypeRule = None
    strict: bool = True
    ignore_mismatched: bool = False
    mode: AnyMode = "auto"
    source: AnySource = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, ("auto", "assign", "copy", "swap")),
            ("source", self.source, ("auto", "mmap", "read")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def target_dtype(
    rule: DtypeRule, entry: TensorEntry, tensor: torch.Tensor, file_dtype: torch.dtype
) -> torch.dtype:
    """The dtype that `rule` gives a tensor; only floating-point ones are ever cast.

    Raises:
        PlacementError: the rule gives something else than a floating-point dtype.
    """
    default = file_dtype if tensor.is_meta else tensor.dtype
    floating = file_dtype.is_floating_point and tensor.dtype.is_floating_point
    if rule is None or not floating:
        return default
    asked: object = rule if isinstance(rule, torch.dtype) else rule(entry)
    if asked is None:
        return default
    if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
        raise PlacementError(
            "dtype= must give a floating-point dtype", entry=entry.key, found=repr(asked)
        )
    return asked


def target_device(rule: DeviceRule, entry: TensorEntry, tensor: torch.Tensor) -> torch.device:
    """The device that `rule` gives a tensor.

    Raises:
        PlacementError: it is no device, or not one of this machine.
    """
    if rule is None:
        return torch.device("cpu") if tensor.is_meta else tensor.device
    asked = rule(entry) if callable(rule) else rule
    if isinstance(asked, torch.device) and asked == tensor.device and not tensor.is_meta:
        return asked
    return usable_device(asked, entry.key)


def usable_device(asked: object, entry: str) -> torch.device:
    """`asked` as a device with an index, once a tensor could be made on it.

    Raises:
        PlacementError: it is no device, or not one of this machine.
    """
    try:
        device = torch.device(asked)  # type: ignore[call-overload]
        if device.type == "meta":
            raise RuntimeError("a meta tensor holds no values")
        if device.type == "cpu":
            return torch.device("cpu")
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise PlacementError(
            "cannot go to the device that was asked for",
            entry=entry,
            found=f"{asked!r} ({str(error).splitlines()[0]})",
            hint='Choose a device of this machine, such as device="cpu".',
        ) from error


def entry_like(key: str, group: Group) -> TensorEntry:
    """A description, for a device rule, of a tensor that no file holds."""
    tensor = group.tensor
    return TensorEntry(
        key=key,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        nbytes=tensor.numel() * tensor.itemsize,
        location=str(tensor.device),
        storage="",
        chunks=(),
    )

"""What a caller asked for: the arguments of `plan` and `load`, and how a rule becomes an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from torchlift._model.devices import usable_device
from torchlift._model.dtensor import default_device, is_sharded
from torchlift._model.slots import Group
from torchlift._plan.steps import Rename
from torchlift.errors import PlacementError
from torchlift.formats import TensorEntry

DeviceRule = (
    torch.device | str | int | Callable[[TensorEntry], torch.device | str | int | None] | None
)
DtypeRule = torch.dtype | Callable[[TensorEntry], torch.dtype | None] | None
AnyMode = Literal["auto", "assign", "copy", "swap"]
AnySource = Literal["auto", "mmap", "read"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that `plan` and `load` share; see there.

    Attributes:
        present: whether the devices must exist here; False for a plan that is only looked at.
    """

    rename: Rename | None = None
    device: DeviceRule = None
    dtype: DtypeRule = None
    strict: bool = True
    ignore_mismatched: bool = False
    mode: AnyMode = "auto"
    source: AnySource = "auto"
    present: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("mode", AnyMode), ("source", AnySource)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        dtype: object = self.dtype
        if not (dtype is None or isinstance(dtype, torch.dtype) or callable(dtype)):
            raise TypeError(f"dtype={dtype!r}: expected a torch.dtype, a callable or None")
        rename: object = self.rename
        if not (rename is None or callable(rename)):
            raise TypeError(f"rename={rename!r}: expected a callable or None")


def target_dtype(
    rule: DtypeRule, entry: TensorEntry, tensor: torch.Tensor, file_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype that `rule` gives a tensor; only floating-point ones are ever cast.

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


def asked_device(
    rule: DeviceRule, seen: TensorEntry, group: Group
) -> tuple[torch.device | str | int | None, str | None]:
    """Return what the rule says, and a note where it says several things about one tied tensor."""
    if not callable(rule):
        return rule, None
    if len(group.slots) == 1:
        return rule(seen), None
    names = dict.fromkeys([seen.key, *group.names])
    answers = {name: rule(replace(seen, key=name)) for name in names}
    given = [(name, answer) for name, answer in answers.items() if answer is not None]
    first = given[0][1] if given else None
    other = [f"{name!r} to {answer}" for name, answer in given if str(answer) != str(first)]
    return first, f"tied, one tensor: the rule would send {', '.join(other)}" if other else None


def target_device(
    asked: torch.device | str | int | None, key: str, tensor: torch.Tensor, *, present: bool
) -> torch.device:
    """Return the device that a tensor goes to; the default where nothing was asked for.

    Raises:
        PlacementError: it is no device, or not one of this machine.
    """
    if asked is not None:
        return usable_device(asked, key, present=present)
    if is_sharded(tensor):
        return default_device(tensor)
    return torch.device("cpu") if tensor.is_meta else tensor.device


def kept_on_disk(
    options: Options, group: Group, seen: TensorEntry, file_dtype: torch.dtype
) -> Options:
    """Return the options for a tensor that stays on disk: mapped as it is, on any file system.

    Raises:
        PlacementError: what else was asked for takes memory for it.
    """
    blank = torch.empty(0, dtype=group.tensor.dtype, device="meta")
    dtype = target_dtype(options.dtype, seen, blank, file_dtype)
    if dtype != file_dtype:
        raise PlacementError(
            "cannot stay on disk and be cast",
            entry=group.fqn,
            expected=f"{file_dtype}, as in the file",
            found=f"{dtype} asked for",
            hint="Give it room on another device, or convert the file to that dtype first.",
        )
    if options.mode == "copy":
        raise PlacementError(
            "cannot stay on disk and be copied",
            entry=group.fqn,
            hint='Load with mode="auto", "assign" or "swap".',
        )
    mode: AnyMode = "swap" if options.mode == "auto" else options.mode
    return replace(options, mode=mode, source="mmap")


def check_rule(rule: object, names: Collection[str], *, present: bool) -> None:
    """Let a rule of `remap` check itself once, before a tensor is looked at.

    Raises:
        PlacementError: it names what is not there.
    """
    check = getattr(rule, "check", None)
    if callable(check):
        check(names, present=present)


def entry_like(key: str, group: Group) -> TensorEntry:
    """Return a description, for a device rule, of a tensor that no file holds."""
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

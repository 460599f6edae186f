"""The options of `plan` and `load`, and the answers of device, dtype and rename rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import dtype_of
from torchlift._checkpoint.kinds import Allow
from torchlift._model.devices import usable_device
from torchlift._model.dtensor import default_device, is_dtensor
from torchlift._model.handlers import shape_of
from torchlift._model.slots import Group
from torchlift._system.text import clipped_list
from torchlift.errors import (
    Argument,
    Hint,
    MismatchError,
    PlacementError,
    did_you_mean,
    note,
    wrong_call,
)
from torchlift.formats.boxes import row_major
from torchlift.formats.index import TensorEntry
from torchlift.formats.index import allowed as allowed

DeviceRule = (
    torch.device | str | int | Callable[[TensorEntry], torch.device | str | int | None] | None
)
DtypeRule = torch.dtype | str | Callable[[TensorEntry], torch.dtype | str | None] | None
Patterns = Collection[str]
Rename = Callable[[str], str | None] | Mapping[str, str | None]
Transform = Callable[[str, torch.Tensor], torch.Tensor]
#: Called with a number of bytes as they arrive.
Advance = Callable[[int], object]
#: The dtype that keeps the dtype of the model, also on meta.
MODEL = "model"
#: Short names of dtypes that torch does not have.
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
AnyMode = Literal["auto", "assign", "copy", "swap"]
AnySource = Literal["auto", "mmap", "read"]
Mode = Literal["assign", "copy", "swap"]
Source = Literal["mmap", "read", "memory"]
#: How values get into memory. view: they stay in the file's map, or in a tensor of the caller.
#: read: by parallel reads into new memory. compute: from tensors in memory, or by the class of the
#: model's tensor.
Route = Literal["view", "read", "compute"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `plan` and `load`. See there.

    Raises:
        TypeError, ValueError: If an argument has another type or value.
    """

    rename: Rename | None = None
    device: DeviceRule = None
    dtype: DtypeRule = None
    strict: bool = True
    allow_missing: Patterns = ()
    allow_unexpected: Patterns = ()
    ignore_mismatched: bool = False
    mode: AnyMode = "auto"
    source: AnySource = "auto"
    include: Patterns = ("*",)
    exclude: Patterns = ()
    transform: Transform | None = None
    root: str | None = None
    allow_classes: Allow = ()
    storage_options: Mapping[str, Any] | None = None
    present: bool = True
    verify: bool = False
    check: Literal["finite"] | None = None
    progress: bool = False
    collective: bool | None = None
    process_group: torch.distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, kind in (("mode", AnyMode), ("source", AnySource)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        if self.check not in (None, "finite"):
            raise ValueError(f'check={self.check!r}: expected "finite" or None')
        dtype: object = self.dtype
        if isinstance(dtype, str) and dtype != MODEL and dtype_named(dtype) is None:
            raise ValueError(f'dtype={dtype!r}: expected a name such as "bfloat16", or "model"')
        is_rule = callable(dtype) and not isinstance(
            dtype, type
        )  # the class float is callable, too
        if not (dtype is None or isinstance(dtype, (torch.dtype, str)) or is_rule):
            raise TypeError(
                f"dtype={dtype!r}: expected a torch.dtype, its name, a callable or None"
            )
        for name in ("strict", "ignore_mismatched"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected True or False")
        rename: object = self.rename
        if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
            raise TypeError(f"rename={rename!r}: expected a callable, a dict of names or None")
        transform: object = self.transform
        if not (transform is None or callable(transform)):
            raise TypeError(f"transform={transform!r}: expected a callable or None")
        for name in ("allow_missing", "allow_unexpected", "include", "exclude"):
            patterns: object = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):  # type: ignore[attr-defined]
                raise TypeError(f"{name}={patterns!r}: expected patterns such as ['head.*']")


def require_model(model: object, function: str) -> None:
    """Refuse a model that is not a module, as if the arguments are swapped.

    Raises:
        TypeError: If it is not a module.
    """
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        if isinstance(model, type):
            found = f"a class: call torchlift.skeleton({model.__name__}, ...)"
        raise wrong_call(function, f"expected a module first, then a checkpoint, not {found}")


def owns_all(source: AnySource, *, live: bool) -> bool:
    """Return whether a model owns its memory after the load, so that no weight is mapped.

    A process dies if a file that it has mapped is overwritten in place. A live model owned its
    memory before, so its weights are never mapped unless the caller passes ``source="mmap"``.
    """
    return source == "read" or (source == "auto" and live)


def target_dtype(
    rule: DtypeRule,
    entry: TensorEntry,
    tensor: torch.Tensor,
    file_dtype: torch.dtype,
    *,
    is_cast: bool = False,
) -> torch.dtype:
    """Return the dtype that `rule` gives a tensor. Only floating-point tensors are cast.

    Args:
        rule: The caller's rule.
        entry: The argument of the rule.
        tensor: The model's tensor.
        file_dtype: The dtype of its values in the source.
        is_cast: Whether the caller cast a tensor on meta, which then keeps its dtype.

    Raises:
        PlacementError: If the rule does not give a floating-point dtype.
    """
    default = file_dtype if tensor.is_meta and not is_cast else tensor.dtype
    floating = file_dtype.is_floating_point and tensor.dtype.is_floating_point
    if rule is None or not floating:
        return default if floating or not is_cast else file_dtype
    asked: object = rule(entry) if callable(rule) else rule
    if asked is None:
        return default
    if asked == MODEL:
        return tensor.dtype
    made = dtype_named(asked) if isinstance(asked, str) else asked
    if not isinstance(made, torch.dtype) or not made.is_floating_point:
        what = "dtype= must give a floating-point dtype"
        raise PlacementError(what, entry=entry.key, found=repr(asked))
    return made


def stored_dtype(rule: DtypeRule, entry: TensorEntry, path: str) -> torch.dtype:
    """Return the dtype that `rule` gives a tensor of the file at `path`, without a model.

    Raises:
        PlacementError: If torch cannot cast it, or the rule does not give a floating-point dtype.
    """
    stored = dtype_of(entry, path)
    made = target_dtype(rule, entry, torch.empty(0, dtype=stored, device="meta"), stored)
    if made != stored and not can_cast(stored, made):
        raise PlacementError(
            "torch cannot cast between these dtypes",
            file=path,
            entry=entry.key,
            expected=made,
            found=stored,
            hint=Hint(
                "Pass ", Argument("dtype", "a callable that returns None for this entry"), "."
            ),
        )
    return made


@cache
def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch can cast values of a dtype to another one."""
    # torch does not have a function for this. Packed 4-bit floats cannot be cast, for example.
    try:
        one = torch.zeros(16, dtype=torch.uint8, device="cpu")[: source.itemsize].view(source)
        torch.empty(1, dtype=target, device="cpu").copy_(one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def dtype_named(name: str) -> torch.dtype | None:
    """Return torch's dtype of a name, such as ``"bfloat16"`` or ``"bf16"``, or None."""
    name = _SHORT.get(name, name).removeprefix("torch.")
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def apply_device_rule(
    rule: DeviceRule, seen: TensorEntry, names: Iterable[str]
) -> torch.device | str | int | None:
    """Return the first answer of a device rule for the names of a tensor."""
    if not callable(rule):
        return rule
    for name in dict.fromkeys([seen.key, *names]):
        answer = rule(seen._replace(key=name))
        if answer is not None:
            return answer
    return None


def is_deferred(asked: object) -> bool:
    """Return whether a device rule leaves a tensor for a later load."""
    return isinstance(asked, (str, torch.device)) and str(asked).partition(":")[0] == "meta"


def target_device(
    asked: torch.device | str | int | None, key: str, tensor: torch.Tensor, *, present: bool
) -> torch.device:
    """Return the device that a tensor goes to, with the default without a rule.

    Raises:
        PlacementError: If it is not a device of this machine.
    """
    if asked is not None:
        return usable_device(asked, key, present=present)
    if is_dtensor(tensor):
        return default_device(tensor)
    return torch.device("cpu") if tensor.is_meta else tensor.device


def check_on_disk(
    options: Options, group: Group, seen: TensorEntry, file_dtype: torch.dtype, *, is_cast: bool
) -> None:
    """Check that a tensor can stay on disk: mapped as it is.

    Raises:
        PlacementError: If something else that the caller wants takes memory for it.
    """
    blank = torch.empty(0, dtype=group.tensor.dtype, device="meta")
    dtype = target_dtype(options.dtype, seen, blank, file_dtype, is_cast=is_cast)
    is_split = len(seen.chunks) > 1 or any(chunk.stride for chunk in seen.chunks)
    reasons = {
        f" and be cast to {dtype}": dtype != file_dtype,
        ", where it is deflated": "deflated" in seen.encoding,
        ", where it is in several places": is_split,
        " and be copied": options.mode == "copy",
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise PlacementError(
                f"cannot stay on disk{reason}",
                entry=group.fqn,
                hint=Hint(
                    "Pass another device for it or another ",
                    Argument("mode"),
                    ", or convert the file first.",
                ),
            )


def check_rule(rule: object, names: Collection[str], *, present: bool) -> None:
    """Let a rule of `remap` check itself once, before the first tensor.

    Raises:
        PlacementError: If it names something that does not exist.
    """
    check = getattr(rule, "check", None)
    if callable(check):
        check(names, present=present)


def entry_like(key: str, group: Group) -> TensorEntry:
    """Describe a tensor that no file contains, for a device rule."""
    tensor, shape = group.tensor, shape_of(group.tensor)
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return TensorEntry(
        key=key,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        stride=tuple(tensor.stride()) if is_strided else row_major(shape),
        nbytes=math.prod(shape) * tensor.itemsize,
        location=str(tensor.device),
        storage="",
        chunks=(),
    )


def renamed_key(rename: Rename, key: str) -> str | None:
    """Return what a rename makes of one key: its name, or None to drop it."""
    return rename.get(key, key) if isinstance(rename, Mapping) else rename(key)


def rename_keys(keys: Iterable[str], rename: Rename | None, path: str) -> dict[str, str]:
    """Return name in the checkpoint -> name in the model, without keys that `rename` drops.

    Raises:
        MismatchError: If two keys get one name.
    """
    names = apply_rename(keys, rename)
    keys_of: dict[str, str] = {}
    for key, name in names.items():
        if name in keys_of:
            raise same_name_error(name, keys_of[name], key, path)
        keys_of[name] = key
    return names


def apply_rename(keys: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Return the same, but let several keys have one name in the model."""
    if rename is None:
        return {key: key for key in keys}
    names: dict[str, str] = {}
    for key in keys:
        try:
            name = renamed_key(rename, key)
        except Exception as error:
            note(error, f"rename was called with {key!r}")
            raise
        if name is None:
            continue
        if not isinstance(name, str):
            raise TypeError(f"rename({key!r}) returned {name!r}, which is neither str nor None")
        names[key] = name
    return names


def check_rename(rename: Rename | None, keys: Collection[str], path: str) -> None:
    """Refuse a rename with a name, a prefix or a rule that matches no key of the source.

    Raises:
        MismatchError: If there is one. The caller would get the old names without an error.
    """
    find_idle = getattr(rename, "find_idle", None)  # a rename of torchlift.remap
    idle = find_idle(keys) if find_idle is not None and keys else None
    if idle is not None:
        first = {key.partition(".")[0] for key in keys}
        raise MismatchError(
            f"rename {idle!r} matches no key",
            file=path,
            expected="at least one key that it changes or drops",
            found=f"keys that begin with {clipped_list(map(repr, sorted(first)))}",
            hint="Correct it, or leave it out.",
        )
    for key in rename if isinstance(rename, Mapping) else ():
        if key not in keys:
            raise MismatchError(
                "rename has a key that the checkpoint lacks",
                file=path,
                entry=key,
                hint=did_you_mean(key, keys) or "Look at the keys with torchlift inspect.",
            )


def same_name_error(name: str, first: str, second: str, path: str) -> MismatchError:
    """Return the error for two keys that get one name."""
    return MismatchError(
        f"rename gives two keys one name, {name!r}",
        file=path,
        entry=first,
        found=second,
        hint="Return None for the key to drop.",
    )

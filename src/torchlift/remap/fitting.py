"""`fit`: distribute the layers of a model over devices, within a memory budget for each.

It works on meta tensors and on indices: it reads no weights and uses no device. It
lists the tensors with their sizes, and finds which must share a device (`_group`). Then it fills
one device after another (`_fill`), and makes the map (`_make_map`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._model.devices import Device, checked_device, spelled_device
from torchlift._model.names import Names
from torchlift._model.slots import ModuleTree, is_lazy
from torchlift._model.torch_private import storage_key
from torchlift._plan.names import rewrite_entries
from torchlift._plan.rules import DtypeRule, Rename, entry_like, stored_dtype, target_dtype
from torchlift._sources.opening import checkpoint
from torchlift._system.text import Facts, Summary, clipped_list, count_of, human, parse_size
from torchlift.errors import Argument, Hint, PlacementError, did_you_mean
from torchlift.formats.index import allowed
from torchlift.remap.maps import ByKey, ancestors, is_accelerator, prefixes

_Limits = Mapping[str, "int | None"]


class Fit(Summary, ByKey[str]):
    """A `by_key` map made by `fit`, with its sizes. Printing it shows a table.

    Attributes:
        budgets: Device -> its budget in bytes, in the order of filling. None: unlimited.
        used: Device -> bytes of the tensors on it, after casting.
        reserved: Device -> bytes kept free for the largest layer that is stored elsewhere.
        main: The accelerator that runs the layers stored in RAM or on disk. None if no
            accelerator has room for the largest of these layers.
        dtypes: Dtype after casting -> number of its tensors, most frequent first.
    """

    budgets: dict[str, int | None]
    used: dict[str, int]
    reserved: dict[str, int]
    main: str | None
    dtypes: dict[torch.dtype, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, after casting."""
        return sum(self.used.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, as ``torchlift plan --json`` prints it."""
        return {
            "tensors": sum(self.dtypes.values()),
            "nbytes": self.nbytes,
            "dtypes": {str(dtype)[6:]: count for dtype, count in self.dtypes.items()},
            "devices": {
                device: {
                    "used": self.used[device],
                    "budget": budget,
                    "reserved": self.reserved.get(device, 0),
                }
                for device, budget in self.budgets.items()
            },
            "main_device": self.main,
            "device_map": dict(self),
        }

    # The call that makes it, as for every other rule.
    __repr__ = ByKey.__repr__

    def _summary(self) -> tuple[str, Facts]:
        facts: Facts = []
        for device, budget in self.budgets.items():
            limit = "" if budget is None else f" of {human(budget)}"
            reserved = self.reserved.get(device, 0)
            room = f", {human(reserved)} kept free for the largest layer" if reserved else ""
            facts.append((device, f"{human(self.used[device])}{limit}{room}"))
            if runs := _runs(prefix for prefix, where in self.items() if where == device):
                facts.append(("", f"  {clipped_list(runs, limit=8)}"))
        devices = count_of(len({*self.values()}), "device")
        return f"fit: {human(self.nbytes)} on {devices}", facts


def _runs(prefixes: Iterable[str]) -> list[str]:
    """Shorten a list of prefixes: ``layers.3 to layers.7`` for members of a numbered list."""
    runs: list[list[str]] = []
    for prefix in prefixes:
        stem, _, number = prefix.rpartition(".")
        if runs and number.isdecimal() and runs[-1][-1] == f"{stem}.{int(number) - 1}".lstrip("."):
            runs[-1][1:] = [prefix]
        else:
            runs.append([prefix])
    return [" to ".join(run) or "everything" for run in runs]


def fit(
    model_or_ckpt: nn.Module | Checkpoint | str | os.PathLike[str],
    budgets: Mapping[Device, str | int | None] | Mapping[str, str | int | None],
    no_split: Iterable[str | type[nn.Module]] = (),
    *,
    dtype: DtypeRule = None,
    rename: Rename | None = None,
) -> Fit:
    """Fill devices with modules in the order of execution, each up to its budget.

    None of the devices needs to exist, and nothing is allocated. Tensors that are tied or share
    memory stay together. A module's own tensors, members of numbered lists (``layers.0``) and
    modules named in ``_no_split_modules`` (transformers) are never split, unless a list member is
    larger than every budget. If something is kept on the host or on disk, room for the largest
    layer is left on the first accelerator, which runs it.

    Args:
        model_or_ckpt: A module, live or a skeleton, or a checkpoint or its path. Modules are
            placed in the order of registration, or in the order of the file. If the weights are in
            a container, pass ``torchlift.open(path, root=...)``.
        budgets: Device -> ``"20GiB"`` or bytes, filled in this order. None: unlimited. ``"disk"``
            takes the rest, and `torchlift.load` leaves it mapped. Or a `by_key` map, to count the
            bytes on each device.
        no_split: Modules to keep on one device: classes or their names, or dotted paths in which
            ``*`` stands for part of a name (``"model.layers.*"``).
        dtype: As for `torchlift.load`. Sizes are those after casting. Default: as they are.
        rename: As for `torchlift.load`, with a checkpoint.

    Returns:
        A `by_key` map with the sizes per device, for ``device=`` and for
        ``accelerate.dispatch_model``. Give accelerate ``"cpu"`` in place of ``"disk"``: mapped
        tensors stay mapped, and it writes no files of its own.

    Raises:
        PlacementError: If it does not fit. The error has the numbers of each device.
        PlacementError: If `no_split` matches nothing.
        ValueError: If a budget is not a size, or `rename` is given for a module.

    Example:
        >>> import torch, torchlift
        >>> from torchlift import remap
        >>> model = torchlift.skeleton(torch.nn.Transformer, 512, batch_first=True)
        >>> device_map = remap.fit(model, {"cuda:0": "100MiB", "cpu": "1GiB"})
        >>> device_map["encoder"], device_map.used["cuda:0"] < 100 * 2**20
        ('cuda:0', True)
    """
    path, model = None, None
    if isinstance(model_or_ckpt, nn.Module):
        if rename is not None:
            raise ValueError("rename= applies to a checkpoint only. Leave it out for a model")
        model = model_or_ckpt
        tensors = _of_model(model, dtype)
    else:
        with checkpoint(model_or_ckpt, None) as ckpt:
            path, tensors = ckpt.path, _of_checkpoint(ckpt, dtype, rename)
    names = [name for tensor in tensors for name in tensor.names]
    if isinstance(budgets, ByKey):
        budgets.check(names, present=False)
        on = {name: checked_device(budgets.at(name) or "cpu", name) for name in names}
        where = {name: spelled_device(device) for name, device in on.items()}
        return _make_map(tensors, where, dict.fromkeys(where.values()))
    limits = {
        spelled_device(checked_device(device, str(device))): None
        if size is None
        else parse_size(size)
        for device, size in budgets.items()
    }
    if not limits:
        raise ValueError("budgets: pass at least one device and its size")
    parts = _group(tensors, _find_whole(tensors, model, no_split, limits, path))
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[parts[tensor.names[0]]] += tensor.nbytes
    devices = _fill(sizes, limits)
    if len(devices) < len(sizes):
        raise _make_error(parts, sizes, devices, limits, path)
    main, reserved = next(filter(is_accelerator, limits), None), {}
    if main is not None and not all(map(is_accelerator, devices.values())):
        largest, limit = max(sizes.values()), limits[main]
        again = _fill(sizes, limits, {main: largest})
        if (limit is None or largest <= limit) and len(again) == len(sizes):
            devices, reserved = again, {main: largest}
        else:
            main = None  # the host runs what it keeps
    where = {name: devices[parts[name]] for name in names}
    return _make_map(tensors, where, limits, reserved, main)


# ---- the tensors and their sizes


class _Tensor(NamedTuple):
    """One tensor with all of its names.

    Attributes:
        names: Its names. Tied names, and keys with the same bytes, are one tensor.
        nbytes: Bytes after casting.
        dtype: Dtype after casting.
        storage: Identity of its storage. Tensors that share memory have the same.
    """

    names: tuple[str, ...]
    nbytes: int
    dtype: torch.dtype
    storage: object


def _of_model(model: nn.Module, dtype: DtypeRule) -> list[_Tensor]:
    """List the tensors of a module in the order of registration, under reported names."""
    tensors, tree = [], ModuleTree(model)
    reported = Names(tree).canonical
    for group in tree.groups:
        names = tuple(map(reported, group.names))
        tensor, becomes = group.tensor, group.tensor.dtype
        if is_lazy(tensor):
            continue
        if group.persistent:
            becomes = target_dtype(dtype, entry_like(names[0], group), tensor, becomes)
        # Some tensor subclasses have no storage.
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        storage = storage_key(tensor) if is_plain else id(tensor)
        nbytes = tensor.numel() * becomes.itemsize
        tensors.append(_Tensor(names, nbytes, becomes, storage))
    return tensors


def _of_checkpoint(ckpt: Checkpoint, dtype: DtypeRule, rename: Rename | None) -> list[_Tensor]:
    """List the tensors of a checkpoint in the order of the file."""
    made = rewrite_entries(ckpt._index.entries, rename, ckpt.path)
    same: dict[object, list[str]] = {}
    for name in _in_order(made):
        entry = made[name].entry
        # Two keys with the same bytes, shape and strides are one tensor.
        spot = (entry.storage, entry.chunks[:1], entry.shape, entry.stride, entry.dtype)
        same.setdefault(spot if entry.chunks else name, []).append(name)
    tensors = []
    for names in same.values():
        entry = made[names[0]].entry
        becomes = stored_dtype(dtype, entry._replace(key=names[0]), ckpt.path)
        nbytes = entry.nbytes * becomes.itemsize // entry.itemsize
        # A tensor that is assembled from chunks gets memory of its own.
        alone = entry.needs_assembly or not entry.chunks or not entry.storage
        tensors.append(_Tensor(tuple(names), nbytes, becomes, names[0] if alone else entry.storage))
    return tensors


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort the members of numbered lists by number. All other names keep the order of the file.

    A safetensors file is in alphabetical order: layer 10 comes before layer 2.
    """
    seen: dict[str, int] = {}

    def rank(name: str) -> Iterator[tuple[int, int]]:
        at = ""
        for segment in name.split(".", 64):
            parent, at = at, f"{at}.{segment}" if at else segment
            # A list is placed where its first member is. Every other name, where it occurs first.
            first = seen.setdefault(f"{parent}.#" if segment.isdecimal() else at, len(seen))
            yield first, int(segment[:18]) if segment.isdecimal() else 0

    return sorted(names, key={name: tuple(rank(name)) for name in names}.__getitem__)


# ---- what must share a device


def _group(tensors: Iterable[_Tensor], whole: Collection[str]) -> dict[str, str]:
    """Return name -> its part, which is named by the path of its first module.

    A part is one module, or several: those below a path that is not split, and those that share
    memory.
    """
    leaders: dict[str, str] = {}  # module -> an earlier module that shares its device, or itself

    def find_leader(module: str) -> str:
        while leaders.setdefault(module, module) != module:
            module = leaders[module]
        return module

    def find_module(name: str) -> str:
        path = name.rpartition(".")[0]
        # The final dot marks a module's own tensors, without those of its submodules.
        return next((p for p in ancestors(path) if p in whole), f"{path}.")

    first: dict[object, str] = {}  # storage -> a module with a tensor in it
    modules = {name: find_module(name) for tensor in tensors for name in tensor.names}
    for tensor in tensors:
        for module in map(modules.__getitem__, tensor.names):
            leaders[find_leader(module)] = find_leader(first.setdefault(tensor.storage, module))
    return {name: find_leader(module) for name, module in modules.items()}


def _find_whole(
    tensors: Iterable[_Tensor],
    model: nn.Module | None,
    no_split: Iterable[str | type[nn.Module]],
    limits: _Limits,
    file: str | None,
) -> set[str]:
    """Return the paths that stay on one device.

    These are the paths of `no_split`. Members of numbered lists, and the modules that a model names
    in ``_no_split_modules``, are added if they are not larger than every budget.

    Raises:
        PlacementError: If an item of `no_split` matches nothing.
    """
    kinds: dict[str, set[str]] = {}  # path -> names of the classes of its module and its wrappers
    blocks: set[str] = set()
    if model is not None:
        tree = ModuleTree(model)
        reported = Names(tree).canonical
        for prefix, module in tree.paths:
            path = reported(prefix).removesuffix(".")
            kinds.setdefault(path, set()).update(kind.__name__ for kind in type(module).__mro__)
            blocks.update(getattr(module, "_no_split_modules", None) or ())
    sizes: Counter[str] = Counter()  # path -> bytes below it
    for tensor in tensors:
        for path in prefixes(name.rpartition(".")[0] for name in tensor.names) - {""}:
            sizes[path] += tensor.nbytes
    room = max(float("inf") if size is None else size for size in limits.values())
    whole = {
        path
        for path, size in sizes.items()
        if (path.rpartition(".")[2].isdecimal() or kinds.get(path, set()) & blocks) and size <= room
    }
    for asked in (no_split,) if isinstance(no_split, (str, type)) else no_split:
        text = asked if isinstance(asked, str) else asked.__name__
        found = {path for path, names in kinds.items() if text in names}
        found |= allowed(sizes, [text])
        if not found:
            raise PlacementError(
                "no_split matches no class and no path of the model",
                file=file,
                entry=text,
                hint=did_you_mean(text, {*sizes}.union(*kinds.values())),
            )
        whole |= found
    return whole


# ---- filling


def _fill(
    sizes: Mapping[str, int], limits: _Limits, reserved: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Return the device of each part, until one does not fit.

    A part goes to the first device, from the last one used on, that has room for it.
    """
    devices = iter(limits.items())
    device, room = "", -1.0
    where: dict[str, str] = {}
    for part, nbytes in sizes.items():
        while nbytes > room:
            device, limit = next(devices, ("", None))
            if not device:
                return where
            room = float("inf") if limit is None else limit - (reserved or {}).get(device, 0)
        room -= nbytes
        where[part] = device
    return where


def _make_map(
    tensors: Sequence[_Tensor],
    where: Mapping[str, str],
    limits: _Limits,
    reserved: dict[str, int] | None = None,
    main: str | None = None,
) -> Fit:
    """Make the map and its sizes from the device of every name."""
    below: dict[str, str | None] = {}  # prefix -> the device of all names below it, if they agree
    for name, device in where.items():
        for prefix in ancestors(name):
            if below.setdefault(prefix, device) != device:
                below[prefix] = None
    result = Fit()
    result.budgets, result.reserved, result.main = dict(limits), reserved or {}, main
    result.used = dict.fromkeys(limits, 0)
    result.dtypes = dict(Counter(tensor.dtype for tensor in tensors).most_common())
    # In the order of the tensors, so that the map reads in the order of execution.
    for tensor in tensors:
        result.used[where[tensor.names[0]]] += tensor.nbytes
        for name in tensor.names:
            prefix = next((one for one in ancestors(name) if below[one] is not None), name)
            result[prefix] = where[name]
    return result


def _make_error(
    parts: Mapping[str, str],
    sizes: Mapping[str, int],
    where: Mapping[str, str],
    limits: _Limits,
    file: str | None,
) -> PlacementError:
    used = dict.fromkeys(limits, 0)
    for part, device in where.items():
        used[device] += sizes[part]
    total = sum(sizes.values())
    first = next(part for part in sizes if part not in where)
    own = next(name for name, part in parts.items() if part == first)
    shown = (f"{device} {human(used[device])} of {human(limits[device] or 0)}" for device in limits)
    return PlacementError(
        f"does not fit: the tensors take {human(total)}, the budgets are "
        f"{human(sum(size or 0 for size in limits.values()))}. Used: {', '.join(shown)}. "
        f"{human(total - sum(used.values()))} remain, and the next layer takes "
        f"{human(sizes[first])}",
        file=file,
        entry=first.removesuffix(".")
        or next(name for name, part in parts.items() if part == first),
        hint=Hint(
            "Raise a budget, pass a smaller ",
            Argument("dtype"),
            ", or add ",
            Argument("budgets", '{..., "disk": None}', ("disk",)),
            " to leave the remaining layers on disk.",
        ),
    )

"""`fit`: distribute the layers of a model over devices, within a memory budget for each.

It works on meta tensors and on indices: it reads no weights and uses no device. The steps are: list
the tensors with their sizes (`Inventory`), group those that must share a device (`_clusters`), fill
one device after another (`_fill`), and make the map (`make_map`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._model.devices import Device, checked_device, spelled_device
from torchlift._model.slots import collect, is_lazy, walk
from torchlift._model.torch_private import storage_key
from torchlift._plan.names import rewrite_entries
from torchlift._plan.rules import DtypeRule, Rename, entry_like, stored_dtype, target_dtype
from torchlift._sources.opening import checkpoint
from torchlift._system.text import Facts, Summary, count_of, human, parse_size
from torchlift.errors import Argument, Hint, PlacementError, did_you_mean
from torchlift.remap.maps import (
    ByKey,
    ancestors,
    is_accelerator,
    prefixes,
)

_Limits = Mapping[str, "int | None"]


class Fit(Summary, ByKey[str]):
    """A `by_key` map made by `fit`, with its sizes. Printing it shows a table.

    Attributes:
        budgets: Device -> its budget in bytes, in the order of filling. None: unlimited.
        used: Device -> bytes of the tensors on it, after casting.
        reserved: Device -> bytes kept free for the largest layer that is stored elsewhere.
        contents: Device -> prefix of the map -> bytes below it.
        main: The accelerator that runs the layers stored in RAM or on disk. None if there is no
            accelerator with room for the largest of these layers.
        tensors: Device -> number of tensors on it.
        dtypes: Dtype after casting -> number of its tensors, most frequent first.
    """

    budgets: dict[str, int | None]
    used: dict[str, int]
    reserved: dict[str, int]
    contents: dict[str, dict[str, int]]
    main: str | None
    tensors: dict[str, int]
    dtypes: dict[torch.dtype, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, after casting."""
        return sum(self.used.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, as ``torchlift plan --json`` prints it."""
        return {
            "tensors": sum(self.tensors.values()),
            "nbytes": self.nbytes,
            "dtypes": {str(dtype)[6:]: count for dtype, count in self.dtypes.items()},
            "devices": {
                device: {
                    "tensors": self.tensors[device],
                    "used": self.used[device],
                    "budget": budget,
                    "reserved": self.reserved.get(device, 0),
                    "contents": self.contents[device],
                }
                for device, budget in self.budgets.items()
            },
            "main_device": self.main,
            "device_map": dict(self),
        }

    # The call that makes it, as for every other rule.
    __repr__ = ByKey.__repr__

    def _summary(self) -> tuple[str, Facts]:
        devices = count_of(sum(map(bool, self.contents.values())), "device")
        facts: Facts = []
        for device, budget in self.budgets.items():
            limit = "" if budget is None else f" of {human(budget)}"
            reserved = self.reserved.get(device, 0)
            room = f", {human(reserved)} kept free for the largest layer" if reserved else ""
            facts.append((device, f"{human(self.used[device])}{limit}{room}"))
            runs = _runs(self.contents[device])
            if runs:
                more = f", and {len(runs) - 8} more" if len(runs) > 8 else ""
                facts.append(("", f"  {', '.join(runs[:8])}{more}"))
        return f"fit: {human(self.nbytes)} on {devices}", facts


def _runs(prefixes: Iterable[str]) -> list[str]:
    """Shorten a list of prefixes: ``layers.3 to layers.7`` for members of a numbered list."""
    runs: list[tuple[str, str]] = []
    for prefix in prefixes:
        stem, _, number = prefix.rpartition(".")
        if runs and number.isdecimal() and runs[-1][1] == f"{stem}.{int(number) - 1}".lstrip("."):
            runs[-1] = (runs[-1][0], prefix)
        else:
            runs.append((prefix, prefix))
    return [
        first or "everything" if first == last else f"{first} to {last}" for first, last in runs
    ]


def fit(
    model_or_ckpt: nn.Module | Checkpoint | str | os.PathLike[str],
    budgets: Mapping[Device, str | int | None] | Mapping[str, str | int | None],
    no_split: Iterable[str | type[nn.Module]] = (),
    *,
    root: str | None = None,
    dtype: DtypeRule = None,
    rename: Rename | None = None,
    largest_layer: bool = True,
) -> Fit:
    """Fill devices with modules in the order of execution, each up to its budget.

    None of the devices needs to exist, and nothing is allocated. Tensors that are tied or share
    memory stay together. A module's own tensors, members of numbered lists (``layers.0``) and
    modules named in ``_no_split_modules`` (transformers) are never split, unless a list member is
    larger than every budget.

    Args:
        model_or_ckpt: A module, live or a skeleton, or a checkpoint or its path. Modules are
            placed in the order of registration, or in the order of the file.
        budgets: Device -> ``"20GiB"`` or bytes, filled in this order. None: unlimited. ``"disk"``
            takes the rest, and `torchlift.load` leaves it mapped. Or a `by_key` map, to count the
            bytes on each device.
        no_split: Modules to keep on one device: classes or their names, or dotted paths in which
            ``*`` stands for part of a name (``"model.layers.*"``).
        root: The container of the checkpoint to fit, so that the map has the model's names.
        dtype: As for `torchlift.load`. Sizes are those after casting. Default: as they are.
        rename: As for `torchlift.load`, with a checkpoint.
        largest_layer: Leave room on the first accelerator for the largest layer if something is
            kept on the host or on disk, because it runs there. ``main`` is None without that room.

    Returns:
        A `by_key` map with the sizes per device, for ``device=`` and for
        ``accelerate.dispatch_model``. Give accelerate ``"cpu"`` in place of ``"disk"``: mapped
        tensors stay mapped, and it writes no files of its own.

    Raises:
        PlacementError: If it does not fit. The error has the numbers of each device.
        PlacementError: If `no_split` matches nothing.
        FormatError: If `root` does not exist.
        ValueError: If a budget is not a size, or `root` or `rename` is given for a module.

    Example:
        >>> import torch, torchlift
        >>> from torchlift import remap
        >>> model = torchlift.skeleton(torch.nn.Transformer, 512, batch_first=True)
        >>> device_map = remap.fit(model, {"cuda:0": "100MiB", "cpu": "1GiB"})
        >>> device_map["encoder"], device_map.used["cuda:0"] < 100 * 2**20
        ('cuda:0', True)
    """
    inventory = list_tensors(model_or_ckpt, root, dtype, rename)
    if isinstance(budgets, ByKey):
        budgets.check(inventory.names, present=False)
        given = {name: spelled_device(budgets.at(name) or "cpu") for name in inventory.names}
        return make_map(inventory, given, dict.fromkeys(given.values()))
    limits = parse_budgets(budgets)
    clusters = _clusters(inventory, _whole_paths(inventory, model_or_ckpt, no_split, limits))
    main = next(filter(is_accelerator, limits), None)
    reserved: dict[str, int] = {}
    where = _fill(clusters, limits, reserved)
    if len(where) < len(clusters):
        raise _make_error(inventory, clusters, where, limits)
    if largest_layer and main is not None and not all(map(is_accelerator, where)):
        largest, limit = max(cluster.layer for cluster in clusters), limits[main]
        again = _fill(clusters, limits, {main: largest})
        if (limit is None or largest <= limit) and len(again) == len(clusters):
            where, reserved = again, {main: largest}
        else:
            main = None  # the host runs what it keeps
    devices = {
        name: device
        for cluster, device in zip(clusters, where, strict=True)
        for item in cluster.items
        for name in item.names
    }
    return make_map(inventory, devices, limits, reserved=reserved, main=main)


def parse_budgets(
    budgets: Mapping[Device, str | int | None] | Mapping[str, str | int | None],
) -> _Limits:
    """Parse the budgets into device -> bytes, or None for no limit.

    Raises:
        PlacementError: If a key is not a device, is ``meta``, or occurs twice.
        ValueError: If a size is not a size, or no device is given.
    """
    limits: dict[str, int | None] = {}
    for device, size in budgets.items():
        name = spelled_device(checked_device(device, str(device)))
        if name in limits or name == "meta":
            reason = "occurs twice" if name in limits else "cannot store values"
            raise PlacementError(f"budgets: the device {reason}", entry=name)
        try:
            limits[name] = None if size is None else parse_size(size)
        except ValueError as error:
            raise ValueError(f"budgets[{name!r}]: {error}") from error
    if not limits:
        raise ValueError("budgets: pass at least one device and its size")
    return limits


def make_map(
    inventory: Inventory,
    where: Mapping[str, str],
    limits: _Limits,
    *,
    reserved: Mapping[str, int] | None = None,
    main: str | None = None,
) -> Fit:
    """Make the map and its sizes from the device of every name."""
    below: dict[str, str | None] = {}  # prefix -> the device of all names below it, if they agree
    for name, device in where.items():
        for prefix in ancestors(name):
            if below.setdefault(prefix, device) != device:
                below[prefix] = None
    result = Fit()
    # In the inventory's order, so that the map reads in the order of execution.
    for name in inventory.names:
        shortest = next((prefix for prefix in ancestors(name) if below[prefix] is not None), name)
        result.setdefault(shortest, where[name])
    result.budgets = dict(limits)
    result.reserved = dict(reserved or {})
    result.main = main
    result.contents = {device: {} for device in limits}
    result.tensors = dict.fromkeys(limits, 0)
    result.dtypes = dict(Counter(item.dtype for item in inventory.items).most_common())
    for item in inventory.items:
        prefix = next(p for p in reversed(ancestors(item.names[0])) if p in result)
        result.tensors[result[prefix]] += 1
        contents = result.contents[result[prefix]]
        contents[prefix] = contents.get(prefix, 0) + item.nbytes
    result.used = {device: sum(sizes.values()) for device, sizes in result.contents.items()}
    return result


# ---- the tensors and their sizes


@dataclass(slots=True)
class Item:
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


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors of a model or checkpoint.

    Attributes:
        items: The tensors in order of execution, as far as registration or names show it.
        owners: Paths of the modules with tensors of their own, in that order.
        kinds: Path -> class of the module. Empty for a checkpoint.
        path: Path of the checkpoint, or None.
    """

    items: Sequence[Item]
    owners: Sequence[str]
    kinds: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    path: str | None = None

    @property
    def names(self) -> list[str]:
        """All names of all tensors."""
        return [name for item in self.items for name in item.names]

    @property
    def paths(self) -> set[str]:
        """Paths of all modules that contain tensors."""
        return prefixes(self.owners) - {""}


def list_tensors(
    source: nn.Module | Checkpoint | str | os.PathLike[str],
    root: str | None,
    dtype: DtypeRule,
    rename: Rename | None,
) -> Inventory:
    """List the tensors of a module or a checkpoint with their sizes.

    Args:
        source: A module, live or on meta, a checkpoint or its path.
        root: See `torchlift.load`. For a checkpoint only.
        dtype: See `torchlift.load`. None: sizes without a cast.
        rename: See `torchlift.load`. For a checkpoint only.
    """
    if isinstance(source, nn.Module):
        for name, value in {"root": root, "rename": rename}.items():
            if value is not None:
                raise ValueError(f"{name}= applies to a checkpoint only. Leave it out for a model")
        return _of_model(source, dtype)
    with checkpoint(source, root) as ckpt:
        return _of_checkpoint(ckpt, dtype, rename)


def _of_model(model: nn.Module, dtype: DtypeRule) -> Inventory:
    items = []
    for group in collect(model):
        tensor, becomes = group.tensor, group.tensor.dtype
        if is_lazy(tensor):
            continue
        if group.persistent:
            becomes = target_dtype(dtype, entry_like(group.fqn, group), tensor, becomes)
        # Some tensor subclasses have no storage.
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        storage = storage_key(tensor) if is_plain else id(tensor)
        items.append(Item(group.names, tensor.numel() * becomes.itemsize, becomes, storage))
    kinds = {prefix.removesuffix("."): type(module) for prefix, module in walk(model)}
    holding = {name.rpartition(".")[0] for item in items for name in item.names}
    return Inventory(items, [path for path in kinds if path in holding], kinds)


def _of_checkpoint(ckpt: Checkpoint, dtype: DtypeRule, rename: Rename | None) -> Inventory:
    entries = ckpt._index.entries
    made = rewrite_entries(entries, rename, ckpt.path)
    same: dict[object, list[str]] = {}
    for name, (entry, _) in made.items():
        # Two keys with the same bytes, shape and strides are one tensor.
        spot = (entry.storage, entry.chunks[:1], entry.shape, entry.stride, entry.dtype)
        same.setdefault(spot if entry.chunks else name, []).append(name)
    items = []
    for names in same.values():
        entry = made[names[0]].entry
        becomes = stored_dtype(dtype, entry._replace(key=names[0]), ckpt.path)
        nbytes = entry.nbytes * becomes.itemsize // entry.itemsize
        # A tensor that is assembled from chunks gets memory of its own.
        alone = entry.needs_assembly or not entry.chunks or not entry.storage
        items.append(Item(tuple(names), nbytes, becomes, names[0] if alone else entry.storage))
    place = {name: at for at, name in enumerate(_in_order(made))}
    items.sort(key=lambda item: min(place[name] for name in item.names))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in place)
    return Inventory(items, list(owners), path=ckpt.path)


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


@dataclass(slots=True)
class _Cluster:
    """Tensors that must share a device.

    Attributes:
        units: Paths of its modules.
        items: Its tensors.
        nbytes: Bytes of all its tensors.
        layer: Bytes of its largest module.
    """

    units: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    nbytes: int = 0
    layer: int = 0


def _clusters(inventory: Inventory, whole: Collection[str]) -> list[_Cluster]:
    """Group tensors by module, by the paths that are not split, and by ties and shared memory."""
    unit_of = {
        # The final dot marks a module's own tensors, without those of its submodules.
        path: next((p for p in ancestors(path) if p in whole), f"{path}.")
        for path in inventory.owners
    }
    sizes = dict.fromkeys(unit_of.values(), 0)
    together = {unit: [unit] for unit in sizes}
    first: dict[object, str] = {}  # storage -> a unit with a tensor in it
    for item in inventory.items:
        for unit in {unit_of[name.rpartition(".")[0]] for name in item.names}:
            sizes[unit] += item.nbytes
            few, many = together[unit], together[first.setdefault(item.storage, unit)]
            if few is not many:
                # The smaller list joins the larger one: else a file of many views is quadratic.
                few, many = sorted((few, many), key=len)
                many += few
                together.update(dict.fromkeys(few, many))
    clusters: dict[int, _Cluster] = {}
    for unit, size in sizes.items():
        cluster = clusters.setdefault(id(together[unit]), _Cluster())
        cluster.units.append(unit.removesuffix("."))
        cluster.layer = max(cluster.layer, size)
    for item in inventory.items:
        cluster = clusters[id(together[unit_of[item.names[0].rpartition(".")[0]]])]
        cluster.items.append(item)
        cluster.nbytes += item.nbytes
    return list(clusters.values())


def _hard_paths(inventory: Inventory, no_split: Iterable[str | type[nn.Module]]) -> set[str]:
    """Return the paths that match `no_split`.

    Raises:
        PlacementError: If an item of `no_split` matches nothing.
    """
    if isinstance(no_split, (str, type)):
        no_split = (no_split,)
    found: set[str] = set()
    for asked in no_split:
        if isinstance(asked, type):
            paths = {path for path, kind in inventory.kinds.items() if issubclass(kind, asked)}
        else:
            paths = {path for path, kind in inventory.kinds.items() if kind.__name__ == asked}
            paths |= {path for path in inventory.paths if _matches(path, asked)}
        if not paths:
            text = asked.__name__ if isinstance(asked, type) else asked
            known = {kind.__name__ for kind in inventory.kinds.values()} | inventory.paths
            raise PlacementError(
                "no_split matches no class and no path of the model",
                file=inventory.path,
                entry=text,
                hint=did_you_mean(text, known) or None,
            )
        found |= paths
    return found


def _matches(path: str, pattern: str) -> bool:
    segments, patterns = path.split("."), pattern.split(".")
    return len(segments) == len(patterns) and all(map(fnmatchcase, segments, patterns))


def _whole_paths(
    inventory: Inventory,
    source: object,
    no_split: Iterable[str | type[nn.Module]],
    limits: _Limits,
) -> set[str]:
    """Return the paths that stay on one device.

    These are the paths of `no_split`. Members of numbered lists, and the modules that a model names
    in ``_no_split_modules``, are added if they are not larger than every budget.
    """
    modules = source.modules() if isinstance(source, nn.Module) else ()
    named = {name for m in modules for name in getattr(m, "_no_split_modules", None) or ()}
    blocks = {path for path, kind in inventory.kinds.items() if kind.__name__ in named}
    blocks |= {path for path in inventory.paths if path.rpartition(".")[2].isdecimal()}
    sizes = dict.fromkeys(blocks, 0)
    for item in inventory.items:
        for path in prefixes(item.names) & blocks:
            sizes[path] += item.nbytes
    room = max(float("inf") if size is None else size for size in limits.values())
    fitting = {path for path, size in sizes.items() if size <= room}
    return _hard_paths(inventory, no_split) | fitting


# ---- filling


def _fill(clusters: Iterable[_Cluster], limits: _Limits, reserved: Mapping[str, int]) -> list[str]:
    """Return the device of each cluster, until one does not fit.

    A cluster goes to the first device, from the last one used on, that has room for it.
    """
    devices = iter(limits.items())
    device, room = "", -1.0
    where: list[str] = []
    for cluster in clusters:
        while cluster.nbytes > room:
            device, limit = next(devices, ("", None))
            if not device:
                return where
            room = float("inf") if limit is None else limit - reserved.get(device, 0)
        room -= cluster.nbytes
        where.append(device)
    return where


def _make_error(
    inventory: Inventory,
    clusters: Sequence[_Cluster],
    where: Sequence[str],
    limits: _Limits,
) -> PlacementError:
    used = dict.fromkeys(limits, 0)
    for cluster, device in zip(clusters, where, strict=False):
        used[device] += cluster.nbytes
    left = sum(cluster.nbytes for cluster in clusters[len(where) :])
    first = clusters[len(where)]
    lines = []
    for device, limit in limits.items():
        lines.append(f"{device} {human(used[device])} of {human(limit or 0)}")
    tied = f" ({len(first.units)} tied modules)" if len(first.units) > 1 else ""
    return PlacementError(
        f"does not fit: the tensors take {human(left + sum(used.values()))}, the budgets are "
        f"{human(sum(size or 0 for size in limits.values()))}. Used: {', '.join(lines)}. "
        f"{human(left)} remain, and the next layer{tied} takes {human(first.nbytes)}",
        file=inventory.path,
        entry=first.units[0] or first.items[0].names[0],
        hint=Hint(
            "Raise a budget, pass a smaller ",
            Argument("dtype"),
            ", or add ",
            Argument("budgets", '{..., "disk": None}', ("disk",)),
            " to leave the remaining layers on disk.",
        ),
    )

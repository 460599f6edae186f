"""`fit`: modules in the order of execution into budgets of memory, one device after the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint
from torchlift._plan.match import Rename
from torchlift._plan.rules import DtypeRule
from torchlift._system import human, parse_size
from torchlift.errors import PlacementError
from torchlift.remap.devices import Device, checked, spelled
from torchlift.remap.filling import Arrangement, Limits, arrangements
from torchlift.remap.inventory import Inventory, Item, take
from torchlift.remap.maps import ByKey, ancestors
from torchlift.remap.units import cluster, hard_paths, soft_paths


class Fit(ByKey[str]):
    """A `by_key` map that `fit` made, and the numbers behind it. Printing it shows a table.

    Attributes:
        budgets: device -> bytes it may take, in the order of filling; None means any number.
        used: device -> bytes of tensors on it, after casting.
        reserved: device -> bytes kept free for the largest layer that is kept elsewhere.
        contents: device -> prefix of the map -> bytes below it.
        main: the accelerator on which layers that are kept on the host or on disk run; None where
            there is none, or none that could take the largest of them in.
    """

    budgets: dict[str, int | None]
    used: dict[str, int]
    reserved: dict[str, int]
    contents: dict[str, dict[str, int]]
    main: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, after casting."""
        return sum(self.used.values())

    def __str__(self) -> str:
        count = sum(map(bool, self.contents.values()))
        lines = [f"fit: {human(self.nbytes)} on {count} device{'' if count == 1 else 's'}"]
        for device, budget in self.budgets.items():
            limit = "" if budget is None else f" of {human(budget)}"
            kept = self.reserved.get(device, 0)
            room = f", {human(kept)} kept free for the largest layer" if kept else ""
            lines.append(f"  {device}: {human(self.used[device])}{limit}{room}")
            runs = _runs(self.contents[device])
            if runs:
                more = f", and {len(runs) - 8} more" if len(runs) > 8 else ""
                lines.append(f"    {', '.join(runs[:8])}{more}")
        return "\n".join(lines)


def _runs(parts: Iterable[str]) -> list[str]:
    """Prefixes for people: ``layers.3 to layers.7`` for the members of a numbered list."""
    runs: list[list[str]] = []
    for part in parts:
        stem, _, number = part.rpartition(".")
        if runs and number.isdecimal() and runs[-1][-1] == f"{stem}.{int(number) - 1}".lstrip("."):
            runs[-1].append(part)
        else:
            runs.append([part])
    ends = [(run[0] or "everything", run[-1]) for run in runs]
    return [
        first if len(run) == 1 else f"{first} to {last}"
        for run, (first, last) in zip(runs, ends, strict=True)
    ]


def fit(
    model_or_ckpt: nn.Module | Checkpoint | str | os.PathLike[str],
    budgets: Mapping[Device, str | int | None] | Mapping[str, str | int | None],
    no_split: Iterable[str | type[nn.Module]] = (),
    *,
    dtype: DtypeRule = None,
    rename: Rename | None = None,
    largest_layer: bool = True,
) -> Fit:
    """Fill devices with modules in the order of execution, each up to its budget.

    None of the devices needs to exist, and nothing is allocated. Tensors that are tied or share
    memory stay together and are counted once; the tensors that a module holds itself are never
    separated. The members of numbered lists (``layers.0``), and what a transformers model names in
    ``_no_split_modules``, stay whole as long as that does not take more devices. A device that has
    room for less than two layers is left out where that takes fewer devices, and so is the last one
    where what it holds fits into the gaps on those before it.

    Args:
        model_or_ckpt: a module, live or a skeleton; or a checkpoint, or its path. A module's order
            is that of registration; a checkpoint's is that of its file, numbered lists in order.
        budgets: device -> ``"20GiB"`` or bytes, filled in this order. ``"disk"`` is for what fits
            nowhere else: `torchlift.load` leaves it mapped from the file. None is any number.
        no_split: what must stay on one device: module classes or their names, or dotted paths in
            which ``*`` stands for part of a name (``"model.layers.*"``).
        dtype: as for `torchlift.load`; sizes are those after casting. None: as they are.
        rename: as for `torchlift.load`; for a checkpoint, so that the map has the model's names.
        largest_layer: when something is kept on the host or on disk beside an accelerator, leave
            room on the first accelerator for the largest of these layers, which runs there.

    Returns:
        A `by_key` map with the sizes per device, for ``device=`` and for `dispatch`.

    Raises:
        PlacementError: it does not fit, with numbers per device; or `no_split` names nothing.
        ValueError: a budget is no size.

    Example:
        >>> import torch, torchlift
        >>> from torchlift import remap
        >>> model = torchlift.skeleton(torch.nn.Transformer, 512, batch_first=True)
        >>> device_map = remap.fit(model, {"cuda:0": "100MiB", "cpu": "1GiB"})
        >>> device_map["encoder"], device_map.used["cuda:0"] < 100 * 2**20
        ('cuda:0', True)
    """
    limits = _limits(budgets)
    inventory = take(model_or_ckpt, dtype, rename)
    hard = hard_paths(inventory, no_split)
    soft = soft_paths(inventory, model_or_ckpt, _roomiest(limits))
    found = [
        *arrangements(cluster(inventory, hard, soft), limits, largest_layer),
        *arrangements(cluster(inventory, hard, ()), limits, largest_layer),
    ]
    # The first of the best: whole blocks are worth something (a residual then stays on its device),
    # but not a device.
    best = min(found, key=lambda item: (bool(item.left), item.devices))
    if best.left:
        raise _misfit(inventory, min(found, key=lambda item: item.nbytes_left), limits)
    return _result(inventory, best, limits)


def _limits(budgets: Mapping[Device, str | int | None] | Mapping[str, str | int | None]) -> Limits:
    limits: dict[str, int | None] = {}
    for device, size in budgets.items():
        name = spelled(checked(device, str(device)))
        if name in limits or torch.device("meta").type == name:
            reason = "is given twice" if name in limits else "holds no values"
            raise PlacementError(f"budgets: the device {reason}", entry=name)
        try:
            limits[name] = None if size is None else parse_size(size)
        except ValueError as error:
            raise ValueError(f"budgets[{name!r}]: {error}") from error
    if not limits:
        raise ValueError("budgets: give at least one device and its size")
    return limits


def _roomiest(limits: Limits) -> float:
    return max(float("inf") if size is None else size for size in limits.values())


def _misfit(inventory: Inventory, found: Arrangement, limits: Limits) -> PlacementError:
    left = found.nbytes_left
    total = left + sum(found.used.values())
    given = sum(size or 0 for size in limits.values())
    first = found.left[0]
    lines = []
    for device, limit in limits.items():
        kept = found.reserved.get(device, 0)
        room = f", {human(kept)} kept for the largest layer" if kept else ""
        lines.append(f"{device} {human(found.used.get(device, 0))} of {human(limit or 0)}{room}")
    tied = f", which {len(first.units)} ties keep together," if len(first.units) > 1 else ""
    return PlacementError(
        f"does not fit: {human(total)} in all, budgets of {human(given)}; "
        f"used {'; '.join(lines)}; "
        f"{human(left)} are left over, and the next to place{tied} takes {human(first.nbytes)}",
        file=inventory.path,
        entry=first.units[0] or first.items[0].names[0],
        hint='Raise a budget, give a smaller dtype=, or add "disk": None for what fits nowhere.',
    )


def _result(inventory: Inventory, found: Arrangement, limits: Limits) -> Fit:
    where = {
        name: device
        for together, device in zip(found.clusters, found.where, strict=True)
        for item in together.items
        for name in item.names
    }
    return placed(inventory, where, limits, reserved=found.reserved, main=found.main)


def placed(
    inventory: Inventory,
    where: Mapping[str, str],
    limits: Limits,
    *,
    reserved: Mapping[str, int] | None = None,
    main: str | None = None,
) -> Fit:
    """The map and its numbers, from the device of every name."""
    # In the inventory's order, so that the map reads in the order of execution.
    result = Fit(_compressed({name: where[name] for name in inventory.names}))
    result.budgets = dict(limits)
    result.reserved = dict(reserved or {})
    result.main = main
    result.contents = {device: {} for device in limits}
    for item in inventory.items:
        _count(result, item)
    result.used = {device: sum(parts.values()) for device, parts in result.contents.items()}
    return result


def _count(result: Fit, item: Item) -> None:
    prefix = next(p for p in reversed(ancestors(item.names[0])) if p in result)
    contents = result.contents[result[prefix]]
    contents[prefix] = contents.get(prefix, 0) + item.added


def _compressed(where: Mapping[str, str]) -> dict[str, str]:
    """The shortest prefixes that say the same."""
    below: dict[str, str | None] = {}
    for name, device in where.items():
        for prefix in ancestors(name):
            if below.setdefault(prefix, device) != device:
                below[prefix] = None
    result: dict[str, str] = {}
    for name, device in where.items():
        prefix = next((p for p in ancestors(name) if below[p] is not None), name)
        result.setdefault(prefix, device)
    return result

"""What stays on one device: whole modules, and modules that ties and shared memory connect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from torchlift.errors import PlacementError, did_you_mean
from torchlift.remap.inventory import Inventory, Item
from torchlift.remap.maps import ancestors


@dataclass(slots=True)
class Cluster:
    """Tensors that go to one device together.

    Attributes:
        units: paths of the modules in it.
        items: its tensors.
        nbytes: their bytes, shared memory counted once.
        layer: bytes of the largest of its modules by itself.
    """

    units: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    nbytes: int = 0
    layer: int = 0


def cluster(inventory: Inventory, hard: Collection[str], soft: Collection[str]) -> list[Cluster]:
    """Group the tensors: by module, by what must or may stay whole, by ties and shared memory.

    Args:
        inventory: the tensors.
        hard: paths that stay whole whatever it costs.
        soft: paths that stay whole; inside a hard one they change nothing.
    """
    unit_of = {path: _unit(path, hard, soft) for path in inventory.owners}
    sizes: dict[str, int] = dict.fromkeys(unit_of.values(), 0)
    joined = _Joined(sizes)
    by_storage: dict[object, str] = {}
    for item in inventory.items:
        units = {unit_of[name.rpartition(".")[0]] for name in item.names}
        for unit in units:
            sizes[unit] += item.nbytes
            joined.join(unit, by_storage.setdefault(item.storage, unit))
    clusters: dict[str, Cluster] = {}
    for unit, size in sizes.items():
        found = clusters.setdefault(joined.root(unit), Cluster())
        found.units.append(unit.removesuffix(_OWN))
        found.layer = max(found.layer, size)
    for item in inventory.items:
        found = clusters[joined.root(unit_of[item.names[0].rpartition(".")[0]])]
        found.items.append(item)
        found.nbytes += item.added
    return list(clusters.values())


#: Marks a module's own tensors, without those of its submodules, which have paths of their own.
_OWN = "."


def _unit(path: str, hard: Collection[str], soft: Collection[str]) -> str:
    above = ancestors(path)
    for kept in (hard, soft):
        whole = next((prefix for prefix in above if prefix in kept), None)
        if whole is not None:
            return whole
    return path + _OWN


class _Joined:
    """Disjoint sets of names; the first name of a set, in the order given, stands for it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._above = {name: name for name in names}
        self._rank = {name: at for at, name in enumerate(self._above)}

    def root(self, name: str) -> str:
        while self._above[name] != name:
            self._above[name] = name = self._above[self._above[name]]
        return name

    def join(self, one: str, two: str) -> None:
        first, second = sorted((self.root(one), self.root(two)), key=self._rank.__getitem__)
        self._above[second] = first


def hard_paths(inventory: Inventory, no_split: Iterable[str | type[nn.Module]]) -> set[str]:
    """The paths that `no_split` means.

    Raises:
        PlacementError: one of them means nothing.
    """
    if isinstance(no_split, (str, type)):
        no_split = (no_split,)
    found: set[str] = set()
    for wanted in no_split:
        paths = _meant(inventory, wanted)
        if not paths:
            text = wanted if isinstance(wanted, str) else wanted.__name__
            known = {kind.__name__ for kind in inventory.kinds.values()} | _paths(inventory)
            raise PlacementError(
                "no_split: no module has this class or path",
                file=inventory.path,
                entry=text,
                hint=did_you_mean(text, known) or None,
            )
        found |= paths
    return found


def _meant(inventory: Inventory, wanted: str | type[nn.Module]) -> set[str]:
    if isinstance(wanted, type):
        return {path for path, kind in inventory.kinds.items() if issubclass(kind, wanted)}
    of_class = {path for path, kind in inventory.kinds.items() if kind.__name__ == wanted}
    parts = wanted.split(".")
    return of_class | {path for path in _paths(inventory) if _matches(path.split("."), parts)}


def _matches(path: list[str], parts: list[str]) -> bool:
    return len(path) == len(parts) and all(map(fnmatchcase, path, parts))


def _paths(inventory: Inventory) -> set[str]:
    return {prefix for path in inventory.owners for prefix in ancestors(path) if prefix}


def soft_paths(inventory: Inventory, source: object, room: float) -> set[str]:
    """Paths that had better stay whole and fit into `room` bytes.

    Members of numbered lists, and what a model names in ``_no_split_modules`` (transformers).
    """
    named = set(_declared(source))
    wanted = {path for path, kind in inventory.kinds.items() if kind.__name__ in named}
    wanted |= {path for path in _paths(inventory) if path.rpartition(".")[2].isdecimal()}
    sizes = dict.fromkeys(wanted, 0)
    for item in inventory.items:
        for path in {prefix for name in item.names for prefix in ancestors(name)}:
            if path in sizes:
                sizes[path] += item.nbytes
    return {path for path, size in sizes.items() if size <= room}


def _declared(source: object) -> Iterator[str]:
    if isinstance(source, nn.Module):
        for module in source.modules():
            yield from getattr(module, "_no_split_modules", None) or ()

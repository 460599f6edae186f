"""What there is to place: the tensors of a model or a checkpoint, in order, with their sizes.

Works on meta tensors and on indices alike; no weight is read and no device is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint, dtype_of
from torchlift._model.slots import Group, collect, is_lazy, walk
from torchlift._plan.match import Rename, renamed
from torchlift._plan.rules import DtypeRule, entry_like, target_dtype


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor under all of its names.

    Attributes:
        names: the names; more than one where names are tied or the file has one tensor twice.
        nbytes: bytes of the tensor by itself, after casting.
        added: bytes that it adds to those before it: less than `nbytes` where views overlap.
        storage: what tensors have in common that share memory.
        dtype: what it becomes.
    """

    names: tuple[str, ...]
    nbytes: int
    added: int
    storage: object
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors of a model or checkpoint.

    Attributes:
        items: in the order of execution, as far as registration or names tell it.
        owners: paths of the modules that hold tensors themselves, in that order.
        kinds: path -> class of the module; empty for a checkpoint.
        path: the checkpoint, or None.
    """

    items: tuple[Item, ...]
    owners: tuple[str, ...]
    kinds: dict[str, type[nn.Module]] = field(default_factory=dict)
    path: str | None = None

    @property
    def names(self) -> list[str]:
        """All names of all tensors."""
        return [name for item in self.items for name in item.names]


def take(
    source: nn.Module | Checkpoint | str | os.PathLike[str], dtype: DtypeRule, rename: Rename | None
) -> Inventory:
    """The inventory of a module, live or on meta, or of a checkpoint or its path.

    Args:
        source: what to look at.
        dtype: as for `torchlift.load`; None counts tensors as they are.
        rename: as for `torchlift.load`; for a checkpoint only.
    """
    if isinstance(source, nn.Module):
        if rename is not None:
            raise ValueError("rename= is for a checkpoint: a model's names are what they are")
        return _of_model(source, dtype)
    if isinstance(source, Checkpoint):
        return _of_checkpoint(source, dtype, rename)
    from torchlift._checkpoint import open as open_checkpoint

    with open_checkpoint(source) as ckpt:
        return _of_checkpoint(ckpt, dtype, rename)


class _Overlaps:
    """Counts the bytes of views once: feed it ranges per storage in rising order of their start."""

    def __init__(self) -> None:
        self._ends: dict[object, int] = {}

    def add(self, storage: object, start: int, stop: int, nbytes: int) -> int:
        """The share of `nbytes` that no earlier range of the storage covers."""
        end = self._ends.get(storage, start)
        self._ends[storage] = max(end, stop)
        fresh = max(0, stop - max(end, start))
        span = stop - start
        return nbytes if fresh == span else nbytes * fresh // max(span, 1)


def _of_model(model: nn.Module, dtype: DtypeRule) -> Inventory:
    groups = [group for group in collect(model) if not is_lazy(group.tensor)]
    extents = {id(group): _extent(group.tensor) for group in groups}
    added: dict[int, int] = {}
    overlaps = _Overlaps()
    for group in sorted(groups, key=lambda group: extents[id(group)][1]):
        storage, start, stop = extents[id(group)]
        added[id(group)] = overlaps.add(storage, start, stop, group.tensor.nbytes)
    items = tuple(_item(group, dtype, extents[id(group)][0], added[id(group)]) for group in groups)
    kinds = {prefix.removesuffix("."): type(module) for prefix, module in walk(model)}
    holding = {name.rpartition(".")[0] for item in items for name in item.names}
    return Inventory(items, tuple(path for path in kinds if path in holding), kinds)


def _item(group: Group, dtype: DtypeRule, storage: object, added: int) -> Item:
    tensor, becomes = group.tensor, group.tensor.dtype
    if group.persistent:
        becomes = target_dtype(dtype, entry_like(group.fqn, group), tensor, becomes)
    size = tensor.dtype.itemsize
    full = tensor.numel() * becomes.itemsize
    return Item(group.names, full, added * becomes.itemsize // size, storage, becomes)


def _extent(tensor: torch.Tensor) -> tuple[object, int, int]:
    """(storage, first byte, byte after the last) of a tensor."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return id(tensor), 0, tensor.numel() * tensor.dtype.itemsize  # it may have no storage
    size = tensor.dtype.itemsize
    start = tensor.storage_offset() * size
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + (reach + 1) * size if tensor.numel() else start
    return tensor.untyped_storage()._cdata, int(start), int(stop)


def _of_checkpoint(ckpt: Checkpoint, dtype: DtypeRule, rename: Rename | None) -> Inventory:
    names = renamed(ckpt.entries, rename, ckpt.path)
    same: dict[object, list[str]] = {}
    for key in names:
        entry = ckpt.entries[key]
        # Two keys that show the same bytes in the same way are one tensor.
        spot = (entry.storage, entry.chunks[:1], entry.shape, entry.stride, entry.dtype)
        same.setdefault(spot if entry.chunks else key, []).append(key)
    groups = sorted(same.values(), key=lambda keys: _start(ckpt, keys[0]))
    overlaps = _Overlaps()
    items = []
    for keys in groups:
        entry = ckpt.entries[keys[0]]
        held = dtype_of(entry, ckpt.path)
        blank = torch.empty(0, dtype=held, device="meta")
        becomes = target_dtype(dtype, replace(entry, key=names[keys[0]]), blank, held)
        start = _start(ckpt, keys[0])
        span = sum(chunk.nbytes for chunk in entry.chunks)
        # A tensor in several pieces, as a sharded writer leaves it, is nobody's view.
        shares = entry.storage if len(entry.chunks) == 1 else ("pieces of", entry.key)
        added = overlaps.add(shares, start, start + span, entry.nbytes)
        called = tuple(names[key] for key in keys)
        full, added = (n * becomes.itemsize // held.itemsize for n in (entry.nbytes, added))
        items.append(Item(called, full, added, shares, becomes))
    ordered = _in_order(names.values())
    place = {name: at for at, name in enumerate(ordered)}
    items.sort(key=lambda item: min(place[name] for name in item.names))
    owners = tuple(dict.fromkeys(name.rpartition(".")[0] for name in ordered))
    return Inventory(tuple(items), owners, path=ckpt.path)


def _start(ckpt: Checkpoint, key: str) -> int:
    chunks = ckpt.entries[key].chunks
    return chunks[0].offset if chunks else 0


def _in_order(names: Iterable[str]) -> list[str]:
    """The names with the members of numbered lists in the order of their numbers.

    A safetensors file is in alphabetical order, layer 10 before layer 2. Everything else stays in
    the order of the file.
    """
    seen: dict[str, int] = {}

    def rank(name: str) -> Iterator[tuple[int, int]]:
        at = ""
        for part in name.split(".", 64):
            parent, at = at, f"{at}.{part}" if at else part
            # Numbers take the place of the list's first member; the rest, of its own first.
            first = seen.setdefault(f"{parent}.#" if part.isdecimal() else at, len(seen))
            yield first, int(part[:18]) if part.isdecimal() else 0

    ranks = {name: tuple(rank(name)) for name in names}
    return sorted(ranks, key=ranks.__getitem__)

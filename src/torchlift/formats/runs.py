"""The items of ranks in a DCP folder of a `torchlift.Keeper`: everything but the tensors.

The item of rank N is a tensor of bytes with the key ``ranks.N``: `MAGIC`, then a pickle. In the
pickle a `Leaf` stands for a tensor, which the folder has under its own name. If the values of a
tensor differ between ranks, each rank stores its own under a key that begins with ``ranks.N.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchlift.errors import FormatError
from torchlift.formats.flattening import name_text
from torchlift.formats.index import Leaf
from torchlift.formats.torch_pickle import (
    Blocked,
    Global,
    OrderedRecord,
    TorchWorld,
    read_torch_pickle,
)
from torchlift.formats.unpickle import Budget

#: The first bytes of an item, with the version of its content.
MAGIC = b"torchlift ranks 1\n"
#: A key of an item, or of a tensor of one rank.
OF_RANKS = re.compile(r"ranks\.\d+(\.|$)", re.ASCII)

#: Stands for a container that loses a tensor.
_GONE = object()
_LEAF = Global(f"{Leaf.__module__}.{Leaf.__qualname__}")
#: Python's numbers, which a pickle makes of numpy's.
_NUMBERS = {f"builtins.{kind.__name__}": kind for kind in (bool, int, float)}


def item_key(rank: int) -> str:
    """Return the key of the item of a rank."""
    return f"ranks.{rank}"


@dataclass(frozen=True, slots=True)
class RankItem:
    """The content of an item.

    Attributes:
        ranks: The number of ranks that saved.
        own: Name of an object -> the ranks whose state differs from that of the first rank. Only
            the first rank has it.
        generators: The states of the random number generators of this rank.
        saved: Name -> state. A later rank has the objects that differ from the first rank's.
    """

    ranks: int
    own: dict[str, list[int]]
    generators: Any
    saved: dict[str, Any]


class _World(TorchWorld):
    """The globals of an item: those of torch files, without storages, and `Leaf`."""

    def find(self, module: str, name: str) -> Global | Blocked:
        dotted = f"{module}.{name}"
        if dotted == _LEAF.name:
            return _LEAF
        plain = dotted.replace("__builtin__", "builtins")
        return Global(plain) if plain in _NUMBERS else super().find(module, name)

    def call(self, function: object, arguments: object, keywords: object = None) -> object:
        kind: Any = Leaf if function is _LEAF else None
        if isinstance(function, Global):
            kind = kind or _NUMBERS.get(function.name)
        if kind is None:
            return super().call(function, arguments, keywords)
        types = (str,) if kind is Leaf else (bool, int, float)
        if type(arguments) is not tuple or [*map(type, arguments)] not in [[t] for t in types]:
            raise FormatError("the item of a rank is malformed", entry=str(function))
        return kind(*arguments)

    def persistent(self, identity: object) -> object:
        raise FormatError("the item of a rank has a storage")


def read_item(data: bytes, budget: Budget | None = None) -> RankItem:
    """Read an item. The states are records of the pickle.

    Raises:
        FormatError: If it is not one that a Keeper writes.
    """
    found: Any = None
    if data.startswith(MAGIC):
        found = read_torch_pickle(data[len(MAGIC) :], _World(budget or Budget(len(data))))
    if not _is_valid(found):
        raise FormatError(
            "this is not the state of a rank that this version of torchlift writes",
            hint="Load its models with torchlift.load(model, folder, root='model').",
        )
    return RankItem(**found)


def _is_valid(found: Any) -> bool:
    """Return whether a pickle has the fields of a `RankItem`."""
    if not isinstance(found, dict) or found.keys() != {*RankItem.__slots__}:
        return False
    ranks, own, saved = found["ranks"], found["own"], found["saved"]
    if type(ranks) is not int or ranks < 1 or not isinstance(own, dict):
        return False
    lists = all(isinstance(each, list) for each in own.values())
    numbers = [number for each in own.values() for number in each] if lists else [None]
    names = [*own, *saved] if isinstance(saved, dict) else [None]
    return all(type(n) is int and 0 < n < ranks for n in numbers) and all(
        type(name) is str for name in names
    )


def without_leaves(saved: Any, keys: Mapping[str, object]) -> Any:
    """Return containers without the tensors that no key names.

    A list that loses an item is left out: the items after it would move.
    """
    kept = _kept(saved, keys)
    return {} if kept is _GONE else kept


def _kept(saved: Any, keys: Mapping[str, object]) -> Any:
    if isinstance(saved, Leaf):
        return saved if saved.key in keys else _GONE
    if isinstance(saved, dict):
        made: Any = saved.copy()
        made.clear()
        for name, item in saved.items():
            if (kept := _kept(item, keys)) is not _GONE:
                made[name] = kept
        if isinstance(saved, OrderedRecord):
            made._metadata = saved._metadata
        return made
    if type(saved) not in (list, tuple):
        return saved
    items = [_kept(item, keys) for item in saved]
    return _GONE if any(item is _GONE for item in items) else type(saved)(items)


def with_others(saved: Any, others: Any) -> Any:
    """Return containers with the items that other containers have, too, by the texts of names."""
    if not (isinstance(saved, dict) and isinstance(others, dict)):
        return saved
    texts = {name_text(name): name for name in saved}
    made = saved.copy()
    for name, item in others.items():
        own = texts.get(name_text(name), name)
        made[own] = with_others(saved[own], item) if own in saved else item
    return made

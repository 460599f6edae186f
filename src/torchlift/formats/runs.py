"""The items of ranks in a DCP folder of a `torchlift.Keeper`: everything but the tensors.

The item of rank N is a tensor of bytes with the key ``ranks.N``: `MAGIC`, then a pickle. In the
pickle a `Leaf` stands for a tensor, which the folder has under its own name. If the values of a
tensor differ between ranks, each rank stores its own under a key that begins with ``ranks.N.``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

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

#: Stands for a tensor that is not shown, and for a list with one.
_GONE = object()
_LEAF = Global(f"{Leaf.__module__}.{Leaf.__qualname__}")
#: Python's numbers, which a pickle makes of numpy's.
_NUMBERS = {f"builtins.{kind.__name__}": kind for kind in (bool, int, float)}


def item_key(rank: int) -> str:
    """Return the key of the item of a rank."""
    return f"ranks.{rank}"


class RankItem(NamedTuple):
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
    if not isinstance(found, dict) or found.keys() != {*RankItem._fields}:
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


def shown(saved: Any, table: Any, keys: Collection[str]) -> Any:
    """Return the containers that a folder shows: those of its first rank, with all tensors.

    A list that lacks a tensor is left out, because the items after it would move.

    Args:
        saved: The containers of the first rank, with a `Leaf` for each tensor.
        table: The tensors that the folder shows, in nested dicts by the texts of names.
        keys: Their keys.
    """
    if isinstance(saved, Leaf):
        return saved if saved.key in keys else _GONE
    others = table if isinstance(table, dict) else {}
    if isinstance(saved, dict):
        made: Any = saved.copy()
        made.clear()
        for name, item in saved.items():
            if (found := shown(item, others.get(name_text(name)), keys)) is not _GONE:
                made[name] = found
        texts = {*map(name_text, made)}
        made.update({name: each for name, each in others.items() if name not in texts})
        if isinstance(saved, OrderedRecord):
            made._metadata = saved._metadata
        return made
    if type(saved) not in (list, tuple):
        return saved
    items = [shown(item, others.get(str(at)), keys) for at, item in enumerate(saved)]
    return _GONE if any(item is _GONE for item in items) else type(saved)(items)

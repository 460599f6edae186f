"""`Checkpoint.tree`: the containers of a torch file as they were saved."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats import Index, TensorEntry, select
from torchlift.formats.flatten import ROOT_TENSOR, key_text
from torchlift.formats.torch_pickle import (
    Blocked,
    CountRecord,
    DeviceName,
    Global,
    NumpyDtype,
    OrderedRecord,
    SliceText,
)

#: In place of a value that is left out.
_DROPPED = object()


class Tree:
    """The records of a pickle, on their way to what they stand for.

    Args:
        index: what the pickle described.
        view: entry -> its tensor.
        refusal: key -> the error that says why its value cannot be had.
        dropped: keys that are left out, and containers of nothing else with them.
    """

    def __init__(
        self,
        index: Index,
        view: Callable[[TensorEntry], object],
        refusal: Callable[[str], CheckpointError],
        dropped: Collection[str] = (),
    ) -> None:
        self.index, self.view, self.refusal, self.dropped = index, view, refusal, dropped

    def rebuild(self, root: str | None) -> Any:
        """Return the object below a container of the index, or all of it.

        Raises:
            FormatError: there is no such container.
        """
        assert self.index.tree is not None
        (saved,) = self.index.tree
        full = ".".join(filter(None, (self.index.tree_root, root)))
        found = self._below(saved, "", full) if full else saved
        if found is None and root is not None:
            select(self.index, root)
        made = self._made(found, root)
        return {} if made is _DROPPED else made

    def _below(self, value: object, prefix: str, root: str) -> object:
        """Return the container with a dotted name, which may have dots in its own names."""
        for name, item in _items(value):
            key = f"{prefix}{_text(name)}"
            if key == root:
                return item
            if root.startswith(key + "."):
                found = self._below(item, key + ".", root)
                if found is not None:
                    return found
        return None

    def _made(self, value: Any, key: str | None) -> Any:
        if key in self.dropped:
            return _DROPPED
        entry = self.index.entries.get(ROOT_TENSOR if key is None else key)
        if isinstance(value, dict):
            every = [
                (self._made(name, None), self._made(item, _joined(key, _text(name))))
                for name, item in value.items()
            ]
            pairs = [pair for pair in every if pair[1] is not _DROPPED]
            if every and not pairs:
                return _DROPPED
            if not isinstance(value, OrderedRecord):
                return Counter(dict(pairs)) if isinstance(value, CountRecord) else dict(pairs)
            made = OrderedDict(pairs)
            if value.metadata is not None:
                made._metadata = self._made(value.metadata, None)  # type: ignore[attr-defined]
            return made
        if isinstance(value, (list, tuple)):
            items = [self._made(item, _joined(key, str(at))) for at, item in enumerate(value)]
            kept = [item for item in items if item is not _DROPPED]
            if kept and len(kept) < len(items):
                raise PlacementError(
                    "an item of a list cannot be left out alone: the next ones would move up",
                    file=self.index.path,
                    entry=key,
                    hint="Leave out all of it, or nothing.",
                )
            return _DROPPED if items and not kept else type(value)(kept)
        if isinstance(value, (set, frozenset)):
            return type(value)(self._made(item, None) for item in value)
        if isinstance(value, Blocked):
            raise self.refusal(key or "")
        if isinstance(value, SliceText):
            return slice(*value.arguments)
        if isinstance(value, DeviceName):
            return torch.device(value)
        if isinstance(value, Global):
            found = getattr(torch, value.name.removeprefix("torch."), None)
            return found if isinstance(found, torch.dtype) else value.name
        if isinstance(value, NumpyDtype):
            return f"numpy.dtype({value.code})"
        is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        if is_plain or isinstance(value, bytearray):
            return value
        if entry is None:
            raise self.refusal(key or "")
        return self.view(entry)


def _items(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _joined(key: str | None, name: str) -> str:
    return name if key is None else f"{key}.{name}"


def _text(name: object) -> str:
    return name if type(name) is str else key_text(name, "")

"""Tensors of subclasses that a caller allows by name: made as ``torch.load`` makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchlift._checkpoint.tree import Values
from torchlift._model.torch_private import make_wrapper
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats import RebuiltEntry
from torchlift.formats.torch_pickle import Blocked


class Allowed:
    """Classes that may be rebuilt, by the names that files have for them.

    Args:
        allow: what the caller named.
    """

    def __init__(self, allow: Iterable[type | tuple[type, str]]) -> None:
        self.names = _by_name(allow)
        # What a library has told torch that its classes are made of, such as an enum of kernels:
        # taken inside of what the caller named, as torch.load would take it anywhere.
        registered = torch.serialization.get_safe_globals()
        known = [x for x in registered if isinstance(x[0] if isinstance(x, tuple) else x, type)]
        self._inside = {**_by_name(known), **self.names}

    def tensor(self, entry: RebuiltEntry, inner: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        """Return the tensor of a subclass, made of `inner`, over their memory.

        Raises:
            UnsafeError: it is made of another class that nobody allowed.
            FormatError: its class does not take what the file has for it.
        """
        name, is_view, state, refs = entry.facts
        kind = self._inside.get(name)
        if kind is None:
            raise _not_allowed(name, entry, path)
        tensors = dict(zip(map(id, refs), inner, strict=True))
        values = _Inside(self._inside, tensors, entry, path)
        try:
            if is_view:
                made: Any = inner[0].as_subclass(kind)
            else:
                dtype = getattr(torch, entry.dtype)
                made = make_wrapper(kind, entry.shape, entry.stride, dtype, entry.requires_grad)
            _give(made, values.made(state, None))
        except (UnsafeError, FormatError):
            raise
        except Exception as error:
            raise FormatError(
                f"{kind.__name__} does not take what the file has for it",
                file=path,
                entry=entry.key,
                found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                hint="It was saved by another version of the library: install that, and save its "
                "dequantised values.",
            ) from error
        tensor: torch.Tensor = made
        return tensor


def _by_name(items: Iterable[Any]) -> dict[str, type]:
    pairs = (item if isinstance(item, tuple) else (item, "") for item in items)
    return {name or f"{kind.__module__}.{kind.__qualname__}": kind for kind, name in pairs}


class _Inside(Values):
    """What a tensor of a subclass has in its attributes."""

    def __init__(
        self,
        classes: Mapping[str, type],
        tensors: Mapping[int, torch.Tensor],
        entry: RebuiltEntry,
        path: str,
    ) -> None:
        self.classes, self.tensors, self.entry, self.path = classes, tensors, entry, path
        self.objects: dict[int, object] = {}

    def tensor(self, record: object, key: str | None) -> object:
        if id(record) not in self.tensors:
            raise TypeError(f"a {type(record).__name__} among its attributes")
        return self.tensors[id(record)]

    def blocked(self, record: Blocked, key: str | None) -> object:
        kind: Any = self.classes.get(record.name)
        if kind is None:
            raise _not_allowed(record.name, self.entry, self.path)
        if not record.called:
            return kind
        if id(record) not in self.objects:
            arguments, *states = [self.made(item, None) for item in record.inside]
            made = kind.__new__(kind, *arguments) if record.made else kind(*arguments)
            for state in states:
                _give(made, state)
            self.objects[id(record)] = made
        return self.objects[id(record)]


def _give(made: Any, state: Any) -> None:
    """Give an object its attributes, as unpickling does; all tensors share a method for another."""
    own = getattr(type(made), "__setstate__", None)
    if own is not None and own is not torch.Tensor.__setstate__:
        made.__setstate__(state)
        return
    states = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    attributes = {name: value for some in states for name, value in (some or {}).items()}
    for name, value in attributes.items():
        # Not setattr: a frozen dataclass refuses it.
        if isinstance(made, torch.Tensor):
            setattr(made, name, value)
        else:
            object.__setattr__(made, name, value)


def _not_allowed(name: str, entry: RebuiltEntry, path: str) -> UnsafeError:
    return UnsafeError(
        "it is made of a class that nobody allowed, and that only unpickling could rebuild",
        file=path,
        entry=entry.key,
        found=name,
        hint="Where you know that class, allow it, too: allow=[...] takes any number of them.",
    )

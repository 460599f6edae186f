"""Tensors of subclasses that a caller allows by name: made as ``torch.load`` makes them."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchlift._checkpoint.tree import Values
from torchlift._model.torch_private import make_wrapper, without_subclasses
from torchlift._system import clipped_list
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats import RebuiltEntry
from torchlift.formats.torch_pickle import Blocked


def by_name(allow_classes: Iterable[Any]) -> dict[str, type]:
    """Return name in files -> class, of what a caller named."""
    pairs = (item if isinstance(item, tuple) else (item, "") for item in allow_classes)
    return {name or f"{kind.__module__}.{kind.__qualname__}": kind for kind, name in pairs}


def rebuilt(
    entry: RebuiltEntry, classes: Mapping[str, type], inner: Sequence[torch.Tensor], path: str
) -> torch.Tensor:
    """Return the tensor of a subclass, made of `inner`, over their memory.

    Args:
        entry: of the tensor.
        classes: name in files -> class, of those that may be rebuilt.
        inner: the tensors that it is made of.
        path: of the file, for errors.

    Raises:
        UnsafeError: it is made of another class that nobody allowed.
        FormatError: its class does not take what the file has for it.
    """
    name, is_view, state, refs = entry.facts
    values = _Inside(classes, dict(zip(map(id, refs), inner, strict=True)), path)
    kind = classes.get(name)
    if kind is None:
        raise _not_allowed([name], entry, path)
    try:
        if is_view:
            made: Any = inner[0].as_subclass(kind)
        else:
            dtype = getattr(torch, entry.dtype)
            made = make_wrapper(kind, entry.shape, entry.stride, dtype, entry.requires_grad)
        attributes = values.made(state, None)
        if values.lacking:
            raise _not_allowed(values.lacking, entry, path)
        _give(made, attributes)
        _check(made, kind, entry)
    except UnsafeError:
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


class _Inside(Values):
    """What a tensor of a subclass has in its attributes.

    Attributes:
        lacking: names of classes that nobody allowed; nothing is called once there is one.
    """

    def __init__(
        self, classes: Mapping[str, type], tensors: Mapping[int, torch.Tensor], path: str
    ) -> None:
        super().__init__()
        self.classes, self.tensors, self.path = classes, tensors, path
        self.objects: dict[int, object] = {}
        self.lacking: dict[str, None] = {}

    def tensor(self, record: object, key: str | None) -> object:
        if id(record) not in self.tensors:
            raise TypeError(f"a {type(record).__name__} among its attributes")
        return self.tensors[id(record)]

    def blocked(self, record: Blocked, key: str | None) -> object:
        kind: Any = self.classes.get(record.name)
        if kind is None:
            return self._member(record)
        if not record.called:
            return kind
        if id(record) not in self.objects:
            arguments, *states = [self.made(item, None) for item in record.inside]
            if self.lacking:
                return None
            made = kind.__new__(kind, *arguments) if record.made else kind(*arguments)
            for state in states:
                _give(made, state)
            self.objects[id(record)] = made
        return self.objects[id(record)]

    def _member(self, record: Blocked) -> object:
        """Return a member of an enum that a library told torch of: looked up, no code runs."""
        kind = by_name(torch.serialization.get_safe_globals()).get(record.name)
        if not isinstance(kind, enum.EnumMeta) or not record.called:
            self.lacking[record.name] = None
            return self.made(record.inside, None)  # for more of them
        ((value,),) = self.made(record.inside, None)  # neither more arguments nor a state
        return kind._value2member_map_[value]


def _give(made: Any, state: Any) -> None:
    """Give an object its attributes, as unpickling does; all tensors share a method for another."""
    if isinstance(made, enum.Enum):  # there is one in the process: everybody would see it change
        raise TypeError("state for an enum member")
    own = getattr(type(made), "__setstate__", None)
    if own is not None and own is not torch.Tensor.__setstate__:
        made.__setstate__(state)
        return
    states = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    attributes = {name: value for some in states for name, value in (some or {}).items()}
    late = {name: value for name, value in attributes.items() if _is_taken(made, name, value)}
    for name, value in attributes.items():
        # Not setattr: a frozen dataclass refuses it.
        if name not in late:
            (setattr if isinstance(made, torch.Tensor) else object.__setattr__)(made, name, value)
    # A class may keep a tensor under the name of a method, such as `values`: then it says so.
    declared = made.__tensor_flatten__()[0] if late and hasattr(made, "__tensor_flatten__") else ()
    for name, value in late.items():
        if name not in declared or not isinstance(value, torch.Tensor) or callable(value):
            raise TypeError(f"state for {name!r}, which its class has of its own")
        made.__dict__[name] = value


def _is_taken(made: object, name: str, value: object) -> bool:
    """Return whether an attribute would change what an object is, rather than what it holds."""
    if name[:2] == name[-2:] == "__":
        return True
    own = inspect.getattr_static(type(made), name, None)
    if inspect.isroutine(own) and callable(value):
        return True
    # `data` puts other numbers, of another shape, in the place of those that were checked.
    of_torch = isinstance(made, torch.Tensor) and hasattr(torch.Tensor, name)
    return of_torch and name != "requires_grad"


def _check(made: Any, kind: type, entry: RebuiltEntry) -> None:
    """Refuse a tensor that is not what its entry says, or lacks what its class needs.

    Raises:
        TypeError: it is of another class, or has a number where its class has a tensor.
        ValueError: it has another shape or dtype.
    """

    def compare(tensor: torch.Tensor) -> None:
        with without_subclasses():
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if type(tensor) is not kind:
            raise TypeError(f"it became a {type(tensor).__name__}")
        if (shape, dtype) != (entry.shape, entry.dtype):
            has = f"{entry.dtype} {list(entry.shape)}"
            raise ValueError(f"it became {dtype} {list(shape)}, and the file says {has}")

    compare(made)
    if not hasattr(kind, "__tensor_flatten__"):
        return
    names, context = made.__tensor_flatten__()
    inner = {name: getattr(made, name) for name in names}
    for name, value in inner.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(value).__name__}, and not a tensor")
    # As loading does with it later, on the way to the model.
    compare(kind.__tensor_unflatten__(inner, context, made.size(), made.stride()))  # type: ignore[attr-defined]


def _not_allowed(names: Iterable[str], entry: RebuiltEntry, path: str) -> UnsafeError:
    return UnsafeError(
        "it is made of a class that nobody allowed, and that only unpickling could rebuild",
        file=path,
        entry=entry.key,
        found=clipped_list(list(names)),
        hint="Where you know that class, name it, too: allow_classes=[...] takes any number.",
    )

"""Tensors that have not been read: functions of torch rearrange the places of their values.

`merge`, `split`, `transformers` and `from_to` say with torch how a tensor becomes another one. Here
the same calls run on meta tensors, and what they do is done to the boxes of the file. No bytes are
read: a view stays a view, and a rank later reads only its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchlift._model.torch_private import without_subclasses
from torchlift._plan.names import Made
from torchlift._system.text import clipped_list
from torchlift.errors import PlacementError
from torchlift.formats.boxes import at_indices, joined, permuted, squeezed, unsqueezed

#: Dtypes that torch can rearrange on meta. Others, such as torch.int4, count as bytes there.
_KNOWN = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class Unfit(ValueError):
    """An operation does not support these tensors."""


class Computed(Exception):
    """A function of torch that computes new values, which the places in a file cannot express."""


#: The errors of torch and of this file for tensors that do not match an operation.
MISFITS = (Unfit, RuntimeError, IndexError)


class Unread(torch.Tensor):
    """A meta tensor that stands for one that has not been read.

    Attributes:
        made: The places of its values, and the keys that they come from.
    """

    made: Made

    @classmethod
    def of(cls, item: Made) -> Unread:
        """Make the stand-in for an entry."""
        dtype = getattr(torch, item.entry.dtype, torch.uint8)
        if not (dtype.is_floating_point or dtype in _KNOWN):
            dtype = torch.uint8
        return cls._wrap(torch.empty(item.entry.shape, dtype=dtype, device="meta"), item)

    @classmethod
    def _wrap(cls, blank: torch.Tensor, item: Made) -> Unread:
        stand_in = blank.as_subclass(cls)
        stand_in.made = item
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", repr(func)), kwargs or {}
        if name in _JOINS:
            return cls.of(_JOINS[name](*args, **kwargs))
        # Run it on meta first: torch checks the arguments and computes the shapes.
        with without_subclasses():
            found = func(*args, **kwargs)
        results = found if isinstance(found, (tuple, list)) else [found]
        if not any(isinstance(one, torch.Tensor) for one in results):
            return found
        if name not in _FOLLOWED:
            raise Computed(name)
        _require_plain(args[0].made)
        items = _FOLLOWED[name](found, *args, **kwargs)
        if isinstance(items, Made):
            return cls._wrap(found, items)
        return tuple(map(cls._wrap, found, items))


def made_of(tensor: torch.Tensor) -> Made:
    """Return what an operation made of tensors that have not been read."""
    assert isinstance(tensor, Unread)
    return tensor.made


def _require_plain(item: Made) -> None:
    """Refuse a sparse or quantised tensor, or a subclass."""
    if not item.entry.can_be_sliced:
        raise PlacementError(
            "only plain tensors can be merged or split",
            entry=item.keys[0],
            found=item.entry.type_name,
            hint="Load it without this rule, or save it as a plain tensor.",
        )


# ---- functions that join tensors. On meta, torch imports sympy for them, which takes seconds


def _concatenate(tensors: Sequence[Unread], dim: int = 0) -> Made:
    tensors[0].size(dim)  # raises an error if the dimension does not exist
    return _join([tensor.made for tensor in tensors], dim % tensors[0].dim())


def _stack(tensors: Sequence[Unread], dim: int = 0) -> Made:
    tensors[0].unsqueeze(dim)  # raises an error if the dimension cannot exist
    dim %= tensors[0].dim() + 1
    items = [tensor.made for tensor in tensors]
    return _join([Made(unsqueezed(entry, dim), keys) for entry, keys in items], dim)


def _join(items: Sequence[Made], dim: int) -> Made:
    first, name = items[0].entry, items[0].keys[0]
    for item in items:
        _require_plain(item)
        entry, keys = item
        if entry.dtype != first.dtype:
            raise Unfit(
                f"{name!r} is {first.dtype} and {keys[0]!r} is {entry.dtype}. Convert them to one "
                "dtype first, with torchlift.convert"
            )
        others, own = (e.shape[:dim] + e.shape[dim + 1 :] for e in (first, entry))
        if others != own:
            raise Unfit(f"the shapes of {name!r} and {keys[0]!r} differ")
    if len(items) == 1:
        return items[0]
    if len({frozenset(e.encoding) - {"deflated"} for e, _ in items if e.chunks}) > 1:
        shown = clipped_list(
            f"{keys[0]!r} ({', '.join(e.encoding) or 'plain'})" for e, keys in items
        )
        raise Unfit(
            f"{shown} are stored differently. Rewrite the file first, with torchlift.convert"
        )
    keys = tuple(dict.fromkeys(key for item in items for key in item.keys))
    return Made(joined([item.entry for item in items], dim), keys)


# ---- other functions: each gets the result on meta, and the arguments


def _split(
    found: Sequence[torch.Tensor], tensor: Unread, sizes: object = None, dim: int = 0, **_: object
) -> list[Made]:
    dim, edge, items = dim % tensor.dim(), 0, []
    for one in found:
        items.append(_take(tensor.made, dim, range(edge, edge + one.shape[dim])))
        edge += one.shape[dim]
    return items


def _unbind(_: object, tensor: Unread, dim: int = 0) -> list[Made]:
    dim %= tensor.dim()
    items = [_take(tensor.made, dim, range(at, at + 1)) for at in range(tensor.shape[dim])]
    return [Made(squeezed(entry, dim), keys) for entry, keys in items]


def _take(item: Made, dim: int, indices: range) -> Made:
    return Made(at_indices(item.entry, dim, indices), item.keys)


def _unsqueeze(found: torch.Tensor, tensor: Unread, dim: int) -> Made:
    return Made(unsqueezed(tensor.made.entry, dim % found.dim()), tensor.made.keys)


def _transpose(_: object, tensor: Unread, dim0: int, dim1: int) -> Made:
    order = [*range(tensor.dim())]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    if order == sorted(order):
        return tensor.made
    return Made(permuted(tensor.made.entry, order), tensor.made.keys)


def _reshape(found: torch.Tensor, tensor: Unread, *_: object, **__: object) -> Made:
    if found.dtype != tensor.dtype:
        raise Computed("a view in another dtype")
    item, old, shape = tensor.made, tensor.shape, found.shape
    fewer = min(len(old), len(shape)) - 1
    if fewer < 0 or 0 in old:
        raise Unfit(f"{item.keys[0]!r} of shape {list(old)} cannot have shape {list(shape)}")
    before = next((at for at in range(fewer) if old[at] != shape[at]), fewer)
    fewer -= before
    behind = next((at for at in range(fewer) if old[-1 - at] != shape[-1 - at]), fewer)
    # Fold the dimensions that differ into one, from the last on. Then unfold it to the new shape.
    for dim in range(len(old) - behind - 2, before - 1, -1):
        rows = [_take(item, dim, range(at, at + 1)) for at in range(item.entry.shape[dim])]
        item = _join([Made(squeezed(entry, dim), keys) for entry, keys in rows], dim)
    for dim in range(before, len(shape) - behind - 1):
        size, count = item.entry.shape[dim], shape[dim]
        width = size // count
        if dim == 0 or count < width:  # consecutive boxes of dimension 0 become one
            ranges = [range(at, at + width) for at in range(0, size, width)]
            new = dim
        else:
            ranges = [range(at, size, width) for at in range(width)]
            new = dim + 1
        rows = [_take(item, dim, each) for each in ranges]
        item = _join([Made(unsqueezed(entry, new), keys) for entry, keys in rows], new)
    return item


_JOINS: dict[str, Callable[..., Made]] = {"cat": _concatenate, "stack": _stack}
_FOLLOWED: dict[str, Callable[..., Made | list[Made]]] = {
    "chunk": _split,
    "split": _split,
    "unbind": _unbind,
    "transpose": _transpose,
    "contiguous": lambda _, tensor: tensor.made,
    "reshape": _reshape,
    "squeeze": _reshape,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
}

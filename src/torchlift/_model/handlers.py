"""Load tensor subclasses with a registered handler or with their own ``__torch_function__``.

torch calls ``destination.module_load(source, assign)`` and exchanges its result with the
destination. This file replaces the method while a handler is registered. torch's
``load_state_dict`` on the swap path and `torchlift.load` both call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchlift._model.dtensor import is_dtensor, local_tensor, wrap
from torchlift._model.slots import is_lazy
from torchlift._model.torch_private import DISABLED, make_subclass
from torchlift.errors import PlacementError

Handler = Callable[..., torch.Tensor]

_lock = threading.Lock()
_registered: tuple[Registration, ...] = ()
_torch_module_load: Any = None
_active = threading.local()


@dataclass(frozen=True, eq=False)
class Registration:
    """A registered handler. It is active until ``remove()`` or the end of its ``with`` block."""

    subclass: type[torch.Tensor]
    handler: Handler

    def remove(self) -> None:
        """Remove the handler. A second call does nothing."""
        global _registered, _torch_module_load
        with _lock:
            _registered = tuple(item for item in _registered if item is not self)
            # If somebody wrapped the method meanwhile, taking ours out would take theirs out.
            if not _registered and vars(torch.Tensor).get("module_load") is _dispatch:
                torch.Tensor.module_load = _torch_module_load  # type: ignore[method-assign]
                _torch_module_load = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def module_load(subclass: type[torch.Tensor], handler: Handler) -> Registration:
    """Register a function that loads tensors of a subclass.

    torch calls ``handler(destination, source, assign=...)`` if one of the two tensors is an
    instance of `subclass`. `torchlift.load` does so if the model's tensor is one, or the result of
    ``transform``. The handler returns a new tensor with the shape of the destination, which then
    replaces the destination. ``assign`` is True if the new tensor should have the dtype and device
    of the source, and False if those of the destination.

    The handler of the most derived class is called, and of several for one class the newest. If it
    returns ``NotImplemented``, torch loads the tensor. ``mode="copy"`` calls no handler.

    Args:
        subclass: A class that inherits from `torch.Tensor` or `torch.nn.Parameter`.
        handler: A callable. It runs without autograd. `torchlift.load` passes a copy of a live
            destination.

    Returns:
        The registration. Call its ``remove()``, or use it in a ``with`` statement.

    Raises:
        TypeError: If `subclass` is not a tensor subclass, or `handler` cannot be called.

    Example:
        >>> import torch, torchlift
        >>> class Negated(torch.Tensor):
        ...     pass
        >>> def load_negated(destination, source, assign):
        ...     return (-source).as_subclass(Negated)
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Negated))
        >>> with torchlift.swap.module_load(Negated, load_negated):
        ...     with torchlift.swap.preserving_references():
        ...         _ = layer.load_state_dict({"weight": torch.ones(1, 1)})
        >>> layer.weight.item()
        -1.0
    """
    global _registered, _torch_module_load
    asked: object = subclass
    is_tensor = isinstance(asked, type) and issubclass(asked, torch.Tensor)
    if not is_tensor or subclass in (torch.Tensor, nn.Parameter) or not callable(handler):
        raise TypeError(
            "module_load() takes a subclass of torch.Tensor or nn.Parameter and a callable, not "
            f"{subclass!r} and {handler!r}"
        )
    made = Registration(subclass, handler)
    with _lock:
        if _torch_module_load is None:
            _torch_module_load = torch.Tensor.module_load
            torch.Tensor.module_load = _dispatch  # type: ignore[method-assign]
        _registered = (*_registered, made)
    return made


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether it is a tensor or parameter and not of a subclass, which may run code."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether it is of a subclass that keeps its values in tensors of its own."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor. A nested tensor has those of all its rows together.

    Example:
        >>> shape_of(torch.ones(2, 3))
        (2, 3)
    """
    shown: Any = tensor.values() if tensor.is_nested else tensor
    return tuple(shown.shape)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie in one memory of its own, and not in that of others.

    Example:
        >>> has_memory(torch.ones(2)), has_memory(torch.eye(2).to_sparse())
        (True, False)
    """
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and not is_wrapper(tensor)


def oddity(tensor: torch.Tensor) -> str | None:
    """Return why values cannot be copied into a plain tensor, or None if they can.

    Example:
        >>> oddity(torch.ones(2)), oddity(torch.eye(2).to_sparse())
        (None, 'torch.sparse_coo')
    """
    if tensor.is_meta:
        return "on meta, where nothing has values"
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return str(tensor.dtype) if tensor.is_quantized else None


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in which a wrapper keeps its values, if it declares them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else []


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor's values, in a row: a view if they lie so.

    Example:
        >>> bytes_of(torch.tensor([1, 2], dtype=torch.int16))
        tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # flatten() keeps the stride of a single element, which a view as bytes may refuse.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def clone_of(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Copy a tensor and the tensors inside of it, without the class's own `clone`.

    Example:
        >>> clone_of(torch.ones(2))
        tensor([1., 1.])
    """
    if is_dtensor(tensor):  # which flattens into its mesh, too
        return wrap(tensor, clone_of(local_tensor(tensor), device))
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.detach().to(device or tensor.device, copy=True)
    names, context = flatten()
    inner = {name: clone_of(getattr(tensor, name), device) for name in names}
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    # torchao's NF4Tensor says that it is still where it was flattened.
    here = next((item.device for item in inner.values()), made.device)
    return made if made.device == here else made.to(here)


def slice_of(tensor: torch.Tensor, index: tuple[slice, ...]) -> torch.Tensor:
    """Return a slice of a tensor, by an even split if its class cannot be sliced.

    Example:
        >>> slice_of(torch.arange(4), (slice(2, 4),))
        tensor([2, 3])
    """
    whole = tuple(slice(0, size) for size in tensor.shape)
    if index == whole:  # which torchao's low-bit moments cannot be asked for
        return tensor
    try:
        return tensor[index]
    except Exception:
        at, length = index[0].start, index[0].stop - index[0].start
        evenly = index[1:] == whole[1:] and not (at % length or len(tensor) % length)
        if not (is_wrapper(tensor) and evenly):
            raise
        # How FSDP2 shards torchao's NF4Tensor, which has no other slices.
        part: torch.Tensor = torch.split(tensor, length)[at // length]
        return part


def handles(destination: type, source: type) -> bool:
    """Return whether a handler is registered for such a pair of tensors."""
    return _find_handler(destination, source) is not None


def has_own_loading(kind: type) -> bool:
    """Return whether a class brings a ``module_load`` of its own, written by hand."""
    if getattr(kind, "module_load", None) is not torch.Tensor.module_load:
        return True
    own: Any = getattr(kind, "__torch_function__", None)
    default: Any = torch.Tensor.__torch_function__
    disabled = own is DISABLED
    return not disabled and getattr(own, "__func__", None) is not default.__func__


def is_handled(tensor: torch.Tensor) -> bool:
    """Return whether the class of a model's tensor decides how plain tensors are loaded into it."""
    if is_plain(tensor) or is_lazy(tensor):
        return False
    return handles(type(tensor), torch.Tensor) or has_own_loading(type(tensor))


def apply(destination: torch.Tensor, source: torch.Tensor, *, assign: bool) -> torch.Tensor:
    """Return what a handler, registered or written by hand, makes of the source.

    Raises:
        PlacementError: the handler made a mistake.
    """
    stand_in = destination if destination.is_meta else _stand_in(destination)
    with torch.no_grad():
        made: torch.Tensor = stand_in.module_load(source, assign=assign)  # type: ignore[no-untyped-call]
    _check(made, stand_in, source, f"module_load of {type(destination).__name__}")
    return made


def _dispatch(self: torch.Tensor, other: torch.Tensor, assign: bool = False) -> torch.Tensor:
    """Replace ``Tensor.module_load`` while a handler is registered."""
    busy: Registration | None = getattr(_active, "item", None)
    item = _find_handler(type(self), type(other))
    # A handler that is busy wants torch's own way. So does torch, which comes back here through
    # the __torch_function__ of the class.
    _active.item = item or busy
    try:
        if item is not None and item is not busy:
            made = item.handler(self, other, assign=assign)
            if made is not NotImplemented:
                _check(
                    made,
                    self,
                    other,
                    f"handler {getattr(item.handler, '__qualname__', item.handler)}",
                )
                return made
        result: torch.Tensor = _torch_module_load(self, other, assign=assign)
        return result
    finally:
        _active.item = busy


def _find_handler(destination: type, source: type) -> Registration | None:
    """Return the handler for a pair of classes: the newest one for the most derived class."""
    first, second = destination, source
    if issubclass(source, destination):
        first, second = source, destination
    for base in (*first.__mro__, *second.__mro__):
        for item in _registered[::-1]:
            if item.subclass is base:
                return item
    return None


def _check(made: object, destination: torch.Tensor, source: torch.Tensor, who: str) -> None:
    """Refuse what a handler must not return."""
    found = type(made).__name__
    if isinstance(made, torch.Tensor):
        found = f"{found} of shape {list(made.shape)} on {made.device}"
        # torch exchanges the contents of two objects: with itself that is nothing.
        is_new = made is not destination and made is not source
        has_values = source.is_meta or not made.is_meta
        fits = is_lazy(destination) or made.shape == destination.shape
        if is_new and has_values and fits:
            return
    raise PlacementError(
        f"the {who} must return a new tensor with values, of the destination's shape. It "
        f"returned {found}"
    )


def _stand_in(destination: torch.Tensor) -> torch.Tensor:
    """Copy a tensor for a handler to write to: a load that fails must not change the module."""
    try:
        copy = destination.detach().clone()
        if type(copy) is not type(destination):
            grad = destination.requires_grad
            copy = make_subclass(type(destination), copy, grad)
    except (NotImplementedError, RuntimeError, TypeError):
        return destination  # a subclass that cannot be copied; its handler must only read
    for name, value in destination.__dict__.items():
        copy.__dict__.setdefault(name, value)  # not over a wrapper's own inner tensors
    return copy

"""How the content of one tensor object is replaced, while the object stays for its holders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchlift.distributed.shards import dressed, is_sharded
from torchlift.slots import Group, is_lazy

#: Attribute under which a skeleton's tensor remembers how it was made; see `skeleton`.
RECIPE = "_torchlift_recipe"

_PLAIN = (torch.Tensor, nn.Parameter)
_exchange_plain: Any = getattr(torch._C, "_swap_tensor_impl", None)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor or parameter and not of a subclass, which may run code of its own."""
    return type(tensor) in _PLAIN


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is of a subclass that holds its values elsewhere, in tensors of its own."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def content_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's values, which a wrapper holds in tensors of its own."""
    if not is_wrapper(tensor):
        return tensor.numel() * tensor.itemsize
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner = [getattr(tensor, name) for name in flatten()[0]] if flatten else []
    return sum(content_bytes(item) for item in inner)


def successor_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` dressed as `old`: its class, its ``requires_grad`` and its Python attributes.

    A `new` of a subclass, which only a loading handler makes, keeps its own class.
    """
    floating = new.is_floating_point() or new.is_complex()
    grad = old.requires_grad and floating and old.is_leaf
    if not is_plain(new):
        made: torch.Tensor
        if isinstance(new, nn.Parameter):
            made = new.requires_grad_(grad) if isinstance(old, nn.Parameter) else new
        elif is_sharded(new):
            made = dressed(new, new._local_tensor, grad, isinstance(old, nn.Parameter))
        else:
            made = nn.Parameter(new, grad) if isinstance(old, nn.Parameter) else new.detach()
    elif is_lazy(old):
        kind: Any = type(old)
        made = kind.cls_to_become(new.detach(), *([grad] if isinstance(old, nn.Parameter) else ()))
    elif not isinstance(old, nn.Parameter):
        made = new.detach().requires_grad_(grad)
    else:
        # What `nn.Parameter` does with a plain tensor, after asking what it is.
        kind = nn.Parameter if is_wrapper(old) else type(old)
        made = torch.Tensor._make_subclass(kind, new, grad)
    for key, value in old.__dict__.items():
        # A wrapper's own tensors are its old values.
        if key != RECIPE and not (is_wrapper(old) and isinstance(value, torch.Tensor)):
            made.__dict__.setdefault(key, value)
    return made


def obstacle(group: Group) -> str | None:
    """Why the content of the group's tensor object cannot be exchanged, or None."""
    tensor = group.tensor
    foreign = weakref.getweakrefcount(tensor) - (1 if flat_references(group) else 0)
    if foreign > 0:
        return f"it has {foreign} weak reference{'s' if foreign > 1 else ''}"
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        return "autograd or another tensor still holds its content"
    return None


def flat_references(group: Group) -> list[tuple[list[Any], int]]:
    """Where a recurrent layer keeps weak references to this tensor, which is its own weight."""
    found = []
    for slot in group.slots:
        references = vars(slot.module).get("_flat_weight_refs", [])
        for position, reference in enumerate(references):
            if reference is not None and reference() is group.tensor:
                found.append((references, position))
    return found


def exchange_content(group: Group, other: torch.Tensor) -> Callable[[], None]:
    """Exchange, keeping what belongs to the object; return what takes it back."""
    old = group.tensor
    grad = old.grad if old.is_leaf else None
    hooks: tuple[Any, Any] = old._backward_hooks, old._post_accumulate_grad_hooks
    if grad is None and hooks == (None, None):
        _exchange_unreferenced(group, other)
        return lambda: _exchange_unreferenced(group, other)

    def undo() -> None:
        _release(old)
        _exchange_unreferenced(group, other)
        _equip(old, hooks, grad)

    # Hooks and gradient belong to what torch exchanges, and holders to the object that stays:
    # with torch.utils.swap_tensors alone the hooks are never called again.
    _release(old)
    try:
        _exchange_unreferenced(group, other)
    except BaseException:
        _equip(old, hooks, grad)
        raise
    fits = grad is not None and old.requires_grad and _fits(grad, old)
    _equip(old, hooks if old.requires_grad else (None, None), grad if fits else None)
    return undo


def _release(tensor: torch.Tensor) -> None:
    if tensor.is_leaf and tensor.grad is not None:
        tensor.grad = None
    _set_hooks(tensor, (None, None))


def _equip(tensor: torch.Tensor, hooks: tuple[Any, Any], grad: torch.Tensor | None) -> None:
    _set_hooks(tensor, hooks)
    if grad is not None:
        tensor.grad = grad


def _set_hooks(tensor: Any, hooks: tuple[Any, Any]) -> None:
    if tensor._backward_hooks is not hooks[0]:
        tensor._backward_hooks = hooks[0]
    if tensor._post_accumulate_grad_hooks is not hooks[1]:
        tensor._post_accumulate_grad_hooks = hooks[1]


def _exchange_unreferenced(group: Group, other: torch.Tensor) -> None:
    flat = flat_references(group)
    for references, position in flat:
        references[position] = None  # torch exchanges nothing that is weakly referenced
    try:
        exchange(group.tensor, other)
    finally:
        for references, position in flat:
            references[position] = weakref.ref(group.tensor)


def exchange(one: torch.Tensor, two: torch.Tensor) -> None:
    """Exchange the content of two tensor objects: class, attributes, storage."""
    if type(one) is type(two) and is_plain(one) and _is_lone(one) and _is_lone(two):
        # What torch.utils.swap_tensors comes to where neither a subclass nor a holder is asked.
        _exchange_plain(one, two)
        one.__dict__, two.__dict__ = two.__dict__, one.__dict__
        return
    torch.utils.swap_tensors(one, two)  # type: ignore[no-untyped-call]


def _is_lone(tensor: torch.Tensor) -> bool:
    """Whether nothing but Python's ordinary references holds the object and its content."""
    return (
        _exchange_plain is not None
        and not weakref.getweakrefcount(tensor)
        and tensor._use_count() == 1  # type: ignore[attr-defined]
    )


def can_set_data(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether assigning ``old.data`` is possible: same kind of tensor, and both are real."""
    if old.is_meta or is_lazy(old) or is_wrapper(old) or not is_plain(new):
        return False
    return torch._has_compatible_shallow_copy_type(old, new)


def set_data(old: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a live tensor other data; its gradient stays where it fits, and goes where not."""
    fits = grad is None or _fits(grad, data)
    if not fits:
        # A gradient of another dtype or device cannot stay: autograd would refuse the next one.
        old.grad = None
    old.data = data
    if fits and grad is not None and old.grad is not grad:
        old.grad = grad
    # Otherwise a graph recorded before would go backward with the new values, and be wrong.
    torch.autograd.graph.increment_version(old)


def _fits(grad: torch.Tensor, data: torch.Tensor) -> bool:
    return (grad.shape, grad.dtype, grad.device) == (data.shape, data.dtype, data.device)

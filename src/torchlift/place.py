"""How one tensor gets into one slot: assign, copy, swap; and how all of it is taken back.

A load prepares every tensor first and then commits them here. A commit that fails half-way, for
whatever reason, is rolled back, so the module is either loaded or as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType

import torch
from torch import nn

from torchlift.errors import PlacementError
from torchlift.slots import Group

#: Attribute under which a skeleton's tensor remembers how it was made; see `skeleton`.
RECIPE = "_torchlift_recipe"

_PLAIN = (torch.Tensor, nn.Parameter)


class Commit:
    """Changes to a module that take effect together: leaving the block by an error undoes them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Commit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            with torch.no_grad():
                while self._undo:
                    self._undo.pop()()
        self._undo.clear()

    def put(self, group: Group, new: torch.Tensor) -> None:
        """Swap where that is possible, so that references survive, and assign elsewhere."""
        if obstacle(group.tensor) is None:
            self.swap(group, new)
        else:
            self.assign(group, new)

    def assign(self, group: Group, new: torch.Tensor) -> None:
        """Put `new` in every slot of the group; whoever held the old tensor keeps the old one."""
        successor = successor_of(group.tensor, new)
        for slot in group.slots:
            # setattr, not _parameters[name]: recurrent layers keep a list of their flat weights
            # up to date in __setattr__.
            module, name, old = slot.module, slot.name, group.tensor
            self._undo.append(lambda m=module, n=name, o=old: setattr(m, n, o))  # type: ignore[misc]
            setattr(module, name, successor)

    def swap(self, group: Group, new: torch.Tensor) -> None:
        """Give the group's tensor object the content of `new`; every holder sees it.

        Raises:
            PlacementError: something holds on to the object in a way that forbids it.
        """
        old = group.tensor
        reason = obstacle(old)
        if reason is not None:
            raise PlacementError(
                f"cannot be swapped: {reason}",
                entry=group.fqn,
                hint='Release it first, or load with mode="assign".',
            )
        if can_set_data(old, new):
            previous, grad = old.data, old.grad
            self._undo.append(lambda: _set_data(old, previous, grad))
            _set_data(old, new, grad)
            return
        successor = successor_of(old, new)
        exchange(old, successor)
        self._undo.append(lambda: exchange(old, successor))

    def copy(self, group: Group, source: torch.Tensor) -> None:
        """Overwrite the values in place, casting and moving as `Tensor.copy_` does."""
        old = group.tensor
        if type(old) not in _PLAIN:
            # A subclass may fail half-way in code of its own.
            backup = old.detach().clone()
            self._undo.append(lambda: old.copy_(backup))
        with torch.no_grad():
            old.copy_(source)

    def call(self, action: Callable[[], object], undo: Callable[[], object]) -> None:
        """Run `action`; run `undo` if anything fails afterwards."""
        self._undo.append(undo)
        action()


def successor_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` dressed as `old`: its class, its ``requires_grad`` and its Python attributes."""
    floating = new.is_floating_point() or new.is_complex()
    grad = old.requires_grad and floating and old.is_leaf
    if isinstance(old, nn.Parameter):
        if type(old) is nn.Parameter:
            made: torch.Tensor = nn.Parameter(new.detach(), requires_grad=grad)
        else:
            made = torch.Tensor._make_subclass(type(old), new.detach(), grad)
    else:
        made = new.detach().requires_grad_(grad)
    attributes = {key: value for key, value in old.__dict__.items() if key != RECIPE}
    if attributes:
        made.__dict__.update(attributes)
    return made


def obstacle(tensor: torch.Tensor) -> str | None:
    """Why the content of this tensor object cannot be exchanged, or None."""
    references = weakref.getweakrefcount(tensor)
    if references and tensor.is_meta:
        return f"it has {references} weak reference{'s' if references > 1 else ''}"
    if tensor.is_meta and tensor._use_count() > 1:  # type: ignore[attr-defined]
        return "autograd or another tensor still holds its content"
    return None


def exchange(one: torch.Tensor, two: torch.Tensor) -> None:
    """Exchange the content of two tensor objects: class, attributes, storage."""
    torch.utils.swap_tensors(one, two)  # type: ignore[no-untyped-call]


def can_set_data(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether assigning ``old.data`` is possible: same kind of tensor, and both are real."""
    return not old.is_meta and torch._has_compatible_shallow_copy_type(old, new)


def _set_data(old: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    fits = grad is None or (
        grad.shape == data.shape and grad.dtype == data.dtype and grad.device == data.device
    )
    if not fits:
        # A gradient of another dtype or device cannot stay: autograd would refuse the next one.
        old.grad = None
    old.data = data
    if fits and old.grad is not grad:
        old.grad = grad


def check_writable(group: Group) -> None:
    """Refuse an in-place copy that torch would refuse half-way.

    Raises:
        PlacementError: several elements of the tensor share one place in memory.
    """
    tensor = group.tensor
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise PlacementError(
                "cannot be written in place, because it is an expanded view of fewer elements",
                entry=group.fqn,
                hint='Call .contiguous() on it first, or load with mode="assign".',
            )

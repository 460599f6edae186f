"""How one tensor gets into one slot: assign, copy, swap; and how all of it is taken back.

A load prepares every tensor first and then commits them here. A commit that fails half-way, for
whatever reason, is rolled back, so the module is either loaded or as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torchlift.content import RECIPE as RECIPE
from torchlift.content import can_set_data, exchange_content, obstacle, set_data
from torchlift.content import exchange as exchange
from torchlift.content import is_plain as is_plain
from torchlift.content import successor_of as successor_of
from torchlift.distributed.shards import held
from torchlift.errors import PlacementError
from torchlift.slots import Group, is_lazy


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
                    # One that fails (a `set_extra_state` that refuses what it had) must neither
                    # keep the rest from being undone nor hide the error that brought us here.
                    with suppress(Exception):
                        self._undo.pop()()
        self._undo.clear()

    def when_undone(self, action: Callable[[], object]) -> None:
        """Call this after everything that comes later has been taken back."""
        self._undo.append(action)

    def put(self, group: Group, new: torch.Tensor) -> None:
        """Swap where that is possible, so that references survive, and assign elsewhere."""
        if can_set_data(group.tensor, new) or obstacle(group) is None:
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
        if is_lazy(old):
            self._fill_lazy(old, new)
            return
        if can_set_data(old, new):
            previous, grad = old.data, old.grad if old.is_leaf else None
            self._undo.append(lambda: set_data(old, previous, grad))
            set_data(old, new, grad)
            return
        reason = obstacle(group)
        if reason is not None:
            raise PlacementError(
                f"cannot be swapped: {reason}",
                entry=group.fqn,
                hint='Release it first, or load with mode="assign".',
            )
        self._undo.append(exchange_content(group, successor_of(old, new)))

    def _fill_lazy(self, old: Any, new: torch.Tensor) -> None:
        kind, empty, grad = type(old), old.data, old.requires_grad

        def undo() -> None:
            old.data = empty
            old.__class__ = kind

        self._undo.append(undo)
        if old.is_meta:
            # Another device cannot be taken through .data; the class changes with the content.
            made = new.detach()
            if kind.cls_to_become is not None and issubclass(kind.cls_to_become, nn.Parameter):
                made = nn.Parameter(made, requires_grad=grad)
            exchange(old, made)
            self._undo[-1] = lambda: exchange(old, made)
            return
        old.data = new.detach()
        old.__class__ = kind.cls_to_become

    def copy(self, group: Group, source: torch.Tensor, *, backup: bool = False) -> None:
        """Overwrite the values in place, casting and moving as `Tensor.copy_` does.

        Only with a backup, which takes a second copy in memory, can this be undone.
        """
        old = held(group.tensor)
        if backup or not is_plain(old):
            # A subclass may fail half-way in code of its own.
            before = old.detach().clone()
            self._undo.append(lambda: old.copy_(before))
        with torch.no_grad():
            old.copy_(source)

    def extra_state(self, module: nn.Module, state: object) -> None:
        """Call the module's `set_extra_state`; give it back what it has now on failure."""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            before = copy.deepcopy(module.get_extra_state())
            self._undo.append(lambda: module.set_extra_state(before))
        module.set_extra_state(state)

    def attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set a plain attribute that is neither parameter nor buffer."""
        had, before = name in vars(module), vars(module).get(name)
        self._undo.append(
            lambda: vars(module).__setitem__(name, before) if had else vars(module).pop(name, None)
        )
        vars(module)[name] = value


def check_writable(group: Group) -> None:
    """Refuse an in-place copy that torch would refuse, or get wrong, half-way.

    Raises:
        PlacementError: elements of the tensor share memory, or it may not be written to.
    """
    tensor = group.tensor
    if repeats(tensor.shape, tensor.stride()):
        raise PlacementError(
            "cannot be written in place, because it is a view in which several elements share one "
            "place in memory",
            entry=group.fqn,
            hint='Call .contiguous() on it first, or load with mode="assign".',
        )
    check_mode(group)


def check_mode(group: Group) -> None:
    """Refuse to change a tensor of inference mode outside of it, as torch would, half-way.

    Raises:
        PlacementError: it is one.
    """
    if group.tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise PlacementError(
            "cannot be written in place, because it was made in inference mode",
            entry=group.fqn,
            hint='Load with mode="assign", or inside torch.inference_mode().',
        )


def repeats(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of such a view can share one place in memory, as expanding makes them.

    Example:
        >>> repeats((2, 3), (3, 1)), repeats((2, 3), (0, 1)), repeats((3, 2), (1, 1))
        (False, True, True)
    """
    reach = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if step != reach or not size:
            break
        reach *= size
    else:
        return False  # row by row, as nearly all are
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and 0 not in shape:
            if step < reach:
                return True
            reach += (size - 1) * step
    return False

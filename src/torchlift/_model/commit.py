"""Put tensors into slots (assign, copy, swap), and undo all of it after an error.

A load prepares every tensor first and then commits them here. A commit that fails half-way, for
whatever reason, is undone: the model is either loaded or as it was.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from torchlift._model.dtensor import is_dtensor, local_tensor, wrap
from torchlift._model.handlers import clone_of, inner_tensors, is_plain, is_wrapper
from torchlift._model.holders import flat_references, has_holders
from torchlift._model.slots import CONSTRUCTION, Group, ModuleTree, is_lazy
from torchlift._model.torch_private import (
    fits_data,
    make_subclass,
    memory_of,
    set_version,
    swap_content,
    version_of,
)
from torchlift._system.containers import leaves
from torchlift._system.text import clipped_list
from torchlift.errors import PlacementError, note


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode inside the block, without turning autograd on.

    A tensor made in inference mode can never be trained, and does not count what is written to it:
    a live model given such content would silently get no gradients any more.

    Example:
        >>> with torch.inference_mode(), ordinary_tensors():
        ...     torch.zeros(1).is_inference(), torch.is_grad_enabled()
        (False, False)
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def content_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values, which a wrapper has in tensors of its own."""
    if not is_wrapper(tensor):
        return tensor.numel() * tensor.itemsize
    return sum(content_bytes(item) for item in inner_tensors(tensor))


def successor_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` with the class, the ``requires_grad`` and the Python attributes of `old`.

    A `new` of a subclass, which only a loading handler makes, keeps its own class.
    """
    grad = old.requires_grad and old.is_leaf and (new.is_floating_point() or new.is_complex())
    parameter = isinstance(old, nn.Parameter)
    made: torch.Tensor
    if is_plain(new):
        if is_lazy(old):
            kind: Any = type(old)
            made = kind.cls_to_become(new.detach(), *([grad] if parameter else ()))
        elif parameter:
            # What `nn.Parameter` does with a plain tensor, after asking what it is.
            made = make_subclass(nn.Parameter if is_wrapper(old) else type(old), new, grad)
        else:
            made = new.detach().requires_grad_(grad)
    elif isinstance(new, nn.Parameter):
        made = new.requires_grad_(grad) if parameter else new
    elif is_dtensor(new):
        made = wrap(new, local_tensor(new), grad, parameter)
    else:
        made = nn.Parameter(new, grad) if parameter else new.detach()
    for key, value in old.__dict__.items():
        # A wrapper's own tensors are its old values.
        if key != CONSTRUCTION and not (is_wrapper(old) and isinstance(value, torch.Tensor)):
            made.__dict__.setdefault(key, value)
    return made


def exchange(one: torch.Tensor, two: torch.Tensor) -> None:
    """Exchange the content of two tensor objects: class, attributes, storage."""
    torch.utils.swap_tensors(one, two)  # type: ignore[no-untyped-call]


_NO_HOOKS = (None, None)


def exchange_content(group: Group, other: torch.Tensor) -> Callable[[], None]:
    """Exchange content, but keep gradient and hooks at the object; return the undo."""
    old = group.tensor
    grad = old.grad if old.is_leaf else None
    hooks = old._backward_hooks, old._post_accumulate_grad_hooks

    def undo() -> None:
        _equip(old, _NO_HOOKS, None)
        _exchange_unreferenced(group, other)
        _equip(old, hooks, grad)

    # Hooks and gradient belong to what torch exchanges, and holders to the object that stays:
    # with torch.utils.swap_tensors alone the hooks are never called again.
    _equip(old, _NO_HOOKS, None)
    try:
        _exchange_unreferenced(group, other)
    except BaseException:
        _equip(old, hooks, grad)
        raise
    fits = grad is not None and old.requires_grad and _fits(grad, old)
    _equip(old, hooks if old.requires_grad else _NO_HOOKS, grad if fits else None)
    return undo


def _equip(tensor: Any, hooks: tuple[Any, Any], grad: torch.Tensor | None) -> None:
    """Give a tensor these hooks and this gradient, where it has others."""
    if tensor.is_leaf and tensor.grad is not grad:
        tensor.grad = grad
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


def _set_data(old: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a live tensor other data, and this gradient where it fits."""
    if grad is not None:
        # One of another dtype or device cannot stay: autograd would refuse the next one.
        old.grad = None
    old.data = data
    if grad is not None and _fits(grad, data):
        old.grad = grad
    # Otherwise a graph recorded before would go backward with the new values, and be wrong.
    torch.autograd.graph.increment_version(old)


def _fits(grad: torch.Tensor, data: torch.Tensor) -> bool:
    return (grad.shape, grad.dtype, grad.device) == (data.shape, data.dtype, data.device)


class Commit:
    """Changes to a model that take effect together. An error in the block undoes them.

    Each change is recorded before it is made. The undo runs in the opposite order.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[[], object], tuple[str, ...]]] = []
        self._last: list[Callable[[], object]] = []

    def __enter__(self) -> Commit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None:
            self.undo(error)
        self.finish()

    def undo(self, error: BaseException | None = None) -> None:
        """Undo every change since the block began.

        If one change cannot be undone, such as a `set_extra_state` that refuses its old state, the
        other changes are undone all the same. The error gets a note about it.

        Args:
            error: The error that ended the block, or None.

        Raises:
            PlacementError: If a change cannot be undone and `error` is None.
        """
        doubtful: dict[str, Exception] = {}
        self._last.clear()
        with torch.no_grad():
            while self._undo:
                action, names = self._undo.pop()
                try:
                    action()
                except Exception as problem:
                    doubtful.update(dict.fromkeys(names, problem))
        if not doubtful:
            return
        first = next(iter(doubtful.values()))
        text = f"{clipped_list(doubtful)}: {type(first).__name__}: {first}"
        if error is None:
            raise PlacementError(f"could not be put back as before: {text}") from first
        note(error, f"could not be put back as before, and is in doubt: {text}")

    def finish(self) -> None:
        """Keep all changes, so that an interrupt from here on does not undo them.

        Raises:
            IntegrityError: If a file was overwritten before its values were copied.
        """
        self._undo.clear()
        last, self._last = self._last, []
        with torch.no_grad():
            for change in last:
                change()

    def when_finished(self, change: Callable[[], object]) -> None:
        """Add a change that needs no undo because it is made last, when nothing else can fail."""
        self._last.append(change)

    def when_undone(self, action: Callable[[], object], *names: str) -> None:
        """Add an undo, which runs after those that are added later.

        Args:
            action: A function that undoes a change.
            names: Names that a message lists if the undo fails.
        """
        self._undo.append((action, names))

    def keep_attributes(self, modules: Iterable[nn.Module]) -> None:
        """Record the attributes of modules: slots, children, other attributes and containers.

        torch passes the live module to hooks. Some hooks register a buffer, some count their calls.
        """
        for module in modules:
            name = f"the attributes of {type(module).__name__}"
            for container in _containers(vars(module), set()):
                self.when_undone(_restore(container), name)

    def keep_flags(self, tree: ModuleTree) -> None:
        """Record `requires_grad` and the gradient of each tensor, without a copy of values."""
        for group in [*tree.groups, *tree.attributes]:
            tensor = group.tensor
            if tensor.is_leaf:
                again = partial(_equip_again, tensor, tensor.requires_grad, tensor.grad)
                self.when_undone(again, group.fqn)

    def keep_values(self, tensor: torch.Tensor, name: str) -> None:
        """Copy a tensor's values."""
        if tensor.is_meta or is_lazy(tensor):
            return
        whole = local_tensor(tensor)
        content, local = whole.detach(), _once(whole.detach())
        before, version = clone_of(local), version_of(local)

        def undo() -> None:
            if memory_of(whole) != memory_of(content) or whole.shape != content.shape:
                whole.data = content
            local.copy_(before)
            if version >= 0:  # a graph that was recorded before finds what it has seen
                set_version(local, version)

        self.when_undone(undo, name)

    def keep_optimizer(self, optimizer: torch.optim.Optimizer, *, values: bool = True) -> None:
        """Record an optimizer's attributes, groups and state.

        Args:
            optimizer: An optimizer.
            values: Whether to copy its tensors, because its own code may write into them.
        """
        name = f"the state of {type(optimizer).__name__}"
        for container in _containers(vars(optimizer), set()):
            self.when_undone(_restore(container), name)
        for leaf in leaves(list(optimizer.state.values())).values() if values else ():
            if isinstance(leaf, torch.Tensor):
                self.keep_values(leaf, name)

    def assign(self, group: Group, new: torch.Tensor) -> None:
        """Put `new` in every slot of the group. Other holders keep the old tensor."""
        successor = successor_of(group.tensor, new)
        for slot in group.slots:
            # setattr, not _parameters[name]: recurrent layers keep a list of their flat weights
            # up to date in __setattr__.
            self.when_undone(partial(setattr, slot.module, slot.name, group.tensor), slot.fqn)
            setattr(slot.module, slot.name, successor)

    def swap(self, group: Group, new: torch.Tensor) -> None:
        """Give the group's tensor object the content of `new`, which every holder then sees.

        Raises:
            PlacementError: If a holder of the object forbids this.
        """
        old = group.tensor
        takes_data = not (old.is_meta or is_lazy(old) or is_wrapper(old)) and is_plain(new)
        if takes_data and fits_data(old, new):
            self.set_data(old, new, group.fqn)
            return
        try:
            self.when_undone(exchange_content(group, successor_of(old, new)), group.fqn)
        except RuntimeError as error:  # somebody took hold of it since the plan was made
            raise PlacementError(
                f"cannot be swapped: {str(error).splitlines()[0]}",
                entry=group.fqn,
                hint='Release it first, or load with mode="assign".',
            ) from error

    def fill(self, pairs: Iterable[tuple[Group, torch.Tensor]]) -> None:
        """Give plain tensors on meta the content of new tensors that only the caller holds.

        This is `swap` without the checks that such tensors do not need: 0.9 us instead of 4 us.
        """
        for group, new in pairs:
            old: Any = group.tensor
            hooked = old._backward_hooks or old._post_accumulate_grad_hooks
            if hooked or has_holders(old) or not old.is_leaf or old.grad is not None:
                self.swap(group, new)
                continue
            if old.requires_grad and (new.is_floating_point() or new.is_complex()):
                new.requires_grad_()
            new.__class__ = old.__class__
            if known := old.__dict__:
                new.__dict__.update(known)
                new.__dict__.pop(CONSTRUCTION, None)
                old.__dict__, new.__dict__ = new.__dict__, known
            swap_content(old, new)
            self._undo.append((partial(_exchange_back, group, new), (group.slots[0].fqn,)))

    def set_data(self, old: torch.Tensor, new: torch.Tensor, name: str) -> None:
        """Give a live tensor other data, of any shape, and keep a gradient that fits."""
        before, grad = old.data, old.grad if old.is_leaf else None
        version = version_of(old)

        def undo() -> None:
            _set_data(old, before, grad)
            if version >= 0:
                set_version(old, version)

        self.when_undone(undo, name)
        _set_data(old, new, grad)


def _exchange_back(group: Group, other: torch.Tensor) -> None:
    """Give a tensor on meta back what it had, which was no gradient and no hook."""
    _equip(group.tensor, _NO_HOOKS, None)
    _exchange_unreferenced(group, other)


def _equip_again(tensor: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None) -> None:
    if tensor.requires_grad is not requires_grad:
        tensor.requires_grad = requires_grad  # the method refuses lazy ones
    if tensor.grad is not grad:
        tensor.grad = grad


_CONTENT: tuple[type, ...] = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


def _restore(container: Any) -> Callable[[], None]:
    """Return what gives a dict, list or set the content back that it has now."""
    content = container.copy()
    items = _items(content)

    def undo() -> None:
        now = _items(container)
        # What is the same is left alone: other threads may be looking at it.
        if len(now) == len(items) and all(map(is_, now, items)):
            return
        container.clear()
        (container.update if hasattr(container, "update") else container.extend)(content)

    return undo


def _items(container: Any) -> list[object]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _containers(value: Any, known: set[int]) -> Iterator[object]:
    """Yield the containers inside of a value that can be changed, with itself."""
    if (type(value) not in _CONTENT and type(value) is not tuple) or id(value) in known:
        return
    known.add(id(value))
    items = list(value.values() if isinstance(value, dict) else value)
    # A recurrent layer's to its weights: nothing that is weakly referenced can be exchanged.
    if any(isinstance(item, weakref.ref) for item in items):
        return
    if type(value) is not tuple:
        yield value
    for item in items:
        yield from _containers(item, known)


def _once(memory: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor without its repetitions, which torch refuses to write to."""
    if memory.layout is torch.strided:
        for dim, stride in enumerate(memory.stride()):
            if stride == 0 and memory.shape[dim] > 1:
                memory = memory.narrow(dim, 0, 1)
    return memory


def check_writable(group: Group) -> None:
    """Refuse an in-place copy that torch would refuse, or get wrong, half-way.

    Raises:
        PlacementError: If elements of the tensor share memory, or it may not be written to.
    """
    tensor = group.tensor
    if tensor.layout is torch.strided and repeats(tensor.shape, tensor.stride()):
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
        PlacementError: If it is a tensor of inference mode.
    """
    if group.tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise PlacementError(
            "cannot be written in place, because it was made in inference mode",
            entry=group.fqn,
            hint='Load with mode="assign", or inside torch.inference_mode().',
        )


def repeats(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements of such a view may share one place in memory, as expanded ones do.

    Example:
        >>> repeats((2, 3), (3, 1)), repeats((2, 3), (0, 1)), repeats((3, 2), (1, 1))
        (False, True, True)
    """
    if 0 in shape:
        return False
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step < reach:
                return True
            reach += (size - 1) * step
    return False

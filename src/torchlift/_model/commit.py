"""How one tensor gets into one slot (assign, copy, swap), and how all of it is taken back.

A load prepares every tensor first and then commits them here. A commit that fails half-way, for
whatever reason, is undone: the model is either loaded or as it was.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from torchlift._model.dtensor import dressed, held, is_sharded
from torchlift._model.handlers import is_plain, is_wrapper
from torchlift._model.holders import flat_references
from torchlift._model.slots import Group, is_lazy
from torchlift._model.torch_private import (
    fits_data,
    make_subclass,
    swap_content,
    use_count,
)
from torchlift._system import leaves, map_leaves
from torchlift.errors import PlacementError

#: Attribute under which a skeleton's tensor remembers how it was made; see `skeleton`.
RECIPE = "_torchlift_recipe"


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
            made = dressed(new, held(new), grad, isinstance(old, nn.Parameter))
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
        made = make_subclass(kind, new, grad)
    for key, value in old.__dict__.items():
        # A wrapper's own tensors are its old values.
        if key != RECIPE and not (is_wrapper(old) and isinstance(value, torch.Tensor)):
            made.__dict__.setdefault(key, value)
    return made


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
        swap_content(one, two)
        one.__dict__, two.__dict__ = two.__dict__, one.__dict__
        return
    torch.utils.swap_tensors(one, two)  # type: ignore[no-untyped-call]


def _is_lone(tensor: torch.Tensor) -> bool:
    """Whether nothing but Python's ordinary references holds the object and its content."""
    return (
        swap_content is not None and not weakref.getweakrefcount(tensor) and use_count(tensor) == 1
    )


def can_set_data(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether assigning ``old.data`` is possible: same kind of tensor, and both are real."""
    if old.is_meta or is_lazy(old) or is_wrapper(old) or not is_plain(new):
        return False
    return fits_data(old, new)


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


class Commit:
    """Changes to a model that take effect together: leaving the block by an error undoes them.

    The one undo of the house: what is about to change is noted first, and taken back in the
    opposite order.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()
        self._undo.clear()

    def undo(self) -> None:
        """Take everything back that was done since the block began."""
        with torch.no_grad():
            while self._undo:
                # One that fails (a `set_extra_state` that refuses what it had) must neither keep
                # the rest from being undone nor hide the error that brought us here.
                with suppress(Exception):
                    self._undo.pop()()

    def finish(self) -> None:
        """Keep what was done: an interrupt that was held back may come now, and undoes nothing."""
        self._undo.clear()

    def when_undone(self, action: Callable[[], object]) -> None:
        """Call this after everything that comes later has been taken back."""
        self._undo.append(action)

    def keep_attributes(self, modules: Iterable[nn.Module]) -> None:
        """Note what the modules have: tensors, children and attributes, not what is inside of them.

        torch gives a hook the live module. Some resize a parameter there, or register a buffer, so
        that what comes next fits; some count their calls.
        """
        for module in modules:
            attributes = dict(vars(module))
            registries = [(attributes[name], attributes[name].copy()) for name in _REGISTRIES]
            self._undo.append(partial(_restore, module, attributes, registries))

    def keep_values(self, tensor: torch.Tensor) -> None:
        """Note a tensor's values, in a second copy of them, and whether it asks for a gradient."""
        if tensor.is_meta or is_lazy(tensor):
            return
        local, grad = _once(held(tensor).detach()), tensor.requires_grad
        before = local.clone()

        def undo() -> None:
            local.copy_(before)
            if tensor.requires_grad is not grad:
                tensor.requires_grad_(grad)

        self._undo.append(undo)

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer's attributes, groups and state, in a second copy of its values."""
        attributes, groups = dict(vars(optimizer)), list(optimizer.param_groups)
        contents = [({**group}, list(group["params"])) for group in groups]
        state = optimizer.state
        inner = {key: (part, map_leaves(part, lambda leaf, _: leaf)) for key, part in state.items()}

        def undo() -> None:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            optimizer.param_groups[:] = groups
            for group, (content, params) in zip(groups, contents, strict=True):
                content["params"][:] = params
                group.clear()
                group.update(content)
            state.clear()
            for key, (part, content) in inner.items():
                if isinstance(part, dict):
                    part.clear()
                    part.update(content)
                state[key] = part

        self._undo.append(undo)
        for leaf in leaves(list(state.values())).values():
            if isinstance(leaf, torch.Tensor):
                self.keep_values(leaf)

    def put(self, group: Group, new: torch.Tensor) -> None:
        """Swap where that is possible, so that references survive, and assign elsewhere."""
        try:
            self.swap(group, new)
        except PlacementError:
            self.assign(group, new)

    def assign(self, group: Group, new: torch.Tensor) -> None:
        """Put `new` in every slot of the group; whoever held the old tensor keeps the old one."""
        successor = successor_of(group.tensor, new)
        for slot in group.slots:
            # setattr, not _parameters[name]: recurrent layers keep a list of their flat weights
            # up to date in __setattr__.
            self._undo.append(partial(setattr, slot.module, slot.name, group.tensor))
            setattr(slot.module, slot.name, successor)

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
        try:
            self._undo.append(exchange_content(group, successor_of(old, new)))
        except RuntimeError as error:  # somebody took hold of it since the plan was made
            raise PlacementError(
                f"cannot be swapped: {str(error).splitlines()[0]}",
                entry=group.fqn,
                hint='Release it first, or load with mode="assign".',
            ) from error

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
        local = held(group.tensor)
        if backup or not is_plain(local):  # a subclass may fail half-way in code of its own
            self.keep_values(group.tensor)
        with torch.no_grad():
            local.copy_(source)

    def extra_state(self, module: nn.Module, state: object) -> None:
        """Call the module's `set_extra_state`; give it back what it has now on failure."""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            before = copy.deepcopy(module.get_extra_state())
            self._undo.append(lambda: module.set_extra_state(before))
        module.set_extra_state(state)

    def attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set a plain attribute that is neither parameter nor buffer."""
        self.keep_attributes([module])
        vars(module)[name] = value


_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _restore(
    module: nn.Module, attributes: dict[str, Any], registries: list[tuple[Any, Any]]
) -> None:
    for name in vars(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    for registry, content in registries:
        registry.clear()
        registry.update(content)


def _once(memory: torch.Tensor) -> torch.Tensor:
    """Return what an expanded tensor repeats, once: torch refuses to write to the repetitions."""
    if memory.layout is torch.strided:
        for dim, stride in enumerate(memory.stride()):
            if stride == 0 and memory.shape[dim] > 1:
                memory = memory.narrow(dim, 0, 1)
    return memory


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

"""The places in a module where a tensor can go, and which of them are one tensor.

Reads modules only; nothing here changes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import parameter


@dataclass(frozen=True, slots=True)
class Slot:
    """One name in a module tree under which a parameter or buffer is registered.

    Attributes:
        fqn: fully qualified name from the root, as in ``state_dict``.
        module: the submodule that owns it.
        name: its attribute name there.
        persistent: whether ``state_dict`` contains it; False for non-persistent buffers.
    """

    fqn: str
    module: nn.Module
    name: str
    persistent: bool


@dataclass(frozen=True, slots=True)
class Group:
    """One tensor and every slot that holds it: more than one slot is a tie."""

    tensor: torch.Tensor
    slots: tuple[Slot, ...]

    @property
    def fqn(self) -> str:
        """The first name, which stands for the group."""
        return self.slots[0].fqn

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of ``state_dict``."""
        return tuple(slot.fqn for slot in self.slots)

    @property
    def persistent(self) -> bool:
        """Whether ``state_dict`` contains it under any name."""
        return any(slot.persistent for slot in self.slots)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter rather than a buffer."""
        return isinstance(self.tensor, nn.Parameter)


_LAZY: type = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer, which has no shape yet."""
    return isinstance(tensor, _LAZY)


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no values yet, so that nothing can be copied into it in place."""
    return tensor.is_meta or is_lazy(tensor)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(prefix, module) for every path to every submodule; a prefix ends in a dot unless empty.

    A module registered at two paths comes twice, as its tensors have two names each.
    """
    # A stack of its own: named_modules(remove_duplicate=False) passes every module up through one
    # generator per level, which is most of the time of a skeleton.
    todo: list[tuple[str, nn.Module]] = [("", model)]
    while todo:
        prefix, module = todo.pop()
        yield prefix, module
        todo += [
            (f"{prefix}{name}.", child)
            for name, child in reversed(module._modules.items())
            if child is not None
        ]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every submodule once, parents before their children.

    What `nn.Module.modules` yields in another order, in a fifth of the time.
    """
    found = {id(model): model}
    todo = [model]
    for module in todo:
        for child in module._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                todo.append(child)
    return todo


def collect(model: nn.Module) -> list[Group]:
    """Group every parameter and buffer of `model` by identity, in the order of ``state_dict``."""
    tensors: dict[int, tuple[torch.Tensor, list[Slot]]] = {}
    for prefix, module in walk(model):
        for name, weight in module._parameters.items():
            if weight is not None:
                slot = Slot(prefix + name, module, name, True)
                tensors.setdefault(id(weight), (weight, []))[1].append(slot)
        hidden = module._non_persistent_buffers_set
        for name, tensor in module._buffers.items():
            if tensor is not None:
                slot = Slot(prefix + name, module, name, name not in hidden)
                tensors.setdefault(id(tensor), (tensor, []))[1].append(slot)
    return [Group(tensor, tuple(slots)) for tensor, slots in tensors.values()]

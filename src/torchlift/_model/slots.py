"""Find the slots of a module, where tensors can go, and the ties: slots that hold one tensor.

This file reads modules and does not change them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from torchlift._model.dtensor import reshard
from torchlift._model.torch_private import LAZY

#: Attribute under which a skeleton's tensor, and the modules that hold it, remember how it was
#: made; see `skeleton`.
CONSTRUCTION = "_torchlift_recipe"


# Neither of these is ever changed. Frozen, which takes a call for each field, they would be a
# twentieth of a load that maps its file.
@dataclass(slots=True, eq=False)
class Slot:
    """One name in a module tree under which a parameter or buffer is registered.

    Attributes:
        fqn: The fully qualified name from the root, as in ``state_dict``.
        module: The submodule that owns the slot.
        name: The attribute name in the submodule.
        persistent: Whether ``state_dict`` contains it. False for non-persistent buffers.
    """

    fqn: str
    module: nn.Module
    name: str
    persistent: bool


@dataclass(slots=True, eq=False)
class Group:
    """One tensor and every slot that holds it: more than one slot is a tie."""

    tensor: torch.Tensor
    slots: tuple[Slot, ...]

    @property
    def fqn(self) -> str:
        """Return the first name, which stands for the group."""
        return self.slots[0].fqn

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names, in the order of ``state_dict``."""
        return tuple([slot.fqn for slot in self.slots])

    @property
    def persistent(self) -> bool:
        """Return whether ``state_dict`` contains it under any name."""
        return any(slot.persistent for slot in self.slots)

    @property
    def is_parameter(self) -> bool:
        """Return whether it is a parameter rather than a buffer."""
        return isinstance(self.tensor, nn.Parameter)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Say whether a tensor belongs to a lazy module and does not have a shape yet."""
    return isinstance(tensor, LAZY)


def is_blank(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is without values, so that nothing can be copied into it in place."""
    return tensor.is_meta or is_lazy(tensor)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix, module) for every path to every submodule.

    A prefix ends in a dot or is empty. A module that is registered at two paths is yielded twice.
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


class ModuleTree:
    """The modules of a model, walked once: every step of a load looks at these lists.

    Attributes:
        model: the root.
        paths: (prefix, module) for every path to every submodule, parents before their children.
        modules: every submodule once, in that order.
        groups: the parameters and buffers, grouped by identity, in the order of ``state_dict``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.walk()

    def walk(self) -> None:
        """Walk over the model again, whose own code may have changed it."""
        self.paths = list(walk(self.model))
        self.modules = list({id(module): module for _, module in self.paths}.values())
        self.__dict__.pop("groups", None)

    # When they are asked for: FSDP2 may first have to put its shards back into their slots.
    @cached_property
    def groups(self) -> list[Group]:
        tensors: dict[int, tuple[torch.Tensor, list[Slot]]] = {}
        for prefix, module in self.paths:
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

    @property
    def on_meta(self) -> list[Group]:
        """Return everything on meta: parameters, buffers and plain attributes."""
        return [group for group in [*self.groups, *self.meta_attributes] if group.tensor.is_meta]

    @property
    def meta_attributes(self) -> list[Group]:
        """Return those of `attributes` that are on meta."""
        return [group for group in self.attributes if group.tensor.is_meta]

    @property
    def attributes(self) -> list[Group]:
        """Return tensors that modules hold as plain attributes or in lists, tuples and dicts."""
        known = {id(group.tensor) for group in self.groups}
        found: list[Group] = []
        for prefix, module in self.paths:
            for name, value in vars(module).items():
                # Most attributes are flags, numbers and empty dicts of hooks. Their type alone
                # decides here, because each load checks every attribute of every module.
                kind = type(value)
                if kind in _PLAIN_TYPES:
                    continue
                if kind in _CONTAINERS:
                    if not value or name in _REGISTRIES:
                        continue
                elif not issubclass(kind, (torch.Tensor, dict, list, tuple)):
                    continue
                for tensor in _tensors(value, 0):
                    if id(tensor) not in known:
                        known.add(id(tensor))
                        found.append(Group(tensor, (Slot(prefix + name, module, name, False),)))
        return found


_PLAIN_TYPES = frozenset({bool, int, float, str, type(None), torch.dtype})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", CONSTRUCTION})


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth + 1)


def collect(model: nn.Module) -> list[Group]:
    """Group every parameter and buffer of `model` by identity, in the order of ``state_dict``."""
    return ModuleTree(model).groups


def read_tree(model: nn.Module) -> ModuleTree:
    """Walk over a model, whose gathered parameters FSDP2 shards again first."""
    tree = ModuleTree(model)
    reshard(tree.modules)
    return tree

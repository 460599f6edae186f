"""Give every tensor of a model one name, in any wrapper.

The canonical name (FQN) of a parameter is its name in the bare model. DDP, ``torch.compile``,
activation checkpointing and FSDP add a step to the path of a module, at any depth. This file knows
these steps and leaves them out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchlift._model.slots import ModuleTree
from torchlift._model.torch_private import CHECKPOINTED, COMPILED, FLATTENED, FULLY_SHARDED


class Names:
    """The canonical names of a model.

    Args:
        tree: the model's modules.
        modifiers: name of the method in which a module lists attributes that its state dict hooks
            leave out of the keys (``StateDictOptions.dsd_fqn_modifiers``).

    Attributes:
        tensors: canonical name -> parameter or persistent buffer.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
        >>> names = Names(ModuleTree(torch.compile(model, backend="eager")))
        >>> names.canonical("_orig_mod.0.weight")
        '0.weight'
        >>> names.key("0.weight")
        '_orig_mod.0.weight'
    """

    def __init__(self, tree: ModuleTree, modifiers: str = "_fqn_modifiers") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._fqns: dict[int, list[str]] = {}
        self._to_fqn: dict[str, str] = {}
        self._to_key: dict[str, str] = {}
        self._modules: dict[str, set[int]] = {}
        # Path of a module -> how the keys of the state dict and the canonical names begin there.
        begins = {"": ("", "")}
        for path, module in tree.paths:
            key, fqn = begins[path]
            self._to_fqn.setdefault(key, fqn)
            self._to_fqn.setdefault(path, fqn)
            self._to_key[fqn] = key
            self._modules.setdefault(fqn, set()).add(id(module))
            for name, tensor in (*module._buffers.items(), *module._parameters.items()):
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    self.tensors[fqn + name] = tensor
                    self._fqns.setdefault(id(tensor), []).append(fqn + name)
            inner, in_keys = wrapped_by(module)
            modified = getattr(module, modifiers, None) if modifiers else None
            hidden = set(modified().values()) if callable(modified) else set()
            for name, _ in module._modules.items():  # a ScriptModule's cannot be iterated over
                step = f"{name}."
                below = key + step, fqn + step
                if name == inner:
                    below = key + step if in_keys else key, fqn
                elif name in hidden:
                    below = key, fqn
                begins[path + step] = below

    @property
    def frozen(self) -> set[str]:
        """The names of parameters that are not trained."""
        return {
            name
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        }

    def fqns(self, tensor: torch.Tensor) -> list[str]:
        """Return every name of a tensor: several when it is tied, or none."""
        return self._fqns.get(id(tensor), [])

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor that the model does not have a name, if it has none yet."""
        self._fqns.setdefault(id(tensor), [name])

    def canonical(self, key: str) -> str:
        """Return the canonical name for a key of the wrapped model's state dict, or for a path."""
        return _translate(key, self._to_fqn)

    def key(self, fqn: str) -> str:
        """Return what the wrapped model's ``load_state_dict`` calls a canonical name."""
        return _translate(fqn, self._to_key)

    def keys(self, found: Iterable[str]) -> list[str]:
        """Return the keys of ``load_state_dict`` for names that are canonical or a wrapper's.

        Each name is read in the way that leads deeper into the model. It may have the parts of some
        of the wrappers, as the names of DDP for a model that is compiled inside DDP. If two names
        would get one key, all of them are a wrapper's names: a module may have a child called
        ``module``.
        """
        names = list(found)
        keys = [
            self.key(
                self.canonical(name)
                if len(_known(name, self._to_fqn)) > len(_known(name, self._to_key))
                else name
            )
            for name in names
        ]
        return keys if len(set(keys)) == len(set(names)) else names

    def prefixes(self, submodules: set[nn.Module]) -> list[str]:
        """Return how the names of the state of `submodules` begin: with a dot, or with nothing."""
        ids = set(map(id, submodules))
        return [prefix for prefix, modules in self._modules.items() if modules & ids]


def wrapped_by(module: nn.Module) -> tuple[str | None, bool]:
    """Return the attribute in which a wrapper has what it wraps, and whether keys contain it.

    Example:
        >>> wrapped_by(nn.Linear(1, 1))
        (None, True)
    """
    if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
        return "module", True
    for child, in_keys in _INSIDE if module._modules else ():
        if child in module._modules:
            return child, in_keys
    return None, True


_INSIDE = ((COMPILED, True), (CHECKPOINTED, False), (FULLY_SHARDED, False))
#: Names of the child in which a wrapper of PyTorch holds its module.
WRAPPERS = ("module", *(child for child, _ in _INSIDE))


def bare_name(name: str) -> str:
    """Return a name without the parts that a wrapper may have added.

    Example:
        >>> bare_name("module._orig_mod.head.weight")
        'head.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def wrapped_names(tree: ModuleTree) -> Names | None:
    """Return the names of a wrapped model, or None for a bare model, whose names are its paths."""
    return Names(tree) if any(wrapped_by(module)[0] for module in tree.modules) else None


def _translate(name: str, prefixes: dict[str, str]) -> str:
    old = _known(name, prefixes)
    return prefixes[old] + name[len(old) :] if old in prefixes else name


def _known(name: str, prefixes: dict[str, str]) -> str:
    """Return the longest of the prefixes that a name has."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        old = f"{path}." if path else ""
        if old in prefixes:
            return old
    return ""


def uses_fsdp1(model: object) -> bool:
    """Say whether any part of the model is a ``FullyShardedDataParallel``, which torch handles.

    Example:
        >>> uses_fsdp1(nn.Linear(1, 1))
        False
    """
    return isinstance(model, nn.Module) and any(map(is_fsdp1, model.modules()))


def is_fsdp1(module: nn.Module) -> bool:
    """Say whether a module is itself a ``FullyShardedDataParallel``.

    Example:
        >>> is_fsdp1(nn.Linear(1, 1))
        False
    """
    loaded = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(loaded, "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def is_flattened(param: torch.Tensor) -> bool:
    """Say whether a ``FullyShardedDataParallel`` has put a parameter, or made it, in flat memory.

    Example:
        >>> is_flattened(nn.Parameter(torch.ones(1)))
        False
    """
    return bool(getattr(param, FLATTENED, False))

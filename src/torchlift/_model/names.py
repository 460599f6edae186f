"""One name for every tensor of a model, whatever the model is wrapped in.

The canonical name (FQN) of a parameter is what the bare model calls it. DDP, ``torch.compile``,
activation checkpointing and FSDP add a step to the path of a module, at any depth; here each such
step is known and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchlift._model.torch_private import CHECKPOINTED, COMPILED

_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a model that its state dict has a key for.

    Attributes:
        fqn: the canonical name.
        key: what ``state_dict()`` and ``load_state_dict()`` of the wrapped model call it.
        module: where it lives.
        tensor: the parameter or buffer, None for extra state.
    """

    fqn: str
    key: str
    module: nn.Module
    tensor: torch.Tensor | None

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that is not trained."""
        return isinstance(self.tensor, nn.Parameter) and not self.tensor.requires_grad


class Names:
    """The canonical names of a model.

    Args:
        model: the model, wrapped or not.
        modifiers: name of the method in which a module lists attributes that its state dict hooks
            leave out of the keys (``StateDictOptions.dsd_fqn_modifiers``).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
        >>> names = Names(torch.compile(model, backend="eager"))
        >>> names.canonical("_orig_mod.0.weight")
        '0.weight'
        >>> names.key("0.weight")
        '_orig_mod.0.weight'
    """

    def __init__(self, model: nn.Module, modifiers: str = "_fqn_modifiers") -> None:
        self._modifiers = modifiers
        self._to_fqn: dict[str, str] = {}
        self._to_key: dict[str, str] = {}
        self._paths: dict[str, set[int]] = {}
        self.modules: dict[str, nn.Module] = {}
        self.slots = list(self._walk(model, "", "", ""))
        self._fqns: dict[int, list[str]] = {}
        for slot in self.slots:
            if slot.tensor is not None:
                self._fqns.setdefault(id(slot.tensor), []).append(slot.fqn)

    def fqns(self, tensor: torch.Tensor) -> list[str]:
        """Every name of a tensor of the model: several when it is tied, none when it is not in."""
        return self._fqns.get(id(tensor), [])

    def canonical(self, key: str) -> str:
        """Return the canonical name for a key of the wrapped model's state dict, or for a path."""
        return _translate(key, self._to_fqn)

    def key(self, fqn: str) -> str:
        """What the wrapped model's ``load_state_dict`` calls a canonical name."""
        return _translate(fqn, self._to_key)

    def prefixes(self, submodules: set[nn.Module]) -> list[str]:
        """The canonical prefixes, dot included, under which the state of `submodules` lies."""
        wanted = set(map(id, submodules))
        found = [name for name, modules in self._paths.items() if modules & wanted]
        return [f"{name}." if name else "" for name in found]

    def _walk(self, module: nn.Module, path: str, key: str, fqn: str) -> Iterator[Slot]:
        """Yield the slots below a module; `path`, `key` and `fqn` end in a dot or are empty."""
        self._to_fqn.setdefault(key, fqn)
        self._to_fqn.setdefault(path, fqn)
        self._to_key[fqn] = key
        self.modules[fqn[:-1]] = module
        self._paths.setdefault(fqn[:-1], set()).add(id(module))
        inner, in_keys = wrapped_by(module)
        hidden = self._hidden(module)
        for name, tensor in (*module._buffers.items(), *module._parameters.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield Slot(fqn + name, key + name, module, tensor)
        for name, child in module._modules.items():
            if child is None:
                continue
            below = f"{path}{name}."
            if name == inner:
                yield from self._walk(child, below, f"{key}{name}." if in_keys else key, fqn)
            elif name in hidden:
                yield from self._walk(child, below, key, fqn)
            else:
                yield from self._walk(child, below, f"{key}{name}.", f"{fqn}{name}.")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield Slot(fqn + _EXTRA, key + _EXTRA, module, None)

    def _hidden(self, module: nn.Module) -> set[str]:
        modifiers = getattr(module, self._modifiers, None) if self._modifiers else None
        return set(modifiers().values()) if callable(modifiers) else set()


def wrapped_by(module: nn.Module) -> tuple[str | None, bool]:
    """The attribute in which a wrapper holds what it wraps, and whether keys contain it.

    Example:
        >>> wrapped_by(nn.Linear(1, 1))
        (None, True)
    """
    if isinstance(module, DistributedDataParallel):
        return "module", True
    for child, in_keys in ((COMPILED, True), (CHECKPOINTED, False)):
        if child in module._modules:
            return child, in_keys
    return None, True


def _translate(name: str, prefixes: dict[str, str]) -> str:
    path = name
    while path:
        path = path.rpartition(".")[0]
        old = f"{path}." if path else ""
        if old in prefixes:
            return prefixes[old] + name[len(old) :]
    return name


def uses_fsdp1(model: object) -> bool:
    """Whether any part of the model is a ``FullyShardedDataParallel``, which torch handles itself.

    Example:
        >>> uses_fsdp1(nn.Linear(1, 1))
        False
    """
    return isinstance(model, nn.Module) and any(map(is_fsdp1, model.modules()))


def is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is itself a ``FullyShardedDataParallel``.

    Example:
        >>> is_fsdp1(nn.Linear(1, 1))
        False
    """
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FullyShardedDataParallel)

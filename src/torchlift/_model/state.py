"""Model state dicts under canonical names: read from a wrapped model."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchlift._model.names import Names
from torchlift.errors import StateDictMismatch

#: Set on the functions that `patch_model_state_dict` and `patch_optimizer_state_dict` put in place.
PATCH = "_torchlift_patch"


def own(obj: Any, method: str) -> Any:
    """Return the method that `obj` had before it was patched with ours or torch's.

    Example:
        >>> own(nn.Linear(1, 1), "state_dict").__name__
        'state_dict'
    """
    found = getattr(obj, method)
    theirs = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if hasattr(found, PATCH) or found in getattr(theirs, "_patched_state_dict", ()):
        return getattr(type(obj), method).__get__(obj)
    return found


class ModuleHolder(nn.ModuleDict):
    """Several models under any names. Each is saved and loaded as a root."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(modules)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of each model under its name, from a call without a prefix."""
        found: OrderedDict[str, Any] = OrderedDict()
        metadata: OrderedDict[str, Any] = OrderedDict()
        for name, module in self._modules.items():
            assert module is not None
            state = own(module, "state_dict")()
            found.update({f"{name}.{key}": value for key, value in state.items()})
            for path, version in (getattr(state, "_metadata", None) or {}).items():
                metadata[f"{name}.{path}".removesuffix(".")] = version
        found._metadata = metadata  # type: ignore[attr-defined]
        return found


def call_state_dict(optimizer: torch.optim.Optimizer) -> Any:
    """Call the ``state_dict`` that an optimizer had before it was patched.

    Raises:
        StateDictMismatch: If this rank does not have all of its state (ZeroRedundancyOptimizer).
    """
    try:
        return own(optimizer, "state_dict")()
    except RuntimeError as error:
        if not hasattr(optimizer, "consolidate_state_dict"):
            raise
        # torch's own message names another rank on each rank, where all must name one.
        raise StateDictMismatch(
            "this rank has the state of some of the optimizer's parameters only",
            entry=type(optimizer).__name__,
            hint="Call optimizer.consolidate_state_dict(to=0) on every rank, then save "
            "optimizer.state_dict() on rank 0. Its load_state_dict takes that on every rank.",
        ) from error


@contextmanager
def unpatched(*objects: nn.Module | torch.optim.Optimizer) -> Iterator[None]:
    """Take our patches off inside the block, where torch's functions call the methods.

    Theirs know their own patches only, and would call ours, which calls theirs.
    """
    kept = [
        (vars(obj), method, vars(obj).pop(method))
        for obj in objects
        for method in ("state_dict", "load_state_dict")
        if hasattr(vars(obj).get(method), PATCH)
    ]
    try:
        yield
    finally:
        for attributes, method, patch in kept:
            attributes[method] = patch


def read_model(
    model: nn.Module,
    names: Names,
    submodules: set[nn.Module] | None = None,
    *,
    frozen: bool = True,
    prefixed: bool = True,
) -> dict[str, Any]:
    """Return the state dict of `model` by canonical name, neither gathered nor on another device.

    Args:
        model: A model, in any wrapper.
        names: The canonical names of its tensors.
        submodules: Return the state of these only. None: of all.
        frozen: Whether to keep parameters that do not require gradients.
        prefixed: Whether names of submodules keep their prefix in the model.

    Raises:
        StateDictMismatch: If two keys have one canonical name.
        StateDictMismatch: If the ``state_dict`` of the model does not return a dict.
    """
    raw: Any = own(model, "state_dict")()
    if not isinstance(raw, Mapping):
        raise StateDictMismatch(
            "state_dict() of the model does not return a dict",
            entry=type(model).__name__,
            expected="a dict of names and values",
            found=f"a {type(raw).__name__}",
            hint="Return super().state_dict(*args, **kwargs) from the method, changed if need be.",
        )
    found = unique((names.canonical(key), value) for key, value in raw.items())
    versions = versions_of(raw, names.canonical)
    if not frozen:
        for name in names.frozen:
            found.pop(name, None)
    if submodules:
        prefixes = names.prefixes(submodules)
        found = unique(_only(found, prefixes, prefixed))
        paths = {f"{path}.": value for path, value in (versions or {}).items()}
        inside = {path[:-1]: value for path, value in _only(paths, prefixes, prefixed)}
        versions = None if versions is None else OrderedDict(inside)
    return versioned(found, versions)


def versioned(
    state: dict[str, Any], versions: Mapping[str, Mapping[str, object]] | None
) -> dict[str, Any]:
    """Add module versions (``_metadata``) to a state dict, if there are any.

    A later load uses them: BatchNorm, for example, has one more tensor since its version 2.
    """
    if versions is None or not state:
        return state
    state = OrderedDict(state)
    # Each a copy: torch writes to them when it loads with assign=True.
    state._metadata = OrderedDict(  # type: ignore[attr-defined]
        {path: dict(version) for path, version in versions.items()}
    )
    return state


def versions_of(
    state: Mapping[Any, Any], rename: Callable[[str], str]
) -> OrderedDict[str, Any] | None:
    """Copy the module versions of a state dict under other paths, or None if it lacks them.

    If a wrapper and its module get the same path, the version of the module is used.

    Args:
        state: A state dict, with ``_metadata`` or without.
        rename: Function from the key of a tensor to its new key.
    """
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return None
    return OrderedDict(
        (rename(f"{path}.x".removeprefix("."))[:-1].removesuffix("."), dict(value))
        for path, value in metadata.items()
    )


def _only(state: Mapping[str, Any], prefixes: list[str], keep: bool) -> Iterator[tuple[str, Any]]:
    longest = sorted(prefixes, key=len, reverse=True)
    return (
        (key if keep else key[len(prefix) :], value)
        for key, value in state.items()
        for prefix in itertools.islice(filter(key.startswith, longest), 1)
    )


def by_name(model_state: Any, names: Names) -> dict[str, Any]:
    """Return a copy of a state dict whose keys may be modules, each standing for a prefix.

    Raises:
        StateDictMismatch: If a key is not a string, or is a module outside of the model.

    Example:
        >>> from torchlift._model.slots import ModuleTree
        >>> model = nn.Sequential(nn.Linear(1, 1))
        >>> sorted(by_name({model[0]: {"bias": 0, "weight": 1}}, Names(ModuleTree(model))))
        ['0.bias', '0.weight']
    """
    copy: dict[Any, Any] = {}
    versions = dict(getattr(model_state, "_metadata", None) or {})
    for key, value in dict(model_state).items():
        if not isinstance(key, nn.Module):
            copy[key] = value
            continue
        prefixes = names.prefixes({key})
        if not isinstance(value, Mapping):
            raise StateDictMismatch(
                "the value for a module in the state dict must be a state dict",
                found=type(value).__name__,
                hint="Pass what module.state_dict() returns as the value.",
            )
        if not prefixes:
            raise StateDictMismatch(
                "a key of the state dict is a module that is not part of the model",
                found=type(key).__name__,
            )
        for prefix in prefixes:
            copy.update({prefix + name: item for name, item in value.items()})
            for path, version in (getattr(value, "_metadata", None) or {}).items():
                versions[(prefix + path).removesuffix(".")] = version
    for key in copy:
        if not isinstance(key, str):
            raise StateDictMismatch("a key of the state dict is not a string", found=repr(key))
        if "_flat_param" in key:
            raise StateDictMismatch(
                "the key of a flattened FSDP parameter does not have a canonical name",
                entry=key,
                hint="Pass the root module, not a part of it.",
            )
    return versioned(copy, versions or None)


def unique(pairs: Iterator[tuple[str, object]]) -> dict[str, object]:
    """Return a dict of `pairs` whose names are all different.

    Raises:
        StateDictMismatch: If a name occurs twice.

    Example:
        >>> unique(iter([("a", 1), ("b", 2)]))
        {'a': 1, 'b': 2}
    """
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise StateDictMismatch("two keys have the same canonical name", entry=name)
        found[name] = value
    return found

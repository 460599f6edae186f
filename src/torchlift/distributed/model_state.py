"""Model state dicts under canonical names: read from a wrapped model."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torchlift._model.names import Names
from torchlift.distributed.options import StateDictMismatch, StateDictOptions

#: Functions that `patch_model_state_dict` and `patch_optimizer_state_dict` put into objects.
PATCHED: set[Any] = set()


def own(obj: Any, method: str) -> Any:
    """The method that `obj` had before it was patched with ours or torch's.

    Example:
        >>> own(nn.Linear(1, 1), "state_dict").__name__
        'state_dict'
    """
    found = getattr(obj, method)
    theirs = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if found in PATCHED or found in getattr(theirs, "_patched_state_dict", ()):
        return getattr(type(obj), method).__get__(obj)
    return found


def read_model(
    model: nn.Module, names: Names, submodules: set[nn.Module] | None, options: StateDictOptions
) -> dict[str, Any]:
    """The state dict of `model` by canonical name, neither gathered nor moved."""
    raw = own(model, "state_dict")()
    found: OrderedDict[str, Any] = OrderedDict(
        unique((names.canonical(key), value) for key, value in raw.items())
    )
    if hasattr(raw, "_metadata"):
        # Module versions tell a later load which tensors to expect (BatchNorm has one more since
        # its version 2).
        found._metadata = _canonical_metadata(raw._metadata, names)  # type: ignore[attr-defined]
    if options.ignore_frozen_params:
        for slot in names.slots:
            if slot.is_frozen:
                found.pop(slot.fqn, None)
    if submodules:
        return _only(found, names.prefixes(submodules), options.keep_submodule_prefixes)
    return found


def _canonical_metadata(metadata: Any, names: Names) -> OrderedDict[str, Any]:
    """Metadata is per module; of wrappers and what they wrap, the wrapped module's counts."""
    found: OrderedDict[str, Any] = OrderedDict()
    for path, value in metadata.items():
        found[names.canonical(f"{path}.")[:-1] if path else ""] = dict(value)
    return found


def _only(state: dict[str, Any], prefixes: list[str], keep: bool) -> dict[str, Any]:
    return unique(
        (key if keep else key[len(prefix) :], value)
        for key, value in state.items()
        for prefix in _longest(key, prefixes)
    )


def _longest(key: str, prefixes: list[str]) -> list[str]:
    found = [prefix for prefix in prefixes if key.startswith(prefix)]
    return [max(found, key=len)] if found else []


def by_name(model_state: Any, names: Names) -> dict[str, Any]:
    """A copy of a state dict whose keys may be modules, each standing for a prefix.

    Raises:
        StateDictMismatch: a key is no string, or a module that the model does not contain.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1))
        >>> sorted(by_name({model[0]: {"bias": 0, "weight": 1}}, Names(model)))
        ['0.bias', '0.weight']
    """
    if not any(isinstance(key, nn.Module) for key in model_state):
        copy = dict(model_state)
    else:
        copy = {}
        for key, value in model_state.items():
            if not isinstance(key, nn.Module):
                copy[key] = value
                continue
            prefixes = names.prefixes({key})
            if not isinstance(value, Mapping):
                raise StateDictMismatch(
                    "the value for a module in the state dict is no state dict",
                    found=type(value).__name__,
                )
            if not prefixes:
                raise StateDictMismatch(
                    "a key of the state dict is a module that is not part of the model",
                    found=type(key).__name__,
                )
            for prefix in prefixes:
                copy.update({prefix + name: item for name, item in value.items()})
    for key in copy:
        if not isinstance(key, str):
            raise StateDictMismatch("a key of the state dict is no string", found=repr(key))
        if "_flat_param" in key:
            raise StateDictMismatch(
                "the key of a flattened FSDP parameter has no canonical name",
                entry=key,
                hint="Pass the root module, not a part of it.",
            )
    return copy


def metadata_of(model_state: Any, names: Names) -> OrderedDict[str, Any] | None:
    """A copy of the module versions in a state dict, under the keys of the wrapped model."""
    metadata = getattr(model_state, "_metadata", None)
    if metadata is None:
        return None
    found = OrderedDict()
    for path, value in metadata.items():
        found[names.key(f"{path}.")[:-1] if path else names.key("x")[:-2]] = dict(value)
    return found


def unique(pairs: Iterator[tuple[str, object]]) -> dict[str, object]:
    """A dict of `pairs`; two values for one name are an error, not a silent choice.

    Raises:
        StateDictMismatch: a name comes twice.

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

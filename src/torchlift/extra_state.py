"""Rebuilds a module's extra state, which a checkpoint holds flattened like everything else."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torchlift.formats import Index
from torchlift.formats.index import Leaf


def templates_by_name(index: Index, names: Mapping[str, str]) -> dict[str, object]:
    """Name of an extra state in the model -> its containers as they were saved.

    Args:
        index: the checkpoint.
        names: key in the checkpoint -> name in the model, for tensors and other leaves.
    """
    found: dict[str, object] = {}
    for key, tree in index.templates.items():
        for leaf in _leaves(tree):
            name, rest = names.get(leaf), leaf[len(key) :]
            if name is not None and name.endswith(rest):
                found[name[: len(name) - len(rest)]] = _moved(tree, key, name[: -len(rest) or None])
                break
    return found


def gather(local: MutableMapping[str, Any], name: str, templates: Mapping[str, object]) -> None:
    """Put the parts of the extra state called `name` together again, under its name."""
    inside = [key for key in local if key.startswith(name + ".")]
    if name in local or not inside:
        return
    tree = templates.get(name)
    if tree is not None and all(leaf in local for leaf in _leaves(tree)):
        local[name] = _filled(tree, local)
    else:
        local[name] = _nested(local, inside, name + ".")


def _leaves(tree: object) -> list[str]:
    if isinstance(tree, Leaf):
        return [tree.key]
    parts = tree.values() if isinstance(tree, dict) else tree
    assert not isinstance(parts, (str, Leaf))
    return [leaf for part in parts for leaf in _leaves(part)]  # type: ignore[attr-defined]


def _moved(tree: object, old: str, new: str) -> object:
    if isinstance(tree, Leaf):
        return Leaf(new + tree.key[len(old) :])
    if isinstance(tree, dict):
        return {key: _moved(part, old, new) for key, part in tree.items()}
    assert isinstance(tree, (list, tuple))
    return type(tree)([_moved(part, old, new) for part in tree])


def _filled(tree: object, local: MutableMapping[str, Any]) -> object:
    if isinstance(tree, Leaf):
        return local.pop(tree.key)
    if isinstance(tree, dict):
        return {key: _filled(part, local) for key, part in tree.items()}
    assert isinstance(tree, (list, tuple))
    return type(tree)([_filled(part, local) for part in tree])


def _nested(local: MutableMapping[str, Any], keys: list[str], prefix: str) -> dict[str, object]:
    """What the dotted keys tell: for formats without containers, and for changed state dicts."""
    state: dict[str, Any] = {}
    for key in keys:
        *path, last = key[len(prefix) :].split(".")
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[last] = local.pop(key)
    return state

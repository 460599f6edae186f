"""Rename, merge and split what a checkpoint contains, before it is matched with a model.

A merged tensor is an entry with the boxes of several tensors, and a split tensor has a part of the
boxes of one (`torchlift.formats.boxes`). A plan counts and reads both like a tensor that a
distributed writer saved in several files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchlift._plan.rules import Rename, apply_rename, rename_keys
from torchlift._system.containers import leaves
from torchlift.formats.index import TensorEntry
from torchlift.formats.source import errors_name


class Made(NamedTuple):
    """A tensor as a rename makes it.

    Attributes:
        entry: The place of its values.
        keys: The names in the checkpoint of what it is made of, in order.
    """

    entry: TensorEntry
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Rewriting:
    """A rename that makes one tensor of many, or many of one."""

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that values of `key` go to."""
        raise NotImplementedError

    def check(self, plain: Mapping[str, object], path: str) -> None:
        """Refuse a checkpoint with metadata of another model.

        Raises:
            MismatchError: If it is of another model.
        """

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor.

        Args:
            items: Name -> tensor, as the checkpoint or the rename before this one has it.
            path: The path of the checkpoint, for errors.

        Raises:
            MismatchError: If they do not match the rule.
        """
        raise NotImplementedError


def rewrite_entries(
    entries: Mapping[str, TensorEntry], rename: Rename | None, path: str
) -> dict[str, Made]:
    """Return name in the model -> the tensor that a rename, a merge or a split makes for it.

    Raises:
        MismatchError: If two keys get one name, or tensors to be merged do not match.
    """
    items = {key: Made(entry, (key,)) for key, entry in entries.items()}
    if isinstance(rename, Rewriting):
        with errors_name(path):
            return rename.rewrite(items, path)
    return {name: items[key] for key, name in rename_keys(entries, rename, path).items()}


def rename_objects(
    keys: Iterable[str], rename: Rename | None, path: str, made: Container[str] = ()
) -> dict[str, str]:
    """Return key -> name of non-tensor values. A rule cannot merge them.

    Args:
        keys: Their keys.
        rename: The rename of the tensors.
        path: The path of the checkpoint, for errors.
        made: Names of tensors. If a merging rule gives a value one of these names, or the name of
            another value, the value keeps its key.

    Raises:
        MismatchError: If another rename gives two values one name.
    """
    if not isinstance(rename, Rewriting):
        return rename_keys(keys, rename, path)
    names = apply_rename(keys, rename)
    counts = Counter(names.values())
    taken = {name for name, count in counts.items() if count > 1 or name in made}
    return {key: key if name in taken else name for key, name in names.items()}


def versions_by_name(
    versions: Mapping[str, Mapping[str, object]], names: Mapping[str, str]
) -> dict[str, Mapping[str, object]]:
    """Return path of a module of the model -> its metadata in the state dict.

    Args:
        versions: Path of a module in the source -> its metadata.
        names: Key in the source -> name in the model.
    """
    found: dict[str, Mapping[str, object]] = {}
    known: set[tuple[str, str]] = set()
    for key, name in names.items() if versions else ():
        old, new, last, other = key, name, "", ""
        # Also of the modules around it, as far as the two are called alike.
        while old and new and last == other:
            old, _, last = old.rpartition(".")
            new, _, other = new.rpartition(".")
            if (old, new) in known:
                break
            known.add((old, new))
            if old in versions:
                found[new] = versions[old]
    return found


def templates_by_name(
    templates: Mapping[str, object], names: Mapping[str, str]
) -> dict[str, object]:
    """Return name of a container in the model -> its containers as saved."""
    found: dict[str, object] = {}
    for key, tree in templates.items():
        for leaf in leaves(tree).values():
            name = names.get(key + leaf.key)
            if name is not None and name.endswith(leaf.key):
                found[name.removesuffix(leaf.key)] = tree
                break
    return found

"""`Checkpoint.tree`: the containers of a file as they were saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torchlift._checkpoint.kinds import DROPPED, Values
from torchlift._system.containers import leaves as leaves_of
from torchlift._system.containers import map_leaves
from torchlift.errors import CheckpointError, FormatError, PlacementError, UnsafeError
from torchlift.formats.flattening import (
    MISSING,
    ROOT_TENSOR,
    Containers,
    below,
    flatten_state,
    name_text,
    paths_inside,
    select,
)
from torchlift.formats.index import Index, Leaf, TensorEntry
from torchlift.formats.torch_pickle import Blocked, OrderedRecord, StorageRef, TensorRef


class Tree(Values):
    """The containers of an index with their values.

    Args:
        index: The index.
        view: Entry -> its tensor.
        refusal: Key -> the error for a value that cannot be rebuilt.
        dropped: Keys that are left out. Containers that become empty are left out, too.
    """

    def __init__(
        self,
        index: Index,
        view: Callable[[TensorEntry], object],
        refusal: Callable[[str], CheckpointError],
        dropped: Collection[str] = (),
    ) -> None:
        super().__init__(index.path, dropped)
        self.index, self.view, self.refusal = index, view, refusal
        self._copies: dict[TensorEntry, object] = {}

    def rebuild(self, root: str | None) -> Any:
        """Return one container of the index, or the whole object.

        Raises:
            FormatError: If the container does not exist.
        """
        assert self.index.tree is not None
        (saved,) = self.index.tree
        found = saved if root is None else below(saved, root, self.path)
        if found is MISSING and root is not None:
            select(self.index, root)  # raises the error that lists the containers
        is_one = root is None and self._containers.items(found) is None
        made = self.made(found, ROOT_TENSOR if is_one else root)
        return {} if made is DROPPED else made

    def tensor(self, record: object, key: str | None) -> object:
        if key is None:
            what = "a tensor does not have a key: it is in a name, a set or the metadata of a"
            raise FormatError(f"{what} state dict", file=self.path)
        entry = self.index.entries.get(key)
        if entry is None:
            raise self.refusal(key)
        if "negative" not in entry.encoding:
            return self.view(entry)
        # A negative view is a copy, unlike in torch. Tied keys share one copy, so they stay tied.
        same = entry._replace(key="")
        if same not in self._copies:
            self._copies[same] = self.view(entry)
        return self._copies[same]

    def blocked(self, record: Blocked, key: str | None) -> object:
        if key is not None:
            raise self.refusal(key)
        raise UnsafeError(
            "only unpickling could rebuild a name, an item of a set or metadata",
            file=self.path,
            found=record.name,
            hint="Take the tensors by their keys.",
        )


def arranged(
    tree: Tree,
    index: Index,
    changed: Collection[str],
    leaves: Mapping[str, object],
    versions: Mapping[str, Mapping[str, object]],
) -> dict[Any, Any] | None:
    """Return the containers of a tree with renamed keys.

    Args:
        tree: The containers, with `dropped` keys.
        index: Index of the tree.
        changed: Keys to remove from their containers.
        leaves: New name -> value. It goes into the deepest container that its name begins with.
        versions: New path of a module -> its local metadata.

    Returns:
        The containers. None if a list would lose an item, or a name is that of a container.
    """
    assert index.tree is not None
    paths = _dicts(index.tree[0], "", ())
    tree.dropped = {*tree.dropped, *changed}
    try:
        made = tree.rebuild(None)
    except PlacementError:
        return None
    if "" not in paths or not isinstance(made, dict):
        return None
    made = made or _emptied(index.tree[0])
    for name, value in leaves.items():
        at = name
        while at and (at := at.rpartition(".")[0]) not in paths:
            pass
        inside: Any = made
        record: Any = index.tree[0]
        for step in paths[at]:
            record = record[step]
            inside = inside.setdefault(step, _emptied(record))
        last = name[len(at) + 1 :] if at else name
        if not isinstance(inside, dict) or last in inside or name in paths:
            return None
        inside[last] = value
    _set_versions(made, "", versions)
    return made


def _emptied(record: object) -> Any:
    """Return an empty dict of the same class. State dicts are recognised by their class."""
    if not isinstance(record, OrderedRecord):
        return {}
    made: Any = OrderedDict()
    if record._metadata is not None:
        made._metadata = OrderedDict()
    return made


def _set_versions(made: object, key: str, versions: Mapping[str, Mapping[str, object]]) -> None:
    """Set the versions of modules in state dicts, by their new names."""
    if isinstance(made, dict):
        if hasattr(made, "_metadata"):
            made._metadata = OrderedDict(paths_inside(versions, key) if key else versions)
        for name, item in made.items():
            text = name_text(name)
            _set_versions(item, f"{key}.{text}" if key else text, versions)


def _dicts(value: object, key: str, path: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Return dotted name -> path of names, of dicts that are nested in dicts only."""
    found = {key: path} if isinstance(value, dict) else {}
    for name, item in value.items() if isinstance(value, dict) else ():
        text = name_text(name)
        found |= _dicts(item, f"{key}.{text}" if key else text, (*path, name))
    return found


def gathered(values: Mapping[str, object], templates: Mapping[str, object]) -> dict[str, object]:
    """Rebuild the lists and extra states of flat values.

    Args:
        values: Key -> value.
        templates: Key of a container -> the container, with a `Leaf` for each of its values.

    Returns:
        Key -> value. A container replaces its values if all of them exist.
    """
    made = dict(values)
    for name, tree in templates.items():
        keys = [name + leaf.key for leaf in leaves_of(tree).values() if isinstance(leaf, Leaf)]
        if keys and name not in made and all(key in made for key in keys):
            made[name] = map_leaves(tree, partial(_take, made, name))
    return made


def _take(values: dict[str, object], name: str, leaf: Leaf, _: object) -> object:
    """Remove and return the value of a leaf in the container `name`."""
    return values.pop(name + leaf.key)


class _Objects(Values):
    """Containers with plain values as they were saved. Tensors stay records."""

    def tensor(self, record: object, key: str | None) -> object:
        return record

    def blocked(self, record: Blocked, key: str | None) -> object:
        return record


def objects_as_saved(index: Index) -> dict[str, object]:
    """Return key -> plain value as it was saved. Empty if the format has names only.

    For example, a dtype is a ``torch.dtype`` here, but a text in the index.
    """
    if index.tree is None:
        return {}
    saved = _Objects(index.path).beside(*index.tree)
    objects = flatten_state(saved, Containers((TensorRef, StorageRef, Leaf))).objects
    return {key: value for key, value in objects.items() if key in index.objects}

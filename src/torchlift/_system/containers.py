"""Walk nested containers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any


def map_leaves(
    tree: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Copy nested containers with every leaf replaced by ``change(leaf, path)``.

    Example:
        >>> map_leaves({"a": [1, (2,)]}, lambda leaf, path: (leaf, *path))
        {'a': [(1, 'a', 0), ((2, 'a', 1, 0),)]}
    """
    if isinstance(tree, dict):
        return {key: map_leaves(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [map_leaves(value, change, (*path, i)) for i, value in enumerate(tree)]
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return change(tree, path)


def leaves(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return what nested containers hold, by its path.

    Example:
        >>> leaves({"a": [1, (2,)]})
        {('a', 0): 1, ('a', 1, 0): 2}
    """
    found: dict[tuple[Any, ...], Any] = {}
    map_leaves(tree, lambda leaf, path: found.setdefault(path, leaf))
    return found


def values_in(tree: object) -> Iterator[object]:
    """Yield what plain containers hold. To walk over another class would run its code.

    The lazy tables of transformers, for example, import every model of the library.

    Example:
        >>> sorted(values_in({"a": [1, (2,)]}))
        [1, 2]
    """
    todo, known = [tree], set[int]()
    while todo:
        one: Any = todo.pop()
        if type(one) not in (dict, OrderedDict, list, tuple, set):
            yield one
        elif id(one) not in known:
            known.add(id(one))
            todo += one.values() if isinstance(one, dict) else one

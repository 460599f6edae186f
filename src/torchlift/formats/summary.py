"""An index as text, HTML and JSON, with every untrusted name escaped.

A name may hold terminal escape sequences or markup. Printing an untrusted file must not move the
cursor, recolour the screen or run a script in a notebook.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from reprlib import repr as short_repr
from typing import Any, NamedTuple

from torchlift._store.files import FileStamp
from torchlift._system.text import human, printable
from torchlift._system.text import to_html as page
from torchlift.formats.index import Index, TensorEntry

_COLUMNS = ("key", "tensors", "size", "dtype", "shape", "location", "note")
_WIDEST_KEY = 120
#: Default number of lines of the tree, and of items in each list above it.
_LINES, _ITEMS = 40, 10
#: Most levels of the tree. Models nest less deep.
_DEEPEST = 64
_NUMBER = re.compile(r"[0-9]{1,9}\.?")
_shown = partial(printable, limit=300)

#: Order of `sorted_by` -> the sort key of an entry. Numbers in names count as numbers.
SORTS: dict[str, Callable[[TensorEntry], Any]] = {
    "file": lambda entry: 0,
    "name": lambda entry: [
        (len(part.lstrip("0")), part.lstrip("0")) if at % 2 else part
        for at, part in enumerate(re.split(r"([0-9]+)", entry.key))
    ],
    "size": lambda entry: -_size(entry),
    "dtype": lambda entry: entry.type_name,
    "shape": lambda entry: (len(entry.shape), entry.shape),
    "location": lambda entry: entry.location,
}

#: Further columns of a table of tensors, and key -> the tensor's cells in them.
Extra = tuple[Sequence[str], Mapping[str, Sequence[str]]]


def sorted_by(index: Index, order: str) -> Index:
    """Return an index with its entries in an order of `SORTS`. Equal entries keep their order."""
    entries = sorted(index.entries.values(), key=SORTS[order])
    return replace(index, entries={entry.key: entry for entry in entries})


def to_text(
    index: Index,
    *,
    rows: int | None = None,
    depth: int | None = None,
    by_size: bool = False,
) -> str:
    """Return a summary for a terminal: facts, and a tree of the modules with their sizes.

    Numbered modules that are alike, such as the layers of a transformer, share one line. A tensor
    with two names counts once.

    Args:
        index: The index.
        rows: Most lines of the tree and of each list. None: as many as fit a screen.
        depth: Levels of the tree. None: as many as fit in `rows`.
        by_size: Whether to put the largest module first.

    Returns:
        Lines without a final newline. Newlines are the only control characters.
    """
    lines = sys.maxsize if rows is None and depth is not None else rows
    rest = _Rest(index)
    tree, more = _tree(rest, _LINES if lines is None else lines, depth, by_size)
    return _text(rest, rows, tree, f"{more:,} more lines" if more else "")


def to_table(
    index: Index,
    *,
    rows: int | None = None,
    extra: Extra = ((), {}),
) -> str:
    """Return the facts of `to_text` and a table of the tensors instead of the tree.

    Args:
        index: The index.
        rows: Most tensors to list, and most items of each list. None: all tensors.
        extra: Further columns.
    """
    columns, cells = extra
    rest = _Rest(index)
    table = [
        (
            printable(entry.key, _WIDEST_KEY),
            "",
            *rest.of(entry),
            *cells.get(entry.key, [""] * len(columns)),
        )
        for entry in rest.entries[:rows]
    ]
    more = len(rest.entries) - len(table)
    table = [(*_COLUMNS, *columns), *table] if table else []
    return _text(rest, rows, table, f"{more:,} more tensors" if more else "")


def to_html(index: Index) -> str:
    """Return the summary of `to_text` for a notebook, with every cell escaped."""
    rest = _Rest(index)
    rows, more = _tree(rest, _LINES, None, False)
    tree = _without_empty(rows)
    return page(
        _shown(index.path),
        ((), _facts(rest, _ITEMS)),
        (tree[0] if tree else (), tree[1:]),
        ((), [(f"... and {more:,} more lines",)] if more else []),
    )


def to_json(index: Index) -> dict[str, Any]:
    """Return everything in the index as values that `json.dumps` takes, with sizes in bytes.

    Objects without a JSON form (bytes, sets, complex numbers, NaN) appear as their Python text.
    """
    rest = _Rest(index)
    return {
        "path": index.path,
        "format": index.format,
        "tensors": [_entry_json(entry) for entry in rest.entries],
        "elements": rest.elements,
        "nbytes": index.nbytes,
        "dtypes": _counts(entry.type_name for entry in rest.entries),
        "locations": _counts(entry.location for entry in rest.entries),
        "aliases": [list(group) for group in rest.aliases],
        "objects": {key: _value_json(value) for key, value in index.objects.items()},
        "metadata": dict(index.metadata),
        "blocked": list(index.blocked),
        "blocked_keys": dict(index.blocked_keys),
        "blocked_tensors": dict(index.blocked_tensors),
        "files": {
            path: {
                "size": stamp.size,
                **(
                    {"mtime_ns": stamp.mtime_ns}
                    if isinstance(stamp, FileStamp)
                    else {"version": stamp.version, "modified": stamp.modified}
                ),
            }
            for path, stamp in index.files.items()
        },
    }


def _text(
    rest: _Rest,
    rows: int | None,
    table: Sequence[Sequence[str]],
    more: str,
) -> str:
    facts = _facts(rest, _ITEMS if rows is None else rows)
    width = max(len(label) for label, _ in facts)
    lines = [_shown(rest.index.path), ""]
    lines += [f"{label:<{width}}  {value}" for label, value in facts]
    if table:
        lines += ["", *_align(_without_empty(table))]
    return "\n".join([*lines, f"... and {more}"] if more else lines)


def _facts(rest: _Rest, rows: int) -> list[tuple[str, str]]:
    """Return (label, value) of everything above the table."""
    index, entries = rest.index, rest.entries
    size = human(sum(stamp.size for stamp in index.files.values()))
    facts = [
        ("format", index.format),
        ("file size", size + (f" in {len(index.files):,} files" if len(index.files) > 1 else "")),
        ("tensors", f"{len(entries):,}"),
        ("elements", f"{rest.elements:,}"),
        ("storage", human(index.nbytes)),
        ("dtypes", _count_text(entry.type_name for entry in entries)),
        ("locations", _count_text(entry.location for entry in entries)),
    ]
    lists: list[tuple[str, Collection[Any], Callable[[Any], str]]] = [
        ("aliases", rest.aliases, _alias_text),
        (
            "objects",
            index.objects.items(),
            lambda x: f"{_shown(x[0])} = {_shown(short_repr(x[1]))}",
        ),
        ("blocked", index.blocked, _shown),
        (
            "not loadable",
            index.blocked_keys.items(),
            lambda x: " needs ".join(map(_shown, x)) + _tensors_in(index, x[0]),
        ),
        ("metadata", index.metadata.items(), lambda x: " = ".join(map(_shown, x))),
    ]
    for label, items, text in lists:
        lines = [text(item) for item in _first(items, rows)]
        if len(items) > len(lines):
            lines.append(f"... and {len(items) - len(lines)} more")
        facts += [("" if at else label, line) for at, line in enumerate(lines)]
    return [(label, value) for label, value in facts if value]


def _tensors_in(index: Index, key: str) -> str:
    """Return the number of tensors in a value that cannot be rebuilt, as text."""
    count = index.blocked_tensors.get(key)
    return f" ({count:,} {'tensor' if count == 1 else 'tensors'} in it)" if count else ""


def _alias_text(group: tuple[str, ...]) -> str:
    more = f" = ... ({len(group):,} keys)" if len(group) > 8 else ""
    return " = ".join(map(_shown, group[:8])) + more


class _Rest:
    """The cells of a tensor's line besides its name. They depend on the other tensors.

    Attributes:
        entries: The entries of the index.
        ties: Key -> an earlier key with the same elements of the same storage.
        elements: Number of elements of all tensors. Ties count once.
    """

    def __init__(self, index: Index) -> None:
        self.index, self.aliases = index, index.aliases
        self.entries = list(index.entries.values())
        self.ties: dict[str, str] = {}
        for group in self.aliases:
            first: dict[object, str] = {}
            for entry in map(index.entries.__getitem__, group):
                name = entry.type_name
                same = (entry.chunks, name, entry.shape, entry.stride, entry.encoding)
                tied = first.setdefault(same, entry.key)
                if tied != entry.key:
                    self.ties[entry.key] = tied
        self.on_host = {"cpu"}.issuperset(entry.location for entry in self.entries)

    @property
    def elements(self) -> int:
        return sum(entry.numel for entry in self.entries if entry.key not in self.ties)

    def size(self, entries: Iterable[TensorEntry]) -> int:
        return sum(_size(entry) for entry in entries if entry.key not in self.ties)

    def of(self, entry: TensorEntry) -> tuple[str, ...]:
        shape = "scalar" if not entry.shape else " x ".join(map(str, entry.shape))
        location = "" if self.on_host else _shown(entry.location)
        notes = []
        storage = self.index.storage_of(entry)
        if entry.key in self.ties:
            notes.append(f"= {_shown(self.ties[entry.key])}")
        # The storage of a NumPy array includes its header, so the array is not a view of it.
        elif self.index.format != "npz" and storage and len(entry.chunks) == 1:
            rest = entry.chunks[0].nbytes < storage.nbytes
            notes += [f"part of {human(storage.nbytes)}"] * rest
        if _size(entry) < entry.nbytes and entry.is_plain:
            notes.append(f"repeated to {human(entry.nbytes)}")
        if "deflated" in entry.encoding:
            notes.append("deflated")
        return human(_size(entry)), entry.type_name, shape, location, ", ".join(notes)


class _Node:
    """A line of the tree: a tensor, or the module of several.

    Attributes:
        label: Name in the line.
        entries: Its tensors. A line of several alike modules has those of the first module.
        start: Position in their keys at which the names below it begin.
        children: The lines below it.
    """

    __slots__ = ("children", "entries", "label", "start")

    def __init__(self, label: str, entries: list[TensorEntry], start: int) -> None:
        self.label, self.entries, self.start = label, entries, start
        self.children: list[_Node] = []

    def line(self, rest: _Rest) -> tuple[str, ...]:
        if len(self.entries) == 1:
            return ("", *rest.of(self.entries[0]))
        return (f"{len(self.entries):,}", human(rest.size(self.entries)), "", "", "", "")


class _Tree(NamedTuple):
    """The rows of a tree with their heads, and the number of rows that did not fit."""

    rows: list[tuple[str, ...]]
    more: int


def _tree(rest: _Rest, lines: int, depth: int | None, by_size: bool) -> _Tree:
    """Return the tree of modules in at most some lines."""
    top = level = _branches(rest.entries, 0, rest, by_size)
    shown = len(top)
    for _ in range(1, min(_DEEPEST if depth is None else depth, _DEEPEST)):
        below = [
            (node, _branches(node.entries, node.start, rest, by_size))
            for node in level
            if len(node.entries) > 1
        ]
        added = sum(len(children) for _, children in below)
        if not added or (depth is None and shown + added > lines):
            break
        for node, children in below:
            node.children = children
        level = [child for _, children in below for child in children]
        shown += added

    def rows(nodes: list[_Node], indent: str) -> Iterator[tuple[str, ...]]:
        for node in nodes:
            yield (indent + printable(node.label, _WIDEST_KEY), *node.line(rest))
            yield from rows(node.children, indent + "  ")

    found = _first(rows(top, ""), lines)
    return _Tree([_COLUMNS, *found] if found else [], shown - len(found))


def _branches(
    entries: list[TensorEntry], start: int, rest: _Rest, by_size: bool = False
) -> list[_Node]:
    """Return the lines below a module: its entries by the next component of their keys."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        stop = entry.key.find(".", start) + 1
        groups.setdefault(entry.key[start : stop or None], []).append(entry)
    numbers = {name: int(name.rstrip(".")) for name in groups if _NUMBER.fullmatch(name)}
    names = sorted(groups, key=numbers.__getitem__) if len(numbers) == len(groups) else list(groups)
    found: list[_Node] = []
    at = 0
    while at < len(names):
        first, group = names[at], groups[names[at]]
        like = _likeness(group, start + len(first), rest) if first in numbers else None
        last = at
        while (
            like is not None
            and last + 1 < len(names)
            and numbers.get(names[last + 1]) == numbers[names[last]] + 1
            and len(groups[names[last + 1]]) == len(group)
            and _likeness(groups[names[last + 1]], start + len(names[last + 1]), rest) == like
        ):
            last += 1
        if last > at:
            label = f"{numbers[first]} to {numbers[names[last]]}, each"
            found.append(_Node(label, group, start + len(first)))
        elif len(group) == 1:
            found.append(_Node(group[0].key[start:], group, len(group[0].key)))
        else:
            stop = _common_end(group, start + len(first))
            found.append(_Node(group[0].key[start : stop - 1], group, stop))
        at = last + 1
    return sorted(found, key=lambda node: -rest.size(node.entries)) if by_size else found


def _likeness(group: list[TensorEntry], start: int, rest: _Rest) -> list[tuple[object, ...]]:
    """Return a value that is equal for modules with the same content."""
    # Sorted: if a model was split into shards, the tensors of a layer may be in two of them.
    return sorted((e.key[start:], e.type_name, e.shape, e.key in rest.ties) for e in group)


def _common_end(group: list[TensorEntry], start: int) -> int:
    """Return the position after the components that all keys share, from `start` on."""
    key = group[0].key
    while stop := key.find(".", start) + 1:
        if not all(entry.key.startswith(key[start:stop], start) for entry in group):
            break
        start = stop
    return start


def _size(entry: TensorEntry) -> int:
    """Return the bytes that are stored for a tensor. Repeated elements (stride 0) count once."""
    stored = sum(chunk.nbytes for chunk in entry.chunks)
    return min(stored, entry.nbytes) if entry.is_plain else stored


def _without_empty(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return a table without the columns that are empty below their head."""
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*kept, strict=True)]


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _count_text(names: Iterable[str]) -> str:
    counts = list(_counts(names).items())
    more = f", ... and {len(counts) - 10} more" if len(counts) > 10 else ""
    return ", ".join(f"{_shown(name)} ({count:,})" for name, count in counts[:10]) + more


def _first(items: Iterable[Any], count: int) -> list[Any]:
    return list(islice(items, max(count, 0)))


def _entry_json(entry: TensorEntry) -> dict[str, Any]:
    kind = None if entry.kind is None else entry.kind.name
    return entry._asdict() | {"kind": kind, "chunks": [chunk._asdict() for chunk in entry.chunks]}


def _value_json(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _value_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value_json(item) for item in value]
    return repr(value)

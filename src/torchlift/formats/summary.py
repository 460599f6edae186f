"""An index as text, HTML and JSON, with every untrusted name escaped.

A name may hold terminal escape sequences or markup. Printing an untrusted file must not move the
cursor, recolour the screen or run a script in a notebook.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from reprlib import repr as short_repr
from typing import Any

from torchlift._system.text import count_of, human, printable
from torchlift._system.text import to_html as page
from torchlift.formats.index import Index, TensorEntry

_COLUMNS = ("key", "tensors", "size", "dtype", "shape", "location", "note")
_WIDEST_KEY = 120
#: Default number of lines, and of items in each list above them.
_LINES, _ITEMS = 40, 10
#: A number that is a component of a name, such as that of a layer.
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
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
    "shape": lambda entry: entry.shape,
    "location": lambda entry: entry.location,
}

#: Further columns of a table of tensors, and key -> the tensor's cells in them.
Extra = tuple[Sequence[str], Mapping[str, Sequence[str]]]


def sorted_by(index: Index, order: str) -> Index:
    """Return an index with its entries in an order of `SORTS`. Equal entries keep their order."""
    entries = sorted(index.tensors.values(), key=SORTS[order])
    return replace(index, tensors={entry.key: entry for entry in entries})


def to_text(
    index: Index,
    *,
    rows: int | None = None,
    each: bool = False,
    depth: int | None = None,
    extra: Extra = ((), {}),
) -> str:
    """Return a summary for a terminal: facts, and lines of tensors.

    Tensors that differ only in numbers of their names, such as those of a transformer's layers,
    share one line. A tensor with two names counts once.

    Args:
        index: The index.
        rows: Most lines of tensors, and most items of each list. None: as many as fit a screen.
        each: Whether each tensor has its own line. `rows` is unlimited then, by default.
        depth: The number of components of a name. Tensors that start with the same ones share a
            line, with their number and size.
        extra: Further columns, if each tensor has its own line.

    Returns:
        Lines without a final newline. Newlines are the only control characters.
    """
    cells, (columns, others) = _Cells(index), extra
    if each:
        table = [
            (*cells.line(entry.key, [entry]), *others.get(entry.key, [""] * len(columns)))
            for entry in cells.entries[:rows]
        ]
        left = len(cells.entries) - len(table)
    else:
        lines = cells.lines() if depth is None else cells.modules(depth)
        table = lines[: _LINES if rows is None else rows]
        left = len(lines) - len(table)
    facts = _facts(cells, _ITEMS if rows is None else rows)
    shown = [_shown(index.path), "", *_align(facts)]
    if table:
        shown += ["", *_align(_without_empty([(*_COLUMNS, *columns), *table]))]
    return "\n".join([*shown, _more(left, "tensor" if each else "line")] if left else shown)


def to_html(index: Index) -> str:
    """Return the summary of `to_text` for a notebook, with every cell escaped."""
    cells = _Cells(index)
    lines = cells.lines()
    head, *table = _without_empty([_COLUMNS, *lines[:_LINES]])
    left = len(lines) - len(table)
    return page(
        _shown(index.path),
        ((), _facts(cells, _ITEMS)),
        (head, table),
        ((), [(_more(left, "line"),)] if left else []),
    )


def to_json(index: Index) -> dict[str, Any]:
    """Return everything in the index as values that `json.dumps` takes, with sizes in bytes.

    Objects without a JSON form (bytes, sets, complex numbers, NaN) appear as their Python text.
    """
    cells = _Cells(index)
    return {
        "path": index.path,
        "format": index.format,
        "tensors": [_entry_json(entry) for entry in cells.entries],
        "elements": cells.elements,
        "nbytes": index.nbytes,
        "dtypes": _counts(entry.type_name for entry in cells.entries),
        "locations": _counts(entry.location for entry in cells.entries),
        "aliases": [list(group) for group in cells.aliases],
        "objects": {key: _value_json(value) for key, value in index.objects.items()},
        "metadata": dict(index.metadata),
        "blocked": list(index.blocked),
        "blocked_keys": dict(index.blocked_keys),
        "blocked_tensors": dict(index.blocked_tensors),
        "files": {path: {"size": stamp.size} for path, stamp in index.files.items()},
    }


def _more(left: int, noun: str) -> str:
    return f"... and {count_of(left, f'more {noun}')}"


def _facts(cells: _Cells, rows: int) -> list[tuple[str, str]]:
    """Return (label, value) of everything above the table."""
    index, entries = cells.index, cells.entries
    size = human(sum(stamp.size for stamp in index.files.values()))
    facts = [
        ("format", index.format),
        ("file size", size + (f" in {len(index.files):,} files" if len(index.files) > 1 else "")),
        ("tensors", f"{len(entries):,}"),
        ("elements", f"{cells.elements:,}"),
        ("storage", human(index.nbytes)),
        ("dtypes", _count_text(entry.type_name for entry in entries)),
        ("locations", _count_text(entry.location for entry in entries)),
    ]
    lists: list[tuple[str, Collection[Any], Callable[[Any], str]]] = [
        ("aliases", cells.aliases, _alias_text),
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
        lines = [text(item) for item in islice(items, rows)]
        if len(items) > len(lines):
            lines.append(f"... and {len(items) - len(lines)} more")
        facts += [("" if at else label, line) for at, line in enumerate(lines)]
    return [(label, value) for label, value in facts if value]


def _tensors_in(index: Index, key: str) -> str:
    """Return the number of tensors in a value that cannot be rebuilt, as text."""
    count = index.blocked_tensors.get(key)
    return f" ({count_of(count, 'tensor')} in it)" if count else ""


def _alias_text(group: tuple[str, ...]) -> str:
    more = f" = ... ({len(group):,} keys)" if len(group) > 8 else ""
    return " = ".join(map(_shown, group[:8])) + more


class _Cells:
    """The cells of tensors. Some depend on the other tensors.

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
        self.elements = sum(entry.numel for entry in self.entries if entry.key not in self.ties)
        self.on_host = {"cpu"}.issuperset(entry.location for entry in self.entries)

    def lines(self) -> list[tuple[str, ...]]:
        """Return a line for each group of tensors that differ only in numbers of their names."""
        groups: dict[tuple[object, ...], list[TensorEntry]] = {}
        for entry in self.entries:
            name = _NUMBER.sub("*", entry.key)
            alike = (name, entry.type_name, entry.shape, entry.location, entry.key in self.ties)
            groups.setdefault(alike, []).append(entry)
        return [self.line(_common_name(group), group) for group in groups.values()]

    def modules(self, depth: int) -> list[tuple[str, ...]]:
        """Return a line for each group of tensors with the same first components of their names."""
        groups: dict[str, list[TensorEntry]] = {}
        for entry in self.entries:
            groups.setdefault(".".join(entry.key.split(".", depth)[:depth]), []).append(entry)
        lines = []
        for name, group in groups.items():
            key, _, size, *others = self.line(name, group)
            facts = others if len(group) == 1 else [""] * len(others)
            lines.append((key, f"{len(group):,}", size, *facts))
        return lines

    def line(self, name: str, group: Sequence[TensorEntry]) -> tuple[str, ...]:
        """Return the cells of tensors of one dtype, shape and location."""
        entry = group[0]
        count = "" if len(group) == 1 else f"{len(group):,}"
        size = human(sum(map(_size, group)))
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        location = "" if self.on_host else _shown(entry.location)
        note = self.note(entry) if len(group) == 1 else ""
        key = printable(name, _WIDEST_KEY)
        return key, count, size, entry.type_name, shape, location, note

    def note(self, entry: TensorEntry) -> str:
        notes = []
        storage = self.index.storage_of(entry)
        if entry.key in self.ties:
            notes.append(f"= {_shown(self.ties[entry.key])}")
        elif storage and len(entry.chunks) == 1:
            is_part = entry.chunks[0].nbytes < storage.nbytes
            notes += [f"part of {human(storage.nbytes)}"] * is_part
        if _size(entry) < entry.nbytes and entry.is_plain:
            notes.append(f"repeated to {human(entry.nbytes)}")
        if "deflated" in entry.encoding:
            notes.append("deflated")
        return ", ".join(notes)


def _common_name(group: Sequence[TensorEntry]) -> str:
    """Return the name of one tensor, or that of several with ``*`` for numbers that differ."""
    components = zip(*(entry.key.split(".") for entry in group), strict=True)
    return ".".join(each[0] if len({*each}) == 1 else "*" for each in components)


def _size(entry: TensorEntry) -> int:
    """Return the bytes that are stored for a tensor. Repeated elements (stride 0) count once."""
    stored = sum(chunk.nbytes for chunk in entry.chunks)
    return min(stored, entry.nbytes) if entry.is_plain else stored


def _without_empty(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return a table without the columns that are empty below their head."""
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*kept, strict=True)] or [[]]


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

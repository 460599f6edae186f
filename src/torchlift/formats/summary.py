"""An index as text, HTML and JSON. Keys, tags and objects are a stranger's: all of it is escaped.

A name may hold terminal escape sequences or markup; printing a file one does not trust must not
move the cursor, recolour the screen or run a script in a notebook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from reprlib import repr as short_repr
from typing import Any

from torchlift._system import human, printable
from torchlift.formats.index import Chunk, Index, RebuiltEntry, TensorEntry

_COLUMNS = ("key", "dtype", "shape", "size", "location")
_WIDEST_KEY = 80
_shown = partial(printable, limit=300)


def to_text(index: Index, *, rows: int = 20) -> str:
    """Return a summary for a terminal.

    Args:
        index: what to describe.
        rows: most tensors, objects, aliases and blocked names to list of each.

    Returns:
        Lines without a final newline; no control characters but newlines.
    """
    facts = _facts(index, rows)
    width = max(len(label) for label, _ in facts)
    lines = [_shown(index.path), ""]
    lines += [f"{label:<{width}}  {value}" for label, value in facts]
    table = [_row(entry) for entry in _first(index.entries.values(), rows)]
    if table:
        lines += ["", *_align([_COLUMNS, *table])]
    if len(index.entries) > len(table):
        lines.append(f"... and {len(index.entries) - len(table)} more tensors")
    return "\n".join(lines)


def to_html(index: Index, *, rows: int = 20) -> str:
    """Return the same summary for a notebook, every part of it escaped.

    Args:
        index: what to describe.
        rows: most tensors to list.
    """
    from html import escape

    def cells(tag: str, values: Iterable[str]) -> str:
        return "".join(f"<{tag}>{escape(value)}</{tag.split()[0]}>" for value in values)

    left = " style='text-align:left'"
    facts = [cells("th" + left, [a]) + cells("td" + left, [b]) for a, b in _facts(index, rows)]
    tensors = [cells("td", _row(entry)) for entry in _first(index.entries.values(), rows)]
    more = len(index.entries) - rows
    return (
        f"<div class='torchlift-summary'><code>{escape(_shown(index.path))}</code><table>"
        + "".join(f"<tr>{row}</tr>" for row in facts)
        + f"</table><table><thead><tr>{cells('th', _COLUMNS)}</tr></thead><tbody>"
        + "".join(f"<tr>{row}</tr>" for row in tensors)
        + "</tbody></table>"
        + (f"<p>... and {more} more tensors</p>" if more > 0 else "")
        + "</div>"
    )


def to_json(index: Index) -> dict[str, Any]:
    """Return everything in the index as values that `json.dumps` takes; sizes in bytes.

    Objects that JSON cannot say (bytes, sets, complex numbers, NaN) appear as their Python text.
    """
    return {
        "path": index.path,
        "format": index.format,
        "tensors": [
            {**_fields(entry), "chunks": [_fields(chunk) for chunk in entry.chunks]}
            for entry in index.entries.values()
        ],
        "parameters": _unique_elements(index),
        "nbytes": index.nbytes,
        "dtypes": _counts(map(_kind, index.entries.values())),
        "locations": _counts(entry.location for entry in index.entries.values()),
        "aliases": [list(group) for group in index.aliases],
        "objects": {key: _value_json(value) for key, value in index.objects.items()},
        "metadata": dict(index.metadata),
        "blocked": list(index.blocked),
        "blocked_keys": dict(index.blocked_keys),
        "blocked_tensors": dict(index.blocked_tensors),
        "files": {
            path: {"size": stamp.size, "mtime_ns": stamp.mtime_ns}
            for path, stamp in index.files.items()
        },
    }


def _facts(index: Index, rows: int) -> list[tuple[str, str]]:
    """Return label and value of everything above the table."""
    entries = index.entries.values()
    facts = [
        ("format", index.format + (f", {len(index.files)} files" if len(index.files) > 1 else "")),
        ("tensors", f"{len(entries):,}"),
        ("parameters", f"{_unique_elements(index):,}"),
        ("storage", human(index.nbytes)),
        ("dtypes", _count_text(map(_kind, entries))),
        ("locations", _count_text(entry.location for entry in entries)),
    ]
    lists: list[tuple[str, Collection[Any], Callable[[Any], str]]] = [
        ("aliases", index.aliases, _alias_text),
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
    """Return how many tensors are in a value that cannot be had, where there are any."""
    count = index.blocked_tensors.get(key)
    return f" ({count:,} {'tensor' if count == 1 else 'tensors'} in it)" if count else ""


def _alias_text(group: tuple[str, ...]) -> str:
    more = f" = ... ({len(group):,} keys)" if len(group) > 8 else ""
    return " = ".join(map(_shown, group[:8])) + more


def _row(entry: TensorEntry) -> tuple[str, ...]:
    shape = "scalar" if not entry.shape else " x ".join(map(str, entry.shape))
    key = printable(entry.key, _WIDEST_KEY)
    nbytes = sum(chunk.nbytes for chunk in entry.chunks) if entry.is_quantized else entry.nbytes
    return (key, _kind(entry), shape, human(nbytes), _shown(entry.location))


def _kind(entry: TensorEntry) -> str:
    if isinstance(entry, RebuiltEntry):
        return f"{entry.encoding[0]} {entry.dtype}"
    return entry.encoding[0] if entry.is_quantized else entry.dtype


def _align(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _unique_elements(index: Index) -> int:
    """Count the elements of all tensors, each view of the same bytes once."""
    seen = {
        (entry.storage, entry.chunks[0].offset, entry.shape, entry.stride): entry.numel
        for entry in index.entries.values()
        if entry.chunks
    }
    return sum(seen.values())


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _count_text(names: Iterable[str]) -> str:
    counts = list(_counts(names).items())
    more = f", ... and {len(counts) - 10} more" if len(counts) > 10 else ""
    return ", ".join(f"{_shown(name)} ({count:,})" for name, count in counts[:10]) + more


def _first(items: Iterable[Any], count: int) -> list[Any]:
    return list(islice(items, max(count, 0)))


def _fields(record: TensorEntry | Chunk) -> dict[str, Any]:
    # Not dataclasses.asdict, which copies each number: of 100,000 chunks, for half a minute.
    values = ((name, getattr(record, name)) for name in record.__slots__)
    return {name: list(value) if type(value) is tuple else value for name, value in values}


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

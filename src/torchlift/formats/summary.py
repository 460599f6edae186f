"""An index as text, HTML and JSON. Keys, tags and objects are a stranger's: all of it is escaped.

A name may hold terminal escape sequences or markup; printing a file one does not trust must not
move the cursor, recolour the screen or run a script in a notebook.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torchlift._system import human, printable
from torchlift.formats.index import Index, TensorEntry

_COLUMNS = ("key", "dtype", "shape", "size", "location")
_WIDEST_KEY = 80
_shown = partial(printable, limit=300)


def to_text(index: Index, *, rows: int = 20) -> str:
    """A summary for a terminal.

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
    """The same summary for a notebook, every part of it escaped.

    Args:
        index: what to describe.
        rows: most tensors to list.
    """
    from html import escape

    parts = [f"<div class='torchlift-summary'><code>{escape(_shown(index.path))}</code><table>"]
    parts += [
        f"<tr><th style='text-align:left'>{escape(label)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for label, value in _facts(index, rows)
    ]
    parts.append("</table><table><thead><tr>")
    parts += [f"<th>{name}</th>" for name in _COLUMNS]
    parts.append("</tr></thead><tbody>")
    for entry in _first(index.entries.values(), rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _row(entry))
        parts.append(f"<tr>{cells}</tr>")
    parts.append("</tbody></table>")
    if len(index.entries) > rows:
        parts.append(f"<p>... and {len(index.entries) - rows} more tensors</p>")
    return "".join([*parts, "</div>"])


def to_json(index: Index) -> dict[str, Any]:
    """Everything in the index as values that `json.dumps` takes; sizes and offsets in bytes.

    Objects that JSON cannot say (bytes, sets, complex numbers, NaN) appear as their Python text.
    """
    return {
        "path": index.path,
        "format": index.format,
        "tensors": [_entry_json(entry) for entry in index.entries.values()],
        "parameters": _unique_elements(index),
        "nbytes": index.nbytes,
        "dtypes": _counts(entry.dtype for entry in index.entries.values()),
        "locations": _counts(entry.location for entry in index.entries.values()),
        "aliases": [list(group) for group in index.aliases],
        "objects": {key: _value_json(value) for key, value in index.objects.items()},
        "metadata": dict(index.metadata),
        "blocked": list(index.blocked),
        "blocked_keys": dict(index.blocked_keys),
        "files": {
            path: {"size": stamp.size, "mtime_ns": stamp.mtime_ns}
            for path, stamp in index.files.items()
        },
    }


def _facts(index: Index, rows: int) -> list[tuple[str, str]]:
    """Label and value of everything above the table."""
    count = len(index.entries)
    facts = [
        ("format", index.format + (f", {len(index.files)} files" if len(index.files) > 1 else "")),
        ("tensors", f"{count:,}"),
        ("parameters", f"{_unique_elements(index):,}"),
        ("storage", human(index.nbytes)),
        ("dtypes", _count_text(entry.dtype for entry in index.entries.values())),
        ("locations", _count_text(entry.location for entry in index.entries.values())),
    ]
    aliases = [" = ".join(map(_shown, group)) for group in _first(index.aliases, rows)]
    facts += _listed("aliases", aliases, len(index.aliases))
    objects = [
        f"{_shown(key)} = {_shown(_short(value))}"
        for key, value in _first(index.objects.items(), rows)
    ]
    facts += _listed("objects", objects, len(index.objects))
    blocked = [_shown(name) for name in _first(index.blocked, rows)]
    facts += _listed("blocked", blocked, len(index.blocked))
    needed = [
        f"{_shown(key)} needs {_shown(name)}"
        for key, name in _first(index.blocked_keys.items(), rows)
    ]
    facts += _listed("not loadable", needed, len(index.blocked_keys))
    notes = [
        f"{_shown(key)} = {_shown(value)}" for key, value in _first(index.metadata.items(), rows)
    ]
    facts += _listed("metadata", notes, len(index.metadata))
    return [(label, value) for label, value in facts if value]


def _listed(label: str, shown: list[str], total: int) -> list[tuple[str, str]]:
    """One fact per item, the label on the first only, and how many were left out."""
    if total > len(shown):
        shown = [*shown, f"... and {total - len(shown)} more"]
    return [(label if i == 0 else "", value) for i, value in enumerate(shown)]


def _row(entry: TensorEntry) -> tuple[str, ...]:
    shape = "scalar" if not entry.shape else " x ".join(map(str, entry.shape))
    key = printable(entry.key, _WIDEST_KEY)
    return (key, entry.dtype, shape, human(entry.nbytes), _shown(entry.location))


def _align(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _unique_elements(index: Index) -> int:
    """Elements of all tensors, those that show the same bytes in the same way counted once."""
    seen = {
        (entry.storage, entry.chunks[0].offset, entry.shape, entry.stride): entry.numel
        for entry in index.entries.values()
        if entry.chunks
    }
    return sum(seen.values())


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _count_text(names: Iterable[str]) -> str:
    counts = list(_counts(names).items())
    more = f", ... and {len(counts) - 10} more" if len(counts) > 10 else ""
    return ", ".join(f"{_shown(name)} ({count:,})" for name, count in counts[:10]) + more


def _first(items: Iterable[Any], count: int) -> list[Any]:
    return [item for item, _ in zip(items, range(max(count, 0)), strict=False)]


def _short(value: object) -> str:
    return reprlib.repr(value)


def _entry_json(entry: TensorEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "stride": list(entry.stride),
        "nbytes": entry.nbytes,
        "location": entry.location,
        "storage": entry.storage,
        "requires_grad": entry.requires_grad,
        "is_parameter": entry.is_parameter,
        "chunks": [
            {"file": c.file, "offset": c.offset, "nbytes": c.nbytes, "start": list(c.start),
             "shape": list(c.shape)}
            for c in entry.chunks
        ],
    }  # fmt: skip


def _value_json(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _value_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value_json(part) for part in value]
    return repr(value)

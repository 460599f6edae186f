"""Sizes, names and results as people read them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

_UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip


def parse_size(size: str | int) -> int:
    """Return the number of bytes that a text such as ``2GiB``, ``500 MB`` or ``4096`` means.

    Args:
        size: The text, or a number of bytes.

    Raises:
        ValueError: If the text is not a size, or the size is negative.

    Example:
        >>> from torchlift._system.text import parse_size
        >>> parse_size("2GiB"), parse_size("1.5 kB"), parse_size(4096)
        (2147483648, 1500, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?|)B?", str(size).strip().upper())
    if match is None or not isinstance(size, str):
        raise ValueError(f"not a size such as 2GiB or 500MB: {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])


@contextmanager
def progress_bar(shown: bool, total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a bar of bytes on stderr. Yield a function that adds a number of bytes to it."""
    if not shown:
        yield lambda _: None
        return
    from tqdm import tqdm

    bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what)

    def update(nbytes: int) -> None:
        # A stderr that went away must not interrupt work that is half done.
        with suppress(OSError, ValueError):
            bar.update(nbytes)

    try:
        yield update
    finally:
        with suppress(OSError, ValueError):
            bar.close()


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human(nbytes: float) -> str:
    """Return a number of bytes as people read it.

    Example:
        >>> human(500), human(3 * 2**29)
        ('500 B', '1.5 GiB')
    """
    unit = 0
    # As it is shown, rounded: 1,048,575 bytes are 1.0 MiB, and not 1024.0 KiB.
    while round(nbytes, min(unit, 1)) >= 1024 and unit < len(_BINARY) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.{min(unit, 1)}f} {_BINARY[unit]}"


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``2,000 tensors``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


# Cc: escape sequences, carriage returns, line breaks. Cf: characters that turn the direction of the
# line. Cs: lone surrogates, which cannot be encoded. Zl, Zp: separators that terminals break at.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, limit: int | None = None, *, lines: bool = False) -> str:
    r"""Escape what a terminal would obey or a reader could not see.

    A key in a hostile file can hold escape sequences that move the cursor, rename the window or
    paint a harmless-looking line over a real one.

    Args:
        text: anything, names from a file included.
        limit: characters after which the text is clipped, with its length behind it.
        lines: keep line breaks, for text of several lines.

    Returns:
        the text with such characters written as Python escapes.

    Example:
        >>> print(printable("layer\x1b[2K\nweight"), printable("x" * 1000, 30))
        layer\x1b[2K\nweight xxxxxxxxxx... (1000 characters)
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit - 20]}... ({len(text)} characters)"
    if text.isascii() and text.isprintable():
        return text
    safe = {c for c in text if unicodedata.category(c) not in _UNSAFE or (lines and c == "\n")}
    return "".join(c if c in safe else c.encode("unicode_escape").decode("ascii") for c in text)


def clipped_list(items: Iterable[str], separator: str = ", ", limit: int = 5) -> str:
    """Return the first of a stranger's names, and how many more there are."""
    first, more = [*items], ""
    if len(first) > limit:
        more = f"{separator}and {len(first) - limit} more"
    return separator.join(printable(name, 200) for name in first[:limit]) + more


#: Column heads, or none, and rows of cells.
Table = tuple[Sequence[str], Iterable[Sequence[str]]]


def to_html(title: str, *tables: Table) -> str:
    """Return a title and tables for a notebook. A table without rows is left out.

    Every cell is escaped, because names come from a file. The page's theme selects all colours.
    Blanks at the start of a cell are kept, because they show how deep it is.

    Example:
        >>> to_html("a < b", ((), [("layer", "4 B")])).partition("</style>")[2]
        '<code>a &lt; b</code><table><tr><td>layer</td><td>4 B</td></tr></table></div>'
    """
    from html import escape

    def line(tag: str, cells: Sequence[str]) -> str:
        shown = (f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells)
        return f"<tr>{''.join(shown)}</tr>"

    found = []
    for columns, rows in tables:
        body = "".join(line("td", row) for row in rows)
        head = f"<thead>{line('th', columns)}</thead>" if columns else ""
        found += [f"<table>{head}{body}</table>"] if body else []
    return (
        "<div class='torchlift-summary'><style>div.torchlift-summary{overflow-x:auto}"
        "div.torchlift-summary table{margin:0.3em 0}"
        "div.torchlift-summary th,div.torchlift-summary td{text-align:left;white-space:pre}</style>"
        f"<code>{escape(printable(title))}</code>{''.join(found)}</div>"
    )


#: What is known, as pairs of a label, or nothing, and a value.
Facts = list[tuple[str, str]]


class Summary:
    """A result that shows itself as a headline and facts, wherever it is shown.

    The last line of a cell shows the ``repr``: with every field of it, the plan of a model of 300
    tensors took 45,878 letters.
    """

    __slots__ = ()

    def _summary(self) -> tuple[str, Facts]:
        raise NotImplementedError

    def __str__(self) -> str:
        headline, facts = self._summary()
        lines = (f"  {label}: {value}" if label else f"  {value}" for label, value in facts)
        # A file's names may hold what a terminal would obey.
        return "\n".join(map(printable, (headline, *lines)))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        headline, facts = self._summary()
        labelled = any(label for label, _ in facts)
        return to_html(headline, ((), [fact if labelled else fact[1:] for fact in facts]))

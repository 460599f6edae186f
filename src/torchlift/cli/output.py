"""Text that is safe to send to a terminal, and JSON that every parser accepts."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

# Cc: escape sequences, carriage returns, line breaks. Cf: characters that turn the direction of the
# line. Cs: lone surrogates, which cannot be encoded. Zl, Zp: separators that terminals break at.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escape what a terminal would obey or a reader could not see.

    A key in a hostile file can hold escape sequences that move the cursor, rename the window or
    paint a harmless-looking line over a real one.

    Args:
        text: anything, names from a file included.
        lines: keep line breaks, for text of several lines.

    Returns:
        the text with such characters written as Python escapes.

    Example:
        >>> from torchlift.cli.output import printable
        >>> print(printable("layer\x1b[2K\nweight"))
        layer\x1b[2K\nweight
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if (lines and c == "\n") or _is_safe(c) else _escape(c) for c in text)


def _is_safe(char: str) -> bool:
    return unicodedata.category(char) not in _UNSAFE


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def print_json(data: Any) -> None:
    """Print one JSON document, ASCII only; a number that is not finite becomes null."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=True, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data

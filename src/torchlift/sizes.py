"""Sizes as people write them: ``20GiB``, ``500 MB``, ``4096``. Standard library only."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip


def parse_size(size: str | int) -> int:
    """A number of bytes from text such as ``2GiB``, ``500 MB`` or ``4096``.

    Args:
        size: the text; an int is taken as bytes already.

    Raises:
        ValueError: not such a text, or negative.

    Example:
        >>> from torchlift.sizes import parse_size
        >>> parse_size("2GiB"), parse_size("1.5 kB"), parse_size(4096)
        (2147483648, 1500, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?|)B?", str(size).strip().upper())
    if match is None or not isinstance(size, str):
        raise ValueError(f"not a size such as 2GiB or 500MB: {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])

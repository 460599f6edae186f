"""Where everything goes in a file that is yet to be written, format by format.

A layout is arithmetic over names, dtypes and shapes. Nothing here reads a weight, opens a file or
knows of other processes: whoever writes puts each payload at its offset, in any order and from
anywhere, and then what the layout calls the frame.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchlift.formats.index import ITEMSIZE

#: Formats of one file, and those of several.
FORMATS = ("safetensors", "torch-zip")
SETS = ("sharded", "dcp")
INDEX_SUFFIX = ".index.json"

_SUFFIXES = {
    ".safetensors": "safetensors", ".pt": "torch-zip", ".pth": "torch-zip", ".bin": "torch-zip",
    ".ckpt": "torch-zip",
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor that is to be stored, dense and row-major.

    Attributes:
        key: its name.
        dtype: such as ``"float32"``.
        shape: of the whole tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of its values, in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Payload(NamedTuple):
    """A tensor's place in the file: its first byte is at `offset`."""

    tensor: Stored
    offset: int


@dataclass(frozen=True)
class Layout:
    """A file that is yet to be written.

    Attributes:
        nbytes: size of the file.
        payloads: the weights, by ascending offset.
        checked: whether `frame` needs the CRC-32 of every payload; else it takes an empty list.
        frame: CRC-32s, in the order of the payloads -> (offset, bytes) of all that is not weights.
            Bytes of the file that are in neither stay zero. It takes a sum when it has given what
            stands before that payload, where the format lets it, so that one pass can write all.
        sums_first: whether the format does not: all sums stand before all payloads.
    """

    nbytes: int
    payloads: tuple[Payload, ...]
    checked: bool
    frame: Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]
    sums_first: bool = False


def format_for(path: str, given: str | None, known: Sequence[str] = FORMATS) -> str:
    """Return the format to write: the one that is asked for, or that of the suffix.

    Args:
        path: where to.
        given: what the caller asks for.
        known: the formats that can be written.

    Raises:
        ValueError: it is neither asked for nor clear, or it is not known.

    Example:
        >>> format_for("model.pt", None), format_for("model.pt", "safetensors")
        ('torch-zip', 'safetensors')
    """
    if given is not None:
        if given not in known:
            raise ValueError(f"format={given!r}: expected one of {', '.join(known)}, or None")
        return given
    if path.lower().endswith(INDEX_SUFFIX) and "sharded" in known:
        return "sharded"
    suffix = os.path.splitext(path)[1].lower()
    if not suffix and "sharded" in known:
        raise ValueError(
            f"{path}: a path without a suffix does not select a format. For a folder, pass "
            'format="sharded" (safetensors) or format="dcp". For a '
            "file, name it .safetensors or .pt"
        )
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"{path}: the suffix {suffix!r} does not select a format. Name the file "
            f".safetensors or .pt, or pass format= one of {', '.join(map(repr, known))}"
        )
    return _SUFFIXES[suffix]


def is_unicode(text: str) -> bool:
    """Return whether a text can be written in UTF-8: half of a surrogate pair cannot.

    Example:
        >>> is_unicode(chr(0x1F600)), is_unicode(chr(0xD83D))
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""The layout of a file before it is written: the offset of each tensor, and the bytes around them.

A layout is arithmetic over names, dtypes and shapes. It reads no weights and opens no files. A
writer puts each payload at its offset, in any order, and then writes the frame.
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

#: Suffix of a single file -> its format.
SUFFIXES = {
    ".safetensors": "safetensors", ".pt": "torch-zip", ".pth": "torch-zip", ".bin": "torch-zip",
    ".ckpt": "torch-zip",
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor to store, dense and row-major.

    Attributes:
        key: Key of the tensor.
        dtype: Dtype, such as ``"float32"``.
        shape: Shape of the whole tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of its values, in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Payload(NamedTuple):
    """A tensor and the offset of its first byte in the file."""

    tensor: Stored
    offset: int


@dataclass(frozen=True)
class Layout:
    """A file before it is written.

    Attributes:
        nbytes: Size of the file.
        payloads: The weights, by ascending offset.
        checked: Whether `frame` needs the CRC-32 of every payload. If not, it gets an empty list.
        frame: CRC-32s in the order of the payloads -> (offset, bytes) of everything but weights.
            Other bytes of the file stay zero. It yields the bytes before a payload before it takes
            the payload's sum, so that one pass can write the file.
    """

    nbytes: int
    payloads: tuple[Payload, ...]
    checked: bool
    frame: Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]


def format_for(path: str, given: str | None, known: Sequence[str] = FORMATS) -> str:
    """Return the format to write: the requested one, or the format of the suffix.

    Args:
        path: Path of the new file.
        given: The format that the caller requests, or None.
        known: The formats that can be written.

    Raises:
        ValueError: If the format is unknown, or the suffix does not select one.

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
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: the suffix {suffix!r} does not select a format. Name the file "
            f".safetensors or .pt, or pass format= one of {', '.join(map(repr, known))}"
        )
    return SUFFIXES[suffix]


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

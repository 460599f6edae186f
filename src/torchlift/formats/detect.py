"""Which reader a path needs, found from its content.

A new format is one file with a reader and one line in `_READERS`.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable

from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.index import Index
from torchlift.formats.safetensors import MAX_HEADER, read_safetensors
from torchlift.formats.torch_zip import read_torch_zip

#: Bytes at the start of a file that the detectors see.
_HEAD = 512


def read_index(path: str | os.PathLike[str]) -> Index:
    """Read the index of a checkpoint file or directory, whatever its format.

    Neither torch nor an unpickler is involved, and no weight is read. The time is that of reading
    the header: about a millisecond for a file of a few hundred tensors.

    Args:
        path: a file or a directory. Its name does not matter, only its content.

    Returns:
        The index; byte offsets count from the start of each file.

    Raises:
        FormatError: missing, malformed, or not a checkpoint that torchlift reads.
        UnsafeError: it names a file outside its own directory.

    Example:
        >>> import tempfile, os
        >>> header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
        >>> with open(path, "wb") as file:
        ...     _ = file.write(len(header).to_bytes(8, "little") + header + bytes(8))
        >>> read_index(path).entries["w"].shape
        (2,)
    """
    absolute = os.path.abspath(os.fsdecode(path))
    try:
        return _read(absolute)
    except CheckpointError as error:
        if error.file is None:
            error.file = absolute
        raise
    except FileNotFoundError as error:
        raise FormatError(
            "no such file or directory",
            file=absolute,
            hint="The file does not exist: check the path.",
        ) from error
    except OSError as error:
        raise FormatError("the file cannot be read", file=absolute, found=str(error)) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
        zlib.error,
    ) as error:
        raise FormatError(
            "the file is damaged", file=absolute, found=f"{type(error).__name__}: {error}"
        ) from error


def _read(path: str) -> Index:
    if os.path.isdir(path):
        raise FormatError("a directory, which torchlift does not read yet")
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        size = os.fstat(file.fileno()).st_size
    for detect, read in _READERS:
        if detect(head, size):
            return read(path)
    raise FormatError("not a checkpoint that torchlift reads")


def _is_zip(head: bytes, size: int) -> bool:
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def _is_safetensors(head: bytes, size: int) -> bool:
    if size < 9 or head[8:9] != b"{":
        return False
    return head[5:8] == b"\0\0\0" or int.from_bytes(head[:8], "little") <= MAX_HEADER


_Detector = Callable[[bytes, int], bool]
_Reader = Callable[[str], Index]

_READERS: tuple[tuple[_Detector, _Reader], ...] = (
    (_is_zip, read_torch_zip),
    (_is_safetensors, read_safetensors),
)

"""Which reader a path needs, found from its content.

A new format is one file with a reader and one line in `_DATA_READERS`.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable

from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.directory import read_directory_of_files
from torchlift.formats.index import Index
from torchlift.formats.safetensors import read_safetensors
from torchlift.formats.sharded import read_sharded
from torchlift.formats.sniff import HEAD, foreign, is_json, is_safetensors, is_zip
from torchlift.formats.torch_zip import read_torch_zip


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
    name = os.fsdecode(path)
    if not name:  # a setting that is not set: the current directory is not what was meant
        raise FormatError("an empty path", hint="Pass the path of a file or a directory.")
    absolute = os.path.abspath(name)
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
            hint="The file does not exist: check the path."
            + (" A ~ stands for nothing here: expand it first." if name[0] == "~" else ""),
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
    """Read a directory, or a file of any format."""
    if os.path.isdir(path):
        return read_directory_of_files(path, _read_data_file)
    return _read_file(path, _READERS)


def _read_data_file(path: str) -> Index:
    """Read a file that holds tensors itself: a shard cannot be an index of further shards."""
    return _read_file(path, _DATA_READERS)


def _read_file(path: str, readers: tuple[tuple[_Detector, _Reader], ...]) -> Index:
    if not stat.S_ISREG(os.stat(path).st_mode):
        # Opening a named pipe would wait for somebody to write into it.
        raise FormatError("not a regular file", file=path)
    with open(path, "rb") as file:
        head = file.read(HEAD)
        size = os.fstat(file.fileno()).st_size
    for detect, read in readers:
        if detect(head, size):
            return read(path)
    error = foreign(head, size)
    error.file = path
    raise error


def _read_json(path: str) -> Index:
    return read_sharded(path, _read_data_file)


_Detector = Callable[[bytes, int], bool]
_Reader = Callable[[str], Index]

_DATA_READERS: tuple[tuple[_Detector, _Reader], ...] = (
    (is_zip, read_torch_zip),
    (is_safetensors, read_safetensors),
)
_READERS = (*_DATA_READERS, (is_json, _read_json))

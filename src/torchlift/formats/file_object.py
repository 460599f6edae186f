"""The index of a file object: of the bytes that it yields, not of the file behind it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import BinaryIO

from torchlift._system.text import printable
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index

_BLOCK = 1 << 20  # bytes


@contextmanager
def index_of_object(file: BinaryIO) -> Iterator[Index]:
    """Yield the index of a file object, from its position on. Use it inside the block.

    Args:
        file: A file object that is open for reading bytes. Its position stays the same.

    Raises:
        FormatError: If it is in text mode, cannot seek, cannot be read, or is not a checkpoint.
        UnsafeError: As for `read_index`.
        TypeError: If it is not a file object.
    """
    if not hasattr(file, "read"):
        raise TypeError(f"expected a path or a binary file object, not {type(file).__name__}")
    path = _path_of(file)
    shown = path or _shown(file)
    try:
        is_text = isinstance(file.read(0), str)
        start = file.tell()
        file.seek(start)
    except Exception as error:  # open for writing, closed, or a pipe
        raise _unreadable(shown, f"{type(error).__name__}: {error}") from error
    if is_text:
        raise _unreadable(shown, "text")
    if path and not start:
        yield read_index(path)
        return
    from tempfile import NamedTemporaryFile  # late: `verify` of a path starts faster without it

    with NamedTemporaryFile() as copy:
        try:
            while data := file.read(_BLOCK):
                copy.write(data)
        except Exception as error:  # decompressors raise errors of their own
            raise _unreadable(shown, f"{type(error).__name__}: {error}") from error
        finally:
            with suppress(Exception):
                file.seek(start)
        copy.flush()
        try:
            index = read_index(copy.name, alone=True)
        except CheckpointError as error:
            error.file = shown  # the caller does not know the copy, which is deleted by then
            raise
        files = {name: replace(stamp, shown=shown) for name, stamp in index.files.items()}
        yield replace(index, path=shown, files=files)


def _unreadable(shown: str, found: str) -> FormatError:
    return FormatError(
        "the file object cannot be read",
        file=shown,
        expected="bytes from an object that can seek",
        found=found,
        hint="Open it for reading bytes, with mode 'rb'. If it cannot seek, pass "
        "io.BytesIO(file.read()). If it decompresses, its file may be damaged.",
    )


def _path_of(file: BinaryIO) -> str | None:
    """Return the path of an object that `open` returned, if that file still exists.

    Other types are copied: their descriptor and name may be those of compressed bytes.
    """
    with suppress(OSError, ValueError):  # closed, or another file has its name now
        raw = file.raw if isinstance(file, (io.BufferedReader, io.BufferedRandom)) else file
        is_open = type(file) in (io.BufferedReader, io.BufferedRandom, io.FileIO)
        if is_open and type(raw) is io.FileIO and isinstance(raw.name, (str, bytes)):
            is_there = os.path.samestat(os.stat(raw.name), os.fstat(raw.fileno()))
            return os.fsdecode(raw.name) if is_there else None
    return None


def _shown(file: BinaryIO) -> str:
    """Return the name of an object for errors: its class, and its name if that is text."""
    name = getattr(file, "name", None)
    text = f" {printable(name, 300)}" if isinstance(name, str) and name else ""
    return f"<{type(file).__name__}{text}>"

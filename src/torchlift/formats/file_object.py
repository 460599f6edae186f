"""The index of a file object: of the bytes that it yields, whatever file may be behind it."""

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
    """Return the index of a file object, from its position on; it may be used inside the block.

    Args:
        file: open for reading bytes; it has the same position afterwards.

    Raises:
        FormatError: it is open for text, cannot seek, cannot be read, or holds no checkpoint.
        UnsafeError: as of `read_index`.
        TypeError: it is not a file object.
    """
    if not hasattr(file, "read"):
        raise TypeError(f"expected a path or a binary file object, not {type(file).__name__}")
    path = _path_of(file)
    shown = path or _shown(file)
    start = _position(file, shown)
    if path and not start:
        yield read_index(path)
        return
    from tempfile import NamedTemporaryFile  # `verify` of a path answers sooner without it

    with NamedTemporaryFile() as copy:
        try:
            while data := file.read(_BLOCK):
                copy.write(data)
        except Exception as error:  # whatever decompresses has errors of its own
            raise FormatError(
                "the file object cannot be read",
                file=shown,
                found=f"{type(error).__name__}: {error}",
                hint="Open it for reading. If it decompresses, its file may be damaged.",
            ) from error
        finally:
            with suppress(Exception):
                file.seek(start)
        copy.flush()
        try:
            index = read_index(copy.name, alone=True)
        except CheckpointError as error:
            error.file = shown  # a caller does not know the copy, which is gone then
            raise
        files = {name: replace(stamp, shown=shown) for name, stamp in index.files.items()}
        yield replace(index, path=shown, files=files)


def _path_of(file: BinaryIO) -> str | None:
    """Return the path of an object that `open` has returned for one, and that is there still.

    Of other types, the descriptor and the name may be those of compressed bytes or of an archive.
    """
    with suppress(OSError, ValueError):  # it is closed, or its name is another file's by now
        raw = file.raw if isinstance(file, (io.BufferedReader, io.BufferedRandom)) else file
        is_open = type(file) in (io.BufferedReader, io.BufferedRandom, io.FileIO)
        if is_open and type(raw) is io.FileIO and isinstance(raw.name, (str, bytes)):
            is_there = os.path.samestat(os.stat(raw.name), os.fstat(raw.fileno()))
            return os.fsdecode(raw.name) if is_there else None
    return None


def _shown(file: BinaryIO) -> str:
    """Return what errors call an object: its class, and its name if that is text."""
    name = getattr(file, "name", None)
    text = f" {printable(name, 300)}" if isinstance(name, str) and name else ""
    return f"<{type(file).__name__}{text}>"


def _position(file: BinaryIO, shown: str) -> int:
    """Return where a file object is.

    Raises:
        FormatError: it is open for text, cannot be read, or cannot go back.
    """
    hint = "Open it for reading bytes, with mode 'rb'."
    try:
        if isinstance(file.read(0), str):
            raise FormatError("the file object is open in text mode", file=shown, hint=hint)
    except (OSError, ValueError) as error:  # open for writing, or closed
        what, found = "the file object cannot be read", f"{type(error).__name__}: {error}"
        raise FormatError(what, file=shown, found=found, hint=hint) from error
    try:
        start = file.tell()
        file.seek(start)
    except Exception as error:
        raise FormatError(
            "the file object cannot seek",
            file=shown,
            hint="Pass io.BytesIO(file.read()), or save the bytes to a file and pass its path.",
        ) from error
    return start

"""Damaged files, how they are refused, and files changed behind the back of their reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import torchlift
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.detect import read_index


def refused(path: Path, match: str, kind: type[CheckpointError] = FormatError) -> CheckpointError:
    """The error of reading a file, whose message must fit and name the file."""
    with pytest.raises(kind, match=match) as caught:
        read_index(path)
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value)
    return caught.value


def flip(path: Path, key: str, at: int = 0) -> None:
    """Change one bit of a tensor's payload and leave the file's times as they were."""
    (chunk,) = torchlift.open(path).entries[key].chunks
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(chunk.offset + at)
        byte = file.read(1)[0]
        file.seek(chunk.offset + at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def damage(path: Path, how: str) -> None:
    """Change a file under its reader's feet."""
    if how == "shorter":
        os.truncate(path, 100)
    elif how == "replaced":
        other = path.with_suffix(".other")
        other.write_bytes(path.read_bytes())
        os.replace(other, path)
    elif how == "overwritten":
        status = path.stat()
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        path.unlink()
        if how == "a pipe":
            os.mkfifo(path)

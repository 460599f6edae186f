"""What a system may do to a read of a header: give less, fail, or find the file shorter."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from valid_files import FORMATS, write_valid

from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index

#: A read of a file: the true one and how many bytes are asked for -> what is had.
Read = Callable[[Callable[[int], bytes], int], bytes]


@pytest.fixture(params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file, or a directory, of each format."""
    return write_valid(tmp_path / "d", request.param)


def read(path: Path, monkeypatch: pytest.MonkeyPatch, answer: Read) -> Index:
    """Read an index from files that are read so."""

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        data = answer(lambda size: os.pread(descriptor, size, offset), len(buffers[0]))
        buffers[0][: len(data)] = data
        return len(data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        return read_index(path)


def test_short_reads_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals and network mounts give less than was asked for, and the rest when asked again."""
    whole = read_index(path)
    found = read(path, monkeypatch, lambda true, size: true(min(size, 7)))
    assert dict(found.entries) == dict(whole.entries)
    assert found.objects == whole.objects


@pytest.mark.parametrize("problem", ["Input/output error", "shrank while it was read"])
def test_a_read_that_fails_is_an_error_with_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Whichever read it is; never an index of what was read until then."""
    left = 0

    def answer(true: Callable[[int], bytes], size: int) -> bytes:
        nonlocal left
        left -= 1
        if left >= 0:
            return true(size)
        if "error" in problem:
            raise OSError(errno.EIO, "Input/output error")
        return b""

    for reads in range(1_000):
        left = reads
        try:
            read(path, monkeypatch, answer)
        except FormatError as error:
            refusal = error
        else:
            break
        assert refusal.file is not None
        assert problem in str(refusal)
    assert reads > 0
    assert left >= 0

"""`tools/bench.py`: its plain readers, which are the limit of the machine."""

from __future__ import annotations

import errno
import os

import bench
import pytest

MIB = 2**20


@pytest.mark.parametrize("reader", bench.PLAIN_READERS, ids=bench.name_of)
def test_a_plain_reader_reads_every_byte(tmp_path, reader) -> None:
    """Also of files that end in the middle of a page, and of one that is empty."""
    contents = {"a": os.urandom(20 * MIB + 4097), "b": b"", "c": os.urandom(100)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in contents]
    try:
        areas = bench.read_once(files, reader)
    except OSError as error:
        if error.errno == errno.EINVAL and reader[1]:
            pytest.skip("this file system does not read directly")
        raise
    for area, content in zip(areas, contents.values(), strict=True):
        assert area[: len(content)] == content

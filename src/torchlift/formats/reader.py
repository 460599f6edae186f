"""The two functions that each format provides, as a `Reader`, and the `Content` that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

from torchlift.formats.index import LOCAL_MAGIC, Index, Record
from torchlift.formats.sharded import ReadFile
from torchlift.formats.source import Source
from torchlift.formats.unpickle import Budget
from torchlift.formats.zip_archive import END_MAGIC, read_directory

#: Bytes at the start of a file that decide on its format.
HEAD = 512


class Content:
    """A file or a directory whose format is not known yet.

    Attributes:
        path: Absolute path.
        names: Sorted names in a directory. Empty for a file.
        head: First bytes of a file, at most 512. Empty for a directory.
        budget: Budget for reading it.
    """

    def __init__(
        self,
        path: str,
        read_file: ReadFile,
        *,
        names: Iterable[str] = (),
        source: Source | None = None,
    ) -> None:
        self.path, self.names, self._source = path, list(names), source
        self.read_file = read_file
        self.budget = source.budget if source else Budget()
        self.head = source.read(0, min(HEAD, source.size)) if source else b""

    @property
    def source(self) -> Source:
        """Return the file, open for reading."""
        assert self._source is not None
        return self._source

    @cached_property
    def records(self) -> dict[str, Record]:
        """Return the records of a zip archive, by name. Other files have none."""
        return read_directory(self.source) if is_zip(self.head) else {}

    @cached_property
    def top(self) -> str:
        """Return the folder of the first record, with its slash, as torch's archives have one."""
        first = next(iter(self.records), "")
        return first[: first.find("/") + 1]


class Reader(NamedTuple):
    """How a format is read.

    Attributes:
        fits: Whether a content has this format, by its first bytes, its records or its names. It is
            called for every content, so it must be quick, and must not raise.
        read: Returns the index: every tensor with its bytes, counted from the start of the file,
            and every file with its stamp. It raises a `FormatError` for a damaged file.
    """

    fits: Callable[[Content], object]
    read: Callable[[Content], Index]


def is_zip(head: bytes) -> bool:
    """Return whether a file starts as a zip archive does."""
    return head[:4] in (LOCAL_MAGIC, END_MAGIC)

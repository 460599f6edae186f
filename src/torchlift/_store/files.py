"""A file of this machine: what identifies it, and reads of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlift.errors import FormatError, IntegrityError

_KINDS = {
    stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


def _read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, nbytes)


#: Descriptor, bytes, first byte -> at most so many: one call of the system, where it has that.
pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _read_at)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What identifies a file's content when it was indexed.

    The time of the last change of its attributes is not a part of it: a hard link, a chmod or a
    rename changes that time and not the content.

    Attributes:
        size: in bytes.
        mtime_ns: when its content changed last; anybody who may write can set it back.
        device: the file system.
        inode: the file on it.
        shown: what errors call it where it is a copy that nobody knows, or None.
    """

    size: int
    mtime_ns: int
    device: int
    inode: int
    shown: str | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, file: int | str) -> FileStamp:
        """Return the stamp of an open file, or of the one that a path leads to."""
        now = os.stat(file)
        return cls(now.st_size, now.st_mtime_ns, now.st_dev, now.st_ino)

    @property
    def time(self) -> float:
        """Return when its content changed last, in seconds since 1970."""
        return self.mtime_ns / 1e9

    def check(self, file: str, descriptor: int | None = None) -> None:
        """Refuse a file that is not the one that was indexed.

        Args:
            file: its path.
            descriptor: of the file, once it is open. Asked for the path first, since opening a
                named pipe in its place would wait for somebody to write into it.

        Raises:
            IntegrityError: it has changed, or is another one under the same name.
        """
        found = FileStamp.of(file if descriptor is None else descriptor)
        if found != self:
            raise IntegrityError(
                "the file changed after it was opened",
                file=self.shown or file,
                expected=self._text(),
                found=found._text(),
                hint="Open the checkpoint again once nobody writes to it.",
            )

    def open(self, file: str) -> Opened:
        """Open the file that was indexed.

        Raises:
            IntegrityError: it has changed, or is another one under the same name.
            OSError: it cannot be opened.
        """
        self.check(file)
        opened = LocalFile(file)
        try:
            self.check(file, opened.descriptor)
        except IntegrityError:
            opened.close()
            raise
        return opened

    def _text(self) -> str:
        return f"{self.size} bytes, modified at {self.mtime_ns} ns, inode {self.inode}"


class Opened:
    """Something with bytes that can be read at any place, by several threads at once.

    Attributes:
        place: its path or URL.
        size: in bytes.
        is_local: whether it is a file of this machine, which alone has a descriptor.
        descriptor: of a file.
        stamp: what identifies what is read.
        head: its first bytes, where they came with its size.
    """

    place: str
    stamp: Any
    size: int
    is_local = False
    descriptor = -1
    head = b""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers, one after the other, with the bytes from a place on.

        Returns:
            how many came: at least one, perhaps not all; none at the end of the file.
        """
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes at a place: all of them, or those until the end of the file."""
        data, done = bytearray(nbytes), 0
        while done < nbytes and (got := self.read_into([memoryview(data)[done:]], offset + done)):
            done += got
        return bytes(memoryview(data)[:done])

    def check(self) -> None:
        """Refuse it where it is not what it was when it was opened; after all that was read.

        Raises:
            IntegrityError: it has changed.
        """

    def close(self) -> None:
        """Give up what it takes to read."""


class LocalFile(Opened):
    """A file of this machine, open for reading.

    Both size and stamp are taken from the descriptor that is read: a stamp of the path could be
    that of another file, moved into place in between.

    Raises:
        FormatError: it is none that has bytes.
    """

    is_local = True

    def __init__(self, path: str) -> None:
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind != stat.S_IFREG:
            # Opening a named pipe would wait for somebody to write into it.
            found = f"a {_KINDS.get(kind, 'special file')}"
            raise FormatError("not a regular file", file=path, found=found)
        self.place = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.descriptor = self._file.fileno()
        self.stamp = FileStamp.of(self.descriptor)
        self.size = self.stamp.size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers, one after the other, with the bytes from a place on."""
        return os.preadv(self.descriptor, buffers, offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes at a place: all of them, or those until the end of the file."""
        data = pread(self.descriptor, nbytes, offset)
        while len(data) < nbytes:  # it may stop early: on signals, pipes, network mounts
            more = pread(self.descriptor, nbytes - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def check(self) -> None:
        """Refuse it where it is not what it was when it was opened."""
        self.stamp.check(self.place, self.descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        self._file.close()

"""Open a file of this machine, read it, and detect that it changed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlift.errors import CheckpointError, FormatError, IntegrityError, PlacementError

_KINDS = {
    stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


def _read_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    os.lseek(descriptor, offset, os.SEEK_SET)
    data = os.read(descriptor, len(buffers[0]))
    buffers[0][: len(data)] = data
    return len(data)


_FILES_HINT = "Allow more open files with ulimit -n, or close some."
#: Errors of a process that lacks something. The file is intact.
_LACKING: Mapping[int | None, tuple[type[CheckpointError], str]] = {
    errno.EMFILE: (CheckpointError, _FILES_HINT),
    errno.ENFILE: (CheckpointError, _FILES_HINT),
    errno.ENOMEM: (
        PlacementError,
        'Load with source="read" and a smaller dtype, such as dtype="bfloat16", or raise the limit '
        "of the process (ulimit -v).",
    ),
}


def read_error(
    reason: str,
    cause: OSError,
    file: str,
    hint: str | None = None,
    kind: type[CheckpointError] = IntegrityError,
) -> CheckpointError:
    """Return the error for a file that cannot be opened, read or mapped.

    Args:
        reason: What failed.
        cause: The error of the system.
        file: The path in the error.
        hint: The fix, unless the process lacks memory or descriptors.
        kind: The class of the error, unless the process lacks memory or descriptors.

    Example:
        >>> error = read_error("cannot be read", OSError(errno.EMFILE, "Too many open files"), "x")
        >>> type(error).__name__, error.reason
        ('CheckpointError', 'cannot be read (Too many open files)')
    """
    kind, hint = _LACKING.get(cause.errno, (kind, hint))
    return kind(f"{reason} ({cause.strerror})", file=file, hint=hint)


def change_error(file: str, before: str, now: str) -> IntegrityError:
    """Return the error for a file or an object that changed."""
    return IntegrityError(
        "the file changed after it was opened",
        file=file,
        expected=before,
        found=now,
        hint="Open the checkpoint again once nobody writes to it.",
    )


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The size, time and inode of a file when it was indexed.

    The time of the last change of attributes (ctime) is not compared. A hard link, a chmod or a
    rename changes that time, but not the content.

    Attributes:
        size: In bytes.
        mtime_ns: When the content last changed. A program that may write can set this time back.
        device: The number of the file system.
        inode: The number of the file on that file system.
        shown: The name in errors if the file is a temporary copy, or None.
    """

    size: int
    mtime_ns: int
    device: int
    inode: int
    shown: str | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, file: int | str) -> FileStamp:
        """Return the stamp of a descriptor or of a path."""
        now = os.stat(file)
        return cls(now.st_size, now.st_mtime_ns, now.st_dev, now.st_ino)

    def check(self, file: str, descriptor: int | None = None) -> None:
        """Raise an error unless the file is the one that was indexed.

        Args:
            file: The path.
            descriptor: The descriptor of the open file. None checks the path. Check the path before
                you open it: if a named pipe has replaced the file, `open` waits for a writer.

        Raises:
            IntegrityError: If the file changed, or another file has its name.
        """
        found = FileStamp.of(file if descriptor is None else descriptor)
        if found != self:
            raise change_error(self.shown or file, str(self), str(found))

    def open(self, file: str) -> Opened:
        """Open the file that was indexed.

        Raises:
            IntegrityError: If the file changed, or another file has its name.
            OSError: If the file cannot be opened.
        """
        self.check(file)
        opened = LocalFile(file)
        try:
            self.check(file, opened.descriptor)
        except IntegrityError:
            opened.close()
            raise
        return opened

    def __str__(self) -> str:
        return f"{self.size} bytes, modified at {self.mtime_ns} ns, inode {self.inode}"


class Opened:
    """An open file or URL. Several threads can read it at once, at any offset.

    Attributes:
        place: The path or URL.
        size: In bytes.
        is_local: Whether this is a file of this machine. Only such a file has a descriptor.
        descriptor: The descriptor of the file, or -1.
        stamp: The `FileStamp` or `UrlStamp` of the content.
        head: The first bytes, if they arrived with the size.
    """

    place: str
    stamp: Any
    size: int
    is_local = False
    descriptor = -1
    head = b""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order with the bytes that start at an offset.

        Returns:
            The number of bytes that arrived. It can be less than requested. It is 0 only at the end
            of the file.
        """
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at an offset. Return fewer only at the end of the file."""
        data, done = memoryview(bytearray(nbytes)), 0
        # Signals and network mounts cut a read short.
        while done < nbytes and (got := self.read_into([data[done:]], offset + done)):
            done += got
        return bytes(data[:done])

    def check(self) -> None:
        """Raise an error if the content changed since it was opened. Call this after all reads.

        Raises:
            IntegrityError: If the content changed.
        """

    def close(self) -> None:
        """Release the descriptor or connection."""


class LocalFile(Opened):
    """A file of this machine, open for reading.

    The size and the stamp come from the open descriptor. A stamp of the path could belong to
    another file that was moved there after the file was opened.

    Raises:
        FormatError: If the path is not a regular file.
    """

    is_local = True

    def __init__(self, path: str) -> None:
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind != stat.S_IFREG:
            # `open` of a named pipe would wait for a writer.
            found = f"a {_KINDS.get(kind, 'special file')}"
            raise FormatError("not a regular file", file=path, found=found)
        self.place = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.descriptor = self._file.fileno()
        self.stamp = FileStamp.of(self.descriptor)
        self.size = self.stamp.size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order with the bytes that start at an offset."""
        read: Callable[..., int] = getattr(os, "preadv", _read_at)  # Windows lacks `os.preadv`
        return read(self.descriptor, buffers, offset)

    def check(self) -> None:
        """Raise an error if the file changed since it was opened."""
        self.stamp.check(self.place, self.descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        self._file.close()

    def __del__(self) -> None:
        # The owner of many files drops some of them, which other threads may still read.
        if hasattr(self, "_file"):
            self._file.close()

"""A file that is written in secret and appears whole: nothing is left of it if its writer dies.

Where the file system can, the unfinished file has no name (``O_TMPFILE``): the kernel frees it with
the last process that has it open, whatever kills that. Processes of one machine reach it through
``/proc``. Elsewhere it has the name ``.NAME.RANDOM.part``, and its owner holds a lock (``flock``)
on it for as long as it lives; the next writer of the same path removes those that nobody locks.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
from contextlib import suppress
from typing import NamedTuple

try:
    from fcntl import LOCK_EX, LOCK_NB, flock

    _HAS_LOCKS = True
except ImportError:  # Windows: nobody can tell a dead writer's file from a live one's
    _HAS_LOCKS = False

_CLOEXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_ANONYMOUS = getattr(os, "O_TMPFILE", 0)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Address(NamedTuple):
    """How another process opens an unfinished file.

    Attributes:
        path: of the file, perhaps one in ``/proc`` that means something on one machine only.
        machine: which, or an empty text where the path means the same everywhere.
        device: of the file, as its machine numbers them.
        inode: of the file.
    """

    path: str
    machine: str
    device: int
    inode: int

    def open(self) -> int:
        """A descriptor to write with.

        Raises:
            OSError: this process does not reach the file.
        """
        if self.machine:
            if self.machine != _machine():
                raise FileNotFoundError(f"{self.path} is a file of another machine")
            # A process in a container of its own counts processes differently.
            found = os.stat(self.path)
            if (found.st_dev, found.st_ino) != (self.device, self.inode):
                raise FileNotFoundError(f"{self.path} is another file here")
        return os.open(self.path, os.O_WRONLY | _CLOEXEC)


class Unfinished:
    """The owner's side of an unfinished file.

    Attributes:
        descriptor: to read and write it with.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> file = Unfinished(os.path.join(folder, "x"))
        >>> os.write(file.descriptor, b"abc")
        3
        >>> file.commit(); file.close()
        >>> os.listdir(folder)
        ['x']
    """

    def __init__(self, path: str, *, named: bool = False) -> None:
        """Create it, and remove what dead writers of the same path left.

        Args:
            path: absolute, of the file to be.
            named: give it a name at once, for processes of other machines.

        Raises:
            OSError: it cannot be created.
        """
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path} is a directory")
        self._path = path
        self._folder, self._name = os.path.split(path)
        self._part: str | None = None
        remove_debris(path)
        self.descriptor = -1 if named else self._open_anonymous()
        if self.descriptor < 0:
            self.descriptor = self._open_named()

    def address(self) -> Address:
        """How other processes open the file."""
        found = os.fstat(self.descriptor)
        if self._part is not None:
            return Address(self._part, "", found.st_dev, found.st_ino)
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return Address(path, _machine(), found.st_dev, found.st_ino)

    def commit(self) -> None:
        """Make everything durable and let the file appear under its name, replacing another.

        Raises:
            OSError: it does not appear; or it has, and the folder cannot be made durable.
        """
        os.fsync(self.descriptor)
        if self._part is None:
            self._part = self._link()
        os.replace(self._part, self._path)
        self._part = None
        if hasattr(os, "O_DIRECTORY"):
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Forget the file; remove it unless it was committed."""
        if self._part is not None:
            with suppress(OSError):
                os.unlink(self._part)
            self._part = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _open_anonymous(self) -> int:
        """A descriptor of a file without a name, or -1 where there is no such thing."""
        if not _ANONYMOUS or not _machine():
            return -1
        try:
            descriptor = os.open(self._folder, _ANONYMOUS | os.O_RDWR | _CLOEXEC, 0o666)
        except OSError:
            return -1
        try:  # An old kernel makes the descriptor but has no way to name it: better to know now.
            os.stat(f"/proc/self/fd/{descriptor}")
        except OSError:
            os.close(descriptor)
            return -1
        _lock(descriptor)  # for the moment in which it is linked and not yet renamed
        return descriptor

    def _open_named(self) -> int:
        while True:
            descriptor, part = tempfile.mkstemp(
                prefix=f".{self._name}.", suffix=".part", dir=self._folder
            )
            self._part = part
            _lock(descriptor)
            # Between the two, another writer may have taken the file for a dead one's.
            if os.path.exists(part):
                os.chmod(part, 0o666 & ~_umask())
                return descriptor
            os.close(descriptor)

    def _link(self) -> str:
        """Give a file without a name one, beside the path: only a rename replaces atomically."""
        folder = os.open(self._folder, os.O_RDONLY)
        source = f"/proc/self/fd/{self.descriptor}"
        try:
            while True:
                part = os.path.join(self._folder, f".{self._name}.{_random()}.part")
                with suppress(FileExistsError):
                    # With a folder given, Python uses linkat, which alone follows the link in /proc
                    os.link(source, part, src_dir_fd=folder, follow_symlinks=True)
                    return part
        finally:
            os.close(folder)


def remove_debris(path: str) -> list[str]:
    """Remove unfinished files of a path whose writers are dead.

    Args:
        path: absolute, of the finished file.

    Returns:
        Names of what was removed.
    """
    if not _HAS_LOCKS:
        return []
    folder, name = os.path.split(path)
    pattern = re.compile(re.escape(f".{name}.") + r"[a-z0-9_]{8}\.part")
    removed = []
    for found in filter(pattern.fullmatch, os.listdir(folder)):
        # Not allowed to open, or locked by a live writer: neither is ours to remove.
        with suppress(OSError):
            descriptor = os.open(os.path.join(folder, found), os.O_RDWR | os.O_NOFOLLOW | _CLOEXEC)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                os.unlink(os.path.join(folder, found))
                removed.append(found)
            finally:
                os.close(descriptor)
    return removed


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        if done <= 0:
            raise OSError("nothing was written")
        view, offset = view[done:], offset + done


def _lock(descriptor: int) -> None:
    # A file system without locks: nobody can lock there, so nobody takes the file for debris.
    if _HAS_LOCKS:
        with suppress(OSError):
            flock(descriptor, LOCK_EX)


def _random() -> str:
    return "".join(random.SystemRandom().choices("abcdefghijklmnopqrstuvwxyz0123456789_", k=8))


def _machine() -> str:
    """What tells this machine from all others; empty where there is no ``/proc``."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

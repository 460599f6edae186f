"""A file that is written in secret and appears whole: nothing is left of it if its writer dies.

Where the file system can, the unfinished file has no name (``O_TMPFILE``): the kernel frees it with
the last process that has it open, whatever kills that. Processes of one machine reach it through
``/proc``. Elsewhere it has the name ``.NAME.torchlift-RANDOM.part``, and its owner holds a lock
(``flock``) on it for as long as it lives; the next writer of the same path removes those that
nobody locks.
"""

from __future__ import annotations

import os
import random
import re
import stat
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
_MARK = ".torchlift-"  # without it, somebody's own unfinished download could be taken for ours
_LONGEST = 200  # bytes of a name that go into an unfinished file's, which may have 255 in all


class NotDurable(OSError):
    """The new file is in place and whole, but the disk may not yet know its name."""


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
            if self.machine != machine():
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
            path: absolute, of the file to be. Where a link has that name, what it leads to is
                replaced, not the link; and a file that is replaced passes its mode on.
            named: give it a name at once, for processes of other machines.

        Raises:
            OSError: it cannot be created.
        """
        self._mode = _mode_of(path)
        self._path = os.path.realpath(path)
        self._folder, self._name = os.path.split(self._path)
        self._part: str | None = None
        remove_debris(self._path)
        self.descriptor = -1 if named else self._open_anonymous()
        if self.descriptor < 0:
            self.descriptor = self._open_named()
        if self._mode is not None:
            # Before anything is in it; other processes open it, too, so its owner may always write.
            os.chmod(self.descriptor, self._mode | stat.S_IRUSR | stat.S_IWUSR)

    def address(self) -> Address:
        """How other processes open the file."""
        found = os.fstat(self.descriptor)
        if self._part is not None:
            return Address(self._part, "", found.st_dev, found.st_ino)
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return Address(path, machine(), found.st_dev, found.st_ino)

    def commit(self) -> None:
        """Make everything durable and let the file appear under its name, replacing another.

        Raises:
            NotDurable: it has appeared, but a crash of the machine may bring the older one back.
            OSError: it does not appear.
        """
        if self._mode is not None:
            os.chmod(self.descriptor, self._mode)
        os.fsync(self.descriptor)
        if self._part is None:
            self._part = self._link()
        os.replace(self._part, self._path)
        self._part = None
        try:
            _make_durable(self._folder)
        except OSError as error:
            raise NotDurable(*error.args) from error

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
        if not _ANONYMOUS or not machine():
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
                prefix=_prefix(self._name), suffix=".part", dir=self._folder
            )
            self._part = part
            _lock(descriptor)
            # Between the two, another writer may have taken the file for a dead one's.
            if os.path.exists(part):
                if self._mode is None:
                    os.chmod(part, 0o666 & ~_umask())
                return descriptor
            os.close(descriptor)

    def _link(self) -> str:
        """Give a file without a name one, beside the path: only a rename replaces atomically."""
        folder = os.open(self._folder, os.O_RDONLY)
        source = f"/proc/self/fd/{self.descriptor}"
        try:
            while True:
                part = os.path.join(self._folder, f"{_prefix(self._name)}{_random()}.part")
                with suppress(FileExistsError):
                    # With a folder given, Python uses linkat, which alone follows the link in /proc
                    os.link(source, part, src_dir_fd=folder, follow_symlinks=True)
                    return part
        finally:
            os.close(folder)


def remove_debris(path: str) -> list[str]:
    """Remove unfinished files of a path whose writers are dead.

    Args:
        path: absolute, of the finished file, where it is and not where a link to it is.

    Returns:
        Names of what was removed.
    """
    if not _HAS_LOCKS:
        return []
    folder, name = os.path.split(path)
    pattern = re.compile(re.escape(_prefix(name)) + r"[a-z0-9_]{8}\.part")
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


def _mode_of(path: str) -> int | None:
    """The permissions of the file that has this name; None: none has, so that the umask decides.

    Raises:
        OSError: a file cannot take its place.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a directory")
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a device or a pipe, which a file must not replace")
    return stat.S_IMODE(mode) & 0o777


def _make_durable(folder: str) -> None:
    """Let the disk know the names in a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prefix(name: str) -> str:
    """What the names of a file's unfinished versions begin with."""
    while len(os.fsencode(name)) > _LONGEST:
        name = name[:-1]
    return f".{name}{_MARK}"


def _lock(descriptor: int) -> None:
    # A file system without locks: nobody can lock there, so nobody takes the file for debris.
    if _HAS_LOCKS:
        with suppress(OSError):
            flock(descriptor, LOCK_EX)


def _random() -> str:
    return "".join(random.SystemRandom().choices("abcdefghijklmnopqrstuvwxyz0123456789_", k=8))


def machine() -> str:
    """What tells this machine from all others; empty where there is no ``/proc``.

    Example:
        >>> machine() == machine()
        True
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

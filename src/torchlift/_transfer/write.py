"""Write a file that appears whole: until the disk has all of it, the older one keeps the name.

It is written under the name ``.NAME.torchlift-RANDOM.part``, in the folder of its path, and then
renamed. Its owner holds a lock (``flock``) on it for as long as it lives. An error removes it. What
a process that was killed has left, the next writer of the same path removes: nobody locks it any
more. POSIX only, as ``os.pwrite`` is.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock

_MARK = ".torchlift-"  # without it, somebody's own unfinished download could be taken for ours
_LONGEST = 200  # bytes of NAME in the name of a temporary file, which may have 255 in all


class NotDurable(OSError):
    """The new file is in place and whole, but the disk may not yet know its name."""


class AtomicFile:
    """The owner's side of a file that is being written; others open it by its name.

    Attributes:
        temporary: path of the file until it is committed.
        descriptor: to read and write it with.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> file = AtomicFile(os.path.join(folder, "x"))
        >>> os.write(file.descriptor, b"abc")
        3
        >>> file.commit(); file.close()
        >>> os.listdir(folder)
        ['x']
    """

    def __init__(self, path: str) -> None:
        """Create it, and remove what dead writers of the same path left.

        Args:
            path: absolute, of the file to be. Where a link has that name, what it leads to is
                replaced, not the link; and a file that is replaced passes its mode on.

        Raises:
            OSError: it cannot be created.
        """
        self._mode = _mode_of(path)
        self._path = os.path.realpath(path)
        remove_debris(self._path)
        while True:
            self.temporary = f"{_prefix(self._path)}{secrets.token_hex(4)}.part"
            # A new file gets what open() would give it. Whom the older one shuts out cannot read
            # the new one while it is written; its owner can always open it, on other ranks too.
            mode = 0o666 if self._mode is None else self._mode | stat.S_IRUSR | stat.S_IWUSR
            self.descriptor = os.open(self.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
            _lock(self.descriptor)
            # Between the two, another writer may have taken the file for a dead one's.
            if os.path.exists(self.temporary):
                break
            os.close(self.descriptor)

    def commit(self) -> None:
        """Make everything durable and let the file appear under its name, replacing another.

        Raises:
            NotDurable: it has appeared, but a crash of the machine may bring the older one back.
            OSError: it does not appear.
        """
        if self._mode is not None:
            os.chmod(self.descriptor, self._mode)
        os.fsync(self.descriptor)
        os.replace(self.temporary, self._path)
        try:
            folder = os.open(os.path.dirname(self._path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise NotDurable(*error.args) from error

    def close(self) -> None:
        """Remove the file unless it was committed; may be called twice."""
        if self.descriptor >= 0:
            with suppress(OSError):  # it has its new name
                os.unlink(self.temporary)
            os.close(self.descriptor)
            self.descriptor = -1


def remove_debris(path: str) -> None:
    """Remove temporary files of a path whose writers are dead.

    Args:
        path: absolute, of the finished file, where it is and not where a link to it is.
    """
    folder, prefix = os.path.split(_prefix(path))
    pattern = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}\.part")
    for found in filter(pattern.fullmatch, os.listdir(folder)):
        # Not allowed to open, or locked by a live writer: neither is ours to remove.
        with suppress(OSError):
            descriptor = os.open(os.path.join(folder, found), os.O_RDWR | os.O_NOFOLLOW)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                os.unlink(os.path.join(folder, found))
            finally:
                os.close(descriptor)


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
    """Return the permissions of the file that has this name, or None where there is none.

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


def _prefix(path: str) -> str:
    """Return what the paths of a file's temporary files begin with."""
    folder, name = os.path.split(path)
    name = os.fsencode(name)[:_LONGEST].decode(errors="ignore")
    return os.path.join(folder, f".{name}{_MARK}")


def _lock(descriptor: int) -> None:
    # A file system without locks: nobody can lock there, so nobody takes the file for debris.
    with suppress(OSError):
        flock(descriptor, LOCK_EX)

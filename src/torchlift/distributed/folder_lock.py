"""The lock file of a run's folder. It names the job that saves there, and keeps a second job out.

The lock is a POSIX record lock (``lockf``): it ends with the process, also after a kill, and a
forked child does not have it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, lockf

from torchlift._store.places import is_url
from torchlift._system.interrupts import uninterrupted
from torchlift.errors import CheckpointError

#: The name of the lock file.
NAME = ".keeper.lock"
#: The start of its content.
_HOLDER = "process "
#: The errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """Reserves a folder for one Keeper, until `release` or the end of this process.

    A URL is not locked. Nor is a folder that is not writable, because no job can save there.

    Attributes:
        descriptor: The open file, or -1.
        is_used: False from when its Keeper begins to close, even if interrupts end that.
    """

    descriptor = -1
    is_used = True

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, os.path.join(folder, NAME)
        self._held = (0, 0, 0)

    def acquire(self) -> None:
        """Reserve the folder.

        Raises:
            CheckpointError: If another Keeper holds it, or the file is not that of a Keeper.
            OSError: If the file cannot be written.
        """
        if self.descriptor >= 0 or is_url(self._folder) or not os.access(self._folder, os.W_OK):
            return
        with uninterrupted():
            while not self._lock():
                pass

    def _lock(self) -> bool:
        """Open and lock the file. Return False if its holder has removed it meanwhile."""
        with suppress(FileNotFoundError):
            holder = _held.get(_key(os.lstat(self._path)))  # before another descriptor is open
            if holder is not None and holder.is_used:
                raise self._refusal(_this_process())
            if holder is not None:
                self._held, self.descriptor = holder._held, holder.descriptor
                holder.descriptor, _held[self._held] = -1, self
                return True
        try:
            # Never through a link, and without waiting for the other end of a pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
                raise self._odd_file(error.strerror) from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise self._odd_file("a file that has another name too, or is not a regular one")
            text = os.pread(descriptor, 1 << 10, 0).decode(errors="replace")
            if text and not text.startswith(_HOLDER):
                raise self._odd_file(text[:40])
            try:
                lockf(descriptor, LOCK_EX | LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise self._refusal(text) from error
                if error.errno not in _NO_LOCKS:
                    raise
            if not self._is_in_place(found):
                os.close(descriptor)
                return False
        except BaseException:
            os.close(descriptor)
            raise
        if _key(found) in _held:  # by another thread. To close the file would end its lock
            raise self._refusal(text)
        self._held, self.descriptor = _key(found), descriptor
        _held[self._held] = self
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_process().encode(), 0)
        return True

    def release(self) -> None:
        """Release the folder. A forked child does not hold it, and a second call does nothing."""
        if self.descriptor < 0 or self._held[0] != os.getpid():
            return
        with uninterrupted():
            with suppress(OSError):  # a file without a lock keeps nobody out
                if self._is_in_place(os.fstat(self.descriptor)):  # and not that of another job
                    os.unlink(self._path)
            # In this order, a second call finishes one that two interrupts ended.
            _held.pop(self._held, None)
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _is_in_place(self, opened: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), opened)
        except FileNotFoundError:
            return False

    def _refusal(self, holder: str) -> CheckpointError:
        return CheckpointError(
            "another Keeper saves its checkpoints in this folder",
            file=self._folder,
            found=holder or None,
            hint="Close it first, or give each job a folder of its own. If its machine is down, "
            f"and the file system still holds the lock, remove {self._path}.",
        )

    def _odd_file(self, found: str | None) -> CheckpointError:
        return CheckpointError(
            "the lock file of the folder is not that of a Keeper",
            file=self._path,
            expected="a regular file of this user, or none",
            found=found,
            hint="Remove it.",
        )


#: Process, device and inode of each lock file that this process holds -> its lock. A second lock of
#: the same process would succeed, and a close of any other descriptor of the file would end it.
_held: dict[tuple[int, int, int], FolderLock] = {}


def _this_process() -> str:
    return f"{_HOLDER}{os.getpid()} on host {socket.gethostname()}"


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino

"""The lock file of a run's folder. It names the job that saves there, and keeps a second job out.

The job holds the lock (``flock``) as long as its Keeper is open. It ends with the process, also
after a kill.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from weakref import WeakSet

from torchlift._store.places import is_url
from torchlift._transfer.write import LockedFile
from torchlift.errors import CheckpointError

#: The name of the lock file.
NAME = ".keeper.lock"
#: The locks of this process.
_locks: WeakSet[FolderLock] = WeakSet()


class FolderLock:
    """Reserves a folder for one Keeper, until `release` or the end of this process.

    A URL has no lock.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, ""
        self._file, self.is_used = LockedFile(), False
        _locks.add(self)

    def use(self) -> None:
        """Reserve the folder against other Keepers of this process, too.

        Raises:
            CheckpointError: If another Keeper holds it.
        """
        if self._file.descriptor < 0:
            self.acquire()
        self.is_used = True

    def acquire(self) -> None:
        """Reserve the folder. A Keeper of this process that has not used it gives way.

        Raises:
            CheckpointError: If another Keeper holds it.
            OSError: If the file cannot be written.
        """
        if is_url(self._folder):
            return
        # By a link to the folder, a Keeper of this process would not give way.
        self._path = os.path.join(os.path.realpath(self._folder), NAME)
        for other in list(_locks):
            # A notebook cell that ran twice, or a start or an end that two interrupts ended.
            if other._path == self._path and not other.is_used:
                other.release()
        file = self._file
        while True:
            try:
                file.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                # No job can save in a folder that is not writable, and a resume needs no lock.
                return
            if not file.try_lock() and file.can_lock:
                holder = os.pread(file.descriptor, 1 << 10, 0).decode(errors="replace")
                file.close()
                raise CheckpointError(
                    "another Keeper saves its checkpoints in this folder",
                    file=self._folder,
                    found=holder or None,
                    hint="Close it first, or give each job a folder of its own. If its machine is "
                    f"down, and the file system still holds the lock, remove {self._path}.",
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.descriptor), os.stat(self._path)):
                    break
            file.close()  # another process removed the file before this one locked it
        os.ftruncate(file.descriptor, 0)
        holder = f"process {os.getpid()} on host {socket.gethostname()}"
        os.pwrite(file.descriptor, holder.encode(), 0)

    def release(self) -> None:
        """Release the folder."""
        self.is_used = False
        if self._file.descriptor >= 0:
            with suppress(OSError):  # a file without a lock keeps nobody out
                os.unlink(self._path)
            self._file.close()


def _close_in_child() -> None:
    """Close the files in a forked child, which would hold the locks after a kill of its parent."""
    for file in [lock._file for lock in _locks]:
        if file.descriptor >= 0:
            os.close(file.descriptor)  # without unlocking: the parent keeps its lock
            file.descriptor = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

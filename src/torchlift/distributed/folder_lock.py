"""The lock file of a run's folder. It names the job that saves there, and keeps a second job out.

The file is locked (``flock``) only while a process reads and writes it. Forked children inherit a
lock, so one that lasted as long as the job would last until its children end.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torchlift._system.interrupts import Running, uninterrupted
from torchlift._transfer.write import LockedFile
from torchlift.errors import CheckpointError

#: The name of the lock file.
NAME = ".keeper.lock"
#: Path -> the lock that this process holds. A file that it could not remove does not block it.
_HELD: dict[str, FolderLock] = {}


class Holder(NamedTuple):
    """The process that holds the lock of a folder, as the lines of the file.

    Attributes:
        host: The name of its machine.
        process: Its id.
        started: Its start, in ticks of the system. A later process with the same id has another.
        boot: The id of the machine's last start.
        run: The ``--rdzv-id`` of ``torchrun``, or an empty line.
    """

    host: str
    process: str
    started: str
    boot: str
    run: str

    def may_be_alive(self, here: Holder) -> bool:
        """Return whether the process still runs, or may run on another host."""
        if self.host != here.host:
            # torchrun ends all ranks of a run before it starts them on other machines.
            return not self.run or self.run != here.run
        return self.boot == here.boot and _start_of(self.process) == self.started


class FolderLock:
    """Reserves a folder for one Keeper of this process, until `release`."""

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, os.path.join(os.path.realpath(folder), NAME)
        self._own: Holder | None = None
        self._is_used = False

    def use(self) -> None:
        """Reserve the folder against other Keepers of this process that save or resume, too.

        Raises:
            CheckpointError: If another Keeper uses it.
        """
        if _HELD.get(self._path) is not self:
            self.acquire()
        self._is_used = True

    def acquire(self) -> None:
        """Reserve the folder, also if the lock file is of a process that has ended.

        Raises:
            CheckpointError: If another job holds it, or may still hold it.
            OSError: If the file cannot be written.
        """
        number, run = str(os.getpid()), os.environ.get("TORCHELASTIC_RUN_ID", "none")
        boot = _read("/proc/sys/kernel/random/boot_id").strip()
        run = "" if run == "none" else run  # which is the default of torchrun
        own = Holder(socket.gethostname(), number, _start_of(number) or "", boot, run)
        try:
            with self._open(os.O_RDWR | os.O_CREAT) as descriptor:
                text = os.read(descriptor, 1 << 16).decode(errors="replace")
                self._require_free(text.split("\n"), own)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, "\n".join(own).encode(), 0)
                self._own, _HELD[self._path] = own, self
        except OSError as error:
            # No job can save in a folder that is not writable, and a resume needs no lock.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise

    def release(self) -> None:
        """Release the folder. In a forked child, which has a copy of this object, do nothing."""
        is_own = self._own is not None and self._own.process == str(os.getpid())
        if not is_own or _HELD.get(self._path) is not self:
            return
        del _HELD[self._path]
        # A file that cannot be removed counts until this process ends.
        with suppress(OSError), self._open(os.O_RDWR) as descriptor:
            if os.read(descriptor, 1 << 16).decode().split("\n") == [*(self._own or ())]:
                os.unlink(self._path)

    def _require_free(self, lines: list[str], own: Holder) -> None:
        is_known, other = len(lines) == len(own), _HELD.get(self._path)
        holder = Holder(*lines) if is_known else own
        if lines == [""] or (is_known and holder == own and not (other and other._is_used)):
            return  # free, or of a Keeper of this process that was closed or only reads
        if is_known and not holder.may_be_alive(own):
            return  # it was killed
        is_here = is_known and holder.host == own.host
        raise CheckpointError(
            "another Keeper saves its checkpoints in this folder",
            file=self._folder,
            found=f"process {holder.process} on host {holder.host}" if is_known else lines[0][:80],
            hint="Close it first, or give each job a folder of its own."
            if is_here
            else f"Give each job a folder of its own. If that job has ended, remove {self._path}.",
        )

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        """Yield a descriptor of the file. Other processes wait for it until the block ends."""
        # If a second interrupt keeps this block from unlocking, the next lock of this process does.
        running = Running.of_block(sys._getframe())
        with uninterrupted(), LockedFile() as file:
            while True:
                file.open(self._path, flags, 0o666)
                file.lock(self._path, running)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.descriptor), os.stat(self._path)):
                        break
                file.close()  # another process removed the file before this one locked it
            yield file.descriptor


def _start_of(process: str) -> str | None:
    """Return when a process started, or None if it has ended. Without ``/proc``: an empty text."""
    if os.path.isdir("/proc/self"):
        # "4711 (name) S 1 ...": the name may contain spaces. The 22nd field is the start.
        fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
        # A zombie has ended, although its parent has not read its status yet.
        return fields[19] if fields and fields[0] not in "ZX" else None
    try:
        with suppress(PermissionError):  # it belongs to another user
            os.kill(int(process), 0)
    except ProcessLookupError:
        return None
    return ""


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""

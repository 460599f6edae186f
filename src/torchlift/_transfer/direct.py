"""Reading what is not in the page cache: past it, with many large reads at once.

A read through the page cache is copied there first, pushes out what the machine serves from it, and
asks the disk for one stretch at a time. Linux reads past it with O_DIRECT, which wants memory, file
offset and length in multiples of the device's blocks; so such reads land in a few stages of huge
pages, and are copied from there. In small pages one request of the device holds 254 of them.

Measured on 2 cores, 2.1 GB on a virtual disk, C with 8 threads of 4 MiB: 0.61 s into stages of
huge pages, 1.7 to 2.0 s into stages of small ones; copied on from there into fresh memory, 0.70 to
0.91 s, and `torchlift.load` 0.79 to 0.89 s. 16 threads of 16 MiB without stages: 0.61 to 2.7 s into
huge pages, of which the host may have none at hand, 1.3 to 1.9 s into small ones. Through the page
cache the same C took 0.95 to 2.2 s, and `torchlift.load` 1.33 to 1.53 s.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from contextlib import suppress
from typing import Literal, Self

import torch

from torchlift._system.memory import c_function
from torchlift._transfer.files import is_network
from torchlift._transfer.pages import HugePages, allocate

#: Threads that wait for a disk, or for a network, at a time. They ask for what lies side by side,
#: for disks that seek: which ones do is not known, virtual ones call themselves rotational.
DEPTH = 12
#: Bytes of a stage, and how many of them one job may fill: it begins and ends inside of a page.
STAGE = 4 << 20
MOST = STAGE - 2 * mmap.PAGESIZE
_SWITCH = "TORCHLIFT_DIRECT_IO"
_CACHESTAT = 451  # the same number on every machine
_PROBES = 8  # places of a range that are looked at
_SMALL = 4 << 20  # what is not worth asking for
_SYSCALL, _MADVISE = c_function("syscall"), c_function("madvise")
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, of which Python has no name


class OpenFile:
    """A file that is read from: through the page cache and, where that is possible, past it.

    Args:
        file: absolute path.
        descriptor: of the file; somebody else closes it.
        nbytes: how much of it will be read.
        own: the threads' memory.
    """

    def __init__(self, file: str, descriptor: int, nbytes: int, own: OwnStage) -> None:
        self.descriptor, self.own = descriptor, own
        self._choice = _choice() if nbytes >= _SMALL else "never"
        self._is_shared = self._choice == "auto" and _is_shared(descriptor, nbytes)
        self._passing: list[tuple[int, int]] = []
        self._direct: int | None = None
        self._is_far = is_network(file)
        if self._choice == "never" or self._is_shared or self._is_far:
            self._direct = -1

    def is_cold(self, offset: int, nbytes: int) -> bool:
        """Return whether the disk has to be asked for most of a range, or is to be."""
        if self._choice == "never" or (
            self._choice == "auto" and _is_cached(self.descriptor, offset, nbytes)
        ):
            return False
        if self._direct is None:  # not before: of a thousand files there is one descriptor already
            self._direct = _open_direct(self.descriptor)
        return True

    def mapped(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return a range as bytes of a map of its own, all of whose pages are there.

        Copying out of it costs no call for each of many short runs, and none of what lies between
        them. The pages are asked for at once, so that a disk that fails, or a file that ends early,
        is an answer here and not a SIGBUS afterwards.

        Returns:
            None where the range has to be read: behind a network, on another system, on a Linux
            before 5.14; and where reading it will fail, too, with an error that says why.
        """
        if self._is_far:
            return None
        lead = offset % mmap.ALLOCATIONGRANULARITY
        try:
            # Writable, because torch warns of a buffer that is not; nothing is written there.
            area = mmap.mmap(
                self.descriptor,
                lead + nbytes,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=offset - lead,
            )
        except (AttributeError, OSError, ValueError):
            return None
        if not _is_cached(self.descriptor, offset, nbytes):
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
        found = torch.frombuffer(area, dtype=torch.uint8, offset=lead)
        start = ctypes.c_void_p(found.data_ptr() - lead)
        failed = _MADVISE(start, ctypes.c_size_t(lead + nbytes), _POPULATE_READ)
        return found if failed == 0 else None

    def read_direct(self, offset: int, nbytes: int) -> int | None:
        """Read a range into this thread's memory; return where in it that begins.

        Returns:
            None where the range has to be read through the page cache: the file system cannot do
            otherwise, or the file ends before the range does.

        Raises:
            OSError: the read failed.
        """
        lead = offset % mmap.PAGESIZE
        start, stop = offset - lead, offset + nbytes
        stop += -stop % mmap.PAGESIZE
        room, done = buffer(self.own.memory.data_ptr(), stop - start), 0
        while done < lead + nbytes:
            # Not a multiple of a page: the file ended there.
            if self._direct is None or self._direct < 0 or done % mmap.PAGESIZE:
                return None
            try:
                got = os.preadv(self._direct, [room[done:]], start + done)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                return None
            if got == 0:
                return None
            done += got
        return lead

    def forget(self, offset: int, nbytes: int) -> None:
        """Have a range that was not in the page cache dropped from it when all is read."""
        if self._choice == "auto" and not self._is_shared:
            self._passing.append((offset, offset + nbytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        start = end = 0
        for first, last in (*sorted(self._passing), (sys.maxsize, 0)):
            # In one go: pages that the kernel keeps together are dropped together.
            if first - end > mmap.PAGESIZE:
                if end > start:
                    os.posix_fadvise(self.descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
                start = first
            end = max(end, last)
        if self._direct is not None and self._direct >= 0:
            os.close(self._direct)


class OwnStage:
    """Memory that each thread has of its own, in huge pages where the machine has them."""

    def __init__(self) -> None:
        self._own = threading.local()

    @property
    def memory(self) -> torch.Tensor:
        """The calling thread's, `STAGE` bytes; made when it is first asked for."""
        if not hasattr(self._own, "memory"):
            self._own.memory = allocate(STAGE, torch.uint8, torch.device("cpu"))
            HugePages().back(self._own.memory.data_ptr(), STAGE)
        found: torch.Tensor = self._own.memory
        return found


def buffer(address: int, nbytes: int) -> memoryview:
    """Return the buffer protocol over memory, which the caller keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _choice() -> Literal["auto", "always", "never"]:
    found = os.environ.get(_SWITCH) or "auto"
    if found in ("auto", "always", "never"):
        return found  # type: ignore[return-value]
    raise ValueError(f"{_SWITCH} must be auto, always or never, not {found!r}")


def _is_shared(descriptor: int, nbytes: int) -> bool:
    """Whether other processes of the job will probably read the same bytes of a file."""
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"  # what torchrun sets
    return not alone and 2 * nbytes > os.fstat(descriptor).st_size


def _open_direct(descriptor: int) -> int:
    """Open a file once more, past the page cache; -1 where that is not possible."""
    try:
        # What the descriptor stands for, not what has its name by now.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (AttributeError, OSError):  # another system, tmpfs, some of FUSE
        return -1


def _is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache has most of a range, as far as anybody can tell.

    A read that must not wait is believed. cachestat(2), of Linux 6.5, finds nothing of what is
    cached below an overlay, and mincore(2) all of a file that this process may not write to.
    """
    byte, hits = bytearray(1), 0
    try:
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_RANDOM)  # no readahead
        try:
            for number in range(1, 2 * _PROBES, 2):
                place = offset + number * nbytes // (2 * _PROBES)
                with suppress(BlockingIOError):
                    hits += os.preadv(descriptor, [byte], place, os.RWF_NOWAIT)
        finally:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_NORMAL)
        return 2 * hits >= _PROBES
    except (AttributeError, OSError):  # another system; or NFS and others, which know no such read
        if sys.platform != "linux":
            return True
        span, found = (ctypes.c_uint64 * 2)(offset, nbytes), (ctypes.c_uint64 * 5)()
        asked = _SYSCALL(ctypes.c_long(_CACHESTAT), descriptor, span, found, 0)
        return asked != 0 or 2 * int(found[0]) * mmap.PAGESIZE >= nbytes

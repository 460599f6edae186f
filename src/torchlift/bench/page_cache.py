"""Drop files from the page cache, and count their bytes in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Sequence

from torchlift._system.memory import c_function


def drop_pages(files: Sequence[str]) -> None:
    """Drop the files from the page cache.

    Raises:
        OSError: If the operating system cannot do this.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError(
            "this operating system cannot drop a file from the page cache. Leave out --cold"
        )
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the kernel cannot drop pages that are not written yet
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_bytes(files: Sequence[str]) -> float:
    """Count the bytes of the files that are in the page cache, or return nan if it is not known.

    mincore counts them on a private map. It reports every page of a file that the user may not
    write to as resident, so the result for such a file is nan.
    """
    return float(sum(_count_cached(file) for file in files))


def _count_cached(name: str) -> float:
    size = os.path.getsize(name)
    if not size:
        return 0.0
    if platform.system() != "Linux" or not os.access(name, os.W_OK):
        return float("nan")
    pages = bytearray(-(-size // mmap.PAGESIZE))
    flags = (ctypes.c_char * len(pages)).from_buffer(pages)
    with open(name, "rb") as file:
        # A private map that nobody writes to: ctypes cannot take the address of a read-only map.
        area = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    first = ctypes.c_char.from_buffer(area)
    failed = c_function("mincore")(ctypes.byref(first), ctypes.c_size_t(size), flags)
    resident = sum(page & 1 for page in pages)
    return float("nan") if failed else float(min(resident * mmap.PAGESIZE, size))

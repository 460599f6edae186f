"""What the machine is, and what of a file it has in memory already."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torchlift._system.memory import c_function


def drop_pages(files: Sequence[str]) -> None:
    """Ask the kernel to forget the files' cached pages.

    Raises:
        OSError: the operating system has no way to do it.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this operating system cannot drop a file's pages; leave out --cold")
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_bytes(files: Sequence[str]) -> float:
    """Count the bytes of the files that are in the page cache; nan where it cannot be counted.

    By mincore on a map of one's own, which of a file that one may not write to calls every page
    resident: of such a file nothing is said.
    """
    return float(sum(_cached(file) for file in files))


def _cached(name: str) -> float:
    size = os.path.getsize(name)
    if not size:
        return 0.0
    if platform.system() != "Linux" or not os.access(name, os.W_OK):
        return float("nan")
    pages = bytearray(-(-size // mmap.PAGESIZE))
    told = (ctypes.c_char * len(pages)).from_buffer(pages)
    with open(name, "rb") as file:
        # A private map that nobody writes to: ctypes takes no address of what is read-only.
        area = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    first = ctypes.c_char.from_buffer(area)
    failed = c_function("mincore")(ctypes.byref(first), ctypes.c_size_t(size), told)
    resident = sum(page & 1 for page in pages)
    return float("nan") if failed else float(min(resident * mmap.PAGESIZE, size))


def describe(packages: Sequence[str]) -> dict[str, Any]:
    """Return what a reader must know of the machine to believe a number: plain data."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not everywhere
        memory = 0
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}"
    return {"cores": cores, "memory": memory, "system": system, "versions": versions}

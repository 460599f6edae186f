"""What the machine can do at best, and what of a file it has in memory already.

Standard library only: a limit is measured in a process that has not imported torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, product
from typing import Any

from torchlift._system.memory import c_function

_READ = 8 << 20  # bytes per read into warm buffers
_AREA = 256 << 20  # bytes per buffer of the copying limit: far above any cache
_HUGE = 2 << 20
_CPUS = os.cpu_count() or 1

#: The plain readers, of which the best is the limit of reading: threads, past the page cache or
#: through it, into huge or small pages. Measured, 2.1 GB, 2 cores, in one run: none of them wins
#: both warm and cold, and none of them wins cold on every day.
PLAIN_READERS: tuple[tuple[int, bool, bool], ...] = tuple(
    product(
        (4, 8, 16, 32),
        (False, True) if hasattr(os, "O_DIRECT") else (False,),
        (True, False) if hasattr(mmap, "MADV_HUGEPAGE") else (False,),
    )
)


def name_of(reader: tuple[int, bool, bool]) -> str:
    """Return a plain reader in words."""
    threads, direct, huge = reader
    how, pages = "direct" if direct else "buffered", "huge" if huge else "small"
    return f"{threads} threads, {how}, {pages} pages"


def prepare(limit: str, files: Sequence[str], nbytes: int) -> Callable[..., object]:
    """Return what measures a limit, with all memory that it may find at hand.

    Args:
        limit: ``"limit_read"``, ``"limit_copy"`` or ``"limit_plain"``, which takes one of
            `PLAIN_READERS`.
        files: the files that hold the tensors.
        nbytes: bytes of unique storage.
    """
    if limit == "limit_plain":
        return partial(read_once, files)
    if limit == "limit_read":
        return partial(read_again, files, [bytearray(b"\1") * _READ for _ in range(_CPUS)])
    source, destination = (bytearray(b"\1") * min(_AREA, max(nbytes, 1)) for _ in range(2))
    return partial(copy, source, destination, nbytes)


def read_again(files: Sequence[str], buffers: Sequence[bytearray]) -> None:
    """Read the files with one thread per CPU into small buffers whose pages exist already."""
    for name in files:
        with open(name, "rb", buffering=0) as file, ThreadPoolExecutor(len(buffers)) as pool:
            read = partial(os.preadv, file.fileno())
            turns = ([buffer] for buffer in cycle(buffers))
            list(pool.map(read, turns, range(0, os.path.getsize(name), _READ)))


def copy(source: bytearray, destination: bytearray, nbytes: int) -> None:
    """Copy as many bytes between two buffers that no cache holds, with a thread per CPU."""
    first, last = (ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in (source, destination))

    def share(number: int) -> None:
        left = nbytes
        while left > 0:
            size = min(left, len(source))
            start, end = (size * (number + more) // _CPUS for more in (0, 1))
            ctypes.memmove(last + start, first + start, end - start)
            left -= size

    with ThreadPoolExecutor(_CPUS) as pool:
        list(pool.map(share, range(_CPUS)))


def read_once(files: Sequence[str], reader: tuple[int, bool, bool]) -> list[mmap.mmap]:
    """Read the files once into memory that nobody has touched; return it, so that it stays.

    A thread waits in the kernel and copies there, without Python's lock: 16 MiB at a time for few
    threads, 8 for many, as a loop in C would.

    Raises:
        OSError: the file system does not read directly, or the file ended early.
    """
    threads, direct, huge = reader
    block = (16 if threads <= 8 else 8) << 20
    areas = []
    with ThreadPoolExecutor(threads) as pool:
        for name in files:
            size = os.path.getsize(name)
            area = mmap.mmap(-1, -(-size // _HUGE) * _HUGE or _HUGE, mmap.MAP_PRIVATE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
            areas.append(area)
            descriptor = os.open(name, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            try:
                read = partial(_read_block, descriptor, memoryview(area), block)
                got = sum(pool.map(read, range(0, size, block)))
            finally:
                os.close(descriptor)
            if got < size:
                raise OSError(f"{name}: {got} of {size} bytes could be read")
    return areas


def _read_block(descriptor: int, area: memoryview, block: int, start: int) -> int:
    at, end = start, min(start + block, len(area))
    while at < end:
        got = os.preadv(descriptor, [area[at:end]], at)
        if got == 0 or got % mmap.PAGESIZE:  # the end; a direct read could not go on from there
            return at + got - start
        at += got
    return at - start


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

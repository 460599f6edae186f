"""Describe the machine that a measurement ran on."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def describe(packages: Sequence[str]) -> dict[str, Any]:
    """Describe the machine as plain data: cores, memory, system and versions."""
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


def huge_pages(count: int = 64) -> str:
    """Return whether the machine provides huge pages fast or slowly, with the median time of one.

    A virtual machine that returned its memory to the host gets each page back in pieces.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "none: this system does not have them"
    size, seconds = 2 << 20, []
    area = mmap.mmap(-1, (count + 1) * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(area))
    first += -first % size
    for page in range(first, first + count * size, size):
        start = time.perf_counter()
        ctypes.memset(page, 0, 1)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    kind = "slow" if median > 1e-3 else "fast" if median > 2e-5 else "none"
    return f"{kind}: a first write takes {1e3 * median:.2f} ms"

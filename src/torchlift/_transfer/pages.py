"""Memory for tensors, and the pages behind it: huge ones where the machine has them at hand.

The page faults are most of the cost of reading a cached file into fresh memory: 512 small ones for
2 MiB cost 0.7 ms, one huge one 0.09 ms. But a virtual machine that reports its free memory to its
host gets a huge page back piece by piece, and then one costs 4.1 ms. Which of the two it is shows
in the first page and can change within one load. So pages are asked for as they are needed, each
is timed, and a slow one is followed by a while of small pages that doubles with every slow one.

Measured, 2.1 GB in the page cache, 2 cores: 0.13 s with huge pages at hand and 3.1 to 8.5 s with
none; small pages 0.45 to 0.9 s always; asking like this 0.14 to 0.35 s. Linux's userfaultfd fills
small pages without their faults, in 0.3 s; with huge pages at hand it gains nothing, so that it is
not used.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import torch

from torchlift._system.memory import c_function

_HUGE_PAGE = 2 << 20
_SLOW = 0.001  # seconds for one huge page; ten times what zeroing it takes
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_MADVISE = c_function("madvise")
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # huge pages' worth of small pages after a slow one


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A one-dimensional uninitialised tensor of `numel` elements.

    On the CPU a large one starts at a huge-page boundary, so that `HugePages` can back it.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _HUGE_PAGE or _MADV_HUGEPAGE is None:
        return torch.empty(numel, dtype=dtype, device=device)
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # Linux aligns an anonymous map of this size to 2 MiB since 6.7; the extra address space makes
    # the alignment sure on older kernels. It ends so that no huge page fits in at its end.
    spare = _HUGE_PAGE - (0 if pages % _HUGE_PAGE else mmap.PAGESIZE)
    try:
        area = mmap.mmap(-1, pages + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        # vm.max_map_count is reached after some 65,000 maps; malloc still finds memory then.
        return torch.empty(numel, dtype=dtype, device=device)
    raw = torch.frombuffer(area, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE_PAGE
    # Once a page is there, what is set for a part of the map and taken back leaves one map behind;
    # before that, every such part would stay a map of its own. This one is spare, and small.
    raw[0 if start else -1] = 0
    return torch.frombuffer(area, dtype=dtype, count=numel, offset=start)


class HugePages:
    """Backs memory that is about to be overwritten with huge pages, while these come cheaply.

    Safe to use from several threads; one object serves one transfer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause = 0  # huge pages still to be left to small ones
        self._next_pause = _FIRST_PAUSE

    def back(self, address: int, nbytes: int) -> None:
        """Ask for huge pages behind a range whose bytes will all be overwritten.

        Only whole huge pages inside the range are asked for: rounding up would take memory that
        nobody uses.
        """
        first = address + -address % _HUGE_PAGE
        for page in range(first, address + nbytes - _HUGE_PAGE + 1, _HUGE_PAGE):
            if self._is_due():
                self._take(page)

    def _is_due(self) -> bool:
        with self._lock:
            if self._pause:
                self._pause -= 1
                return False
            return True

    def _take(self, page: int) -> None:
        area = ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE)
        if _MADV_HUGEPAGE is None or _MADVISE(*area, _MADV_HUGEPAGE) != 0:
            return  # a system, or a kernel, without huge pages
        start = time.perf_counter()
        ctypes.memset(page, 0, 1)
        slow = time.perf_counter() - start > _SLOW
        with self._lock:
            if slow:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            else:
                self._next_pause = _FIRST_PAUSE

"""Allocate memory for tensors, and back it with the pages that the machine provides quickly.

Page faults are most of the cost of a read from the page cache into new memory. The 512 faults of
2 MiB in small pages take 0.7 ms, and one huge page takes 0.09 ms. But a virtual machine that
returned its free memory to the host gets a huge page back in pieces, which takes 4.1 ms. This can
change within one load. Each huge page is therefore requested when it is needed, and timed. After a
slow one, small pages are used for a while. This pause doubles with each slow page.

Small pages are filled by `torchlift._transfer.userfault`, without their faults.

Measured for 2.1 GB in the page cache on 2 cores: 0.13 s if huge pages are available, and 3.1 to
8.5 s if they are not. Small pages took 0.45 to 0.9 s. This code took 0.14 to 0.35 s.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from weakref import WeakValueDictionary

import torch

from torchlift._system.memory import c_function
from torchlift._transfer.userfault import Filler, open_filler

#: Bytes of a huge page.
HUGE_PAGE = 2 << 20
_SLOW = 0.001  # seconds for one huge page: ten times as long as to zero it
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_MADVISE = c_function("madvise")
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # huge pages that are left to small ones after a slow one
_SWITCH = "/sys/kernel/mm/transparent_hugepage/enabled"
_WORTH_FILLING = 256 << 10  # bytes: the faults of less take no longer than to map the file
#: The maps of `allocate`, by the address of their tensor. The library fills a tensor before anybody
#: else knows its memory.
_areas: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a one-dimensional uninitialised tensor.

    A large tensor on the CPU starts at a huge-page boundary, so that `HugePages` can back it.

    Raises:
        MemoryError: If the process cannot have the memory.
        torch.OutOfMemoryError: If the device does not have it.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    if nbytes < HUGE_PAGE or _MADV_HUGEPAGE is None:
        return _allocate_small(numel, dtype)
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # Linux aligns an anonymous map of this size to 2 MiB since 6.7. The extra address space ensures
    # the alignment on older kernels. It is too small for one more huge page at the end.
    spare = HUGE_PAGE - (0 if pages % HUGE_PAGE else mmap.PAGESIZE)
    try:
        area = mmap.mmap(-1, pages + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        # vm.max_map_count is reached after about 65,000 maps. malloc still finds memory then.
        return _allocate_small(numel, dtype)
    raw = torch.frombuffer(area, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    # Touch one spare page. In a map without any page, each `madvise` of a part splits the map, and
    # the parts stay separate maps. They would reach vm.max_map_count.
    raw[0 if start else -1] = 0
    _areas[raw.data_ptr() + start] = area
    return torch.frombuffer(area, dtype=dtype, count=numel, offset=start)


def _allocate_small(numel: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(numel, dtype=dtype, device="cpu")
    except RuntimeError as error:  # the only reason for which torch raises it here
        raise MemoryError(f"{numel * dtype.itemsize} bytes cannot be allocated") from error


class HugePages:
    """Backs memory with huge pages before it is overwritten, while they are fast to get.

    Several threads can use one object. Each transfer has one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Huge pages that are still left to small ones, and the next number of them.
        self._pause, self._next_pause = (
            (0.0, _FIRST_PAUSE) if _has_huge_pages() else (math.inf, _LONGEST_PAUSE)
        )

    def back(self, address: int, nbytes: int) -> list[int]:
        """Request huge pages for a range that will be overwritten completely.

        Only complete huge pages inside the range are requested. More would waste memory.

        Returns:
            The addresses of the requested pages.
        """
        first = address + -address % HUGE_PAGE
        found = []
        for page in range(first, address + nbytes - HUGE_PAGE + 1, HUGE_PAGE):
            if self._is_due():
                self._request(page)
                found.append(page)
        return found

    def fill(
        self,
        target: torch.Tensor,
        start: int,
        end: int,
        source: Callable[[int, int], torch.Tensor | None],
        offset: int,
    ) -> Iterator[tuple[int, int]]:
        """Back a range that will be overwritten, and fill its small pages if that is faster.

        Args:
            target: The contiguous tensor.
            start: The first byte of the range, counted from the start of the tensor.
            end: The byte after the range.
            source: Returns bytes of the source in memory, by their offset and number. None if they
                have to be read.
            offset: The offset of the range in the source.

        Yields:
            The first byte and the byte after each part that the caller has to write.
        """
        base, offset = target.data_ptr(), offset - start
        requested = [page - base for page in self.back(base + start, end - start)]
        if self._next_pause > _FIRST_PAUSE and target.untyped_storage().data_ptr() in _areas:
            firsts = [start, *(page + HUGE_PAGE for page in requested)]
            for first, last in zip(firsts, [*requested, end], strict=True):
                first += -(base + first) % mmap.PAGESIZE
                last -= (base + last) % mmap.PAGESIZE
                if last - first >= _WORTH_FILLING and self._filler is not None:
                    values = source(offset + first, last - first)
                    if values is None:
                        break
                    filled = self._filler.fill(base + first, values.data_ptr(), last - first)
                    if not filled:  # its pages exist, as of a live tensor that is loaded again
                        _areas.pop(target.untyped_storage().data_ptr(), None)
                        break
                    if start < first:
                        yield start, first
                    start = first + filled
        if start < end:
            yield start, end

    @cached_property
    def _filler(self) -> Filler | None:
        return open_filler()  # 0.2 ms, which most transfers do without

    def _is_due(self) -> bool:
        with self._lock:
            if self._pause:
                self._pause -= 1
                return False
            return True

    def _request(self, page: int) -> None:
        area = ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE)
        if _MADV_HUGEPAGE is None or _MADVISE(*area, _MADV_HUGEPAGE) != 0:
            return
        start = time.perf_counter()
        ctypes.memset(page, 0, 1)
        slow = time.perf_counter() - start > _SLOW
        with self._lock:
            if slow:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            else:
                self._next_pause = _FIRST_PAUSE


@cache
def _has_huge_pages() -> bool:
    try:
        with open(_SWITCH, encoding="ascii") as file:
            return "[never]" not in file.read()
    except OSError:  # another system, or a kernel without them
        return False

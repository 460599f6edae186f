"""Memory for tensors, and the pages behind it: huge ones where the machine has them at hand.

The page faults are most of the cost of reading a cached file into fresh memory: 512 small ones for
2 MiB cost 0.7 ms, one huge one 0.09 ms. But a virtual machine that reports its free memory to its
host gets a huge page back piece by piece, and then one costs 4.1 ms. Which of the two it is shows
in the first page and can change within one load. So pages are asked for as they are needed, each
is timed, and a slow one is followed by a while of small pages that doubles with every slow one.
Small pages come without faults, through `torchlift._transfer.userfault`.

Measured, 2.1 GB in the page cache, 2 cores: 0.13 s with huge pages at hand and 3.1 to 8.5 s with
none; small pages 0.45 to 0.9 s always, 0.3 s without faults; asking like this 0.14 to 0.35 s.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator

import torch

from torchlift._system.memory import c_function
from torchlift._transfer.userfault import Filler, open_filler, whole_pages

_HUGE_PAGE = 2 << 20
_SLOW = 0.001  # seconds for one huge page; ten times what zeroing it takes
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_MADVISE = c_function("madvise")
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # huge pages' worth of small pages after a slow one
_BOUNCE = 1 << 20  # bytes on their way into small pages: they should stay in a core's own cache
_WORTH_FILLING = 256 << 10  # less is written in place, at the price of its page faults

#: Called with (start, length, buffer) to write bytes ``start`` to ``start + length`` of a range:
#: into the buffer if there is one, else where they belong. Where they lie in memory already, it
#: returns their address instead.
Produce = Callable[[int, int, "torch.Tensor | None"], "int | None"]


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


class Pages:
    """Writes into memory that is being filled for the first time; made for one transfer.

    Safe to use from several threads on ranges that do not touch.

    Args:
        exclusive: whether there is memory of `allocate` that nobody else knows of to be written to.
    """

    def __init__(self, exclusive: bool = True) -> None:
        self._exclusive = exclusive
        self._huge = HugePages()
        self._filler: Filler | None = None
        self._own = threading.local()

    def __enter__(self) -> Pages:
        if self._exclusive:  # 0.2 ms, which is most of reading a small tensor
            self._filler = open_filler()
        return self

    def __exit__(self, *_: object) -> None:
        if self._filler is not None:
            self._filler.close()

    def write(
        self, address: int, nbytes: int, produce: Produce, exclusive: bool, most: int = 0
    ) -> None:
        """Have a range of the process's memory overwritten in the cheapest way.

        Another thread that looks at a page of fresh memory meanwhile waits until it is filled. Were
        it to hold Python's lock then, for live memory, nobody could fill the page any more.

        Args:
            address: where the range starts.
            nbytes: its length.
            produce: writes one part of it; called for one part after the other. Parts end at pages.
            exclusive: whether it is memory of `allocate` that nobody else knows of. Parts of it may
                have been written to before. Any other memory is written in one part.
            most: bytes of one part where `produce` returns addresses, at most.
        """
        if not exclusive:
            self._huge.back(address, nbytes)
            _put(address, 0, nbytes, produce, most)
            return
        for start, end, huge in self._runs(address, nbytes):
            first, last = (start, start) if huge else self._fill(address, start, end, produce, most)
            _put(address, start - address, first - start, produce, most)
            _put(address, last - address, end - last, produce, most)

    def back(self, address: int, nbytes: int) -> None:
        """Have a range written to faster by others, who overwrite all of it in one part."""
        self._huge.back(address, nbytes)

    def _runs(self, address: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """Divide a range into (start, end, whether huge pages are there)."""
        at, stop = address, address + nbytes
        for start, end in self._huge.back(address, nbytes):
            if start > at:
                yield at, start, False
            yield start, end, True
            at = end
        if stop > at:
            yield at, stop, False

    def _fill(
        self, address: int, start: int, end: int, produce: Produce, most: int
    ) -> tuple[int, int]:
        """Write what is possible without faults; return where that starts and ends."""
        first, last = whole_pages(start, end - start)
        if self._filler is None or last - first < _WORTH_FILLING:
            return start, start
        try:
            bounce = None if most else self._bounce()
        except RuntimeError:  # no memory for it: what is filled in place needs none
            return start, start
        with self._filler.watching(first, last - first) as watched:
            at = first
            while watched and at < last:
                length = min(most // mmap.PAGESIZE * mmap.PAGESIZE or _BOUNCE, last - at)
                source = produce(at - address, length, bounce)
                if bounce is not None:
                    source = bounce.data_ptr()
                assert source is not None
                if not self._filler.copy(at, source, length):
                    break
                at += length
        return first, at

    def _bounce(self) -> torch.Tensor:
        """The calling thread's buffer, of `_BOUNCE` bytes."""
        if not hasattr(self._own, "bounce"):
            self._own.bounce = torch.empty(_BOUNCE, dtype=torch.uint8, device="cpu")
        found: torch.Tensor = self._own.bounce
        return found


def _put(address: int, first: int, nbytes: int, produce: Produce, most: int) -> None:
    for start in range(first, first + nbytes, most or max(nbytes, 1)):
        length = min(most or nbytes, first + nbytes - start)
        source = produce(start, length, None)
        if source is not None:
            ctypes.memmove(address + start, source, length)


class HugePages:
    """Backs memory that is about to be overwritten with huge pages, while these come cheaply.

    Safe to use from several threads; one object serves one transfer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause = 0  # huge pages still to be left to small ones
        self._next_pause = _FIRST_PAUSE

    def back(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Ask for huge pages behind a range whose bytes will all be overwritten.

        Only whole huge pages inside the range are asked for: rounding up would take memory that
        nobody uses.

        Returns:
            (start, end) of the parts that have them now.
        """
        runs: list[tuple[int, int]] = []
        page = address + -address % _HUGE_PAGE
        while page + _HUGE_PAGE <= address + nbytes:
            if self._is_due() and self._take(page):
                start = runs.pop()[0] if runs and runs[-1][1] == page else page
                runs.append((start, page + _HUGE_PAGE))
            page += _HUGE_PAGE
        return runs

    def _is_due(self) -> bool:
        with self._lock:
            if self._pause:
                self._pause -= 1
                return False
            return True

    def _take(self, page: int) -> bool:
        area = ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE)
        if _MADV_HUGEPAGE is None or _MADVISE(*area, _MADV_HUGEPAGE) != 0:
            return False  # a system, or a kernel, without huge pages
        start = time.perf_counter()
        ctypes.memset(page, 0, 1)
        slow = time.perf_counter() - start > _SLOW
        with self._lock:
            if slow:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            else:
                self._next_pause = _FIRST_PAUSE
        return True

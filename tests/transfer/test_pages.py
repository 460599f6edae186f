"""`pages` and `userfault`: memory that is filled with as few page faults as the machine allows."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from forked import run
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlift._transfer import pages, userfault
from torchlift._transfer.pages import HugePages, Pages, allocate
from torchlift._transfer.userfault import Filler, open_filler


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize("numel", [0, 1, 1000, 262_145, 2_000_003])
def test_allocated_tensors_are_plain_tensors_of_their_own_size(dtype, numel):
    """Small and large ones alike are contiguous, aligned, writable and as big as asked for."""
    made = allocate(numel, dtype, torch.device("cpu"))
    assert (made.shape, made.dtype, made.device.type) == ((numel,), dtype, "cpu")
    assert made.untyped_storage().nbytes() == numel * dtype.itemsize
    assert made.data_ptr() % 64 == 0
    if numel * dtype.itemsize >= 2 << 20:
        assert made.data_ptr() % (2 << 20) == 0
    made.fill_(1)
    assert bool(made.eq(1).all())


@pytest.mark.parametrize("spare", [0, 1, 4096, 2**21 - 4096, 2**21 - 1])
def test_a_large_tensor_takes_one_small_page_before_it_is_filled(spare):
    """Even where the kernel gives huge pages to everybody."""
    child = (
        "import sys, torch; from torchlift._transfer.pages import allocate\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "allocate(1 << 22, torch.uint8, torch.device('cpu')); before = resident()\n"
        "kept = [allocate((1 << 22) + int(sys.argv[1]), torch.uint8, torch.device('cpu')) "
        "for _ in range(64)]\n"
        "print((resident() - before) // 64)"
    )
    assert int(run(child, spare).stdout) < 32 << 10


def test_huge_pages_are_an_improvement_not_a_requirement(monkeypatch):
    """Where anonymous maps run out, memory comes from torch's own allocator."""

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pages.mmap, "mmap", none_left)
    made = allocate(1 << 20, torch.float32, torch.device("cpu"))
    assert made.fill_(2).sum() == 2 << 20


def test_slow_huge_pages_are_followed_by_small_ones(monkeypatch):
    """One slow page in 33, then in 65: where huge pages are dear, few are asked for."""
    taken: list[int] = []
    monkeypatch.setattr(pages, "_MADVISE", lambda page, size, advice: taken.append(page.value) or 0)
    monkeypatch.setattr(pages, "_SLOW", -1.0)
    made = allocate(256 << 20, torch.uint8, torch.device("cpu"))
    HugePages().back(made.data_ptr(), made.nbytes)
    assert [(page - made.data_ptr()) >> 21 for page in taken] == [0, 33, 98]


def test_huge_pages_stay_inside_the_range(monkeypatch):
    """A page that reaches beyond the bytes that will be written would be memory for nothing."""
    taken: list[int] = []
    monkeypatch.setattr(pages, "_MADVISE", lambda page, size, advice: taken.append(page.value) or 0)
    monkeypatch.setattr(pages, "_SLOW", 1e9)
    made = allocate(8 << 20, torch.uint8, torch.device("cpu"))
    HugePages().back(made.data_ptr() + 1, made.nbytes - 2)
    assert [(page - made.data_ptr()) >> 21 for page in taken] == [1, 2]


PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def filler() -> Iterator[Filler]:
    """The kernel's; without it the fallbacks are tested all the same."""
    made = open_filler()
    if made is None:
        pytest.skip("this kernel or sandbox has no userfaultfd")
    yield made
    made.close()


@pytest.fixture
def small(monkeypatch):
    """No huge pages, so that every page comes one by one."""
    monkeypatch.setattr(HugePages, "back", lambda *_: [])


def pattern(nbytes: int) -> torch.Tensor:
    """Bytes that differ from page to page and inside a page."""
    return (torch.arange(nbytes) % 251).to(torch.uint8)


def written(target: torch.Tensor, content: torch.Tensor, exclusive: bool = True) -> list[bool]:
    """Write through `Pages`; return for each part whether it went through the buffer."""
    bounced = []

    def produce(first: int, length: int, bounce: torch.Tensor | None) -> None:
        into = target[first : first + length] if bounce is None else bounce[:length]
        into.copy_(content[first : first + length])
        bounced.append(bounce is not None)

    with Pages() as made:
        made.write(target.data_ptr(), target.numel(), produce, exclusive)
    return bounced


@pytest.mark.parametrize("huge", [True, False])
@settings(max_examples=30, deadline=None)
@given(
    start=st.integers(0, 3 * MIB),
    length=st.integers(0, 5 * MIB),
    touched=st.lists(st.integers(0, 8 * MIB - 1), max_size=3),
)
def test_any_range_gets_its_bytes_and_nothing_else_changes(huge, start, length, touched):
    """Wherever it starts and ends, and whatever of it has been touched before."""
    area = allocate(8 * MIB, torch.uint8, torch.device("cpu"))
    expected = torch.zeros(8 * MIB, dtype=torch.uint8)
    for at in touched:
        area[at] = expected[at] = 7
    content = pattern(length)
    with pytest.MonkeyPatch.context() as patch:
        if not huge:
            patch.setattr(HugePages, "back", lambda *_: [])
        written(area[start : start + length], content)
    expected[start : start + length] = content
    assert torch.equal(area, expected)


def test_fresh_memory_is_filled_without_touching_it(filler, small):
    """Whole pages come through the buffer; what is left at both ends is written in place."""
    area = allocate(4 * MIB, torch.uint8, torch.device("cpu"))
    assert written(area[100 : 3 * MIB + 50], pattern(3 * MIB - 50)) == [True] * 3 + [False] * 2
    assert written(allocate(4 * MIB, torch.uint8, torch.device("cpu"))[:MIB], pattern(MIB)) == [
        True
    ]


def test_pages_that_are_there_already_are_written_in_place(filler, small):
    """The kernel refuses to replace a page; the rest is then written the ordinary way."""
    area = allocate(4 * MIB, torch.uint8, torch.device("cpu"))
    area[2 * MIB + 5 * PAGE] = 1
    content = pattern(4 * MIB)
    assert written(area, content) == [True, True, True, False]
    assert torch.equal(area, content)


@pytest.mark.parametrize("missing", ["call", "machine", "registration", "copy"])
def test_without_the_kernels_help_the_bytes_are_the_same(monkeypatch, small, missing):
    """A sandbox that forbids the call, another machine, memory of a kind that it does not take."""
    if missing == "call":
        monkeypatch.setattr(pages, "open_filler", lambda: None)
    elif missing == "machine":
        monkeypatch.setattr(userfault.platform, "machine", lambda: "vax")
    elif missing == "registration":
        monkeypatch.setattr(userfault, "_IOCTL_REGISTER", 0)
    else:
        monkeypatch.setattr(userfault, "_IOCTL_COPY", 0)
    area = allocate(4 * MIB, torch.uint8, torch.device("cpu"))
    content = pattern(4 * MIB)
    written(area, content)
    assert torch.equal(area, content)


def test_live_memory_is_never_watched(filler, monkeypatch):
    """Whoever looks at it, holding Python's lock, would wait for what needs that lock."""
    monkeypatch.setattr(Pages, "_fill", lambda *_: pytest.fail("watched"))
    area = allocate(8 * MIB, torch.uint8, torch.device("cpu"))
    assert written(area, pattern(8 * MIB), exclusive=False) == [False]
    assert torch.equal(area, pattern(8 * MIB))


def test_without_memory_for_the_buffer_the_range_is_written_in_place(filler, small, monkeypatch):
    """Where the last bytes of an allowance go to the tensors themselves."""

    def none_left(_: Pages) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Pages, "_bounce", none_left)
    area = allocate(4 * MIB, torch.uint8, torch.device("cpu"))
    assert written(area, pattern(4 * MIB)) == [False]
    assert torch.equal(area, pattern(4 * MIB))


def test_an_error_leaves_nothing_watched(filler, small):
    """Touching what was not written must not wait for a copy that never comes."""
    area = allocate(4 * MIB, torch.uint8, torch.device("cpu"))

    def produce(first: int, length: int, bounce: torch.Tensor | None) -> None:
        if first:
            raise RuntimeError("the disk is gone")

    with Pages() as made, pytest.raises(RuntimeError, match="gone"):
        made.write(area.data_ptr(), area.numel(), produce, True)
    assert touches(lambda: area.sum().item())


def touches(action) -> bool:
    """Whether it ends; a page that is watched would make it wait for ever."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_other_threads_may_write_beside(filler, small):
    """Ranges of one map are filled at the same time, as the pieces of one tensor are."""
    area = allocate(32 * MIB, torch.uint8, torch.device("cpu"))
    content = pattern(32 * MIB)
    starts = range(0, 32 * MIB, 2 * MIB)
    with Pages() as made:

        def write(start: int) -> None:
            def produce(first: int, length: int, bounce: torch.Tensor | None) -> None:
                at = start + first
                into = area[at : at + length] if bounce is None else bounce[:length]
                into.copy_(content[at : at + length])

            made.write(area.data_ptr() + start, 2 * MIB, produce, True)

        threads = [threading.Thread(target=write, args=(start,)) for start in starts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(area, content)


def maps_within(tensor: torch.Tensor) -> int:
    """How many maps of the process lie in a tensor's memory."""
    count = 0
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start < tensor.data_ptr() + tensor.nbytes and end > tensor.data_ptr()
            count += inside
    return count


def test_the_memory_is_one_map_afterwards(filler, small):
    """A process may have 65,530 maps: a large tensor must not take one for every piece."""
    area = allocate(32 * MIB, torch.uint8, torch.device("cpu"))
    for start in range(0, 32 * MIB, 4 * MIB):
        written(area[start : start + 4 * MIB], pattern(4 * MIB))
    assert maps_within(area) == 1


def test_the_pages_are_the_processs_own(filler, small):
    """Ordinary private memory: a child that is forked writes to a copy of its own."""
    area = allocate(2 * MIB, torch.uint8, torch.device("cpu"))
    written(area, pattern(2 * MIB))
    child = os.fork()
    if not child:
        ctypes.memset(area.data_ptr(), 0, area.nbytes)
        os._exit(0 if not ctypes.string_at(area.data_ptr() + 1, 1)[0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(area, pattern(2 * MIB))


def test_no_descriptor_stays_open(filler, small):
    """One transfer, one descriptor, closed at its end."""
    before = len(os.listdir("/proc/self/fd"))
    written(allocate(2 * MIB, torch.uint8, torch.device("cpu")), pattern(2 * MIB))
    assert len(os.listdir("/proc/self/fd")) == before

"""`pages`: memory that is filled with as few page faults as the machine allows."""

from __future__ import annotations

import errno

import pytest
import torch
from forked import run

from torchlift._transfer import pages
from torchlift._transfer.pages import HugePages, allocate


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

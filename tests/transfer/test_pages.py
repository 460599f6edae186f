"""`pages` and `userfault`: memory that is filled with as few page faults as the machine allows."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from forked import run
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limits

import torchlift
from torchlift._transfer import pages, userfault
from torchlift._transfer.direct import OpenFile
from torchlift._transfer.pages import HugePages, allocate
from torchlift._transfer.userfault import Filler, open_filler


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex128])
@pytest.mark.parametrize("numel", [0, 1000, 262_145, 2_000_003])
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


MIB = 1 << 20
needs_filler = pytest.mark.skipif(
    open_filler() is None, reason="this kernel or sandbox has no userfaultfd"
)


@pytest.fixture
def no_huge_pages(monkeypatch):
    """The kernel has none, so that all pages are small."""
    monkeypatch.setattr(pages, "_has_huge_pages", lambda: False)


def new_memory(nbytes: int) -> torch.Tensor:
    return allocate(nbytes, torch.uint8, torch.device("cpu"))


def pattern(nbytes: int) -> torch.Tensor:
    """Bytes that differ from page to page and inside a page."""
    return (torch.arange(nbytes) % 251).to(torch.uint8)


def write(target: torch.Tensor, start: int, content: torch.Tensor) -> list[tuple[int, int]]:
    """Fill a range of a tensor. Return the parts that were left to the caller."""
    parts = []
    for first, last in HugePages().fill(
        target,
        start,
        start + len(content),
        lambda offset, nbytes: content[offset - 7 : offset - 7 + nbytes],
        7,
    ):
        target[first:last] = content[first - start : last - start]
        parts.append((first, last))
    return parts


@pytest.mark.parametrize("fixture", ["small", "no_huge_pages"])
@settings(max_examples=30, deadline=None)
@given(
    start=st.integers(0, 3 * MIB),
    length=st.integers(0, 5 * MIB),
    touched=st.lists(st.integers(0, 8 * MIB - 1), max_size=3),
)
def test_any_range_gets_its_bytes_and_nothing_else_changes(fixture, start, length, touched):
    """A range may start and end anywhere, and pages of it may exist."""
    area = new_memory(8 * MIB)
    expected = torch.zeros(8 * MIB, dtype=torch.uint8)
    for at in touched:
        area[at] = expected[at] = 7
    content = pattern(length)
    with limits(slow_page=-1.0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_has_huge_pages", lambda: fixture == "small")
        write(area, start, content)
    expected[start : start + length] = content
    assert torch.equal(area, expected)


def test_memory_of_others_is_never_filled(no_huge_pages, monkeypatch):
    """A thread that touches it, with Python's lock, would wait for a copy that needs this lock."""
    monkeypatch.setattr(Filler, "fill", lambda *_: pytest.fail("filled"))
    live = torch.empty(8 * MIB, dtype=torch.uint8)
    assert write(live, 0, pattern(8 * MIB)) == [(0, 8 * MIB)]


#: What is missing -> what is replaced by what.
MISSING = {
    "the call": (userfault, "c_function", lambda _: lambda *_: -1),
    "a known machine": (userfault.platform, "machine", lambda: "vax"),
    "the version": (userfault, "_VERSION", 1),
    "the registration": (userfault, "_REGISTER", 0),
    "the copy": (userfault, "_COPY", 0),
}


@pytest.mark.parametrize("missing", MISSING)
def test_without_the_kernels_help_the_bytes_are_the_same(monkeypatch, no_huge_pages, missing):
    """A sandbox may forbid the call, and some memory or files cannot be used."""
    monkeypatch.setattr(*MISSING[missing])
    area, content = new_memory(4 * MIB), pattern(4 * MIB)
    assert write(area, 0, content) == [(0, 4 * MIB)]
    assert torch.equal(area, content)
    assert list(HugePages().fill(area, 0, 4 * MIB, lambda *_: None, 0)) == [(0, 4 * MIB)]  # no map


@needs_filler
def test_a_file_that_is_cut_while_it_is_copied_is_left_to_the_read(tmp_path, no_huge_pages):
    """The kernel stops at the end of the file. A copy of the process would be killed (SIGBUS)."""
    path = tmp_path / "x"
    path.write_bytes(pattern(4 * MIB).numpy().tobytes())
    area = new_memory(4 * MIB)
    with path.open("rb") as file:
        opened = OpenFile(str(path), file.fileno(), 4 * MIB)

        def cut(offset: int, nbytes: int) -> torch.Tensor | None:
            found = opened.map(offset, nbytes)
            os.truncate(path, MIB)
            return found

        assert list(HugePages().fill(area, 0, 4 * MIB, cut, 0)) == [(MIB, 4 * MIB)]
    assert torch.equal(area[:MIB], pattern(MIB))
    assert ends(lambda: area.sum().item())
    assert area[MIB:].count_nonzero() == 0


def ends(action: Callable[[], object]) -> bool:
    """Whether it ends. A thread that touches registered memory would wait for ever."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


@needs_filler
@pytest.mark.parametrize("at", ["_REGISTER", "_COPY", "_UNREGISTER"])
def test_an_interrupt_leaves_nothing_registered(monkeypatch, no_huge_pages, at):
    """Memory that was not filled is zeros, as all new memory."""
    control, area = Filler._control, new_memory(4 * MIB)

    def interrupted(self: Filler, number: int, argument: object) -> bool:
        found = control(self, number, argument)
        if number == getattr(userfault, at):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Filler, "_control", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(area, 0, pattern(4 * MIB))
    gc.collect()
    assert ends(lambda: area.sum().item())


@needs_filler
def test_threads_fill_neighbouring_ranges_of_one_map(no_huge_pages):
    """It is one map afterwards, because a process may have 65,530 of them."""
    area, content = new_memory(32 * MIB), pattern(32 * MIB)
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda start: write(area, start, content[start : start + 2 * MIB]),
            range(0, 32 * MIB, 2 * MIB),
        )
        assert not any(parts)
    assert torch.equal(area, content)
    end, count = area.data_ptr() + area.nbytes, 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        count += first < end and last > area.data_ptr()
    assert count == 1


@needs_filler
def test_a_child_that_is_forked_meanwhile_can_touch_all_of_the_memory(no_huge_pages):
    """Missing pages are zeros there, and those of the parent are filled."""
    area, children = new_memory(4 * MIB), []

    def source(offset: int, nbytes: int) -> torch.Tensor:
        return pattern(4 * MIB)[offset : offset + nbytes]

    control = Filler._control

    def fork_before_the_copy(self: Filler, number: int, argument: object) -> bool:
        if number == userfault._COPY:
            child = os.fork()
            if not child:
                os._exit(any(ctypes.string_at(area.data_ptr(), area.nbytes)))
            children.append(os.waitpid(child, 0)[1])
        return control(self, number, argument)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Filler, "_control", fork_before_the_copy)
        assert not list(HugePages().fill(area, 0, 4 * MIB, source, 0))
    assert children == [0]
    assert torch.equal(area, pattern(4 * MIB))


LOAD = """
import os, sys, torch, torchlift
from torchlift._transfer import pages
from torchlift._transfer.userfault import Filler
path, user = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(1024, 4096, bias=False, device="meta")
torchlift.load(model, path, source="read")  # imports, which another user may not read
pages._has_huge_pages = lambda: False
filled, fill = [], Filler.fill
Filler.fill = lambda self, *some: filled.append(fill(self, *some)) or filled[-1]
if user:
    os.setgid(user), os.setuid(user)
before = len(os.listdir("/proc/self/fd"))
torchlift.load(model.to("meta"), path, source="read")
print(sum(filled), len(os.listdir("/proc/self/fd")) - before)
assert model.weight.eq(torch.arange(4096.0)[:, None]).all()
"""


@needs_filler
@pytest.mark.parametrize("user", [0, 65534])
def test_a_load_is_filled_for_every_user(user):
    """The mode for faults of user code needs no privilege. No descriptor stays open."""
    if user and os.getuid():
        pytest.skip("only root can become another user")
    with TemporaryDirectory(dir="/var/tmp") as folder:  # others cannot open TMPDIR, nor tmp_path
        Path(folder).chmod(0o755)
        weight = torch.arange(4096.0)[:, None].expand(4096, 1024).contiguous()
        torchlift.save({"weight": weight}, Path(folder, "x.safetensors"))
        filled, opened = map(int, run(LOAD, Path(folder, "x.safetensors"), user).stdout.split())
    assert filled > 15 * MIB
    assert opened == 0


@needs_filler
def test_memory_that_stays_registered_is_an_error(monkeypatch, no_huge_pages):
    """The kernel needs one more map to divide a registered range, and a process has a limit."""
    control = Filler._control
    monkeypatch.setattr(
        Filler,
        "_control",
        lambda self, number, argument: (
            number != userfault._UNREGISTER and control(self, number, argument)
        ),
    )
    with pytest.raises(MemoryError, match="too many maps"):
        write(new_memory(4 * MIB), 0, pattern(4 * MIB))

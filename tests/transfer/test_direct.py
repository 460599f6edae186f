"""`direct`: what is not in the page cache is read past it, and it stays as it was."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest
import torch
from failing_reads import opened, readers
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limits

import torchlift
from torchlift._transfer import direct
from torchlift._transfer import reading as transfer
from torchlift._transfer.reading import Request, read
from torchlift.errors import IntegrityError

NBYTES = 24 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A file of random bytes, longer than several stages, that ends inside of a page."""
    path = tmp_path_factory.mktemp("cold") / "numbers"
    path.write_bytes(random.Random(1).randbytes(NBYTES + 777))
    return path


def resident(path: Path) -> int:
    """Bytes of a file of ours that are in the page cache, as mincore(2) tells them."""
    nbytes = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as area:
        address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
        pages = bytearray(-(-nbytes // mmap.PAGESIZE))
        room = (direct.ctypes.c_char * len(pages)).from_buffer(pages)
        found = direct.ctypes.CDLL(None).mincore(
            direct.ctypes.c_void_p(address), direct.ctypes.c_size_t(nbytes), room
        )
        del room
        assert found == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def evict(path: Path, offset: int = 0, nbytes: int = 0) -> None:
    """Drop a file from the page cache; skip where it stays."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if nbytes == 0 and resident(path) > NBYTES // 8:
        pytest.skip("the file system keeps its files in memory")


def whole(path: Path) -> list[Request]:
    """One request for all of the file, and the memory for it."""
    nbytes = path.stat().st_size
    made = transfer.allocate(nbytes, torch.uint8, torch.device("cpu"))
    return [Request(str(path), 0, nbytes, made, torch.uint8)]


def holds(requests: list[Request], path: Path) -> bool:
    """Whether the memory has what the file has."""
    return requests[0].destination.numpy().tobytes() == path.read_bytes()


@pytest.fixture
def opens(monkeypatch) -> list[int]:
    """The descriptors that are opened past the page cache."""
    true, made = direct._open_direct, []

    def open_direct(descriptor: int) -> int:
        made.append(true(descriptor))
        return made[-1]

    monkeypatch.setattr(direct, "_open_direct", open_direct)
    return made


def test_a_cold_file_is_read_past_the_page_cache_which_stays_as_it_was(path, opens):
    """What was not there before the read is not there afterwards, and all of it has arrived."""
    evict(path)
    requests = whole(path)
    read(requests, opened(path))
    assert len(opens) == 1
    assert resident(path) < 1 << 20
    assert holds(requests, path)


def test_a_cached_file_is_read_from_the_page_cache(path, opens):
    """A disk is not asked for what memory has."""
    path.read_bytes()
    requests = whole(path)
    read(requests, opened(path))
    assert not opens
    assert holds(requests, path)


@pytest.mark.parametrize("refused", ["open", "read", "the question what is cached"])
def test_a_file_system_without_direct_reads_is_read_as_ever(path, monkeypatch, refused):
    """Every byte arrives, through the page cache. NFS knows no read without waiting."""
    evict(path)
    true, opening, past = os.preadv, direct._open_direct, list[int]()

    def open_direct(descriptor: int) -> int:
        past.append(-1 if refused == "open" else opening(descriptor))
        return past[-1]

    def preadv(descriptor: int, *args: object) -> int:
        if refused == "read" and descriptor in past:
            raise OSError(errno.EINVAL, "Invalid argument")
        if "question" in refused and len(args) > 2:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return true(descriptor, *args)

    monkeypatch.setattr(direct, "_open_direct", open_direct)
    monkeypatch.setattr(os, "preadv", preadv)
    requests = whole(path)
    read(requests, opened(path))
    assert holds(requests, path)
    assert not past or "question" not in refused


@settings(max_examples=25, deadline=None)
@given(
    ranges=st.lists(
        st.tuples(
            st.integers(0, NBYTES),
            st.one_of(st.integers(0, 5000), st.integers(0, 9 << 20)),
            st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64]),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_ranges_that_are_read_past_the_page_cache_are_those_of_the_file(path, ranges):
    """Wherever they begin and end, cast or not, small and large, close and far apart."""
    content = path.read_bytes()
    requests, expected = [], []
    for offset, nbytes, dtype, cast in ranges:
        count = min(nbytes, len(content) - offset) // dtype.itemsize
        into = torch.float32 if cast and dtype is torch.int16 else dtype
        made = transfer.allocate(count, into, torch.device("cpu"))
        values = torch.empty(count, dtype=dtype)
        if count:
            values = torch.frombuffer(bytearray(content), dtype=dtype, count=count, offset=offset)
        expected.append(values.to(into))
        requests.append(Request(str(path), offset, count * dtype.itemsize, made, dtype, True))
    with limits(past_cache=0), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHLIFT_DIRECT_IO", "always")
        read(requests, opened(path))
    for request, right in zip(requests, expected, strict=True):
        found = request.destination.view(torch.uint8), right.view(torch.uint8)
        assert torch.equal(*found)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_ends_the_load_with_one_error(path, monkeypatch, opens, error):
    """It names the file and the bytes; no thread and no descriptor stay."""
    evict(path)
    true = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if descriptor in opens and offset > 8 << 20:
            raise OSError(error, os.strerror(error))
        return true(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with opened(path) as files:
        with pytest.raises(IntegrityError, match="reading failed") as caught:
            read(whole(path), files)
        assert caught.value.file == str(path)
    assert not readers()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opens[0])


def test_the_choice_can_be_made_by_hand(path, monkeypatch, opens):
    """``never`` fills the page cache, ``always`` passes it by, and anything else is refused."""
    evict(path)
    monkeypatch.setenv("TORCHLIFT_DIRECT_IO", "never")
    read(whole(path), opened(path))
    assert not opens
    assert resident(path) >= NBYTES
    monkeypatch.setenv("TORCHLIFT_DIRECT_IO", "always")
    read(whole(path), opened(path))
    assert len(opens) == 1
    monkeypatch.setenv("TORCHLIFT_DIRECT_IO", "1")
    with pytest.raises(ValueError, match="TORCHLIFT_DIRECT_IO must be auto, always or never"):
        read(whole(path), opened(path))


def test_processes_that_read_the_same_share_one_read_of_the_disk(path, monkeypatch, opens):
    """Ranks on one host that each read the whole of a file find it in the page cache."""
    evict(path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    requests = whole(path)
    read(requests, opened(path))
    assert not opens
    assert resident(path) >= NBYTES
    assert holds(requests, path)


def cold_load(path: str) -> int:
    """Load a cold checkpoint and return the bytes of its tensors."""
    model = torchlift.skeleton(torch.nn.Linear, 8192, 2560, bias=False)
    return torchlift.load(model, path, source="read").bytes_read


def test_a_cold_load_takes_its_tensors_and_a_fixed_budget(tmp_path):
    """80 MiB of weights and at most 64 MiB beside them, as from the page cache."""
    path = tmp_path / "cold.pt"
    torch.save({"weight": torch.ones(2560, 8192)}, path)
    evict(path)
    used = torchlift.measure.in_child(cold_load, str(path))
    assert used.value == 80 << 20
    assert used.memory.added_anonymous < (80 + 64) << 20


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, monkeypatch, opens):
    """The bytes behind its new end are not made up."""
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(NBYTES))
    evict(path)
    true = direct.OpenFile.read_direct

    def shrinking(file: direct.OpenFile, *rest: object) -> int | None:
        os.truncate(path, 5 << 20)
        return true(file, *rest)

    monkeypatch.setattr(direct.OpenFile, "read_direct", shrinking)
    with opened(path) as files, pytest.raises(IntegrityError, match="ends early"):
        read(whole(path), files)
    assert not readers()

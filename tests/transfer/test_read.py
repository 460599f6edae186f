"""`transfer`: byte ranges of files into tensors, in parallel, complete or not at all."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from failing_reads import failing, opened, readers
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limits

from torchlift._store.places import place_of, stamp_now
from torchlift._transfer.files import Files
from torchlift._transfer.reading import Request, read
from torchlift.errors import IntegrityError

CONTENT = bytes(random.Random(0).randbytes(3000))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    """Two files of random bytes, opened as a checkpoint's files are."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "a").write_bytes(CONTENT)
    (folder / "b").write_bytes(CONTENT[::-1])
    return opened(folder / "a", folder / "b")


def request(file: str, offset: int, nbytes: int) -> Request:
    """A range wanted as it is."""
    return Request(file, offset, nbytes, torch.zeros(nbytes, dtype=torch.uint8), torch.uint8)


def plain(file: str, offset: int, nbytes: int) -> list[int]:
    """The same range, read the plain way."""
    return list(Path(file).read_bytes()[offset : offset + nbytes])


ranges = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3000), st.integers(0, 900)).filter(
        lambda found: found[1] + found[2] <= 3000
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(wanted=ranges, piece=st.sampled_from([64, 256, 8 << 20]), seed=st.integers(0, 99))
def test_any_ranges_read_as_plain_reads_do(files, wanted, piece, seed):
    """Overlaps, repetitions, gaps, empty ranges, small pieces and short reads change nothing."""
    names = list(files.stamps)
    requests = [request(names[which], offset, nbytes) for which, offset, nbytes in wanted]
    dice = random.Random(seed)
    true = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return true(descriptor, [buffers[0][: dice.randint(1, len(buffers[0]))]], offset)

    arrived: list[int] = []
    with limits(staged=piece, direct=piece), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        total = read(requests, files, advance=arrived.append)
    assert total == sum(arrived) == sum(nbytes for _, _, nbytes in wanted)
    for made, (which, offset, nbytes) in zip(requests, wanted, strict=True):
        assert made.destination.tolist() == plain(names[which], offset, nbytes)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 40),
    row=st.integers(1, 8),
    gap=st.integers(-4, 9),
    apart=st.sampled_from([0, 0, 3]),
    start=st.integers(0, 50),
    kind=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64]),
    wish=st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float64]),
    piece=st.sampled_from([64, 256, 8 << 20]),
    close=st.sampled_from([0, 64 << 10]),
    seed=st.integers(0, 99),
)
def test_rows_of_a_matrix_arrive_as_one_range(
    tmp_path_factory, rows, row, gap, apart, start, kind, wish, piece, close, seed
):
    """Apart, close or overlapping, on both sides, mapped or read, cast, in small pieces."""
    values = torch.randint(0, 100, (3000,), generator=torch.Generator().manual_seed(seed))
    values = values.to(kind)
    path = tmp_path_factory.mktemp("rows") / "numbers"
    path.write_bytes(values.numpy().tobytes())
    step, size = max(row + gap, 0), kind.itemsize
    expected = torch.cat([values[start + n * step :][:row] for n in range(rows)]).to(wish)
    wide = torch.zeros(rows, row + apart, dtype=wish)
    made = wide[:, :row] if apart else wide.view(-1)
    other = request(str(path), 3, 70)  # a neighbour that starts before and ends behind the first
    wanted = Request(
        str(path), start * size, rows * row * size, made, kind, rows=rows, step=step * size
    )
    dice, true, arrived = random.Random(seed), os.preadv, []

    def short(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        return true(descriptor, [buffers[0][: dice.randint(1, len(buffers[0]))]], offset, flags)

    sizes = limits(staged=piece, direct=piece, close=close)
    with sizes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        total = read([wanted, other], opened(path), advance=arrived.append)
    assert total == sum(arrived) == wanted.nbytes + 70
    assert torch.equal(made.reshape(-1), expected)
    assert not wide[:, row:].any()
    assert other.destination.tolist() == plain(str(path), 3, 70)


def test_a_file_that_is_cut_off_while_its_rows_are_mapped_is_an_error(tmp_path, monkeypatch):
    """Its pages are asked for before they are touched, which would be a SIGBUS."""
    path = tmp_path / "matrix"
    path.write_bytes(bytes(600 * 4096))
    true = os.posix_fadvise

    def cut(descriptor: int, start: int, length: int, advice: int) -> None:
        os.truncate(path, 300 * 4096)
        true(descriptor, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", cut)
    made = torch.zeros(600 * 512, dtype=torch.uint8)
    wanted = Request(str(path), 0, 600 * 512, made, torch.uint8, rows=600, step=4096)
    with pytest.raises(IntegrityError, match="the file ends early"):
        read([wanted], opened(path))


@pytest.mark.parametrize("away", [False, True], ids=["a file", "a URL"])
@pytest.mark.parametrize("wish", [torch.int16, torch.float64])
def test_rows_arrive_in_unaligned_memory_with_gaps(tmp_path, away, wish):
    """Each row is in its place, and the bytes of the gaps stay as they were."""
    values = torch.arange(40 * 32, dtype=torch.int16)
    place: str = str(tmp_path / "matrix")
    if away:
        place = place_of("memory://unaligned/matrix")
        MemoryFileSystem().pipe_file("/unaligned/matrix", values.numpy().tobytes())
    else:
        Path(place).write_bytes(values.numpy().tobytes())
    area = bytearray(40 * 12 * wish.itemsize + 1)
    wide = torch.frombuffer(area, dtype=wish, offset=1).view(40, 12)
    wanted = Request(place, 6, 40 * 16, wide[:, :8], torch.int16, rows=40, step=64)
    read([wanted], Files({place: stamp_now(place)}))
    assert torch.equal(wide[:, :8].clone(), values.view(40, 32)[:, 3:11].to(wish))
    assert not wide[:, 8:].any()


def test_a_file_that_ends_early_is_an_integrity_error(tmp_path):
    """A request past the end names the byte at which the file ended."""
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with pytest.raises(
        IntegrityError, match=r"the file ends early; expected bytes 50 to 150; foun"
    ):
        read([request(str(path), 50, 100)], opened(path))


@pytest.mark.parametrize("pieces", [10_000, 100], ids=["one piece", "many pieces"])
def test_other_errors_of_a_reader_thread_come_through(files, monkeypatch, pieces):
    """What is not the disk's fault is not called so, and no thread is left behind."""
    monkeypatch.setattr(os, "preadv", failing(MemoryError("none left"), 1))
    with limits(direct=pieces), pytest.raises(MemoryError, match="none left"):
        read([request(next(iter(files.stamps)), 0, 1000)], files)
    assert not readers()


@limits(direct=50)
def test_an_interrupt_between_pieces_ends_the_threads(files):
    """Ctrl-C during a parallel read leaves no thread that still writes."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read([request(next(iter(files.stamps)), 0, 3000)], files, advance=interrupt)
    assert not readers()


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "float64"), ("complex64", "complex128"), ("float32", "bfloat16")],
)
@pytest.mark.parametrize("numel", [1000, 1_300_001])
def test_a_cast_into_memory_at_an_odd_address_is_right(tmp_path, source, target, numel):
    """A caller's array may lie where no page ends between two of its elements."""
    values = torch.randn(numel, dtype=getattr(torch, source))
    path = tmp_path / "values"
    path.write_bytes(bytes(values.view(torch.uint8).numpy()))
    wanted = getattr(torch, target)
    memory = torch.zeros(numel * wanted.itemsize + 64, dtype=torch.uint8)
    odd = wanted.itemsize // 2
    into = torch.frombuffer(memory.numpy(), dtype=wanted, count=numel, offset=odd)
    assert into.data_ptr() % wanted.itemsize
    with opened(path) as files:
        read([Request(str(path), 0, values.nbytes, into, values.dtype)], files)
    found = memory[odd : odd + into.nbytes].clone()  # torch itself may crash on `into`
    assert torch.equal(found.view(wanted), values.to(wanted))

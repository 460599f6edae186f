"""The ring of memory that devices fetch from, with a device of this process's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from failing_reads import readers
from fake_device import FakeDevice, OnDevice, Pinned
from limits import limits

import torchlift
from torchlift._load import fetch
from torchlift._store.files import FileStamp
from torchlift._transfer import pinned, reading
from torchlift._transfer.direct import DEPTH, STAGE
from torchlift._transfer.files import Files
from torchlift._transfer.reading import Request, read
from torchlift.errors import IntegrityError

_STAGE = 64 << 10


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """A device that fetches at once; its thread has ended after the test."""
    made = FakeDevice()
    yield made
    made.close()


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> list[torch.Tensor]:
    """All memory of the ring."""
    found: list[torch.Tensor] = []

    def take(nbytes: int) -> torch.Tensor:
        found.append(torch.empty(nbytes, dtype=torch.uint8).as_subclass(Pinned))
        return found[-1]

    monkeypatch.setattr(reading, "allocate_pinned", take)
    monkeypatch.setattr(pinned, "stream_of", lambda _: device)
    return found


@pytest.fixture
def made(stages: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same of small stages."""
    with limits(staged=_STAGE):
        yield stages


def numbers_in(path: Path, count: int) -> tuple[Files, torch.Tensor]:
    """A file of float32, opened as a checkpoint's files are."""
    values = torch.randn(count)
    path.write_bytes(bytes(values.view(torch.uint8).numpy()))
    now = path.stat()
    stamp = FileStamp(now.st_size, now.st_mtime_ns, now.st_dev, now.st_ino)
    return Files({str(path): stamp}), values


def requests(path: Path, device: FakeDevice, *tensors: torch.Tensor) -> list[Request]:
    """Requests for tensors that lie one behind the other in the file, onto the device."""
    found, at = [], 0
    for tensor in tensors:
        nbytes = 4 * tensor.numel()
        found.append(Request(str(path), at, nbytes, OnDevice(tensor, device), torch.float32))
        at += nbytes
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_arrive_through_a_few_stages_that_are_used_again(tmp_path, device, made, dtype):
    """No stage is filled anew before the device has fetched what it has; casts are the device's."""
    files, values = numbers_in(tmp_path / "f", 40 * _STAGE // 4 + 7)
    device.rate = 200e6
    sizes = [5, 30 * _STAGE // 4, 1000]
    sizes.append(len(values) - sum(sizes))
    targets = [torch.empty(size, dtype=dtype) for size in sizes]
    read(requests(tmp_path / "f", device, *targets), files)
    assert torch.equal(torch.cat(targets), values.to(dtype))
    assert len(made) == pinned.COUNT
    assert device.waited >= 40 - pinned.COUNT


@pytest.mark.parametrize(("direct", "count"), [("never", 12), ("always", 10)])
def test_the_stages_fit_in_the_budget(tmp_path, device, stages, monkeypatch, direct, count) -> None:
    """A thread that reads past the page cache holds one more stage of its own."""
    monkeypatch.setenv("TORCHLIFT_DIRECT_IO", direct)
    files, values = numbers_in(tmp_path / "f", 20 * pinned.STAGE // 4)
    target = torch.empty(len(values))
    read(requests(tmp_path / "f", device, target), files)
    assert torch.equal(target, values)
    assert len(stages) == count
    own = DEPTH // 2 if direct == "always" else 0
    assert sum(stage.nbytes for stage in stages) + own * STAGE <= reading.BUDGET


def test_a_device_without_room_for_a_cast_gets_what_the_host_casts(tmp_path, device, made) -> None:
    """In the middle of a live model an error would leave it half loaded."""
    files, values = numbers_in(tmp_path / "f", 4 * _STAGE)
    device.full = True
    target = torch.empty(len(values), dtype=torch.bfloat16)
    read(requests(tmp_path / "f", device, target), files)
    assert torch.equal(target, values.bfloat16())


@pytest.mark.parametrize("failure", ["the file", "the caller"])
def test_nothing_is_on_its_way_after_an_error(tmp_path, device, made, failure) -> None:
    """A file that ends early, or Ctrl-C: what the device fetches from can be freed."""
    files, values = numbers_in(tmp_path / "f", 40 * _STAGE // 4)
    device.rate = 50e6
    target = torch.zeros(len(values) + 9 * (failure == "the file"))
    arrived: list[int] = []

    def advance(nbytes: int) -> None:
        arrived.append(nbytes)
        if failure == "the caller" and len(arrived) == 20:
            raise KeyboardInterrupt

    with pytest.raises((IntegrityError, KeyboardInterrupt)):
        read(requests(tmp_path / "f", device, target), files, advance=advance)
    fetched = device.fetched
    assert fetched > 0
    assert not readers()
    device.close()
    assert device.fetched == fetched


def test_a_device_that_runs_out_is_one_error_that_changes_nothing(tmp_path, monkeypatch) -> None:
    """It names the file and the way out."""
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(3, 2).state_dict(), path)

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory. Tried to allocate\nmuch")

    monkeypatch.setattr(fetch, "allocate", allocate)
    model = torchlift.skeleton(torch.nn.Linear, 3, 2)
    with pytest.raises(torchlift.PlacementError, match="does not have enough memory") as caught:
        torchlift.load(model, path, source="read")
    assert caught.value.file == str(path)
    assert caught.value.found == "out of memory. Tried to allocate"
    assert "remap.fit" in str(caught.value)
    assert model.weight.is_meta

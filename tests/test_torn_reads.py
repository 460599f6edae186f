"""A local file that is overwritten in place while it is read: each door raises an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift._transfer.direct import OpenFile
from torchlift._transfer.files import Files
from torchlift.errors import IntegrityError

#: Large enough for reads in blocks, and small enough for one job.
NUMBERS = 300_000
TENSORS = {"a.weight": torch.ones(2, NUMBERS), "b.weight": torch.ones(1, NUMBERS)}


def model() -> nn.Module:
    layers = {"a": nn.Linear(NUMBERS, 2, bias=False), "b": nn.Linear(NUMBERS, 1, bias=False)}
    return nn.ModuleDict(layers).to("meta")


DOORS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: torchlift.load(model(), path, source="read"),
    "load, cast": lambda path: torchlift.load(model(), path, dtype="bfloat16"),
    "load, live": lambda path: torchlift.load(model().to_empty(device="cpu"), path),
    "convert": lambda path: torchlift.convert(path, path.parent / "new.safetensors"),
    "convert, cast": lambda path: torchlift.convert(path, path.parent / "new.pt", dtype="float16"),
    "save": lambda path: torchlift.save(torchlift.open(path), path.parent / "new.pt"),
    "diff": lambda path: torchlift.diff(path, TENSORS),
    "diff, second": lambda path: torchlift.diff(TENSORS, path),
    "digest": torchlift.digest,
    "verify": torchlift.verify,
    "stats": lambda path: torchlift.open(path).stats("b.weight"),
}


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """Overwrite a file with other values as soon as somebody has its last bytes."""

    def arm(path: Path) -> list[str]:
        with torchlift.open(path) as ckpt:
            ends = [each.offset + each.nbytes for each in ckpt.entries["b.weight"].chunks]
        last, done = max(ends) - 1, list[str]()

        def tear(name: str, start: int, end: int) -> None:
            # Not after a read of the header or the directory, which are small.
            if start <= last < end and end - start > 100_000 and not done:
                done.append(name)
                with path.open("r+b") as file:
                    file.seek(last // 2)
                    file.write(b"\x01" * 1000)
                os.utime(path, ns=(1, 1))

        preadv, whole, part = os.preadv, Files.map, OpenFile.map

        def reading(
            descriptor: int, buffers: Sequence[memoryview], offset: int, *flags: int
        ) -> int:
            found = preadv(descriptor, buffers, offset, *flags)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                tear("read", offset, offset + found)
            return found

        def mapping(self: Files, file: str, offset: int, nbytes: int, *dtype: Any) -> Any:
            found = whole(self, file, offset, nbytes, *dtype)
            tear("map", offset, offset + nbytes)
            return found

        def populating(self: OpenFile, offset: int, nbytes: int) -> Any:
            found = part(self, offset, nbytes)
            tear("map", offset, offset + nbytes)
            return found

        monkeypatch.setattr(os, "preadv", reading)
        monkeypatch.setattr(Files, "map", mapping)
        monkeypatch.setattr(OpenFile, "map", populating)
        return done

    return arm


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("door", DOORS)
def test_a_file_that_is_overwritten_while_it_is_read_is_an_error(tmp_path, torn, door, name):
    """The values would be a mixture of old and new ones, and nothing would say so."""
    path = tmp_path / name

    def write() -> None:  # what somebody else does
        if name == "x.pt":
            torch.save(TENSORS, path)
        else:
            torchlift.save(TENSORS, path, checksum=False)

    write()
    if (door, name) == ("verify", "x.safetensors"):
        pytest.skip("without checksums, nothing is read")
    done = torn(path)
    with pytest.raises(IntegrityError) as caught:
        DOORS[door](path)
    assert done
    assert caught.value.file == str(path)
    assert caught.value.hint == "Open the checkpoint again once nobody writes to it."
    assert sorted(os.listdir(tmp_path)) == [name]
    write()
    DOORS[door](path)  # the way out


def test_a_file_that_another_one_replaced_is_not_compared_with_it(tmp_path):
    """What is mapped keeps the old content. A comparison reads the file, which is another one."""
    path = tmp_path / "x.safetensors"
    torchlift.save(TENSORS, path)
    with torchlift.open(path) as ckpt:
        assert ckpt["a.weight"].sum() == 2 * NUMBERS
        torchlift.save({key: 2 * value for key, value in TENSORS.items()}, path)
        assert ckpt["a.weight"].sum() == 2 * NUMBERS
        for compare in (lambda: torchlift.diff(ckpt, TENSORS), lambda: torchlift.digest(ckpt)):
            with pytest.raises(IntegrityError) as caught:
                compare()
            assert caught.value.file == str(path)

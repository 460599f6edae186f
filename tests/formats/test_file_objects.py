"""A file object counts by the bytes that it yields, never by those of the file behind it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from doors import refused_by_all
from torch import nn

import torchlift
from torchlift import FormatError

STATE = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([7.0, 8.0])}
#: What is closed at the end of a test.
OPEN = ExitStack()
#: What stands where a reader that looks behind the object would look.
OTHER = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}


def content(suffix: str) -> bytes:
    """The bytes of a checkpoint."""
    file = io.BytesIO()
    torchlift.save(STATE, file, format="safetensors" if suffix == "safetensors" else None)
    return file.getvalue()


def packed(opener: Any) -> Callable[[Path, bytes], Any]:
    """Compress, and open what decompresses."""

    def make(path: Path, data: bytes) -> Any:
        with opener(path, "wb") as file:
            file.write(data)
        return opener(path, "rb")

    return make


def in_tar(path: Path, data: bytes) -> Any:
    """A member of an archive whose name is that of a file in the current folder."""
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("model.pt")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    torchlift.save(OTHER, "model.pt")
    archive = tarfile.open(path)  # noqa: SIM115
    OPEN.callback(archive.close)
    return archive.extractfile("model.pt")


def by_fsspec(path: Path, data: bytes) -> Any:
    """What fsspec decompresses."""
    with gzip.open(path, "wb") as file:
        file.write(data)
    return OPEN.enter_context(fsspec.open(str(path), "rb", compression="gzip"))


def spooled(path: Path, data: bytes) -> Any:
    """A file without a name, which may be in memory."""
    file = tempfile.SpooledTemporaryFile()  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


def written(make: Callable[[Path], Any]) -> Any:
    """A file of some bytes, opened in some way."""

    def made(path: Path, data: bytes) -> Any:
        path.write_bytes(data)
        return make(path)

    return made


def mapped(path: Path) -> mmap.mmap:
    """A map of a file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def renamed(path: Path) -> Any:
    """A file whose name is another one's by now."""
    file = path.open("rb")
    path.rename(path.with_suffix(".old"))
    torchlift.save(OTHER, path, format="torch-zip")
    return file


KINDS: dict[str, Callable[[Path, bytes], Any]] = {
    "gzip": packed(gzip.open),
    "fsspec": by_fsspec,
    "tar": in_tar,
    "bytes": lambda path, data: io.BytesIO(data),
    "spooled": spooled,
    "reader": written(lambda path: path.open("rb")),
    "raw": written(lambda path: path.open("rb", buffering=0)),
    "random": written(lambda path: path.open("r+b")),
    "mmap": written(mapped),
    "renamed": written(renamed),
    "over another reader": lambda path, data: io.BufferedReader(packed(gzip.open)(path, data)),
}


@pytest.fixture(params=KINDS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[bytes], Any]]:
    """Make file objects of one kind from bytes, each with a file of its own."""
    monkeypatch.chdir(tmp_path)
    with OPEN:
        paths = (tmp_path / f"{number}.bin" for number in range(20))
        yield lambda data: OPEN.enter_context(KINDS[request.param](next(paths), data))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_every_door_takes_the_bytes_that_it_yields(
    make: Callable[[bytes], Any], suffix: str, tmp_path: Path
) -> None:
    """Opened, loaded, converted, verified, compared and summed up; it stays where it was."""
    data, model = content(suffix), nn.Linear(3, 2)
    file = make(data)
    with torchlift.open(file) as ckpt:
        assert torch.equal(ckpt["weight"], STATE["weight"])
        assert file.tell() == 0
    assert torchlift.load(model, make(data)).loaded
    assert torch.equal(model.weight, STATE["weight"])
    assert torchlift.plan(model, make(data)).loaded
    torchlift.convert(make(data), tmp_path / "new.safetensors")
    assert torchlift.diff(tmp_path / "new.safetensors", STATE).equal
    report = torchlift.verify(make(data))
    assert report.ok
    assert len(report.checked) == 2
    assert torchlift.diff(make(data), STATE).equal
    assert not torchlift.diff(make(data), OTHER).equal
    assert torchlift.digest(make(data)) == torchlift.digest(STATE)


def test_what_cannot_seek_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """Such as a pipe. Nothing of it is read, and what the error says works."""
    out, into = os.pipe()
    with open(into, "wb") as file:
        file.write(content("safetensors"))
    with open(out, "rb") as file:
        refused_by_all(file, tmp_path, r"cannot seek.*io\.BytesIO\(file\.read\(\)\)")
        assert torchlift.open(io.BytesIO(file.read())).keys() == STATE.keys()


def test_text_and_what_is_open_for_writing_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """By their mode, whatever wraps them."""
    path, other = tmp_path / "x.pt", tmp_path / "w"
    path.write_bytes(content("pt"))
    files: list[tuple[Callable[[], Any], str]] = [
        (lambda: io.StringIO("text"), "found text"),
        (lambda: path.open(encoding="latin-1"), "found text"),
        (lambda: tempfile.SpooledTemporaryFile(mode="w+"), "found text"),  # noqa: SIM115
        (partial(open, other, "wb"), "be read"),
        (partial(gzip.open, other, "wb"), "be read"),
    ]
    for make_one, words in files:
        with make_one() as file:
            refused_by_all(file, tmp_path, rf"{words}.*mode 'rb'")
    with path.open("rb") as file:
        assert torchlift.open(file).keys() == STATE.keys()
    refused_by_all(file, tmp_path, r"closed file.*mode 'rb'")


def test_an_opener_of_fsspec_is_refused_before_it_is_entered(tmp_path: Path) -> None:
    """It is neither a path nor a file. What `with` gives is read."""
    path = tmp_path / "x.pt.gz"
    with gzip.open(path, "wb") as file:
        file.write(content("pt"))
    opener = fsspec.open(str(path), "rb", compression="gzip")
    for door in (torchlift.open, torchlift.verify):
        with pytest.raises(TypeError, match="a path or a binary file object, not OpenFile"):
            door(opener)
    with opener as file:
        assert torch.equal(torchlift.open(file)["weight"], STATE["weight"])


def test_damaged_compression_is_an_error_of_ours(tmp_path: Path) -> None:
    """Whatever the module that decompresses raises; cut off, and with wrong bytes."""
    for opener in (gzip.open, bz2.open, lzma.open):
        with opener(tmp_path / "x", "wb") as file:
            file.write(content("pt"))
        whole = (tmp_path / "x").read_bytes()
        middle = len(whole) // 2
        for data in (whole[:middle], whole[:middle] + bytes(40) + whole[middle + 40 :]):
            (tmp_path / "x").write_bytes(data)
            with opener(tmp_path / "x") as file, pytest.raises(FormatError, match="be read"):
                torchlift.open(file)

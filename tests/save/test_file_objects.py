"""`save` to a binary file object: from its position, all of it or nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load

import torchlift
from torchlift import CheckpointError, PlacementError

STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


def test_it_is_written_from_the_position_of_the_file(tmp_path: Path) -> None:
    """In memory and on the disk, buffered or raw; what is before it stays."""
    file = io.BytesIO(b"head")
    file.seek(0, 2)
    report = torchlift.save(STATE, file, format="safetensors")
    assert file.getvalue()[:4] == b"head"
    assert torch.equal(load(file.getvalue()[4:])["w"], STATE["w"])
    assert (report.tensors, report.nbytes, report.path) == (2, 36, "a BytesIO")
    for buffering in (0, -1):
        with (tmp_path / "x.pt").open("wb", buffering=buffering) as raw:
            torchlift.save({**STATE, "step": 3}, raw)
        found = torch.load(tmp_path / "x.pt", weights_only=True)
        assert found["step"] == 3
        assert torch.equal(found["b"], STATE["b"])


class Full(io.BytesIO):
    """Takes ten bytes."""

    def write(self, data: object) -> int:
        if self.tell() > 10:
            raise OSError(28, "No space left on device")
        return super().write(bytes(data)[:10])  # type: ignore[call-overload]


def test_after_an_error_it_has_its_former_length_and_position() -> None:
    """Where the file is full, and where the state is refused before a byte is written."""
    file = Full(b"headtail")
    file.seek(4)
    with pytest.raises(CheckpointError, match=r"a Full.*No space left"):
        torchlift.save(STATE, file)
    assert (len(file.getvalue()), file.getvalue()[:4], file.tell()) == (8, b"head", 4)
    plain = io.BytesIO(b"headtail")
    with pytest.raises(PlacementError, match="step"):
        torchlift.save({**STATE, "step": 3}, plain, format="safetensors")
    assert (plain.getvalue(), plain.tell()) == (b"headtail", 0)


def test_text_and_sets_of_files_are_refused() -> None:
    """By name, before anything is written."""
    with pytest.raises(TypeError, match="open for text"):
        torchlift.save(STATE, io.StringIO())  # type: ignore[arg-type]
    for words in ({"format": "dcp"}, {"format": "sharded"}, {"max_shard_size": "1GB"}):
        with pytest.raises(ValueError, match="a file object is one file"):
            torchlift.save(STATE, io.BytesIO(), **words)  # type: ignore[arg-type]


def test_it_takes_the_arguments_that_a_path_takes() -> None:
    """Text for the header, and what is refused of it."""
    file = io.BytesIO()
    torchlift.save(STATE, file, format="safetensors", metadata={"by": "me"})
    assert torchlift.open(io.BytesIO(file.getvalue())).metadata["by"] == "me"
    for wrong in ({"metadata": {"by": "me"}}, {"replicated": "no"}):  # for a torch file; at all
        with pytest.raises(ValueError, match=next(iter(wrong))):
            torchlift.save(STATE, io.BytesIO(), **wrong)


def test_a_file_that_only_goes_on_or_takes_nothing(tmp_path: Path) -> None:
    """One that compresses cannot look for its end; one that is open for reading says so."""
    with gzip.open(tmp_path / "x.gz", "wb") as file:
        torchlift.save(STATE, file)
    with gzip.open(tmp_path / "x.gz", "rb") as file:
        assert torch.equal(torch.load(io.BytesIO(file.read()))["b"], STATE["b"])
    (tmp_path / "r").write_bytes(b"12345")
    with (tmp_path / "r").open("rb") as file, pytest.raises(CheckpointError, match="be written"):
        torchlift.save(STATE, file)


class Own(io.FileIO):
    """Turns all bits of what it is given."""

    def write(self, data: Any) -> int:
        return super().write(bytes(byte ^ 255 for byte in bytes(data)))


def turned(path: Path) -> io.BytesIO:
    """What `Own` was given."""
    return io.BytesIO(bytes(byte ^ 255 for byte in path.read_bytes()))


#: How it is opened for writing, and for reading.
FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "gzip": (partial(gzip.open, mode="wb"), gzip.open),
    "bz2": (partial(bz2.open, mode="wb"), bz2.open),
    "lzma": (partial(lzma.open, mode="wb"), lzma.open),
    "fsspec": (lambda path: fsspec.open(str(path), "wb", compression="gzip").open(), gzip.open),
    "random": (partial(open, mode="w+b"), partial(open, mode="rb")),
    "append": (partial(open, mode="ab"), partial(open, mode="rb")),
    "subclass": (partial(Own, mode="w"), turned),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("format", ["torch-zip", "safetensors"])
def test_it_gets_the_bytes_and_what_it_makes_of_them_is_its_own(
    kind: str, format: str, tmp_path: Path
) -> None:
    """What compresses holds a checkpoint that reads back."""
    write, read = FILES[kind]
    with write(tmp_path / "x") as file:
        torchlift.save(STATE, file, format=format)
    with read(tmp_path / "x") as file:
        assert torchlift.verify(file).ok
        assert torchlift.diff(file, STATE).equal


def test_members_of_an_archive_and_temporary_files_hold_good_data(tmp_path: Path) -> None:
    """Also a map of a file that has the room, and not one that has not."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, archive.open("model", "w") as file:
        torchlift.save(STATE, file)
    with zipfile.ZipFile(tmp_path / "x.zip") as archive, archive.open("model") as file:
        assert torchlift.diff(file, STATE).equal
    for kind in (
        tempfile.TemporaryFile,
        tempfile.SpooledTemporaryFile,
        tempfile.NamedTemporaryFile,
    ):
        with kind() as file:
            report = torchlift.save(STATE, file)
            assert report.path.startswith(("/", "a "))
            file.seek(0)
            assert torchlift.diff(file, STATE).equal
    with mmap.mmap(-1, torchlift.save(STATE, io.BytesIO()).nbytes + 4096) as room:
        torchlift.save(STATE, room, format="safetensors")
        header = int.from_bytes(room[:8], "little")
        assert torchlift.diff(io.BytesIO(room[: 8 + header + 36]), STATE).equal
    with mmap.mmap(-1, 100) as room:
        room.write(b"before")
        with pytest.raises(CheckpointError, match="room for the file"):
            torchlift.save(STATE, room)
        assert room.tell() == 6


def test_text_files_of_any_class_are_refused(tmp_path: Path) -> None:
    """Before anything is written; opened as the error says, it is."""
    texts: list[Callable[[], Any]] = [
        lambda: (tmp_path / "x").open("w"),
        lambda: gzip.open(tmp_path / "x", "wt"),  # noqa: SIM115
        lambda: tempfile.NamedTemporaryFile("w+"),  # noqa: SIM115
        lambda: tempfile.SpooledTemporaryFile(mode="w+"),  # noqa: SIM115
    ]
    for make in texts:
        with make() as file, pytest.raises(TypeError, match="open it with mode 'wb'"):
            torchlift.save(STATE, file)
    with (tmp_path / "x").open("wb") as file:
        torchlift.save(STATE, file)
    assert torchlift.diff(tmp_path / "x", STATE).equal
    with pytest.raises(CheckpointError, match=r"closed file"):
        torchlift.save(STATE, file)

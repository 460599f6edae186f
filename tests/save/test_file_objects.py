"""`save` to a binary file object: from its position, all of it or nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
import os
import signal
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from full_disk import file_size_limit
from pairwise import pairwise
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


@pytest.mark.parametrize("format", ["torch-zip", "safetensors"])
def test_it_is_written_in_order_without_a_temporary_file(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe or a socket can be one, and no disk needs room. The bytes are those of a path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    state = {**STATE, "large": torch.randn(300, 300).t()}
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as thread, open(read, "rb") as pipe:
        received = thread.submit(pipe.read)
        with open(write, "wb") as file:
            torchlift.save(state, file, format=format)
    torchlift.save(state, tmp_path / "x", format=format)
    assert received.result() == (tmp_path / "x").read_bytes()
    assert torchlift.verify(tmp_path / "x").checked


class Full(io.BytesIO):
    """Takes ten bytes."""

    def write(self, data: object) -> int:
        if self.tell() > 10:
            raise OSError(28, "No space left on device")
        return super().write(bytes(data)[:10])  # type: ignore[call-overload]


class Refused:
    """An object of a class that no checkpoint stores."""


@pytest.mark.parametrize(
    ("value", "format"),
    [(3, "safetensors"), (torch.empty(2, device="meta"), "torch-zip"), (Refused(), "torch-zip")],
)
def test_a_value_that_is_refused_is_refused_before_the_first_byte(
    value: object, format: str
) -> None:
    """The object sees no write but that of nothing, which finds out what kind it is."""
    file = Full(b"headtail")
    file.seek(4)
    with pytest.raises(PlacementError) as caught:
        torchlift.save({**STATE, "step": value}, file, format=format)
    assert (file.getvalue(), file.tell(), caught.value.entry) == (b"headtail", 4, "step")


OLD = bytes(range(256)) * 16  # longer than the checkpoint
MODES = {"r+b": 7, "w+b": 7, "a+b": 7, "r+b at its end": len(OLD), "wb": 0, "ab": len(OLD)}


class Fails(io.FileIO):
    """Raises at its third write, whatever is written. After Ctrl-C another one comes."""

    error: BaseException
    left = 3

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.error
        if self.left == -1 and isinstance(self.error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return super().write(bytes(data)[:100])


def opened(path: Path, mode: str, buffering: int, kind: type[io.FileIO] = io.FileIO) -> Any:
    """Open a file with old content, as far as the mode leaves it, at the position of the mode."""
    path.write_bytes(OLD)
    raw = kind(path, mode.split()[0].replace("b", ""))
    readable, writer = raw.readable(), io.BufferedWriter
    file: Any = raw if not buffering else (io.BufferedRandom if readable else writer)(raw)
    if mode.startswith("w+"):
        os.write(file.fileno(), OLD)
    file.seek(MODES[mode])
    return file


@pairwise(
    buffering=[0, -1], mode=MODES, error=[OSError(5, "Input/output error"), ValueError("x"), None]
)
def test_after_a_failed_write_a_file_has_its_old_content_and_position(
    mode: str, buffering: int, error: BaseException | None, tmp_path: Path
) -> None:
    """Whatever the write raises, also a Ctrl-C and a second one while the content is restored.

    Nothing of the save waits in a buffer.
    """
    path = tmp_path / "x"
    with opened(path, mode, buffering, Fails) as file:
        raw = file.raw if buffering else file
        raw.error, raw.left = error or KeyboardInterrupt(), 3
        with pytest.raises(CheckpointError if error else KeyboardInterrupt):
            torchlift.save(STATE, file)
        assert file.tell() == MODES[mode]
    assert path.read_bytes() == (b"" if mode == "wb" else OLD)


@pytest.mark.parametrize("buffering", [0, -1])
@pytest.mark.parametrize("mode", MODES)
def test_after_a_save_a_file_goes_on_behind_it(mode: str, buffering: int, tmp_path: Path) -> None:
    """What the caller wrote before is in front of it, and what follows it is as it was."""
    path, saved = tmp_path / "x", io.BytesIO()
    torchlift.save(STATE, saved)
    with opened(path, mode, buffering) as file:
        before = b"before"[: MODES[mode]]
        file.write(before)
        torchlift.save(STATE, file)
        file.write(b"after")
    start = len(OLD) if mode.startswith("a") else MODES[mode]
    old = b"" if mode == "wb" else OLD
    written = before + saved.getvalue() + b"after"
    assert path.read_bytes() == old[:start] + written + old[start + len(written) :]


@pairwise(buffering=[0, -1], lacking=[1, 100, 9000, 60000], behind=[0, 500, 5000])
def test_on_a_full_disk_a_file_keeps_its_old_content(
    buffering: int, lacking: int, behind: int, tmp_path: Path
) -> None:
    """Whichever byte is the first without room, and however much old content is overwritten."""
    state, saved, path = {"w": torch.ones(16384)}, io.BytesIO(), tmp_path / "x"
    torchlift.save(state, saved)
    start, old = 70000, OLD * 17 + OLD[:368] + OLD[: behind % 4096] + OLD * (behind // 4096)
    path.write_bytes(old)
    with path.open("r+b", buffering=buffering) as file:
        file.seek(start)
        limit = start + len(saved.getvalue()) - lacking
        with file_size_limit(limit), pytest.raises(CheckpointError) as caught:
            torchlift.save(state, file)
        assert caught.value.file == str(path)
        assert file.tell() == start
    assert path.read_bytes() == old


def test_objects_in_memory_keep_their_old_content() -> None:
    """BytesIO, one that takes ten bytes at a time, and a map without room for all of it."""
    file = Full(b"headtail")
    file.seek(4)
    with pytest.raises(CheckpointError, match=r"a Full.*No space left"):
        torchlift.save(STATE, file)
    assert (file.getvalue(), file.tell()) == (b"headtail", 4)
    with mmap.mmap(-1, 100) as room:
        room.write(b"before")
        room.seek(3)
        with pytest.raises(CheckpointError, match="room for the file"):
            torchlift.save(STATE, room)
        assert (room.tell(), room[:10]) == (3, b"before\0\0\0\0")


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


def test_a_file_that_is_open_for_reading_says_so(tmp_path: Path) -> None:
    """Its content stays."""
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
    """Also a map that has the room."""
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

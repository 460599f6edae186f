"""`save` to a binary file object: from its position, all of it or nothing."""

from __future__ import annotations

import gzip
import io
import mmap
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from pairwise import pairwise

import torchlift
from torchlift import CheckpointError, PlacementError

STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


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


def test_what_takes_no_bytes_is_refused_by_name(tmp_path: Path) -> None:
    """Before anything is written: text, what is open for reading or closed; and sets of files."""
    path = tmp_path / "x"
    texts: list[Callable[[], Any]] = [
        io.StringIO,
        lambda: path.open("w"),
        lambda: gzip.open(path, "wt"),  # noqa: SIM115
        lambda: tempfile.SpooledTemporaryFile(mode="w+"),  # noqa: SIM115
    ]
    for make in texts:
        with make() as file, pytest.raises(TypeError, match="open it with mode 'wb'"):
            torchlift.save(STATE, file)
    with path.open("wb") as file:
        torchlift.save(STATE, file)
    with pytest.raises(CheckpointError, match=r"closed file"):
        torchlift.save(STATE, file)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="be written"):
        torchlift.save(STATE, file)
    assert torchlift.diff(path, STATE).equal
    for words in ({"format": "dcp"}, {"format": "sharded"}, {"max_shard_size": "1GB"}):
        with pytest.raises(ValueError, match="a file object is one file"):
            torchlift.save(STATE, io.BytesIO(), **words)  # type: ignore[arg-type]

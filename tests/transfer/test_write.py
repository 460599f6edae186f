"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from zlib import crc32

import pytest

from torchlift._transfer import write
from torchlift._transfer.write import AtomicFile, Runs, remove_debris, write_at


def test_it_appears_under_its_name_when_it_is_committed(tmp_path: Path) -> None:
    """With the mode of an ordinary file, in place of an older one; before, the older one stays."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    file = AtomicFile(str(path))
    descriptor = os.open(file.temporary, os.O_WRONLY)
    write_at(descriptor, b"world", 6)
    write_at(file.descriptor, memoryview(b"hello "), 0)
    os.close(descriptor)
    assert path.read_bytes() == b"old"
    file.commit()
    file.close()
    assert path.read_bytes() == b"hello world"
    assert os.listdir(tmp_path) == ["x"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_bytes_then_name_then_folder_are_made_durable(tmp_path, monkeypatch):
    """In this order: a crash must not find the name of a file whose bytes are not there."""
    steps = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("fsync folder" if is_folder else "fsync file")
        fsync(descriptor)

    def noting_replace(source: str, target: str) -> None:
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    file = AtomicFile(str(tmp_path / "x"))
    file.commit()
    file.close()
    assert steps == ["fsync file", "replace", "fsync folder"]


def test_only_what_dead_writers_of_the_same_path_left_is_removed(tmp_path: Path) -> None:
    """Not a live writer's file, nor what merely has a similar name."""
    live = AtomicFile(str(tmp_path / "x.pt"))
    ours = ".x.pt.torchlift-abcdefgh.part"
    others = [
        ".x.pt.part", ".x.pt.download.part", ".x.pt.torchlift-backup.part",
        ".x.pt.torchlift-abcdefgh", ".y.pt.torchlift-abcdefgh.part",
    ]  # fmt: skip
    for name in [*others, ours]:
        (tmp_path / name).touch()
    (tmp_path / ".x.pt.torchlift-aaaaaaaa.part").symlink_to("elsewhere")
    remove_debris(str(tmp_path / "z.pt"), str(tmp_path / "x.pt"))
    assert not (tmp_path / ours).exists()
    assert len(os.listdir(tmp_path)) == 1 + len(others) + 1
    live.commit()
    live.close()
    assert (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_passes_its_mode_on(tmp_path: Path, mode: int) -> None:
    """Whatever the mask would take away. Nobody whom it shuts out reads the new one before."""
    path = tmp_path / "x"
    path.touch()
    path.chmod(mode)
    file = AtomicFile(str(path))
    assert not stat.S_IMODE(os.fstat(file.descriptor).st_mode) & ~(mode | 0o600)
    os.close(os.open(file.temporary, os.O_WRONLY))
    file.commit()
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    """Also where nothing is there yet; a link that leads to itself is an error."""
    (tmp_path / "real").mkdir()
    link = tmp_path / "x"
    link.symlink_to(tmp_path / "real" / "y")
    for content in (b"new", b"newer"):
        file = AtomicFile(str(link))
        assert len(os.listdir(tmp_path)) == 2
        write_at(file.descriptor, content, 0)
        file.commit()
        file.close()
        assert link.is_symlink()
        assert link.read_bytes() == content
        assert os.listdir(tmp_path / "real") == ["y"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        AtomicFile(str(tmp_path / "loop"))


def test_a_pipe_and_a_folder_are_not_replaced(tmp_path: Path) -> None:
    """Nor a device, such as the one that swallows everything."""
    os.mkfifo(tmp_path / "x")
    with pytest.raises(FileExistsError, match="a device or a pipe"):
        AtomicFile(str(tmp_path / "x"))
    with pytest.raises(IsADirectoryError):
        AtomicFile(str(tmp_path))


def test_a_large_run_is_written_and_added_to_its_checksum(tmp_path: Path) -> None:
    """A thread adds a large run to the checksum while the run is written."""
    data = random.Random(0).randbytes((2 << 20) + 1)
    with open(tmp_path / "x", "w+b") as file:
        to = Runs(file.fileno())
        assert to.write(0, memoryview(data), 0) == crc32(data)
        assert to.write(len(data), memoryview(data), crc32(data)) == crc32(data * 2)
    assert (tmp_path / "x").read_bytes() == data * 2


def test_a_file_of_another_writer_is_never_overwritten(tmp_path, monkeypatch):
    """Even if it has the name that was drawn."""
    monkeypatch.setattr(write.secrets, "token_hex", lambda _: "taken000")
    live = AtomicFile(str(tmp_path / "x"))
    write_at(live.descriptor, b"theirs", 0)
    with pytest.raises(FileExistsError):
        AtomicFile(str(tmp_path / "x"))
    live.commit()
    live.close()
    assert (tmp_path / "x").read_bytes() == b"theirs"

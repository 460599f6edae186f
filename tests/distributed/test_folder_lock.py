"""The lock file of a run's folder: a second job is refused, and a dead one holds nothing."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from forked import PIPE, Forked

import torchlift
from torchlift.distributed import folder_lock
from torchlift.errors import CheckpointError

_HOLD = """
import sys, torchlift
try:
    keeper = torchlift.Keeper(sys.argv[1])
    print("holds", flush=True)
except torchlift.CheckpointError as error:
    print(f"refused: {error}", flush=True)
sys.stdin.readline()
"""


def holder(folder: Path) -> Forked:
    """A process that has made a keeper of the folder, or was refused, and waits for a line."""
    return Forked(_HOLD, folder, stdin=PIPE, stdout=PIPE)


def line_of(job: Forked) -> str:
    assert job.stdout is not None
    return str(job.stdout.readline())


def holder_of(folder: Path) -> str:
    """Return what the lock file says. Another process reads it: a close here ends our lock."""
    command = ["cat", folder / folder_lock.NAME]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def process_of(folder: Path) -> int:
    return int(holder_of(folder).split()[1])


def test_a_second_job_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    """By host and process; it may go on when the first one has closed its keeper."""
    with holder(tmp_path) as job:
        assert line_of(job) == "holds\n"
        with pytest.raises(CheckpointError, match="another Keeper saves") as caught:
            torchlift.Keeper(tmp_path)
        assert caught.value.file == str(tmp_path)
        assert process_of(tmp_path) != os.getpid()
        named = f"process {process_of(tmp_path)} on host {socket.gethostname()}"
        assert caught.value.found == holder_of(tmp_path) == named
    with torchlift.Keeper(tmp_path) as keeper:  # the other has ended, and left nothing
        assert keeper.save(1, w=torch.ones(2))
        with holder(tmp_path) as job:
            assert f"process {os.getpid()} on host" in line_of(job)
        assert keeper.save(2, w=torch.ones(2))
    assert os.listdir(tmp_path) == ["step-000000001.pt", "step-000000002.pt"]


_FORKS = """
import os, signal, sys, torchlift
keeper = torchlift.Keeper(sys.argv[1])
worker = os.fork()
if worker:
    print(worker, flush=True)
signal.pause()
"""


def test_a_job_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    """Nor do its children, such as workers of a DataLoader, which end some seconds later."""
    with Forked(_FORKS, tmp_path, stdout=PIPE) as job:
        worker = int(line_of(job))
        os.kill(process_of(tmp_path), signal.SIGKILL)
        try:
            wait_for_keeper(tmp_path)
            os.kill(worker, 0)  # it still runs
        finally:
            os.kill(worker, signal.SIGKILL)
    assert os.listdir(tmp_path) == ["step-000000001.pt"]


def wait_for_keeper(folder: Path) -> None:
    """Save as soon as the kernel has ended the killed process."""
    while True:
        try:
            with torchlift.Keeper(folder) as keeper:
                assert keeper.save(1, w=torch.ones(2))
                assert process_of(folder) == os.getpid()
            return
        except CheckpointError:
            os.sched_yield()


def test_a_file_without_a_lock_keeps_nobody_out(tmp_path: Path) -> None:
    """That of a job whose machine went down, or of a disk that failed when it was removed."""
    path = tmp_path / folder_lock.NAME
    for text in ("process 4711 on host node7", ""):
        path.write_text(text, encoding="utf-8")
        with torchlift.Keeper(tmp_path):
            assert process_of(tmp_path) == os.getpid()
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "dangling link", "other name", "text", "folder", "fifo"])
def test_a_file_that_no_keeper_wrote_is_not_changed(tmp_path: Path, kind: str) -> None:
    """Whoever can write into the folder could have any file of this user overwritten."""
    folder, other = tmp_path / "run", tmp_path / "any.txt"
    path = folder / folder_lock.NAME
    folder.mkdir()
    if kind != "dangling link":
        other.write_text("dear diary", encoding="utf-8")
    if "link" in kind:
        path.symlink_to(other)
    elif kind == "other name":
        os.link(other, path)
    elif kind == "text":
        path.write_text("dear diary", encoding="utf-8")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"lock file .* is not that of a Keeper") as caught:
        torchlift.Keeper(folder)
    assert caught.value.file == str(path)
    assert caught.value.hint == "Remove it."
    assert os.listdir(folder) == [folder_lock.NAME]
    assert other.exists() == (kind != "dangling link")
    for each in (other, path):
        assert not each.is_file() or each.read_text(encoding="utf-8") == "dear diary"
    (os.rmdir if kind == "folder" else os.unlink)(path)
    with torchlift.Keeper(folder) as keeper:
        assert keeper.save(1, w=torch.ones(2))


def test_the_way_out_of_a_lock_that_a_file_system_still_holds_works(tmp_path: Path) -> None:
    """An NFS server may hold the lock of a machine that is down: the file is removed."""
    with holder(tmp_path) as job:
        assert line_of(job) == "holds\n"
        with pytest.raises(CheckpointError) as caught:
            torchlift.Keeper(tmp_path)
        path = tmp_path / folder_lock.NAME
        assert (caught.value.hint or "").endswith(f"remove {path}.")
        os.unlink(path)
        with torchlift.Keeper(tmp_path) as keeper:
            assert keeper.steps() == []
            assert job.stdin is not None
            job.stdin.write("\n")  # the other machine was not down: its close leaves our file
            job.stdin.flush()
            job.wait()
            assert process_of(tmp_path) == os.getpid()
    assert os.listdir(tmp_path) == []


def test_two_keepers_of_one_process_are_refused_by_any_path(tmp_path: Path) -> None:
    """By a link, too. The first one keeps its lock then; one that is gone holds nothing."""
    first, second = tmp_path / "run", tmp_path / "newest"
    first.mkdir()
    second.symlink_to("run")
    abandoned = torchlift.Keeper(first)
    del abandoned
    gc.collect()
    with torchlift.Keeper(first):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* Close it"):
            torchlift.Keeper(second)
        with torchlift.Keeper(tmp_path / "other"), holder(second) as job:
            assert line_of(job).startswith("refused")
    with torchlift.Keeper(second), pytest.raises(CheckpointError, match="Close it"):
        torchlift.Keeper(first)


def test_a_forked_child_neither_holds_nor_releases(tmp_path: Path) -> None:
    """It has a copy of the keeper, whose end must not let a second job in."""
    keeper = torchlift.Keeper(tmp_path)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            keeper._free()  # as at the end of a child that forgets its parent's objects
            torchlift.Keeper(tmp_path)
        except CheckpointError as error:
            status = 0 if f"process {os.getppid()} " in str(error) else 2
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert process_of(tmp_path) == os.getpid()
    keeper.close()
    assert os.listdir(tmp_path) == []


def test_of_jobs_that_start_at_one_time_one_takes_the_lock(tmp_path: Path) -> None:
    """Two that both removed a file would both go on."""
    (tmp_path / folder_lock.NAME).write_text("process 4711 on host node7", encoding="utf-8")
    jobs = [holder(tmp_path) for _ in range(4)]
    found = sorted(line_of(job).partition(":")[0].strip() for job in jobs)
    assert found == ["holds", "refused", "refused", "refused"]
    for job in jobs:
        with job:
            pass


def test_a_folder_that_cannot_be_written_needs_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To resume from there is all that a job can do."""
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, w=torch.ones(2))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.resume(w=torch.ones(2)) == 1
        assert os.listdir(tmp_path) == ["step-000000001.pt"]


def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other processes: this one still knows its own keepers. Another error is raised."""

    def refuse(*_: object) -> None:
        raise OSError(number, "no luck")

    monkeypatch.setattr(folder_lock, "lockf", refuse)
    number = errno.ENOLCK
    with torchlift.Keeper(tmp_path) as keeper:
        with pytest.raises(CheckpointError, match="another Keeper saves"):
            torchlift.Keeper(tmp_path)
        assert keeper.save(1, w=torch.ones(2))
    number = errno.EIO
    with pytest.raises(CheckpointError, match=r"cannot be used.*no luck"):
        torchlift.Keeper(tmp_path)

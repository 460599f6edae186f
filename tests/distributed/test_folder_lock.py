"""The lock file of a run's folder: a second job is refused, and a dead one holds nothing."""

from __future__ import annotations

import gc
import os
import signal
import socket
from pathlib import Path
from typing import Any

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
    return (folder / folder_lock.NAME).read_text(encoding="utf-8")


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
    for text in ("process 4711 on host node7", "", "something else"):
        path.write_text(text, encoding="utf-8")
        with torchlift.Keeper(tmp_path):
            assert process_of(tmp_path) == os.getpid()
        assert os.listdir(tmp_path) == []


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


def test_one_process_may_make_keepers_one_after_the_other(tmp_path: Path) -> None:
    """A second one at once is refused, and waits for nobody; one that is gone holds nothing."""
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.resume(w=torch.ones(2)) is None
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* Close it first"):
            torchlift.Keeper(tmp_path)
        assert keeper.save(1, w=torch.ones(2))  # and the first one goes on
    again = torchlift.Keeper(tmp_path)
    del again
    gc.collect()
    with torchlift.Keeper(tmp_path) as keeper, torchlift.Keeper(tmp_path / "other"):
        assert keeper.steps() == [1]


def test_a_keeper_that_only_looks_gives_way_to_another_one_of_its_process(tmp_path: Path) -> None:
    """As in a notebook whose cell is run twice; then it saves nothing, but still looks."""
    looks = torchlift.Keeper(tmp_path)
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.save(1, w=torch.ones(2))
        keeper.wait()
        assert looks.steps() == [1]
        for use in (lambda: looks.save(2, w=torch.ones(2)), lambda: looks.resume(w=torch.ones(2))):
            with pytest.raises(CheckpointError, match="another Keeper saves"):
                use()
        with holder(tmp_path) as job:
            assert line_of(job).startswith("refused")
    assert looks.save(2, w=torch.ones(2))  # the other one is closed
    with pytest.raises(CheckpointError, match="another Keeper saves"):
        torchlift.Keeper(tmp_path)
    looks.close()
    assert os.listdir(tmp_path) == ["step-000000001.pt", "step-000000002.pt"]


def test_a_keeper_that_only_looks_gives_way_by_a_link_to_its_folder(tmp_path: Path) -> None:
    """Such as a link to the newest run; a keeper that saves does not give way."""
    (tmp_path / "run").mkdir()
    (tmp_path / "newest").symlink_to("run")
    paths = [tmp_path / "run", tmp_path / "newest"]
    for first, second in (paths, paths[::-1]):
        looks = torchlift.Keeper(first)
        with torchlift.Keeper(second) as keeper:
            keeper.save(len(keeper.steps()) + 1, w=torch.ones(2))
            with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* Close it"):
                torchlift.Keeper(first)
        looks.close()
    assert sorted(os.listdir(paths[0])) == ["step-000000001.pt", "step-000000002.pt"]


def test_a_lock_that_could_not_be_removed_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for a moment when a keeper is closed."""
    unlink = os.unlink

    def failing(path: Any, **options: Any) -> None:
        if str(path).endswith(folder_lock.NAME):
            raise OSError(5, "no luck")
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        torchlift.Keeper(tmp_path).close()
    assert os.listdir(tmp_path) == [folder_lock.NAME]
    torchlift.Keeper(tmp_path).close()
    assert os.listdir(tmp_path) == []


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
    open_file = os.open

    def refusing(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if str(path).endswith(folder_lock.NAME) and flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", path)
        return open_file(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refusing)
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.resume(w=torch.ones(2)) == 1
    assert os.listdir(tmp_path) == ["step-000000001.pt"]

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


def lines(folder: Path) -> list[str]:
    return (folder / folder_lock.NAME).read_text(encoding="utf-8").split("\n")


def rewritten(folder: Path, **changes: str) -> None:
    """Leave the lock of another process in the folder: that of this one, with other lines."""
    with torchlift.Keeper(folder):
        found = folder_lock.Holder(*lines(folder))
    text = "\n".join(found._replace(**changes))
    (folder / folder_lock.NAME).write_text(text, encoding="utf-8")


def test_a_second_job_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    """By host and process; it may go on when the first one has closed its keeper."""
    with holder(tmp_path) as job:
        assert line_of(job) == "holds\n"
        with pytest.raises(CheckpointError, match="another Keeper saves") as caught:
            torchlift.Keeper(tmp_path)
        assert caught.value.file == str(tmp_path)
        assert caught.value.found == f"process {lines(tmp_path)[1]} on host {socket.gethostname()}"
        assert int(lines(tmp_path)[1]) != os.getpid()
    with torchlift.Keeper(tmp_path) as keeper:  # the other has ended, and left nothing
        assert keeper.save(1, w=torch.ones(2))
        with holder(tmp_path) as job:
            assert f"process {os.getpid()} on host" in line_of(job)
        assert keeper.save(2, w=torch.ones(2))
    assert os.listdir(tmp_path) == ["step-000000001.pt", "step-000000002.pt"]


def test_a_job_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    """Nor as a zombie: a parent may take its time to ask for the status."""
    with holder(tmp_path) as job:
        assert line_of(job) == "holds\n"
        os.kill(int(lines(tmp_path)[1]), signal.SIGKILL)
        wait_until_ended(int(lines(tmp_path)[1]))
        with torchlift.Keeper(tmp_path) as keeper:
            assert keeper.save(1, w=torch.ones(2))
            assert lines(tmp_path)[1] == str(os.getpid())
    assert os.listdir(tmp_path) == ["step-000000001.pt"]


def wait_until_ended(process: int) -> None:
    while folder_lock._start_of(str(process)) is not None:
        os.sched_yield()


@pytest.mark.parametrize(
    "changes",
    [
        {"boot": "11111111-2222-3333-4444-555555555555"},
        {"process": "999999999"},
        {"started": "1"},  # another process had this number before
        {"process": "999999999", "host": "elsewhere", "run": "of-torchrun"},
    ],
)
def test_a_lock_of_a_process_that_has_ended_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """Of another boot of this host, or of this run of torchrun on another host."""
    rewritten(tmp_path, **changes)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of-torchrun")
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.save(1, w=torch.ones(2))
    assert os.listdir(tmp_path) == ["step-000000001.pt"]


@pytest.mark.parametrize("run", ["", "none", "another"])
def test_a_lock_of_another_host_is_refused_and_its_way_out_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Nobody can look from here whether that process runs."""
    rewritten(tmp_path, host="node7", process="4711", run=run)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(CheckpointError, match="process 4711 on host node7") as caught:
        torchlift.Keeper(tmp_path)
    hint = caught.value.hint or ""
    assert hint.endswith(f"If that job has ended, remove {tmp_path / folder_lock.NAME}.")
    os.unlink(tmp_path / folder_lock.NAME)
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.steps() == []


def test_a_lock_file_that_says_nothing_known_is_refused(tmp_path: Path) -> None:
    """It may be that of a later version. An empty one is what a kill leaves."""
    path = tmp_path / folder_lock.NAME
    path.write_text("something else\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"found something else.*remove {path}"):
        torchlift.Keeper(tmp_path)
    path.write_text("", encoding="utf-8")
    torchlift.Keeper(tmp_path).close()
    assert os.listdir(tmp_path) == []


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
    assert lines(tmp_path)[1] == str(os.getpid())
    keeper.close()
    assert os.listdir(tmp_path) == []


def test_of_jobs_that_find_a_dead_lock_at_one_time_one_takes_it(tmp_path: Path) -> None:
    """Two that both removed it would both go on."""
    rewritten(tmp_path, process="999999999")
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

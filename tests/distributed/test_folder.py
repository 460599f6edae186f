"""The folder of a run: what is kept, what is removed, and what another process sees of it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import PIPE, Forked, run

import torchlift
from torchlift.distributed import (
    BestN,
    EveryNSteps,
    Kept,
    LatestN,
    RunFolder,
)
from torchlift.distributed import folder as folder_module
from torchlift.distributed import keeper as keeper_module
from torchlift.errors import CheckpointError

STATE = {"w": torch.ones(2)}


def path_of(folder: Path, step: int, generation: int = 0) -> Path:
    return folder / (f"step-{step:09d}" + (f"-{generation}" if generation else "") + ".pt")


def fill(folder: Path, losses: Sequence[float], **options: Any) -> list[int]:
    """Save a checkpoint for each loss, from step 1 on; return the steps that are kept."""
    with torchlift.Keeper(folder, background=False, **options) as keeper:
        for step, loss in enumerate(losses, 1):
            keeper.save(step, STATE, metrics={"loss": loss, "accuracy": -loss})
        return keeper.steps()


# ---- what is kept


LOSSES = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"keep": LatestN(2)}, [6, 7]),
        ({"keep": LatestN(None)}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": [LatestN(1), BestN(3, "loss")]}, [2, 4, 5, 7]),
        ({"keep": [BestN(1, "loss"), BestN(1, "loss", "highest")]}, [2, 6, 7]),
        ({"keep": [BestN(2, "accuracy", best_is="highest")], "every": 5}, [2, 4, 5, 7]),
        ({"keep": [LatestN(1), EveryNSteps(3)], "best": "loss"}, [2, 3, 6, 7]),
        ({"keep": lambda kept: [one for one in kept if one.step in (1, 4)]}, [1, 4, 7]),
        ({"keep": lambda kept: [one for one in kept if one.metrics["loss"] > 4]}, [1, 6, 7]),
        ({"keep": []}, [7]),
    ],
)
def test_what_any_policy_keeps_stays(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    """Beside the newest, which always does."""
    assert fill(tmp_path, LOSSES, **options) == steps
    assert sorted(os.listdir(tmp_path)) == [path_of(tmp_path, step).name for step in steps]


def test_the_best_by_a_policy_is_the_best_of_the_keeper(tmp_path: Path) -> None:
    """Whose metric each save has to give."""
    policies = [LatestN(1), BestN(2, "accuracy", best_is="highest")]
    assert fill(tmp_path, LOSSES, keep=policies) == [2, 4, 7]
    with torchlift.Keeper(tmp_path, keep=policies) as keeper:
        assert keeper.best() == str(path_of(tmp_path, 2))
        with pytest.raises(ValueError, match="metrics= lacks 'accuracy'"):
            keeper.save(8, STATE, metrics={"loss": 1.0})


def test_a_function_that_fails_removes_nothing_and_is_told_of(tmp_path: Path) -> None:
    """The checkpoint is complete: the save is none that failed."""

    def keep(kept: Sequence[Kept]) -> list[Kept]:
        return [one for one in kept if one.metrics["no such"] > 1]  # type: ignore[index]

    with torchlift.Keeper(tmp_path, keep=keep, background=False) as keeper:
        for step in (1, 2):
            with pytest.warns(RuntimeWarning, match=r"keep= failed, so nothing.*KeyError: 'no"):
                assert keeper.save(step, STATE)
        assert keeper.steps() == [1, 2]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: LatestN(0), "n=0: expected a number from 1 on"),
        (lambda: EveryNSteps(1.5), "n=1.5: expected"),  # type: ignore[arg-type]
        (lambda: BestN(True, "loss"), "n=True: expected"),
        (lambda: BestN(1, "loss", "max"), "best_is='max': expected one of"),  # type: ignore[arg-type]
        (lambda: RunFolder("x", best="loss", best_is="max"), "best_is='max'"),  # type: ignore[arg-type]
    ],
)
def test_policies_are_checked_when_they_are_made(policy: Any, message: str) -> None:
    """Long before the first one counts."""
    with pytest.raises(ValueError, match=message):
        policy()


def test_an_abandoned_best_takes_no_place_of_the_branch_later_on_either(tmp_path: Path) -> None:
    """It stays for its metric, and no save after that counts it."""
    fill(tmp_path, [5.0, 4.0, 3.0, 2.0, 1.0], keep=None)
    with torchlift.Keeper(tmp_path, keep=3, best="loss", background=False) as keeper:
        keeper.resume(step=2)
        for step, kept in ((10, [1, 2, 5, 10]), (12, [2, 5, 10, 12]), (14, [5, 10, 12, 14])):
            keeper.save(step, STATE, metrics={"loss": 9.0})
            assert sorted(keeper.steps()) == kept


def test_a_restart_knows_by_the_names_what_was_abandoned(tmp_path: Path) -> None:
    """Whatever lies behind where the run went back takes no place of its branch."""
    fill(tmp_path, [5.0, 4.0, 3.0, 2.0, 1.0], keep=None)
    for step, kept in ((3, [1, 2, 3, 5]), (4, [2, 3, 4, 5]), (6, [3, 4, 5, 6])):
        with torchlift.Keeper(tmp_path, keep=3, best="loss", background=False) as keeper:
            keeper.resume(step=2 if step == 3 else None)
            keeper.save(step, STATE, metrics={"loss": 9.0})
            assert sorted(keeper.steps()) == kept


# ---- what is removed


def as_folder(folder: Path, step: int) -> Path:
    """Make a checkpoint of several files, as machines do that share no file."""
    path = folder / f"step-{step:09d}"
    torchlift.save({"step": step, "ranks": {}, "w": torch.ones(4)}, path, format="dcp")
    return path


def test_a_checkpoint_that_is_being_removed_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder loses its name first, and the next save waits until it is gone."""
    for step in (1, 2):
        as_folder(tmp_path, step)
    seen, remove = list[list[int]](), shutil.rmtree

    def note(path: str) -> None:
        assert ".removed-" in path
        seen.append(keeper.steps())
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", note)
    with torchlift.Keeper(tmp_path, keep=1) as keeper:
        for step in (3, 4, 5):
            assert keeper.save(step, STATE)
    assert seen == [[3], [3]]
    assert os.listdir(tmp_path) == ["step-000000005.pt"]


_KILLED = """
import os, shutil, signal, sys, torch, torchlift
def half(path):
    os.unlink(os.path.join(path, sorted(os.listdir(path))[-1]))
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree = half
torchlift.Keeper(sys.argv[1], keep=1, background=False).save(2, w=torch.ones(2))
"""


def test_what_a_kill_leaves_of_a_removal_the_next_keeper_removes(tmp_path: Path) -> None:
    """Until then nobody takes it for a checkpoint."""
    as_folder(tmp_path, 1)
    assert run(_KILLED, tmp_path).returncode == -signal.SIGKILL
    assert any(".removed-" in name for name in os.listdir(tmp_path))
    with torchlift.Keeper(tmp_path, keep=1) as keeper:
        assert keeper.steps() == [2]
        keeper.save(3, STATE)
    assert os.listdir(tmp_path) == ["step-000000003.pt"]


def test_what_is_left_at_the_end_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No save comes after that would."""
    as_folder(tmp_path, 1)

    def refusing(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    keeper = torchlift.Keeper(tmp_path, keep=1)
    keeper.save(2, STATE)
    with pytest.warns(RuntimeWarning, match=r"cannot be removed.*\.step-000000001\.removed-"):
        keeper.close()
    assert keeper.steps() == [2]


def test_ten_thousand_steps_in_a_folder(tmp_path: Path) -> None:
    """The last is found, the next is saved, and all but those that are kept go."""
    for step in range(1, 10_001):
        path_of(tmp_path, step).touch()
    with torchlift.Keeper(tmp_path, keep=2, every=1000) as keeper:
        assert keeper.steps() == [*range(1, 10_001)]
        assert keeper.latest() == str(path_of(tmp_path, 10_000))
        keeper.save(10_001, STATE)
    assert keeper.steps() == [*range(1000, 10_001, 1000), 10_001]
    assert len(os.listdir(tmp_path)) == 11


def fail_at_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a disk fail each time that somebody looks for a marker that is there."""
    look = os.lstat

    def failing(path: Any, **options: Any) -> os.stat_result:
        found = look(path, **options)
        if str(path).endswith(".metadata"):
            raise OSError(errno.EIO, "no luck", path)
        return found

    monkeypatch.setattr(os, "lstat", failing)


def test_a_disk_that_fails_for_a_moment_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody can tell to be complete is not taken for what a kill has left."""
    kept = [as_folder(tmp_path, step) for step in (1, 2)]
    with torchlift.Keeper(tmp_path, keep=5) as keeper:
        keeper.save(3, STATE)
        keeper.wait()
        with monkeypatch.context() as patch:
            fail_at_markers(patch)
            with pytest.raises(CheckpointError, match=r"cannot be used.*no luck.*metadata"):
                keeper.save(4, STATE)
            with pytest.raises(CheckpointError, match="cannot be used"):
                keeper.steps()
        keeper.save(4, STATE)
    assert keeper.steps() == [1, 2, 3, 4]
    assert all(torchlift.open(path)["w"].tolist() == [1.0] * 4 for path in kept)


def test_a_disk_that_fails_after_a_commit_leaves_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of files keeps them where nobody can tell which of them are needed."""
    with monkeypatch.context() as patch:
        fail_at_markers(patch)
        path = as_folder(tmp_path, 1)
    assert torchlift.open(path)["w"].tolist() == [1.0] * 4


def test_a_folder_that_cannot_be_listed_after_a_save_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is complete, and what is older goes at the next save."""

    def fail(path: object) -> list[str]:
        raise OSError(errno.EIO, "no luck")

    def keep(kept: Sequence[Kept]) -> Sequence[Kept]:
        if kept[-1].step == 2:
            monkeypatch.setattr(os, "listdir", fail)
        return []

    fill(tmp_path, [1.0])
    with torchlift.Keeper(tmp_path, keep=keep, background=False) as keeper:
        with pytest.warns(RuntimeWarning, match="not removed, and the next save.*no luck"):
            keeper.save(2, STATE)
        monkeypatch.undo()
        assert keeper.steps() == [1, 2]
        keeper.save(3, STATE)
    assert os.listdir(tmp_path) == [path_of(tmp_path, 3).name]


# ---- a run that has not resumed


def test_a_run_that_has_not_resumed_leaves_later_steps_alone(tmp_path: Path) -> None:
    """They are of another run, which somebody forgot: no policy counts them, and one warning."""
    fill(tmp_path, LOSSES, keep=None)
    with torchlift.Keeper(tmp_path, keep=2, background=False) as keeper:
        with pytest.warns(RuntimeWarning, match=r"has not resumed.*step-000000004\.pt.*resume\(\)"):
            keeper.save(3, w=torch.zeros(2))
        assert keeper.latest() == str(path_of(tmp_path, 3, 1))
        keeper.save(4, w=torch.zeros(2))
        keeper.save(5, w=torch.zeros(2))
        assert keeper.steps() == [6, 7, 4, 5]
        names = [path_of(tmp_path, step).name for step in (4, 5, 6, 7)]
        assert {*names} < {*os.listdir(tmp_path)}
    with torchlift.Keeper(tmp_path, keep=2, background=False) as keeper:
        assert keeper.resume(step=5) == 5  # now they are its own
        keeper.save(6, STATE)
    assert keeper.steps() == [5, 6]
    assert len(os.listdir(tmp_path)) == 2


def test_a_failed_save_does_not_say_which_steps_are_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save with a wrong step fails, for example because the ranks disagree about it."""

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("refused")

    fill(tmp_path, LOSSES, keep=None)
    with torchlift.Keeper(tmp_path, keep=1, background=False) as keeper:
        for wrong in (9, 2):
            with monkeypatch.context() as patch:
                patch.setattr(keeper_module, "save", refuse)
                with pytest.raises(CheckpointError, match="refused"):
                    keeper.save(wrong, STATE)
        with pytest.warns(RuntimeWarning, match="has not resumed"):
            keeper.save(7, STATE)
        assert keeper.latest() == str(path_of(tmp_path, 7))
        assert keeper.steps()[-4:] == [4, 5, 6, 7]


# ---- what another process sees


_EVALUATION = """
import os, sys, torch, torchlift
def refuse(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if writes and str(args[0]).startswith(sys.argv[1]):
        raise AssertionError((event, args))
    if event in ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.utime"):
        raise AssertionError((event, args))
run = torchlift.distributed.RunFolder(sys.argv[1], best="loss")
sys.addaudithook(refuse)
seen, path = [], None
while len(seen) < 3:
    path = run.wait_for_new(path, timeout=300)
    with torchlift.open(path) as ckpt:
        seen.append(ckpt.objects["step"])
        assert float(ckpt["w"][0]) == seen[-1]
    print(seen[-1], flush=True)
assert not torch.distributed.is_initialized()
print(run.steps(), os.path.basename(run.best()), os.path.basename(run.latest()))
"""


def test_an_evaluation_sees_each_checkpoint_and_changes_nothing(tmp_path: Path) -> None:
    """It starts before the folder is there, and needs no process group."""
    with Forked(_EVALUATION, tmp_path / "run", stdout=PIPE) as job:
        assert job.stdout is not None
        with torchlift.Keeper(tmp_path / "run", keep=2, background=False) as keeper:
            for step, loss in ((3, 1.0), (7, 2.0), (5, 3.0)):  # the run goes back
                keeper.save(step, w=torch.full((2,), float(step)), metrics={"loss": loss})
                assert job.stdout.readline() == f"{step}\n"
        assert job.stdout.readline() == "[3, 5] step-000000003.pt step-000000005-1.pt\n"
    assert job.returncode == 0


def test_a_wait_ends_and_says_what_there_is(tmp_path: Path) -> None:
    """Of a folder that is not there yet, and of one in which nothing is new."""
    run = RunFolder(tmp_path / "run")
    with pytest.raises(TimeoutError, match="run: has no new checkpoint after 0 s"):
        run.wait_for_new(timeout=0)
    with pytest.raises(CheckpointError, match="run: the folder of the checkpoints cannot be used"):
        run.steps()
    fill(tmp_path / "run", [1.0])
    path = run.wait_for_new(timeout=0)
    with pytest.raises(CheckpointError, match=r"expected one after step-000000001\.pt") as caught:
        run.wait_for_new(path, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(ValueError, match="expected a path that latest"):
        run.wait_for_new("newest", timeout=0)
    assert run.best() is None


def test_what_is_half_written_or_half_removed_is_no_checkpoint(tmp_path: Path) -> None:
    """A file without its name, a folder without its marker, a name that was taken away."""
    whole = as_folder(tmp_path, 1)
    (as_folder(tmp_path, 2) / ".metadata").unlink()
    (tmp_path / ".step-000000003.pt.torchlift-abcdefgh.part").touch()
    whole.with_name("removed").mkdir()
    as_folder(tmp_path, 4).rename(tmp_path / ".step-000000004.removed-01234567")
    run = RunFolder(tmp_path, best="loss")
    assert run.steps() == [1]
    assert run.latest() == str(whole)
    assert run.best() is None


def test_the_best_is_told_while_checkpoints_go_and_not_where_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the keeper removes meanwhile is none any more; what is damaged may be the best."""
    fill(tmp_path, [1.0, 2.0, 3.0], keep=None)
    open_one = folder_module.open_checkpoint

    def removed(path: str) -> Any:
        if path.endswith("1.pt"):
            os.unlink(path)
        return open_one(path)

    run = RunFolder(tmp_path, best="loss")
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "open_checkpoint", removed)
        assert run.best() == str(path_of(tmp_path, 2))
    os.truncate(path_of(tmp_path, 2), 100)
    with pytest.warns(RuntimeWarning, match=r"metrics cannot be read.*step-000000002\.pt"):
        assert run.best() == str(path_of(tmp_path, 3))

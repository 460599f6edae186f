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
from torchlift.distributed import Kept, RunFolder
from torchlift.distributed import folder as folder_module
from torchlift.distributed.run_state import Snapshot, pickled
from torchlift.errors import CheckpointError
from torchlift.formats.index import Leaf
from torchlift.formats.runs import MAGIC

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


def loss_of(one: Kept) -> float:
    return one.metrics["loss"]


LOSSES = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"keep": 2}, [6, 7]),
        ({"keep": None}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": 1, "every": 3, "best": "loss"}, [2, 3, 6, 7]),
        ({"keep": 1, "best": "accuracy", "best_is": "highest"}, [2, 7]),
        ({"keep": lambda kept: [one for one in kept if one.step in (1, 4)]}, [1, 4, 7]),
        ({"keep": lambda kept: [one for one in kept if loss_of(one) > 4]}, [1, 6, 7]),
        ({"keep": lambda kept: sorted(kept, key=loss_of)[:3]}, [2, 4, 5, 7]),
        ({"keep": lambda kept: [], "every": 5}, [5, 7]),
    ],
)  # fmt: skip
def test_what_any_rule_keeps_stays(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    """Beside the newest, which always does."""
    assert fill(tmp_path, LOSSES, **options) == steps
    assert sorted(os.listdir(tmp_path)) == [path_of(tmp_path, step).name for step in steps]


def test_a_function_that_fails_removes_nothing_and_is_told_of(tmp_path: Path) -> None:
    """The checkpoint is complete: the save is none that failed."""

    def keep(kept: Sequence[Kept]) -> list[Kept]:
        return [one for one in kept if one.metrics["no such"] > 1]

    with torchlift.Keeper(tmp_path, keep=keep, background=False) as keeper:
        for step in (1, 2):
            with pytest.warns(RuntimeWarning, match=r"keep= failed, so nothing.*KeyError: 'no"):
                assert keeper.save(step, STATE)
        assert keeper.steps() == [1, 2]


def test_a_checkpoint_without_metrics_is_saved_and_never_the_best(tmp_path: Path) -> None:
    """Such as one before the first evaluation, or one whose loss is not a number."""
    with torchlift.Keeper(tmp_path, keep=1, best="loss", background=False) as keeper:
        for step, loss in enumerate((float("nan"), 1.0, None, None), 1):
            keeper.save(step, STATE, metrics=None if loss is None else {"loss": loss})
        assert keeper.steps() == [2, 4]
        assert keeper.best() == str(path_of(tmp_path, 2))


def test_a_step_that_is_saved_again_replaces_the_older_one(tmp_path: Path) -> None:
    """A file in place. After a step back, the name has the turn, so that it is the latest."""
    with torchlift.Keeper(tmp_path, keep=None, background=False) as keeper:
        for step, name, names in (
            (1, "1", ["1"]),
            (2, "2", ["1", "2"]),
            (2, "2", ["1", "2"]),
            (1, "1-1", ["1-1", "2"]),
            (2, "2-1", ["1-1", "2-1"]),
        ):
            keeper.save(step, STATE)
            paths = [str(tmp_path / f"step-00000000{each}.pt") for each in (name, *names)]
            assert keeper.latest() == paths[0]
            assert sorted(map(str, tmp_path.glob("step-*"))) == paths[1:]


# ---- what is removed


def kept_folder(folder: Path, step: int) -> Path:
    """Make a checkpoint of several files as a Keeper does."""
    path = folder / f"step-{step:09d}"
    saved = {"step": step, "metrics": {}, "w": Leaf("w")}
    item = {"ranks": 2, "own": {}, "generators": None, "saved": saved}
    data = torch.frombuffer(bytearray(MAGIC + pickled(item)), dtype=torch.uint8)
    torchlift.save({"w": torch.ones(4), "ranks.0": data, "ranks.1": data}, path, format="dcp")
    return path


_KILLED = """
import os, signal, sys, torch, torchlift
keeper = torchlift.Keeper(sys.argv[1], keep=1, background=False)
keeper.resume()
unlink = os.unlink
def last(path, **options):
    unlink(path, **options)
    if str(path).endswith(".metadata"):
        os.kill(os.getpid(), signal.SIGKILL)
os.unlink = last
keeper.save(2, w=torch.ones(2))
"""


def test_what_a_kill_leaves_of_a_removal_the_next_keeper_removes(tmp_path: Path) -> None:
    """A folder loses its marker first. From then on nobody takes it for a checkpoint."""
    left = kept_folder(tmp_path, 1)
    assert run(_KILLED, tmp_path).returncode == -signal.SIGKILL
    assert os.listdir(left) == ["__0_0.distcp"]
    with torchlift.Keeper(tmp_path, keep=1) as keeper:
        assert keeper.steps() == [2]
        keeper.resume()
        keeper.save(3, STATE)
    assert os.listdir(tmp_path) == ["step-000000003.pt"]


# ---- what other programs wrote


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["transformers", "dcp", "file", "folder.pt", "links", "beside"])
def test_what_a_keeper_did_not_write_stays(tmp_path: Path, kind: str) -> None:
    """An export under the name of a checkpoint, complete for us or not, and a file inside one.

    Or a link: somebody moved a checkpoint to another disk.
    """
    export = tmp_path / "step-000000002"
    with torchlift.Keeper(tmp_path, keep=1, background=False) as keeper:
        keeper.save(1, STATE)
        if kind == "transformers":
            torchlift.save(STATE, export / "model.safetensors")
            (export / "config.json").write_text("{}", encoding="utf-8")
        elif kind == "dcp":
            torchlift.save({"step": 2, **STATE}, export, format="dcp")
        elif kind == "file":
            export.touch()
        elif kind == "links":
            fill(tmp_path / "away", [1.0])
            export.symlink_to(kept_folder(tmp_path / "away", 2))
            path_of(tmp_path, 2).symlink_to(path_of(tmp_path / "away", 1))
        else:
            export = export.with_suffix(".pt") if kind == "folder.pt" else kept_folder(tmp_path, 2)
            export.mkdir(exist_ok=True)
            (export / "notes.txt").write_text("mine", encoding="utf-8")
        before = content(export.parent)
        for step in (2, 3, 4):
            keeper.save(step, STATE)
        (newest,) = content(tmp_path).keys() - before.keys()
        assert newest == os.path.basename(keeper.latest() or "")
    gone = {"step-000000001.pt", ".keeper.lock"}
    if kind == "beside":
        gone |= {f"step-000000002/{name}" for name in (".metadata", "__0_0.distcp")}
    left = content(tmp_path)
    assert {name: left.get(name) for name in before.keys() - gone} == {
        name: before[name] for name in before.keys() - gone
    }
    assert not gone & left.keys()


def test_a_file_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    """Of the step that is saved next: the checkpoint gets another name."""
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(4, STATE)
        torchlift.save({"step": 5, **STATE}, path_of(tmp_path, 5))
        before = path_of(tmp_path, 5).read_bytes()
        keeper.save(5, STATE)
        assert keeper.latest() == str(path_of(tmp_path, 5, 1))
        assert path_of(tmp_path, 5).read_bytes() == before


# ---- a folder that fails


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
    kept = [kept_folder(tmp_path, step) for step in (1, 2)]
    with torchlift.Keeper(tmp_path, keep=5) as keeper:
        keeper.resume()
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
        path = kept_folder(tmp_path, 1)
    assert torchlift.open(path)["w"].tolist() == [1.0] * 4


def test_a_folder_that_cannot_be_listed_after_a_save_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is complete, and what is older goes at the next save."""

    def fail(path: object) -> list[str]:
        raise OSError(errno.EIO, "no luck")

    write = Snapshot.write

    def write_and_fail(*arguments: Any) -> Any:
        report = write(*arguments)
        monkeypatch.setattr(os, "listdir", fail)
        return report

    fill(tmp_path, [1.0])
    with torchlift.Keeper(tmp_path, keep=1, background=False) as keeper:
        keeper.resume()
        monkeypatch.setattr(Snapshot, "write", write_and_fail)
        with pytest.warns(RuntimeWarning, match=r"not removed, and the next save.*no luck"):
            keeper.save(2, STATE)
        monkeypatch.undo()
        assert keeper.steps() == [1, 2]
        keeper.save(3, STATE)
    assert os.listdir(tmp_path) == [path_of(tmp_path, 3).name]


# ---- a run that has not resumed


def test_a_run_that_has_not_resumed_cannot_save_beside_another_run(tmp_path: Path) -> None:
    """Somebody forgot the resume, or the folder. Both ways out of the error work."""
    fill(tmp_path, LOSSES, keep=None)
    before = content(tmp_path)
    for step in (3, 9):
        with (
            torchlift.Keeper(tmp_path, keep=2, background=False) as keeper,
            pytest.raises(CheckpointError, match="another run") as caught,
        ):
            keeper.save(step, w=torch.zeros(2))
        assert (caught.value.file, caught.value.found) == (str(tmp_path), "step-000000007.pt")
        assert "call resume() before the first save" in (caught.value.hint or "")
        assert "a folder of its own" in (caught.value.hint or "")
    assert content(tmp_path) == before
    with torchlift.Keeper(tmp_path, keep=2, background=False) as keeper:
        assert keeper.resume() == 7
        keeper.save(9, STATE)
        assert keeper.steps() == [7, 9]
    with torchlift.Keeper(tmp_path / "own", background=False) as keeper:
        keeper.save(3, STATE)


def test_a_resume_that_failed_does_not_make_the_checkpoints_its_own(tmp_path: Path) -> None:
    """A program that goes on after the error must not delete them."""
    fill(tmp_path, LOSSES, keep=None)
    before = content(tmp_path)
    with torchlift.Keeper(tmp_path, keep=1, background=False) as keeper:
        with pytest.raises(CheckpointError, match="not have a complete checkpoint of that step"):
            keeper.resume(step=99)
        with pytest.raises(CheckpointError, match="model"):
            keeper.resume(model=torch.nn.Linear(2, 1))
        with pytest.raises(CheckpointError, match="another run"):
            keeper.save(8, STATE)
    assert content(tmp_path) == before


def test_a_first_save_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a folder that was empty."""

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("refused")

    with torchlift.Keeper(tmp_path, keep=1, background=False) as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "write", refuse)
            with pytest.raises(CheckpointError, match="refused"):
                keeper.save(9, STATE)
        keeper.save(7, STATE)
        assert keeper.steps() == [7]


def test_a_folder_that_vanished_is_a_clear_error(tmp_path: Path) -> None:
    """Somebody cleans a disk while the job runs."""
    keeper = torchlift.Keeper(tmp_path / "run", best="loss", background=False)
    keeper.save(1, STATE, metrics={"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    for use in (
        keeper.steps, keeper.latest, keeper.best, RunFolder(tmp_path / "run").kept,
        lambda: keeper.save(2, STATE), lambda: keeper.resume(w=torch.ones(2)),
    ):  # fmt: skip
        with pytest.raises(
            CheckpointError, match=r"run: the folder .* cannot be used.*No such file"
        ):
            use()
    keeper.close()
    assert not (tmp_path / "run").exists()


# ---- what another process sees


_EVALUATION = """
import os, sys, time, torch, torchlift
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
    while not os.path.isdir(sys.argv[1]) or run.latest() == path:
        time.sleep(0.01)
    path = run.latest()
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
        with torchlift.Keeper(tmp_path / "run", best="loss", background=False) as keeper:
            for step, loss in ((3, 1.0), (7, 2.0), (5, 3.0)):  # the run goes back
                keeper.save(step, w=torch.full((2,), float(step)), metrics={"loss": loss})
                assert job.stdout.readline() == f"{step}\n"
        assert job.stdout.readline() == "[3, 7, 5] step-000000003.pt step-000000005-1.pt\n"
    assert job.returncode == 0


def test_what_is_half_written_or_half_removed_is_no_checkpoint(tmp_path: Path) -> None:
    """A file without its name, a folder without its marker, a name that was taken away."""
    whole = kept_folder(tmp_path, 1)
    (kept_folder(tmp_path, 2) / ".metadata").unlink()
    (tmp_path / ".step-000000003.pt.torchlift-abcdefgh.part").touch()
    whole.with_name("removed").mkdir()
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


def test_a_checkpoint_that_is_being_removed_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder loses its marker first, and the next save waits until it is gone."""
    for step in (1, 2):
        kept_folder(tmp_path, step)
    seen, remove = list[list[int]](), os.unlink

    def note(path: str, **options: Any) -> None:
        if str(path).endswith(".distcp"):
            seen.append(keeper.steps())
        remove(path, **options)

    monkeypatch.setattr(os, "unlink", note)
    with torchlift.Keeper(tmp_path, keep=1) as keeper:
        keeper.resume()
        for step in (3, 4, 5):
            assert keeper.save(step, STATE)
    assert sorted(map(len, seen)) == [1, 2]  # steps 1 and 2 are removed in the order of the folder
    assert os.listdir(tmp_path) == ["step-000000005.pt"]

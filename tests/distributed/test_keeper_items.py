"""What a Keeper writes of each rank, and what it makes of damaged and foreign content."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on
from stateful import Stateful
from torch import nn

import torchlift
import torchlift.distributed as ours
from torchlift.distributed import Generators
from torchlift.distributed.run_state import Snapshot
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.runs import MAGIC, read_item


def run_of() -> dict[str, Any]:
    """A model and an optimizer that has taken a step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


# ---- the content of items

FIELDS: dict[str, Any] = {"ranks": 2, "own": {"a": [1]}, "generators": {}, "saved": {"step": 1}}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02N.",
        pickle.dumps(5, 2),
        pickle.dumps({"ranks": 2}, 2),
        *(
            pickle.dumps({**FIELDS, **wrong}, 2)
            for wrong in (
                {"ranks": 0}, {"ranks": "2"}, {"own": 5}, {"own": {"a": 3}}, {"own": {"a": [7]}},
                {"own": {"a": ["1"]}}, {"own": {3: [1]}}, {"saved": [1]}, {"saved": {3: 1}},
                {"more": 1},
            )
        ),
        pickle.dumps({**FIELDS, "saved": {"a": Evil()}}, 2)[:-3],
    ],
)  # fmt: skip
def test_an_item_of_another_form_is_one_clear_error(content: bytes) -> None:
    """And nothing in it runs."""
    with pytest.raises(FormatError):
        read_item(MAGIC + content)
    with pytest.raises(FormatError):
        read_item(content)


DAMAGE: list[tuple[str, Any]] = [
    ("optimizer", 5),
    ("optimizer", {"state": 5, "param_groups": []}),
    ("optimizer", {"state": {}, "param_groups": 3}),
    ("optimizer", {"state": {}, "param_groups": [5]}),
    ("optimizer", {"state": {}, "param_groups": [{"lr": 1}]}),
    ("optimizer", {"state": {}, "param_groups": [{"params": 5}]}),
    ("optimizer", {"state": {}, "param_groups": [{"params": [["a"]]}]}),
    ("optimizer", {"state": {"weight": 5}, "param_groups": [{"params": ["weight", "bias"]}]}),
    (
        "optimizer",
        {"state": {"weight": {"exp_avg": "x"}}, "param_groups": [{"params": ["weight"]}]},
    ),
    ("model", 5),
    ("model", [torch.ones(2)]),
    ("model", {"weight": "text", "bias": torch.ones(2)}),
    *(("ranks", content) for content in (7, [], {}, {"a": {}}, {"0": 3}, {"0": {}})),
    ("ranks.0.rng", 1),
    ("ranks.0.rng.torch", b"short"),
    # Some generators may be set before the damaged one is found.
    *((f"ranks.0.rng.{kind}", {"numbers": "lost"}) for kind in ("torch", "python", "numpy")),
    *(("step", step) for step in ("7", -1, 1.5, None, True)),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE, ids=str)
def test_a_damaged_state_is_one_clear_error_and_changes_nothing(
    tmp_path: Path, name: str, content: Any
) -> None:
    """Whatever stands where a Keeper writes something else. A file of its name may be anybody's."""
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(7, run_of())
        path = keeper.latest() or ""
        saved = parent = torch.load(path, weights_only=True)
        *parts, last = name.split(".")
        for part in parts:
            parent = parent[part]
        parent[last] = content
        torch.save(saved, path)
        run = run_of()
        torch.rand(1)  # the generators are not where they were saved
        objects = (*run.values(), Generators())
        before = copy.deepcopy([each.state_dict() for each in objects])
        with pytest.raises(CheckpointError) as caught:
            keeper.resume(run, verify=False)
        assert path in str(caught.value)
        assert name.split(".")[0] in str(caught.value) or "rng" in name
        now = {"states": [each.state_dict() for each in objects]}
        assert torchlift.diff(now, {"states": before}).equal


@pytest.mark.parametrize("array", [5, ["<f4", [2]]])
def test_a_dict_with_the_key_of_arrays_is_resumed_as_it_was(tmp_path: Path, array: Any) -> None:
    """The key is that of a state which the Keeper makes of an array."""
    state = {"rows": [{"numpy.ndarray": array, "bytes": [1]}]}
    again = Stateful(None)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, place=Stateful(state))
        assert keeper.resume(place=again) == 1
    assert torchlift.diff({"state": again.state}, {"state": state}).equal


def test_a_long_list_of_numbers_is_not_walked_over(tmp_path: Path) -> None:
    """Python would block training for seconds if it had a million, and torch.save takes 0.3 s."""
    inside = [[*range(100_000)], {"a": ("b", [0.5] * 100_000)}]
    run = {**run_of(), "loader": Stateful({"rows": [*range(100_000)], "inside": inside})}
    counts = {"losses": [0.5] * 100_000, "deep": {"some": tuple([1.0, None] * 50_000)}}
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, run, **counts)
        keeper.wait()
        sys.setprofile(count)
        threading.setprofile(count)
        try:
            keeper.save(2, run, **counts)
            keeper.wait()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    assert calls < 10_000
    assert torchlift.open(keeper.latest() or "").objects["losses"][-1] == 0.5


# ---- memory


@on(2)
def test_a_save_copies_once_and_a_resume_reads_what_is_passed(folder: Path) -> None:
    """A save took the memory of an equal object twice, and a resume read all objects."""
    model = nn.Linear(512, 512)
    average = torch.full((1 << 24,), 1.0)  # 64 MiB
    with torchlift.Keeper(folder) as keeper:
        for step in (1, 2):  # the first one makes room for the copy
            dist.barrier()
            with torchlift.measure.memory() as use:
                keeper.save(step, model=model, average=Stateful({"values": average}))
                keeper.wait()
    assert use.added_anonymous < 24 << 20, use
    with torchlift.Keeper(folder) as keeper, torchlift.measure.memory() as use:
        assert keeper.resume(model=model, verify=False) == 2
    assert use.added_anonymous < 24 << 20, use


def resume_over_live_moments(folder: str) -> float:
    """Resume a model of 16 MiB and its moments of 32; the MiB of memory that this takes."""
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, model=model, optimizer=optimizer)
        keeper.wait()
        kept = model.weight.detach().clone()
        optimizer.step()
        with torchlift.measure.memory() as use:
            assert keeper.resume(model=model, optimizer=optimizer, verify=False) == 1
    assert torch.equal(model.weight, kept)
    return use.added_anonymous / (1 << 20)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_over_live_moments_copies_none_of_them(ranks: int, tmp_path: Path) -> None:
    """It kept the old moments until the models were loaded, and read the new ones beside them."""
    added = torchlift.distributed.on_ranks(ranks, resume_over_live_moments, str(tmp_path))
    assert max(added) < 12


# ---- the ends of a job


def destroy_early(folder: str, is_saved: bool) -> str:
    """Destroy the process group before the keeper is closed, while it saves or afterwards."""
    go, write = threading.Event(), Snapshot.write
    Snapshot.write = lambda *a: go.wait(60) and write(*a)  # type: ignore[method-assign]
    keeper = torchlift.Keeper(folder)
    keeper.save(1, run_of())
    (saving,) = keeper._in_flight
    assert saving is not None
    if is_saved:
        go.set()
        saving.result()
    dist.destroy_process_group()
    go.set()
    try:
        keeper.close()
        keeper.save(2, run_of())
    except (CheckpointError, ValueError) as error:
        return str(error)
    return "saved"


@pytest.mark.distributed
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_group_that_is_destroyed_before_the_keeper_is_closed_is_named(
    tmp_path: Path, is_saved: bool
) -> None:
    """A save that is complete stays complete. One that is lost names the line that mends it."""
    for text in ours.on_ranks(2, destroy_early, str(tmp_path), is_saved):
        if is_saved:
            assert text == "the keeper is closed"
        else:
            assert "the process group was destroyed before the keeper was closed" in text
            assert "Call keeper.close() before torch.distributed.destroy_process_group()" in text
    assert ours.RunFolder(tmp_path).steps() == [1] * is_saved


def keep_on_some_ranks(folder: str, says_so: bool) -> list[Any]:
    """Let two of three ranks keep."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2]) if says_so else None
    if rank == 1:
        while not (says_so or all(Path(folder, f"done-{each}").exists() for each in (0, 2))):
            time.sleep(0.01)
        return []
    if not says_so:
        with pytest.raises(CheckpointError) as caught:
            torchlift.Keeper(folder, timeout=2)
        Path(folder, f"done-{rank}").touch()
        return [str(caught.value)]
    with torchlift.Keeper(folder, process_group=group, timeout=60) as keeper:
        keeper.save(5, run_of(), place=Stateful({"rank": rank}))
        again = Stateful(None)
        assert keeper.resume(run_of(), place=again) == 5
    return [again.state]


@pytest.mark.distributed
def test_a_keeper_of_some_ranks_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """Not longer than its timeout, and with their process group it works."""
    on_ranks = torchlift.distributed.on_ranks
    found = on_ranks(3, keep_on_some_ranks, str(tmp_path), False)
    for rank in (0, 2):
        (text,) = found[rank]
        assert text.startswith("some ranks do not create the Keeper")
        assert "pass process_group= with the ranks that do" in text
    found = on_ranks(3, keep_on_some_ranks, str(tmp_path), True)
    assert found == [[{"rank": 0}], [], [{"rank": 2}]]
    assert len([*(tmp_path / "step-000000005").glob("*.distcp")]) == 2


def test_a_fork_is_refused_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes is not in it, and it must not touch the folder."""
    go, write = threading.Event(), Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda *a: go.wait(60) and write(*a))
    keeper = torchlift.Keeper(tmp_path)
    keeper.save(1, run_of())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        child = os.fork()
    if not child:
        status = 0
        for call in (
            keeper.wait, lambda: keeper.save(2, run_of()), lambda: keeper.resume(run_of()),
            keeper.should_stop, keeper.close,
        ):  # fmt: skip
            try:
                call()
            except CheckpointError as error:
                status += "the keeper is that of another process" in str(error)
        keeper.__exit__(ValueError, None, None)
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    go.set()
    keeper.close()
    assert os.waitstatus_to_exitcode(ended) == 5
    assert keeper.steps() == [1]


# ---- folders of other programs


def save_without_items(folder: str) -> None:
    """Save what a Keeper saves, but for the items of ranks."""
    run = run_of()
    state = ours.get_state_dict(run["model"], run["optimizer"])
    saved = {"model": state[0], "optimizer": state[1], "step": 7, "metrics": {}}
    ours.save_consolidated(saved, f"{folder}/step-000000007", format="dcp")


@pytest.mark.distributed
def test_a_folder_without_items_is_refused_and_the_lines_of_the_error_load_it(
    tmp_path: Path,
) -> None:
    """Its model and its optimizer."""
    ours.on_ranks(2, save_without_items, str(tmp_path))
    run = run_of()
    run["optimizer"].state.clear()
    nn.init.zeros_(run["model"].weight)
    with pytest.raises(FormatError, match="does not have the item of a rank") as caught:
        torchlift.Keeper(tmp_path).resume(run)
    hint = caught.value.hint or ""
    for line in (
        hint.removeprefix("Load a model with ").removesuffix(".").split(", and its optimizer with ")
    ):
        eval(line, {"torchlift": torchlift, **run})
    saved, (weight, _) = torchlift.open(tmp_path / "step-000000007"), run["model"].parameters()
    assert torch.equal(weight, saved["model.weight"])
    moment = run["optimizer"].state[weight]["exp_avg"]
    assert torch.equal(moment, saved["optimizer.state.weight.exp_avg"])

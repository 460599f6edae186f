"""Threads that load into one model at once: one after the other, or told why not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from small_models import Two, saved
from torch import nn

import torchlift
from torchlift import PlacementError, swap
from torchlift.distributed import set_model_state_dict

SIZE = 256
LONG = 60  # seconds until a test gives up on a thread
SHORT = 0.3  # seconds that one thread waits for another that is to stay outside


class Meeting:
    """Where two threads meet, each inside of a load of its own, unless something prevents it."""

    def __init__(self, seconds: float) -> None:
        self._barrier = threading.Barrier(2)
        self._seconds = seconds
        self.inside = threading.Event()
        self.met = False

    def __call__(self, *_: object) -> None:
        """A loading hook, or what else runs inside; who has met nobody once goes on at once."""
        self.inside.set()
        try:
            self._barrier.wait(self._seconds)
            self.met = True
        except threading.BrokenBarrierError:
            return


def model_with(meeting: Meeting, model: nn.Module | None = None) -> nn.Module:
    model = Two(SIZE, SIZE) if model is None else model
    model.register_load_state_dict_pre_hook(meeting)
    return model


def run_together(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, all from one barrier, and raise what the first raised."""
    start, errors = threading.Barrier(len(works)), list[BaseException]()

    def run(work: Callable[[], object]) -> None:
        try:
            start.wait(LONG)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a thread hangs"
    for error in errors:
        raise error


def constant(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE, SIZE), value) for name in "ab"}


def values_in(model: nn.Module) -> list[float]:
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()]).unique().tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("threads")
    return [saved(constant(value), folder, f"{value:.0f}.pt") for value in (1.0, 2.0)]


@pytest.mark.parametrize("modes", [("copy", "copy"), ("copy", "swap"), ("swap", "assign")])
def test_two_threads_load_into_one_model_one_after_the_other(
    files: list[Path], modes: tuple[str, str]
) -> None:
    """Neither is inside while the other is, and what is left is all of one file."""
    meeting = Meeting(SHORT)
    model = model_with(meeting)
    works = [
        lambda file=file, mode=mode: torchlift.load(model, file, mode=mode)
        for file, mode in zip(files, modes, strict=True)
    ]
    run_together(*works)
    assert not meeting.met
    assert values_in(model) in ([1.0], [2.0])


@pytest.mark.parametrize("source", ["mmap", "read"])
def test_many_loads_from_threads_leave_the_values_of_one_file(
    files: list[Path], source: str
) -> None:
    """Else one copies into memory that another, which swaps, has let go of."""
    model = Two(SIZE, SIZE)
    held = model.a
    works = [
        lambda file=file, mode=mode: [
            torchlift.load(model, file, mode=mode, source=source) for _ in range(10)
        ]
        for file in files
        for mode in ("copy", "swap")
    ]
    run_together(*works)
    assert values_in(model) in ([1.0], [2.0])
    assert model.a is held


@pytest.mark.parametrize("kind", ["set", "plan", "a part", "a shared tensor"])
def test_whatever_changes_the_same_tensors_waits(files: list[Path], kind: str) -> None:
    """Each function that loads, for the model, a part of it or one that shares a tensor with it."""
    meeting = Meeting(SHORT)
    inner, other = model_with(meeting), model_with(meeting)
    other.a = inner.a
    whole = nn.ModuleDict({"inner": inner})
    second = {
        "set": lambda: set_model_state_dict(inner, constant(2.0)),
        "plan": lambda: torchlift.plan(whole, files[1], rename="inner.{}".format),
        "a part": lambda: torchlift.load(inner, files[1]),
        "a shared tensor": lambda: torchlift.load(other, files[1]),
    }[kind]
    run_together(
        lambda: torchlift.load(whole, files[0], rename="inner.{}".format),
        lambda: meeting.inside.wait(LONG) and second(),
    )
    assert not meeting.met


def test_materialize_waits_for_a_load_of_the_same_skeleton(files: list[Path]) -> None:
    """What has its values by then is not on meta any more, and keeps them."""
    meeting = Meeting(SHORT)
    model = model_with(meeting, torchlift.skeleton(Two, SIZE, SIZE))
    made: list[list[str]] = []
    run_together(
        lambda: torchlift.load(model, files[0]),
        lambda: meeting.inside.wait(LONG) and made.append(torchlift.materialize(model)),
    )
    assert made == [[]]
    assert values_in(model) == [1.0]


def test_load_waits_for_a_block_that_preserves_the_references_of_the_same_model(
    files: list[Path],
) -> None:
    """Inside, torch converts one tensor after the other, with nothing to go back to."""
    meeting = Meeting(SHORT)
    model = model_with(meeting)

    def convert() -> None:
        with swap.preserving_references(check=model):
            meeting()
            model.double()

    run_together(convert, lambda: meeting.inside.wait(LONG) and torchlift.load(model, files[0]))
    assert not meeting.met
    assert (model.a.dtype, values_in(model)) == (torch.float64, [1.0])


def test_loads_into_different_models_run_at_the_same_time(tmp_path: Path) -> None:
    """Also where neither has a bias: None is no tensor that they share."""
    file, meeting = saved({"weight": torch.ones(3, 3)}, tmp_path), Meeting(LONG)
    models = [model_with(meeting, nn.Linear(3, 3, bias=False)) for _ in range(2)]
    run_together(*(lambda model=model: torchlift.load(model, file) for model in models))
    assert meeting.met


def test_load_inside_of_a_load_of_the_same_thread_goes_on(files: list[Path]) -> None:
    """A transform may load, also into the model that it is called for."""
    model = Two(SIZE, SIZE)

    def transform(key: str, tensor: torch.Tensor) -> torch.Tensor:
        for each in (model, Two(SIZE, SIZE)):
            torchlift.load(each, files[1])
        return tensor

    run_together(lambda: torchlift.load(model, files[0], transform=transform))
    assert values_in(model) == [1.0]


def test_threads_that_would_wait_for_each_other_are_told(files: list[Path]) -> None:
    """Each is inside of a load and asks for the model of the other's."""
    models, both = [Two(SIZE, SIZE), Two(SIZE, SIZE)], threading.Barrier(2)
    told: list[str] = []

    def nested(mine: nn.Module, other: nn.Module) -> None:
        def transform(key: str, tensor: torch.Tensor) -> torch.Tensor:
            both.wait(LONG)
            if key == "a":
                with pytest.raises(PlacementError) as caught:
                    torchlift.load(other, files[1])
                told.append(str(caught.value))
            return tensor

        torchlift.load(mine, files[0], transform=transform)

    run_together(lambda: nested(*models), lambda: nested(*reversed(models)))
    reason = (
        "another thread is loading into this model, and this one is inside of a load too: each "
        "could wait for the other. Load into one model after the other"
    )
    assert [text[: len(reason)] for text in told] == [reason, reason]
    assert [values_in(model) for model in models] == [[1.0], [1.0]]


@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch.distributed.fsdp"])
def test_load_beside_a_thread_that_is_importing_goes_on(
    files: list[Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package is among the modules before it has what it defines."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model = Two(SIZE, SIZE)
    torchlift.load(model, files[0])
    set_model_state_dict(model, constant(2.0))
    assert values_in(model) == [2.0]


def test_failed_load_lets_the_next_thread_in(files: list[Path], tmp_path: Path) -> None:
    """Whatever ends a load ends the wait for it."""
    model, wrong = Two(SIZE, SIZE), saved({"c": torch.ones(1)}, tmp_path)
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(model, wrong)
    run_together(lambda: torchlift.load(model, files[0]))
    assert values_in(model) == [1.0]


CHILD = """
import os, sys, threading
import torch, torchlift
from small_models import Two

torch.set_num_threads(1)
busy, mine = Two(256, 256), Two(256, 256)
inside, leave = threading.Event(), threading.Event()

def stay(key, tensor):
    inside.set()
    assert leave.wait(60)
    return tensor

def fork(key, tensor):
    if key == "a":
        child = os.fork()
        if child == 0:
            for model in (busy, mine):
                torchlift.load(model, sys.argv[2], source="mmap")
            os._exit(not busy.a.unique().tolist() == mine.b.unique().tolist() == [2.0])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return tensor

load = lambda model, transform: torchlift.load(model, sys.argv[1], transform=transform)
other = threading.Thread(target=load, args=(busy, stay))
other.start()
assert inside.wait(60)
load(mine, fork)
leave.set()
other.join()
print(busy.a.unique().tolist(), mine.a.unique().tolist())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_child_that_is_forked_in_the_middle_of_loads_can_load(files: list[Path]) -> None:
    """Into what its own thread was loading, and into what another thread of the parent was."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILD), *map(str, files)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=LONG, check=False, env=env
    )
    assert run.stdout.splitlines() == ["0", "[1.0] [1.0]"], run.stderr

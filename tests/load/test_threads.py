"""Threads that load into models of their own, and forks in the middle of that."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked import run
from small_models import Two, saved
from torch import nn

import torchlift
from torchlift.distributed import set_model_state_dict

SIZE = 256
LONG = 60  # seconds until a test gives up on a thread


def run_together(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, all from one barrier, and raise what the first raised."""
    start, errors = threading.Barrier(len(works)), list[BaseException]()

    def do(work: Callable[[], object]) -> None:
        try:
            start.wait(LONG)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=do, args=(work,), daemon=True) for work in works]
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


def test_loads_into_different_models_run_at_the_same_time(tmp_path: Path) -> None:
    """Also where neither has a bias: None is no tensor that they share."""
    file, both = saved({"weight": torch.ones(3, 3)}, tmp_path), threading.Barrier(2)
    models = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    for model in models:
        model.register_load_state_dict_pre_hook(lambda *_: (both.wait(LONG), None)[1])
    run_together(*(lambda model=model: torchlift.load(model, file) for model in models))


def test_load_inside_of_a_load_of_the_same_thread_goes_on(files: list[Path]) -> None:
    """A transform may load, also into the model that it is called for."""
    model = Two(SIZE, SIZE)

    def transform(key: str, tensor: torch.Tensor) -> torch.Tensor:
        for each in (model, Two(SIZE, SIZE)):
            torchlift.load(each, files[1])
        return tensor

    run_together(lambda: torchlift.load(model, files[0], transform=transform))
    assert values_in(model) == [1.0]


CHILD = """
import os, sys, threading
import torch, torchlift
from small_models import Two

torch.set_num_threads(1)
busy, mine = Two(256, 256), Two(256, 256)
ckpt = torchlift.open(sys.argv[2])
inside, leave = threading.Event(), threading.Event()

def stay(key, tensor):
    inside.set()
    assert leave.wait(60)
    return tensor

def fork(key, tensor):
    if key == "a":
        child = os.fork()
        if child == 0:
            for given in (sys.argv[2], ckpt):
                for options in ({"source": "mmap"}, {"source": "read"}, {"dtype": torch.float64}):
                    for model in (busy, mine):
                        torchlift.load(model, given, **options)
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
print(busy.a.unique().tolist(), mine.a.unique().tolist(), ckpt["b"].unique().tolist())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_child_that_is_forked_in_the_middle_of_loads_can_load(files: list[Path]) -> None:
    """Into what its own thread was loading, and into what another thread of the parent was.

    From a path, and from a checkpoint that is open in both processes.
    """
    done = run(CHILD, *files, env={"PYTHONWARNINGS": "ignore"})
    assert done.stdout.splitlines() == ["0", "[1.0] [1.0] [2.0]"], done.stderr


@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch.distributed.fsdp"])
def test_load_beside_a_thread_that_is_importing_goes_on(files, name, monkeypatch):
    """A package is among the modules before it has what it defines."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model = Two(SIZE, SIZE)
    torchlift.load(model, files[0])
    set_model_state_dict(model, constant(2.0))
    assert values_in(model) == [2.0]

"""`torchlift.Keeper` on one process: what is kept, found and resumed, and when it stops."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from full_disk import file_size_limit
from stateful import Stateful
from torch import nn
from zoo import same, trained, two_layers

import torchlift
from torchlift.distributed.run_state import Snapshot
from torchlift.errors import CheckpointError


def run_of(seed: int = 0) -> dict[str, Any]:
    """A model and an optimizer that has taken two steps."""
    model, optimizer = trained(seed)
    return {"model": model, "optimizer": optimizer}


def test_a_checkpoint_of_a_keeper_is_an_ordinary_file(tmp_path: Path) -> None:
    """torch and `torchlift.load` read it, with the plain data that was saved beside."""
    run, notes = run_of(), {"a": [1, (2, "x")], "b": {3: torch.ones(2)}, "c": (None, 1.5)}
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.save(3, run, epoch=1, seen=Counter("aba"), notes=notes)
    path = tmp_path / "step-000000003.pt"
    with torchlift.open(path) as ckpt:
        assert ckpt.objects["epoch"] == 1
        assert same(ckpt.tree("notes"), notes)
        assert repr(ckpt.tree("seen")) == "Counter({'a': 2, 'b': 1})"
        model = torchlift.skeleton(two_layers)
        torchlift.load(model, ckpt, root="model")
    assert same(model, run["model"])
    torch.load(path, weights_only=True)


def test_a_resume_leaves_the_filters_of_warnings_alone(tmp_path: Path) -> None:
    """They are those of all threads."""
    filters, changed = warnings.filters, list[str]()

    def look(frame: FrameType, *_: object) -> None:
        if warnings.filters is not filters:
            changed.append(frame.f_code.co_filename)

    run = run_of()
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(2, run)
        sys.setprofile(look)
        try:
            assert keeper.resume(run) == 2
        finally:
            sys.setprofile(None)
    assert not changed


def test_the_latest_is_what_was_saved_last_wherever_the_run_went_back(tmp_path: Path) -> None:
    """Later steps that were left behind count as older ones until they are expired."""
    run = run_of()
    with torchlift.Keeper(tmp_path, keep=None, background=False) as keeper:
        for step in (1, 2, 3, 4, 5):
            keeper.save(step, run)
    with torchlift.Keeper(tmp_path, keep=3, background=False) as keeper:
        assert keeper.resume(run, step=2) == 2
        for step, kept in ((3, [4, 5, 3]), (4, [5, 3, 4]), (10, [3, 4, 10])):
            keeper.save(step, run)
            assert keeper.steps() == kept
        assert keeper.latest() == str(tmp_path / "step-000000010-1.pt")


def test_an_old_one_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is saved, the others are removed, and the next save tries again."""
    run, original = run_of(), os.unlink

    def refusing(path: str, **options: Any) -> None:
        if "step-000000001.pt" in str(path):
            raise PermissionError(13, "Permission denied", path)
        original(path, **options)

    with torchlift.Keeper(tmp_path, keep=None, background=False) as keeper:
        for step in (1, 2):
            keeper.save(step, run)
    with torchlift.Keeper(tmp_path, keep=1, background=False) as keeper:
        keeper.resume()
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refusing)
            with pytest.warns(RuntimeWarning, match=r"cannot be removed.*step-000000001\.pt"):
                assert keeper.save(3, run)
        assert keeper.steps() == [1, 3]
        keeper.save(4, run)
    assert os.listdir(tmp_path) == ["step-000000004.pt"]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No checkpoint is written before this event."""
    event, write = threading.Event(), Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda *a: event.wait(60) and write(*a))
    return event


def test_an_interrupted_wait_leaves_the_snapshot_alone(
    tmp_path: Path, written: threading.Event
) -> None:
    """Ctrl-C while a save waits for the last one, and then a save: both are whole."""
    model, main = nn.Linear(50, 50), threading.get_ident()
    with torchlift.Keeper(tmp_path) as keeper:
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                model.weight.fill_(value)
            if value == 2.0:
                threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
                with pytest.raises(KeyboardInterrupt):
                    keeper.save(2, model=model)
                threading.Timer(0.2, written.set).start()
            else:
                keeper.save(int(value), model=model)
    for step in (1, 3):
        with torchlift.open(tmp_path / f"step-{step:09d}.pt") as ckpt:
            assert torch.equal(ckpt["model.weight"], torch.full((50, 50), float(step)))


def test_a_snapshot_has_the_values_of_odd_tensors_and_no_memory_of_them(
    tmp_path: Path, written: threading.Event
) -> None:
    """Whatever is written to them after the call. Equal views share their copy."""
    waves, matrix = torch.randn(3, dtype=torch.complex64), torch.randn(4, 6)
    parameter = nn.Parameter(torch.ones(2))
    state = {
        "matrix": matrix, "transposed": matrix.T, "column": matrix[:, 1], "again": matrix[:, 1],
        "number": torch.tensor(2), "empty": torch.ones(0, 3), "none": torch.ones(1).expand(0),
        "waves": waves, "conj": waves.conj(), "negative": waves.conj().imag, "real": waves.imag,
        "wide": torch.ones(1).expand(1 << 20),
        "small": torch.ones(3).to(torch.float8_e4m3fn), "live": parameter, "view": parameter * 2,
        "odd": matrix.as_subclass(type("Named", (torch.Tensor,), {})),
    }  # fmt: skip
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    other = Stateful()
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, odd=Stateful(state))
        for tensor in (waves, matrix, parameter):
            with torch.no_grad():
                tensor.zero_()
        written.set()
        assert keeper.resume(odd=other) == 1
        assert os.path.getsize(keeper.latest() or "") < 100_000
    for name, tensor in expected.items():
        plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        assert same(other.state[name], plain), name
    assert other.state["again"].data_ptr() == other.state["column"].data_ptr()


def test_a_failed_save_of_which_nobody_asks_is_warned_of(tmp_path: Path) -> None:
    """A program that ends would otherwise never know."""
    code = (
        "import resource, signal, sys, torch, torchlift\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "torchlift.Keeper(sys.argv[1]).save(1, w=torch.ones(1000))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    assert "RuntimeWarning: the last save of a Keeper failed: " in done.stderr
    assert "step-000000001.pt: the file cannot be written" in done.stderr


def test_a_checkpoint_whose_metric_cannot_be_read_stays(tmp_path: Path) -> None:
    """It may be the best: a sweep must not remove it."""
    run = run_of()
    with torchlift.Keeper(tmp_path, keep=1, best="loss", background=False) as keeper:
        keeper.save(1, run, metrics={"loss": 1.0})
        path = tmp_path / "step-000000001.pt"
        data = path.read_bytes()
        path.write_bytes(data[:100])
        for step in (2, 3):
            with pytest.warns(RuntimeWarning, match=r"cannot be removed.*step-000000001\.pt"):
                keeper.save(step, run, metrics={"loss": float(step)})
        assert keeper.steps() == [1, 2, 3]
        path.write_bytes(data)
        keeper.save(4, run, metrics={"loss": 4.0})
        assert keeper.steps() == [1, 4]


def test_plain_data_may_be_in_what_is_resumed(tmp_path: Path) -> None:
    """The dict that was saved is passed again; what is not as it was saved is told of."""
    state = {"model": nn.Linear(2, 1), "epoch": 3, "notes": {"seen": [1, 2]}, "new": 1}
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, {name: value for name, value in state.items() if name != "new"})
        assert keeper.resume(state) == 1
        with pytest.warns(RuntimeWarning, match=r"epoch, notes: resume does not change.*tree\(\)"):
            assert keeper.resume({**state, "epoch": 0, "notes": {"seen": []}}) == 1
    assert state["epoch"] == 3


def test_an_error_of_a_save_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    """What was complete before still is, and the next save works."""
    run = run_of()
    keeper = torchlift.Keeper(tmp_path)
    keeper.save(1, run)
    keeper.wait()
    with file_size_limit(1000):
        keeper.save(2, run)
        with pytest.raises(CheckpointError, match=r"step-000000002\.pt: the file cannot"):
            keeper.save(3, run)
    assert keeper.steps() == [1]
    keeper.save(3, run)
    keeper.close()
    assert sorted(os.listdir(tmp_path)) == ["step-000000001.pt", "step-000000003.pt"]


def test_an_optimizer_of_a_model_that_was_rebuilt_is_refused(tmp_path: Path) -> None:
    """Of another model, all or a part: before the model is loaded. What is new has a way out."""

    def made(*more: torch.Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 1)
        return model, torch.optim.AdamW([*model.parameters(), *more])

    model, optimizer = made()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    keeper = torchlift.Keeper(tmp_path, background=False)
    keeper.save(1, model=model, optimizer=optimizer)
    other, _ = made()
    before = other.weight.clone()
    for params in ([*made()[0].parameters()], [other.weight, made()[0].bias]):
        wrong = torch.optim.AdamW(params)
        with pytest.raises(CheckpointError, match=r"optimizer state of param|have any more"):
            keeper.resume(model=other, optimizer=wrong)
        assert torch.equal(other.weight, before)
        assert not wrong.state
    other, new = made(torch.zeros(1, requires_grad=True))
    with pytest.raises(CheckpointError) as caught:
        keeper.resume(model=other, optimizer=new)
    assert str(caught.value).endswith("Or resume without optimizer.")
    assert keeper.resume(model=other) == 1
    keeper.save(2, model=other, optimizer=new)
    again, temperature = made(torch.zeros(1, requires_grad=True))
    assert keeper.resume(model=again, optimizer=temperature) == 2


def test_a_save_may_be_skipped_while_another_is_on_its_way(
    tmp_path: Path, written: threading.Event
) -> None:
    """Training never waits for the disk then."""
    run = run_of()
    with torchlift.Keeper(tmp_path, busy="skip") as keeper:
        assert keeper.save(1, run)
        assert not keeper.save(2, run)
        written.set()
        keeper.wait()
        assert keeper.save(3, run)
    assert keeper.steps() == [1, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep=0: expected a number from 1 on"),
        ({"keep": 1.5}, "keep=1.5: expected a number from 1 on, a function, or None"),
        ({"keep": [len]}, "keep=.*: expected a number from 1 on, a function, or None"),
        ({"every": True}, "every=True: expected a number from 1 on, or None"),
        ({"busy": "no"}, "busy='no': expected 'wait' or 'skip'"),
        ({"best": "loss", "best_is": "max"}, "best_is='max': expected one of lowest, highest"),
        ({"timeout": 0}, "timeout=0: expected seconds, or None"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Before the folder is made."""
    with pytest.raises(ValueError, match=message):
        torchlift.Keeper(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_saved_or_resumed_is_named(tmp_path: Path) -> None:
    """An optimizer of nobody, a name that is taken, no checkpoint."""
    run = run_of()
    with torchlift.Keeper(tmp_path, best="loss") as keeper:
        with pytest.raises(ValueError, match="optimizer: no module among the objects has its"):
            keeper.save(1, optimizer=run["optimizer"], metrics={"loss": 1.0})
        with pytest.raises(ValueError, match="metrics= lacks 'loss'"):
            keeper.save(1, run, metrics={"los": 1.0})
        for metric in (None, 10**400, "text", [1.0]):
            with pytest.raises(ValueError, match=r"metrics\['loss'\]: expected a number, found"):
                keeper.save(1, run, metrics={"loss": metric})
        assert keeper.steps() == []
        keeper.save(1, {"model": run["model"]}, metrics={"loss": 1.0})
        before = {key: value.clone() for key, value in run["model"].state_dict().items()}
        with torch.no_grad():
            run["model"][0].weight.zero_()
        with pytest.raises(
            CheckpointError, match="'optimizer': the checkpoint does not have a state for"
        ):
            keeper.resume(run)
        assert not run["model"][0].weight.any()
        with pytest.raises(CheckpointError, match=r"not have a complete checkpoint.*\[1\]"):
            keeper.resume(run, step=5)
        assert keeper.resume(model=run["model"]) == 1
        assert torch.equal(run["model"][0].weight, before["0.weight"])


def test_the_thread_that_writes_changes_nothing_of_all_threads(tmp_path: Path) -> None:
    """Training goes on meanwhile: the collector, filters of warnings, torch's flags, the folder."""

    def facts() -> tuple[object, ...]:
        return (
            gc.isenabled(), gc.get_threshold(), id(warnings.filters), len(warnings.filters),
            torch.get_default_dtype(), torch.get_num_threads(), sys.getswitchinterval(),
            torch.are_deterministic_algorithms_enabled(), os.getcwd(),
            resource.getrlimit(resource.RLIMIT_NOFILE),
        )  # fmt: skip

    run = run_of()
    expected, seen, changed = facts(), set[str](), list[str]()

    def look(frame: FrameType, event: str, _: object) -> None:
        # At the end of a save only the executor's own code runs next to the main thread's.
        is_ours = event == "call" and "/torchlift/" in frame.f_code.co_filename
        if is_ours and threading.current_thread().name.startswith("torchlift-keeper"):
            seen.add(frame.f_code.co_name)
            if facts() != expected:
                changed.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {facts()}")

    threading.setprofile(look)
    try:
        with torchlift.Keeper(tmp_path, keep=1, best="loss") as keeper:
            for step in (1, 2, 3):  # the last one reads metrics, and removes a checkpoint
                keeper.save(step, run, extra={"w": torch.ones(3)}, metrics={"loss": -step})
    finally:
        # typeshed does not know that None removes the function.
        threading.setprofile(None)  # type: ignore[arg-type]
    assert {"write_state", "lay_out_torch_file", "sweep", "_read_stamped"} <= seen
    assert not changed, (expected, changed[0], len(changed))


def test_a_report_says_what_a_save_wrote_and_how_long_it_blocked(
    tmp_path: Path, written: threading.Event
) -> None:
    """Of the last one that is complete; it waits for none, and a failed save has none."""
    model = nn.Linear(50, 50)
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, model=model)
        assert keeper.report is None
        written.set()
        keeper.wait()
        first = keeper.report
        assert first is not None
        assert (first.path, first.nbytes) == (keeper.latest(), first.written)
        assert first.nbytes == 50 * 51 * 4  # no tensors of generators
        assert first.blocked > 0
        written.clear()
        keeper.save(2, model=model)
        assert keeper.report == first
        written.set()
        keeper.wait()
        with file_size_limit(1000):
            keeper.save(3, model=model)
            with pytest.raises(CheckpointError, match="File too large"):
                keeper.wait()
        assert keeper.report is not None
        assert keeper.report.path == keeper.latest() == str(tmp_path / "step-000000002.pt")


# ---- stop on a signal


def test_a_keeper_that_is_not_asked_installs_no_handler(tmp_path: Path) -> None:
    """And one that is restores the former ones when it is closed, or gone."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]

    def now() -> list[Any]:
        return [signal.getsignal(number) for number in numbers]

    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, w=torch.ones(2))
        assert now() == before
        assert not keeper.should_stop()
        assert now() != before
    assert now() == before
    with pytest.raises(ValueError, match="the keeper is closed"):
        keeper.should_stop()
    keeper = torchlift.Keeper(tmp_path)
    assert not keeper.should_stop()
    del keeper
    gc.collect()
    assert now() == before


def test_a_thread_cannot_be_the_first_to_ask(tmp_path: Path) -> None:
    """Python installs handlers in the main thread only. After that anyone may ask."""
    with torchlift.Keeper(tmp_path) as keeper, ThreadPoolExecutor(1) as thread:
        with pytest.raises(CheckpointError, match="a first call in the main thread"):
            thread.submit(keeper.should_stop).result()
        assert not keeper.should_stop()
        assert not thread.submit(keeper.should_stop).result()


def test_a_signal_stops_and_reaches_who_was_there_before(tmp_path: Path) -> None:
    """Nobody who installs a handler afterwards loses it."""
    met: list[int] = []
    former = signal.signal(signal.SIGUSR2, lambda number, _: met.append(number))
    try:
        with torchlift.Keeper(tmp_path) as keeper:
            assert not keeper.should_stop(on=[signal.SIGUSR2, signal.SIGTERM])
            os.kill(os.getpid(), signal.SIGUSR2)
            assert keeper.should_stop()
            assert keeper.should_stop()
            assert met == [signal.SIGUSR2]
            later = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert callable(later)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert met == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, former)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("former", ["default", "ignored", "handler"])
def test_a_forked_child_ends_on_a_signal_as_it_did_before(tmp_path: Path, former: str) -> None:
    """It has the handler of the keeper, but nobody in it asks whether to stop."""
    before: Any = {
        "default": signal.SIG_DFL,
        "ignored": signal.SIG_IGN,
        "handler": lambda *_: os._exit(7),
    }[former]
    kept = signal.signal(signal.SIGTERM, before)
    try:
        with torchlift.Keeper(tmp_path) as keeper:
            assert not keeper.should_stop()
            (reading, writing), (ready, done) = os.pipe(), os.pipe()
            child = os.fork()
            if not child:
                os.write(done, b"1")  # Python forgets signals that come while it forks
                os.read(reading, 1)  # until a signal ends it
                os._exit(0)
            os.read(ready, 1)
            if former == "ignored":
                os.kill(child, signal.SIGTERM)
                os.kill(child, signal.SIGKILL)
            for descriptor in (reading, writing, ready, done):
                os.close(descriptor)
            expected = {"default": -signal.SIGTERM, "ignored": -signal.SIGKILL, "handler": 7}
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected[former]
            assert not keeper.should_stop()
            os.kill(os.getpid(), signal.SIGUSR1)  # and the keeper still listens
            assert keeper.should_stop()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, kept)


def test_arrays_of_an_object_come_back_as_they_were(tmp_path: Path) -> None:
    """Dtype, shape and order of dimensions, those of nothing too; a list would be none of that."""

    loader, other = Stateful(), Stateful()
    arrays = [np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 3), np.float16),
              np.array(["a", "bc"]), np.array(3.5), np.array([[1j, 2]])]  # fmt: skip
    loader.state = {"arrays": arrays, "deep": {"order": (arrays[0].T, 7)}, "step": 3}
    model = nn.Linear(1, 1)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, model=model, loader=loader)
        keeper.resume(model=model, loader=other)
    found = [*other.state["arrays"], other.state["deep"]["order"][0]]
    for one, two in zip(found, [*arrays, arrays[0].T], strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert np.array_equal(one, two)
    assert other.state["deep"]["order"][1] + other.state["step"] == 10

"""The body of a process: loads in place, interrupted at every step, each followed by a good one."""

from __future__ import annotations

import faulthandler
import gc
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from interrupting import Step, in_turn
from torch import nn

import torchlift
from torchlift.errors import MismatchError

FILES = (
    "_load/loading.py", "_plan/planner.py", "_model/hooks.py", "_load/fetch.py",
    "_sources/opening.py", "_sources/tensors.py",
    "_model/commit.py", "_model/watch.py", "_model/slots.py", "_model/ranks.py",
    "_transfer/reading.py", "_system/interrupts.py", "contextlib.py",
)  # fmt: skip


def model_of(number: float, way: str) -> nn.Module:
    """A live model of which every value says which one it is."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(number)
    if way != "plain":

        def write(module: Any, *_: object) -> None:
            module.calls = getattr(module, "calls", 0) + 1
            module.weight.data.mul_(3)

        model[0].register_load_state_dict_pre_hook(write)
        model[2].register_load_state_dict_post_hook(write)
    return model


def look(model: nn.Module) -> list[Any]:
    """Everything of a model that a load changes."""
    found: list[Any] = [getattr(module, "calls", 0) for module in model.modules()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        facts = tensor.requires_grad, tensor._version
        found.append((name, id(tensor), *facts, tensor.detach().numpy().tobytes()))
    return found


def values(model: nn.Module) -> list[Any]:
    """What a loaded model has, however often its tensors were written to."""
    return [(tensor.detach().numpy().tobytes()) for tensor in model.state_dict().values()]


def in_thread(call: Any) -> None:
    """Call it in another thread, which waits for whoever is loading; 20 s are for ever."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "something is still locked"
    assert not errors, errors


def main(way: str, how: str, folder: Path, every: int) -> None:
    """Interrupt every step in turn; print how many there were."""
    path, raw = folder / "model.safetensors", how == "raw"
    torchlift.save(model_of(2, "plain").state_dict(), path)
    if way == "failing":
        state = {**model_of(2, "plain").state_dict(), "other": torch.zeros(1)}
        torchlift.save(state, path)
    reference = model_of(1, way)
    if way != "failing":
        torchlift.load(reference, path)
    loaded, hold = values(reference), signal.getsignal(signal.SIGINT)
    nth, done = 1, 0
    while True:
        faulthandler.dump_traceback_later(300, exit=True)
        model = model_of(1, way)
        before = look(model)
        call = torchlift.plan if way == "planned" else torchlift.load

        def run(call: Any = call, model: Any = model) -> None:
            try:
                call(model, path)
            except MismatchError:
                assert way == "failing"

        step = Step(nth, FILES, raw=raw)
        met = step.run(run)
        if raw:  # an error's frames may refer to each other
            gc.collect()
        assert signal.getsignal(signal.SIGINT) is hold, step.at
        assert torch.is_grad_enabled(), step.at
        assert not torch.overrides._get_current_function_mode_stack(), step.at
        if step.count < nth:
            break
        done += 1
        if not raw:
            assert met, f"{step.at}: the interrupt was lost"
            same = look(model) == before
            if way in ("planned", "failing"):
                assert same, f"{step.at}: the model was changed"
            else:
                assert same or values(model) == loaded, f"{step.at}: half of the model is loaded"
        other = model_of(1, way)
        other[1] = model[1]  # what the interrupted load may still have locked
        if way != "failing":
            in_thread(lambda other=other: torchlift.load(other, path))  # type: ignore[misc]
            assert values(other) == loaded, step.at
        else:
            in_thread(lambda other=other: run(torchlift.load, other))  # type: ignore[misc]
        nth += every
    faulthandler.cancel_dump_traceback_later()
    assert done


if __name__ == "__main__":
    in_turn(main)

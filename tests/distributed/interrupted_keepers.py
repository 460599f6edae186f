"""The body of a process: a Keeper interrupted at every step, each followed by a good one."""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
from pathlib import Path
from typing import Any

import torch
from interrupting import Step, in_turn

import torchlift

FILES = (
    "distributed/keeper.py", "distributed/run_state.py", "distributed/saved_run.py",
    "distributed/staging.py",
    "distributed/folder.py", "distributed/folder_lock.py", "distributed/state_dict.py",
    "_model/ranks.py", "_model/commit.py", "_model/slots.py",
    "_system/interrupts.py", "contextlib.py",
)  # fmt: skip


def run_of(number: float) -> dict[str, Any]:
    """A model and its optimizer of which every value says which run it is."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(number)
            tensor.grad = torch.full_like(tensor, number)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def look(run: dict[str, Any]) -> list[bytes]:
    """The values of a run."""
    moments = [each["exp_avg"] for each in run["optimizer"].state.values()]
    return [t.detach().numpy().tobytes() for t in (*run["model"].parameters(), *moments)]


def main(way: str, how: str, folder: Path, every: int) -> None:
    """Interrupt every step of one method; the next keeper saves and resumes."""
    hold, nth, done, raw = signal.getsignal(signal.SIGINT), 1, 0, how == "raw"
    with torchlift.Keeper(folder, keep=1) as keeper:
        keeper.save(1, **run_of(1))
    first, second = look(run_of(1)), look(run_of(2))
    while True:
        faulthandler.dump_traceback_later(300, exit=True)
        keeper, run = torchlift.Keeper(folder, keep=1), run_of(2)
        keeper.resume()
        if way == "close":
            keeper.save(1, **run_of(1))
        calls = {
            "save": lambda k=keeper, r=run: k.save(1, **r),
            "close": lambda k=keeper: k.close(),
            "resume": lambda k=keeper, r=run: k.resume(**r),
        }
        numbers = random.getstate()
        step = Step(nth, FILES, raw=raw)
        met = step.run(calls[way])
        if raw:
            gc.collect()
        assert signal.getsignal(signal.SIGINT) is hold, step.at
        assert torch.is_grad_enabled(), step.at
        if step.count < nth:
            keeper.close()
            break
        assert met or raw, f"{step.at}: the interrupt was lost"
        if way == "resume" and not raw:
            assert look(run) in (first, second), f"{step.at}: half of the run is resumed"
        random.setstate(numbers)
        keeper.close()
        with torchlift.Keeper(folder, keep=1) as after:
            again = run_of(3)
            assert after.resume(**again) == 1, step.at
            assert look(again) in ((first, second) if way == "save" else (first,)), step.at
            after.save(1, **run_of(1))
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["step-000000001.pt"], f"{step.at}: {left}"
        done += 1
        nth += every
    faulthandler.cancel_dump_traceback_later()
    assert done


if __name__ == "__main__":
    in_turn(main)

"""The body of a process: a Keeper on two ranks of which one fails at its nth call.

Arguments: a folder, and how far it is from one call that fails to the next. It prints a line of
JSON for each trial: where, what went wrong, and the call. A trial goes on where the one before it
has left the folder, so that it shows what that one has left.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch._dynamo  # now: else each rank would import it for its first optimizer
import torch.distributed as dist
from faulty import KINDS, Fault
from stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchlift
from torchlift.distributed import folder_lock
from torchlift.errors import CheckpointError

RANKS = 2
WAYS = ("start", "save", "resume", "close")
HANGS = 300  # seconds after which a rank that waits for another is ended, and says where it is


class Trial(NamedTuple):
    """A call of a rank that fails.

    Attributes:
        way: what the keepers do; to start is to make them.
        kind: how it fails, see `Fault`.
        who: the rank.
        nth: the number of the call from 1 on; 0 for none.
    """

    way: str
    kind: str
    who: int
    nth: int


def run_of(number: int) -> dict[str, Any]:
    """A model of shards, its optimizer and a loader, of which every value says which run it is."""
    model = torch.nn.Linear(3, 4, bias=False)
    ranks = dist.get_world_size()
    local = torch.full((4 // ranks, 3), float(number))
    mesh = init_device_mesh("cpu", (ranks,))
    model.weight = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(number), momentum=0.9)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": Stateful(10 * number + dist.get_rank()),
    }


def number_of(run: dict[str, Any]) -> int:
    """Which run it is, all of it."""
    weights = run["model"].weight.to_local().unique().tolist()
    at, group = divmod(run["loader"].state, 10), run["optimizer"].param_groups[0]
    found = {*weights, group["lr"], at[0]}
    assert len(found) == 1, (found, run["loader"].state)
    assert at[1] == dist.get_rank()
    return int(found.pop())


def one_trial(folder: Path, way: str, fault: Fault, least: int) -> dict[str, Any]:
    """Go on where the last trial ended, then fail; return what came of it."""
    run = run_of(0)
    keeper = torchlift.Keeper(folder, keep=1, timeout=2 * HANGS)
    found = keeper.resume(**run)
    assert (found or 0) >= least, (found, least)
    assert found is None or number_of(run) == found
    number = (found or 0) + 1
    keeper.save(number, **run_of(number))
    keeper.wait()
    dist.barrier()
    (left,) = {*os.listdir(folder)} - {folder_lock.NAME}
    assert len(os.listdir(folder / left)) == RANKS + 1, os.listdir(folder / left)
    dist.barrier()
    run, outcome = run_of(number + 1), "done"
    if way == "close":
        keeper.save(number + 1, **run)
    if way == "start":
        keeper.close()
    started = time.monotonic()
    with suppress(KeyboardInterrupt), fault.armed():
        try:
            if way == "start":
                keeper = torchlift.Keeper(folder, keep=1, timeout=2 * HANGS)
            elif way == "save":
                keeper.save(number + 1, **run)
                keeper.wait()
            elif way == "resume":
                keeper.resume(**run)
            keeper.close()
        except (CheckpointError, MemoryError, OSError, RuntimeError, KeyboardInterrupt) as error:
            outcome = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    with suppress(CheckpointError):
        keeper.close()
    return {"outcome": outcome, "seconds": seconds, "count": fault.count, "at": fault.at,
            "least": number}  # fmt: skip


def be_rank(rank: int, folder: Path, trial: Trial, least: int) -> NoReturn:
    """Fail in a trial, and tell of it in a line."""
    with open(folder / f"{rank}.txt", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=2 * HANGS)
    )
    faulthandler.dump_traceback_later(HANGS, exit=True)
    fault = Fault(trial.kind, trial.nth if rank == trial.who else 0)
    found = one_trial(folder / "kept", trial.way, fault, least)
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def told_by(folder: Path, trial: Trial, least: int) -> dict[int, Any]:
    """Let the ranks go through a trial; return what each has told, or how it ended."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    pids, found = {}, dict[int, Any]()
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            be_rank(rank, folder, trial, least)
        pids[pid] = rank
    while pids:
        pid, ended = os.wait()
        rank = pids.pop(pid)
        path = folder / f"{rank}.json"
        if ended:
            text = (folder / f"{rank}.txt").read_text(encoding="utf-8")
            found[rank] = {"status": ended, "text": text}
        else:
            found[rank] = json.loads(path.read_text(encoding="utf-8"))
    return found


def judged(trial: Trial, found: dict[int, Any]) -> str:
    """What is wrong with what the ranks have told; an empty text: nothing."""
    for rank, told in found.items():
        dies = trial.nth and trial.kind == "death" and rank == trial.who
        if "status" in told and not (dies and told["status"] == signal.SIGKILL):
            return f"rank {rank} ended with {told['status']}: {told['text'][-6000:]}"
    if not trial.nth and any(told["outcome"] != "done" for told in found.values()):
        return f"without a fault: {found}"
    return ""


def main(folder: Path, every: int) -> None:
    """Let every nth call fail in each way; print a line for each trial."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with torchlift.Keeper(folder / "warm") as keeper:  # imports what it needs before the forks
        keeper.save(1, model=torch.nn.Linear(2, 1))
    turn = 0
    for way in WAYS:
        place, least = folder / way, 0
        count = told_by(place, Trial(way, "error", 0, 0), least)
        trials = [Trial(way, "error", 0, 0)]
        for kind, who in product(KINDS, range(RANKS)):
            calls, turn = count[who]["count"], turn + 7
            step = min(every, calls)
            trials += [
                Trial(way, kind, who, nth) for nth in range(1 + turn % step, calls + 1, step)
            ]
        for number, trial in enumerate(trials):
            told = told_by(place, trial, least)
            wrong, at = judged(trial, told), told[trial.who].get("at", "")
            least = max([least, *(each.get("least", 0) for each in told.values())])
            if wrong:  # the next ones have a folder of their own
                place, least = folder / f"{way}-after-{number}", 0
            print(json.dumps([way, wrong and f"{trial} {at}: {wrong}", at]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""The body of a process: jobs of some ranks that save all the time and are killed at any moment.

Arguments: a folder, how many kills, and how many ranks. Each job goes on where the one before it
was killed. It prints what went wrong, and how many kills left files.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from faulty_keepers import HANGS, number_of, run_of

import torchlift
from torchlift.distributed import folder_lock

KEEP = 2


def complete(folder: Path) -> dict[str, int]:
    """The checkpoints that are complete, and their steps."""
    names = [each.name for each in folder.glob("step-*") if each.is_file()]
    names += [each.parent.name for each in folder.glob("step-*/.metadata")]
    return {name: int(name[5:14]) for name in names}


def be_rank(rank: int, ranks: int, folder: Path, least: int) -> NoReturn:
    """Go on where the last job ended, look at what it has left, and save until somebody kills."""
    with open(folder / f"{rank}.txt", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=HANGS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    run, saved = run_of(0), folder / "kept"
    keeper = torchlift.Keeper(saved, keep=KEEP)
    last = max(complete(saved).values(), default=0)
    assert last >= least, (last, least)
    found = keeper.resume(**run) or 0
    assert found == last, (found, last)
    assert not found or number_of(run) == found
    keeper.save(found + 1, **run_of(found + 1))
    keeper.wait()
    dist.barrier()
    left = sorted({*os.listdir(saved)} - {folder_lock.NAME})
    assert left == sorted(complete(saved)), left
    assert len(left) == min(KEEP, found + 1), left
    dist.barrier()
    (folder / f"{rank}.ready").touch()
    for number in itertools.count(found + 2):
        keeper.save(number, **run_of(number))
    raise AssertionError("nobody has killed it")


def kill_jobs(folder: Path, ranks: int, kills: int) -> tuple[str, int]:
    """Kill one job after the other; return what went wrong, and how many kills left files."""
    chance, least, partial = random.Random(ranks), 0, 0
    folder.mkdir()
    for _ in range(kills + 1):
        for path in [folder / "store", *folder.glob("*.ready")]:
            path.unlink(missing_ok=True)
        pids = {}
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                be_rank(rank, ranks, folder, least)
            pids[pid] = rank
        while len([*folder.glob("*.ready")]) < ranks:
            time.sleep(0.005)
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended:
                rank = pids.pop(ended)
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return f"rank {rank}: {(folder / f'{rank}.txt').read_text('utf-8')}", partial
        time.sleep(chance.uniform(0, 0.3))
        least = max(complete(folder / "kept").values())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        left = {*os.listdir(folder / "kept")} - {folder_lock.NAME}
        partial += left != {*complete(folder / "kept")}
    return "", partial


def main(folder: Path, kills: int, ranks: int) -> None:
    """Kill jobs at random moments."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with torchlift.Keeper(folder / "warm") as keeper:  # imports what it needs before the forks
        keeper.save(1, model=torch.nn.Linear(2, 1))
    print(json.dumps(kill_jobs(folder / "job", ranks, kills)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

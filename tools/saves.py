"""Measure what a save costs a step loop on two ranks: a bare copy, a keeper, torchtitan's manager.

    python tools/saves.py --rounds 1     2 GiB in ten minutes; writes docs/_includes/saves.rst
    python tools/saves.py --size 64MiB   another size; the table is printed only

The model is sharded with FSDP2, its optimizer is Adam. Each way runs in new processes, and the ways
take turns. torchtitan's manager comes from torchtitan, which is in ``.venv/apart``. A CPU has no
pinned memory and no streams, so its ``async_with_pinned_mem`` gets a stager without these two.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchlift
from torchlift._system.text import parse_size
from torchlift.distributed import on_ranks

TABLE = Path(__file__).resolve().parent.parent / "docs" / "_includes" / "saves.rst"
SIZE, RANKS, LAYERS = "2GiB", 2, 64
COPY, KEEPER = "copy", "keeper"
DASH = "\N{EN DASH}"
#: What a step frees leaves the process, whatever the steps before have freed: else the peaks of the
#: steps differ by more than the Keeper adds.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
WAYS = {
    COPY: "a copy of the shards into existing memory",
    KEEPER: "`torchlift.Keeper`",
    "disabled": "torchtitan, ``disabled``",
    "async": "torchtitan, ``async``",
    "async_with_pinned_mem": "torchtitan, ``async_with_pinned_mem``, not pinned",
}


class Run(NamedTuple):
    """What one way took on one rank: seconds of each save, and bytes.

    Attributes:
        first: until the first save returned, which makes room.
        blocked: until each of the others did.
        total: until each of the others was on the disk.
        shard: bytes of the state on this rank.
        memory: bytes that the saves added at the peak, with those of processes of their own.
    """

    first: float
    blocked: list[float]
    total: list[float]
    shard: int
    memory: int


class Sampler(threading.Thread):
    """Memory of this process and of those that it has started, owned or shared among them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        this = os.getpid()
        total = kibibytes(this, "RssAnon") + kibibytes(this, "RssShmem")
        for task in os.listdir(f"/proc/{this}/task"):
            for child in Path(f"/proc/{this}/task/{task}/children").read_text().split():
                total += kibibytes(int(child), "RssAnon")  # what they share is counted above
        return total * 1024


def kibibytes(pid: int, field: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return 0
    return int(status.partition(f"{field}:")[2].split()[0]) if f"{field}:" in status else 0


class Copy:
    """The floor: what the next step changes has to be copied once."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.copies = tensors, [torch.zeros_like(t) for t in tensors]

    def save(self, step: int) -> Callable[[], bool]:
        with torch.no_grad():
            for copy, tensor in zip(self.copies, self.tensors, strict=True):
                copy.copy_(tensor)
        return lambda: True

    def wait(self) -> None:
        """Wait before the next step changes what is still being copied."""

    def close(self) -> None:
        """Wait for the last save."""


class Kept(Copy):
    def __init__(self, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.keeper = torchlift.Keeper(folder, keep=2)
        self.state = {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> Callable[[], bool]:
        self.keeper.save(step, self.state)
        path = f"step-{step:09}"
        return lambda: self.keeper.report is not None and path in self.keeper.report.path

    def wait(self) -> None:
        """Nothing: the copy is made before `save` returns."""

    def close(self) -> None:
        self.keeper.close()


class Optimizers:
    """What torchtitan passes: states by the names of parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Titan(Copy):
    def __init__(
        self, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, mode: str
    ) -> None:
        from torchtitan.components.checkpoint import CheckpointManager

        config = CheckpointManager.Config(
            enable=True, interval=1, folder=folder, keep_latest_k=2, async_mode=mode
        )
        optimizers: Any = Optimizers(model, optimizer)
        self.manager = config.build(
            dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=None,
            states={}, sd_adapter=None,
        )  # fmt: skip
        if mode == "async_with_pinned_mem":
            self.manager.stager = DefaultStager(StagingOptions(False, True, True, False))

    def save(self, step: int) -> Callable[[], bool]:
        self.manager.save(step)
        saving = self.manager.save_future
        return lambda: saving is None or saving.done()

    def wait(self) -> None:
        self.manager.maybe_wait_for_staging()

    def close(self) -> None:
        self.manager.maybe_wait_for_saving()
        self.manager.close()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The shards of this rank: parameters and moments."""
    found = [*model.parameters()]
    found += [value for state in optimizer.state.values() for value in state.values()]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found]


def until(is_done: Callable[[], bool]) -> float:
    """When it was done."""
    while not is_done():
        time.sleep(0.005)
    return time.perf_counter()


def run(way: str, size: int, saves: int, folder: str) -> Run:
    """Train, save, and train on until it is on the disk; on each rank."""
    torch.manual_seed(0)
    width = RANKS * round((size / 4 / 3 / LAYERS) ** 0.5 / RANKS)  # no rank has a larger shard
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())

    saver: Any = None
    waits: list[float] = []

    def step() -> None:
        model(torch.ones(2, width)).square().mean().backward()
        began = time.perf_counter()
        if saver is not None:
            saver.wait()
        waits.append(time.perf_counter() - began)
        optimizer.step()
        optimizer.zero_grad()

    sampler = Sampler()
    sampler.start()
    for _ in range(6):
        step()
    gc.collect()
    without, sampler.peak = sampler.peak, 0
    tensors = tensors_of(model, optimizer)
    if way == COPY:
        saver = Copy(tensors)
    elif way == KEEPER:
        saver = Kept(folder, model, optimizer)
    else:
        saver = Titan(folder, model, optimizer, way)
    blocked, total = [], []
    for number in range(1, saves + 2):
        for _ in range(2):
            step()
        dist.barrier()
        waits.clear()
        began = time.perf_counter()
        is_done = saver.save(number)
        returned = time.perf_counter()
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(until, is_done)
            everywhere = torch.zeros(1)
            while not everywhere:
                step()
                everywhere.fill_(written.done())
                dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        blocked.append(returned - began + waits[0])
        total.append(written.result() - began)
    sampler.ended.set()
    sampler.join()
    saver.close()
    shard = sum(t.nbytes for t in tensors)
    return Run(blocked[0], blocked[1:], total[1:], shard, sampler.peak - without)


def slowest(runs: list[Run]) -> Run:
    """What all ranks waited for, and the most memory of one."""
    first, blocked, total, shard, memory = zip(*runs, strict=True)
    each = [[max(ranks) for ranks in zip(*times, strict=True)] for times in (blocked, total)]
    return Run(max(first), *each, max(shard), max(memory))


def measure(size: int, rounds: int, saves: int, ways: list[str]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                arguments = way, size, saves, folder
                runs = on_ranks(RANKS, run, *arguments, timeout=1800.0, environment=GIVES_BACK)
            found[way].append(slowest(runs))
            blocked, total = (median(x) for x in found[way][-1][1:3])
            print(f"round {number + 1}: {way}: {blocked:.3f} s, {total:.3f} s", file=sys.stderr)
    return found


def table(size: int, found: dict[str, list[Run]]) -> str:
    """The figures as a table of reStructuredText."""
    floor = median(each for run in found[COPY] for each in run.blocked)
    rounds, saves = len(found[COPY]), len(found[COPY][0].blocked)
    shard = found[COPY][0].shard / 2**20
    lines = [
        ".. Written by tools/saves.py.",
        "",
        "Seconds that a save blocks training",
        "~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~",
        "",
        f"The model has {LAYERS} layers under FSDP2, and Adam. Its state takes {size / 2**20:,.0f} "
        f"MiB on {RANKS} ranks of gloo, {shard:,.0f} MiB on each.",
        f"The machine is virtual and has {len(os.sched_getaffinity(0))} cores. Each way saves "
        f"{rounds * saves} times in new processes, while training continues.",
        "The table shows medians, with the lowest and the highest. Memory is what a rank and its "
        "child processes add at the peak. The last way copies during the next forward and backward "
        "pass. It waits only before the optimizer's step. The keeper copies before ``save`` "
        "returns, so your loop may change any tensor after that.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: 34 22 10 10 12 12",
        "   :class: tl-figures",
        "",
    ]
    head = "Way", "Seconds blocked", "Copies", "First", "On disk after", "MiB added"
    rows = [head]
    for way, runs in found.items():
        blocked = [each for run in runs for each in run.blocked]
        total = f"{median(each for run in runs for each in run.total):.2f}"
        rows.append(
            (
                WAYS[way],
                f"{median(blocked):.2f} ({min(blocked):.2f} {DASH} {max(blocked):.2f})",
                f"{median(blocked) / floor:.2f}",
                f"{median(run.first for run in runs):.2f}",
                DASH if way == COPY else total,
                f"{max(run.memory for run in runs) / 2**20:,.0f}",
            )
        )
    for cells in rows:
        lines += [f"   {'* -' if n == 0 else '  -'} {cell}" for n, cell in enumerate(cells)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", help="of the state, on both ranks; without it: all that is shown")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="in a round, beside the first")
    parser.add_argument("--only", help="names of ways; a copy is always measured")
    args = parser.parse_args(arguments)
    size = parse_size(args.size or SIZE)
    ways = [way for way in WAYS if not args.only or way in [COPY, *args.only.split(",")]]
    text = table(size, measure(size, args.rounds, args.saves, ways))
    print(text)
    if args.size is None:
        TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

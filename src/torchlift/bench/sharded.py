"""A full checkpoint into a sharded model, each way in turn, on ranks of its own.

    python -m torchlift.bench.sharded --ranks 2 --size 2GiB

prints the time of the slowest rank for each way, how many times faster it is than broadcasting from
rank 0, and each rank's anonymous memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

from torchlift._system import parse_size
from torchlift.distributed.launch import launch_command

_BROADCAST = "broadcast_from_rank0"
_WAYS = (_BROADCAST, "full_state_dict, mmap", "torchlift read", "torchlift mmap")


def main(argv: Sequence[str] | None = None) -> int:
    """Make a checkpoint, start the ranks, print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchlift.bench.sharded")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--size", type=parse_size, default=2 << 30, help="such as 2GiB")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; medians are printed")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-") as folder:
        from torchlift.bench.generate import make_checkpoint

        path, out = os.path.join(folder, "full.pt"), os.path.join(folder, "result.json")
        shape = make_checkpoint(path, nbytes=args.size)
        results: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
        # Memory is sampled in a round of its own, since that takes time from the others.
        for measured in [*[False] * args.repeat, True]:
            for way in _WAYS:
                job = json.dumps([way, path, list(shape), measured, out])
                status = _start(args.ranks, job)
                if status:
                    return status
                with open(out, encoding="utf-8") as file:
                    results[way].append(tuple(json.load(file)))
    print(table(_merged(results)))
    return 0


def _start(ranks: int, job: str) -> int:
    """One way once, in fresh processes: memory that one way has freed would help the next."""
    command = launch_command(ranks, "-m", "torchlift.bench.sharded")
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TORCHLIFT_BENCH": job}
    return subprocess.run(command, env=environment, check=False).returncode


def _merged(
    results: dict[str, list[tuple[float, float]]],
) -> dict[str, list[tuple[float, float]]]:
    """Times of the rounds that were not sampled, each with the memory of the one that was."""
    return {
        way: [(seconds, rounds[-1][1]) for seconds, _ in rounds[:-1]]
        for way, rounds in results.items()
    }


def table(results: dict[str, list[tuple[float, float]]]) -> str:
    """The results as text.

    Args:
        results: way -> for each round (seconds of the slowest rank, most anonymous bytes).

    Example:
        >>> print(table({"broadcast_from_rank0": [(2.0, 1 << 20)], "torchlift read": [(0.1, 0)]}))
        way                    seconds   faster   anonymous memory per rank
        broadcast_from_rank0     2.000       1x     1.0 MiB
        torchlift read           0.100      20x     0.0 MiB
    """
    times = {way: median(seconds for seconds, _ in rounds) for way, rounds in results.items()}
    lines = [f"{'way':<22} {'seconds':>7}   {'faster':>6}   anonymous memory per rank"]
    for way, rounds in results.items():
        ratio = times[_BROADCAST] / times[way]
        memory = max(nbytes for _, nbytes in rounds) / 2**20
        lines.append(f"{way:<22} {times[way]:>7.3f}   {ratio:>5.0f}x   {memory:>5.1f} MiB")
    return "\n".join(lines)


def _rank(job: str) -> None:
    """One process: one way, after a small load that is not counted."""
    import torch.distributed as dist

    from torchlift.bench.generate import make_checkpoint

    way, path, shape, measured, out = json.loads(job)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        small = os.path.join(folder, "small.pt")
        _timed(way, small, make_checkpoint(small, nbytes=1 << 20, tensors=4))
    found = _timed(way, path, shape, measured)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump([max(seconds for seconds, _ in gathered), max(a for _, a in gathered)], file)
    dist.barrier()
    # The group's threads may still run when the interpreter is torn down, and then abort.
    os._exit(0)


def _timed(
    way: str, path: str, shape: Sequence[int], measured: bool = False
) -> tuple[float, float]:
    """(seconds, anonymous bytes added if they are measured) on this rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from torchlift.bench.generate import Stack
    from torchlift.measure import memory

    with torch.device("meta"):
        model = Stack(*shape)
    fully_shard(model)
    dist.barrier()
    load = _load(way)
    use = memory() if measured else None
    with use or nullcontext():
        start = time.perf_counter()
        load(model, path)
        seconds = time.perf_counter() - start
    return seconds, use.added_anonymous if use else 0


def _load(way: str) -> Callable[[Any, str], object]:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as theirs

    import torchlift

    def torch_way(model: Any, path: str) -> None:
        from_rank0 = way == _BROADCAST
        needed = not from_rank0 or dist.get_rank() == 0
        state = torch.load(path, mmap=True, weights_only=True) if needed else {}
        options = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        theirs.set_model_state_dict(model, state, options=options)

    if way.startswith("torchlift"):
        source: Any = way.rpartition(" ")[2]
        return lambda model, path: torchlift.load(model, path, source=source)
    return torch_way


if __name__ == "__main__":
    if "TORCHLIFT_BENCH" in os.environ:
        _rank(os.environ["TORCHLIFT_BENCH"])
    else:
        sys.exit(main())

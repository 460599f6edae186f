"""A full checkpoint into a sharded model, each way in turn, on ranks of its own.

    python -m torchlift.bench.sharded --ranks 2 --size 2GiB

prints the time of the slowest rank for each way, how many times faster it is than broadcasting from
rank 0, and each rank's anonymous memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import torchlift
from torchlift._system import parse_size
from torchlift.bench.generate import Stack, make_checkpoint
from torchlift.distributed import on_ranks
from torchlift.measure import memory

_TIMEOUT = 3600.0  # seconds for one way, its processes' start included


def _load_with_torch(model: nn.Module, path: str, *, broadcast: bool) -> None:
    needed = not broadcast or dist.get_rank() == 0
    state = torch.load(path, mmap=True, weights_only=True) if needed else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, state, options=options)


_Way = Callable[[nn.Module, str], object]
_BROADCAST = "broadcast_from_rank0"
_WAYS: Mapping[str, _Way] = {
    _BROADCAST: partial(_load_with_torch, broadcast=True),
    "full_state_dict, mmap": partial(_load_with_torch, broadcast=False),
    "torchlift read": partial(torchlift.load, source="read"),
    "torchlift mmap": partial(torchlift.load, source="mmap"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make a checkpoint, run each way on ranks, print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchlift.bench.sharded")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--size", type=parse_size, default=2 << 30, help="such as 2GiB")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; medians are printed")
    args = parser.parse_args(argv)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in _WAYS}
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-") as folder:
        files = []
        for name, nbytes, tensors in (("small.pt", 1 << 20, 4), ("full.pt", args.size, 64)):
            path = os.path.join(folder, name)
            files.append((path, make_checkpoint(path, nbytes=nbytes, tensors=tensors)))
        for _ in range(args.repeat):
            for name, way in _WAYS.items():
                # Processes of its own: memory that one way has freed would help the next.
                ranks = on_ranks(args.ranks, _rank, way, files, timeout=_TIMEOUT)
                rounds[name].append((max(s for s, _ in ranks), max(added for _, added in ranks)))
    print(table(rounds))
    return 0


def table(results: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return the results as text.

    Args:
        results: way -> for each round (seconds of the slowest rank, most anonymous bytes added).

    Example:
        >>> print(table({"broadcast_from_rank0": [(2.0, 1 << 20)], "torchlift read": [(0.1, 0)]}))
        way                    seconds   faster   anonymous memory per rank
        broadcast_from_rank0     2.000       1x     1.0 MiB
        torchlift read           0.100      20x     0.0 MiB
    """
    times = {name: median(seconds for seconds, _ in rounds) for name, rounds in results.items()}
    lines = [f"{'way':<22} {'seconds':>7}   {'faster':>6}   anonymous memory per rank"]
    for name, rounds in results.items():
        ratio = times[_BROADCAST] / times[name]
        added = max(nbytes for _, nbytes in rounds) / 2**20
        lines.append(f"{name:<22} {times[name]:>7.3f}   {ratio:>5.0f}x   {added:>5.1f} MiB")
    return "\n".join(lines)


def _rank(way: _Way, files: Sequence[tuple[str, Sequence[int]]]) -> tuple[float, float]:
    """Load each file in one way; return the seconds and the anonymous bytes of the last load."""
    for path, shape in files:
        with torch.device("meta"):
            model = Stack(*shape)
        fully_shard(model)
        dist.barrier()
        # A sample takes 17 us of the interpreter: a hundred in a second do not slow a load down.
        with memory(interval=0.01) as use:
            start = time.perf_counter()
            way(model, path)
            seconds = time.perf_counter() - start
    return seconds, use.added_anonymous


if __name__ == "__main__":
    sys.exit(main())

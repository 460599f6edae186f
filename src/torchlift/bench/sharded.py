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
from contextlib import nullcontext
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
    seconds: dict[str, list[float]] = {name: [] for name in _WAYS}
    added = dict.fromkeys(_WAYS, 0.0)
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-") as folder:
        path = os.path.join(folder, "full.pt")
        shape = make_checkpoint(path, nbytes=args.size)
        # Memory is sampled in a round of its own, since that takes time from the others.
        for sampled in [*[False] * args.repeat, True]:
            for name, way in _WAYS.items():
                # Processes of its own: memory that one way has freed would help the next.
                ranks = on_ranks(args.ranks, _rank, way, path, shape, sampled, timeout=_TIMEOUT)
                if sampled:
                    added[name] = max(nbytes for _, nbytes in ranks)
                else:
                    seconds[name].append(max(taken for taken, _ in ranks))
    print(table({name: (median(seconds[name]), added[name]) for name in _WAYS}))
    return 0


def table(results: Mapping[str, tuple[float, float]]) -> str:
    """Return the results as text.

    Args:
        results: way -> (seconds of the slowest rank, most anonymous bytes that a rank added).

    Example:
        >>> print(table({"broadcast_from_rank0": (2.0, 1 << 20), "torchlift read": (0.1, 0)}))
        way                    seconds   faster   anonymous memory per rank
        broadcast_from_rank0     2.000       1x     1.0 MiB
        torchlift read           0.100      20x     0.0 MiB
    """
    lines = [f"{'way':<22} {'seconds':>7}   {'faster':>6}   anonymous memory per rank"]
    for way, (seconds, nbytes) in results.items():
        ratio = results[_BROADCAST][0] / seconds
        lines.append(f"{way:<22} {seconds:>7.3f}   {ratio:>5.0f}x   {nbytes / 2**20:>5.1f} MiB")
    return "\n".join(lines)


def _rank(way: _Way, path: str, shape: Sequence[int], sampled: bool) -> tuple[float, float]:
    """Load in one way on this rank, after a small load that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        small = os.path.join(folder, "small.pt")
        _timed(way, small, make_checkpoint(small, nbytes=1 << 20, tensors=4), False)
    return _timed(way, path, shape, sampled)


def _timed(way: _Way, path: str, shape: Sequence[int], sampled: bool) -> tuple[float, float]:
    """Return seconds, and anonymous bytes added if they are sampled, of a load on this rank."""
    with torch.device("meta"):
        model = Stack(*shape)
    fully_shard(model)
    dist.barrier()
    use = memory() if sampled else None
    with use or nullcontext():
        start = time.perf_counter()
        way(model, path)
        seconds = time.perf_counter() - start
    return seconds, use.added_anonymous if use else 0.0


if __name__ == "__main__":
    sys.exit(main())

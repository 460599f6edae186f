"""One rank of a save that somebody kills.

Arguments: folder, rank, number of ranks, ranks that die, where, and the name of what is saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchlift
from torchlift._transfer import write
from torchlift.distributed import CheckpointWriter
from torchlift.errors import CheckpointError

warnings.simplefilter("ignore")


def die(*args: object, **options: object) -> None:
    """All victims at once: one that outlived another would meet its death as an error."""
    folder, rank, _, victims, *_ = sys.argv[1:]
    Path(folder, f"{rank}.dying").touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all(Path(folder, f"{victim}.dying").exists() for victim in victims.split(",")):
            break
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in(count: int, function: Any) -> Any:
    """The function, whose call number `count` is the last thing that this process does."""
    calls = iter(range(1, count))
    return lambda *args: function(*args) if next(calls, None) else die()


def main() -> None:
    folder, rank, world, victims, where, name = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=30),
    )
    mesh = init_device_mesh("cpu", (int(world),))
    values = {f"w{i}": torch.full((9, 3), 2.0 + i) for i in range(6)}
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
    if rank in victims.split(","):
        if where == "write":
            # A rank writes its own small file in one call. The first rank then writes one of all.
            write.write_at = dies_in(2 if victims == "0" and name != "dcp" else 1, write.write_at)
        else:
            setattr(os, where, die)
    # Torch's own way ends with torch's own error.
    expected = (CheckpointError, RuntimeError) if name == "dcp" else CheckpointError
    result = Path(folder, f"{rank}.json")
    started = time.monotonic()
    try:
        path = Path(folder, "saved", name)
        if name == "dcp":
            torch.distributed.checkpoint.save(state, storage_writer=CheckpointWriter(path))
        else:
            torchlift.save(state, path, max_shard_size=200 if name.endswith("json") else None)
    except expected as error:
        result.write_text(json.dumps([str(error), time.monotonic() - started]), encoding="utf-8")
    os._exit(0)  # no barrier: a rank is dead


if __name__ == "__main__":
    main()

"""Checks of transformers' Trainer with DDP that run on every rank of a process group."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import main

sys.path.insert(0, str(Path(__file__).parent))

warnings.simplefilter("ignore")
OUT = Path(sys.argv[1])


def run(folder: Path, draws: int) -> tuple[Any, Any]:
    from test_transformers import KeeperCallback, Noisy, trainer_of

    torch.manual_seed(0)
    callback, model = KeeperCallback(folder, keep=None), Noisy()
    trainer = trainer_of(OUT / "out", callback, model, save_steps=2, ddp_backend="gloo")
    path = callback.resume(trainer)
    torch.rand(1 + draws)  # the seed is the Trainer's, of the order of the data too
    trainer.train(resume_from_checkpoint=path)
    return model, trainer


def a_trainer_goes_on_bit_by_bit() -> None:
    """Each rank draws other numbers, and reads other rows."""
    rank = dist.get_rank()
    # Asked for, and not used: the ranks are there already.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE="2")
    first, trainer = run(OUT / "kept", rank)
    assert trainer.args.world_size == 2
    dist.barrier()
    for path in (OUT / "kept").glob("step-*") if rank == 0 else ():
        if int(path.name[5:14]) > 2:
            shutil.rmtree(path)  # from two ranks it is a DCP folder
    dist.barrier()
    again, _ = run(OUT / "kept", 7)
    assert again.losses == first.losses[2:]
    assert len(again.losses) == 4
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    losses: list[Any] = [None, None]
    dist.all_gather_object(losses, first.losses)
    assert losses[0] != losses[1]


if __name__ == "__main__":
    main({"a_trainer_goes_on_bit_by_bit": a_trainer_goes_on_bit_by_bit})

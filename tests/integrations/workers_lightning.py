"""Checks of Lightning with DDP that run on every rank of a process group."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from ranks import main

sys.path.insert(0, str(Path(__file__).parent))
from test_lightning import Noisy, Stream, trainer_of

warnings.simplefilter("ignore")
OUT = Path(sys.argv[1])


class Group(LightningEnvironment):
    """The ranks that are there already."""

    creates_processes_externally = True  # type: ignore[assignment]

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def fit(folder: Path, start: int, path: Path | None = None) -> Any:
    environment = Group()
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=environment)
    model = Noisy()
    torch.manual_seed(start)
    trainer = trainer_of(folder, {"every_n_train_steps": 4}, strategy=strategy, devices=2)
    trainer.fit(model, Stream(start), ckpt_path=path)
    return model


def a_trainer_goes_on_bit_by_bit() -> None:
    """Each rank draws other numbers, and reads other data."""
    torch.manual_seed(0)
    first = fit(OUT / "a", 10 + dist.get_rank())
    torch.manual_seed(7)
    again = fit(OUT / "b", 50 + dist.get_rank(), OUT / "a" / "step=4.ckpt")
    assert again.losses == first.losses[4:]
    assert len(again.losses) == 8
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    losses: list[Any] = [None, None]
    dist.all_gather_object(losses, first.losses)
    assert losses[0] != losses[1]


if __name__ == "__main__":
    main({"a_trainer_goes_on_bit_by_bit": a_trainer_goes_on_bit_by_bit})

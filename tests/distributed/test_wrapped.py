"""FullyShardedDataParallel: no rank's flat piece is saved for the whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import on
from state_models import ON_0
from wrapped_models import WRAPPERS, fsdp1, net

import torchlift
from torchlift.distributed import get_optimizer_state_dict
from torchlift.errors import CheckpointError, PlacementError


@on(2)
def test_an_optimizer_of_flat_pieces_is_refused_on_all_ranks(folder: Path) -> None:
    """Before anything is written, with its model and without; what gathers it is saved."""
    for original in (True, False):
        model, optimizer = fsdp1(original=original)
        for number, state in enumerate(({"model": model, "optimizer": optimizer}, [optimizer])):
            path = folder / f"flat-{original}-{number}.pt"
            for options in ({}, {"process_group": dist.group.WORLD}):
                with pytest.raises(PlacementError, match="get_optimizer_state_dict") as caught:
                    torchlift.save(state, path, **options)
                assert caught.value.entry == "Adam"
                dist.barrier()
                assert not path.exists()
        gathered = get_optimizer_state_dict(model, optimizer, options=ON_0)
        if dist.get_rank() == 0:
            torchlift.save(gathered, folder / f"whole-{original}.pt")
            with torchlift.open(folder / f"whole-{original}.pt") as ckpt:
                assert ckpt.entries["state.0.weight.exp_avg"].shape == (6, 4)
        dist.barrier()


@on(2)
def test_a_keeper_refuses_flat_pieces_on_all_ranks(folder: Path) -> None:
    """With one error that names the object, to save and to resume."""
    model, optimizer = fsdp1(original=True)
    with torchlift.Keeper(folder, background=False) as keeper:
        for call in (
            lambda: keeper.save(1, model=model, optimizer=optimizer),
            lambda: keeper.save(1, model=model),
        ):
            with pytest.raises(CheckpointError, match=r"FullyShardedDataParallel.*fully_shard"):
                call()
        assert set(os.listdir(folder)) <= {".keeper.lock"}
        good = WRAPPERS["fsdp root"](net())
        assert keeper.save(1, model=good)
        assert keeper.resume(model=good) == 1

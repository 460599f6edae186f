"""Values that only look replicated: different on two ranks, under one name."""

from __future__ import annotations

import os
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, on
from state_models import ON_0, WHOLE
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor

import torchlift
import torchlift.distributed as ours
from torchlift.distributed import CheckpointWriter

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


@on(2)
def test_the_writer_refuses_shapes_that_differ(folder: Path) -> None:
    """Of such tensors, no rank's values can stand for all."""
    rank = dist.get_rank()
    for asked in ("equal", "rank0"):
        writer = CheckpointWriter(folder / "saved", replicated=asked)  # type: ignore[arg-type]
        with pytest.raises(CheckpointException, match="'codes': the ranks hold different"):
            dcp.save({"codes": torch.ones(3 + rank)}, storage_writer=writer)
    wrong = CheckpointWriter(folder / "saved", replicated="rank0" if rank else "equal")
    with pytest.raises(CheckpointException, match="same replicated=; expected 'equal', as on"):
        dcp.save({"w": torch.ones(2)}, storage_writer=wrong)
    with pytest.raises(ValueError, match="replicated='all': expected"):
        CheckpointWriter(folder, replicated="all")  # type: ignore[arg-type]


@on(2)
def test_values_with_one_crc_are_told_apart(folder: Path) -> None:
    """Else one of them would be saved for all."""
    text = bytearray(b"buckeroo" if dist.get_rank() else b"plumless")
    assert zlib.crc32(text) == 0x4DDB0C25
    state = {"w": torch.frombuffer(text, dtype=torch.uint8)}
    with pytest.raises(torchlift.PlacementError, match="'w': the ranks hold different values"):
        torchlift.save(state, f"{folder}/x.pt", process_group=dist.group.WORLD)
    with pytest.raises(CheckpointException, match="'w': the ranks hold different values"):
        dcp.save(state, storage_writer=CheckpointWriter(f"{folder}/saved"))
    dist.barrier()
    assert os.listdir(folder) == []


class Experts(nn.Module):
    """A sharded weight beside plain experts, which are others on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        mesh = cpu_mesh()
        self.router = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        self.expert = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.full((2,), float(dist.get_rank())))


@on(2)
def test_plain_values_beside_shards_are_compared_if_one_dict_stands_for_all_ranks() -> None:
    """A plain get compares nothing, and each rank has its own values, as in torch."""
    model = Experts()
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert len(ours.get_state_dict(model, optimizer, options=ON_0)) == 2
    state = optimizer.state[model.expert]
    for tensor, name in (
        (state["exp_avg"], r"'state\.expert\.exp_avg'"),
        (state["step"], r"'state\.expert\.step'"),
        (model.expert.data, "'expert'"),
    ):
        kept = tensor.clone()
        tensor.add_(dist.get_rank())
        for options in (None, WHOLE):  # each rank has its own
            assert len(ours.get_state_dict(model, optimizer, options=options)) == 2
        call = partial(ours.get_state_dict, model, optimizer, options=ON_0)
        with pytest.raises(ours.StateDictMismatch, match=f"{name}: the ranks hold diff") as caught:
            call()
        assert "Pass process_group=" in str(caught.value)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        assert call(process_group=alone[dist.get_rank()])[0].keys() >= {"expert"}
        tensor.copy_(kept)
    # Nothing ties the ranks of a plain model together, so the caller names them.
    plain = nn.Linear(2, 1)
    nn.init.constant_(plain.bias, dist.get_rank())
    assert float(ours.get_model_state_dict(plain)["bias"]) == dist.get_rank()
    with pytest.raises(ours.StateDictMismatch, match="the ranks hold different values"):
        ours.get_model_state_dict(plain, options=ON_0, process_group=dist.group.WORLD)

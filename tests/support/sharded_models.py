"""Models with sizes that nothing divides, and functions that distribute them over any mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

SHARD_DIMS = ("fsdp", "dp_shard", "shard", "cp")
REPLICATE_DIMS = ("dp", "dp_replicate", "replicate")

PLAN: dict[str, Any] = {
    "up": ColwiseParallel(), "down": RowwiseParallel(), "wide": ColwiseParallel(),
    "words": RowwiseParallel(), "places": ColwiseParallel(), "norm": SequenceParallel(),
}  # fmt: skip


class Odd(nn.Module):
    """Sizes that nothing divides, biases, embeddings, norms, a stack of matrices, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.places = nn.Embedding(5, 7)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.wide = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(6)
        self.thin = nn.Parameter(torch.randn(1, 5))
        self.turned = nn.Parameter(torch.randn(9, 4))
        self.experts = nn.Parameter(torch.randn(3, 8, 5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("gaps", torch.randn(5))
        self.register_buffer("inv_freq", 1.0 / torch.arange(1.0, 5.0), persistent=False)


def saved() -> dict[str, torch.Tensor]:
    """The values of `Odd`, one of them transposed and one with gaps in the file."""
    torch.manual_seed(0)
    state = Odd().state_dict()
    state["turned"] = state["turned"].t().contiguous().t()
    state["gaps"] = state["gaps"].repeat_interleave(2)[::2]
    return state


def distribute(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Put an `Odd` on a mesh."""
    dims = mesh.mesh_dim_names or ()
    if "tp" in dims:
        parallelize_module(model, mesh["tp"], PLAN)
    if dims == ("tp",):  # FSDP takes no such tensor
        packed = distribute_tensor(model.experts, mesh, [_StridedShard(1, split_factor=2)])
        model.experts = nn.Parameter(packed)
    shards = tuple(name for name in dims if name in SHARD_DIMS)
    if not shards:
        return model
    copies = tuple(name for name in dims if name in REPLICATE_DIMS)
    over: DeviceMesh = mesh[(*copies, *shards)] if copies else mesh[shards]
    if len(shards) > 1:
        over = over._flatten("flat")
    fully_shard(model.down, mesh=over)
    return fully_shard(model, mesh=over)

"""Models with sizes that nothing divides, and functions that distribute them over any mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
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


def distribute(
    model: Any, mesh: DeviceMesh, shard: dict[str, int] | None = None, ignored: Iterable[str] = ()
) -> nn.Module:
    """Put an `Odd` on a mesh, with what FSDP shards along another dimension or leaves alone."""
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
    named = dict(model.named_parameters())
    alone = {named[name] for name in ignored}
    elsewhere = {id(named[name]): Shard(dim) for name, dim in (shard or {}).items()}
    rule = (lambda parameter: elsewhere.get(id(parameter))) if shard else None
    fully_shard(model.down, mesh=over, shard_placement_fn=rule, ignored_params=alone)
    return fully_shard(model, mesh=over, shard_placement_fn=rule, ignored_params=alone)


class Staged(nn.Module):
    """Five layers between tied ends, and a table that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict({str(n): nn.Linear(6, 7 + n) for n in range(5)})
        for layer in self.layers.values():
            layer.register_buffer("scale", torch.randn(3))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rotary", torch.arange(5.0), persistent=False)


def keep_stage(model: Any, mesh: DeviceMesh) -> None:
    """Leave of a `Staged` what one stage of a pipeline has, and let FSDP shard that."""
    stage, depth = mesh["pp"].get_local_rank(), mesh["pp"].size()
    for n in range(5):
        if n * depth // 5 != stage:
            del model.layers[str(n)]
    if stage > 0:
        del model.embed
    if stage < depth - 1:
        del model.norm, model.head
    if "fsdp" in (mesh.mesh_dim_names or ()):
        fully_shard(model, mesh=mesh["fsdp"])

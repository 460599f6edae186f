"""Loads onto meshes of every shape, each rank's bytes beside those that the simulator foretold."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, main
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import torchlift
from torchlift.distributed import simulate
from torchlift.distributed.meshes import REPLICATED, SHARDED, parse_mesh

warnings.simplefilter("ignore")

OUT = Path(sys.argv[1])

#: Number of ranks -> meshes.
MESHES = {
    2: ["fsdp=2", "tp=2", "dp=2", "fsdp=2,tp=1", "fsdp=1,tp=2", "replicate=2,shard=1"],
    4: [
        "fsdp=4", "tp=4", "fsdp=2,tp=2", "fsdp=4,tp=1", "fsdp=1,tp=4", "replicate=2,shard=2",
        "dp=2,tp=2", "dp_shard=2,cp=2", "dp_replicate=1,dp_shard=2,tp=2",
        "dp_replicate=2,dp_shard=1,tp=2", "dp_replicate=2,dp_shard=2,tp=1",
    ],
    8: ["dp_replicate=2,dp_shard=2,tp=2", "dp_shard=2,cp=2,tp=2", "fsdp=2,tp=4"],
}  # fmt: skip

#: Mesh -> what FSDP cuts along another dimension.
ELSEWHERE = {
    "fsdp=2": {"turned": 1, "experts": 1, "wide.weight": 1},
    "fsdp=4": {"turned": -1, "experts": 1},
    "fsdp=2,tp=2": {"turned": 1, "experts": 1, "wide.weight": 1},
    "replicate=2,shard=2": {"experts": 1, "wide.weight": 1},
}
PIPELINES = ["pp=2", "pp=2,fsdp=2", "fsdp=2,pp=2"]

PLAN: dict[str, Any] = {
    "up": ColwiseParallel(), "down": RowwiseParallel(), "wide": ColwiseParallel(),
    "words": RowwiseParallel(), "places": ColwiseParallel(), "norm": SequenceParallel(),
}  # fmt: skip
#: The same in words.
STYLES = {
    "up": "colwise", "down": "rowwise", "wide": "colwise",
    "words": "rowwise", "places": "colwise", "norm": "sequence_parallel",
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
    """The values, one of them transposed and one with gaps in the file."""
    torch.manual_seed(0)
    state = Odd().state_dict()
    state["turned"] = state["turned"].t().contiguous().t()
    state["gaps"] = state["gaps"].repeat_interleave(2)[::2]
    return state


def distributed(
    model: nn.Module, sizes: dict[str, int], shard: dict[str, int], ignored: tuple[str, ...]
) -> nn.Module:
    """The model on such a mesh, as torchtitan builds them."""
    mesh = cpu_mesh(*sizes.values(), names=tuple(sizes))
    if "tp" in sizes:
        parallelize_module(model, mesh["tp"], PLAN)
    if tuple(sizes) == ("tp",):  # FSDP takes no such tensor
        packed = distribute_tensor(model.experts, mesh, [_StridedShard(1, split_factor=2)])
        model.experts = nn.Parameter(packed)
    shards = tuple(name for name in sizes if name in SHARDED)
    if not shards:
        return model
    copies = tuple(name for name in sizes if name in REPLICATED)
    over: DeviceMesh = mesh[(*copies, *shards)] if copies else mesh[shards]
    if len(shards) > 1:
        over = over._flatten("flat")
    named = dict(model.named_parameters())
    alone = {named[name] for name in ignored}
    dims = {id(named[name]): Shard(dim) for name, dim in shard.items()}
    rule = (lambda parameter: dims.get(id(parameter))) if shard else None
    fully_shard(model.down, mesh=over, shard_placement_fn=rule, ignored_params=alone)
    return fully_shard(model, mesh=over, shard_placement_fn=rule, ignored_params=alone)


def everywhere(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(model: nn.Module) -> int:
    return sum(local_of(t).nbytes for t in (*model.parameters(), *model.buffers()))


def compare(
    path: Path,
    mesh: str,
    *,
    dtype: torch.dtype | None = None,
    shard: dict[str, int] | None = None,
    ignored: tuple[str, ...] = (),
) -> None:
    """Load on the mesh; every rank reads and holds what the simulator said."""
    model: Any = distributed(torchlift.skeleton(Odd), parse_mesh(mesh), shard or {}, ignored)
    report = torchlift.load(model, path, source="read", dtype=dtype)
    for key, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, saved()[key].to(whole.dtype)), (mesh, key)
    styles = {**STYLES, "experts": "packed_colwise" if mesh.startswith("tp=") else "replicate"}
    found = simulate(
        path, mesh, model=torchlift.skeleton(Odd), tp=styles, dtype=dtype, shard=shard,
        ignored=ignored,
    )  # fmt: skip
    assert list(found.bytes) == everywhere(report.bytes_read), (mesh, found.bytes)
    assert list(found.held) == everywhere(held(model)), (mesh, found.held)
    assert sum(found.bytes) == sum(nbytes for nbytes, _ in found.files.values()), mesh
    assert sum(found.requests) == sum(count for _, count in found.files.values()), mesh


def from_one_file(mesh: str) -> None:
    path = OUT / "odd.pt"
    if dist.get_rank() == 0:
        torch.save(saved(), path)
    dist.barrier()
    compare(path, mesh)
    compare(path, mesh, dtype=torch.bfloat16)
    dist.barrier()


def from_shards(mesh: str) -> None:
    """What FSDP over all ranks wrote, in as many files and in uneven pieces."""
    path = OUT / "parts"
    if not path.exists():
        whole = {key: value.contiguous() for key, value in saved().items()}
        model = Odd()
        model.load_state_dict(whole)
        dist.barrier()
        dcp.save(fully_shard(model).state_dict(), checkpoint_id=path)
    dist.barrier()
    compare(path, mesh)
    dist.barrier()


def placed_elsewhere(mesh: str) -> None:
    """``shard_placement_fn`` and ``ignored_params`` of ``fully_shard``."""
    path = OUT / "elsewhere.pt"
    if dist.get_rank() == 0:
        torch.save(saved(), path)
    dist.barrier()
    compare(path, mesh, shard=ELSEWHERE[mesh], ignored=("up.weight", "down.bias", "thin"))
    dist.barrier()


class Staged(nn.Module):
    """Some layers of a model of five under the names that they have in the whole, tied ends."""

    def __init__(self, layers: Iterable[int] = range(5), first: bool = True, last: bool = True):
        super().__init__()
        if first:
            self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict({str(n): nn.Linear(6, 7 + n) for n in layers})
        for layer in self.layers.values():
            layer.register_buffer("scale", torch.randn(3))
        if last:
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 11, bias=False)
        if first and last:
            self.head.weight = self.embed.weight
        self.register_buffer("rotary", torch.arange(5.0), persistent=False)


def _only(names: set[str], key: str) -> str | None:
    return key if key in names else None


def pipeline(name: str, mesh: str) -> None:
    """Each stage is a model of its own layers, loaded from the file of the whole."""
    path, sizes = OUT / name, parse_mesh(mesh)
    whole = Staged()
    state = {**whole.state_dict(), **dict(whole.named_parameters(remove_duplicate=False))}
    if name.startswith("parts"):
        dcp.save({key: value.detach() for key, value in state.items()}, checkpoint_id=path)
    elif dist.get_rank() == 0:
        torch.save(dict(sorted(state.items())), path)
    dist.barrier()
    grid = cpu_mesh(*sizes.values(), names=tuple(sizes))
    stage, depth = grid["pp"].get_local_rank(), sizes["pp"]
    mine = [n for n in range(5) if n * depth // 5 == stage]
    ends = stage == 0, stage == depth - 1
    model: Any = torchlift.skeleton(Staged, mine, *ends)
    if "fsdp" in sizes:
        fully_shard(model, mesh=grid["fsdp"])
    names = set(model.state_dict())
    rename = partial(_only, names)  # strictly: nothing of this stage may be missing
    report = torchlift.load(model, path, rename=rename, source="read")
    for key, value in model.state_dict().items():
        local = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(local, state[key]), (mesh, key)
    found = simulate(path, mesh, model=torchlift.skeleton(Staged))
    assert list(found.bytes) == everywhere(report.bytes_read), (mesh, found.bytes)
    assert list(found.held) == everywhere(held(model)), (mesh, found.held)
    assert sum(found.bytes) == sum(nbytes for nbytes, _ in found.files.values()), mesh
    if name.endswith(".pt"):  # every buffer is a parameter to who knows the file alone
        assert sum(simulate(path, {"pp": depth}).bytes) == found.nbytes + 11 * 6 * 4


def refuses_a_model_that_is_distributed() -> None:
    """Its shapes are no longer those of the model that the styles are about."""
    torch.save(saved(), OUT / f"own-{dist.get_rank()}.pt")
    model = fully_shard(Odd())
    with pytest.raises(ValueError, match="as it is before fully_shard"):
        simulate(OUT / f"own-{dist.get_rank()}.pt", "fsdp=2", model=model)


CHECKS: dict[str, Callable[[], None]] = {"refuses": refuses_a_model_that_is_distributed}
for _mesh in ELSEWHERE:
    if math.prod(parse_mesh(_mesh).values()) == int(OUT.name):
        CHECKS[f"elsewhere {_mesh}"] = partial(placed_elsewhere, _mesh)
for _mesh in PIPELINES:
    if math.prod(parse_mesh(_mesh).values()) == int(OUT.name):
        CHECKS[f"pipeline {_mesh}"] = partial(pipeline, f"stages-{_mesh}.pt", _mesh)
        CHECKS[f"pipeline of parts {_mesh}"] = partial(pipeline, f"parts-{_mesh}", _mesh)
for _mesh in MESHES[int(OUT.name)]:
    CHECKS[f"file {_mesh}"] = partial(from_one_file, _mesh)
    CHECKS[f"parts {_mesh}"] = partial(from_shards, _mesh)

if __name__ == "__main__":
    main(CHECKS)

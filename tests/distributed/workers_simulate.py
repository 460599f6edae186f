"""Loads onto meshes of every shape: each rank reads the bytes of its own shards, and no others."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, main
from sharded_models import Odd, Staged, distribute, keep_stage, saved
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

import torchlift
from torchlift._model.dtensor import spans_at, wrap
from torchlift.distributed import (
    StateDictOptions,
    save_consolidated,
    set_model_state_dict,
)
from torchlift.distributed.gather import Gathering

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

#: Mesh -> what FSDP shards along another dimension.
ELSEWHERE = {
    "fsdp=2": {"turned": 1, "experts": 1, "wide.weight": 1},
    "fsdp=4": {"turned": -1, "experts": 1},
    "fsdp=2,tp=2": {"turned": 1, "experts": 1, "wide.weight": 1},
    "replicate=2,shard=2": {"experts": 1, "wide.weight": 1},
}
IGNORED = ("up.weight", "down.bias", "thin")
PIPELINES = ["pp=2", "pp=2,fsdp=2", "fsdp=2,pp=2"]
RECORDS: list[dict[str, object]] = []


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by dimension."""
    return {name: int(size) for name, size in (one.split("=") for one in text.split(","))}


def everywhere(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def record(path: Path, mesh: str, model: nn.Module, nbytes: int) -> None:
    """Compare what this rank read with what it holds, and keep it for the test."""
    held = {id(t): (key, t) for key, t in model.state_dict(keep_vars=True).items()}.values()
    with torchlift.open(path) as ckpt:
        own = sum(local_of(t).numel() * ckpt.entries[key].itemsize for key, t in held)
        own += 16 * ("gaps" in ckpt and ckpt.entries["gaps"].stride == (2,))  # read with its gaps
    assert nbytes == own, (mesh, nbytes, own)
    found = everywhere(nbytes)
    if dist.get_rank() == 0:
        RECORDS.append({"path": str(path), "mesh": mesh, "bytes": found})
        (OUT / "records").write_text(json.dumps(RECORDS), encoding="utf-8")


def compare(
    path: Path,
    mesh: str,
    *,
    dtype: torch.dtype | None = None,
    shard: dict[str, int] | None = None,
    ignored: tuple[str, ...] = (),
) -> None:
    """Load on the mesh, and keep the bytes that each rank read."""
    sizes = parse_mesh(mesh)
    grid = cpu_mesh(*sizes.values(), names=tuple(sizes))
    model: Any = distribute(torchlift.skeleton(Odd), grid, shard, ignored)
    report = torchlift.load(model, path, source="read", dtype=dtype)
    for key, value in model.state_dict().items():
        if "tp=" in mesh and "," not in mesh and key == "experts" and torch.__version__ < "2.12":
            continue  # strided shards of one dimension, which torch 2.11 does not put together
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, saved()[key].to(whole.dtype)), (mesh, key)
    record(path, mesh, model, report.bytes_read)


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
    compare(path, mesh, shard=ELSEWHERE[mesh], ignored=IGNORED)
    dist.barrier()


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
    model: Any = torchlift.skeleton(Staged)
    keep_stage(model, cpu_mesh(*sizes.values(), names=tuple(sizes)))
    # Strictly: nothing of this stage may be missing.
    rename = partial(_only, set(model.state_dict()))
    report = torchlift.load(model, path, rename=rename, source="read")
    for key, value in model.state_dict().items():
        local = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(local, state[key]), (mesh, key)
    record(path, mesh, model, report.bytes_read)


def in_every_order() -> Iterator[tuple[str, torch.Tensor, DTensorSpec]]:
    """Yield whole tensors of uneven sizes, sharded by three mesh dimensions in every order.

    Once as the spec says it, once as `_StridedShard` does; one tensor dimension may have them all.
    """
    mesh = cpu_mesh(2, 2, 2)
    for count, size in ((3, 13), (2, 5)):
        for axes in itertools.permutations(range(3), count):
            for first in range(1, count + 1):  # so many shard the first tensor dimension
                whole = torch.arange(size * 5.0).view(size, 5) + len(axes)
                entries = [ShardOrderEntry(0, axes[:first])]
                entries += [ShardOrderEntry(1, axes[first:])] if axes[first:] else []
                placements: list[Any] = [Replicate()] * 3
                for entry in entries:
                    for axis in entry.mesh_dims:
                        placements[axis] = Shard(entry.tensor_dim)
                order, plain = tuple(entries), tuple(placements)
                meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
                strided = DTensorSpec._convert_shard_order_to_StridedShard(order, plain, mesh)
                text = f"{size} {axes[:first]} {axes[first:]}"
                yield f"{text} order", whole, DTensorSpec(mesh, plain, meta, shard_order=order)
                yield f"{text} strided", whole, DTensorSpec(mesh, strided, meta)


def shards_in_every_order() -> None:
    """Compared with what torch puts together, and every way in and out agrees with it."""
    named, made = {}, nn.ParameterDict()
    for number, (what, whole, spec) in enumerate(in_every_order()):
        key = f"w{number}"
        blank = DTensor(torch.empty(0), spec, requires_grad=False)
        rows, columns = map(_indices, spans_at(blank, spec.mesh.get_coordinate()))
        local = whole[rows][:, columns]
        tensor = DTensor(local.clone(), spec, requires_grad=False)
        assert torch.equal(tensor.full_tensor(), whole), what
        named[key] = what, whole
        made[key] = parameter(tensor)
    assert len(named) == 60
    state = dict(made)
    path = OUT / "orders.pt"
    save_consolidated(state, path)
    found = torch.load(path)
    # Of a dict: the state_dict() of a module detaches, and torch forgets the order at that.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole_state = Gathering(state, options, keeps=dist.get_rank() == 0).finish() or {}
    assert len(whole_state) == (len(named) if dist.get_rank() == 0 else 0)
    for key, (what, whole) in named.items():
        assert torch.equal(found[key], whole), what
        assert dist.get_rank() or torch.equal(whole_state[key], whole), what
    with torch.no_grad():
        target = nn.ParameterDict({k: parameter(v, zeros=True) for k, v in made.items()})
    torchlift.load(target, path, source="read")
    for key, (what, _) in named.items():
        assert torch.equal(local_of(target[key]), local_of(made[key])), what
    # A value whose order is another than the model's, with the very same placements.
    keys = [k for k, (what, _) in named.items() if what.startswith("13 ") and "order" in what]
    same = [k for k in keys if all(p == Shard(0) for p in made[k].placements)]
    assert len(same) == 6
    for mine, other in zip(same, [*same[1:], same[0]], strict=True):
        one = nn.ParameterDict({"w": parameter(made[mine], zeros=True)})
        set_model_state_dict(one, {"w": state[other]})
        assert torch.equal(local_of(one["w"]), local_of(made[mine])), (named[mine], named[other])
    dist.barrier()


def parameter(tensor: torch.Tensor, zeros: bool = False) -> Any:
    """Make a parameter in the order of a DTensor, which `nn.Parameter` forgets."""
    local = local_of(tensor).detach()
    return wrap(tensor, torch.zeros_like(local) if zeros else local, True, parameter=True)


def _indices(spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.tensor([i for start, stop in spans for i in range(start, stop)], dtype=torch.int64)


CHECKS: dict[str, Callable[[], None]] = {}
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
if int(OUT.name) == 8:
    CHECKS["shard orders"] = shards_in_every_order

if __name__ == "__main__":
    only = os.environ.get("ONLY")
    main({name: run for name, run in CHECKS.items() if not only or name in only.split(";")})

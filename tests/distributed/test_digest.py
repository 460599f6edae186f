"""`digest` on a mesh: the number of the whole, on every rank, whatever each of them holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import torchlift
from torchlift.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64)


def state() -> dict[str, torch.Tensor]:
    """Tensors that do not divide evenly, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(7,), (5, 9), (8, 12), (3, 5, 7), (1, 6), (6, 1), (130, 66), (0, 4)]
    return {
        f"{str(dtype)[6:]}.{number}": torch.randn(shape, generator=generator).mul(50).to(dtype)
        for dtype in DTYPES
        for number, shape in enumerate(shapes)
    }


def bare() -> nn.Module:
    """A model with the same values on all ranks, a buffer and odd sizes."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.bfloat16))


def layouts(value: torch.Tensor) -> list[DTensor]:
    """The tensor in each way that a mesh may hold it."""
    line = cpu_mesh()
    found = [distribute_tensor(value, line, [Replicate()])]
    found += [distribute_tensor(value, line, [Shard(dim)]) for dim in range(value.dim())]
    if dist.get_world_size() == 4:
        square = cpu_mesh(2, 2)
        pairs: list[tuple[object, object]] = [(Replicate(), Shard(0)), (Shard(0), Replicate())]
        pairs += [(Shard(0), Shard(0)), (Shard(0), Shard(value.dim() - 1))]
        found += [distribute_tensor(value, square, list(pair)) for pair in pairs]
        rows = len(value)
        if rows % 4 == 0:  # as FSDP of what tensor parallelism has sharded first
            first, second = square.get_coordinate() or (0, 0)
            local = value.chunk(2)[second].chunk(2)[first]
            strided = [_StridedShard(0, split_factor=2), Shard(0)]
            shape, stride = value.shape, value.stride()
            found.append(
                DTensor.from_local(
                    local, square, strided, run_check=False, shape=shape, stride=stride
                )
            )
    return found


@on(2, 4)
def test_every_layout_has_the_number_of_the_whole() -> None:
    """Sharded by any dimension, unevenly, twice, strided, replicated."""
    for key, value in state().items():
        expected = torchlift.digest({key: value})
        for tensor in layouts(value):
            assert torchlift.digest({key: tensor}) == expected, (key, tensor.placements)
            changed = tensor.clone()
            local = changed.to_local()
            if dist.get_rank() == 0 and local.numel():
                local.view(-1)[-1] += 1
            if value.numel() and tensor.placements[0] != Replicate():
                assert torchlift.digest({key: changed}) != expected, (key, tensor.placements)


@on(2, 4)
def test_every_wrapper_has_the_number_of_the_model(folder: Path) -> None:
    """DDP, of what is compiled, FSDP2 whole and by layers, FSDP1; and so has any file of one."""
    expected = torchlift.digest(bare())
    by_layers = bare()
    for layer in by_layers:
        fully_shard(layer, mesh=cpu_mesh())
    cpu = torch.device("cpu")
    models = {
        "ddp": DistributedDataParallel(torch.compile(bare(), backend="eager")),
        "fsdp2": fully_shard(bare(), mesh=cpu_mesh()),
        "layers": fully_shard(by_layers, mesh=cpu_mesh()),
        "fsdp1": FullyShardedDataParallel(
            bare().float(), device_id=cpu, use_orig_params=True, auto_wrap_policy=None
        ),
    }
    if dist.get_world_size() == 4:
        models["hsdp"] = fully_shard(bare(), mesh=cpu_mesh(2, 2, names=("replicas", "shards")))
    floats = torchlift.digest(bare().float())
    for name, model in models.items():
        assert torchlift.digest(model) == (floats if name == "fsdp1" else expected), name
    path = folder / "sharded.safetensors"
    torchlift.save(models["fsdp2"], path)
    assert torchlift.digest(path) == expected
    held = {"model": models["fsdp2"], "step": torch.tensor(3)}
    assert torchlift.digest(held) == torchlift.digest({"model": bare(), "step": torch.tensor(3)})
    assert torchlift.digest(held, root="model") == expected
    found = []
    for model in (bare(), models["layers"]):
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found += [torchlift.digest(optimizer), torchlift.digest(optimizer.state_dict())]
    assert len(set(found)) == 1, found


def named_mesh() -> DeviceMesh:
    """Half of the ranks, at most two, shard what the others have as well."""
    half = dist.get_world_size() // 2
    return cpu_mesh(2, half, names=("dp", "tp"))


@on(2, 4)
def test_meshes_inside_of_others_have_the_number_of_the_whole() -> None:
    """Each tensor on a mesh of its own: all dimensions of one mesh, the first, or the second."""
    mesh = named_mesh()
    values = {"dense": torch.randn(8, 4), "experts": torch.randn(4, 3), "p": torch.randn(3)}
    both, dp, tp = mesh, mesh["dp"], mesh["tp"]
    across = [Shard(0), Shard(1)]
    cases: list[tuple[DeviceMesh, list[Any], DeviceMesh, list[Any]]] = [
        (both, across, tp, [Shard(0)]),
        (both, across, dp, [Shard(0)]),
        (both, [Replicate(), Shard(1)], dp, [Replicate()]),
        (dp, [Shard(0)], tp, [Shard(0)]),
        (tp, [Shard(0)], dp, [Shard(1)]),
        (tp, [Shard(0)], tp, [Shard(1)]),
    ]
    for one, placements, other, others in cases:
        held = {
            "dense": distribute_tensor(values["dense"], one, placements),
            "experts": distribute_tensor(values["experts"], other, others),
            "p": values["p"],
        }
        expected = torchlift.digest(values)
        assert torchlift.digest(held) == expected, (placements, others)
        assert torchlift.digest(held, process_group=dist.group.WORLD) == expected, placements
        with torch.device("meta"):
            assert torchlift.digest(held) == expected, placements


@on(2, 4)
def test_a_name_that_one_rank_lacks_ends_all() -> None:
    """Its peers would wait for it: they all get one error. The order of names does not count."""
    mesh, who = cpu_mesh(), dist.get_rank()
    values = {"a": torch.randn(8, 3), "b": torch.randn(5)}
    held = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in values.items()}
    if who == 1:
        held = dict(reversed(held.items()))
    assert torchlift.digest(held) == torchlift.digest(values)
    if who == 1:
        del held["b"]
    with pytest.raises(CheckpointError, match="not on all ranks of its mesh"):
        torchlift.digest(held)


@on(2, 4)
def test_stages_that_are_sharded_are_added_up() -> None:
    """Pipeline stages on meshes of their own, with the embedding and a norm on both."""
    mesh = named_mesh()
    stage, tp = mesh.get_local_rank("dp"), mesh["tp"]
    names = {"embed": (6, 4), "first": (4, 5), "last": (7, 4), "norm": (4,), "more": (2, 2)}
    values = {key: torch.randn(shape) for key, shape in names.items()}
    own = {"embed", "norm", *({"last", "more"} if stage else {"first"})}
    held: dict[str, torch.Tensor] = {
        key: distribute_tensor(value, tp, [Shard(0)]) for key, value in values.items() if key in own
    }
    held["norm"] = values["norm"]
    expected, group = torchlift.digest(values), dist.group.WORLD
    assert torchlift.digest(held, process_group=group) == expected
    if stage:  # of a name that several have, the first one's value counts
        held["embed"], held["norm"] = held["embed"] + 1, held["norm"] + 1
    assert torchlift.digest(held, process_group=group) == expected
    if not stage:
        held["embed"] = held["embed"] + 1
    assert torchlift.digest(held, process_group=group) != expected


@on(2, 4)
def test_what_one_rank_cannot_add_ends_all() -> None:
    """A tensor on meta on one rank, and partial sums on all: one error names the rank."""
    mesh, who = cpu_mesh(), dist.get_rank()
    tensors = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)]), "b": torch.ones(2)}
    if who == 1:
        tensors["b"] = torch.ones(2, device="meta")
    with pytest.raises(CheckpointError, match=r"does not have values"):
        torchlift.digest(tensors)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError, match="partial sum"):
        torchlift.digest({"w": partial})

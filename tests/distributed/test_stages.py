"""Pipelines, meshes without rank 0, and ranks that load among some or alone."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HANGS, cpu_mesh, on
from state_models import FROM_0, ON_0, WHOLE, set_both
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import same, train

import torchlift
import torchlift.distributed as ours
from torchlift._model.ranks import RankGroup
from torchlift._model.torch_private import timeout_of


class Stages(nn.Module):
    """Three layers, of which each half of the ranks keeps two: the middle one is in both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleDict(
            {"0": nn.Linear(5, 7), "1": nn.Linear(7, 6), "2": nn.Linear(6, 3)}
        )

    def get_extra_state(self) -> object:
        return {"made by": min(self.layers)}

    def set_extra_state(self, state: object) -> None: ...


def halves() -> tuple[bool, list[DeviceMesh]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    both = [list(range(world // 2)), list(range(world // 2, world))]
    return rank >= world // 2, [DeviceMesh("cpu", ranks) for ranks in both]


def stage_of(whole: Stages, kind: str) -> Stages:
    last, meshes = halves()
    mine = copy.deepcopy(whole)
    del mine.layers["0" if last else "2"]
    if kind == "fsdp":
        for layer in mine.layers.values():
            fully_shard(layer, mesh=meshes[last])
    return mine


@on(2, 4)
def test_each_stage_is_gathered_by_its_own_ranks() -> None:
    """The first rank of a stage gets it; without the group rank 0 would keep its own stage only."""
    whole, world = Stages(), dist.get_world_size()
    last, _ = halves()
    both = [dist.new_group([*range(world // 2)]), dist.new_group([*range(world // 2, world)])]
    # All ranks make each stage: that makes meshes, which takes all of them.
    plain, target = stage_of(whole, "plain"), stage_of(whole, "plain")
    for kind in ("plain", "fsdp"):
        stage = stage_of(whole, kind)
        optimizer = torch.optim.Adam(stage.parameters(), foreach=False)
        everyone = {"process_group": dist.group.WORLD} if kind == "plain" else {}
        with pytest.raises(ours.StateDictMismatch, match="do not select the same") as error:
            ours.get_state_dict(stage, optimizer, options=ON_0, **everyone)
        assert "process_group=" in str(error.value.hint)
        group: Any = both[last]
        found = ours.get_state_dict(stage, optimizer, options=ON_0, process_group=group)
        if dist.get_rank(group):
            assert found == ({}, {})
            continue
        same(ours.get_model_state_dict(plain), found[0])
        assert not any(isinstance(value, DTensor) for value in found[0].values())
        names = [name for name, _ in plain.named_parameters()]
        assert sorted(found[1]["state"]) == sorted(names)
        for param in target.parameters():
            nn.init.zeros_(param)
        other = torch.optim.Adam(target.parameters(), foreach=False)
        set_both(target, other, found, collective=False)
        same(ours.get_model_state_dict(target), found[0])


@on(2)
def test_a_replica_without_dtensors_is_read_by_rank_0_alone() -> None:
    """As torch's function is, in ``if rank == 0``: nobody waits for the others."""
    for wrap in (lambda model: model, DistributedDataParallel, torch.compile):
        model = wrap(nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters())
        if dist.get_rank() == 0:
            found = ours.get_state_dict(model, optimizer, options=ON_0)
            same(found[0], ours.get_model_state_dict(model, options=ON_0))
            same(dict(found[0]), dict(ours.get_model_state_dict(model)))
            same(found[1], ours.get_optimizer_state_dict(model, optimizer, options=ON_0))
        dist.barrier()
        if dist.get_rank():
            assert ours.get_state_dict(model, optimizer, options=ON_0) == ({}, {})


@on(2, 4)
def test_a_tensor_on_a_mesh_without_this_rank_is_refused() -> None:
    """A rank outside of the mesh has no part in the gathering, and would get no values."""
    last, meshes = halves()
    model = nn.Module()
    wide = torch.arange(15.0).view(5, 3)
    value: Any = distribute_tensor(wide, meshes[1], [Shard(0)], src_data_rank=None)
    if not last:
        value = DTensor.from_local(
            torch.empty(0), meshes[1], [Shard(0)], shape=wide.shape, stride=wide.stride(),
            run_check=False,
        )  # fmt: skip
    model.register_buffer("away", value)
    for options in (ON_0, WHOLE):
        with pytest.raises(ours.StateDictMismatch, match=r"'away'.*not in the mesh of a tensor"):
            ours.get_model_state_dict(model, options=options, process_group=dist.group.WORLD)
    if last:  # the way out
        groups = dist.new_group(meshes[1].mesh.tolist(), use_local_synchronization=True)
        found = ours.get_model_state_dict(model, options=WHOLE, process_group=groups)
        assert torch.equal(found["away"], wide)
    # Side by side: each half has the same, on a mesh of its own.
    model = nn.Linear(3, 5)
    nn.init.ones_(model.weight)
    half = fully_shard(model, mesh=meshes[last])
    found = ours.get_model_state_dict(half, options=ON_0)
    assert found == {} if dist.get_rank() else torch.equal(found["weight"], torch.ones(5, 3))


@on(2)
def test_a_replica_loads_alone() -> None:
    """And nobody waits: without the option a load of DDP waits for all."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    train(optimizer)
    saved = ours.get_state_dict(model, optimizer)
    saved = copy.deepcopy(saved)
    line = cpu_mesh()
    if dist.get_rank() == 0:
        ours.set_model_state_dict(model, {k: v + 1 for k, v in saved[0].items()}, collective=False)
        assert torch.equal(model.module.weight, saved[0]["weight"] + 1)
        ours.set_optimizer_state_dict(model, optimizer, saved[1], collective=False)
        set_both(model, optimizer, saved, collective=False)
        with pytest.raises(ours.StateDictMismatch, match=r"Missing key\(s\) 'bias'"):
            ours.set_model_state_dict(model, {"weight": saved[0]["weight"]}, collective=False)
        with pytest.raises(ValueError, match="not for a rank that loads alone"):
            ours.set_model_state_dict(model, saved[0], options=FROM_0, collective=False)
        with pytest.raises(ValueError, match=r"process_group= is for a call that all"):
            torchlift.load(
                nn.Linear(2, 2), "x.pt", collective=False, process_group=dist.group.WORLD
            )
        sharded = fully_shard(nn.Linear(2, 2), mesh=line)
        other = DTensor.from_local(torch.ones(2, 2), line, [Replicate()], run_check=False)
        given = {**sharded.state_dict(), "weight": other}
        with pytest.raises(ours.StateDictMismatch, match="another layout than the model"):
            ours.set_model_state_dict(sharded, given, collective=False)
    dist.barrier()
    # Replicas that nothing ties load together where they are asked to.
    plain = nn.Linear(2, 2)
    state = plain.state_dict()
    if dist.get_rank() == 1:
        del state["bias"]
    with pytest.raises(ours.StateDictMismatch, match=r"Missing key\(s\) 'bias'"):
        ours.set_model_state_dict(plain, state, collective=True)


@on(2, 4)
def test_the_ranks_of_a_process_group_load_and_read_together(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    some = dist.new_group([0, world - 1])
    path = folder / "some.pt"
    if rank in (0, world - 1):
        model = nn.Linear(2, 2)
        state = model.state_dict()
        found = ours.get_model_state_dict(model, options=ON_0, process_group=some)
        assert len(found) == (2 if rank == 0 else 0)
        bad = {} if rank else state
        with pytest.raises(ours.StateDictMismatch, match=r"Missing key\(s\) 'weight', 'bias'"):
            ours.set_model_state_dict(model, bad, process_group=some)
        given = {"weight": torch.ones(2, 2), "bias": torch.ones(2)} if rank == 0 else {}
        ours.set_model_state_dict(model, given, options=FROM_0, process_group=some)
        assert model.bias.tolist() == [1, 1]
        if rank == 0:
            torch.save(model.state_dict(), path)
        dist.barrier(some)
        torchlift.load(model, path, process_group=some)
        with pytest.raises(torchlift.errors.CheckpointError):
            torchlift.load(model, path if rank else folder / "none.pt", process_group=some)
    dist.barrier()


@on(2)
def test_threads_with_a_process_group_each_load_at_the_same_time(folder: Path) -> None:
    """In another order on each rank. Over one group torch takes what one sends for the other's."""
    rank = dist.get_rank()
    path = folder / f"threads-{rank}.pt"
    whole = {"weight": torch.full((6, 4), 3.0), "bias": torch.full((6,), 3.0)}
    torch.save(whole, path)
    models = [fully_shard(nn.Linear(4, 6)) for _ in range(2)]
    groups = [dist.new_group() for _ in range(2)]

    def load() -> None:
        for _ in range(10):
            torchlift.load(models[0], path, process_group=groups[0])

    def set_state() -> None:
        for _ in range(10):
            ours.set_model_state_dict(models[1], whole, options=WHOLE, process_group=groups[1])

    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(work) for work in ((load, set_state) if rank else (set_state, load))]
    for work in works:
        work.result()
    for model in models:
        assert all((param.to_local() == 3).all() for param in model.parameters())
    dist.barrier()


@on(2)
def test_a_group_without_a_backend_for_the_cpu_agrees_over_gloo(folder: Path) -> None:
    """As NCCL has none: its watchdog would end ranks that wait for a slow disk of another."""

    def make(options: Any, _: object) -> Any:
        return FakeProcessGroup._create_internal(options.group_rank, options.group_size)

    dist.Backend.register_backend("accelerated", make, extended_api=True, devices=["cuda"])
    group = dist.new_group(backend="accelerated")
    assert dist.get_backend_config(group) == "cuda:accelerated"
    for turn in range(2):
        text = f"{turn} {dist.get_rank()}"
        _, told = RankGroup([group]).run(lambda text=text: (None, text))  # type: ignore[misc]
        assert told == {rank: f"{turn} {rank}" for rank in range(dist.get_world_size())}
    (companion,) = RankGroup([group])._talking
    assert timeout_of(companion) == timeout_of(dist.group.WORLD) == HANGS
    path = folder / "agreed.pt"
    ours.save_consolidated({"w": torch.ones(3)}, path, process_group=group)
    assert torch.load(path)["w"].tolist() == [1, 1, 1]

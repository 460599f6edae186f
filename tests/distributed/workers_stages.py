"""Pipelines, meshes without rank 0, and ranks that load among some or alone.

Started by ``ranks.run_workers`` with a folder for the results.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HANGS, cpu_mesh, main
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
from torchlift.distributed import broadcast, gather

OUT = Path(sys.argv[1])
FULL = ours.StateDictOptions(full_state_dict=True)
ON_0 = ours.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_0 = ours.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


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


class Unsendable(nn.Linear):
    def get_extra_state(self) -> object:
        return lambda: None


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


def a_full_state_dict_has_every_stage() -> None:
    """Of model and optimizer, in one message or in many, and one process loads it."""
    whole = Stages()
    for kind in ("plain", "fsdp"):
        for budget in (gather.BUDGET, 256):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gather, "BUDGET", budget)
                stage = stage_of(whole, kind)
                optimizer = torch.optim.Adam(stage.parameters(), foreach=False)
                # Nothing else tells stages without DTensors from replicas.
                among = {"process_group": dist.group.WORLD} if kind == "plain" else {}
                found = ours.get_state_dict(stage, optimizer, options=ON_0, **among)
                again = ours.get_model_state_dict(stage, options=ON_0, **among)
            if dist.get_rank():
                assert found == ({}, {})
                continue
            same(again, found[0])
            assert found[0].pop("_extra_state") == {"made by": "0"}
            expected = whole.state_dict()
            assert sorted(found[0]) == sorted(set(expected) - {"_extra_state"})
            for name, value in found[0].items():
                assert not isinstance(value, DTensor)
                assert torch.equal(value, expected[name]), (kind, name)
            target = Stages()
            other = torch.optim.Adam(target.parameters(), foreach=False)
            ours.set_state_dict(
                target, other, model_state_dict={**found[0], "_extra_state": 0},
                optim_state_dict=found[1],
            )  # fmt: skip
            names = [name for name, _ in whole.named_parameters()]
            assert sorted(found[1]["state"]) == sorted(names)
            assert all(state["exp_avg"].shape for state in found[1]["state"].values())


def stages_that_do_not_fit_are_one_error_on_every_rank() -> None:
    rank = dist.get_rank()
    model = nn.Linear(2 + rank // (dist.get_world_size() // 2), 3)
    with pytest.raises(ours.StateDictMismatch, match=r"'weight': two ranks hold unlike tensors"):
        ours.get_model_state_dict(model, options=ON_0, process_group=dist.group.WORLD)
    bad = Unsendable(2, 3) if rank == dist.get_world_size() - 1 else nn.Linear(2, 3)
    with pytest.raises((ours.StateDictMismatch, AttributeError, TypeError)) as caught:
        ours.get_model_state_dict(bad, options=ON_0, process_group=dist.group.WORLD)
    assert "lambda" in str(caught.value)


def a_replica_without_dtensors_is_read_by_rank_0_alone() -> None:
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


def a_tensor_on_a_mesh_without_rank_0_is_whole_on_rank_0() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    last, meshes = halves()
    model = nn.Module()
    wide = torch.arange(15.0).view(5, 3)
    for name, mesh, placements in [
        ("away", DeviceMesh("cpu", [world - 1]), [Shard(0)]),
        ("second", meshes[1], [Shard(1)]),
        ("copies", meshes[1], [Replicate()]),
        ("all", cpu_mesh(), [Shard(0)]),
    ]:
        inside = mesh.get_coordinate() is not None
        value: Any = distribute_tensor(wide, mesh, placements, src_data_rank=None)
        if not inside:
            value = DTensor.from_local(
                torch.empty(0), mesh, placements, shape=wide.shape, stride=wide.stride(),
                run_check=False,
            )  # fmt: skip
        model.register_buffer(name, value)
    found = ours.get_model_state_dict(model, options=ON_0)
    if rank == 0:
        for name in ("away", "second", "copies", "all"):
            assert torch.equal(found[name], wide), (name, found[name])
    if rank == 0:
        with pytest.raises(ours.StateDictMismatch, match=r"'away': this rank is not in the mesh"):
            gather.require_within(dict(model.named_buffers()))
    # Side by side: each half has the same, on a mesh of its own.
    model = nn.Linear(3, 5)
    nn.init.ones_(model.weight)
    half = fully_shard(model, mesh=meshes[last])
    found = ours.get_model_state_dict(half, options=ON_0)
    assert rank or torch.equal(found["weight"], torch.ones(5, 3))


def messages_over_one_communicator() -> None:
    """Each other rank sends its 40 shards, in blocks that are no longer than the bound."""
    world, rank = dist.get_world_size(), dist.get_rank()
    calls: list[list[Any]] = []
    run = dist.batch_isend_irecv

    def spy(operations: list[Any]) -> Any:
        calls.append(operations)
        return run(operations)

    def alone(*_: object, **__: object) -> None:
        raise AssertionError("under NCCL this makes a communicator for two ranks")

    model = nn.ParameterDict({f"w{n}": nn.Parameter(torch.randn(8, 4)) for n in range(40)})
    for key, value in model.items():
        model[key] = nn.Parameter(distribute_tensor(value.detach(), cpu_mesh(), [Shard(0)]))
    shard = 8 * 4 * 4 // world
    for budget in (gather.BUDGET, shard // 2):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", spy)
            patch.setattr(dist, "send", alone)
            patch.setattr(dist, "recv", alone)
            patch.setattr(gather, "BUDGET", budget)
            found = ours.get_model_state_dict(model, options=ON_0)
        operations = [operation for call in calls for operation in call]
        assert all(operation.group is dist.group.WORLD for operation in operations)
        expected = 40 * shard // min(budget, shard) * (world - 1 if rank == 0 else 1)
        assert len(operations) == expected, (budget, len(operations))
        assert all(operation.tensor.numel() <= budget for operation in operations)
        if rank == 0:
            assert len(found) == 40
    dist.barrier()


def memory_that_a_rank_lacks_stops_all_before_anything_travels() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fully_shard(nn.Linear(4, 6))
    state = {"weight": torch.ones(6, 4), "bias": torch.ones(6)} if rank == 0 else {}
    before = model.weight.to_local().clone()
    empty = torch.empty

    def scarce(*args: Any, **words: Any) -> Any:
        ours_asks = sys._getframe(1).f_globals["__name__"].startswith("torchlift")
        if ours_asks and words.get("dtype") is torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return empty(*args, **words)

    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(torch, "empty", scarce)
        with pytest.raises(RuntimeError, match="not enough memory"):
            ours.set_model_state_dict(model, state, options=FROM_0)
        with pytest.raises(RuntimeError, match="not enough memory"):
            ours.get_model_state_dict(model, options=ON_0)
    assert torch.equal(model.weight.to_local(), before)
    assert ours.set_model_state_dict(model, state, options=FROM_0) == ([], [])


def what_rank_0_sends_may_be_what_its_model_has() -> None:
    """In blocks or whole: two buffers trade places, and a transposed one is sent as it reads."""
    for longest in (broadcast.BUDGET, 64):
        model = nn.Module()
        model.register_buffer("x", torch.arange(6.0).view(2, 3))
        model.register_buffer("y", 10 * torch.arange(6.0).view(2, 3))
        model.register_buffer("z", torch.zeros(3, 2, dtype=torch.complex64))
        state = {"x": model.y, "y": model.x, "z": torch.complex(model.x, model.y).t().conj()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broadcast, "BUDGET", longest)
            given = state if dist.get_rank() == 0 else {}
            ours.set_model_state_dict(model, given, options=FROM_0)
        assert model.x.flatten().tolist() == [0, 10, 20, 30, 40, 50]
        assert model.y.flatten().tolist() == [0, 1, 2, 3, 4, 5]
        assert torch.equal(model.z, torch.complex(model.y, -model.x).t())


def a_replica_loads_alone() -> None:
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
        ours.set_state_dict(
            model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1],
            collective=False,
        )  # fmt: skip
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
        with pytest.raises(ours.StateDictMismatch, match="another layout than the model, which"):
            ours.set_model_state_dict(sharded, {"weight": other}, collective=False)
    dist.barrier()
    # Replicas that nothing ties load together where they are asked to.
    plain = nn.Linear(2, 2)
    state = plain.state_dict()
    if dist.get_rank() == 1:
        del state["bias"]
    with pytest.raises(ours.StateDictMismatch, match=r"Missing key\(s\) 'bias'"):
        ours.set_model_state_dict(plain, state, collective=True)


def the_ranks_of_a_process_group_load_and_read_together() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    some = dist.new_group([0, world - 1])
    path = OUT / "some.pt"
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
            torchlift.load(model, path if rank else OUT / "none.pt", process_group=some)
    dist.barrier()


def threads_with_a_process_group_each_load_at_the_same_time() -> None:
    """In another order on each rank. Over one group torch takes what one sends for the other's."""
    rank = dist.get_rank()
    path = OUT / f"threads-{rank}.pt"
    whole = {"weight": torch.full((6, 4), 3.0), "bias": torch.full((6,), 3.0)}
    torch.save(whole, path)
    models = [fully_shard(nn.Linear(4, 6)) for _ in range(2)]
    groups = [dist.new_group() for _ in range(2)]
    errors: list[BaseException] = []

    def load() -> None:
        torchlift.load(models[0], path, process_group=groups[0])

    def set_state() -> None:
        ours.set_model_state_dict(models[1], whole, options=FULL, process_group=groups[1])

    def run(work: Callable[[], None]) -> None:
        try:
            for _ in range(10):
                work()
        except BaseException as error:
            errors.append(error)

    works = [load, set_state] if rank % 2 else [set_state, load]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, repr(errors)
    for model in models:
        assert all((param.to_local() == 3).all() for param in model.parameters())
    dist.barrier()


def a_group_without_a_backend_for_the_cpu_agrees_over_gloo() -> None:
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
    path = OUT / "agreed.pt"
    ours.save_consolidated({"w": torch.ones(3)}, path, process_group=group)
    assert torch.load(path)["w"].tolist() == [1, 1, 1]


#: On four ranks those of which two do not show all.
BOTH = (
    a_full_state_dict_has_every_stage,
    stages_that_do_not_fit_are_one_error_on_every_rank,
    a_tensor_on_a_mesh_without_rank_0_is_whole_on_rank_0,
    messages_over_one_communicator,
    the_ranks_of_a_process_group_load_and_read_together,
)
ON_TWO = (
    a_replica_without_dtensors_is_read_by_rank_0_alone,
    memory_that_a_rank_lacks_stops_all_before_anything_travels,
    what_rank_0_sends_may_be_what_its_model_has,
    a_replica_loads_alone,
    threads_with_a_process_group_each_load_at_the_same_time,
    a_group_without_a_backend_for_the_cpu_agrees_over_gloo,
)

if __name__ == "__main__":
    checks = BOTH if os.environ["WORLD_SIZE"] == "4" else (*BOTH, *ON_TWO)
    only = os.environ.get("ONLY")
    named = {check.__name__: check for check in checks}
    main({name: run for name, run in named.items() if not only or name in only.split(";")})

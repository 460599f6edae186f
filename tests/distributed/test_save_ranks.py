"""Checkpoints that all ranks write together: one file, shards, a folder of DCP."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from full_disk import file_size_limit
from ranks import cpu_mesh, on, saves, worlds
from safetensors import safe_open
from safetensors.torch import load_file
from save_states import expected_state
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from wrapped_models import MESHES, WRAPPERS, Net, net, same, train
from zoo import same as same_bits

import torchlift
from torchlift.distributed import (
    CheckpointWriter,
    get_model_state_dict,
    get_optimizer_state_dict,
    save_consolidated,
)
from torchlift.errors import CheckpointError, PlacementError


def meshes() -> dict[str, tuple[DeviceMesh, list[Any]]]:
    world = dist.get_world_size()
    line = cpu_mesh()
    rows = 2 if world % 2 == 0 else 1
    plane = cpu_mesh(rows, world // rows)
    return {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "replicated": (line, [Replicate()]),
        "hybrid": (plane, [Replicate(), Shard(0)]),
        "both": (plane, [Shard(1), Shard(0)]),
    }


def spread(mesh: DeviceMesh, placements: list[Any], value: torch.Tensor) -> torch.Tensor:
    if any(p.is_shard() and p.dim >= value.dim() for p in placements):
        return value
    # distribute_tensor sends, which not every dtype can be.
    index = distribute_tensor(torch.arange(value.numel()).view(value.shape), mesh, placements)
    local = value.reshape(-1)[index.to_local().reshape(-1)].view(index.to_local().shape)
    return DTensor.from_local(
        local, mesh, placements, shape=value.shape, stride=index.stride(), run_check=False
    )


@saves(1, 2, 4)
def writes_files(saved: Path) -> None:
    world = dist.get_world_size()
    for name, (mesh, placements) in meshes().items():
        state = {key: spread(mesh, placements, v) for key, v in expected_state().items()}
        state |= {"again": state["float32"], "conjugate": state["complex64"].conj()}
        path = saved / f"{name}-from-{world}.pt"
        wrote = save_consolidated(state, path)
        total: list[Any] = [None] * world
        dist.all_gather_object(total, wrote)
        expected = expected_state()
        expected["conjugate"] = expected["complex64"]
        assert sum(total) == sum(value.nbytes for value in expected.values()), name


@contextmanager
def refused(path: Path, kind: type[Exception], says: str) -> Iterator[None]:
    """Every rank raises in the block. The old file stays, alone."""
    dist.barrier()  # the last save has ended on all ranks, and the next one has not begun
    before = sorted(os.listdir(path.parent)), path.read_bytes()
    dist.barrier()
    with pytest.raises(kind, match=says):
        yield
    dist.barrier()
    assert (sorted(os.listdir(path.parent)), path.read_bytes()) == before


@on(1, 2, 4)
def test_one_bad_rank_stops_all(folder: Path) -> None:
    """A value that cannot be saved or differs, and a path that cannot be written or differs.

    Two names of one folder are no fault.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    inner, last = folder / "inner", rank == world - 1
    if rank == 0:
        inner.mkdir()
        (folder / "link").symlink_to("inner")
    dist.barrier()
    path = folder / ("link" if last else "inner") / "x.pt"
    save_consolidated({"w": torch.ones(3)}, path)
    mesh, meta = cpu_mesh(), torch.empty(2, device="meta")
    cases: list[tuple[Any, Path, type[Exception], str]] = [
        (object(), path, PlacementError, "without running code"),
        ({"a": [object()]}, path, PlacementError, "'w.a': .*without running code"),
        (meta, path, PlacementError, "does not have values"),
        (DTensor.from_local(torch.ones(2), mesh, [Partial()]), path, PlacementError, "partial sum"),
        (torch.ones(2), path / "x.pt", CheckpointError, "cannot be written"),
        (torch.ones(2), folder / "x.unknown", ValueError, "one of 'safetensors', 'torch-zip'"),
    ]
    if world > 1:
        name = rf"the same name=; expected 'x\.pt', as on rank 0; found 'y\.pt' on rank {world - 1}"
        place = rf"to the same path; found .*inner/x\.pt on rank {world - 1}"
        differs = f"rank {world - 1} differs from rank 0"
        cases += [
            (torch.ones(2 + last), path, PlacementError, differs),
            (meta if last else torch.ones(2), path, PlacementError, "does not have values"),
            (torch.ones(2), folder / "y.pt" if last else folder / "x.pt", PlacementError, name),
            (torch.ones(2), inner / "x.pt" if last else folder / "x.pt", PlacementError, place),
        ]
    for value, where, kind, text in cases:
        with refused(inner / "x.pt", kind, text):
            save_consolidated({"w": value}, where)
    assert sorted(os.listdir(folder)) == ["inner", "link"]


@on(1, 2, 4)
def test_writes_rank_0s_metadata(folder: Path) -> None:
    """Whatever the others have, or none: a longer header must not shift their offsets."""
    rank = dist.get_rank()
    line = cpu_mesh()
    expected = expected_state()
    state = {key: spread(line, [Shard(0)], value) for key, value in expected.items()}
    state = {key: value for key, value in state.items() if not value.is_complex()}
    for name, metadata in [
        ("only", {"note": "n" * 200} if rank == 0 else None),
        ("longer", {"host": "h" * (1 + 50 * rank)}),
    ]:
        path = folder / f"{name}.safetensors"
        save_consolidated(state, path, metadata=metadata)
        for key, value in load_file(path).items():
            assert same_bits(value, expected[key]), (name, key)
        with safe_open(path, "pt") as file:
            wanted = {"note": "n" * 200} if name == "only" else {"host": "h"}
            assert file.metadata().items() >= wanted.items()
        assert not torchlift.verify(path).unchecked
        dist.barrier()


class Lost:
    """An object whose state one rank cannot have."""

    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ConnectionError("the server is gone")
        return {"n": 1}


@on(1, 2, 4)
def test_equal_notes_are_saved_whatever_objects_they_are(folder: Path) -> None:
    """Strings of a rank may be one object or two. An error of a caller's object stays its own."""
    rank = dist.get_rank()
    whole = torch.arange(8.0)
    w = distribute_tensor(whole, cpu_mesh(), [Shard(0)])
    path = folder / "alike.pt"
    for pad in range(0, 64, 8):  # one of which lets the pickle cross a multiple of 64 bytes
        note = "cpu" if rank else "cpu "[:-1]
        # All of them get a copy of rank 0's note when the shared ones differ, and none else.
        torchlift.save({"note": note, "pad": "x" * pad, "w": w}, path)
        dist.barrier()
        assert torch.equal(torch.load(path)["w"], whole), pad
    with pytest.raises((ConnectionError, CheckpointError), match=r"the server is gone") as caught:
        torchlift.save({"w": w, "s": Lost()}, path)
    assert "cannot be written" not in str(caught.value)
    assert not list(folder.glob(".alike*"))


@on(1, 2, 4)
def test_tells_ties_on_ranks_that_hold_nothing(folder: Path) -> None:
    """One row, which is rank 0's: the others cannot see what is one tensor, and do not object."""
    line = cpu_mesh()
    one, other = (distribute_tensor(torch.ones(1, 3), line, [Shard(0)]) for _ in range(2))
    path = folder / "ties.pt"
    save_consolidated({"one": one, "other": other, "again": one}, path)
    found = torch.load(path, weights_only=True)
    assert found["one"].data_ptr() == found["again"].data_ptr()
    assert found["one"].data_ptr() != found["other"].data_ptr()


@on(1, 2, 4)
def test_a_fault_of_one_rank_stops_all(folder: Path) -> None:
    """A file-size limit, an fsync and a rename that fail; the old file stays, alone."""
    world, rank = dist.get_world_size(), dist.get_rank()
    path = folder / "fault.pt"
    mesh = cpu_mesh()
    state = {"w": distribute_tensor(torch.ones(40_000), mesh, [Shard(0)])}
    save_consolidated(state, path)
    for who, what in [(world - 1, "fsync"), (0, "replace"), (world - 1, "pwrite")]:
        with pytest.MonkeyPatch.context() as patch:
            if rank == who:
                patch.setattr(os, what, denied)
            with refused(path, CheckpointError, r"cannot be written.*denied by the test"):
                save_consolidated(state, path)
    limit = 10_000 if rank == world - 1 else 1 << 40
    with refused(path, CheckpointError, "File too large"), file_size_limit(limit):
        save_consolidated(state, path)


@on(1, 2, 4)
def test_reads_what_any_number_of_ranks_wrote(saved: Path) -> None:
    expected = expected_state()
    paths = sorted(saved.glob("*-from-*.pt"))
    assert len(paths) == 5 * len(worlds()), paths
    for path in paths:
        for options in ({}, {"mmap": True}):
            found = torch.load(path, weights_only=True, **options)
            assert list(found) == [*expected, "again", "conjugate"]
            assert torch.equal(found["conjugate"], expected["complex64"].conj())
            assert found["again"].data_ptr() == found["float32"].data_ptr()
            for key, value in expected.items():
                assert same_bits(found[key], value), (path.name, key)
        with torchlift.open(path) as opened:
            assert ("float32", "again") in opened.aliases
            assert len(opened.metadata) == 4
            for key, value in expected.items():
                assert same_bits(opened[key], value), (path.name, key)
        assert zipfile.ZipFile(path).testzip() is None
        report = torchlift.verify(path)
        assert report.ok
        with_values = sum(1 for value in expected.values() if value.numel())
        assert len(report.checked) == with_values + 1, report


@on(2, 4)
def test_merges_what_each_rank_has_under_names_of_its_own(folder: Path) -> None:
    """Stages of a pipeline, plain or on meshes without rank 0: any process loads the one file."""
    world, rank = dist.get_world_size(), dist.get_rank()
    half = world // 2
    meshes = [DeviceMesh("cpu", list(range(half))), DeviceMesh("cpu", list(range(half, world)))]
    torch.manual_seed(3)
    layers = [nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)]
    expected = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})
    last = rank >= half
    mine = nn.ModuleDict({name: expected[name] for name in ("12" if last else "01")})
    for wrapped in (False, True):
        for suffix in ("pt", "safetensors", "safetensors.index.json"):
            path = folder / f"stages-{wrapped}-{suffix[-4:]}.{suffix}"
            stage: Any = mine
            if wrapped:
                stage = copy.deepcopy(mine)
                for layer in stage.values():
                    fully_shard(layer, mesh=meshes[last])
            if suffix.endswith("json"):
                size, group = 200, dist.group.WORLD  # which tells stages from replicas
                report = torchlift.save(stage, path, max_shard_size=size, process_group=group)
                assert len(report.files) > 2
                found = torchlift.open(path).state_dict()
            else:
                save_consolidated(stage, path)
                found = load_file(path) if suffix == "safetensors" else torch.load(path)
            whole = expected.state_dict()
            assert sorted(found) == sorted(whole)
            for key, value in whole.items():
                assert torch.equal(found[key], value), (path.name, key)
            assert torchlift.verify(path).ok
            if suffix == "pt":
                assert list(found) == list(whole), list(found)  # in the order of the ranks
                assert found._metadata["1"] == whole._metadata["1"]
                expected.load_state_dict(found)
    # A stage without state of an optimizer. A dict that is empty on all ranks stays.
    own = {"step": torch.tensor(7.0)} if rank == world - 1 else {}
    state = {"state": {"w": own} if rank else {}, "none": {}, "list": []}
    for target in (folder / "empty.pt", folder / "empty"):
        kind = None if target.suffix else "dcp"
        torchlift.save(state, target, format=kind, process_group=dist.group.WORLD)
        with torchlift.open(target) as ckpt:
            found = ckpt.tree()
            assert found.pop("state") == {"w": {"step": torch.tensor(7.0)}}
            assert found == {"none": {}, "list": []} or not target.suffix


@on(1, 2, 4)
def test_every_wrapping_is_saved_as_one_process_saves_whole_tensors(folder: Path) -> None:
    """With the optimizer and plain data, in one file, in shards and for DCP."""
    kinds = {kind: WRAPPERS[kind] for kind in ("fsdp blocks", "tensor parallel")}
    kinds |= MESHES if dist.get_world_size() > 1 else {}
    for kind, wrap in kinds.items():
        model = wrap(net())
        optimizer = torch.optim.Adam(model.parameters())
        train(optimizer, 1)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "step": 3,
            "more": [{"plain": (1, "x")}, next(model.parameters())],
        }
        expected = whole_of(state)
        path = folder / kind
        report = torchlift.save({**state, "model": model}, path / "x.pt")
        assert (report.format, len(report.files)) == ("torch-zip", 1)
        name, first = next(iter(model.named_parameters()))
        assert report.tied["more.1"].endswith(name.split(".")[-1])  # and is in the file once
        assert report.nbytes == sum(t.nbytes for t in tensors_in(expected)) - first.nbytes
        same(torch.load(path / "x.pt", weights_only=True), expected, kind)
        with pytest.raises(PlacementError, match=r"'optimizer\.param_groups'.*which hold plain"):
            torchlift.save(state, path / "model.safetensors")
        shards = path / "shards" / "model.safetensors"
        report = torchlift.save(model, shards, max_shard_size=500)
        assert (report.format, len(report.files) > 3) == ("sharded", True)
        torchlift.save(state, path / "dcp", format="dcp")
        for each in (path / "x.pt", shards.parent, path / "dcp"):
            found = torchlift.verify(each)
            assert found.ok
            assert not found.unchecked, (each, found)
            other = fully_shard(torchlift.skeleton(Net), mesh=cpu_mesh())
            root = {} if each == shards.parent else {"root": "model"}
            torchlift.load(other, each, verify=True, **root)
            same(whole_of(get_model_state_dict(other)), expected["model"], each.name)
        dist.barrier()


def whole_of(value: Any) -> Any:
    """Containers with whole tensors in place of DTensors."""
    if isinstance(value, dict):
        return {key: whole_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(whole_of, value))
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value  # training goes on


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for v in items if isinstance(v, (dict, list, torch.Tensor)) for t in tensors_in(v)]


@on(1, 2, 4)
def test_dcp_saves_through_the_writer(folder: Path) -> None:
    """At once and in the background; on a fault the old folder stays."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = WRAPPERS["fsdp blocks"](net())
    optimizer = torch.optim.Adam(model.parameters())
    train(optimizer, 1)

    def state_of() -> dict[str, Any]:
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "step": 7,
            "more": ["x", {"y": 1}],
        }

    path = folder / "writer"
    dcp.save(state_of(), storage_writer=CheckpointWriter(path))
    train(optimizer, 1)
    expected = whole_of(state_of())
    writer = pickle.loads(pickle.dumps(CheckpointWriter()))  # as a process that saves gets it
    dcp.async_save(state_of(), storage_writer=writer, checkpoint_id=path).result()
    dist.barrier()
    train(optimizer, 1)
    report = torchlift.verify(path)
    assert report.ok
    assert len(report.checked) >= len(tensors_in(expected))
    assert not report.unchecked
    found = state_of()
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    same(whole_of(found), expected, path.name)
    before = contents(path)
    who = f"on rank {world - 1}" if world > 1 else ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(os, "pwrite", denied)
        with pytest.raises(CheckpointException, match=rf"{who}.*denied by"):
            dcp.save(state_of(), storage_writer=writer)
    dist.barrier()
    assert contents(path) == before
    assert not list(folder.glob(".writer*"))
    for name in ("refused.pt", "refused.safetensors", "refused.safetensors.index.json"):
        with pytest.raises(CheckpointException, match=r"with torchlift\.convert\(folder, file\)"):
            dcp.save(state_of(), storage_writer=CheckpointWriter(folder / name))
        assert not os.path.lexists(folder / name)
    if rank == 0:
        torchlift.convert(path, folder / "writer.pt")
        same(torch.load(folder / "writer.pt", weights_only=True), expected, "converted")
    dist.barrier()
    options: dict[str, Any] = {"planner": dcp.DefaultSavePlanner(enable_plan_caching=True)}
    options["storage_writer"] = CheckpointWriter(folder / "planned")
    dcp.save({"w": torch.ones(2)}, **options)
    with pytest.raises(CheckpointException, match=r"pass DefaultSavePlanner\(enable_plan_cach"):
        dcp.save({"w": torch.ones(2)}, **options)
    dist.barrier()


def denied(*args: object) -> None:
    raise PermissionError(errno.EPERM, "denied by the test")


def contents(path: Path) -> dict[str, bytes]:
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


def save_by_dcp(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=CheckpointWriter(path, **options))


@on(2, 4)
def test_values_that_differ_between_ranks_are_never_mixed(folder: Path) -> None:
    """One error that names the key on every rank, or rank 0's by the option."""
    world, rank = dist.get_world_size(), dist.get_rank()
    line = cpu_mesh()
    path = folder / "mixed.pt"
    save_consolidated({"w": torch.ones(3)}, path)
    before = path.read_bytes()
    norm = nn.BatchNorm1d(3)
    norm(torch.arange(6.0).view(2, 3) * (rank + 1))
    for state in (norm, norm.state_dict()):  # of buffers the first rank's count, as in torch
        save_consolidated(state, folder / "norm.pt")
        found = torch.load(folder / "norm.pt")["running_mean"]
        assert torch.equal(found, torch.arange(6.0).view(2, 3).mean(0) * 0.1)
        dist.barrier()
    copied = {key: value.clone() for key, value in norm.state_dict().items()}
    # Blocks that the ranks would take turns with, as shards of Megatron-style layers.
    shards = torch.full((9, 1 << 20), float(rank), dtype=torch.float32)
    replicas = DTensor.from_local(torch.full((2,), rank), line, [Replicate()], run_check=False)
    for state, key in [
        (copied, "running_mean"),
        ({"same": torch.ones(2), "layer": shards}, "layer"),
        ({"copies": replicas}, "copies"),
    ]:
        for suffix in ("pt", "safetensors", "dcp"):
            # DCP would keep the values of one rank for all (bitsandbytes#1840, KempnerForge#202).
            save = save_by_dcp if suffix == "dcp" else save_consolidated
            errors = (PlacementError, CheckpointException)
            with pytest.raises(errors, match=f"'{key}'.*different values") as caught:
                save(state, path.with_suffix(f".{suffix}"))
            assert "rank 1 differ from those of rank 0" in str(caught.value)
            assert 'replicated="rank0"' in str(caught.value)
            chosen = folder / f"chosen.{suffix}"
            save(state, chosen, replicated="rank0")
            found = torchlift.open(chosen).state_dict()
            everywhere: list[Any] = [None] * world
            plain = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}
            dist.all_gather_object(everywhere, plain)
            for name, value in everywhere[0].items():
                assert torch.equal(found[name], value), name
            assert torchlift.verify(chosen).ok
            dist.barrier()
    dist.barrier()
    assert path.read_bytes() == before
    assert not list(folder.glob(".mixed*"))


@on(1, 2, 4)
def test_keeps_sparse_and_quantised_tensors(folder: Path) -> None:
    """In a torch file, of which each rank writes a part; DCP is refused on every rank."""
    path, dense = folder / "kinds.pt", torch.arange(12.0).view(3, 4)
    state = {
        "w": distribute_tensor(dense, cpu_mesh(), [Shard(0)]),
        "sparse": dense.to_sparse(),
        "codes": torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8),
    }
    assert torchlift.save(state, path).tensors == 3
    with torchlift.open(path) as found:
        assert torch.equal(found["w"], dense)
        assert torch.equal(found["sparse"].to_dense(), dense)
        assert torch.equal(found["codes"].int_repr(), state["codes"].int_repr())
    assert torchlift.verify(path).ok
    with pytest.raises(PlacementError, match=r"'sparse': cannot be stored.*as a torch file, which"):
        torchlift.save(state, folder / "kinds", format="dcp")
    dist.barrier()
    assert not (folder / "kinds").exists()


@on(1, 2, 4)
def test_saves_among_the_ranks_of_a_process_group(folder: Path) -> None:
    """The first of them does what rank 0 does, and the others are not asked."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group([world - 1])
    path = folder / "group.pt"
    if rank == world - 1:
        save_consolidated({"w": torch.ones(3)}, path, process_group=group)
    everybody = dist.new_group(backend="gloo")
    state = {"w": distribute_tensor(torch.arange(3.0), cpu_mesh(), [Shard(0)])}
    save_consolidated(state, path, process_group=everybody)
    if rank == world - 1 > 0:  # some values are on ranks that do not save
        with pytest.raises(PlacementError, match="'w': no rank that saves holds some") as caught:
            save_consolidated(state, path, process_group=group)
        assert "process_group=" in str(caught.value.hint)
    dist.barrier()
    assert torch.load(path)["w"].tolist() == [0, 1, 2]
    dist.barrier()


@on(1, 2, 4)
def test_names_in_the_file_are_those_of_the_bare_model(folder: Path) -> None:
    """Whatever it is wrapped in: for DDP each rank writes some of what all have."""
    bare = net()
    for suffix in ("pt", "safetensors"):
        path = folder / f"wrapped.{suffix}"
        for wrap in ("ddp", "compiled ddp", "ddp of compiled", "checkpointed blocks in ddp"):
            save_consolidated(WRAPPERS[wrap](net()), path)
            found = torch.load(path) if suffix == "pt" else load_file(path)
            assert found.keys() == bare.state_dict().keys(), (wrap, found.keys())
            same(dict(found), dict(bare.state_dict()), wrap)
            if suffix == "pt":
                assert found._metadata.keys() == bare.state_dict()._metadata.keys(), wrap
        dist.barrier()


@on(2, who=(0, 1), name=("all_gather_object", "gather_object"))
def test_a_message_that_one_rank_cannot_send_is_sent_again(
    who: int, name: str, folder: Path
) -> None:
    """For want of memory, say: the others wait for it, until the timeout of their group."""
    collective, failed, fails = getattr(dist, name), 0, True

    def call(*args: Any, **options: Any) -> object:
        nonlocal failed, fails
        if dist.get_rank() == who and fails:
            failed, fails = failed + 1, False
            raise MemoryError("no room")
        fails = failed < 3
        return collective(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, call)
        save_consolidated({"w": torch.ones(2)}, folder / "saved.pt")
    assert failed == (dist.get_rank() == who) * (3 if name == "all_gather_object" else 1)
    assert torch.equal(torch.load(folder / "saved.pt")["w"], torch.ones(2))

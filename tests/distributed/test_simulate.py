"""The bytes that each rank of FSDP reads, by arithmetic and on meshes of every shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, on
from sharded_models import Odd, distribute, saved
from small_models import Tied
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

import torchlift
from torchlift import remap
from torchlift._model.dtensor import spans_at, wrap
from torchlift.distributed import (
    save_consolidated,
    simulate,
)
from torchlift.errors import MismatchError


def test_rows_are_cut_in_chunks(tmp_path: Path) -> None:
    """The last ranks get fewer rows or none, and every rank reads a tensor without dimensions."""
    torch.save(
        {"w": torch.ones(6, 8), "b": torch.ones(6), "n": torch.ones(()), "e": torch.ones(0, 3)},
        tmp_path / "m.pt",
    )
    assert simulate(tmp_path / "m.pt", 4) == (76, 76, 76, 4)
    assert simulate(tmp_path / "m.pt", 1) == (192 + 24 + 4,)


def test_a_tie_is_read_once(tmp_path: Path) -> None:
    """Both names of it are one tensor of the model."""
    torchlift.save(Tied(), tmp_path / "tied.pt")
    assert sum(simulate(tmp_path / "tied.pt", 2)) == Tied().head.weight.nbytes


def test_root_and_rename_choose_the_tensors(tmp_path: Path) -> None:
    """A rule that matches nothing is an error, as in a load."""
    state = {f"module.{key}": value for key, value in nn.Linear(4, 6).state_dict().items()}
    path = tmp_path / "saved.pt"
    torch.save({"model": state, "moments": torch.zeros(1000)}, path)
    assert sum(simulate(path, 3, root="model", rename=remap.strip("module"))) == 120
    assert simulate(path, 2, root="model", rename={"module.bias": None}) == (48, 48)
    with torchlift.open(path, root="model") as ckpt:
        assert simulate(ckpt, 3) == (40, 40, 40)
    with pytest.raises(MismatchError, match="matches no key"):
        simulate(path, 2, root="model", rename=remap.strip("net"))


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "2", 2**20 + 1])
def test_a_number_of_ranks_that_means_nothing_is_refused(tmp_path: Path, ranks) -> None:
    """Before the file is opened."""
    with pytest.raises(ValueError, match="expected a number from 1 to 1,048,576"):
        simulate(tmp_path / "nowhere.pt", ranks)


# ---- on ranks

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


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by dimension."""
    return {name: int(size) for name, size in (one.split("=") for one in text.split(","))}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_own_bytes(path: Path, mesh: str, model: nn.Module, nbytes: int) -> None:
    """Compare what this rank read with what it holds, and with the arithmetic for FSDP."""
    held = {id(t): (key, t) for key, t in model.state_dict(keep_vars=True).items()}.values()
    with torchlift.open(path) as ckpt:
        own = sum(local_of(t).numel() * ckpt.entries[key].itemsize for key, t in held)
        own += 16 * ("gaps" in ckpt and ckpt.entries["gaps"].stride == (2,))  # read with its gaps
    assert nbytes == own, (mesh, nbytes, own)
    if mesh == f"fsdp={dist.get_world_size()}":
        computed = simulate(path, dist.get_world_size(), rename={"gaps": None})
        buffer = 36 if path.suffix == ".pt" else 20  # of 5 numbers, with 4 gaps or none
        assert nbytes == computed[dist.get_rank()] + buffer


def compare(path: Path, mesh: str, *, dtype: torch.dtype | None = None) -> None:
    """Load on the mesh, and keep the bytes that each rank read."""
    sizes = parse_mesh(mesh)
    grid = cpu_mesh(*sizes.values(), names=tuple(sizes))
    model: Any = distribute(torchlift.skeleton(Odd), grid)
    report = torchlift.load(model, path, source="read", dtype=dtype)
    for key, value in model.state_dict().items():
        if "tp=" in mesh and "," not in mesh and key == "experts" and torch.__version__ < "2.12":
            continue  # strided shards of one dimension, which torch 2.11 does not put together
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, saved()[key].to(whole.dtype)), (mesh, key)
    require_own_bytes(path, mesh, model, report.bytes_read)


@on(2, mesh=MESHES[2])
@on(4, mesh=MESHES[4])
@on(8, mesh=MESHES[8])
def test_every_rank_reads_the_bytes_of_its_own_shards(mesh: str, folder: Path) -> None:
    """On meshes of one to three dimensions: FSDP, HSDP, TP and FSDP over TP, on uneven sizes.

    Of one file, and of what FSDP over all ranks wrote, in as many files and in uneven pieces.
    """
    path, parts = folder / "odd.pt", folder / "parts"
    if dist.get_rank() == 0:
        torch.save(saved(), path)
    model = Odd()
    model.load_state_dict({key: value.contiguous() for key, value in saved().items()})
    dcp.save(fully_shard(model).state_dict(), checkpoint_id=parts)
    dist.barrier()
    compare(path, mesh)
    compare(path, mesh, dtype=torch.bfloat16)
    compare(parts, mesh)
    dist.barrier()


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


@on(8)
def test_shards_are_in_every_order(folder: Path) -> None:
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
    path = folder / "orders.pt"
    save_consolidated(state, path)
    found = torch.load(path)
    for key, (what, whole) in named.items():
        assert torch.equal(found[key], whole), what
    with torch.no_grad():
        target = nn.ParameterDict({k: parameter(v, zeros=True) for k, v in made.items()})
    torchlift.load(target, path, source="read")
    for key, (what, _) in named.items():
        assert torch.equal(local_of(target[key]), local_of(made[key])), what
    dist.barrier()


def parameter(tensor: torch.Tensor, zeros: bool = False) -> Any:
    """Make a parameter in the order of a DTensor, which `nn.Parameter` forgets."""
    local = local_of(tensor).detach()
    return wrap(tensor, torch.zeros_like(local) if zeros else local, True, parameter=True)


def _indices(spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.tensor([i for start, stop in spans for i in range(start, stop)], dtype=torch.int64)

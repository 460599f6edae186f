"""Files of FSDP's ranks: as torch writes them, and DTensors as older versions describe them."""

from __future__ import annotations

import copyreg
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def make_model() -> nn.Module:
    """Return a model whose sizes do not divide by two, with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.BatchNorm1d(3))


def save_ranks(folder: str) -> None:
    """Save on two ranks what a trainer with FSDP2 does, and slices of safetensors."""
    warnings.simplefilter("ignore")  # torch warns that this writer may change
    rank, mesh, out = dist.get_rank(), init_device_mesh("cpu", (2,)), Path(folder)
    model = make_model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    torch_file(out / "fsdp", "model", rank, 2, state)
    torch_file(out / "fsdp", "optim", rank, 2, optimizer.state_dict())
    torch_file(out / "fsdp", "extra_state", rank, 2, {"rng": torch.get_rng_state(), "rank": rank})
    torch_file(out / "buffers", "model", rank, 2, {**state, "2.running_mean": torch.ones(3) * rank})
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    torch_file(out / "partial", "model", rank, 2, {"w": partial})
    column = torch.arange(12.0).view(3, 4)
    for name, placement in {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}.items():
        state[name] = distribute_tensor(column, mesh, [placement])
    state["one"] = distribute_tensor(torch.ones(1, dtype=torch.bfloat16), mesh, [Shard(0)])
    torch_file(out / "placed", "model", rank, 2, state)
    for name, mapping in {
        "slices": None,
        "buckets": {key: 1 + at % 2 for at, key in enumerate(state)},
        # One rank alone holds the last one, and the other rank writes no such file.
        "holes": {**dict.fromkeys(state, 1), "one": 2, "all": 3},
    }.items():
        writer = HuggingFaceStorageWriter(str(out / name), mapping, save_distributed=True)
        dcp.save(state, storage_writer=writer)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    moments = {
        f"{number}.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for number, each in optimizer.state_dict()["state"].items()
        for name, value in each.items()
    }
    if rank == 0:
        torch.save(whole, out / "whole.pt")
        torch.save(moments, out / "moments.pt")


def torch_file(folder: Path, kind: str, rank: int, world: int, state: object) -> Path:
    """Save what one rank has, under the name that trainers give to it."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{kind}_world_size_{world}_rank_{rank}.pt"
    torch.save(state, path)
    return path


# -- DTensors without a process group, and with the names that classes had

_OLD = "torch.distributed._tensor"
#: Class -> its module until torch 2.4, in 2.8, and in 2.10.
_MODULES = {
    "DTensor": (f"{_OLD}.api", "torch.distributed.tensor", "torch.distributed.tensor"),
    **dict.fromkeys(
        ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
        (f"{_OLD}.placement_types", *["torch.distributed.tensor._dtensor_spec"] * 2),
    ),
    **dict.fromkeys(
        ("Shard", "Replicate", "_StridedShard", "Partial"),
        (f"{_OLD}.placement_types", *["torch.distributed.tensor.placement_types"] * 2),
    ),
    "DeviceMesh": ("torch.distributed.device_mesh",) * 3,
    "_MeshLayout": ("torch.distributed._mesh_layout",) * 3,
}


class Described:
    """An object of a class of torch, as pickle sees it: its name and its attributes."""

    def __init__(self, kind: type, state: object, *arguments: object) -> None:
        self.kind = kind
        self.reduced = copyreg.__newobj__, (kind, *arguments), state  # type: ignore[attr-defined]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self.kind

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced


class _Wrapper:
    def __init__(self, kind: type, shown: tuple[Any, ...], state: object) -> None:
        made = torch._utils._rebuild_wrapper_subclass, kind, (kind, *shown), state
        self.reduced = torch._tensor._rebuild_from_type_v2, made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced


class Era:
    """The classes of a version of torch: 0 for 2.4, 1 for 2.8, 2 for 2.10."""

    def __init__(self, number: int = 2) -> None:
        self.number = number
        self.kinds = {
            name: type(name, (), {"__module__": modules[number], "__qualname__": name})
            for name, modules in _MODULES.items()
        }

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let pickle find the classes by their names."""
        before = dict(sys.modules)
        for name, kind in self.kinds.items():
            module = sys.modules[kind.__module__] = ModuleType(kind.__module__)
            vars(module).update({n: k for n, k in self.kinds.items()
                                 if k.__module__ == kind.__module__}, **{name: kind})  # fmt: skip
        try:
            yield
        finally:
            sys.modules.clear()
            sys.modules.update(before)

    def placed(self, name: str, **state: object) -> Described:
        """Return a placement."""
        return Described(self.kinds[name], state or None)

    def dtensor(
        self,
        local: torch.Tensor,
        shape: Sequence[int],
        placements: Sequence[object],
        mesh: Sequence[int],
        at: Sequence[int] | None,
        changed: Mapping[str, object] | None = None,
    ) -> _Wrapper:
        """Return a DTensor, with `changed` parts of its layout."""
        if self.number < 2:
            where: dict[str, object] = {"mesh": torch.zeros(tuple(mesh), dtype=torch.int)}
        else:
            layout = {"shape": tuple(mesh), "stride": tuple(mesh)}
            where = {"_layout": Described(self.kinds["_MeshLayout"], layout)}
        # Lists until 2.8, tuples since.
        where["_coordinate_on_dim"] = at and (list(at) if self.number < 2 else tuple(at))
        stride = torch.empty(tuple(shape), device="meta").stride()
        meta = Described(self.kinds["TensorMeta"], None, torch.Size(shape), stride, local.dtype)
        spec = {
            "mesh": Described(self.kinds["DeviceMesh"], where),
            "placements": tuple(placements),
            "tensor_meta": meta,
            **(changed or {}),
        }
        state = {"_local_tensor": local, "_spec": Described(self.kinds["DTensorSpec"], spec)}
        shown = local.dtype, tuple(shape), stride, 0, torch.strided, local.device, False
        return _Wrapper(self.kinds["DTensor"], shown, (None, state))

    def save(self, path: Path, state: Mapping[str, object]) -> Path:
        """Save a state dict with such tensors."""
        path.parent.mkdir(exist_ok=True)
        with self.named():
            torch.save(dict(state), path)
        return path

    def save_rows(self, folder: Path, whole: torch.Tensor, world: int = 2) -> Path:
        """Save the rows of a tensor on some ranks."""
        for rank, local in enumerate(whole.chunk(world)):
            shard = self.placed("Shard", dim=0)
            made = self.dtensor(local.clone(), whole.shape, [shard], [world], [rank])
            self.save(folder / f"model_world_size_{world}_rank_{rank}.pt", {"w": made})
        return folder

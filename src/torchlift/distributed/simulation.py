"""Plan the load of each rank of a mesh on one machine, without a cluster or a GPU.

A child process for each rank joins torch's fake process group, distributes a copy of the model and
plans its load. Each rank needs a process of its own: DTensor caches what it computed for a rank by
the mesh, which is equal on all ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint, dtype_of
from torchlift._model.dtensor import local_tensor
from torchlift._model.names import Names
from torchlift._model.ranks import portable, rank
from torchlift._model.slots import ModuleTree, collect
from torchlift._plan.planner import LoadPlan, plan
from torchlift._plan.report import LoadReport, summarise
from torchlift._plan.rules import DtypeRule, Rename, dtype_named, rename_keys
from torchlift._sources.opening import checkpoint
from torchlift._system.text import Facts, Summary, count_of, human
from torchlift.distributed.ranks import on_ranks
from torchlift.errors import CheckpointError
from torchlift.formats.index import TensorEntry

#: Distributes a model over a mesh, in place or by returning another module.
Parallelize = Callable[[nn.Module, Any], nn.Module | None]

_SHARD_DIMS = ("fsdp", "dp_shard", "shard")
_REPLICATE_DIMS = ("dp", "ddp", "dp_replicate", "replicate")
#: A mesh of more ranks is simulated at its corners.
_ALL_RANKS = 16
_MOST_RANKS = 1 << 20
_SECONDS = 600.0


@dataclass(frozen=True, repr=False)
class Simulation(Summary):
    """The bytes that ranks of a mesh read and hold.

    Attributes:
        mesh: Dimension -> size, outermost first.
        ranks: The ranks that were simulated.
        bytes: For each of these ranks, the bytes that it reads.
        local_bytes: For each of these ranks, the bytes of its parameters and buffers.
        plan: The plan of the model before it is distributed.
    """

    mesh: dict[str, int]
    ranks: tuple[int, ...]
    bytes: tuple[int, ...]
    local_bytes: tuple[int, ...]
    plan: LoadPlan = field(repr=False)

    def to_dict(self) -> dict[str, object]:
        """Return the same as plain data."""
        return {**vars(self), "plan": LoadReport.to_dict(self.plan)}

    def _summary(self) -> tuple[str, Facts]:
        world = math.prod(self.mesh.values())
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        which = f"ranks {', '.join(map(str, self.ranks))}" if len(self.ranks) < world else "ranks"
        read, held = (f"{human(min(n))} to {human(max(n))}" for n in (self.bytes, self.local_bytes))
        facts = [("", f"{which} read {read} each"), ("", f"they hold {held} each")]
        return f"mesh: {mesh}, {count_of(world, 'rank')}", [*facts, *summarise(self.plan)]


class _Cost(NamedTuple):
    """The bytes that one rank reads and holds."""

    read: int
    held: int


def simulate(
    source: Checkpoint | str | os.PathLike[str],
    mesh: Mapping[str, int] | str,
    *,
    model: nn.Module | None = None,
    parallelize: Parallelize | None = None,
    ranks: Iterable[int] | None = None,
    root: str | None = None,
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
) -> Simulation:
    """Compute how many bytes each rank of a mesh reads when it loads its shards of a model.

    A child process for each rank runs `parallelize` with torch's fake process group, then
    `torchlift.plan`. No weights are read. A function from a notebook or a script is sent with
    cloudpickle.

    Args:
        source: A checkpoint or its path.
        mesh: Sizes by dimension, outermost first, as a mapping or as text ``"fsdp=1024,tp=8"``.
        model: The model, preferably a `torchlift.skeleton`. It is not changed. Default: a model
            with the names and shapes in the checkpoint.
        parallelize: Your own function that distributes the model. It gets a copy of the model and
            the ``DeviceMesh``, and may return another module. Default: ``fully_shard``, for one
            dimension (``fsdp``) or two (``dp``, ``fsdp``).
        ranks: The ranks to simulate. Default: all ranks of a mesh of at most 16. Of a larger mesh,
            the first and the last rank along each dimension.
        root: The container of the checkpoint that holds the model. See `torchlift.load`.
        rename: New names for the keys. See `torchlift.load`.
        dtype: The dtype after the load. It changes the bytes held, not the bytes read.
        strict: Raise an error if a name is missing or unexpected.
        ignore_mismatched: Skip a tensor whose shape differs.

    Returns:
        The bytes that each simulated rank reads and holds.

    Raises:
        ValueError: If the mesh is not valid, or its dimensions need `parallelize`.
        MismatchError: If the checkpoint does not match the model.

    Example:
        >>> import os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save(torch.nn.Linear(1024, 1024, bias=False).state_dict(), path)
        >>> torchlift.distributed.simulate(path, "fsdp=4").bytes
        (1048576, 1048576, 1048576, 1048576)
    """
    sizes = parse_mesh(mesh)
    world = math.prod(sizes.values())
    if parallelize is None:
        _require_fsdp(sizes)
    elif model is None:
        raise ValueError("parallelize= needs the model that it distributes: pass model=")
    chosen = _corners(sizes) if ranks is None else tuple(ranks)
    if not chosen or not all(0 <= number < world for number in chosen):
        raise ValueError(f"ranks={chosen}: expected ranks below {world}")
    rules: dict[str, Any] = {
        "root": root, "rename": rename, "dtype": dtype, "strict": strict,
        "ignore_mismatched": ignore_mismatched, "source": "read", "present": False,
    }  # fmt: skip
    if model is None:
        with checkpoint(source, root) as ckpt:
            model = _model_of(ckpt, rename)
    whole = plan(model, source, **rules)
    # A stage of a pipeline holds a part of the names. The plan above has compared all of them.
    rules["allow_unexpected"] = ["*"]
    costs = list[_Cost]()
    for result in on_ranks(
        len(chosen), _plan_of_rank, source, sizes, chosen, model, parallelize or _shard_fully,
        rules, whole.replayed, timeout=_SECONDS,
    ):  # fmt: skip
        if isinstance(result, Exception):
            raise result
        costs.append(result)
    read, held = zip(*costs, strict=True)
    return Simulation(sizes, chosen, read, held, whole)


def _plan_of_rank(
    source: Checkpoint | str | os.PathLike[str],
    mesh: dict[str, int],
    ranks: tuple[int, ...],
    model: nn.Module,
    parallelize: Parallelize,
    rules: dict[str, Any],
    replayed: list[str],
) -> _Cost | Exception:
    """Plan the load of one rank, in a process of its own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    number = ranks[rank()]
    # The group of these processes gives way to the fake one. It is kept, and so are its sockets:
    # another process may still use them.
    gloo = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=number, world_size=math.prod(mesh.values()))
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    try:
        found: object = parallelize(model, device_mesh)
        if not isinstance(found, nn.Module | None):
            raise ValueError(f"parallelize= returned {type(found)}: expected the model or None")
        model = model if found is None else found
        names = Names(ModuleTree(model))

        def device_of(entry: TensorEntry) -> str | None:
            # A skeleton that was sent to this process does not know how these tensors are made.
            return "meta" if names.canonical(entry.key) in replayed else None

        planned = plan(model, source, device=device_of, **rules)
    except Exception as error:
        return portable(error) if isinstance(error, CheckpointError) else error
    held = 0
    for group in collect(model):
        loaded = next((planned.loaded.get(names.canonical(name)) for name in group.names), None)
        dtype = dtype_named(loaded.dtype) if loaded is not None else None
        held += local_tensor(group.tensor).numel() * (dtype or group.tensor.dtype).itemsize
    del gloo
    return _Cost(planned.bytes_to_read, held)


def _shard_fully(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh)


def _require_fsdp(sizes: Mapping[str, int]) -> None:
    """Refuse a mesh whose dimensions do not say what ``fully_shard`` does with them.

    Raises:
        ValueError: If there is one.
    """
    *replicates, shards = sizes
    if len(sizes) > 2 or shards not in _SHARD_DIMS or not {*replicates} <= {*_REPLICATE_DIMS}:
        raise ValueError(
            f"mesh dimensions {', '.join(sizes)}: pass a model and your own function that "
            "distributes it (parallelize). Without one the mesh is fsdp=N, or dp=N,fsdp=N"
        )


def _model_of(ckpt: Checkpoint, rename: Rename | None) -> nn.Module:
    """Return a model on meta with the names and shapes of a checkpoint."""
    model = nn.Module()
    for key, name in rename_keys(ckpt.entries, rename, ckpt.path).items():
        entry = ckpt.entries[key]
        *path, last = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
            owner = owner.get_submodule(part)
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry, ckpt.path), device="meta")
        if entry.shape:
            owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:  # fully_shard refuses a parameter without dimensions
            owner._buffers[last] = tensor
    return model


def _corners(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return all ranks of a small mesh, or the first and the last along each dimension.

    Example:
        >>> _corners({"fsdp": 8, "tp": 4})
        (0, 3, 28, 31)
    """
    world = math.prod(sizes.values())
    if world <= _ALL_RANKS:
        return tuple(range(world))
    grid = torch.arange(world).view(*sizes.values())
    ends = [sorted({0, size - 1}) for size in sizes.values()]
    return tuple(int(grid[at]) for at in itertools.product(*ends))


def parse_mesh(mesh: Mapping[str, int] | str) -> dict[str, int]:
    """Return the sizes of a mesh by dimension.

    Raises:
        ValueError: If a name or a size is not valid.

    Example:
        >>> parse_mesh("fsdp=1024,tp=8")
        {'fsdp': 1024, 'tp': 8}
    """
    items: Any = mesh.items() if isinstance(mesh, Mapping) else map(_dimension, mesh.split(","))
    found: dict[str, int] = {}
    for name, size in items:
        if name in found:
            raise ValueError(f"mesh dimension {name!r} is given twice")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh dimension {name!r} has size {size!r}: expected 1 or more")
        found[name] = size
    if not found:
        raise ValueError("a mesh needs at least one dimension, such as fsdp=8")
    if math.prod(found.values()) > _MOST_RANKS:
        raise ValueError(f"a mesh of more than {_MOST_RANKS:,} ranks")
    return found


def _dimension(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(-?[0-9]+)\s*", text)
    if found is None:
        raise ValueError(f"{text.strip()[:80]!r} is not a mesh dimension such as fsdp=8")
    return found[1], int(found[2][:20])  # longer ones are too many ranks in any case

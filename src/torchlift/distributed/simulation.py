"""Which bytes each rank of a mesh would read, computed by one process without a cluster or a GPU.

How tensors are distributed is torch's to say: the caller's own function (``fully_shard``,
``parallelize_module``) runs once, on a skeleton and a fake process group, and the placements of
the DTensors that it makes tell what every rank of the mesh holds. Counting is per distinct shape
and layout, since a model of hundreds of tensors on thousands of ranks has few of those.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._model.dtensor import Spans, is_dtensor, local_shape, shard_spans
from torchlift._model.names import Names
from torchlift._model.slots import Group, ModuleTree, collect
from torchlift._model.torch_private import shard_order
from torchlift._plan.names import Made, rewrite_entries
from torchlift._plan.planner import LoadPlan, plan_only
from torchlift._plan.report import LoadReport, summarise
from torchlift._plan.rules import (
    DtypeRule,
    Options,
    Rename,
    check_rename,
    check_rule,
    entry_like,
    stored_dtype,
    target_dtype,
)
from torchlift._sources.opening import checkpoint
from torchlift._system.text import Facts, Summary, count_of, human
from torchlift.formats.boxes import narrowed, row_major, run_count, steps_in_file
from torchlift.formats.index import Chunk, TensorEntry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: What distributes a model over a mesh, in place or by returning another one.
Parallelize = Callable[[nn.Module, Any], nn.Module | None]

#: Mesh dimensions that shard where no function says so; several are one, as for ``fully_shard``.
SHARD_DIMS = ("fsdp", "dp_shard", "shard", "cp", "ep")
#: Mesh dimensions along which every rank reads the same.
REPLICATE_DIMS = ("dp", "ddp", "dp_replicate", "replicate", "hsdp")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, repr=False)
class Simulation(Summary):
    """What the ranks of a mesh would read.

    Attributes:
        mesh: dimension -> size, outermost first.
        bytes: for each rank, in row-major order of the mesh, the bytes that it reads.
        requests: for each rank the contiguous byte ranges that it reads, neighbours not merged.
        files: file -> (bytes, byte ranges) that all ranks together read from it.
        nbytes: bytes in the checkpoint of the tensors that are loaded.
        local_bytes: for each rank the bytes of the parameters and buffers that it has after the
            load, also of those that no file provides; without what FSDP adds to uneven shards.
        plan: with a model and a checkpoint, how the names and shapes of the two fit; else None.
    """

    mesh: dict[str, int]
    bytes: tuple[int, ...]
    requests: tuple[int, ...]
    files: dict[str, tuple[int, int]]
    nbytes: int
    local_bytes: tuple[int, ...] = ()
    plan: LoadPlan | None = field(default=None, repr=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.bytes)

    @property
    def amplification(self) -> float:
        """Bytes that all ranks together read, per byte of the checkpoint."""
        return sum(self.bytes) / self.nbytes if self.nbytes else 1.0

    def to_dict(self) -> dict[str, object]:
        """Return the same as plain data."""
        found = dict(vars(self), ranks=self.ranks, amplification=self.amplification)
        found["files"] = {f: {"bytes": n, "requests": m} for f, (n, m) in self.files.items()}
        found["plan"] = LoadReport.to_dict(self.plan) if self.plan is not None else None
        return {name: value for name, value in found.items() if value is not None}

    def _summary(self) -> tuple[str, Facts]:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        most = max((count for _, count in self.files.values()), default=0)
        lines = [
            f"each rank reads {human(min(self.bytes))} to {human(max(self.bytes))} "
            f"in {min(self.requests):,} to {max(self.requests):,} byte ranges",
            f"all together {human(sum(self.bytes))}, {self.amplification:.2f} times the file"
            f"{'s' if len(self.files) > 1 else ''}",
            f"{count_of(len(self.files), 'file')}, at most {most:,} byte ranges from one",
        ]
        if self.plan is not None:
            lines.append(
                f"each rank holds {human(min(self.local_bytes))} to "
                f"{human(max(self.local_bytes))} once {len(self.plan.loaded):,} tensors are loaded"
            )
        facts = [("", line) for line in lines]
        facts += summarise(self.plan) if self.plan is not None else []
        return (
            f"mesh: {mesh}, {count_of(self.ranks, 'rank')}, {human(self.nbytes)} of tensors",
            facts,
        )


def simulate(
    source: nn.Module | Checkpoint | str | os.PathLike[str],
    mesh: Mapping[str, int] | str | None = None,
    *,
    model: nn.Module | None = None,
    parallelize: Parallelize | None = None,
    root: str | None = None,
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
) -> Simulation:
    """Compute which bytes each rank of a mesh reads when it loads its shards of a model.

    Args:
        source: a checkpoint or its path; or a module, such as a `torchlift.skeleton` of a model
            that no machine here could hold, taken as one file.
        mesh: dimension -> size, outermost first, as a mapping or as text ``"fsdp=1024,tp=8"``.
            None where the model is distributed already: the mesh is its own.
        model: what the checkpoint is to be loaded into: names, shapes and ties are those of
            `torchlift.plan`, and only what it would load is read. It is not changed.
        parallelize: your own function that distributes the model. It gets a copy of the model and
            the ``DeviceMesh``, on the CPU, with the names that `mesh` has, and calls
            ``fully_shard``, ``parallelize_module`` or whatever makes DTensors, as in training; it
            may return another module. torch's fake process group lets it run in this process, as
            rank 0. A mesh dimension named ``pp`` makes it run once per stage, on a copy each, as
            the first rank of the stage: it keeps that stage's layers under their names in the
            whole model. Whatever else it makes different from rank to rank is not seen.
            Without it, and of a file without a model, every parameter is sharded along its first
            dimension, as ``fully_shard`` does, over ``fsdp``, ``dp_shard``, ``shard``, ``cp`` and
            ``ep`` (flattened to one); ``dp``, ``ddp``, ``dp_replicate``, ``replicate`` and
            ``hsdp`` replicate. A module's buffers are on every rank, and all tensors of a file
            count as parameters.
        root: keep only what is under this container of the checkpoint.
        rename: as for `torchlift.load`.
        dtype: as for `torchlift.load`; it changes what the ranks hold, not what they read.
        strict: as for `torchlift.load`, with a model.
        ignore_mismatched: as for `torchlift.load`, with a model.

    Returns:
        Bytes and byte ranges per rank and per file. Thousands of ranks take seconds.

    Raises:
        ValueError: a mesh dimension whose name or size means nothing, arguments that do not go
            together, or `parallelize` where a process group exists.
        MismatchError: the checkpoint does not fit the model.

    Example:
        >>> import torch, torchlift
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
        >>> from torchlift.distributed import simulate
        >>> model = torchlift.skeleton(torch.nn.Linear, 1024, 1024, bias=False)
        >>> found = simulate(model, "fsdp=8")
        >>> found.bytes[0], found.amplification
        (524288, 1.0)
        >>> def columns(model, mesh):
        ...     parallelize_module(model, mesh["tp"], ColwiseParallel())
        >>> simulate(model, "dp=2,tp=8", parallelize=columns).amplification
        2.0
    """
    made = None
    if isinstance(source, nn.Module):
        if root is not None or rename is not None or model is not None:
            raise ValueError("root=, rename= and model= are for a checkpoint, not for a module")
        model, tensors = source, list(_of_module(source, dtype))
    else:
        with checkpoint(source, None, whole=True) as whole, checkpoint(whole, root) as ckpt:
            if model is not None:
                options = Options(
                    rename, dtype=dtype, strict=strict, ignore_mismatched=ignore_mismatched,
                    source="read", root=root,
                )  # fmt: skip
                made = plan_only(model, whole, options)
                tensors = list(
                    _of_plan(model, made, rewrite_entries(ckpt.entries, rename, ckpt.path))
                )
                made = made._answer()
            elif strict and not ignore_mismatched:
                tensors = list(_of_checkpoint(ckpt, rename, dtype))
            else:
                raise ValueError("strict= and ignore_mismatched= need the model: pass model=")
    sizes, stages = _distribute(tensors, mesh, model, parallelize)
    totals, files = _count(stages)
    read, requests, local = (tuple(column.tolist()) for column in totals.unbind(1))
    nbytes = sum(tensor.entry.nbytes for tensor in tensors if tensor.entry.chunks)
    return Simulation(sizes, read, requests, files, nbytes, local, made)


def parse_mesh(mesh: Mapping[str, int] | str) -> dict[str, int]:
    """Return the dimensions and sizes that a text or a mapping gives.

    Raises:
        ValueError: it is no mesh.

    Example:
        >>> parse_mesh("fsdp=1024,tp=8")
        {'fsdp': 1024, 'tp': 8}
    """
    items: Any = map(_dimension, mesh.split(",")) if isinstance(mesh, str) else mesh.items()
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


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the model, before it is distributed.

    Attributes:
        names: several when it is tied.
        itemsize: bytes per element once it is loaded.
        entry: its shape, and where its bytes are; without chunks if no file provides it.
        is_parameter: whether FSDP would shard it.
    """

    names: tuple[str, ...]
    itemsize: int
    entry: TensorEntry
    is_parameter: bool = True


def _tensor(group: Group, dtype: torch.dtype, entry: TensorEntry | None = None) -> _Tensor:
    entry = entry or entry_like(group.fqn, group)
    return _Tensor(group.names, dtype.itemsize, entry, group.is_parameter)


def _of_plan(model: nn.Module, made: LoadPlan, whole: Mapping[str, Made]) -> Iterator[_Tensor]:
    """List the tensors of a model, with the bytes that a plan loads."""
    found: dict[int, tuple[torch.dtype, TensorEntry | None]] = {
        id(making.group.tensor): (making.dtype, None) for making in made._work.makings
    }
    for step in made._work.steps:
        tensor, entry = step.group.tensor, step.entry
        if is_dtensor(tensor):  # the step is about what this rank reads
            entry = whole[step.key].entry if step.key in whole else None
            if entry is None or (entry.shape != tensor.shape and tensor.dim() > 0):
                raise ValueError(
                    f"{step.key} is not one entry of the checkpoint: pass the model before it is "
                    "distributed, and your function as parallelize="
                )
        found[id(tensor)] = step.dtype, entry
    for group in collect(model):
        yield _tensor(group, *found.get(id(group.tensor), (group.tensor.dtype, None)))


def _of_module(model: nn.Module, dtype: DtypeRule) -> Iterator[_Tensor]:
    """List the tensors of a module, as if one file had them all."""
    groups = collect(model)
    check_rule(dtype, [name for group in groups for name in group.names], present=False)
    for group in groups:
        entry, becomes = entry_like(group.fqn, group), group.tensor.dtype
        if group.persistent:
            becomes = target_dtype(dtype, entry, group.tensor, becomes)
            chunk = Chunk("model", 0, entry.nbytes, (0,) * len(entry.shape), entry.shape)
            entry = entry._replace(stride=row_major(entry.shape), chunks=(chunk,))
        yield _tensor(group, becomes, entry)


def _of_checkpoint(ckpt: Checkpoint, rename: Rename | None, dtype: DtypeRule) -> Iterator[_Tensor]:
    """List the tensors of a checkpoint, two keys of one tensor once."""
    check_rename(rename, {*ckpt.entries, *ckpt.objects}, ckpt.path)
    seen: set[object] = set()
    for name, (entry, _) in rewrite_entries(ckpt.entries, rename, ckpt.path).items():
        place = (entry.storage, entry.chunks[:1], entry.shape, entry.stride, entry.dtype)
        if place in seen and entry.chunks:
            continue
        seen.add(place)
        becomes = stored_dtype(dtype, entry._replace(key=name), ckpt.path)
        yield _Tensor((name,), becomes.itemsize, entry)


class _Layout(NamedTuple):
    """How a tensor is distributed; by default not at all.

    Attributes:
        sizes: of the mesh that it is distributed over.
        placements: one per dimension of that mesh.
        ranks: the ranks of that mesh, in row-major order.
        order: see `shard_spans`.
    """

    sizes: tuple[int, ...] = ()
    placements: tuple[Any, ...] = ()
    ranks: tuple[int, ...] = (0,)
    order: tuple[tuple[int, ...], ...] = ()


#: Ranks that have the same tensors, and how these are distributed: a stage of a pipeline.
_Stage = tuple[torch.Tensor, list[tuple[_Tensor, _Layout]]]


def _distribute(
    tensors: list[_Tensor],
    mesh: Mapping[str, int] | str | None,
    model: nn.Module | None,
    parallelize: Parallelize | None,
) -> tuple[dict[str, int], list[_Stage]]:
    """Return the mesh and the stages of its pipeline: one where there is no pipeline."""
    values = [group.tensor for group in collect(model)] if model is not None else []
    device_meshes = {value.device_mesh for value in values if is_dtensor(value)}
    if model is not None and device_meshes:
        if mesh is not None or parallelize is not None:
            raise ValueError("mesh= and parallelize= are for a model that is not distributed yet")
        world = torch.distributed.get_world_size()
        largest = max(device_meshes, key=lambda mesh: (mesh.size(), mesh.ndim))
        names = largest.mesh_dim_names if largest.size() == world else None
        sizes = dict(zip(names, largest.shape, strict=True)) if names else {"rank": world}
        return sizes, [(torch.arange(world), _layouts(model, tensors))]
    sizes = parse_mesh(mesh if mesh is not None else {})
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    if parallelize is None:
        layout = _first_dimension(sizes, grid)
        layouts = [(t, layout if t.is_parameter and t.entry.shape else _Layout()) for t in tensors]
        return sizes, [(grid.flatten(), layouts)]
    if model is None:
        raise ValueError("parallelize= needs the model that it distributes: pass model=")
    if "pp" in sizes:
        grid = grid.movedim(list(sizes).index("pp"), 0)
    stages = []
    for ranks in grid.reshape(sizes.get("pp", 1), -1):
        with _fake_mesh(sizes, int(ranks[0])) as device_mesh:
            copied = copy.deepcopy(model)
            found: object = parallelize(copied, device_mesh)
            if not isinstance(found, nn.Module | None):
                raise ValueError(f"parallelize= returned {type(found)}: expected the model or None")
            stages.append((ranks, _layouts(copied if found is None else found, tensors)))
    seen = {id(tensor) for _, layouts in stages for tensor, _ in layouts}
    lost = [tensor.names[0] for tensor in tensors if tensor.entry.chunks and id(tensor) not in seen]
    if lost:
        raise ValueError(
            f"parallelize= leaves nothing with the name {lost[0]} ({count_of(len(lost), 'name')} "
            "lost): each tensor must keep its name, in one stage of a pipeline at least"
        )
    return sizes, stages


def _first_dimension(sizes: Mapping[str, int], grid: torch.Tensor) -> _Layout:
    """Return how FSDP distributes parameters over a mesh: along their first dimension.

    Raises:
        ValueError: what a dimension of the mesh does is not known by its name.
    """
    for name in sizes:
        if name not in (*SHARD_DIMS, *REPLICATE_DIMS):
            raise ValueError(
                f"mesh dimension {name!r} needs a model and your own function that distributes it "
                f"(parallelize); without one there are {', '.join((*SHARD_DIMS, *REPLICATE_DIMS))}"
            )
    if not any(name in SHARD_DIMS for name in sizes):
        return _Layout()
    from torch.distributed.tensor import Shard

    # Over several dimensions it is FSDP over the one that they flatten to: what counts for sizes
    # that do not divide evenly.
    ranks = grid[tuple(slice(None) if name in SHARD_DIMS else 0 for name in sizes)].flatten()
    return _Layout((len(ranks),), (Shard(0),), tuple(ranks.tolist()))


@contextmanager
def _fake_mesh(sizes: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh on which collectives do nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        raise ValueError(
            "parallelize= is for a process without a process group: pass the distributed model here"
        )
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def _layouts(model: nn.Module, tensors: list[_Tensor]) -> list[tuple[_Tensor, _Layout]]:
    """Read off the DTensors of a model how it is distributed.

    Args:
        model: distributed, and perhaps wrapped.
        tensors: those of the model as it was.
    """
    tree = ModuleTree(model)
    names, by_name = Names(tree), {name: t for t in tensors for name in t.names}
    found = []
    for group in tree.groups:
        value, layout = group.tensor, _Layout()
        fqns = names.fqns(value) or group.names
        known = [by_name[name] for name in fqns if name in by_name]
        tensor = known[0] if known else _tensor(group, value.dtype)
        if tensor.entry.shape != tuple(value.shape) and value.dim() > 0:
            raise ValueError(
                f"{fqns[0]} is now {list(value.shape)}, and no DTensor says which part that is"
            )
        if is_dtensor(value):
            mesh = value.device_mesh
            ranks = tuple(mesh.mesh.flatten().tolist())
            layout = _Layout(mesh.shape, value.placements, ranks, shard_order(value))
        found.append((tensor, layout))
    return found


def _places(ranks: tuple[int, ...], world: int) -> torch.Tensor:
    """Return, for every rank of the world, its index in the mesh like this one that it is in.

    A slice of a mesh has others beside it. The numbers of its ranks count along some digits of the
    whole mesh; what the other digits say makes no difference.

    Example:
        >>> _places((0, 1, 4, 5), 8)
        tensor([0, 1, 0, 1, 2, 3, 2, 3])
    """
    offsets = torch.tensor(ranks) - min(ranks)
    index = torch.full((world,), -1).index_copy(0, offsets, torch.arange(len(ranks)))
    everyone, first = torch.arange(world), torch.zeros(world, dtype=torch.int64)
    digits = sorted(offsets.tolist())
    while len(digits) > 1:
        step = digits[1]
        size = next((n for n, at in enumerate(digits) if at != n * step), len(digits))
        first += everyone // step % size * step
        digits = digits[::size]
    found = index[first.clamp(max=world - 1)]
    if (found < 0).any():
        raise ValueError("the ranks of a parameter's mesh are not a slice of the whole mesh")
    return found


def _count(stages: list[_Stage]) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
    """Add up what every rank reads and holds.

    Returns:
        For each rank bytes read, byte ranges read, bytes kept; for each file bytes and byte ranges.
    """
    world = sum(len(ranks) for ranks, _ in stages)
    totals, files = torch.zeros(world, 3, dtype=torch.int64), _Sums()
    tables: dict[object, tuple[torch.Tensor, _Sums]] = {}
    for ranks, layouts in stages:
        often: Counter[tuple[tuple[object, ...], _Layout]] = Counter()
        for tensor, layout in layouts:
            names = list(dict.fromkeys(chunk.file for chunk in tensor.entry.chunks))
            kind = _alike(tensor, names)
            if (kind, layout) not in tables:
                tables[kind, layout] = _table(tensor, layout)
            often[kind, layout] += 1
            copies = len(ranks) // math.prod(layout.sizes)
            for file, sums in zip(names, tables[kind, layout][1].values(), strict=True):
                files[file] += copies * sums
        for (kind, layout), times in often.items():
            places = _places(layout.ranks, world)
            totals[ranks] += times * tables[kind, layout][0][places[ranks]]
    return totals, {file: (int(sums[0]), int(sums[1])) for file, sums in files.items()}


class _Sums(dict[str, torch.Tensor]):
    """File -> bytes and byte ranges."""

    def __missing__(self, file: str) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64)


def _alike(tensor: _Tensor, files: list[str]) -> tuple[object, ...]:
    """Return what two tensors have in common of which each rank reads as much, from any files."""
    entry, numbers = tensor.entry, {file: number for number, file in enumerate(files)}
    chunks = ((numbers[c.file], c.start, c.shape, c.nbytes, c.stride) for c in entry.chunks)
    return tensor.itemsize, entry.dtype, entry.shape, entry.stride, *chunks


def _table(tensor: _Tensor, layout: _Layout) -> tuple[torch.Tensor, _Sums]:
    """Return what the ranks of a layout's mesh read and hold of a tensor.

    Returns:
        For each of these ranks bytes read, byte ranges read, bytes held; for each file of the
        tensor what they read together.
    """
    entry = tensor.entry
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.start)
    starts = [chunk.start[:1] for chunk in chunks]
    reach = max((chunk.shape[0] for chunk in chunks if chunk.shape), default=0)
    files = _Sums({chunk.file: torch.zeros(2, dtype=torch.int64) for chunk in entry.chunks})
    known: dict[object, tuple[_Sums, torch.Tensor]] = {}
    rows = []
    for at in itertools.product(*map(range, layout.sizes)):
        spans = shard_spans(entry.shape, layout.sizes, layout.placements, at, layout.order)
        # Of one run of bytes only the sizes of the part matter, which nearly all ranks share.
        key = spans if len(chunks) > 1 else tuple(tuple(b - a for a, b in dim) for dim in spans)
        if key not in known:
            reads, near = _Sums(), chunks
            if spans and spans[0]:
                # A rank of thousands needs few of the thousands of chunks that as many wrote.
                first = bisect.bisect_left(starts, (spans[0][0][0] - reach,))
                near = chunks[first : bisect.bisect_left(starts, (spans[0][-1][1],))]
            for chunk in near:
                # A plain tensor is read as it lies in its file, gaps included.
                is_plain = not layout.sizes and not entry.needs_assembly
                counted = (chunk.nbytes, 1) if is_plain else _count_part(entry, chunk, spans)
                reads[chunk.file] += torch.tensor(counted)
            local = math.prod(local_shape(spans)) * tensor.itemsize
            total = sum(reads.values(), torch.zeros(2, dtype=torch.int64))
            known[key] = reads, torch.tensor([*total.tolist(), local])
        reads, row = known[key]
        rows.append(row)
        for file, sums in reads.items():
            files[file] += sums
    return torch.stack(rows), files


def _count_part(entry: TensorEntry, chunk: Chunk, spans: Spans) -> tuple[int, int]:
    """Return the bytes and the byte ranges of one chunk that belong to a part of its tensor."""
    # What a stride of None means depends on how many chunks there are.
    alone = entry._replace(chunks=(chunk._replace(stride=steps_in_file(entry, chunk)),))
    part = narrowed(alone, spans)
    return sum(math.prod(c.shape) for c in part.chunks) * entry.itemsize, run_count(part)

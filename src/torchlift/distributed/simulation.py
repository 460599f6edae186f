"""Which bytes each rank of a mesh would read, computed without a mesh, a cluster or a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from torchlift.boxes import row_major
from torchlift.checkpoint import Checkpoint, dtype_of
from torchlift.distributed.layout import is_dtensor
from torchlift.distributed.meshes import checked
from torchlift.distributed.meshes import parse_mesh as parse_mesh
from torchlift.distributed.shares import Want, count
from torchlift.distributed.styles import TensorParallel, style_of
from torchlift.formats import Chunk, TensorEntry
from torchlift.match import Rename, renamed
from torchlift.plan import LoadPlan, plan, resolve
from torchlift.report import human, names_of, summarise, tensors
from torchlift.rules import DtypeRule, Options, check_rule, entry_like, target_dtype
from torchlift.slots import Group, collect, is_lazy


@dataclass(frozen=True)
class Simulation:
    """What a mesh would read.

    Attributes:
        mesh: dimension -> size, outermost first.
        bytes: for each rank, in row-major order of the mesh, the bytes that it reads.
        requests: for each rank the contiguous byte ranges that it reads, neighbours not merged.
        files: file -> (bytes, byte ranges) that all ranks together read from it.
        nbytes: bytes in the checkpoint of the tensors that are loaded.
        held: for each rank the bytes of the parameters and buffers that it has after the load, what
            no file provides among them; without what FSDP adds to uneven shards.
        plan: with a model, how its names and shapes fit the checkpoint; else None.
    """

    mesh: dict[str, int]
    bytes: tuple[int, ...]
    requests: tuple[int, ...]
    files: dict[str, tuple[int, int]]
    nbytes: int
    held: tuple[int, ...] = ()
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
        """The same as plain data."""
        found: dict[str, object] = {
            "mesh": self.mesh,
            "ranks": self.ranks,
            "nbytes": self.nbytes,
            "bytes": list(self.bytes),
            "requests": list(self.requests),
            "held": list(self.held),
            "amplification": self.amplification,
            "files": {
                file: {"bytes": nbytes, "requests": count}
                for file, (nbytes, count) in self.files.items()
            },
        }
        if self.plan is not None:
            found["plan"] = names_of(self.plan)
        return found

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        most = max(count for _, count in self.files.values()) if self.files else 0
        lines = [
            f"mesh: {mesh}, {self.ranks:,} ranks, {human(self.nbytes)} of tensors",
            f"  each rank reads {human(min(self.bytes))} to {human(max(self.bytes))} "
            f"in {min(self.requests):,} to {max(self.requests):,} byte ranges",
            f"  all together {human(sum(self.bytes))}, {self.amplification:.2f} times the file"
            f"{'s' if len(self.files) > 1 else ''}",
            f"  {len(self.files):,} file{'s' if len(self.files) != 1 else ''}, "
            f"at most {most:,} byte ranges from one",
        ]
        if self.plan is not None:
            held = f"{human(min(self.held))} to {human(max(self.held))}"
            lines.append(
                f"  each rank holds {held} once {tensors(len(self.plan.loaded))} are loaded"
            )
            lines += summarise(self.plan)
        return "\n".join(lines)


def simulate(
    source: nn.Module | Checkpoint | str | os.PathLike[str],
    mesh: Mapping[str, int] | str,
    *,
    root: str | None = None,
    tp: TensorParallel | None = None,
    model: nn.Module | None = None,
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
) -> Simulation:
    """Compute which bytes each rank of a mesh reads when it loads its shards of a model.

    Args:
        source: a checkpoint or its path; or a module, such as a `torchlift.skeleton` of a model
            that no machine here could hold, taken as one file. Of a module, buffers are replicated
            on every rank, as FSDP does; the tensors of a file all count as parameters, and two
            keys of one tensor count once.
        mesh: dimension -> size, outermost first, as a mapping or as text ``"fsdp=1024,tp=8"``.
            ``fsdp`` (or ``dp_shard``, ``shard``, ``cp``, ``ep``; several are flattened to one) cuts
            every parameter along its first dimension; ``tp`` as the argument of that name says;
            ``pp`` gives each stage a run of layers; ``dp`` (or ``ddp``, ``dp_replicate``,
            ``replicate``, ``hsdp``) replicates. FSDP cuts what TP has left, as torch does.
        root: keep only what is under this container of the checkpoint.
        tp: pattern of names (``*`` stands for anything) -> ``"colwise"``, ``"rowwise"``, a tensor
            dimension or None, the first match counts; or a callable from name and shape to a
            dimension or None. None takes the names of the usual transformers. As torch has it,
            ``"rowwise"`` cuts the rows of an embedding, its vocabulary, where a model tells that it
            is one; ``"embedding_rowwise"`` does anywhere.
        model: what the checkpoint is to be loaded into, not distributed itself: names, shapes and
            ties are those of `torchlift.plan`, and only what it would load is read.
        rename: as for `torchlift.load`.
        dtype: as for `torchlift.load`; it changes what the ranks hold, not what they read.
        strict: as for `torchlift.load`, with a model.
        ignore_mismatched: as for `torchlift.load`, with a model.

    Returns:
        Bytes and byte ranges per rank and per file. Thousands of ranks take about a second.

    Raises:
        ValueError: a mesh dimension whose name or size means nothing, or arguments that do not go
            together.
        MismatchError: the checkpoint does not fit the model.

    Example:
        >>> import torch, torchlift
        >>> from torchlift.distributed import simulate
        >>> model = torchlift.skeleton(torch.nn.Linear, 1024, 1024, bias=False)
        >>> found = simulate(model, "fsdp=8")
        >>> found.bytes[0], found.amplification
        (524288, 1.0)
    """
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else checked(mesh)
    made = None
    if isinstance(source, nn.Module):
        if root is not None or rename is not None or model is not None:
            raise ValueError("root=, rename= and model= are for a checkpoint, not for a module")
        wants = list(_of_module(source, dtype))
    elif model is None:
        if not strict or ignore_mismatched:
            raise ValueError("strict= and ignore_mismatched= need the model that is to be loaded")
        ckpt, owned = resolve(source, root)
        with ckpt if owned else nullcontext():
            wants = list(_of_checkpoint(ckpt, rename, dtype))
    else:
        options = Options(rename, None, dtype, strict, ignore_mismatched)
        made = _planned(model, source, options, root)
        wants = list(_of_plan(model, made))
    return _simulation(sizes, wants, tp, made)


def _simulation(
    mesh: dict[str, int], wants: list[Want], tp: TensorParallel | None, made: LoadPlan | None
) -> Simulation:
    found = count(wants, mesh, style_of(tp))
    nbytes = sum(want.entry.nbytes for want in wants if want.entry is not None)
    return Simulation(mesh, found.read, found.requests, found.files, nbytes, found.held, made)


def _planned(
    model: nn.Module,
    source: Checkpoint | str | os.PathLike[str],
    options: Options,
    root: str | None,
) -> LoadPlan:
    """The plan of one process that loads everything: the ranks share it out among them."""
    if any(is_dtensor(group.tensor) for group in collect(model)):
        raise ValueError("model= is distributed already: pass it as it is before fully_shard")
    return plan(
        model,
        source,
        root=root,
        rename=options.rename,
        dtype=options.dtype,
        strict=options.strict,
        ignore_mismatched=options.ignore_mismatched,
        source="read",
    )


def _of_plan(model: nn.Module, made: LoadPlan) -> Iterator[Want]:
    steps = {id(step.group.tensor): step for step in made.work.steps}
    becomes = {id(making.group.tensor): making.dtype for making in made.work.makings}
    for group in collect(model):
        step = steps.get(id(group.tensor))
        if step is not None:
            shape = step.candidate.shape if is_lazy(group.tensor) else tuple(group.tensor.shape)
            yield _want(group, shape, step.dtype, step.entry, step.span)
        elif not is_lazy(group.tensor):
            dtype = becomes.get(id(group.tensor), group.tensor.dtype)
            yield _want(group, tuple(group.tensor.shape), dtype, None, 0)


def _of_module(model: nn.Module, dtype: DtypeRule) -> Iterator[Want]:
    at = 0
    groups = [group for group in collect(model) if not is_lazy(group.tensor)]
    check_rule(dtype, [name for group in groups for name in group.names], present=False)
    for group in groups:
        tensor, shape = group.tensor, tuple(group.tensor.shape)
        if not group.persistent:
            yield _want(group, shape, tensor.dtype, None, 0)
            continue
        seen = entry_like(group.fqn, group)
        chunk = Chunk("model", at, seen.nbytes, (0,) * len(shape), shape)
        chunks = (chunk,) if seen.nbytes else ()
        entry = replace(seen, stride=row_major(shape), storage=group.fqn, chunks=chunks)
        becomes = target_dtype(dtype, seen, tensor, tensor.dtype)
        yield _want(group, shape, becomes, entry, seen.nbytes)
        at += seen.nbytes


def _want(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype, entry: TensorEntry | None, span: int
) -> Want:
    embedding = isinstance(group.slots[0].module, nn.Embedding | nn.EmbeddingBag)
    return Want(group.fqn, shape, dtype.itemsize, entry, span, group.is_parameter, embedding)


def _of_checkpoint(ckpt: Checkpoint, rename: Rename | None, dtype: DtypeRule) -> Iterator[Want]:
    seen: set[object] = set()
    for key, name in renamed(ckpt.entries, rename, ckpt.path).items():
        entry = ckpt.entries[key]
        spot = (entry.storage, entry.chunks[:1], entry.shape, entry.stride, entry.dtype)
        if entry.chunks and spot in seen:
            continue
        seen.add(spot)
        stored = dtype_of(entry, ckpt.path)
        blank = torch.empty(0, dtype=stored, device="meta")
        becomes = target_dtype(dtype, replace(entry, key=name), blank, stored)
        span = sum(chunk.nbytes for chunk in entry.chunks)
        yield Want(name, entry.shape, becomes.itemsize, entry, span)

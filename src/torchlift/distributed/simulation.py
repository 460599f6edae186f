"""Which bytes each rank of a mesh would read, computed without a mesh, a cluster or a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from torchlift._checkpoint import Checkpoint
from torchlift._model.dtensor import is_dtensor
from torchlift._model.slots import collect
from torchlift._plan import DtypeRule, LoadPlan, Options, Rename, names_of, plan, resolve, summarise
from torchlift._system import human
from torchlift.distributed.cuts import Cuts, ShardDims, cuts_of, places_of
from torchlift.distributed.meshes import checked, extents
from torchlift.distributed.meshes import parse_mesh as parse_mesh
from torchlift.distributed.shares import Want, count
from torchlift.distributed.styles import TensorParallel, largest
from torchlift.distributed.wants import of_checkpoint, of_module, of_plan


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
        unstyled: parameters of two dimensions or more that tensor parallel leaves whole, because
            no style is known for their names -> bytes.
        unused: patterns of ``tp=`` that no parameter with such a dimension matches.
    """

    mesh: dict[str, int]
    bytes: tuple[int, ...]
    requests: tuple[int, ...]
    files: dict[str, tuple[int, int]]
    nbytes: int
    held: tuple[int, ...] = ()
    plan: LoadPlan | None = field(default=None, repr=False)
    unstyled: dict[str, int] = field(default_factory=dict, repr=False)
    unused: tuple[str, ...] = ()

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
            "unstyled": self.unstyled,
            "unused": list(self.unused),
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
        lines += self._untold()
        if self.plan is not None:
            held = f"{human(min(self.held))} to {human(max(self.held))}"
            lines.append(
                f"  each rank holds {held} once {len(self.plan.loaded):,} tensors are loaded"
            )
            lines += summarise(self.plan)
        return "\n".join(lines)

    def _untold(self) -> list[str]:
        """What somebody should say about tensor parallel."""
        lines = []
        if self.unstyled:
            many = f"{len(self.unstyled):,} matri{'x' if len(self.unstyled) == 1 else 'ces'}"
            lines.append(
                f"  tp leaves {many}, {human(sum(self.unstyled.values()))}, whole, as no style is "
                f"known for them: {', '.join(largest(self.unstyled))}; "
                'say it with tp={"pattern": dimension, "*": "usual"}, or --tp PATTERN=DIMENSION'
            )
        if self.unused:
            listed = ", ".join(map(repr, self.unused))
            lines.append(f"  tp= matches no parameter with such a dimension: {listed}")
        return lines


def simulate(
    source: torch.nn.Module | Checkpoint | str | os.PathLike[str],
    mesh: Mapping[str, int] | str,
    *,
    root: str | None = None,
    tp: TensorParallel | None = None,
    model: torch.nn.Module | None = None,
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
    shard: ShardDims | None = None,
    ignored: Iterable[str] = (),
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
            ``pp`` gives each stage a run of layers, a tied tensor to each stage that has one of
            its names, and rotary tables and the like, which no file holds, to all; ``dp`` (or
            ``ddp``, ``dp_replicate``, ``replicate``, ``hsdp``) replicates. FSDP cuts what TP has
            left, as torch does.
        root: keep only what is under this container of the checkpoint.
        tp: pattern of names (``*`` stands for anything) -> ``"colwise"``, ``"rowwise"``, a tensor
            dimension or None, the first match counts; or a callable from name and shape to a
            dimension or None. As torch has it, ``"rowwise"`` cuts the rows of an embedding, its
            vocabulary, where a model tells that it is one; ``"embedding_rowwise"`` does anywhere.
            ``"packed_colwise"`` and ``"packed_rowwise"`` cut two matrices in one, each of them.
            ``"usual"`` takes the names of the well-known transformers, those with a plan in the
            transformers library among them; None is ``{"*": "usual"}``. A matrix that nothing
            matches stays whole, and the result names it.
        model: what the checkpoint is to be loaded into, not distributed itself: names, shapes and
            ties are those of `torchlift.plan`, and only what it would load is read.
        rename: as for `torchlift.load`.
        dtype: as for `torchlift.load`; it changes what the ranks hold, not what they read.
        strict: as for `torchlift.load`, with a model.
        ignore_mismatched: as for `torchlift.load`, with a model.
        shard: pattern of names -> the dimension that FSDP cuts, the first match counts and the rest
            is cut along the first; or a callable from name and shape to a dimension or None: what
            ``fully_shard`` calls ``shard_placement_fn``.
        ignored: patterns of names that FSDP leaves alone: its ``ignored_params``.

    Returns:
        Bytes and byte ranges per rank and per file. Thousands of ranks take about a second.

    Raises:
        ValueError: a mesh dimension whose name or size means nothing, arguments that do not go
            together, or a pattern of `shard` or `ignored` that matches no parameter.
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
    if isinstance(source, torch.nn.Module):
        if root is not None or rename is not None or model is not None:
            raise ValueError("root=, rename= and model= are for a checkpoint, not for a module")
        wants = list(of_module(source, dtype))
    elif model is None:
        if not strict or ignore_mismatched:
            raise ValueError("strict= and ignore_mismatched= need the model that is to be loaded")
        ckpt, owned = resolve(source, root)
        with ckpt if owned else nullcontext():
            wants = of_checkpoint(ckpt, rename, dtype)
    else:
        options = Options(rename, None, dtype, strict, ignore_mismatched)
        made = _planned(model, source, options, root)
        wants = list(of_plan(model, made))
    return _simulation(sizes, wants, cuts_of(wants, sizes, tp, shard, ignored), made)


def _simulation(
    mesh: dict[str, int], wants: list[Want], cuts: Cuts, made: LoadPlan | None
) -> Simulation:
    places = places_of(wants, extents(mesh).stage)
    found = count(wants, mesh, cuts.all, places)
    return Simulation(
        mesh=mesh,
        bytes=found.read,
        requests=found.requests,
        files=found.files,
        nbytes=sum(want.entry.nbytes for want in wants if want.entry is not None),
        held=found.held,
        plan=made,
        unstyled=cuts.unstyled,
        unused=cuts.unused,
    )


def _planned(
    model: torch.nn.Module,
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

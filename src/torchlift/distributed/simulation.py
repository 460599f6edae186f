"""Which bytes each rank of a mesh would read, computed without a mesh, a cluster or a GPU."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torchlift.boxes import cut as cut_entry
from torchlift.boxes import row_major, run_count
from torchlift.checkpoint import Checkpoint
from torchlift.checkpoint import open as open_checkpoint
from torchlift.distributed.layout import Span, Spans, everything
from torchlift.distributed.styles import Style, TensorParallel, style_of
from torchlift.formats import Chunk, TensorEntry
from torchlift.report import human
from torchlift.slots import collect

_SHARDED = ("fsdp", "dp_shard", "cp", "ep")
_REPLICATED = ("dp", "ddp", "dp_replicate", "replicate", "hsdp")
_KINDS = (*_SHARDED, *_REPLICATED, "tp", "pp")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class Simulation:
    """What a mesh would read.

    Attributes:
        mesh: dimension -> size, outermost first.
        bytes: for each rank, in row-major order of the mesh, the bytes that it reads.
        requests: for each rank the contiguous byte ranges that it reads, neighbours not merged.
        files: file -> (bytes, byte ranges) that all ranks together read from it.
        nbytes: bytes of the tensors in the checkpoint.
    """

    mesh: dict[str, int]
    bytes: tuple[int, ...]
    requests: tuple[int, ...]
    files: dict[str, tuple[int, int]]
    nbytes: int

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
        return {
            "mesh": self.mesh,
            "ranks": self.ranks,
            "nbytes": self.nbytes,
            "bytes": list(self.bytes),
            "requests": list(self.requests),
            "amplification": self.amplification,
            "files": {
                file: {"bytes": nbytes, "requests": count}
                for file, (nbytes, count) in self.files.items()
            },
        }

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        most = max(count for _, count in self.files.values()) if self.files else 0
        return "\n".join(
            [
                f"mesh: {mesh}, {self.ranks:,} ranks, {human(self.nbytes)} of tensors",
                f"  each rank reads {human(min(self.bytes))} to {human(max(self.bytes))} "
                f"in {min(self.requests):,} to {max(self.requests):,} byte ranges",
                f"  all together {human(sum(self.bytes))}, {self.amplification:.2f} times the file"
                f"{'s' if len(self.files) > 1 else ''}",
                f"  {len(self.files):,} file{'s' if len(self.files) != 1 else ''}, "
                f"at most {most:,} byte ranges from one",
            ]
        )


def simulate(
    source: nn.Module | Checkpoint | str | os.PathLike[str],
    mesh: Mapping[str, int] | str,
    *,
    root: str | None = None,
    tp: TensorParallel | None = None,
) -> Simulation:
    """Compute which bytes each rank of a mesh reads when it loads its shards of a model.

    Args:
        source: a checkpoint or its path; or a module, such as a `torchlift.skeleton` of a model
            that no machine here could hold, taken as one file. Of a module, buffers are replicated
            on every rank, as FSDP does; the tensors of a file all count as parameters.
        mesh: dimension -> size, outermost first, as a mapping or as text ``"fsdp=1024,tp=8"``.
            ``fsdp`` (or ``dp_shard``) cuts every tensor along its first dimension; ``tp`` as the
            argument of that name says; ``pp`` gives each stage a run of layers; ``dp`` (or
            ``dp_replicate``) replicates. FSDP cuts what TP has left, as torch does.
        root: keep only what is under this container of the checkpoint.
        tp: pattern of names (``*`` stands for anything) -> ``"colwise"``, ``"rowwise"``, a tensor
            dimension or None, the first match counts; or a callable from name and shape to a
            dimension or None. None takes the names of the usual transformers.

    Returns:
        Bytes and byte ranges per rank and per file. Thousands of ranks take about a second.

    Raises:
        ValueError: a mesh dimension whose name or size means nothing.

    Example:
        >>> import torch, torchlift
        >>> from torchlift.distributed import simulate
        >>> model = torchlift.skeleton(torch.nn.Linear, 1024, 1024, bias=False)
        >>> found = simulate(model, "fsdp=8")
        >>> found.bytes[0], found.amplification
        (524288, 1.0)
    """
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else _checked(dict(mesh))
    if isinstance(source, nn.Module):
        return _simulate(list(_of_module(source)), sizes, tp)
    if isinstance(source, Checkpoint):
        entries = source.index if root is None else Checkpoint(source.index, root=root).index
        return _simulate([(entry, True) for entry in entries.entries.values()], sizes, tp)
    with open_checkpoint(source, root=root) as ckpt:
        return _simulate([(entry, True) for entry in ckpt.entries.values()], sizes, tp)


def parse_mesh(text: str) -> dict[str, int]:
    """Dimensions and sizes from text.

    Raises:
        ValueError: not such a text.

    Example:
        >>> parse_mesh("fsdp=1024,tp=8")
        {'fsdp': 1024, 'tp': 8}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.isdigit() or name in found:
            raise ValueError(f"{part.strip()!r} is not a mesh dimension such as fsdp=8")
        found[name] = int(size)
    return _checked(found)


def _checked(mesh: dict[str, int]) -> dict[str, int]:
    for name, size in mesh.items():
        if name not in _KINDS:
            raise ValueError(f"{name!r} is not a mesh dimension; known are {', '.join(_KINDS)}")
        if size < 1:
            raise ValueError(f"mesh dimension {name!r} has size {size}")
    if math.prod(mesh.values()) > 1 << 20:
        raise ValueError("a mesh of more than a million ranks")
    return mesh


def _of_module(model: nn.Module) -> Iterator[tuple[TensorEntry, bool]]:
    at = 0
    for group in collect(model):
        if not group.persistent:
            continue
        tensor, shape = group.tensor, tuple(group.tensor.shape)
        nbytes = tensor.numel() * tensor.itemsize
        chunk = Chunk("model", at, nbytes, (0,) * len(shape), shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        chunks = (chunk,) if nbytes else ()
        entry = TensorEntry(
            group.fqn, dtype, shape, row_major(shape), nbytes, "cpu", group.fqn, chunks
        )
        yield entry, group.is_parameter
        at += nbytes


def _simulate(
    entries: Sequence[tuple[TensorEntry, bool]], mesh: dict[str, int], tp: TensorParallel | None
) -> Simulation:
    ranks = math.prod(mesh.values())
    nbytes, requests = [0] * ranks, [0] * ranks
    files: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    stages = _stages([entry.key for entry, _ in entries], mesh.get("pp", 1))
    style = style_of(tp)
    known: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for (entry, sharded), stage in zip(entries, stages, strict=True):
        dim = style(entry.key, entry.shape) if sharded and "tp" in mesh else None
        # Tensors of one shape are cut alike; a model of 300 tensors has a dozen shapes.
        kind = (entry.shape, entry.dtype, entry.stride, dim, sharded, stage, _origin(entry))
        if kind not in known:
            known[kind] = list(_parts(entry, mesh, dim, sharded, stage))
        total = count = 0
        for rank, (size, runs) in enumerate(known[kind]):
            nbytes[rank] += size
            requests[rank] += runs
            total, count = total + size, count + runs
        if entry.chunks:
            share = math.fsum(chunk.nbytes for chunk in entry.chunks)
            for chunk in entry.chunks:
                files[chunk.file] += round(total * chunk.nbytes / share)
                counts[chunk.file] += round(count * chunk.nbytes / share)
    return Simulation(
        dict(mesh),
        tuple(nbytes),
        tuple(requests),
        {file: (files[file], counts[file]) for file in files},
        sum(entry.nbytes for entry, _ in entries),
    )


def _origin(entry: TensorEntry) -> object:
    """What tells two tensors of one shape apart: how they are cut in the file."""
    return tuple((c.start, c.shape) for c in entry.chunks) if len(entry.chunks) > 1 else None


def _parts(
    entry: TensorEntry, mesh: dict[str, int], dim: Style, sharded: bool, stage: int | None
) -> Iterator[tuple[int, int]]:
    """(bytes, byte ranges) that each rank reads of one tensor."""
    cache: dict[tuple[int, ...], tuple[int, int]] = {}
    for place in itertools.product(*map(range, mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        if stage is not None and at.get("pp", stage) != stage:
            yield 0, 0
            continue
        cut = tuple(at[name] for name in mesh if name in _SHARDED or name == "tp")
        if cut not in cache:
            part = cut_entry(entry, _spans(entry.shape, mesh, at, dim, sharded))
            cache[cut] = (part.nbytes, run_count(part))
        yield cache[cut]


def _spans(
    shape: tuple[int, ...], mesh: dict[str, int], at: Mapping[str, int], dim: Style, sharded: bool
) -> Spans:
    spans = [list(ranges) for ranges in everything(shape)]
    if not sharded or not shape:
        return tuple(map(tuple, spans))
    if dim is not None:
        spans[dim] = _chunk(spans[dim], mesh["tp"], at["tp"])
    for name in mesh:
        if name in _SHARDED:
            spans[0] = _chunk(spans[0], mesh[name], at[name])
    return tuple(map(tuple, spans))


def _chunk(spans: list[Span], parts: int, index: int) -> list[Span]:
    """One of the equal parts of a dimension, as ``torch.chunk`` makes them."""
    ((start, stop),) = spans
    size = -(-(stop - start) // parts)
    low, high = min(start + index * size, stop), min(start + (index + 1) * size, stop)
    return [(low, high)]


def _stages(keys: Iterable[str], stages: int) -> list[int | None]:
    """The pipeline stage of each tensor: runs of layers, and the ends for what has none."""
    keys = list(keys)
    if stages == 1:
        return [None] * len(keys)
    layers = [int(m[1]) if (m := _LAYER.search(key)) else None for key in keys]
    depth = max((layer for layer in layers if layer is not None), default=0) + 1
    found: list[int | None] = []
    seen = False
    for layer in layers:
        seen = seen or layer is not None
        if layer is None:
            found.append(stages - 1 if seen else 0)
        else:
            found.append(layer * stages // depth)
    return found

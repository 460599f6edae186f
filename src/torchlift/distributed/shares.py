"""What each cell of a mesh reads and holds of a list of tensors: counting, without the tensors."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torchlift._model.dtensor import Spans, cut_spans, everything, local_shape
from torchlift.distributed.meshes import REPLICATED, Cell, cells, extents
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import cut, is_pieced, run_count, steps_in_file


class Cut(NamedTuple):
    """Along which dimensions a tensor is cut.

    Attributes:
        tp: by tensor parallel; None: not.
        fsdp: and then by FSDP.
        packed: matrices that lie one after the other along `tp`, each of which is cut.
    """

    tp: int | None = None
    fsdp: int | None = None
    packed: int = 1


@dataclass(frozen=True, slots=True)
class Want:
    """One tensor of the model that is to be.

    Attributes:
        name: what tensor parallel, FSDP and pipeline know it by.
        shape: in elements.
        itemsize: bytes per element once it is loaded.
        entry: where its bytes are; None for what no file provides.
        span: bytes that a rank reads which holds it whole, as a plain tensor.
        parameter: FSDP and tensor parallel leave buffers alone.
        embedding: whether it is the weight of an embedding.
        others: what else it is called, where it is tied.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    entry: TensorEntry | None
    span: int
    parameter: bool = True
    embedding: bool = False
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class Shares:
    """For each rank bytes read, byte ranges read and bytes held; for each file what all read."""

    read: tuple[int, ...]
    requests: tuple[int, ...]
    held: tuple[int, ...]
    files: dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Table:
    """The shares of one tensor in every cell of a stage, and all of them together per file.

    Files are numbered in the order of the entry's chunks: tensors of one shape that lie in
    different files have a table in common.
    """

    cells: torch.Tensor
    files: list[tuple[int, int]]


def count(
    wants: Sequence[Want],
    mesh: Mapping[str, int],
    cuts: Sequence[Cut],
    places: Sequence[Collection[int]],
) -> Shares:
    """Add up what every rank reads and holds.

    Args:
        wants: the tensors.
        mesh: dimension -> size.
        cuts: of each tensor.
        places: the pipeline stages of each tensor.
    """
    size = extents(mesh)
    copies = math.prod(ranks for name, ranks in mesh.items() if name in REPLICATED)
    totals = torch.zeros(size.stage, size.shard * size.part, 3, dtype=torch.int64)
    files: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    tables: dict[tuple[object, ...], _Table] = {}
    often: Counter[tuple[int, tuple[object, ...]]] = Counter()
    for want, cut_as, where in zip(wants, cuts, places, strict=True):
        # Tensors of one shape are cut alike; a model of 300 tensors has a dozen shapes.
        kind = _kind(want, cut_as)
        if kind not in tables:
            tables[kind] = _table(want, size, cut_as)
        often.update((stage, kind) for stage in where)
        for file, (nbytes, runs) in zip(_files(want), tables[kind].files, strict=True):
            files[file] += nbytes * copies * len(where)
            asked[file] += runs * copies * len(where)
    for (stage, kind), times in often.items():
        totals[stage] += times * tables[kind].cells
    rows: list[list[list[int]]] = totals.tolist()
    everybody = [rows[cell.stage][cell.shard * size.part + cell.part] for cell in cells(mesh)]
    read, requests, held = map(tuple, zip(*everybody, strict=True))
    return Shares(
        read,
        requests,
        held,
        {file: (nbytes, asked[file]) for file, nbytes in files.items()},
    )


def _files(want: Want) -> list[str]:
    return list(dict.fromkeys(chunk.file for chunk in want.entry.chunks)) if want.entry else []


def _kind(want: Want, dims: Cut) -> tuple[object, ...]:
    """What two tensors have in common that every rank cuts alike."""
    cut_as = want.shape, want.itemsize, dims, want.span
    entry = want.entry
    if entry is None:
        return cut_as
    number = {file: at for at, file in enumerate(_files(want))}
    pieces = tuple((number[c.file], c.start, c.shape, c.nbytes, c.stride) for c in entry.chunks)
    return *cut_as, entry.dtype, entry.shape, entry.stride, pieces


def _table(want: Want, size: Cell, dims: Cut) -> _Table:
    pieces = _Pieces(want.entry, _files(want)) if want.entry is not None else None
    spread = (dims.tp, dims.fsdp) != (None, None)
    files = [[0, 0] for _ in _files(want)]
    known: dict[object, tuple[list[tuple[int, int, int]], tuple[int, int, int]]] = {}
    found = []
    for shard, part in itertools.product(range(size.shard), range(size.part)):
        key = _alike(want.shape, size, shard, part, dims) if spread else None
        several = pieces is not None and pieces.count > 1
        if spread and (several or (dims.packed > 1 and dims.fsdp == dims.tp)):
            key = shard, part  # of several runs it does matter which rows are read
        if key not in known:
            spans = everything(want.shape)
            if spread:
                spans = _spans(want.shape, size, shard, part, dims)
            reads = pieces.of(spans, spread, want.span) if pieces is not None else []
            read, asked = sum(r[1] for r in reads), sum(r[2] for r in reads)
            known[key] = reads, (read, asked, math.prod(local_shape(spans)) * want.itemsize)
        for file, nbytes, asked in known[key][0]:
            files[file][0] += nbytes
            files[file][1] += asked
        found.append(known[key][1])
    return _Table(torch.tensor(found, dtype=torch.int64), [(n, asked) for n, asked in files])


class _Pieces:
    """A tensor's chunks, to look up which of them a part of it needs."""

    def __init__(self, entry: TensorEntry, files: Sequence[str]) -> None:
        self.count = len(entry.chunks)
        self._several = is_pieced(entry)
        self._number = {file: at for at, file in enumerate(files)}
        # The strides are written out: what None means depends on how many chunks there are.
        chunks = [replace(c, stride=steps_in_file(entry, c)) for c in entry.chunks]
        if entry.shape:
            chunks.sort(key=lambda chunk: chunk.start[0])
        self._entry = replace(entry, chunks=tuple(chunks))
        self._starts = [chunk.start[0] for chunk in chunks] if entry.shape else []
        self._reach = max((c.shape[0] for c in chunks), default=0) if entry.shape else 0

    def of(self, spans: Spans, spread: bool, span: int) -> list[tuple[int, int, int]]:
        """(number of the file, bytes, byte ranges) of a part, for every file."""
        if spread or self._several:
            return list(self._counted(spans))
        # A plain tensor is read as it lies in its file, gaps included.
        return [(0, span, 1)] if self.count and span else []

    def _counted(self, spans: Spans) -> Iterator[tuple[int, int, int]]:
        part = cut(self._near(spans), spans)
        held: dict[int, list[Chunk]] = {}
        for chunk in part.chunks:
            plain = replace(chunk, stride=steps_in_file(part, chunk))
            held.setdefault(self._number[chunk.file], []).append(plain)
        for file, chunks in held.items():
            nbytes = sum(math.prod(chunk.shape) for chunk in chunks) * part.itemsize
            yield file, nbytes, run_count(replace(part, chunks=tuple(chunks)))

    def _near(self, spans: Spans) -> TensorEntry:
        """The tensor with no more chunks than can have something in these rows.

        A rank of thousands needs few of the thousands that as many ranks wrote.
        """
        if len(self._entry.chunks) < 2 or not spans or not spans[0]:
            return self._entry
        low, high = spans[0][0][0], spans[0][-1][1]
        first = bisect.bisect_left(self._starts, low - self._reach)
        last = bisect.bisect_left(self._starts, high)
        return replace(self._entry, chunks=self._entry.chunks[first:last])


def _alike(shape: tuple[int, ...], size: Cell, shard: int, part: int, dims: Cut) -> tuple[int, int]:
    """Sizes of the part along the dimensions that are cut: equal for nearly all of a million."""
    other = 0
    if dims.tp is not None:
        each = [length(shape[dims.tp], dims.packed, piece) for piece in range(dims.packed)]
        other = sum(length(total, size.part, part) for total in each)
    if dims.fsdp is None:
        return 0, other
    total = other if dims.fsdp == dims.tp else shape[dims.fsdp]
    return length(total, size.shard, shard), other


def length(total: int, parts: int, index: int) -> int:
    """How much of `total` the `index`-th of so many parts has.

    Example:
        >>> [length(10, 4, part) for part in range(4)]
        [3, 3, 3, 1]
    """
    step = -(-total // parts)
    return max(0, min(step, total - index * step))


def _spans(shape: tuple[int, ...], size: Cell, shard: int, part: int, dims: Cut) -> Spans:
    """What FSDP cuts from what tensor parallel left: torch's order."""
    spans = [list(ranges) for ranges in everything(shape)]
    if dims.tp is not None:
        spans[dims.tp] = cut_spans(spans[dims.tp], size.part, part, dims.packed)
    if dims.fsdp is not None:
        spans[dims.fsdp] = cut_spans(spans[dims.fsdp], size.shard, shard)
    return tuple(map(tuple, spans))

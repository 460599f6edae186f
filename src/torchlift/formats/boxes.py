"""Boxes of tensors and the runs of bytes that hold them: arithmetic only, on the standard library.

A part of a tensor is given by its spans: for each dimension, the ranges of indices that follow each
other in the part. One range per dimension is a box; a strided shard has several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchlift.formats.index import Chunk, TensorEntry

#: For each dimension of a tensor the (start, stop) ranges that follow each other in a part of it.
Spans = Sequence[Sequence[tuple[int, int]]]


class Run(NamedTuple):
    """Bytes that are contiguous in a file and in a row-major tensor.

    Attributes:
        file: absolute path.
        offset: first byte in the file.
        at: first element in the tensor.
        numel: number of elements.
    """

    file: str
    offset: int
    at: int
    numel: int


class Rows(NamedTuple):
    """Runs of one length and one distance in a file, which follow each other in the tensor.

    Attributes:
        first: the first of them.
        many: how many there are.
        step: bytes from the start of one to the start of the next in the file.
    """

    first: Run
    many: int
    step: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor.

    Example:
        >>> row_major((2, 3, 4))
        (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def steps_in_file(entry: TensorEntry, chunk: Chunk) -> tuple[int, ...]:
    """Strides, in elements, of a chunk's box inside its run of bytes."""
    if chunk.stride is not None:
        return chunk.stride
    return entry.stride if len(entry.chunks) == 1 else row_major(chunk.shape)


def cut(entry: TensorEntry, spans: Spans) -> TensorEntry:
    """The entry of a part of a tensor: exactly the part's bytes, row-major once they are read.

    Args:
        entry: the whole tensor.
        spans: which part.

    Example:
        >>> whole = Chunk("f", 100, 48, (0, 0), (4, 3))
        >>> entry = TensorEntry("w", "float32", (4, 3), (3, 1), 48, "cpu", "f", (whole,))
        >>> part = cut(entry, [[(2, 4)], [(0, 3)]])
        >>> part.shape, part.chunks[0].offset, part.chunks[0].nbytes
        ((2, 3), 124, 24)
    """
    shape = tuple(sum(stop - start for start, stop in dim) for dim in spans)
    if shape == entry.shape and entry.is_contiguous:
        return entry
    rows = _rows(entry, spans, shape)
    chunks = [rows] if rows is not None else _pieces(entry, spans, shape)
    return TensorEntry(
        entry.key,
        entry.dtype,
        shape,
        row_major(shape),
        math.prod(shape) * entry.itemsize,
        entry.location,
        "",
        tuple(chunks),
        entry.requires_grad,
        entry.is_parameter,
    )


def _rows(entry: TensorEntry, spans: Spans, shape: tuple[int, ...]) -> Chunk | None:
    """The part's only chunk where it is some rows of one, as most shards are."""
    if len(entry.chunks) != 1 or not shape or 0 in shape or shape[1:] != entry.shape[1:]:
        return None
    (chunk,) = entry.chunks
    if not entry.is_contiguous or chunk.stride is not None or any(len(dim) != 1 for dim in spans):
        return None
    (start, stop), row = spans[0][0], math.prod(shape[1:]) * entry.itemsize
    origin = (0,) * len(shape)
    return Chunk(chunk.file, chunk.offset + start * row, (stop - start) * row, origin, shape)


def _pieces(entry: TensorEntry, spans: Spans, shape: tuple[int, ...]) -> list[Chunk]:
    chunks = [
        piece
        for start, lengths, at in _boxes(spans)
        for chunk in entry.chunks
        if (piece := _intersection(entry, chunk, start, lengths, at)) is not None
    ]
    if len(chunks) > 1 or (chunks and chunks[0].shape == shape):
        chunks = [c if not _follows(c, row_major(c.shape)) else _plain(c) for c in chunks]
    return chunks


def is_pieced(entry: TensorEntry) -> bool:
    """Whether the tensor's bytes must be put together, or apart, before they are a tensor."""
    return len(entry.chunks) > 1 or (len(entry.chunks) == 1 and entry.chunks[0].stride is not None)


def runs(entry: TensorEntry) -> Iterator[Run]:
    """The runs of bytes that make up a pieced tensor, and where each one goes.

    Example:
        >>> whole = Chunk("f", 0, 16, (0, 0), (2, 2))
        >>> entry = TensorEntry("w", "float32", (2, 2), (2, 1), 16, "cpu", "f", (whole,))
        >>> [(run.offset, run.at, run.numel) for run in runs(cut(entry, [[(0, 2)], [(1, 2)]]))]
        [(4, 0, 1), (12, 1, 1)]
    """
    for (file, offset, at, numel), many, step in rows(entry):
        for row in range(many):
            yield Run(file, offset + row * step, at + row * numel, numel)


def rows(entry: TensorEntry) -> Iterator[Rows]:
    """The same, without a step for each run: a shard of a matrix's columns is one of these.

    Example:
        >>> whole = Chunk("f", 0, 16, (0, 0), (2, 2))
        >>> entry = TensorEntry("w", "float32", (2, 2), (2, 1), 16, "cpu", "f", (whole,))
        >>> [(found.many, found.step) for found in rows(cut(entry, [[(0, 2)], [(1, 2)]]))]
        [(2, 8)]
    """
    steps, size = row_major(entry.shape), entry.itemsize
    for chunk in entry.chunks:
        held = steps_in_file(entry, chunk)
        outer, inner = _inner(chunk.shape, held, steps)
        many, step = 1, inner * size
        if outer and steps[outer - 1] == inner:
            outer -= 1
            many, step = chunk.shape[outer], held[outer] * size
        origin = sum(map(int.__mul__, chunk.start, steps))
        places = [(chunk.offset, origin)]
        for dim in range(outer):
            step_in_file, step_here = held[dim] * size, steps[dim]
            places = [
                (offset + i * step_in_file, at + i * step_here)
                for offset, at in places
                for i in range(chunk.shape[dim])
            ]
        for offset, at in places:
            yield Rows(Run(chunk.file, offset, at, inner), many, step)


def shortest_run(entry: TensorEntry) -> int:
    """Bytes of the shortest run of `runs`; 0 for an empty tensor."""
    steps = row_major(entry.shape)
    return entry.itemsize * min(
        (_inner(c.shape, steps_in_file(entry, c), steps)[1] for c in entry.chunks), default=0
    )


def _inner(shape: Sequence[int], held: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """(number of outer dimensions, elements of the inner ones, which are one run on both sides)."""
    dim, inner = len(shape), 1
    while dim and (shape[dim - 1] == 1 or held[dim - 1] == steps[dim - 1] == inner):
        inner *= shape[dim - 1]
        dim -= 1
    return dim, inner


def _boxes(spans: Spans) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(first index in the whole, shape, first index in the part) for every box of a part."""
    dims = []
    for ranges in spans:
        at, placed = 0, []
        for start, stop in ranges:
            if stop > start:
                placed.append((start, stop - start, at))
                at += stop - start
        dims.append(placed)
    for box in itertools.product(*dims):
        yield tuple(b[0] for b in box), tuple(b[1] for b in box), tuple(b[2] for b in box)


def _intersection(
    entry: TensorEntry,
    chunk: Chunk,
    start: tuple[int, ...],
    lengths: tuple[int, ...],
    at: tuple[int, ...],
) -> Chunk | None:
    steps = steps_in_file(entry, chunk)
    offset, last, shape, place = 0, 0, [], []
    for dim, step in enumerate(steps):
        low = max(start[dim], chunk.start[dim])
        high = min(start[dim] + lengths[dim], chunk.start[dim] + chunk.shape[dim])
        if high <= low:
            return None
        offset += (low - chunk.start[dim]) * step
        last += (high - low - 1) * step
        shape.append(high - low)
        place.append(at[dim] + low - start[dim])
    size = entry.itemsize
    return Chunk(
        chunk.file,
        chunk.offset + offset * size,
        (last + 1) * size,
        tuple(place),
        tuple(shape),
        steps,
    )


def _follows(chunk: Chunk, steps: Sequence[int]) -> bool:
    """Whether the box lies in its run with these strides."""
    assert chunk.stride is not None
    return all(
        size == 1 or held == step
        for size, held, step in zip(chunk.shape, chunk.stride, steps, strict=True)
    )


def _plain(chunk: Chunk) -> Chunk:
    # Made anew: dataclasses.replace takes five times as long, for every tensor on every rank.
    return Chunk(chunk.file, chunk.offset, chunk.nbytes, chunk.start, chunk.shape)


def run_count(entry: TensorEntry) -> int:
    """How many `runs` a tensor has, without listing them."""
    steps = row_major(entry.shape)
    return sum(
        math.prod(c.shape[: _inner(c.shape, steps_in_file(entry, c), steps)[0]])
        for c in entry.chunks
    )

"""Boxes of tensors and the runs of bytes that hold them: arithmetic, on the standard library.

A slice of a tensor is described by its spans: for each dimension, the consecutive ranges of indices
of the slice. One range per dimension is a box. A strided shard has several ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchlift.errors import FormatError
from torchlift.formats.index import ITEMSIZE, Chunk, TensorEntry, is_row_major
from torchlift.formats.index import row_major as row_major  # exported for users of boxes

#: A range of indices: start and stop.
Span = tuple[int, int]
#: For each dimension of a tensor, the consecutive ranges of a slice.
Spans = Sequence[Sequence[Span]]

#: The first index and the shape of a box of a tensor.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: The spans of a slice as a value that can be a key.
Ranges = tuple[tuple[Span, ...], ...]


class Overlap(NamedTuple):
    """A box that a slice and a box of one tensor share.

    Attributes:
        at: First index in the slice.
        inside: First index in the box.
        shape: Shape of the shared box.
    """

    at: tuple[int, ...]
    inside: tuple[int, ...]
    shape: tuple[int, ...]


class _Dim(NamedTuple):
    """A dimension of a chunk: its size, and its steps in the file and in the tensor."""

    size: int
    in_file: int
    here: int


class _Dims(NamedTuple):
    """The elements of the longest run of a chunk, and the dimensions outside of it."""

    inner: int
    outer: list[_Dim]


class Rows(NamedTuple):
    """Runs of bytes of one length, one distance in a file and one distance in a tensor.

    Attributes:
        file: Absolute path.
        offset: First byte of the first run in the file.
        at: First element of the first run in the tensor.
        numel: Number of elements of each run.
        many: Number of runs.
        step: Bytes between the starts of two runs in the file.
        apart: Elements between the starts of two runs in the tensor.
    """

    file: str
    offset: int
    at: int
    numel: int
    many: int
    step: int
    apart: int


class Runs(NamedTuple):
    """The number of a tensor's `Rows`, and the bytes of the shortest run (0 if it is empty)."""

    number: int
    shortest: int


def steps_in_file(entry: TensorEntry, chunk: Chunk) -> tuple[int, ...]:
    """Return the strides, in elements, of a chunk's box inside its run of bytes."""
    if chunk.stride is not None:
        return chunk.stride
    return entry.stride if len(entry.chunks) == 1 else row_major(chunk.shape)


def narrowed(entry: TensorEntry, spans: Spans) -> TensorEntry:
    """Return the entry of a slice of a tensor. It has exactly the bytes of the slice.

    Args:
        entry: The whole tensor.
        spans: The slice.

    Example:
        >>> whole = Chunk("f", 100, 48, (0, 0), (4, 3))
        >>> entry = TensorEntry("w", "float32", (4, 3), (3, 1), 48, "cpu", "f", (whole,))
        >>> rows = narrowed(entry, [[(2, 4)], [(0, 3)]])
        >>> rows.shape, rows.chunks[0].offset, rows.chunks[0].nbytes
        ((2, 3), 124, 24)
    """
    shape = tuple(sum(stop - start for start, stop in dim) for dim in spans)
    if shape == entry.shape and entry.is_contiguous:
        return entry
    if not entry.can_be_sliced:
        raise FormatError(
            "this kind of tensor cannot be read in slices",
            entry=entry.key,
            found=entry.type_name,
            hint="Load the whole tensor, and save its dense values.",
        )
    chunks = [
        _box(entry, chunk, chunk.offset + _bytes(entry, first), at, sizes, steps)
        for chunk in entry.chunks
        for steps in (steps_in_file(entry, chunk),)
        for at, inside, sizes in overlaps(spans, chunk.start, chunk.shape)
        for first in (sum(map(int.__mul__, inside, steps)),)
    ]
    return boxed(entry, shape, tuple(chunks))


def boxed(entry: TensorEntry, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> TensorEntry:
    """Return the entry of a row-major tensor in boxes, with the other facts of `entry`."""
    nbytes = math.prod(shape) * entry.itemsize
    # Without `_replace`, which takes three times as long, for every tensor on every rank.
    return TensorEntry(
        entry.key, entry.dtype, shape, row_major(shape), nbytes, entry.location, "", chunks,
        entry.requires_grad, entry.is_parameter, entry.encoding,
    )  # fmt: skip


def at_indices(entry: TensorEntry, dim: int, indices: range) -> TensorEntry:
    """Return the entry of a tensor's values at some indices of one dimension, as boxes.

    Example:
        >>> whole = Chunk("f", 0, 24, (0, 0), (3, 2))
        >>> entry = TensorEntry("w", "float32", (3, 2), (2, 1), 24, "cpu", "f", (whole,))
        >>> odd = at_indices(entry, 0, range(1, 3, 2))
        >>> odd.shape, odd.chunks[0].offset, odd.chunks[0].nbytes
        ((1, 2), 8, 8)
    """
    if indices == range(entry.shape[dim]):
        return entry
    chunks = []
    for chunk in entry.chunks:
        steps, start, shape = list(steps_in_file(entry, chunk)), list(chunk.start), [*chunk.shape]
        # The first of the indices inside of the chunk, and the first one after it.
        low, high = (
            min(max(0, -((indices.start - edge) // indices.step)), len(indices))
            for edge in (start[dim], start[dim] + shape[dim])
        )
        if low >= high:
            continue
        offset = chunk.offset + _bytes(entry, (indices[low] - start[dim]) * steps[dim])
        steps[dim] *= indices.step
        start[dim], shape[dim] = low, high - low
        chunks.append(_box(entry, chunk, offset, start, shape, steps))
    sizes = (*entry.shape[:dim], len(indices), *entry.shape[dim + 1 :])
    return boxed(entry, sizes, tuple(chunks))


def permuted(entry: TensorEntry, dims: Sequence[int | None]) -> TensorEntry:
    """Return the entry of a tensor with other dimensions, as boxes.

    Args:
        entry: The tensor.
        dims: Its dimensions in the new order. None is a new dimension of size 1. A dimension of
            size 1 may be left out.

    Example:
        >>> whole = Chunk("f", 0, 24, (0, 0), (3, 2))
        >>> entry = TensorEntry("w", "float32", (3, 2), (2, 1), 24, "cpu", "f", (whole,))
        >>> turned = permuted(entry, (1, 0))
        >>> turned.shape, turned.stride, turned.chunks[0].stride
        ((2, 3), (3, 1), (1, 2))
        >>> permuted(entry, (0, None, 1)).shape
        (3, 1, 2)
    """

    def change(row: Sequence[int], new: int) -> tuple[int, ...]:
        return tuple([new if dim is None else row[dim] for dim in dims])

    chunks = []
    for chunk in entry.chunks:
        start, shape = change(chunk.start, 0), change(chunk.shape, 1)
        # The step of a new dimension leads past the whole tensor: it is never taken.
        steps = change(steps_in_file(entry, chunk), entry.numel)
        chunks.append(_box(entry, chunk, chunk.offset, start, shape, steps))
    return boxed(entry, change(entry.shape, 1), tuple(chunks))


def unsqueezed(entry: TensorEntry, dim: int) -> TensorEntry:
    """Return the entry of a tensor with a new dimension of size 1, as boxes."""
    dims = range(len(entry.shape))
    return permuted(entry, [*dims[:dim], None, *dims[dim:]])


def squeezed(entry: TensorEntry, dim: int) -> TensorEntry:
    """Return the entry of a tensor without one dimension of size 1, as boxes."""
    return permuted(entry, [at for at in range(len(entry.shape)) if at != dim])


def joined(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Return the entry of tensors that are concatenated in a dimension, with all their boxes.

    Boxes that are also consecutive in a file become one box. Tensors that were split are therefore
    whole again and can be mapped.

    Example:
        >>> rows = [Chunk("f", at, 8, (0,), (2,)) for at in (0, 8, 100)]
        >>> made = [TensorEntry("w", "float32", (2,), (1,), 8, "cpu", "f", (row,)) for row in rows]
        >>> [(chunk.offset, chunk.start, chunk.shape) for chunk in joined(made, 0).chunks]
        [(0, (0,), (4,)), (100, (4,), (2,))]
    """
    at = 0
    found: list[Chunk] = []
    behind: dict[object, int] = {}
    for entry in entries:
        for chunk in entry.chunks:
            steps = steps_in_file(entry, chunk)
            start = (*chunk.start[:dim], chunk.start[dim] + at, *chunk.start[dim + 1 :])
            place = (chunk.file, chunk.packed, chunk.held)
            others = (chunk.shape[:dim], chunk.shape[dim + 1 :], steps, *place)
            before = behind.pop((start, chunk.offset, others), len(found))
            length, offset = chunk.shape[dim], chunk.offset
            if before < len(found):
                start, offset = found[before].start, found[before].offset
                length += found[before].shape[dim]
            shape = (*chunk.shape[:dim], length, *chunk.shape[dim + 1 :])
            found[before : before + 1] = [_box(entry, chunk, offset, start, shape, steps)]
            following = (*start[:dim], start[dim] + length, *start[dim + 1 :])
            behind[following, offset + _bytes(entry, length * steps[dim]), others] = before
        at += entry.shape[dim]
    # If one of the tensors is deflated, the whole counts as deflated.
    stored = (name for entry in entries if entry.chunks for name in entry.encoding)
    first = entries[0]._replace(encoding=tuple(dict.fromkeys(stored)))
    return boxed(first, (*first.shape[:dim], at, *first.shape[dim + 1 :]), tuple(found))


def _box(
    entry: TensorEntry,
    source: Chunk,
    offset: int,
    start: Sequence[int],
    shape: Sequence[int],
    steps: Sequence[int],
) -> Chunk:
    """Return a chunk of one box of a tensor, with these strides in its source."""
    found, strides = tuple(shape), tuple(steps)
    last = sum((size - 1) * step for size, step in zip(found, strides, strict=True))
    stride = None if is_row_major(found, strides) else strides
    values = entry.block[0]
    if values > 1:  # a box has whole blocks, and the values of a block are adjacent in it
        sides = zip(found, strides, strict=True)
        uneven = [(size, step) for size, step in sides if step % values and size > 1]
        if len(uneven) > 1 or any(step != 1 or size % values for size, step in uneven):
            raise _indivisible(entry)
    nbytes = _bytes(entry, last + 1)
    # Without `_replace`, which takes three times as long.
    return Chunk(
        source.file, offset, nbytes, tuple(start), found, stride, source.packed, source.held
    )


def _bytes(entry: TensorEntry, elements: int) -> int:
    """Return the bytes that a number of elements takes in the file.

    Raises:
        FormatError: If the elements are not whole blocks.
    """
    values, size = entry.block
    if elements % values:
        raise _indivisible(entry)
    return elements // values * size


def _indivisible(entry: TensorEntry) -> FormatError:
    return FormatError(
        "a slice would cut blocks of quantised values",
        entry=entry.key,
        expected=f"slices of whole blocks of {entry.block[0]}",
        found=f"{entry.type_name} {list(entry.shape)}",
        hint="Load the whole tensor, or convert the file to plain numbers first.",
    )


def grain(entry: TensorEntry, dim: int) -> int:
    """Return the number of indices of a dimension that one block holds."""
    values = entry.block[0]
    lies_so = any(steps_in_file(entry, chunk)[dim] == 1 for chunk in entry.chunks)
    return values if lies_so and entry.shape[dim] > 1 else 1


def as_blocks(entry: TensorEntry) -> TensorEntry | None:
    """Return the entry of the raw bytes of quantised blocks, or None if blocks do not form rows.

    Example:
        >>> whole = Chunk("f", 0, 68, (0, 0), (2, 32))
        >>> entry = TensorEntry("w", "float32", (2, 32), (32, 1), 256, "cpu", "f", (whole,),
        ...                     encoding=("Q8_0",))
        >>> raw = as_blocks(entry)
        >>> raw.dtype, raw.shape
        ('uint8', (2, 34))
    """
    values, size = entry.block
    last = len(entry.shape) - 1
    if values == 1 or len(entry.encoding) > 1 or grain(entry, last) == 1:
        return None
    chunks = []
    for chunk in entry.chunks:
        *steps, _ = steps_in_file(entry, chunk)
        rows = [_bytes(entry, step) for step in steps]
        start, width = (_bytes(entry, each[last]) for each in (chunk.start, chunk.shape))
        shape, strides = (*chunk.shape[:last], width), (*rows, 1)
        stride = None if is_row_major(shape, strides) else strides
        chunks.append(
            chunk._replace(start=(*chunk.start[:last], start), shape=shape, stride=stride)
        )
    shape = (*entry.shape[:last], entry.shape[last] // values * size)
    raw = entry._replace(dtype="uint8", encoding=(), shape=shape)
    return boxed(raw, shape, tuple(chunks))


def flat_entry(
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    places: Iterable[tuple[str, int, int]],
    storage: str,
    location: str = "cpu",
) -> TensorEntry:
    """Return the entry of a tensor that is stored in flat runs, with the boxes that they fill.

    Args:
        key: Key of the tensor.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor, in row-major order.
        places: (file, first byte, number of elements) of each run of the tensor, in order.
        storage: Name of its storage.
        location: Device tag.

    Example:
        >>> entry = flat_entry("w", "int8", (3, 4), [("a", 0, 6), ("b", 50, 6)], "w")
        >>> [(chunk.file, chunk.offset, chunk.start, chunk.shape) for chunk in entry.chunks]
        [('a', 0, (0, 0), (1, 4)), ('a', 4, (1, 0), (1, 2)), ('b', 50, (1, 2), (1, 2)),
         ('b', 52, (2, 0), (1, 4))]
    """
    size, at, chunks = ITEMSIZE[dtype], 0, []
    for file, offset, numel in places:
        for start, sizes in _flat_boxes(shape, at, at + numel):
            nbytes = math.prod(sizes) * size
            chunks.append(Chunk(file, offset, nbytes, start, sizes))
            offset += nbytes
        at += numel
    strides, nbytes = row_major(shape), math.prod(shape) * size
    return TensorEntry(key, dtype, shape, strides, nbytes, location, storage, tuple(chunks))


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the elements from `start` to `stop` of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    # The part of a row before the whole rows, the whole rows, and the part of a row after them.
    if head:
        for at, sizes in _flat_boxes(shape[1:], head, tail if first == last else inner):
            yield (first, *at), (1, *sizes)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if tail and first <= last:
        for at, sizes in _flat_boxes(shape[1:], 0, tail):
            yield (last, *at), (1, *sizes)


class Placement(NamedTuple):
    """How one dimension of a mesh of ranks divides a tensor.

    Attributes:
        dim: Dimension of the tensor that it shards. None: a replica on each rank.
        factor: Number of equal blocks that are sharded one by one, as by ``_StridedShard``.
    """

    dim: int | None = None
    factor: int = 1


def placed_spans(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    at: Sequence[int],
    order: Sequence[Sequence[int]] = (),
) -> Ranges:
    """Return the ranges of a tensor that one rank of a mesh holds.

    Args:
        shape: Shape of the whole tensor.
        mesh: Sizes of the mesh dimensions.
        placements: One for each mesh dimension.
        at: Coordinates of the rank in the mesh.
        order: For each sharded dimension, the mesh dimensions in the order in which they shard it.
            Empty: from the outermost to the innermost.

    Example:
        >>> placed_spans((5, 2), (2, 2), (Placement(), Placement(0)), (0, 1))
        (((3, 5),), ((0, 2),))
    """
    found = [[(0, size)] for size in shape]
    for axis, factor in _order(placements, mesh, order):
        dim = placements[axis].dim
        if dim is not None:
            found[dim] = split_spans(found[dim], mesh[axis], at[axis], factor)
    return tuple(tuple(spans) for spans in found)


def _order(
    placements: Sequence[Placement], mesh: Sequence[int], order: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Yield (mesh dimension, number of blocks) in the order in which dimensions shard.

    FSDP over tensor parallel has the placements ``[_StridedShard(0, split_factor=tp), Shard(0)]``:
    the second one shards first. That order is right for sizes that do not divide evenly. The
    strided formula is not.
    """
    if order and all(placement.factor == 1 for placement in placements):
        sharding = [axis for axes in order for axis in axes]
        rest = [axis for axis in range(len(placements)) if axis not in sharding]
        yield from ((axis, 1) for axis in [*sharding, *rest])
        return
    late = []
    for axis, (dim, factor) in enumerate(placements):
        right = math.prod(
            size
            for size, other in zip(mesh[axis + 1 :], placements[axis + 1 :], strict=True)
            if other.dim == dim
        )
        if factor > 1 and factor == right:
            late.append(axis)
        else:
            yield axis, factor
    yield from ((axis, 1) for axis in reversed(late))


def split_spans(spans: list[Span], parts: int, index: int, strided: int = 1) -> list[Span]:
    """Return one of the equal slices of `spans`, as torch slices them.

    Args:
        spans: Ranges of one dimension.
        parts: Number of slices.
        index: Number of the slice.
        strided: Number of blocks. Each block gives one such slice.

    Example:
        >>> split_spans([(0, 8)], 2, 1), split_spans([(0, 8)], 2, 1, strided=2)
        ([(4, 8)], [(2, 4), (6, 8)])
    """
    slices = [_part(spans, strided, i) for i in range(strided)] if strided > 1 else [spans]
    return [span for each in slices for span in _part(each, parts, index)]


def _part(spans: list[Span], parts: int, index: int) -> list[Span]:
    """Return the `index`-th of `parts` chunks of ``torch.chunk``, which may be empty."""
    total = sum(stop - start for start, stop in spans)
    size = -(-total // parts)
    low, high = min(index * size, total), min((index + 1) * size, total)
    found = []
    for start, stop in spans:
        if low < stop - start and high > 0:
            found.append((start + max(low, 0), start + min(high, stop - start)))
        low, high = low - (stop - start), high - (stop - start)
    return found


def shape_of_spans(spans: Ranges) -> tuple[int, ...]:
    """Return the shape of a slice.

    Example:
        >>> shape_of_spans((((0, 2), (4, 6)), ((0, 3),)))
        (4, 3)
    """
    return tuple(sum(stop - start for start, stop in dim) for dim in spans)


def placed(entry: TensorEntry, spans: Spans) -> Iterator[Chunk]:
    """Yield the boxes of the whole tensor that a local tensor fills, by its ranges.

    Example:
        >>> local = Chunk("f", 100, 16, (0,), (4,))
        >>> entry = TensorEntry("w", "float32", (4,), (1,), 16, "cpu", "f", (local,))
        >>> [(box.offset, box.start, box.shape) for box in placed(entry, [[(2, 4), (6, 8)]])]
        [(100, (2,), (2,)), (108, (6,), (2,))]
    """
    stop = [max((end for _, end in dim), default=0) for dim in spans]
    for chunk in entry.chunks:
        steps = steps_in_file(entry, chunk)
        for at, start, shape in overlaps(spans, (0,) * len(stop), stop):
            first = sum(map(int.__mul__, at, steps))
            offset = chunk.offset + _bytes(entry, first)
            yield _box(entry, chunk, offset, start, shape, steps)


def rows(entry: TensorEntry, stride: Sequence[int] | None = None) -> Iterator[Rows]:
    """Yield the runs of a tensor in groups: a shard of a matrix's columns is one `Rows`.

    Args:
        entry: The tensor.
        stride: Strides of the target memory, in elements. None: row-major.

    Example:
        >>> whole = Chunk("f", 0, 16, (0, 0), (2, 2))
        >>> entry = TensorEntry("w", "float32", (2, 2), (2, 1), 16, "cpu", "f", (whole,))
        >>> [(found.many, found.step) for found in rows(narrowed(entry, [[(0, 2)], [(1, 2)]]))]
        [(2, 8)]
        >>> [(found.many, found.step, found.apart) for found in rows(entry, (5, 1))]
        [(2, 8, 5)]
    """
    steps = row_major(entry.shape) if stride is None else stride
    for chunk in entry.chunks:
        inner, outer = _dims_of(entry, chunk, steps)
        many, in_file, here = outer.pop() if outer else _Dim(1, inner, inner)
        places = [(chunk.offset, sum(map(int.__mul__, chunk.start, steps)))]
        for size, far, apart in outer:
            far *= entry.itemsize
            places = [
                (offset + i * far, at + i * apart) for offset, at in places for i in range(size)
            ]
        for offset, at in places:
            yield Rows(chunk.file, offset, at, inner, many, in_file * entry.itemsize, here)


def runs_of(entry: TensorEntry, stride: Sequence[int] | None = None) -> Runs:
    """Return facts about the `rows` of a tensor, without listing them."""
    steps = row_major(entry.shape) if stride is None else stride
    dims = [_dims_of(entry, chunk, steps) for chunk in entry.chunks]
    number = sum(math.prod(dim.size for dim in each.outer[:-1]) for each in dims)
    return Runs(number, entry.itemsize * min((each.inner for each in dims), default=0))


def _dims_of(entry: TensorEntry, chunk: Chunk, steps: Sequence[int]) -> _Dims:
    """Return the longest run of a chunk on both sides, and the dimensions outside of it.

    Dimensions that one step covers on both sides are merged.
    """
    outer: list[_Dim] = []
    inner, in_file = 1, steps_in_file(entry, chunk)
    for size, far, here in zip(chunk.shape[::-1], in_file[::-1], steps[::-1], strict=True):
        if size == 1:
            continue
        if not outer and far == here == inner:
            inner *= size
            continue
        last = outer[-1] if outer else None
        if last and (far, here) == (last.size * last.in_file, last.size * last.here):
            outer[-1] = last._replace(size=last.size * size)
        else:
            outer.append(_Dim(size, far, here))
    return _Dims(inner, outer[::-1])


def overlaps(spans: Spans, start: Sequence[int], shape: Sequence[int]) -> Iterator[Overlap]:
    """Yield the boxes that a slice and a box of one tensor share.

    Args:
        spans: The slice.
        start: First index of the box in the whole tensor.
        shape: Shape of the box.

    Example:
        >>> for each in overlaps([[(2, 4), (6, 8)]], (3,), (4,)):
        ...     print(each)
        Overlap(at=(1,), inside=(0,), shape=(1,))
        Overlap(at=(2,), inside=(3,), shape=(1,))
    """
    dims = []
    for ranges, first, size in zip(spans, start, shape, strict=True):
        at, found = 0, []
        for low, high in ranges:
            begin, end = max(low, first), min(high, first + size)
            if begin < end:
                found.append((at + begin - low, begin - first, end - begin))
            at += high - low
        dims.append(found)
    for box in itertools.product(*dims):
        yield Overlap(*(tuple(each[part] for each in box) for part in range(3)))

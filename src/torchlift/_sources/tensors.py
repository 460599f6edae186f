"""The tensors of a source: in a file, in memory, or on rank 0.

Each has ``key``, ``shape``, ``dtype``, ``nbytes``, and a view of itself (``tensor``). A `Copy`
fills memory with a slice of it. A tensor behind a URL is a tensor of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch

from torchlift._checkpoint.checkpoint import MappedViews, dtype_of
from torchlift._checkpoint.kinds import calculated
from torchlift._model.commit import repeats
from torchlift._model.dtensor import Span, Spans, blocks, everything, is_dtensor, overlaps
from torchlift._model.handlers import (
    clone_of,
    has_memory,
    inner_tensors,
    is_wrapper,
    oddity,
    shape_of,
    slice_of,
)
from torchlift._transfer.casting import count_overflows, is_narrower, may_overflow
from torchlift._transfer.files import Files
from torchlift._transfer.pinned import is_worth_pinning
from torchlift._transfer.reading import Request, is_readable, read, requests_for
from torchlift.formats.boxes import narrowed, row_major, steps_in_file
from torchlift.formats.index import UNRESOLVED, Chunk, TensorEntry


@dataclass(slots=True, eq=False)
class FileTensor:
    """A tensor of a file.

    Attributes:
        key: Its name in the source. If a rename made it of several, the first.
        entry: The place of its bytes.
        views: The files.
        keys: All its names in the source, if a rename made it.
    """

    key: str
    entry: TensorEntry
    views: MappedViews
    keys: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in the source."""
        return dtype_of(self.entry, self.views.index.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the source."""
        return self.entry.nbytes

    def tensor(self) -> torch.Tensor:
        """Return a view of the file's map, or a copy if one view cannot show it."""
        return self.views.view(self.entry)

    values = tensor


@dataclass(slots=True, eq=False)
class MemoryTensor:
    """A tensor in memory.

    Attributes:
        key, keys: As in `FileTensor`.
        value: The tensor, of the caller or of the model's own loading code.
        entry: The place of the values in a file, if the tensor is a view of its map. Else None.
        is_new: Whether nobody else uses its memory, so that it may be placed into a model.
    """

    key: str
    value: torch.Tensor
    keys: tuple[str, ...] = ()
    entry: TensorEntry | None = None
    is_new: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""
        return shape_of(self.value)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in the source."""
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the source."""
        return _nbytes(self) if self.entry is None else self.entry.nbytes

    def tensor(self) -> torch.Tensor:
        """Return the tensor itself."""
        return self.value

    def values(self) -> torch.Tensor:
        """Return what its values are copied from."""
        return self.value.detach()


@dataclass(slots=True, eq=False)
class JoinedTensor:
    """A tensor that is joined, in its target, from slices of tensors in memory.

    Attributes:
        key, keys: As in `FileTensor`.
        slices: The parts, in any order.
        shape, dtype: The shape and the dtype of the tensor.
    """

    key: str
    keys: tuple[str, ...]
    slices: tuple[Slice, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    entry: ClassVar[None] = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the source."""
        return _nbytes(self)

    def values(self) -> Self:
        """Return what its values are copied from."""
        return self

    def tensor(self) -> torch.Tensor:
        """Return the whole tensor, for code that looks at values."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for values, block in self.slices:
            made[tuple(slice(*span) for span in block)].copy_(values)
        return made


#: Values of a cast that are checked at a time.
_CHECKED = 1 << 22

#: The sources of a copy.
Values = torch.Tensor | FileTensor | JoinedTensor
SourceTensor = FileTensor | MemoryTensor | JoinedTensor


def _nbytes(one: Values | MemoryTensor) -> int:
    return math.prod(one.shape) * one.dtype.itemsize


# ---- entries for a rename, which makes other entries of them


def describe(one: SourceTensor) -> TensorEntry:
    """Return the entry of a tensor. A tensor in memory is described as if it were a file."""
    if isinstance(one, FileTensor):
        return one.entry
    shape = tuple(one.shape)
    odd, offset, stride = "a whole tensor of rank 0", 0, row_major(shape)
    if isinstance(one, MemoryTensor):
        odd = oddity(one.value) or ""
        if is_dtensor(one.value) or is_wrapper(one.value):
            odd = type(one.value).__name__
        elif not odd:
            offset, stride = int(one.value.storage_offset()), one.value.stride()
    encoding = (odd,) if odd else ()
    dtype = str(one.dtype).removeprefix("torch.")
    entry = TensorEntry(one.key, dtype, shape, stride, one.nbytes, "", "", (), encoding=encoding)
    zeros = (0,) * len(shape)
    at, file = offset * entry.itemsize, f"{one.key!r} in memory"
    chunk = Chunk(file, at, entry.nbytes, zeros, shape, held=one)
    return entry._replace(chunks=(chunk,) if entry.numel else ())


def tensor_of(entry: TensorEntry, keys: tuple[str, ...], views: MappedViews | None) -> SourceTensor:
    """Return the tensor of an entry that a rename made of others, or left as it was.

    Args:
        entry: An entry whose chunks are in files, in memory, or in both.
        keys: The names in the source of what it is made of.
        views: The files, if there are any.
    """
    held = [_held_by(chunk) for chunk in entry.chunks]
    if views is not None and not any(held):
        return FileTensor(keys[0], entry, views, keys)
    if len(held) == 1 and (one := held[0]) is not None:
        whole = describe(one)
        same = whole.chunks, whole.stride, whole.encoding
        if same == (entry.chunks, entry.stride, entry.encoding):
            return replace(one, keys=keys)
    slices = tuple(_slices(entry, views))
    return JoinedTensor(keys[0], keys, slices, entry.shape, getattr(torch, entry.dtype))


def _held_by(chunk: Chunk) -> MemoryTensor | JoinedTensor | None:
    """Return the tensor in memory that holds a chunk, or None."""
    assert chunk.held is None or isinstance(chunk.held, (MemoryTensor, JoinedTensor))
    return chunk.held


class Slice(NamedTuple):
    """A part of a tensor.

    Attributes:
        values: A view of the part.
        block: Which box of the tensor it is.
    """

    values: torch.Tensor
    block: tuple[Span, ...]


def _slices(entry: TensorEntry, views: MappedViews | None) -> Iterator[Slice]:
    """Yield what is in each chunk of an entry."""
    for chunk in entry.chunks:
        spans = zip(chunk.start, chunk.shape, strict=True)
        block = tuple((start, start + size) for start, size in spans)
        steps = steps_in_file(entry, chunk)
        if (one := _held_by(chunk)) is not None:
            value = one.tensor().detach()
            box = value.as_strided(chunk.shape, steps, chunk.offset // value.element_size())
            yield Slice(calculated(entry, box.float()) if entry.encoding[1:] else box, block)
        else:
            assert views is not None
            alone = chunk._replace(start=(0,) * len(chunk.start), stride=None)
            part = entry._replace(shape=chunk.shape, stride=steps, chunks=(alone,))
            yield Slice(views.view(part), block)


# ---- filling memory


class Copy(NamedTuple):
    """A copy from a complete tensor into a local tensor.

    Attributes:
        source: The complete tensor.
        target: A plain tensor in this process. It keeps its dtype.
        spans: The slice of the complete tensor that `target` is.
    """

    source: Values
    target: torch.Tensor
    spans: Spans


def whole_copy(source: Values, target: torch.Tensor) -> Copy:
    """Return a copy into a plain tensor of the same shape."""
    return Copy(source, target, everything(target.shape))


def copy_values(copies: Sequence[Copy], advance: Callable[[int], object] | None = None) -> None:
    """Fill every target. Each rank reads its own slices only.

    Args:
        copies: The copies. The place of a tensor of a file must be known. See `resolve`.
        advance: Called with a number of bytes of files as they arrive.

    Raises:
        IntegrityError: If a file changed or could not be read. Its targets then contain undefined
            values, so they must be memory that nobody uses yet.
    """
    reads: dict[MappedViews, list[Request]] = {}
    sent: list[Part] = []

    def put(part: torch.Tensor, target: torch.Tensor) -> None:
        if target.is_cuda and is_worth_pinning(part, target):
            sent.append(Part(part, target))
        else:
            target.copy_(part)

    with torch.no_grad():
        for item in copies:
            source = item.source
            if isinstance(source, FileTensor):
                reads.setdefault(source.views, []).extend(requests_of(item, source, advance))
                continue
            whole = tuple((0, size) for size in source.shape)
            slices = source.slices if isinstance(source, JoinedTensor) else [(source, whole)]
            for values, block in slices:
                place(values, block, item, put)
        for views, requests in reads.items():
            read(requests, views.files, advance=advance)
        if sent:
            send(sent)


def count_cast(item: Copy) -> int:
    """Return how many finite values a copy made infinite or NaN."""
    source, target, spans = item
    if not is_narrower(source.dtype, target.dtype):
        return 0
    parts = list(blocks(target.shape, _CHECKED))
    if not any(may_overflow(target[_slices_of(block)]) for block in parts):
        return 0
    if spans != everything(target.shape):  # of a DTensor, whose ranges a block may cut
        parts = [tuple((0, size) for size in target.shape)]
    count = 0
    for block in parts:
        made = target[_slices_of(block)]
        values = torch.empty(made.shape, dtype=source.dtype, device="cpu")
        of_block = tuple((span,) for span in block) if len(parts) > 1 else spans
        copy_values([Copy(source, values, of_block)])
        count += count_overflows(values.to(made.device), made)
    return count


def _slices_of(block: Sequence[Span]) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in block)


class Part(NamedTuple):
    """Values in host memory, and the memory of a device that receives them."""

    values: torch.Tensor
    target: torch.Tensor


def send(parts: Sequence[Part]) -> None:
    """Copy large tensors to devices through pinned memory."""
    requests = []
    for values, target in parts:
        name, flat = f"memory at {values.data_ptr():#x}", target.detach().view(-1)
        requests.append(Request(name, 0, values.nbytes, flat, values.dtype, memory=values))
    try:
        read(requests, Files({}))
    except RuntimeError:  # not enough memory or threads: the model must not stay half loaded
        for values, target in parts:
            target.copy_(values)


def resolve(wanted: Iterable[tuple[object, Spans | None]]) -> None:
    """Find where the values of tensors of a file are, of each complete tensor or of a slice.

    Each tensor then has the entry of these places. They take a request each behind a URL.
    """
    todo: dict[MappedViews, list[tuple[FileTensor, TensorEntry]]] = {}
    for one, spans in wanted:
        if isinstance(one, FileTensor) and UNRESOLVED in one.entry.encoding:
            todo.setdefault(one.views, []).append((one, _select_chunks(one.entry, spans)))
    for views, pairs in todo.items():
        entries = views.resolved(entry for _, entry in pairs)
        for (one, _), entry in zip(pairs, entries, strict=True):
            one.entry = entry


def _select_chunks(entry: TensorEntry, spans: Spans | None) -> TensorEntry:
    """Return an entry with the chunks that contain a part of a slice."""
    if spans is None or len(spans) != len(entry.shape):
        return entry
    chunks = [
        chunk
        for chunk in entry.chunks
        if all(
            any(first < start + size and start < stop for first, stop in dim)
            for dim, start, size in zip(spans, chunk.start, chunk.shape, strict=True)
        )
    ]
    # A single chunk would count as the complete tensor.
    return entry._replace(chunks=tuple(chunks)) if len(chunks) > 1 else entry


def is_dense(entry: TensorEntry) -> bool:
    """Return whether an entry is one run of the file, without gaps and repetitions."""
    if not entry.chunks or entry.needs_assembly:
        return not entry.chunks
    if entry.chunks[0].nbytes != entry.nbytes:
        return False
    return entry.is_contiguous or not repeats(entry.shape, entry.stride)


def requests_of(
    item: Copy, source: FileTensor, advance: Callable[[int], object] | None = None
) -> Iterator[Request]:
    """Yield the reads that fill a target. If it cannot be read into, copy from the map."""
    entry, target = source.entry, item.target
    if target.shape != entry.shape:
        entry = narrowed(entry, item.spans)
    stride = target.stride()
    if is_dense(entry) and stride == entry.stride:  # as nearly all tensors
        flat = target.as_strided((entry.numel,), (1,))
        for chunk in entry.chunks:
            yield Request(chunk.file, chunk.offset, chunk.nbytes, flat, source.dtype)
        return
    is_apart = target.is_contiguous() or not repeats(target.shape, stride)
    if is_apart and is_readable(entry, stride):
        yield from requests_for(entry, target, source.dtype)
        return
    source.views.fill(target, entry)
    source.views.files.check({chunk.file for chunk in entry.chunks})
    if advance is not None:
        advance(entry.nbytes)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def place(
    values: torch.Tensor,
    block: Sequence[Span],
    item: Copy,
    copy: Callable[[torch.Tensor, torch.Tensor], None] = _copy,
) -> None:
    """Copy the common part of `values`, which is a block of the complete tensor, and the target."""
    target = item.target
    # A scalar may be saved with shape [1]. A slice of a subclass is not always a view.
    if target.dim() != values.dim() or (
        target.shape == values.shape and item.spans == tuple((span,) for span in block)
    ):
        # A subclass may not support reshape, so it is called only if the shapes differ.
        if values.shape != target.shape:
            values = values.reshape(target.shape)
        copy(values, target)
        return
    for into, out_of in overlaps(item.spans, block):
        part = slice_of(values, out_of)
        copy(part, target if target.shape == part.shape else target[into])


def copy_overlapping_sources(copies: Sequence[Copy]) -> list[Copy | None]:
    """Copy sources that another copy writes to. None stands for a copy that would change nothing.

    Two states may exchange their values. Without this, the second copy would read what the first
    has written.
    """
    sources = [_memory(item.source) for item in copies]
    targets = [_memory(item.target) for item in copies]
    idle = [
        bool(memory) and memory == into and is_in_place(item.source, item.target)
        for item, memory, into in zip(copies, sources, targets, strict=True)
    ]
    written = {
        each for into, is_idle in zip(targets, idle, strict=True) if not is_idle for each in into
    }
    found = list[Copy | None]()
    for item, memory, is_idle in zip(copies, sources, idle, strict=True):
        if isinstance(item.source, FileTensor) or written.isdisjoint(memory):
            found.append(None if is_idle else item)
        else:
            found.append(None if is_idle else item._replace(source=_copy_source(item.source)))
    return found


def _copy_source(source: torch.Tensor | JoinedTensor) -> torch.Tensor:
    return source.tensor() if isinstance(source, JoinedTensor) else clone_of(source)


def _memory(source: Values) -> set[int]:
    """Return addresses of the storages of values. A wrapper has those of its inner tensors."""
    if isinstance(source, JoinedTensor):
        return {memory for values, _ in source.slices for memory in _memory(values)}
    if not isinstance(source, torch.Tensor) or not source.numel():
        return set()
    if is_wrapper(source):
        return {memory for inner in inner_tensors(source) for memory in _memory(inner)}
    return {source.untyped_storage().data_ptr()} if has_memory(source) else set()


def is_in_place(one: Values, two: torch.Tensor) -> bool:
    """Return whether both tensors are the same view of the same memory."""
    if not isinstance(one, torch.Tensor):
        return False
    if is_wrapper(one) or is_wrapper(two):
        pairs = zip(inner_tensors(one), inner_tensors(two), strict=False)
        return type(one) is type(two) and all(is_in_place(a, b) for a, b in pairs)
    return (
        has_memory(one)
        and has_memory(two)
        and one.data_ptr() == two.data_ptr()
        and (one.dtype, one.device, one.shape, one.stride())
        == (two.dtype, two.device, two.shape, two.stride())
        and (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg())
    )

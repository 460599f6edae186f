"""Read the values of a tensor in blocks, from memory, from a device or from a file."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from torchlift._checkpoint.checkpoint import MappedViews, dtype_of
from torchlift._model.dtensor import blocks
from torchlift._sources.tensors import Copy, FileTensor, copy_values, requests_of
from torchlift._store.places import is_url
from torchlift._transfer.casting import Checked
from torchlift._transfer.files import Files
from torchlift._transfer.pages import allocate
from torchlift._transfer.reading import read, read_values
from torchlift.formats.index import UNRESOLVED, Chunk, TensorEntry

#: Some bytes of a tensor, which may change when the next ones are read.
Block = memoryview | bytes | bytearray
#: Bytes of a block that is copied from an accelerator, cast, read or made dense.
BLOCK = 16 << 20
#: Smaller tensors are read and copied by one call. 5,000 of 1 KB are converted in 0.5 s, in blocks
#: in 1.5 s.
FEW = 64 << 10
#: Bytes of a URL that one request for a small tensor brings: 1,000 of 4 KB take 4 requests.
_WINDOW = 1 << 20


class Workspace:
    """Memory for one block, which all tensors share.

    The C library would keep several of them if each tensor got its own. New pages cost more than a
    cast.
    """

    def __init__(self, limit: int = BLOCK) -> None:
        self.limit = limit
        self.stages: list[torch.Tensor] = []  # of `read`
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._window = _Window("", 0, bytearray())

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor, which is valid until the next call."""
        nbytes = numel * dtype.itemsize
        memory = self._memory.get(device)
        if memory is None or memory.numel() < nbytes:
            # The old memory goes first: there must never be both.
            memory = self._memory.pop(device, None)
            del memory
            memory = allocate(1 << (nbytes - 1).bit_length(), torch.uint8, device)
            self._memory[device] = memory
        return memory[:nbytes].view(dtype)

    def read(self, chunk: Chunk, files: Files) -> bytearray:
        """Return the bytes of a small tensor. From a URL it reads also the bytes that follow.

        Raises:
            CheckpointError: If they cannot be read.
        """
        file, start, nbytes, *_ = chunk
        if not is_url(file):
            return files.read(file, start, nbytes)
        first, data = start - self._window.start, self._window.data
        if file != self._window.file or not 0 <= first <= len(data) - nbytes:
            most = max(nbytes, min(_WINDOW, files.stamps[file].size - start))
            first, data = 0, bytearray(memory_of(read_values(files, file, start, most)))
            self._window = _Window(file, start, data)
        return data[first : first + nbytes]


class _Window(NamedTuple):
    """Bytes of a URL.

    Attributes:
        file: the URL.
        start: offset of the first byte.
        data: the bytes.
    """

    file: str
    start: int
    data: bytearray


def memory_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    # Through NumPy it would need NumPy.
    data = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    # An interrupt may leave a thread that still reads the bytes.
    data.owner = values  # type: ignore[attr-defined]
    return memoryview(data).cast("B")


def _few_bytes(tensor: torch.Tensor, dtype: torch.dtype, checked: Checked | None) -> bytes:
    """Return the bytes of a small tensor in row-major order, on any device and of any strides."""
    before = tensor
    is_plain = tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == dtype
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().to("cpu", dtype).contiguous()
    if checked is not None and tensor.numel():
        checked.add(tensor, lambda: before)
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def tensor_blocks(
    tensor: torch.Tensor, dtype: torch.dtype, work: Workspace, checked: Checked | None = None
) -> Iterator[Block]:
    """Yield the bytes of a tensor in row-major order, in blocks.

    No more than a block is ever copied, whatever the strides.

    Args:
        tensor: on any device.
        dtype: of the bytes.
        work: memory for blocks that must be cast or rearranged.
        checked: Counts values that are not finite, unless it is None.
    """
    if tensor.nbytes <= FEW:
        yield _few_bytes(tensor, dtype, checked)
        return
    limit = max(1, work.limit // max(tensor.itemsize, dtype.itemsize))
    for block in blocks(tensor.shape, limit):
        source = values = tensor[tuple(slice(*span) for span in block)]
        plain = values.is_contiguous() and not values.is_conj() and not values.is_neg()
        if not plain or values.dtype != dtype:
            room = work.room(values.numel(), dtype, values.device)
            values = room.view(values.shape).copy_(values)
        if checked is not None:
            checked.add(values, partial(_same, source))
        values = values.cpu()
        yield memory_of(values)


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


def entry_blocks(
    entry: TensorEntry,
    dtype: torch.dtype,
    work: Workspace,
    views: MappedViews,
    checked: Checked | None = None,
) -> Iterator[Block]:
    """Yield the bytes of a tensor of a file in row-major order, in blocks.

    Args:
        entry: the tensor.
        dtype: of the bytes.
        work: memory for the values.
        views: the files.
        checked: Counts values that are not finite, unless it is None.

    Raises:
        IntegrityError: If the file cannot be read, or has changed.
    """
    if UNRESOLVED in entry.encoding:
        (entry,) = views.resolved([entry])
    stored = dtype_of(entry, views.index.path)
    if entry.chunks and entry.nbytes <= FEW and not entry.needs_assembly and entry.is_contiguous:
        data = work.read(entry.chunks[0], views.files)
        as_it_is = dtype == stored and checked is None
        values = None if as_it_is else torch.frombuffer(data, dtype=stored)
        yield data if values is None else _few_bytes(values, dtype, checked)
        return
    if not entry.is_plain:
        for values in views.blocks(entry):
            room = work.room(values.numel(), dtype, values.device)
            made = room.copy_(values)
            if checked is not None:
                checked.add(made, partial(_same, values))
            yield memory_of(made)
        return
    source = FileTensor(entry.key, entry, views)
    limit = max(1, work.limit // max(stored.itemsize, dtype.itemsize))
    for block in blocks(entry.shape, limit):
        shape = [stop - start for start, stop in block]
        values = work.room(math.prod(shape), dtype, torch.device("cpu")).view(shape)
        # Read, if possible: a map of a file that is truncated meanwhile ends in a SIGBUS.
        item = Copy(source, values, tuple((span,) for span in block))
        read([*requests_of(item, source)], views.files, stages=work.stages)
        if checked is not None:
            checked.add(values, partial(_read_again, item))
        yield memory_of(values)


def _read_again(item: Copy) -> torch.Tensor:
    """Return the values of a block before its cast."""
    values = torch.empty(item.target.shape, dtype=item.source.dtype, device="cpu")
    copy_values([item._replace(target=values)])
    return values

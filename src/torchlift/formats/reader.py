"""What a format must give, ours and those of other packages: `Reader`, which looks at a `Content`.

A package adds a format by an entry point of the group ``torchlift.formats``, whose object is a
`Reader` and whose name becomes the format's. Those are asked about what no reader of ours knows,
and what they return is checked as what ours claim is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

from torchlift._store import FileStamp, UrlStamp, parent, relative
from torchlift._system.text import printable
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.boxes import check_boxes, steps_in_file
from torchlift.formats.index import (
    ITEMSIZE,
    LOCAL_MAGIC,
    Chunk,
    Index,
    Record,
    Storage,
    TensorEntry,
)
from torchlift.formats.sharded import ReadFile, locate
from torchlift.formats.source import Source, dense_shape, whole_numbers
from torchlift.formats.torch_zip import repeats_too_often
from torchlift.formats.unpickle import Budget
from torchlift.formats.zip_archive import END_MAGIC, read_directory

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Bytes at the start of a file that decide on its format.
HEAD = 512

#: The group of entry points.
GROUP = "torchlift.formats"

#: Names of formats that are ours.
_OURS = {
    "torch-zip", "torch-legacy", "torchscript", "pt2", "safetensors", "sharded", "dcp", "gguf",
    "npz", "zero",
}  # fmt: skip
#: Encodings of bytes that lie in the file as they are.
_ENCODINGS = {"big-endian", "conjugate", "negative"}


class Content:
    """A file or a directory whose format is not known yet.

    Attributes:
        path: absolute.
        names: what is in a directory, sorted; of a file, nothing.
        head: the first bytes of a file, at most 512; of a directory, none.
        budget: what reading it may still cost.
    """

    def __init__(
        self,
        path: str,
        read_file: ReadFile,
        *,
        names: Iterable[str] = (),
        source: Source | None = None,
    ) -> None:
        self.path, self.names, self._source = path, list(names), source
        self.read_file = read_file
        self.budget = source.budget if source else Budget()
        self.head = source.read(0, min(HEAD, source.size)) if source else b""

    @property
    def source(self) -> Source:
        """Return the file, open for reading."""
        assert self._source is not None
        return self._source

    @cached_property
    def records(self) -> dict[str, Record]:
        """Return the records of a zip archive, by name; nothing of what is none."""
        return read_directory(self.source) if is_zip(self.head) else {}

    @cached_property
    def top(self) -> str:
        """Return the folder of the first record, with its slash, as torch's archives have one."""
        first = next(iter(self.records), "")
        return first[: first.find("/") + 1]


class Reader(NamedTuple):
    """How a format is read.

    Attributes:
        fits: whether a content is of this format, by its first bytes, its records or its names. It
            is asked about everything, so it must be quick, and must not raise.
        read: returns its index: every tensor with the bytes that it has in the file, counted from
            the file's start, and every file with its stamp. It raises a `FormatError` for what is
            damaged.
    """

    fits: Callable[[Content], object]
    read: Callable[[Content], Index]


def is_zip(head: bytes) -> bool:
    """Return whether a file starts as a zip archive does."""
    return head[:4] in (LOCAL_MAGIC, END_MAGIC)


@cache
def entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of the group; packages that are installed later are not seen."""
    # 20 ms, and as many more to look, which files of ours do without.
    from importlib import metadata

    return tuple(metadata.entry_points(group=GROUP))


def read_by_others(content: Content) -> Index | None:
    """Read what no reader of ours knows by one of another package; None where none knows it.

    Raises:
        CheckpointError: the reader's own; or a `FormatError` that names the entry point, where it
            fails, has the name of one of our formats, or returns what is not true of the files.
    """
    found = []
    for point in entry_points():
        with _blamed(point.name, content):
            if point.name in _OURS:
                raise ValueError("this name is that of a format that torchlift reads")
            reader = point.load()
            if not isinstance(reader, Reader):
                raise TypeError(f"a {type(reader).__name__} instead of a torchlift.formats.Reader")
            if reader.fits(content):
                found.append((point.name, reader))
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise FormatError("several entry points know this format", file=content.path, found=names)
    ((name, reader),) = found
    with _blamed(name, content):
        index = reader.read(content)
        try:
            return _checked(index, name, content)
        except CheckpointError as error:
            raise ValueError(f"it returned what is not true: {error}") from error


@contextmanager
def _blamed(name: str, content: Content) -> Iterator[None]:
    """Name the entry point in whatever its code raises that is no error of ours."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise FormatError(
            f"the entry point {printable(name, 100)!r} of the group {GROUP} fails",
            file=content.path,
            found=f"{type(error).__name__}: {error}",
            hint="Update or uninstall the package that brings it.",
        ) from error


def _checked(index: Index, name: str, content: Content) -> Index:
    """Return what an index says of tensors, files and values, once all of it is checked.

    Raises:
        CheckpointError: a claim about bytes that is wrong, or a file outside of the directory.
    """
    if not isinstance(index, Index):
        raise FormatError("no Index", found=f"a {type(index).__name__}")
    entries, storages, files = dict(index.entries), dict(index.storages), dict(index.files)
    folder = parent(content.path) if content.head or not content.names else content.path
    for path, stamp in files.items():
        if not isinstance(stamp, (FileStamp, UrlStamp)):
            raise FormatError("a file without its stamp", entry=path)
        if path != content.path:  # which may be a link to anywhere: the caller named it
            stamp.check(locate(folder, relative(path, folder)))

    def check_place(file: str, offset: int, nbytes: int, entry: str) -> None:
        first, many = whole_numbers((offset, nbytes), entry, "place in a file", "tuple")
        if file not in files or first + many > files[file].size:
            size = files[file].size if file in files else 0
            found = f"bytes {first} to {first + many} of {file}"
            raise FormatError("bytes outside its files", entry=entry, expected=size, found=found)

    for key, storage in storages.items():
        check_place(storage.file, storage.offset, storage.nbytes, key)
    for key, entry in entries.items():
        _check_entry(key, entry, storages)
        for chunk in entry.chunks:
            check_place(chunk.file, chunk.offset, chunk.nbytes, key)
            if entry.storage:
                _check_inside(key, entry.itemsize, chunk, storages[entry.storage])
        boxes = [(chunk.start, chunk.shape) for chunk in entry.chunks]
        check_boxes(key, entry.shape, boxes, content.budget)
    texts = (*index.objects, *index.metadata, *index.metadata.values())
    if not all(type(text) is str for text in texts) or index.objects.keys() & entries.keys():
        raise FormatError("names of objects, or metadata, that are not text or not their own")
    objects, metadata = dict(index.objects), dict(index.metadata)
    made = Index(content.path, name, entries, storages, files, objects, metadata)
    known = {"path", "format", "entries", "storages", "files", "objects", "metadata"}
    if more := [
        one.name for one in fields(Index) if one.name not in known and getattr(index, one.name)
    ]:
        raise FormatError("fields that only formats of ours have", found=", ".join(more))
    return made


def _check_inside(key: str, itemsize: int, chunk: Chunk, storage: Storage) -> None:
    """Refuse a chunk that is not some whole elements of its storage."""
    first = chunk.offset - storage.offset
    is_inside = chunk.file == storage.file and 0 <= first <= storage.nbytes - chunk.nbytes
    if not is_inside or first % itemsize:
        raise FormatError(
            "a chunk that is not some elements of its storage",
            entry=key,
            expected=f"a multiple of {itemsize} in {storage.nbytes} bytes of {storage.file}",
            found=f"{chunk.nbytes} bytes from {first} of {chunk.file}",
        )


def _check_entry(key: str, entry: TensorEntry, storages: Mapping[str, Storage]) -> None:
    """Refuse an entry that contradicts itself."""
    if type(entry) is not TensorEntry or type(key) is not str or entry.key != key:
        raise FormatError("an entry that is none, or of another key", entry=str(key))
    shape = dense_shape(entry.shape, key, "shape", "tuple")
    dims, nbytes = len(shape), math.prod(shape) * ITEMSIZE.get(entry.dtype, 0)
    if len(whole_numbers(entry.stride, key, "stride", "tuple")) != dims or entry.nbytes != nbytes:
        raise FormatError(
            "a dtype, strides or a size that do not fit the shape",
            entry=key,
            expected=f"{dims} strides, {nbytes} bytes",
            found=f"{entry.dtype}, {len(entry.stride)} strides, {entry.nbytes} bytes",
        )
    if entry.dtype not in ITEMSIZE or not _ENCODINGS.issuperset(entry.encoding):
        raise FormatError("no dtype or encoding of ours", entry=key, found=entry.dtype)
    if entry.storage and entry.storage not in storages:
        raise FormatError("a storage that is not listed", entry=key, found=entry.storage)
    stored = 0
    for chunk in entry.chunks:
        rows = [
            whole_numbers(row, key, "place of a chunk", "tuple")
            for row in (chunk.start, chunk.shape, steps_in_file(entry, chunk))
        ]
        span = 1 + sum((size - 1) * step for _, size, step in zip(*rows, strict=True))
        stored += span * entry.itemsize
        if 0 in chunk.shape or chunk.packed or span * entry.itemsize > chunk.nbytes:
            raise FormatError("a chunk that has not the bytes of its box", entry=key)
    if repeats_too_often(nbytes, stored):
        raise FormatError("a view absurdly larger than its bytes", entry=key, found=nbytes)

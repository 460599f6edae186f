"""Directories of ``torch.distributed.checkpoint``: ``.metadata`` and items in ``*.distcp`` files.

``.metadata`` is a pickle that torch runs as a program. Here it is read by the interpreter that
cannot run anything (`dcp_metadata`), and what it says about files and bytes is checked: an item is
a small torch archive of its own, and where its numbers lie is found inside it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchlift._system import collection_paused
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.dcp_items import Items
from torchlift.formats.dcp_metadata import Box, Description, Item, Tensor, read_metadata
from torchlift.formats.index import Chunk, FileStamp, Index, Storage, TensorEntry
from torchlift.formats.sharded import locate
from torchlift.formats.source import Source, Window
from torchlift.formats.torch_zip import read_archive

METADATA = ".metadata"
#: Files open at a time; a checkpoint of a thousand ranks has more than a process may open.
_MAX_OPEN = 64
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata", re.ASCII)


def metadata_files(names: Iterable[str]) -> list[str]:
    """The files that describe a distributed checkpoint: one, or one per rank; none elsewhere.

    Example:
        >>> metadata_files(["__0_0.distcp", ".metadata"]), metadata_files(["model.pt"])
        (['.metadata'], [])
    """
    names = list(names)
    if METADATA in names:
        return [METADATA]
    ranks = sorted((int(m[1]), name) for name in names if (m := _OF_RANK.fullmatch(name)))
    return [name for _, name in ranks]


def read_dcp(path: str, names: Sequence[str]) -> Index:
    """Read the index of a distributed checkpoint.

    Args:
        path: absolute path of the directory.
        names: its metadata files.

    Raises:
        FormatError: malformed, a file that is missing or too short, items that are not what the
            metadata says, chunks that overlap or leave gaps.
        UnsafeError: a global that is not part of such metadata, or a file outside the directory.
    """
    with collection_paused():
        whole = Description()
        for name in names:
            file = locate(path, name)
            try:
                with Source(file) as source:
                    whole.merge(read_metadata(source))
            except CheckpointError as error:
                error.file = error.file or file
                raise
        reader = _Reader(path, whole)
        try:
            return reader.read()
        finally:
            reader.close()


class _Reader:
    """A description and its files -> an index."""

    def __init__(self, path: str, whole: Description) -> None:
        self.path = path
        self.whole = whole
        self.sources: dict[str, Source] = {}
        self.paths: dict[str, str] = {}
        self.stamps: dict[str, FileStamp] = {}
        self.items = Items()
        self.entries: dict[str, TensorEntry] = {}
        self.storages: dict[str, Storage] = {}
        self.objects: dict[str, object] = {}
        self.blocked: dict[str, None] = {}
        self.blocked_keys: dict[str, str] = {}

    def read(self) -> Index:
        for name in dict.fromkeys(item.file for item in self.whole.items.values()):
            # All names are checked before the first file is opened.
            self.paths[name] = locate(self.path, name)
        for key, tensor in self.whole.tensors.items():
            self._require_free(key)
            self.entries[key] = self._tensor(key, tensor)
        for key in self.whole.objects:
            self._object(key)
        version = self.whole.version
        return Index(
            path=self.path,
            format="dcp",
            entries=self.entries,
            storages=self.storages,
            files=self.stamps,
            objects=self.objects,
            metadata={} if version is None else {"dcp_version": version},
            blocked=tuple(self.blocked),
            blocked_keys=self.blocked_keys,
        )

    def close(self) -> None:
        for source in self.sources.values():
            source.close()

    def _item(self, key: str, start: tuple[int, ...] | None) -> Item:
        item = self.whole.items.get((key, start))
        if item is None:
            raise FormatError(
                "the metadata does not say in which file this is stored",
                entry=key,
                found=None if start is None else f"a chunk at {list(start)} without a file",
            )
        return item

    def _window(self, key: str, item: Item) -> Window:
        source = self.sources.get(item.file)
        if source is None:
            if len(self.sources) >= _MAX_OPEN:
                self.sources.pop(next(iter(self.sources))).close()
            source = self.sources[item.file] = Source(self.paths[item.file])
            if self.stamps.setdefault(source.path, source.stamp) != source.stamp:
                raise FormatError("the file changed while it was read", file=source.path)
        if item.offset + item.nbytes > source.size:
            raise FormatError(
                "an item reaches past the end of its file",
                file=source.path,
                entry=key,
                expected=f"at most {source.size} bytes",
                found=f"bytes {item.offset} to {item.offset + item.nbytes}",
                hint="The file is truncated: fetch it again.",
            )
        return Window(source, item.offset, item.nbytes)

    def _open(self, key: str, item: Item, kind: object = None) -> Index:
        """The index of one item, its offsets counted from the start of the file."""
        window = self._window(key, item)
        try:
            found = (
                read_archive(window, key) if kind is None else self.items.read(window, key, kind)
            )
        except CheckpointError as error:
            error.file, error.entry = window.path, key if error.entry is None else error.entry
            raise
        return _moved(found, item)

    def _tensor(self, key: str, tensor: Tensor) -> TensorEntry:
        _check_boxes(key, tensor)
        pieces = [self._chunk(key, tensor, box) for box in tensor.boxes if 0 not in box.shape]
        chunks = tuple(chunk for chunk, _, _ in pieces)
        stride = _row_major(tensor.shape)
        if len(chunks) == 1 and chunks[0].stride is not None:
            stride = chunks[0].stride
            chunks = (replace(chunks[0], stride=None),)
        itemsize = tensor.itemsize
        return TensorEntry(
            key=key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=stride,
            nbytes=math.prod(tensor.shape) * itemsize,
            location=pieces[0][2] if pieces else "cpu",
            storage=pieces[0][1] if pieces else "",
            chunks=chunks,
            requires_grad=tensor.requires_grad,
        )

    def _chunk(self, key: str, tensor: Tensor, box: Box) -> tuple[Chunk, str, str]:
        """(a chunk, the name of its storage, its location tag)."""
        item = self._item(key, box.start)
        index = self._open(key, item, (tensor.dtype, box.shape))
        entry = index.entries.get(key)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, box.shape):
            found = "no tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise FormatError(
                "an item is not what the metadata says",
                file=self.paths[item.file],
                entry=key,
                expected=f"{tensor.dtype} {list(box.shape)}",
                found=found,
            )
        self.storages.update(index.storages)
        (held,) = entry.chunks
        stride = None if entry.is_contiguous else entry.stride
        chunk = replace(held, start=box.start, shape=box.shape, stride=stride)
        return chunk, entry.storage, entry.location

    def _object(self, key: str) -> None:
        """What is not a tensor, if it is plain enough to be had without running anything."""
        item = self._item(key, None)
        window = self._window(key, item)
        if item.nbytes < 4 or window.read(0, 4) != b"PK\x03\x04":
            self._require_free(key)
            self.blocked_keys[key] = "bytes that torch.save did not write"
            return
        index = self._open(key, item)
        for name in (*index.entries, *index.objects, *index.blocked_keys):
            self._require_free(name)
        self.entries.update(index.entries)
        self.storages.update(index.storages)
        self.objects.update(index.objects)
        self.blocked.update(dict.fromkeys(index.blocked))
        self.blocked_keys.update(index.blocked_keys)

    def _require_free(self, key: str) -> None:
        if key in self.entries or key in self.objects or key in self.blocked_keys:
            raise FormatError("two tensors or objects have this key", entry=key)


def _moved(index: Index, item: Item) -> Index:
    """The index of an item, as seen from the file that the item is in."""
    prefix = f"{item.file}@{item.offset}/"
    return replace(
        index,
        entries={
            key: replace(
                entry,
                storage=prefix + entry.storage,
                chunks=tuple(replace(c, offset=c.offset + item.offset) for c in entry.chunks),
            )
            for key, entry in index.entries.items()
        },
        storages={
            prefix + name: replace(storage, offset=storage.offset + item.offset)
            for name, storage in index.storages.items()
        },
    )


def _check_boxes(key: str, tensor: Tensor) -> None:
    """Refuse chunks that reach outside the tensor, overlap, or leave gaps."""
    shape = tensor.shape
    boxes = [box for box in tensor.boxes if 0 not in box.shape]
    for box in boxes:
        ends = [start + size for start, size in zip(box.start, box.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise FormatError(
                "a chunk reaches outside its tensor",
                entry=key,
                expected=f"inside {list(shape)}",
                found=f"{list(box.shape)} at {list(box.start)}",
            )
    _refuse_overlap(key, boxes)
    held, wanted = sum(math.prod(box.shape) for box in boxes), math.prod(shape)
    if held != wanted:
        raise FormatError(
            "the chunks of a tensor leave gaps",
            entry=key,
            expected=f"{wanted} elements",
            found=f"{held} in {len(boxes)} chunks",
            hint="The checkpoint is incomplete: a rank's file may be missing, or its save failed.",
        )


def _refuse_overlap(key: str, boxes: list[Box]) -> None:
    if len(boxes) < 2:
        return
    dims = len(boxes[0].start)
    if dims == 0:
        raise FormatError("the chunks of a tensor overlap", entry=key, found="a scalar, twice")
    # Along the dimension that is cut most, few boxes are open at a time.
    sweep = max(range(dims), key=lambda dim: len({box.start[dim] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[sweep]):
        at = box.start[sweep]
        open_boxes = [other for other in open_boxes if other.start[sweep] + other.shape[sweep] > at]
        for other in open_boxes:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(box.start, box.shape, other.start, other.shape, strict=True)
            ):
                raise FormatError(
                    "the chunks of a tensor overlap",
                    entry=key,
                    found=f"{list(box.shape)} at {list(box.start)} and {list(other.shape)} at "
                    f"{list(other.start)}",
                )
        open_boxes.append(box)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dcp(path: str) -> bool:
    """Whether a directory holds a distributed checkpoint.

    Example:
        >>> import tempfile
        >>> is_dcp(tempfile.mkdtemp())
        False
    """
    return os.path.isdir(path) and bool(metadata_files(os.listdir(path)))

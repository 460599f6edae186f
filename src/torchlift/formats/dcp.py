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
from dataclasses import dataclass, field, replace
from typing import Any

from torchlift._system import collection_paused
from torchlift.errors import CheckpointError, FormatError, UnsafeError
from torchlift.formats.index import ITEMSIZE, Chunk, FileStamp, Index, Storage, TensorEntry
from torchlift.formats.sharded import locate
from torchlift.formats.source import Source, Window
from torchlift.formats.torch_pickle import Blocked, Global, TorchWorld
from torchlift.formats.torch_zip import read_archive
from torchlift.formats.unpickle import read_pickle
from torchlift.formats.zip_archive import read_directory

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


#: Most bytes of metadata: a million chunks take some 300 MB.
_MAX_METADATA = 1 << 30

_DCP = "torch.distributed.checkpoint."
#: Classes of which only the attributes matter, by every name they have had.
_RECORDS = {
    f"{_DCP}metadata.{name}": name
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    f"{_DCP}filesystem._StorageInfo": "_StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": "TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": "_MEM_FORMAT_ENCODING",
}  # fmt: skip
_PATHS = {
    f"pathlib{inner}.{kind}"
    for inner in ("", "._local")
    for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}


@dataclass(frozen=True, slots=True)
class Box:
    """A chunk's place in its tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class Tensor:
    """One tensor of the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    boxes: list[Box]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Item:
    """A run of bytes in one file that holds one chunk or object as a torch archive."""

    file: str
    offset: int
    nbytes: int


@dataclass(slots=True)
class Description:
    """What one metadata file says, or several together.

    Attributes:
        tensors: key -> tensor.
        objects: keys of what is not a tensor, in order.
        items: (key, first index of the chunk or None) -> where it is stored.
        version: of the format, where it is recorded.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    items: dict[tuple[str, tuple[int, ...] | None], Item] = field(default_factory=dict)
    version: str | None = None

    def merge(self, other: Description) -> None:
        """Add what the metadata of another rank says; what both have is the same replica.

        Raises:
            FormatError: the two disagree about a tensor.
        """
        for key, tensor in other.tensors.items():
            mine = self.tensors.setdefault(key, tensor)
            if mine is tensor:
                continue
            if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
                raise FormatError(
                    "the metadata of two ranks disagree",
                    entry=key,
                    expected=f"{mine.dtype} {list(mine.shape)}",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                )
            known = set(mine.boxes)
            mine.boxes += [box for box in tensor.boxes if box not in known]
        self.objects.update(other.objects)
        self.items = {**other.items, **self.items}
        self.version = self.version or other.version


class _Record:
    """An instance of one of the classes: its attributes, and nothing that could act."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: object = {}

    def get(self, name: str) -> Any:
        """An attribute, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _World(TorchWorld):
    """Globals of DCP metadata; any other name is refused at once, since none is needed."""

    def find(self, module: str, name: str) -> Global | Blocked:
        dotted = f"{module}.{name}"
        if dotted in _RECORDS or dotted in _PATHS:
            return Global(dotted)
        found = super().find(module, name)
        if isinstance(found, Blocked):
            raise UnsafeError(
                "the metadata names a global that describes no checkpoint; torch would import and "
                "could run it",
                entry=dotted,
                hint="Do not load this directory with torch either, unless you trust its source.",
            )
        return found

    def call(self, function: object, arguments: object) -> object:
        if isinstance(function, Global):
            kind = _RECORDS.get(function.name)
            if kind is not None:
                return _Record(kind)
            if function.name in _PATHS:
                return "/".join(map(str, arguments)) if isinstance(arguments, tuple) else ""
        return super().call(function, arguments)

    def build(self, target: object, state: object) -> None:
        if isinstance(target, _Record):
            # Dataclasses with slots, and old pickles, wrap the dict: (None, attributes).
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
                state = state[1]
            target.state = state
        else:
            super().build(target, state)


def read_metadata(source: Source) -> Description:
    """Read one metadata file.

    Raises:
        FormatError: malformed.
        UnsafeError: it names a global that has no business there.
    """
    if source.size > _MAX_METADATA:
        raise FormatError("the metadata is too large", expected=f"at most {_MAX_METADATA} bytes")
    data = source.read(0, source.size)
    root, end = read_pickle(data, _World())
    if end != len(data):
        raise FormatError("bytes after the end of the metadata", expected=end, found=len(data))
    if not isinstance(root, _Record) or root.kind != "Metadata":
        raise FormatError("the metadata is not that of a distributed checkpoint")
    described = _mapping(root.get("state_dict_metadata"), "state_dict_metadata")
    stored = _mapping(root.get("storage_data"), "storage_data")
    made = Description()
    version = root.get("version")
    made.version = version if isinstance(version, str) else None
    for key, value in described.items():
        if type(key) is not str or not isinstance(value, _Record):
            raise FormatError("the metadata has a key that is not text", found=_kind(key))
        if value.kind == "BytesStorageMetadata":
            made.objects[key] = None
        else:
            made.tensors[key] = _tensor(key, value)
    for place, info in stored.items():
        made.items[_place(place)] = _item(place, info)
    return made


def _tensor(key: str, record: _Record) -> Tensor:
    properties, chunks = record.get("properties"), record.get("chunks")
    if record.kind != "TensorStorageMetadata" or not isinstance(chunks, list):
        raise FormatError("the metadata of a tensor is malformed", entry=key, found=record.kind)
    state = properties.state if isinstance(properties, _Record) else None
    if isinstance(state, dict):
        state = (state.get("dtype"), None, state.get("requires_grad"))
    dtype = state[0] if isinstance(state, tuple) and len(state) > 2 else None
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Global) else ""
    if name not in ITEMSIZE:
        raise FormatError("a tensor has a dtype that nobody knows", entry=key, found=_kind(dtype))
    shape = _numbers(record.get("size"), key)
    boxes = []
    for chunk in chunks:
        if not isinstance(chunk, _Record) or chunk.kind != "ChunkStorageMetadata":
            raise FormatError("the chunks of a tensor are malformed", entry=key)
        box = Box(_numbers(chunk.get("offsets"), key), _numbers(chunk.get("sizes"), key))
        if not len(box.start) == len(box.shape) == len(shape):
            raise FormatError(
                "a chunk has not the dimensions of its tensor",
                entry=key,
                expected=f"{len(shape)} dimensions",
                found=f"{list(box.shape)} at {list(box.start)}",
            )
        boxes.append(box)
    assert isinstance(state, tuple)
    return Tensor(name, shape, state[2] is True, list(dict.fromkeys(boxes)))


def _place(record: object) -> tuple[str, tuple[int, ...] | None]:
    key = record.get("fqn") if isinstance(record, _Record) else None
    if not isinstance(record, _Record) or type(key) is not str:
        raise FormatError("the metadata of a file's content is malformed", found=_kind(record))
    offset = record.get("offset")
    return key, None if offset is None else _numbers(offset, key)


def _item(place: object, record: object) -> Item:
    key = _place(place)[0]
    if not isinstance(record, _Record) or record.kind != "_StorageInfo":
        raise FormatError(
            "the metadata was written by a storage that torchlift does not know",
            entry=key,
            found=_kind(record),
        )
    file = record.get("relative_path")
    if type(file) is not str:
        raise FormatError("an item's file is not a name", entry=key, found=_kind(file))
    transforms = record.get("transform_descriptors")
    if transforms:
        raise FormatError(
            "an item was transformed as it was written, so its bytes are not its numbers",
            entry=key,
            found=transforms,
            hint="Load it with the extension that wrote it, and save it without.",
        )
    offset, nbytes = _numbers((record.get("offset"), record.get("length")), key)
    return Item(file, offset, nbytes)


def _numbers(values: object, key: str) -> tuple[int, ...]:
    """Check sizes or offsets: whole, not negative, not too large for torch."""
    if not isinstance(values, (tuple, list)) or len(values) > 64:
        raise FormatError("the metadata has no sizes where it must", entry=key, found=_kind(values))
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise FormatError(
                "the metadata has an impossible size or offset",
                entry=key,
                expected="whole numbers from 0 to 2**62",
                found=value if isinstance(value, (int, float)) else _kind(value),
            )
    return tuple(values)


def _mapping(value: object, name: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError("the metadata is incomplete", entry=name, found=_kind(value))
    return value


def _kind(value: object) -> str:
    return value.kind if isinstance(value, _Record) else f"a {type(value).__name__}"


_DESCRIPTOR, _CENTRAL_NAME, _CENTRAL_CRC = b"PK\x07\x08", 46, 16
_MAX_TEMPLATES = 10_000
_MAX_TAIL = 1 << 16


@dataclass(frozen=True, slots=True)
class _Template:
    """An archive around one dense tensor.

    Attributes:
        head, tail: everything before and after the numbers, with what varies set to zero.
        varying: ranges of the tail that differ from archive to archive: checksums and an id.
        crc: where the checksum of the numbers is in the tail.
        index: what the archive holds.
    """

    head: bytes
    tail: bytes
    varying: tuple[tuple[int, int], ...]
    crc: int
    index: Index


class Items:
    """Reads archives, remembering those that others may be like."""

    def __init__(self) -> None:
        self._templates: dict[object, _Template] = {}

    def read(self, window: Window, key: str, kind: object) -> Index:
        """The index of an archive, with everything in it under `key`.

        Args:
            window: the archive.
            key: name for what it holds.
            kind: archives of one kind are likely to have the same headers.

        Raises:
            FormatError: see `torchlift.formats.torch_zip.read_torch_zip`.
        """
        slot = (kind, window.size)
        known = self._templates.get(slot)
        if known is not None:
            made = _like(known, window, key)
            if made is not None:
                return made
        found = read_archive(window, key)
        if known is None and len(self._templates) < _MAX_TEMPLATES:
            template = _made_template(found, window, key)
            if template is not None:
                self._templates[slot] = template
        return found


def _like(known: _Template, window: Window, key: str) -> Index | None:
    """The index of an archive whose headers are those of the template, else None."""
    if window.read(0, len(known.head)) != known.head:
        return None
    tail = window.read(window.size - len(known.tail), len(known.tail))
    if _blanked(tail, known.varying) != known.tail:
        return None
    crc = int.from_bytes(tail[known.crc : known.crc + 4], "little")
    ((name, storage),) = known.index.storages.items()
    (entry,) = known.index.entries.values()
    (chunk,) = entry.chunks
    return replace(
        known.index,
        path=window.path,
        entries={key: replace(entry, key=key, chunks=(replace(chunk, file=window.path),))},
        storages={name: replace(storage, file=window.path, crc32=crc or None)},
        files={window.path: window.stamp},
    )


def _made_template(index: Index, window: Window, key: str) -> _Template | None:
    entry = index.entries.get(key)
    if entry is None or len(index.entries) != 1 or len(entry.chunks) != 1 or index.blocked:
        return None
    if len(index.storages) != 1 or index.objects:
        return None
    (chunk,), (storage,) = entry.chunks, index.storages.values()
    end = storage.offset + storage.nbytes
    if (chunk.offset, chunk.nbytes) != (storage.offset, storage.nbytes):
        return None
    if window.size - end > _MAX_TAIL or storage.offset > _MAX_TAIL:
        return None
    head, tail = window.read(0, storage.offset), window.read(end, window.size - end)
    varying: list[tuple[int, int]] = []
    crc = -1
    for record in read_directory(window).values():
        is_data = record.offset == storage.offset
        if not is_data and not record.name.endswith("/.data/serialization_id"):
            continue
        start, stop = record.offset - end, record.offset + record.nbytes - end
        central = tail.rfind(record.name.encode()) - _CENTRAL_NAME
        if (start < 0 and not is_data) or central < 0:
            return None
        if not is_data:
            varying.append((start, stop))
        if tail[stop : stop + 4] == _DESCRIPTOR:
            varying.append((stop + 4, stop + 8))
        varying.append((central + _CENTRAL_CRC, central + _CENTRAL_CRC + 4))
        crc = central + _CENTRAL_CRC if is_data else crc
    if crc < 0 or storage.crc32 != (int.from_bytes(tail[crc : crc + 4], "little") or None):
        return None
    return _Template(head, _blanked(tail, tuple(varying)), tuple(varying), crc, index)


def _blanked(tail: bytes, ranges: tuple[tuple[int, int], ...]) -> bytes:
    made = bytearray(tail)
    for start, stop in ranges:
        made[start:stop] = bytes(stop - start)
    return bytes(made)

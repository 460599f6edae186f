"""Directories of ``torch.distributed.checkpoint``: ``.metadata`` and items in ``*.distcp`` files.

``.metadata`` is a pickle that torch runs as a program. Here an interpreter reads it that cannot run
anything (`unpickle`). Its claims about files and bytes are checked. An item is a small torch
archive, and the head of that archive says where its numbers lie.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from reprlib import repr as short_repr
from typing import Any, NamedTuple, TypeVar

from torchlift._store.places import (
    Stamp,
    exists,
    in_parallel,
    inside,
    is_url,
    names_in,
    relative,
    stamp_of,
)
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.boxes import Box
from torchlift.formats.index import (
    ITEMSIZE,
    LOCAL_MAGIC,
    UNRESOLVED,
    Chunk,
    Index,
    Leaf,
    Storage,
    TensorEntry,
    join,
    row_major,
)
from torchlift.formats.pickled import flatten
from torchlift.formats.pieces import Piece, assemble, differing_error
from torchlift.formats.runs import MAGIC, OF_RANKS, item_key, read_item, shown
from torchlift.formats.sharded import by_number, claimed, locate, locate_all, require_files
from torchlift.formats.source import (
    Source,
    dense_shape,
    errors_name,
    parse_json,
    whole_numbers,
)
from torchlift.formats.table import DCP_METADATA, DCP_SUFFIX, metadata_files
from torchlift.formats.torch_pickle import Blocked, Global, TorchWorld, attributes_of
from torchlift.formats.torch_zip import read_torch_zip
from torchlift.formats.unpickle import STEP, Budget, read_pickle
from torchlift.formats.zip_archive import (
    CRC,
    CRC_IN_DESCRIPTOR,
    DESCRIPTOR_MAGIC,
    checksum_places,
    read_directory,
)

_T = TypeVar("_T")

#: Most bytes of metadata: a million chunks take some 300 MB.
_MAX_METADATA = 1 << 30
_MAX_DEPTH = 90  # of containers, one in the other

#: Bytes at both ends of an item that hold its head and its directory. The location tag of an item
#: whose head was not read.
_ITEM_END, _UNKNOWN = 1 << 11, "unknown"

#: Most forms of items of one length: a layer may have matrices of 2 x 8 and of 8 x 2.
_MOST_FORMS = 8

#: First and last byte of the pickle in ``.metadata``, and bytes in the name of a data file.
_PICKLE_START, _PICKLE_END, _LONGEST_NAME = b"\x80", b".", 255

_CONFLICT = "two tensors or objects have this key"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata", re.ASCII)
_DATA = re.compile(r"__(\d{1,9})_\d+\.distcp", re.ASCII)

_DCP, _MEGATRON = (
    "torch.distributed.checkpoint.",
    "megatron.core.dist_checkpointing.strategies.torch.",
)
#: Other files of Megatron's ``torch_dist``: values that are not sharded, and the backend.
_COMMON, _BACKEND = "common.pt", "metadata.json"
#: Classes that only hold attributes, by every name that they have had.
_RECORDS = {
    f"{_DCP}metadata.{name}": name
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    # Plans that writers cache in the metadata (megatron.core, torch).
    f"{_DCP}planner.{name}": name
    for name in (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    )
} | {
    f"{_DCP}filesystem._StorageInfo": "_StorageInfo",
    f"{_DCP}filesystem._StoragePrefix": "_StoragePrefix",
    f"{_MEGATRON}MCoreMetadata": "Metadata",
    f"{_MEGATRON}MCoreSavePlan": "SavePlan",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": "TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": "_MEM_FORMAT_ENCODING",
}  # fmt: skip
#: The enums among them, whose members are made of a value.
_ENUMS = ("WriteItemType", "_MEM_FORMAT_ENCODING")
_PATHS = {
    f"pathlib{inner}.{kind}"
    for inner in ("", "._local")
    for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}


class _Place(NamedTuple):
    """The content of an item: a chunk of a tensor, or an object.

    Attributes:
        key: Key of the tensor or object.
        start: First index of the chunk in its tensor. None for an object.
    """

    key: str
    start: tuple[int, ...] | None = None


class _Item(NamedTuple):
    """A torch archive with one chunk or object: its key, file, first byte and length in bytes."""

    key: str
    file: str
    offset: int
    nbytes: int


def read_dcp(path: str, names: Sequence[str]) -> Index:
    """Read the index of a distributed checkpoint.

    It includes the file ``common.pt`` of Megatron's older ``torch_dist`` directories.

    Args:
        path: Absolute path of the directory.
        names: The names of its files.

    Raises:
        FormatError: If the metadata is malformed, a file is missing, an item differs from the
            metadata, or the chunks of a tensor overlap or leave gaps.
        UnsafeError: If the metadata names a foreign global, or a file outside the directory.
    """
    names = metadata_files(names)
    metadata, guides = _Metadata(), dict[str, Stamp]()
    if names[0] != DCP_METADATA:
        _check_ranks(path, names)
    for name in names:
        file = locate(path, name)
        with errors_name(file), Source(file, metadata.budget) as source:
            metadata.add(name, source.read_all(_MAX_METADATA, "the metadata"))
            guides[file] = source.stamp
    index = _show_first_rank(_read_items(path, metadata), metadata.budget)
    if _has_common(path, metadata):
        with errors_name(file := locate(path, _COMMON)), Source(file, metadata.budget) as source:
            common = claimed(_COMMON, read_torch_zip(source), {})
        index = join(path, "dcp", [index, common], index.metadata, _CONFLICT)
    return replace(index, guides=guides)


def _show_first_rank(index: Index, budget: Budget) -> Index:
    """Return the index of a folder of a `torchlift.Keeper` with the plain data of its first rank.

    The tensors of single ranks are hidden.

    Raises:
        FormatError: If the item of the first rank is malformed.
    """
    key = item_key(0)
    entry = index.tensors.get(key)
    if entry is None or (entry.dtype, len(entry.shape), len(entry.chunks)) != ("uint8", 1, 1):
        return index
    if UNRESOLVED in entry.encoding:
        index = resolved(index, [key], budget)
    (place,) = index.tensors[key].chunks
    with errors_name(place.file, key), Source(place.file, budget, index.files[place.file]) as file:
        data = file.read(place.offset, place.nbytes)
        if not data.startswith(MAGIC):
            return index
        item = read_item(data, budget)
        hidden = {name: each for name, each in index.tensors.items() if OF_RANKS.match(name)}
        tensors = {name: each for name, each in index.tensors.items() if name not in hidden}
        flat = flatten(item.saved, budget)  # refuses containers that nest too deep
        (table,) = index.tree or ({},)
        others = dict(table) if isinstance(table, dict) else {}
        others = {name: each for name, each in others.items() if not OF_RANKS.match(name)}
    return replace(
        index,
        tensors=tensors,
        hidden=hidden,
        objects={**flat.objects, **index.objects},
        blocked_keys={**flat.blocked, **index.blocked_keys},
        module_versions={**flat.versions, **index.module_versions},
        templates={**index.templates, **flat.templates},
        tree=(shown(item.saved, others, tensors),),
    )


def _has_common(path: str, metadata: _Metadata) -> bool:
    """Return whether Megatron wrote ``common.pt``, even if the file is missing now."""
    if not exists(inside(path, _BACKEND)):
        return False
    if exists(inside(path, _COMMON)):
        return True
    with errors_name(file := locate(path, _BACKEND)), Source(file, metadata.budget) as source:
        noted = parse_json(source.read_all(1 << 16, "the note of the backend"), "the note")
    # Since NVIDIA/Megatron-LM#5160 it is a sharded object like others.
    sharded = any(key.partition("/")[0] == "common_state" for key in metadata.objects)
    return "sharded_backend" in noted and not sharded


def _check_ranks(path: str, names: Sequence[str]) -> None:
    """Refuse a directory without the metadata of a rank, whose keys would be missing."""
    ranks = by_number(
        (int(match[1]), match[0]) for match in map(_OF_RANK.fullmatch, names) if match
    )
    stored = {int(match[1]) for match in map(_DATA.fullmatch, names_in(path)) if match}
    count = 1 + max({*ranks} | stored)
    name = f"__{{}}{DCP_METADATA}"
    require_files(ranks, range(count), count, name.format, "rank's metadata")


@dataclass(slots=True)
class _Tensor:
    """One tensor in a file of metadata, with the boxes of its chunks."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    boxes: dict[Box, None]


@dataclass(slots=True)
class _Metadata:
    """The metadata of one file, or of several ranks together.

    Attributes:
        tensors: Key -> tensor.
        objects: Keys of other values, in order.
        items: Place -> the item that stores it.
        version: Version of the format, if it is recorded.
        paths: Key -> names of its containers, if the planner flattened them.
        budget: Budget for reading the directory.
    """

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    items: dict[_Place, _Item] = field(default_factory=dict)
    version: str | None = None
    paths: dict[object, object] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)

    def add(self, file: str, data: bytes) -> None:
        """Add the content of a metadata file. A known place is a replica and changes nothing.

        Raises:
            FormatError: If it is malformed, or two ranks disagree about a tensor.
            UnsafeError: If it names a foreign global.
        """
        root, end = read_pickle(data, _World(self.budget))
        if end != len(data):
            raise FormatError(
                "the metadata is followed by other bytes", expected=end, found=len(data)
            )
        if _kind(root) != "Metadata":
            raise FormatError("the file is not the metadata of a DCP checkpoint")
        for key, value in _mapping(root, "state_dict_metadata").items():
            if type(key) is not str:
                raise FormatError("the metadata has a key that is not text", found=_kind(key))
            if _kind(value) == "BytesStorageMetadata":
                self.objects[key] = None
                continue
            tensor = _tensor(file, key, value, self.budget)
            known = self.tensors.setdefault(key, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                pair = [Piece(key, t.dtype, t.shape, t.file, None) for t in (known, tensor)]
                raise differing_error(key, pair)
            known.boxes.update(tensor.boxes)
        # The last of two items with one place counts, as for torch. Two ranks hold equal replicas.
        items = {(where := _place(at)): _item(where.key, info)
                 for at, info in _mapping(root, "storage_data").items()}  # fmt: skip
        self.items = {**items, **self.items}
        version = attributes_of(root).get("version")
        self.version = self.version or (version if isinstance(version, str) else None)
        paths = attributes_of(root).get("planner_data")
        self.paths.update(paths if isinstance(paths, dict) else {})


class _World(TorchWorld):
    """The globals of DCP metadata. Any other name is refused, because no writer needs one."""

    def is_record(self, name: str) -> bool:
        return name in _RECORDS

    def find(self, module: str, name: str) -> Global | Blocked:
        dotted = f"{module}.{name}"
        if dotted in _PATHS:
            return Global(dotted)
        found = super().find(module, name)
        if isinstance(found, Blocked) and dotted not in _RECORDS:
            raise UnsafeError(
                "the metadata names a foreign global, which torch would import and could run it",
                entry=dotted,
                hint="Do not load this directory with torch either, unless you trust its source.",
            )
        return found

    def call(self, function: object, arguments: object, keywords: object = None) -> object:
        name = function.name if isinstance(function, (Global, Blocked)) else ""
        if arguments != () and name in _RECORDS and _RECORDS[name] not in _ENUMS:
            # Attributes of a dataclass come in its state. Arguments would be ignored here.
            raise FormatError("a record of the metadata is made with arguments", entry=name)
        if name in _PATHS:
            # Only text: 40 nested pairs are short in the file, and 2**40 items long as text.
            texts = arguments if isinstance(arguments, tuple) else ()
            return "/".join(text for text in self.taken(texts) if type(text) is str)
        return super().call(function, arguments, keywords)


def _tensor(file: str, key: str, record: object, budget: Budget) -> _Tensor:
    found = attributes_of(record)
    properties, chunks = found.get("properties"), found.get("chunks")
    if _kind(record) != "TensorStorageMetadata" or not isinstance(chunks, list):
        raise FormatError("the metadata of a tensor is malformed", entry=key, found=_kind(record))
    state = None
    if isinstance(properties, Blocked) and properties.called:
        state = properties.inside[-1]
    if isinstance(state, dict):
        state = (state.get("dtype"), None, state.get("requires_grad"))
    dtype, _, requires_grad, *_ = (
        state if isinstance(state, tuple) and len(state) > 2 else [None] * 3
    )
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Global) else ""
    if name not in ITEMSIZE:
        raise FormatError("a tensor has an unknown dtype", entry=key, found=_kind(dtype))
    shape = dense_shape(found.get("size"), key, "size")
    boxes: dict[Box, None] = {}
    budget.spend(8 * STEP * len(chunks) * (1 + len(shape)), key)
    for chunk in chunks:
        box = attributes_of(chunk) if _kind(chunk) == "ChunkStorageMetadata" else {}
        start = whole_numbers(box.get("offsets"), key, "offset")
        sizes = whole_numbers(box.get("sizes"), key, "size")
        if not len(start) == len(sizes) == len(shape):
            what = "a chunk has other dimensions than its tensor"
            raise FormatError(what, entry=key, found=f"{list(sizes)} at {list(start)}")
        boxes[start, sizes] = None
    return _Tensor(file, name, shape, requires_grad is True, boxes)


def _place(record: object) -> _Place:
    found = attributes_of(record)
    key, start = found.get("fqn"), found.get("offset")
    if type(key) is not str:
        raise FormatError("the metadata of a file's content is malformed", found=_kind(record))
    return _Place(key, None if start is None else whole_numbers(start, key, "offset"))


def _item(key: str, record: object) -> _Item:
    if _kind(record) != "_StorageInfo":
        raise FormatError(
            "the metadata was written by a storage that torchlift does not know",
            entry=key,
            found=_kind(record),
        )
    found = attributes_of(record)
    file = found.get("relative_path")
    if type(file) is not str:
        raise FormatError("an item's file is not a name", entry=key, found=_kind(file))
    if transforms := found.get("transform_descriptors"):
        raise FormatError(
            "a writer transformed the bytes of this item, for example compressed them",
            entry=key,
            found=short_repr(transforms),
            hint="Load it with the extension that wrote it, and save it again without one.",
        )
    numbers = (found.get("offset"), found.get("length"))
    offset, nbytes = whole_numbers(numbers, key, "size or offset in a file")
    return _Item(key, file, offset, nbytes)


def _kind(value: object) -> str:
    """Return the class of a record, without its module, or the type of another value."""
    name = value.name if isinstance(value, Blocked) and value.called else ""
    return _RECORDS.get(name) or f"a {type(value).__name__}"


def _mapping(record: object, name: str) -> dict[Any, Any]:
    """Return an attribute that must be a dict."""
    value = attributes_of(record).get(name)
    if not isinstance(value, dict):
        raise FormatError("the metadata is incomplete", entry=name, found=_kind(value))
    return value


def _read_items(path: str, metadata: _Metadata) -> Index:
    """Return the index of all items. It reads every item's head, but no chunk's behind a URL."""
    # All names are checked before the first file is opened: one may lead out of the folder.
    files = locate_all(path, (item.file for item in metadata.items.values()), is_sure=True)

    def find(place: _Place) -> _Item:
        item = metadata.items.get(place)
        if item is None:
            raise FormatError(
                "the metadata does not say in which file this is stored",
                entry=place.key,
                found=place.start and f"a chunk at {list(place.start)} without a file",
            )
        return item._replace(file=files[item.file])

    items, entries, storages = list[_Item](), dict[str, TensorEntry](), dict[str, Storage]()
    for key, tensor in metadata.tensors.items():
        pieces = [Piece(key, tensor.dtype, tensor.shape, path, None)]
        for start, shape in tensor.boxes:
            if 0 in shape:
                continue
            items.append(item := find(_Place(key, start)))
            chunk = Chunk(item.file, item.offset, item.nbytes, start, shape)
            pieces.append(pieces[0]._replace(file=item.file, chunk=chunk))
            dense = math.prod(shape) * ITEMSIZE[tensor.dtype]
            storages[_storage(path, item)] = Storage(item.file, item.offset, dense, _UNKNOWN)
        # A gap would be read as zeros, and an overlap would hide one of two values.
        chunks = assemble(pieces, metadata.budget).chunks
        entries[key] = TensorEntry(
            key,
            tensor.dtype,
            tensor.shape,
            row_major(tensor.shape),
            math.prod(tensor.shape) * ITEMSIZE[tensor.dtype],
            _UNKNOWN if chunks else "cpu",
            _storage(path, items[-len(chunks)]) if chunks else "",
            chunks,
            tensor.requires_grad,
            encoding=(UNRESOLVED,) if chunks else (),
        )
    whole = [find(_Place(key)) for key in metadata.objects]
    _check_items((*items, *whole))
    stamps = {item.file: stamp_of(item.file) for item in (*items, *whole)}
    tensors = Index(path, "dcp", entries, storages, stamps)
    if not is_url(path):
        tensors = resolved(tensors, budget=metadata.budget)
    objects = _read_heads(path, whole, stamps, metadata.budget, _read_object).values()
    version = {} if metadata.version is None else {"dcp_version": metadata.version}
    # The containers before the planner flattened them, with the saved form of each object.
    leaves: dict[str, object] = {key: Leaf(key) for key in (*entries, *metadata.objects)}
    for of_object in objects:
        (saved,) = of_object.tree or ({},)
        leaves |= saved if isinstance(saved, dict) else {}
    tree = containers(metadata.paths, leaves)
    templates = flatten(tree[0], metadata.budget).templates if tree is not None else {}
    made = join(path, "dcp", [tensors, *objects], version, _CONFLICT)
    return replace(made, tree=tree, templates=templates)


@lru_cache(1 << 12)  # each item is named four times: 12 us each, of 230 for an item
def _storage(path: str, item: _Item) -> str:
    """Return the beginning of the names of an item's storages."""
    return f"{relative(item.file, path)}@{item.offset}/"


class _Container(dict[object, Any]):
    """A container that is rebuilt from the paths of a planner."""


def containers(paths: Mapping[Any, object], leaves: Mapping[str, object]) -> tuple[object] | None:
    """Return the containers of all leaves, or None if the paths do not describe them."""
    top = _Container()
    for key in dict.fromkeys((*paths, *leaves)) if paths else ():
        path, at = paths.get(key, (key,)), top
        if not isinstance(path, tuple) or not 0 < len(path) <= _MAX_DEPTH or key not in leaves:
            return None
        if ".".join(str(name) for name in path if type(name) in (str, int)) != key:
            return None
        for name in path[:-1]:
            at = at.setdefault(name, _Container())
            if type(at) is not _Container:
                return None
        if path[-1] in at:
            return None
        at[path[-1]] = leaves[str(key)]
    return (_with_lists(top),) if top else None


def _with_lists(value: object) -> object:
    if not isinstance(value, _Container):
        return value
    made = {name: _with_lists(item) for name, item in value.items()}
    if all(type(name) is int for name in made) and made.keys() == set(range(len(made))):
        return [made[at] for at in range(len(made))]
    # A list that was saved in part: its positions become names.
    return {str(name): item for name, item in made.items()}


def resolved(
    index: Index, keys: Collection[str] | None = None, budget: Budget | None = None
) -> Index:
    """Return an index whose chunks say where their numbers are.

    The metadata of a DCP folder has only the item of each chunk. This function reads the heads of
    items. Behind a URL that takes about one request for each. Several requests run at once.

    Args:
        index: The index as it was read.
        keys: Keys of the tensors that are needed, or None for all.
        budget: Budget for reading, or None for a new one.

    Raises:
        FormatError: If an item differs from the metadata.
        IntegrityError: If a file was replaced.
    """
    todo = [
        entry
        for key, entry in {**index.entries, **index.hidden}.items()
        if UNRESOLVED in entry.encoding and (keys is None or key in keys)
    ]
    if not todo:
        return index
    items = {
        (entry.key, chunk): _Item(entry.key, chunk.file, chunk.offset, chunk.nbytes)
        for entry in todo
        for chunk in entry.chunks
    }
    heads = _read_heads(
        index.path, [*items.values()], index.files, budget or Budget(), partial(_read_tensor, {})
    )
    # The stand-ins of these items go: their storages are known now.
    known = {_storage(index.path, item) for item in heads}
    storages = {name: place for name, place in index.storages.items() if name not in known}
    files, entries, hidden = dict(index.files), dict(index.tensors), dict(index.hidden)
    for item, head in heads.items():
        storages |= head.storages
        files[item.file] = head.stamp
    for entry in todo:
        found = []
        for chunk in entry.chunks:
            with errors_name(chunk.file, entry.key):
                found.append(_numbers(heads[items[entry.key, chunk]].entry, entry.dtype, chunk))
        chunks, stride = tuple(found), entry.stride
        if len(chunks) == 1 and chunks[0].stride is not None:
            stride = chunks[0].stride
            chunks = (chunks[0]._replace(stride=None),)
        first = heads[items[entry.key, entry.chunks[0]]].entry
        assert first is not None
        (hidden if entry.key in hidden else entries)[entry.key] = entry._replace(
            stride=stride,
            location=first.location,
            storage=first.storage,
            chunks=chunks,
            encoding=(),
        )
    return replace(index, tensors=entries, hidden=hidden, storages=storages, files=files)


def _numbers(entry: TensorEntry | None, dtype: str, chunk: Chunk) -> Chunk:
    """Return the place of an item's numbers: its entry must agree with the metadata."""
    shape = chunk.shape
    if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
        raise FormatError(
            "an item differs from the metadata",
            expected=f"{dtype} {list(shape)}",
            found="no tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}",
        )
    # A view may repeat its numbers, and need far more memory than the file has bytes.
    if entry.encoding or entry.kind or entry.nbytes > sum(run.nbytes for run in entry.chunks):
        raise FormatError(
            "an item does not store its numbers as they are",
            expected=f"{entry.nbytes} bytes for {dtype} {list(shape)}",
            found=f"{sum(run.nbytes for run in entry.chunks)} bytes, as {entry.type_name}",
        )
    (run,) = entry.chunks
    stride = None if entry.is_contiguous else entry.stride
    return run._replace(start=chunk.start, shape=shape, stride=stride)


def _read_heads(
    path: str,
    items: Sequence[_Item],
    stamps: Mapping[str, Stamp],
    budget: Budget,
    read: Callable[[Source, _Item, str], _T],
) -> dict[_Item, _T]:
    """Read the head of each item, in order. Each file is opened once.

    Args:
        path: The directory.
        items: The items.
        stamps: Stamps of their files.
        budget: Budget for reading.
        read: Reads an item of a file. The text is the beginning of the names of its storages.
    """
    work: dict[str, list[_Item]] = {}
    for item in items:
        work.setdefault(item.file, []).append(item)

    def read_file(file: str) -> dict[_Item, _T]:
        with Source(file, budget, stamps.get(file)) as source:
            ends = [(item.offset, item.offset + item.nbytes) for item in work[file]]
            heads = [(at, min(at + _ITEM_END, stop)) for at, stop in ends]
            source.expect([*heads, *((max(at, stop - _ITEM_END), stop) for at, stop in ends)])
            return {item: read(source, item, _storage(path, item)) for item in work[file]}

    found: dict[_Item, _T] = {}
    for one in in_parallel(path, read_file, list(work)):
        found |= one
    return {item: found[item] for item in items}


def _read_object(source: Source, item: _Item, prefix: str) -> Index:
    """Read one item. A value that torch did not write as a file is blocked."""
    with errors_name(source.path, item.key):
        archive = source.window(item.offset, item.nbytes)
        if archive.read(0, min(4, archive.size)) == LOCAL_MAGIC:
            return read_torch_zip(archive, key=item.key, prefix=prefix)
    why = {item.key: "bytes that torch.save did not write"}
    return Index(source.path, "dcp", {}, {}, {source.path: source.stamp}, blocked_keys=why)


class _Head(NamedTuple):
    """The entry of the tensor in an item, or None, its storages, and the stamp of its file."""

    entry: TensorEntry | None
    storages: Mapping[str, Storage]
    stamp: Stamp


def _read_tensor(forms: dict[int, list[_Form]], source: Source, item: _Item, prefix: str) -> _Head:
    """Read the item of a tensor.

    Args:
        forms: Length -> the forms of items that were read before, the latest one first.
        source: The file.
        item: The item.
        prefix: The beginning of the names of its storages.
    """
    known = forms.setdefault(item.nbytes, [])
    for form in known:
        if (found := form.find(source, item, prefix)) is not None:
            return found
    index = _read_object(source, item, prefix)
    head = _Head(next(iter(index.entries.values()), None), index.storages, source.stamp)
    if (made := _form_of(source, item, head, prefix)) is not None:
        known[:] = [made, *known[: _MOST_FORMS - 1]]
    return head


class _Form(NamedTuple):
    """The bytes around the numbers of an item, which most items of its length share.

    The general reader takes 0.2 ms an item, and there are as many items as keys times ranks. An
    item with the same bytes, except those that the reader ignores, has the same head.

    Attributes:
        start: First byte of the numbers in the item.
        stop: The end of the numbers.
        before: The bytes before the numbers.
        after: The bytes after the numbers, with zeros in the holes.
        holes: Places in `after` of checksums, and of the id that torch gives an archive.
        crc32: Place in `after` of the checksum of the numbers, as the directory lists it.
        entry: The entry of the item that was read.
        name: The name of its storage, without the beginning.
        storage: Its storage.
    """

    start: int
    stop: int
    before: bytes
    after: bytes
    holes: list[slice]
    crc32: int
    entry: TensorEntry
    name: str
    storage: Storage

    def find(self, source: Source, item: _Item, prefix: str) -> _Head | None:
        """Return the head of an item of the same length, or None if other bytes differ."""
        source.check(item.offset, item.nbytes, "an item", item.key)
        after = bytearray(source.read(item.offset + self.stop, item.nbytes - self.stop))
        (crc32,) = CRC.unpack_from(after, self.crc32)
        for hole in self.holes:
            after[hole] = bytes(hole.stop - hole.start)
        if after != self.after or source.read(item.offset, self.start) != self.before:
            return None
        at, name = item.offset + self.start, prefix + self.name
        (chunk,) = self.entry.chunks
        chunk = chunk._replace(file=item.file, offset=at + chunk.offset - self.storage.offset)
        entry = self.entry._replace(key=item.key, storage=name, chunks=(chunk,))
        storage = self.storage._replace(file=item.file, offset=at, crc32=crc32 or None)
        return _Head(entry, {name: storage}, source.stamp)


def _form_of(source: Source, item: _Item, head: _Head, prefix: str) -> _Form | None:
    """Return the form of an item that was read, or None if torch's writer does not make such."""
    if head.entry is None or len(head.storages) != 1 or len(head.entry.chunks) != 1:
        return None
    ((name, storage),) = head.storages.items()
    start = storage.offset - item.offset
    stop = start + storage.nbytes
    if storage.packed or max(start, item.nbytes - stop) > _ITEM_END:
        return None
    archive = source.window(item.offset, item.nbytes)
    places = checksum_places(archive)
    holes, crc32 = list[slice](), None
    for record in read_directory(archive).values():
        is_id = record.name.endswith("/.data/serialization_id")
        if is_id or record.offset == start:
            at = record.offset - stop
            end = at + record.nbytes
            if archive.read(stop + end, 4) != DESCRIPTOR_MAGIC:
                return None
            holes += [slice(at, end)] if is_id else []
            crc = places[record.name] - stop
            holes += [slice(each, each + CRC.size) for each in (end + CRC_IN_DESCRIPTOR, crc)]
            crc32 = crc32 if is_id else crc
    if crc32 is None or min(hole.start for hole in holes) < 0:
        return None
    after = bytearray(archive.read(stop, item.nbytes - stop))
    for hole in holes:
        after[hole] = bytes(hole.stop - hole.start)
    before = archive.read(0, start)
    name = name.removeprefix(prefix)
    return _Form(start, stop, before, bytes(after), holes, crc32, head.entry, name, storage)


def _check_items(items: Iterable[_Item]) -> None:
    """Refuse items that share bytes: a thousand names of one item would cost its size each."""
    spans = sorted((item.file, item.offset, item.offset + item.nbytes, item.key) for item in items)
    for (file, _, stop, _), (other, start, _, key) in itertools.pairwise(spans):
        if file == other and start < stop:
            raise FormatError("two items overlap in the file", file=file, entry=key)


def dcp_items(path: str) -> set[str]:
    """Return the names of data files that a ``.metadata`` names in its own folder.

    They are the texts of the pickle with this suffix. A reader of the pickle takes 1 ms an item,
    and there are as many items as keys times ranks.

    Raises:
        FormatError: If it is not a complete pickle.
        CheckpointError, OSError: If it cannot be read.
    """
    with Source(path, Budget()) as source:
        data = source.read_all(_MAX_METADATA, "the metadata")
    if data[:1] != _PICKLE_START or data[-1:] != _PICKLE_END:
        raise FormatError("the file is not the metadata of a DCP checkpoint", file=path)
    names, suffix = set[str](), DCP_SUFFIX.encode()
    for found in re.finditer(re.escape(suffix), data):
        # The length of a text is in front of it, after a code: of one byte, or of four.
        for length in range(len(suffix), 1 + min(found.end(), _LONGEST_NAME)):
            start = found.end() - length
            before = data[max(0, start - 5) : start]
            short, long = b"\x8c" + bytes([length]), b"X" + length.to_bytes(4, "little")
            if before.endswith((short, long)):
                names.add(data[start : found.end()].decode(errors="replace"))
                break
    return {name for name in names if os.sep not in name}

"""Lay out the files of a checkpoint, format by format. Nothing is written here."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlift._model.torch_private import dcp_item
from torchlift._save.pickling import Shared, lay_out_torch_file
from torchlift._save.replicas import Checksum
from torchlift._save.values import State, Value, kind_error, storages_of, ties_of
from torchlift._store.places import inside
from torchlift._transfer.write import SetKind
from torchlift.formats.dcp import dcp_items
from torchlift.formats.layout import INDEX_SUFFIX, Layout, Stored
from torchlift.formats.safetensors import TIED_KEYS, safetensors_layout
from torchlift.formats.sharded import index_content, shards_of
from torchlift.formats.table import DCP_METADATA, DCP_SUFFIX, is_index

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

_ALIGNMENT = 64


class Section(NamedTuple):
    """A part of a file.

    Attributes:
        base: its first byte in the file.
        layout: what it contains.
        values: the values of the payloads, in their order.
    """

    base: int
    layout: Layout
    values: Sequence[Value]

    @property
    def end(self) -> int:
        """Return the byte after its last one."""
        return self.base + self.layout.nbytes


@dataclass(frozen=True)
class Output:
    """The files of a checkpoint before they are written.

    Attributes:
        head: path of the only file, or of the file that lists the others.
        files: name -> sections of the file.
        content: makes the bytes of the head from the final names of the files, and from what all
            ranks have written. None: the head is the only file.
        kind: how files of this set are recognised, or None for one file.
        items: the items of a file of one rank.
        tied: key -> the key that holds its values.
        untied: key -> a key of the same tensor, if each has its own values in the files.
        shared: key -> its place in the storages of a torch file.
    """

    head: str
    files: Mapping[str, Sequence[Section]]
    content: Callable[[Sequence[str], Sequence[Written]], bytes] | None = None
    kind: SetKind | None = None
    items: Sequence[Item] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, Shared] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors in the files."""
        sections = (section for own in self.files.values() for section in own)
        return sum(place.tensor.nbytes for each in sections for place in each.layout.payloads)


def end_of(sections: Sequence[Section]) -> int:
    """Return the size of a file in bytes."""
    return sections[-1].end if sections else 0


def torch_output(path: str, state: State, checksum: bool) -> Output:
    """Lay out a torch file: containers as they are, and one storage for tensors that share memory.

    Raises:
        PlacementError: If a value could not be read back, or only by running code.
    """
    storages, shared = storages_of(state.values)
    tensors = [value.stored for value in storages]
    is_plain = not state.objects and all(len(path) == 1 for path in state.paths.values())
    layout, order = lay_out_torch_file(
        state.template,
        tensors,
        {**shared, **state.objects},
        checked=checksum,
        read_back=not is_plain,
    )
    section = Section(0, layout, [storages[number] for number in order])
    files = {os.path.basename(path): [section]}
    return Output(path, files, tied=ties_of(state.values), shared=shared)


def safetensors_output(
    path: str, values: Sequence[Value], metadata: Mapping[str, str], checksum: bool
) -> Output:
    """Lay out a safetensors file: each tensor once, its other names in the metadata.

    Raises:
        PlacementError: If the format does not support a dtype.
    """
    tied = ties_of(values)
    files = {os.path.basename(path): [_safetensors(values, tied, metadata, checksum)]}
    return Output(path, files, tied=tied)


def sharded_output(
    head: str, values: Sequence[Value], limit: int, metadata: Mapping[str, str], checksum: bool
) -> Output:
    """Lay out shards of at most `limit` bytes and their index. A larger tensor has its own shard.

    Raises:
        PlacementError: If the format does not support a dtype.
    """
    tied = ties_of(values)
    shards: list[list[Value]] = [[]]
    room = limit
    for value in values:
        if value.key in tied:
            continue
        if value.stored.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(value)
        room -= value.stored.nbytes
    stem = _stem(head)
    names = [
        f"{stem}-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)
    ]
    sections = [_safetensors(shard, tied, metadata, checksum) for shard in shards]
    keys = [[value.key for value in shard] for shard in shards]
    nbytes = sum(value.stored.nbytes for shard in shards for value in shard)

    def content(found: Sequence[str], _: Sequence[Written]) -> bytes:
        return index_content(dict(zip(found, keys, strict=True)), nbytes)

    files = {name: [section] for name, section in zip(names, sections, strict=True)}
    return Output(head, files, content, shards_of_kind(head), tied=tied)


def _stem(head: str) -> str:
    return os.path.basename(head)[: -len(INDEX_SUFFIX)].removesuffix(".safetensors")


def shards_of_kind(head: str) -> SetKind:
    """Return how the shards of an index are recognised: by names that we and Hugging Face write."""
    stem = re.escape(_stem(head).removesuffix(".bin"))
    ours = rf"{stem}(\.bin)?(-[0-9a-f]{{8}})?-\d{{5,}}-of-\d{{5,}}\.(safetensors|bin)"
    return SetKind(shards_of, is_index, ours)


def _safetensors(
    values: Sequence[Value], tied: Mapping[str, str], metadata: Mapping[str, str], checksum: bool
) -> Section:
    own = {value.key: value for value in values if value.key not in tied}
    noted = {key: kept for key, kept in tied.items() if kept in own}
    # transformers refuses a file without "format".
    noted = {"format": "pt", **metadata, **({TIED_KEYS: json.dumps(noted)} if noted else {})}
    stored = [value.stored for value in own.values()]
    layout = safetensors_layout(stored, noted, checked=checksum)
    return Section(0, layout, [own[place.tensor.key] for place in layout.payloads])


# ---- files of torch.distributed.checkpoint: each rank writes its own

#: How the files of a DCP folder are recognised.
DCP_FILES = SetKind(dcp_items, DCP_METADATA.__eq__, rf".+{re.escape(DCP_SUFFIX)}")
#: The version of DCP's metadata.
DCP_VERSION = "1.0.0"


class Box(NamedTuple):
    """A box of a tensor. Several ranks may hold its values.

    Attributes:
        key: of the tensor.
        start: its first index in each dimension of the complete tensor.
        shape: of the box.
    """

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Item(NamedTuple):
    """An item of a rank's own file, which all ranks know.

    Attributes:
        key: of the tensor, or of the value that is not a tensor.
        start: of the box of the tensor, or None for a value that is not a tensor.
        shape: of the box.
        first: first byte of the item in the file.
        length: bytes of the item.
        payload: first byte of the numbers in the file.
    """

    key: str
    start: tuple[int, ...] | None
    shape: tuple[int, ...]
    first: int
    length: int
    payload: int


class Written(NamedTuple):
    """The files that a rank wrote, as all ranks know them.

    Attributes:
        sizes: bytes of each file.
        items: of its own file.
        checksums: box -> checksum, of values that other ranks hold, too.
    """

    sizes: Sequence[int]
    items: Sequence[Item]
    checksums: Mapping[Any, Checksum]


def name_of_rank(number: int) -> str:
    """Return the name of a rank's file, by its number among the ranks that save."""
    return f"__{number}_0{DCP_SUFFIX}"


class OwnFile:
    """The file of one rank, laid out item by item.

    Attributes:
        name: its name.
        sections: of the file.
        items: what is in them.
    """

    def __init__(self, number: int) -> None:
        """Begin with an empty file of a rank, by its number among those that save."""
        self.name = name_of_rank(number)
        self.sections: list[Section] = []
        self.items: list[Item] = []

    def add_box(self, start: tuple[int, ...] | None, value: Value, checksum: bool) -> None:
        """Add a box of a tensor, as a torch file inside of the file."""
        self._add(value.key, start, _dcp_layout(value.stored, checksum), [value])

    def add_value(self, key: str, layout: Layout) -> None:
        """Add a value that is not a tensor."""
        self._add(key, None, layout, [])

    def _add(
        self, key: str, start: tuple[int, ...] | None, layout: Layout, values: Sequence[Value]
    ) -> None:
        base = -(-end_of(self.sections) // _ALIGNMENT) * _ALIGNMENT
        self.sections.append(Section(base, layout, values))
        shape = values[0].shape if values else ()
        payload = base + (layout.payloads[0].offset if values else 0)
        self.items.append(Item(key, start, shape, base, layout.nbytes, payload))


def dcp_output(
    path: str,
    state: State,
    tensors: Mapping[str, Stored],
    own: OwnFile,
    untied: Mapping[str, str],
) -> Output:
    """Lay out a DCP folder to which this process writes one file.

    Args:
        path: of the folder.
        state: the containers and what is not a tensor.
        tensors: key -> the complete tensor.
        own: the file.
        untied: see `Output`.

    Raises:
        PlacementError: If DCP does not store a tensor.
    """
    for key, kind in state.made_of_others.items():
        raise kind_error(key, kind)
    content = partial(dcp_content, path, state, tensors)
    head, files = inside(path, DCP_METADATA), {own.name: own.sections}
    return Output(head, files, content, DCP_FILES, own.items, untied=untied)


def add_objects(own: OwnFile, objects: Mapping[str, object]) -> None:
    """Add values that are not tensors."""
    for key, item in objects.items():
        own.add_value(key, lay_out_torch_file(item, []).layout)


def storage_data(names: Sequence[str], written: Sequence[Written]) -> dict[MetadataIndex, object]:
    """Return the place of every item of a DCP folder, as its metadata has it.

    Args:
        names: the final names of the files.
        written: what all ranks have written, one file each.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return {
        MetadataIndex(item.key, item.start): dcp_item(name, item.first, item.length)
        for name, each in zip(names, written, strict=True)
        for item in each.items
    }


def dcp_content(
    path: str,
    state: State,
    tensors: Mapping[str, Stored],
    names: Sequence[str],
    written: Sequence[Written],
) -> bytes:
    """Return the metadata of a DCP folder.

    Args:
        path: of the folder.
        state: the containers and what is not a tensor.
        tensors: key -> the complete tensor.
        names: the final names of the files.
        written: what all ranks have written, one file each.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    for item in (item for each in written for item in each.items):
        if item.start is not None:
            chunk = ChunkStorageMetadata(torch.Size(item.start), torch.Size(item.shape))
            chunks[item.key].append(chunk)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, stored.dtype)),
            torch.Size(stored.shape),
            chunks[key],
        )
        for key, stored in tensors.items()
    }
    described |= {key: BytesStorageMetadata() for key in state.objects}
    data, meta = storage_data(names, written), StorageMeta(str(path))
    # The version tells torch how keys were joined.
    return pickle.dumps(Metadata(described, state.paths, data, meta, DCP_VERSION))


def _dcp_layout(stored: Stored, checksum: bool) -> Layout:
    """Lay out one tensor as DCP has it: as a torch file inside of its file."""
    layout = _lay_out_item(stored._replace(key=""), checksum)
    (place,) = layout.payloads
    return replace(layout, payloads=(place._replace(tensor=stored),))


@lru_cache(maxsize=1024)  # a model has 5,000 tensors of ten shapes
def _lay_out_item(stored: Stored, checksum: bool) -> Layout:
    return lay_out_torch_file(Shared(0), [stored], checked=checksum, read_back=False).layout

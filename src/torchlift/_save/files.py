"""Lay out the files of a checkpoint, format by format, and write them."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchlift._model.torch_private import dcp_item
from torchlift._save.blocks import Workspace
from torchlift._save.pickling import Shared, pickled
from torchlift._save.resume import is_whole, plan_of
from torchlift._save.values import Taken, Value, filled, storages_of, ties_of
from torchlift._transfer.write import (
    AtomicFile,
    AtomicSet,
    NotDurable,
    NotRemoved,
    SetKind,
    make_durable,
    write_at,
    write_runs,
)
from torchlift.errors import CheckpointError
from torchlift.formats.crc import PartialCrc, whole_crc
from torchlift.formats.dcp import METADATA, SUFFIX, items_of
from torchlift.formats.layout import INDEX, Layout
from torchlift.formats.safetensors import TIES, safetensors_layout
from torchlift.formats.sharded import index_content, is_index, shards_of
from torchlift.formats.torch_zip import torch_zip_layout

Advance = Callable[[int], object]


class Section(NamedTuple):
    """A layout at its place in a file, and the values of its payloads, in their order."""

    base: int
    layout: Layout
    values: Sequence[Value]


@dataclass(frozen=True)
class Output:
    """The files of a checkpoint that is yet to be written.

    Attributes:
        head: path of the one file, or of the one that names the others.
        files: name -> its sections; of one file its own name.
        content: names that the files have got -> what the head says; None: there is no such head.
        kind: of the head, where there is one.
        replaces: paths of older heads that are superseded: readers would go on to take them.
        tied: key -> the key that holds its values.
        untied: key -> the key that is the same tensor, and in the files has values of its own.
        shared: what each key is of a torch file's storages.
        plan: what is equal where a later call would write the same files; None: nobody can tell.
    """

    head: str
    files: Mapping[str, Sequence[Section]]
    content: Callable[[Sequence[str]], bytes] | None = None
    kind: SetKind | None = None
    replaces: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, Shared] | None = None
    plan: str | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors that will be written."""
        layouts = [section.layout for sections in self.files.values() for section in sections]
        return sum(place.tensor.nbytes for layout in layouts for place in layout.payloads)


def torch_output(path: str, taken: Taken, values: Sequence[Value], checksum: bool) -> Output:
    """Lay out a torch file: containers as they are, storages shared.

    Raises:
        PlacementError: a value cannot be read back, or only by running code.
    """
    storages, shared = storages_of(values)
    tensors = [value.stored for value in storages]
    saved = filled(taken.template, lambda key: shared[key] if key in shared else taken.objects[key])
    is_plain = not taken.objects and all(len(path) == 1 for path in taken.paths.values())
    data = pickled(saved, tensors, checked=not is_plain)
    layout = torch_zip_layout(tensors, data, checked=checksum)
    files = {os.path.basename(path): [Section(0, layout, storages)]}
    return Output(path, files, tied=ties_of(values), shared=shared)


def safetensors_output(
    path: str, values: Sequence[Value], metadata: Mapping[str, str], checksum: bool
) -> Output:
    """Lay out a safetensors file: each tensor once, its other names in the metadata.

    Raises:
        PlacementError: the format cannot hold a dtype.
    """
    tied = ties_of(values)
    files = {os.path.basename(path): [_safetensors(values, tied, metadata, checksum)]}
    return Output(path, files, tied=tied)


def sharded_output(
    head: str, values: Sequence[Value], limit: int, metadata: Mapping[str, str], checksum: bool
) -> Output:
    """Lay out shards of at most so many bytes, unless one tensor has more, and their index.

    Raises:
        PlacementError: the format cannot hold a dtype.
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

    def content(found: Sequence[str]) -> bytes:
        return index_content(dict(zip(found, keys, strict=True)), nbytes)

    files = {name: [section] for name, section in zip(names, sections, strict=True)}
    plan = plan_of(values) if checksum else None
    return Output(head, files, content, shards_of_kind(head), tied=tied, plan=plan)


def _stem(head: str) -> str:
    return os.path.basename(head)[: -len(INDEX)].removesuffix(".safetensors")


def shards_of_kind(head: str) -> SetKind:
    """Return what tells the shards of an index: their names, as we and Hugging Face write them."""
    stem = re.escape(_stem(head).removesuffix(".bin"))
    ours = rf"{stem}(\.bin)?(-[0-9a-f]{{8}})?-\d{{5,}}-of-\d{{5,}}\.(safetensors|bin)"
    return SetKind(shards_of, is_index, ours)


def _safetensors(
    values: Sequence[Value], tied: Mapping[str, str], metadata: Mapping[str, str], checksum: bool
) -> Section:
    own = {value.key: value for value in values if value.key not in tied}
    noted = {key: kept for key, kept in tied.items() if kept in own}
    # transformers refuses a file that does not say so.
    noted = {"format": "pt", **metadata, **({TIES: json.dumps(noted)} if noted else {})}
    stored = [value.stored for value in own.values()]
    layout = safetensors_layout(stored, noted, checked=checksum)
    return Section(0, layout, [own[place.tensor.key] for place in layout.payloads])


_ALIGNMENT = 64


def dcp_output(
    path: str, taken: Taken, values: Sequence[Value], limit: int | None, checksum: bool
) -> Output:
    """Lay out a directory of torch.distributed.checkpoint, as one process would write it."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    files: list[list[Section]] = [[]]
    places: list[tuple[MetadataIndex, int, int, int]] = []  # what, file, first byte, length
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    at = 0

    def add(index: MetadataIndex, layout: Layout, own: Sequence[Value]) -> None:
        nonlocal at
        if limit is not None and at and at + layout.nbytes > limit:
            files.append([])
            at = 0
        files[-1].append(Section(at, layout, own))
        places.append((index, len(files) - 1, at, layout.nbytes))
        at += -(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT

    for value in values:
        data = pickled(Shared(0), [value.stored], checked=False)
        start, size = torch.Size([0] * len(value.shape)), torch.Size(value.shape)
        described[value.key] = TensorStorageMetadata(
            TensorProperties(dtype=value.dtype), size, [ChunkStorageMetadata(start, size)]
        )
        layout = torch_zip_layout([value.stored], data, checked=checksum)
        add(MetadataIndex(value.key, start, 0), layout, [value])
    for key, item in taken.objects.items():
        described[key] = BytesStorageMetadata()
        add(MetadataIndex(key), torch_zip_layout([], pickled(item, [])), [])

    def content(names: Sequence[str]) -> bytes:
        data = {index: dcp_item(names[n], first, length) for index, n, first, length in places}
        # With the version of its writer, so that torch knows how keys were joined.
        metadata = Metadata(described, taken.paths, data, StorageMeta(path), "1.0.0")
        return pickle.dumps(metadata)

    names = {f"__0_{number}{SUFFIX}": sections for number, sections in enumerate(files)}
    head = os.path.join(path, METADATA)
    kind = SetKind(items_of, METADATA.__eq__, rf".+{re.escape(SUFFIX)}")
    return Output(head, names, content, kind, untied=ties_of(values))


def write(
    output: Output, advance: Advance, check: Callable[[], None], whole: list[str]
) -> list[str]:
    """Write all files; return their paths.

    Args:
        output: what to write.
        advance: called with a number of bytes as they are written.
        check: called before a file appears; raises where it must not.
        whole: gets the paths of those that a writer who was killed has left whole.

    Raises:
        CheckpointError: they cannot be written; the old ones are untouched, unless it says that the
            new ones are in place.
    """
    folder = os.path.dirname(output.head)
    made: list[str] = []
    try:
        if output.content is None or output.kind is None:
            (sections,) = output.files.values()
            _write_file(AtomicFile(output.head), sections, advance, check)
            for index in output.replaces:
                _remove_set(index)
            return [output.head]
        _make_folders(folder, made)
        group = AtomicSet(
            output.head, list(output.files), output.kind, output.replaces, output.plan
        )
        try:
            for number, sections in enumerate(output.files.values()):
                path = os.path.join(folder, group.names[number])
                if group.goes_on and is_whole(path, sections[0].layout):
                    whole.append(path)
                    advance(sum(stored.nbytes for stored, _ in sections[0].layout.payloads))
                    continue
                try:
                    _write_file(group.file(number), sections, advance, check)
                except NotDurable as error:
                    raise OSError(*error.args) from error  # nothing names it yet
            check()
            group.commit(output.content(group.names))
        finally:
            group.close()
        return [*(os.path.join(folder, name) for name in group.names), output.head]
    except OSError as error:
        raise write_error(output.head, error) from error
    finally:
        for path in reversed(made):
            with suppress(OSError):  # what is not empty has the new files
                os.rmdir(path)


def _remove_set(index: str) -> None:
    """Remove an index that one file has superseded, and its shards."""
    if os.path.isfile(index):
        group = AtomicSet(index, (), shards_of_kind(index))
        try:
            group.remove()
        finally:
            group.close()


def _make_folders(path: str, made: list[str]) -> None:
    """Make the folders that are not there, durably, and add them to `made`, outermost first."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_folders(parent, made)
    with suppress(FileExistsError):  # another saver made it; a file there is an error later
        os.mkdir(path)
        made.append(path)
    make_durable(parent)


def _write_file(
    file: AtomicFile, sections: Sequence[Section], advance: Advance, check: Callable[[], None]
) -> None:
    try:
        last = sections[-1] if sections else None
        os.truncate(file.descriptor, 0 if last is None else last.base + last.layout.nbytes)
        work = Workspace()
        for section in sections:
            _write_section(file.descriptor, section, work, advance)
        check()
        file.commit()
    finally:
        file.close()


def _write_section(descriptor: int, section: Section, work: Workspace, advance: Advance) -> None:
    base, layout, values = section
    sums = []
    for (stored, start), value in zip(layout.payloads, values, strict=True):
        total, at = PartialCrc(stored.nbytes), 0
        for data in value.blocks(work):
            runs = [(at, data)]
            write_runs(descriptor, base + start, runs, total if layout.checked else None)
            at += len(data)
            advance(len(data))
        assert at == stored.nbytes, stored
        if layout.checked:
            sums.append(whole_crc(stored.nbytes, [total.value()]))
    for offset, frame in layout.frame(sums):
        write_at(descriptor, frame, base + offset)


def write_error(path: str, cause: OSError) -> CheckpointError:
    """Return the error that says what became of a file that was to be written."""
    reason, hint = "the file cannot be written", None
    if isinstance(cause, NotDurable):
        reason = "the new file is in place, but its folder is not durable"
        hint = "Save again: a crash of the machine may bring the older file back."
    if isinstance(cause, NotRemoved):
        reason = "the new checkpoint is in place, but an older one beside it cannot be removed"
        hint = "Remove it: a reader may take the older one."
    found = str(cause).partition("\n")[0]
    error = CheckpointError(reason, file=path, found=found, hint=hint)
    error.__cause__ = cause
    return error

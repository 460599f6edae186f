"""Lay out the files of a checkpoint, format by format, and write them."""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import torch

from torchlift._model.ranks import rank
from torchlift._model.torch_private import dcp_item
from torchlift._save.blocks import BLOCK, Workspace, few_of_url
from torchlift._save.pickling import Shared, lay_out_torch_file
from torchlift._save.values import Taken, Value, storages_of, ties_of
from torchlift._store.places import inside, is_url, name_of, parent
from torchlift._store.uploads import Upload, is_object, list_names, remove, upload
from torchlift._system.interrupts import Running, deliver_interrupt, uninterrupted
from torchlift._transfer.write import (
    AtomicFile,
    AtomicSet,
    LockedFile,
    NotDurable,
    NotRemoved,
    Runs,
    SetKind,
    make_durable,
    with_token,
    write_at,
)
from torchlift.errors import Argument, CheckpointError, Hint, IntegrityError, PlacementError
from torchlift.formats.crc import PartialCrc, register_of, whole_crc
from torchlift.formats.dcp import DCP_METADATA, DCP_SUFFIX, dcp_items
from torchlift.formats.index import TensorEntry
from torchlift.formats.layout import INDEX_SUFFIX, Layout, Stored
from torchlift.formats.safetensors import TIED_KEYS, safetensors_layout
from torchlift.formats.sharded import index_content, is_index, shards_of

_BLOCK = BLOCK  # of what several ranks hold, each writes such blocks in turn
_ENDING = 4  # objects of a set whose last parts are sent while the next one is begun
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
        owners: name -> the number of the process that alone writes the file, among those that save;
            empty where all write all of them.
        replaces: paths of older heads that are superseded: readers would go on to take them.
        tied: key -> the key that holds its values.
        untied: key -> the key that is the same tensor, and in the files has values of its own.
        shared: what each key is of a torch file's storages.
    """

    head: str
    files: Mapping[str, Sequence[Section]]
    content: Callable[[Sequence[str]], bytes] | None = None
    kind: SetKind | None = None
    owners: Mapping[str, int] = field(default_factory=dict)
    replaces: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, Shared] | None = None

    @property
    def values(self) -> list[Value]:
        """Return the values of all payloads."""
        return [
            v for sections in self.files.values() for section in sections for v in section.values
        ]

    @property
    def digest(self) -> bytes:
        """Return what is equal where all bytes of tensors lie at the same places."""
        # Without the names, which are those of the path: another one has an error of its own.
        places = [
            [(base, layout.nbytes, layout.payloads) for base, layout, _ in sections]
            for sections in self.files.values()
        ]
        return sha256(repr(places).encode()).digest()

    def data(self) -> Iterator[tuple[int, memoryview | bytes]]:
        """Yield what one file without checksums will have, and where."""
        work = Workspace(_BLOCK)
        for base, layout, values in (s for sections in self.files.values() for s in sections):
            for offset, data in layout.frame([]):
                yield base + offset, data
            for (_, start), value in zip(layout.payloads, values, strict=True):
                for _, runs in value.runs(work):
                    yield from ((base + start + offset, run) for offset, run in runs)

    @property
    def stored(self) -> list[Stored]:
        """Return the tensors of all payloads."""
        sections = [section for own in self.files.values() for section in own]
        return [place.tensor for section in sections for place in section.layout.payloads]

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors that will be written."""
        return sum(tensor.nbytes for tensor in self.stored)


def torch_output(path: str, taken: Taken, values: Sequence[Value], checksum: bool) -> Output:
    """Lay out a torch file: containers as they are, storages shared.

    Args:
        path: of the file.
        taken: the containers.
        values: the tensors in them.
        checksum: whether to record the CRC-32 of every storage.

    Raises:
        PlacementError: a value cannot be read back, or only by running code.
    """
    storages, shared = storages_of(values)
    tensors = [value.stored for value in storages]
    is_plain = not taken.objects and all(len(path) == 1 for path in taken.paths.values())
    layout, order = lay_out_torch_file(
        taken.template,
        tensors,
        {**shared, **taken.objects},
        checked=checksum,
        read_back=not is_plain,
    )
    section = Section(0, layout, [storages[number] for number in order])
    files = {os.path.basename(path): [section]}
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
    return Output(head, files, content, shards_of_kind(head), tied=tied)


def _stem(head: str) -> str:
    return os.path.basename(head)[: -len(INDEX_SUFFIX)].removesuffix(".safetensors")


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
    noted = {"format": "pt", **metadata, **({TIED_KEYS: json.dumps(noted)} if noted else {})}
    stored = [value.stored for value in own.values()]
    layout = safetensors_layout(stored, noted, checked=checksum)
    return Section(0, layout, [own[place.tensor.key] for place in layout.payloads])


_ALIGNMENT = 64


def dcp_output(
    path: str, taken: Taken, values: Sequence[Value], limit: int | None, checksum: bool
) -> Output:
    """Lay out a directory of torch.distributed.checkpoint: of each rank files of its own."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    files: dict[int, list[list[Section]]] = {0: [[]]}  # of each rank
    places: list[tuple[MetadataIndex, tuple[int, int], int, int]] = []  # what, file, first, length
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}

    def add(index: MetadataIndex, who: int, layout: Layout, own: Sequence[Value]) -> None:
        found = files.setdefault(who, [[]])
        if limit is not None and found[-1] and end_of(found[-1]) + layout.nbytes > limit:
            found.append([])
        section = behind(found[-1], layout, own)
        found[-1].append(section)
        places.append((index, (who, len(found) - 1), section.base, layout.nbytes))

    for value in values:
        chunks = []
        for number, (who, start, part) in enumerate(value.chunks()):
            chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(part.shape)))
            index = MetadataIndex(value.key, chunks[-1].offsets, number)
            add(index, who, dcp_layout(part.stored, checksum), [part])
        described[value.key] = TensorStorageMetadata(
            TensorProperties(dtype=value.dtype), torch.Size(value.shape), chunks
        )
    for key, item in taken.objects.items():
        described[key] = BytesStorageMetadata()
        add(MetadataIndex(key), 0, lay_out_torch_file(item, []).layout, [])
    each = {(who, at): file for who, own in sorted(files.items()) for at, file in enumerate(own)}

    def content(names: Sequence[str]) -> bytes:
        name_of = dict(zip(each, names, strict=True))
        data = {index: dcp_item(name_of[at], first, length) for index, at, first, length in places}
        # With the version of its writer, so that torch knows how keys were joined.
        metadata = Metadata(described, taken.paths, data, StorageMeta(str(path)), "1.0.0")
        return pickle.dumps(metadata)

    names = {at: f"__{at[0]}_{at[1]}{DCP_SUFFIX}" for at in each}
    return Output(
        inside(path, DCP_METADATA),
        {names[at]: sections for at, sections in each.items()},
        content,
        DCP_FILES,
        {name: who for (who, _), name in names.items()} if len(files) > 1 or is_url(path) else {},
        untied=ties_of(values),
    )


#: What tells the files of a directory of torch.distributed.checkpoint.
DCP_FILES = SetKind(dcp_items, DCP_METADATA.__eq__, rf".+{re.escape(DCP_SUFFIX)}")


def dcp_layout(stored: Stored, checksum: bool) -> Layout:
    """Lay out one tensor as DCP has it: as a torch file inside of its file."""
    layout = _lay_out_item(stored._replace(key=""), checksum)
    (place,) = layout.payloads
    return replace(layout, payloads=(place._replace(tensor=stored),))


@lru_cache(maxsize=1024)  # a model has 5,000 tensors of ten shapes
def _lay_out_item(stored: Stored, checksum: bool) -> Layout:
    return lay_out_torch_file(Shared(0), [stored], checked=checksum, read_back=False).layout


def end_of(sections: Sequence[Section]) -> int:
    """Return how many bytes a file has."""
    return sections[-1].base + sections[-1].layout.nbytes if sections else 0


def behind(sections: Sequence[Section], layout: Layout, values: Sequence[Value]) -> Section:
    """Return the next section of a file of DCP."""
    return Section(-(-end_of(sections) // _ALIGNMENT) * _ALIGNMENT, layout, values)


class Sums(NamedTuple):
    """What one process has written, and its sums of it.

    Attributes:
        nbytes: bytes of tensors.
        crcs: for each payload the sum of these, where the layout asks for sums; see `PartialCrc`.
        shares: for each payload 0, or where others should have the same bytes `Value.share` times
            2**32, plus the checksum of them.
    """

    nbytes: int
    crcs: array[int]
    shares: array[int]

    def with_more(self, more: Sums) -> Sums:
        """Take in the sums of the next file, and return this with its bytes."""
        self.crcs.extend(more.crcs)
        self.shares.extend(more.shares)
        return self._replace(nbytes=self.nbytes + more.nbytes)


class Begun(NamedTuple):
    """What the first rank tells of the files that it has made.

    Attributes:
        rank: its number.
        place: path of the head, links followed.
        temporary: the names that the files have until they appear; objects of a store, for ever.
    """

    rank: int
    place: str
    temporary: list[str]


class Files:
    """The files of a checkpoint on their way; one process makes them, and lets them appear.

    Attributes:
        output: what they are.
        place: path of the head, links followed.
    """

    def __init__(self, output: Output, running: Running | None = None) -> None:
        """Make the folders, and remove what dead writers left.

        Args:
            output: what they are.
            running: as of `AtomicFile`.

        Raises:
            OSError: they cannot be made.
        """
        self.output, self._running = output, running
        self.place = place_of(output)
        self._made: list[str] = []
        self._files: list[AtomicFile] = []
        self._set: AtomicSet | None = None
        try:
            make_folders(os.path.dirname(output.head), self._made)
            if output.kind is not None:
                names = list(output.files)
                self._set = AtomicSet(output.head, names, output.kind, output.replaces, running)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Return the names that the files get in their folder."""
        return list(self.output.files) if self._set is None else self._set.names

    def begin(self) -> Begun:
        """Create the files, under temporary names.

        Raises:
            OSError: one cannot be created.
        """
        for number, sections in enumerate(self.output.files.values()):
            if self._set is None:
                file = AtomicFile(self.output.head, running=self._running)
            else:
                file = self._set.file(number)
            self._files.append(file)
            if not self.output.owners:
                os.truncate(file.descriptor, end_of(sections))
            if self._set is not None:
                # A process may not have as many descriptors as there are files. Without the locks
                # of these, that of their set keeps other writers off.
                LockedFile.close(file)
        temporary = [os.path.basename(file.temporary) for file in self._files]
        return Begun(rank(), self.place, temporary)

    def complete(self, written: Sequence[Sums]) -> None:
        """Write what is not weights, and give the files their names.

        Args:
            written: by each process.

        Raises:
            PlacementError: some of it nobody has written.
            OSError: they do not get their names.
        """
        expected, found = self.output.nbytes, sum(sums.nbytes for sums in written)
        if found != expected:
            raise nobodys(None, expected, found, self.output.head)
        at = 0
        for file, sections in zip(self._files, self.output.files.values(), strict=True):
            stop = at + sum(len(section.layout.payloads) for section in sections)
            if self.output.owners:
                folder, temporary = os.path.split(file.temporary)
                require_sizes(folder, {temporary: end_of(sections)})
            file.open(file.temporary, os.O_RDWR)
            if not self.output.owners:
                os.truncate(file.descriptor, end_of(sections))
                own = [Sums(0, sums.crcs[at:stop], array("Q")) for sums in written]
                write_frames(file.descriptor, sections, own)
            at = stop
            file.commit(durable=self._set is None)
            file.close()

    def commit(self) -> list[str]:
        """Let the checkpoint be what these files are; return their paths.

        Raises:
            OSError: it is not, unless that is `NotDurable` or `NotRemoved`.
        """
        folder = os.path.dirname(self.output.head)
        if self._set is None or self.output.content is None:
            for index in self.output.replaces:
                _remove_set(index, self._running)
            return [self.output.head]
        self._set.commit(self.output.content(self._set.names))
        return [*(os.path.join(folder, name) for name in self._set.names), self.output.head]

    def close(self) -> None:
        """Remove what is not part of the checkpoint; may be called twice."""
        with uninterrupted():
            for file in self._files:
                file.close()
            if self._set is not None:
                self._set.close()
            for path in reversed(self._made):
                with suppress(OSError):  # what is not empty has the new files
                    os.rmdir(path)


class Objects:
    """The objects of a checkpoint on their way to a store, which has no locks, and no other names.

    An object is there when it is whole. Those of a set get names that nobody had before, so that
    what an older head names stays in place, and two writers of one head have nothing in common but
    the head: that of the later one counts, whole.

    Attributes:
        output: what they are.
        place: URL of the head.
        names: those that the objects get in their folder.
        upload: of a checkpoint in one object, that, as long as it is not there.
    """

    def __init__(self, output: Output) -> None:
        self.output, self.place = output, output.head
        self.names = list(output.files)
        self.upload: Upload | None = None
        self._is_committed = False
        if output.kind is not None:
            token = secrets.token_hex(4)
            self.names = [with_token(name, token) for name in self.names]

    def begin(self) -> Begun:
        """Return what the others have to know; nothing is sent before there are bytes."""
        return Begun(rank(), str(self.place), self.names)

    def complete(self, written: Sequence[Sums]) -> None:
        """Look whether all of it is written.

        Raises:
            PlacementError: some of it nobody has written, or is not there.
        """
        expected, found = self.output.nbytes, sum(sums.nbytes for sums in written)
        if found != expected:
            raise nobodys(None, expected, found, self.place)
        if len({*self.output.owners.values()}) > 1:  # what this process has sent is there
            gone = {*self.names}.difference(list_names(parent(self.place)))
            if gone:
                raise PlacementError(
                    "an object that a rank has written is not there",
                    file=inside(parent(self.place), min(gone)),
                    hint="Pass one URL on all ranks, and let no other job write to it.",
                )

    def commit(self) -> list[str]:
        """Let the checkpoint be what these objects are; return their URLs.

        Raises:
            NotRemoved: it is, and so is something that they supersede.
            CheckpointError: it is not.
        """
        output, folder = self.output, parent(self.place)
        kind = output.kind
        if kind is None and output.replaces:
            kind = shards_of_kind(output.replaces[0])
        heads, old = list[str](), set[str]()
        if kind is not None:
            # One by one: the folder may be that of a million other objects.
            heads = [each for each in (self.place, *output.replaces) if is_object(each)]
            for each in heads:
                old |= (_named(each, kind) if kind.is_head(name_of(each)) else None) or set()
        if output.content is None:
            assert self.upload is not None
            self.upload.commit()
        else:
            with upload(self.place) as head:
                head.write(output.content(self.names))
                head.commit()
        self._is_committed = True
        try:
            for each in heads:
                if each != self.place:
                    remove(each)
            if kind is not None and old:
                remove_unnamed(folder, old, kind)
        except CheckpointError as error:
            raise NotRemoved(str(error)) from None
        names = self.names if output.content is not None else []
        return [*(inside(folder, name) for name in names), self.place]

    def close(self) -> None:
        """Remove what is not part of the checkpoint; may be called twice."""
        if self.upload is not None:
            self.upload.close()
        if self.output.kind is not None and not self._is_committed:
            with uninterrupted(), suppress(CheckpointError):
                remove_unnamed(parent(self.place), self.names, self.output.kind)


def _named(head: str, kind: SetKind) -> set[str] | None:
    """Return what a head in a store names; None where nobody can tell."""
    try:
        return kind.list_files(head)
    except (CheckpointError, OSError, ValueError, AttributeError, KeyError):
        return None


def remove_unnamed(folder: str, names: Iterable[str], kind: SetKind) -> None:
    """Remove objects that no head of their folder names; none where nobody can tell.

    Raises:
        CheckpointError: one cannot be removed.
    """
    there = list_names(folder)
    each = [_named(inside(folder, name), kind) for name in filter(kind.is_head, there)]
    if None in each:
        return
    needed = set().union(*filter(None, each))
    for name in {*names}.intersection(there) - needed:
        if re.fullmatch(kind.ours, name):  # an old head may name anything
            remove(inside(folder, name))


def on_their_way(output: Output, running: Running | None = None) -> Files | Objects:
    """Return the files of a checkpoint that one process makes, wherever they go.

    Args:
        output: what they are.
        running: as of `AtomicFile`.

    Raises:
        OSError: their folder cannot be made.
    """
    return Objects(output) if is_url(output.head) else Files(output, running)


def require_one_writer(output: Output, ranks: int) -> None:
    """Refuse what several ranks would have to write into one object of a store.

    Raises:
        PlacementError: the files are such.
    """
    if ranks > 1 and is_url(output.head) and not output.owners:
        raise PlacementError(
            "several ranks cannot write into one object of a store",
            file=output.head,
            expected="a folder of DCP, to which each rank writes objects of its own",
            found=f"{ranks} ranks",
            hint='Pass format="dcp"; torchlift.convert makes one file of that.',
        )


def require_sizes(folder: str, sizes: Mapping[str, int]) -> None:
    """Refuse files that others have written, as far as this machine sees them.

    Raises:
        PlacementError: one is not there, or has another length.
        OSError: the folder cannot be read.
    """
    # Listed, not looked up by name: NFS may remember for a while that a name was not there.
    there = set(os.listdir(folder))
    for name, nbytes in sizes.items():
        path, found = os.path.join(folder, name), None
        if name in there:
            with open(path, "rb") as file:  # NFS asks its server anew for what is opened
                found = os.fstat(file.fileno()).st_size
        if found != nbytes:
            raise PlacementError(
                "a file that a rank has written is not there, or not whole",
                file=path,
                expected=f"{nbytes} bytes",
                found="no file" if found is None else f"{found} bytes",
                hint="Pass a path on a file system that all machines share.",
            )


def nobodys(key: str | None, expected: int, found: int, path: str | None = None) -> PlacementError:
    """Return the error of values that no rank has written."""
    return PlacementError(
        "some values are nobody's to write: a DTensor's mesh has ranks that do not save",
        entry=key,
        file=path,
        expected=f"{expected} bytes of tensors",
        found=f"{found} bytes",
        hint="Call it on all ranks that hold tensors, or name their process_group=.",
    )


def place_of(output: Output) -> str:
    """Return the path of the head, links followed."""
    if is_url(output.head):
        return output.head
    if output.kind is None:
        return os.path.realpath(output.head)
    folder, name = os.path.split(output.head)
    return os.path.join(os.path.realpath(folder), name)


def _remove_set(index: str, running: Running | None) -> None:
    """Remove an index that one file has superseded, and its shards.

    Raises:
        NotRemoved: they are still there.
    """
    if os.path.isfile(index):
        try:
            group = AtomicSet(index, (), shards_of_kind(index), running=running)
            try:
                group.remove()
            finally:
                group.close()
        except OSError as error:  # of its journal, too, which a full disk has no room for
            raise NotRemoved(*error.args) from error


def make_folders(path: str, made: list[str]) -> None:
    """Make the folders that are not there, durably, and add them to `made`, outermost first."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent, made)
    with suppress(FileExistsError):  # another saver made it; a file there is an error later
        os.mkdir(path)
        made.append(path)
    make_durable(parent)


def write_files(
    output: Output,
    begun: Begun,
    number: int,
    advance: Advance,
    own: Files | Objects | None = None,
) -> Sums:
    """Write this process's byte ranges of the files that the first one has made.

    Nobody else has their random names: a rank that sees them is in the same folder, whatever that
    is called here and on whichever machine it is.

    Args:
        output: the files.
        begun: what the first rank tells of them.
        number: of this process among those that save.
        advance: called with a number of bytes as they are read.
        own: those that this process has made, if it is the first.

    Raises:
        PlacementError: it does not see them.
        CheckpointError, OSError: they cannot be written.
    """
    place, total = place_of(output), Sums(0, array("I"), array("Q"))
    temporary = [inside(parent(place), each) for each in begun.temporary]
    is_same = name_of(place) == name_of(begun.place)
    seen = place == begun.place if is_url(place) else all(map(os.path.exists, temporary))
    if not (is_same and seen):
        raise PlacementError(
            "the ranks do not save to the same path",
            expected=f"{begun.place}, as on rank {begun.rank}",
            found=f"{place} on rank {rank()}",
            hint="Pass one path on all ranks, on a file system that all machines share; a "
            "relative path depends on the current folder.",
        )

    def go_on(nbytes: int) -> None:
        deliver_interrupt()
        advance(nbytes)

    if is_url(place):
        return _write_objects(output, temporary, number, go_on, own)
    for path, (name, sections) in zip(temporary, output.files.items(), strict=True):
        with LockedFile() as file:  # the first rank has locked it, or its set
            is_here = output.owners.get(name, number) == number
            if is_here:
                file.open(path, os.O_WRONLY)
            alone = is_here and bool(output.owners)
            # Of others' it compares all.
            sums = write_sections(Runs(file.descriptor), sections, go_on, alone=alone)
            if alone:
                os.truncate(file.descriptor, end_of(sections))
            if is_here:
                os.fsync(file.descriptor)
        total = total.with_more(sums)
    deliver_interrupt()  # the last one that ends the save: the others are told of it
    return total


def _write_objects(
    output: Output, places: Sequence[str], number: int, advance: Advance, own: object
) -> Sums:
    """Send this process's objects; of a set they are there then, and that of one waits in `own`.

    Raises:
        CheckpointError: one cannot be sent.
    """
    total, ending = Sums(0, array("I"), array("Q")), deque[Upload]()
    with ExitStack() as stack:
        for place, (name, sections) in zip(places, output.files.items(), strict=True):
            to = Runs(-1)  # of others' it compares all
            if output.owners.get(name, number) == number:
                made = upload(place, end_of(sections))
                to = Runs(-1, made.write)
                if output.kind is None:
                    assert isinstance(own, Objects)
                    own.upload = made
                else:
                    ending.append(stack.enter_context(made))
                total = total.with_more(
                    write_sections(to, sections, advance, alone=True, in_order=True)
                )
                if output.kind is not None:
                    made.end()
            else:
                total = total.with_more(write_sections(to, sections, advance, alone=False))
            if len(ending) > _ENDING:
                ending.popleft().commit()
        for made in ending:
            made.commit()
    deliver_interrupt()
    return total


def write_sections(
    to: Runs,
    sections: Sequence[Section],
    advance: Advance,
    *,
    alone: bool,
    in_order: bool = False,
) -> Sums:
    """Write what this process has of the tensors of a file, and sum it up where sums are needed.

    Args:
        to: the file.
        sections: of it.
        advance: called with a number of bytes as they are read.
        alone: whether no other process writes to the file. Then what is not weights is written,
            too, in one pass from the first byte to the last.
        in_order: whether nothing can be written behind what comes later. Where sums stand in front
            of what they are of, it is then read twice, unless the file that it is in has them.

    Raises:
        IntegrityError: what a file holds is not what it records the checksum of.
        OSError: it cannot be written.
    """
    crcs, shares, framed, end = array("I"), array("Q"), 0, 0
    for section in sections:
        base, layout, _ = section
        found = _written(to, section, advance, crcs, shares)
        if alone:
            sums: Iterable[int] = found if layout.checked else (0 for _ in found)
            if in_order and layout.sums_first:
                sums = known = _summed(section)
                found = _compared(found, section, known)
            frame = layout.frame(sums)
            for at, data in chain([(end - base, bytes(base - end))], frame):
                to.add(base + at, data)
                framed += len(data)
            end = base + layout.nbytes
        for _ in found:  # all, or those for whose sum nobody asked
            pass
    to.flush()
    return Sums(to.nbytes - framed, crcs, shares)


def _summed(section: Section) -> list[int]:
    """Return the CRC-32s of the tensors of a file, read but for those that their file records."""
    _, layout, values = section
    unknown = [at for at, value in enumerate(values) if value.crc32 is None]
    payloads = tuple(layout.payloads[at] for at in unknown)
    part = Section(0, replace(layout, payloads=payloads), [values[at] for at in unknown])
    nowhere = Runs(-1, lambda data, offset: deliver_interrupt())
    found = _written(nowhere, part, lambda nbytes: None, array("I"), array("Q"))
    return [next(found) if value.crc32 is None else value.crc32 for value in values]


def _compared(found: Iterator[int], section: Section, known: Sequence[int]) -> Iterator[int]:
    """Yield the sums of what is written, which has to be what was summed up before."""
    for value, before, now in zip(section.values, known, found, strict=True):
        if now != before:
            raise IntegrityError(
                "its values changed while it was saved",
                entry=value.key,
                expected=f"crc32 {before:08x}",
                found=f"crc32 {now:08x}",
                hint="Save what nobody writes to meanwhile, or a copy of it.",
            )
        yield now


def _written(
    to: Runs, section: Section, advance: Advance, crcs: array[int], shares: array[int]
) -> Iterator[int]:
    """Write one tensor after the other, note its sums, and yield the CRC-32 of what there is."""
    work = Workspace(_BLOCK)
    base, layout, values = section
    for (stored, start), value, few in zip(layout.payloads, values, few_of(values), strict=True):
        summed, whole = layout.checked or value.crc32 is not None, 0
        if few is not None:
            to.add(base + start, few)
            total = register_of([few]) if summed else 0
            advance(len(few))
        else:
            crc = PartialCrc(stored.nbytes)
            for data, runs in value.runs(work):
                if value.share:
                    whole = crc32(data, whole)
                to.write(base + start, runs, crc if summed else None)
                advance(len(data))
            total = crc.value()
        found = whole_crc(stored.nbytes, (total,))
        if value.crc32 is not None and value.crc32 != found:
            raise _damaged(value, found)
        crcs.append(total)
        shares.append((value.share << 32) + whole if value.share else 0)
        yield found


def few_of(values: Sequence[Value]) -> Iterator[bytes | bytearray | None]:
    """Yield the bytes of tensors of which there are few, those of a URL read some at a time."""
    at = 0
    while at < len(values):
        stop, nbytes, views = at, 0, values[at].views
        while views is not None and stop < len(values) and values[stop].is_few_of_url:
            nbytes += values[stop].stored.nbytes
            if nbytes > _BLOCK or values[stop].views is not views:
                break
            stop += 1
        if views is not None and stop > at:
            part = values[at:stop]
            entries = [each.source for each in part if isinstance(each.source, TensorEntry)]
            yield from few_of_url(entries, [each.dtype for each in part], views)
        else:
            stop = at + 1
            yield values[at].few()
        at = stop


def _damaged(value: Value, found: int) -> IntegrityError:
    """Return the error of bytes of a file that are not those of which it records the checksum."""
    assert value.views is not None
    assert value.crc32 is not None
    return IntegrityError(
        "the checksum of its bytes is wrong",
        file=value.views.index.path,
        entry=value.source.key if isinstance(value.source, TensorEntry) else value.key,
        expected=f"crc32 {value.crc32:08x}",
        found=f"crc32 {found:08x}",
        hint=Hint(
            "The file is damaged: fetch it again, or restore it from a copy; ",
            Argument("verify", "False"),
            " takes what is in it.",
        ),
    )


def write_frames(descriptor: int, sections: Sequence[Section], written: Sequence[Sums]) -> None:
    """Write what is not weights, when all processes have written theirs.

    Raises:
        OSError: it cannot be written.
    """
    number = 0
    for base, layout, _ in sections:
        whole = []
        for stored, _ in layout.payloads:
            whole.append(whole_crc(stored.nbytes, (sums.crcs[number] for sums in written)))
            number += 1
        for offset, data in layout.frame(whole if layout.checked else []):
            write_at(descriptor, data, base + offset)


@contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Say of an error of the system what became of the file that was to be written.

    Raises:
        CheckpointError: there was one.
    """
    try:
        yield
    except OSError as cause:
        if isinstance(cause, CheckpointError):  # ours, which is Python's own as well
            raise
        reason, hint = "the file cannot be written", None
        if isinstance(cause, NotDurable):
            reason = "the new file is in place, but its folder is not durable"
            hint = "Save again: a crash of the machine may bring the older file back."
        if isinstance(cause, NotRemoved):
            reason = (
                "the new checkpoint is in place, but an older one, or a file of it, cannot be "
                "removed"
            )
            hint = "Remove it, or save again: a reader may take the older one."
        found = str(cause).partition("\n")[0]
        raise CheckpointError(reason, file=path, found=found, hint=hint) from cause

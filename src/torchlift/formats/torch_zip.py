"""Files of ``torch.save`` since torch 1.6: a zip of ``data.pkl`` and one record per storage.

An interpreter that cannot run code reads the pickle (see `unpickle`). Its claims about bytes are
checked against the archive before a tensor is allocated.

A new archive has the exact layout of torch. With
``torch.utils.serialization.config.load.calculate_storage_offsets``, ``torch.load`` computes the
place of a storage. It relies on every padding and every descriptor of miniz, torch's writer
(caffe2/serialize/inline_container.cc, third_party/miniz).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torchlift._system.text import printable
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.index import (
    ITEMSIZE,
    LOCAL,
    Chunk,
    Index,
    Kind,
    Record,
    Storage,
    TensorEntry,
    globals_in,
    row_major,
)
from torchlift.formats.layout import Layout, Payload, Stored
from torchlift.formats.pickled import flatten
from torchlift.formats.source import Source, dense_shape, whole_numbers
from torchlift.formats.torch_pickle import (
    STORED_SIZE,
    Blocked,
    KindRef,
    StorageRef,
    TensorRef,
    TorchWorld,
    read_torch_pickle,
)
from torchlift.formats.zip_archive import (
    CRC,
    CRC_IN_DESCRIPTOR,
    CRC_IN_HEADER,
    END,
    END64,
    LOCATOR64,
    STORED,
    expect_records,
    headers,
    read_directory,
    read_record,
    require_caseless,
)

_MAX_NOTE = 1 << 10  # bytes of a text record

#: Versions of the archive that torch reads (caffe2/serialize/versions.h).
_VERSIONS = range(1, 11)

#: A broadcast view may show this multiple of its storage, or this many bytes. A larger dense
#: copy would be a denial of service.
_MAX_REPEAT, _MAX_REPEATED = 1 << 16, 1 << 32


def repeats_too_often(nbytes: int, stored: int) -> bool:
    """Return whether a view of `nbytes` bytes is refused, because only `stored` bytes exist."""
    return nbytes > _MAX_REPEATED and nbytes > _MAX_REPEAT * stored


def read_torch_zip(
    source: Source,
    records: dict[str, Record] | None = None,
    *,
    key: str | None = None,
    prefix: str = "",
) -> Index:
    """Read the index of an archive, which may be a window of a file.

    Args:
        source: The archive. Offsets in the index count from the start of the whole file.
        records: Its directory, if it was read before.
        key: Name of the container for the whole object, or None.
        prefix: Prefix of the names of its storages.

    Raises:
        FormatError: If it is not such an archive, or is damaged or inconsistent.
    """
    records = read_directory(source) if records is None else records
    top = top_directory(records)
    pickled = records[top + "data.pkl"]
    expect_records(source, [pickled])
    notes = read_notes(source, records, top, _DCP_AGAIN if prefix else _AGAIN)
    data = read_record(source, pickled)
    world = TorchWorld(source.budget)
    root = read_torch_pickle(data, world)
    resolver = zip_resolver(source, records, top + "data/", prefix + "data/")
    root = root if key is None else {key: root}
    index = index_of(source, "torch-zip", root, world, resolver, notes)
    # An archive inside of another file has no checksums of its own to list.
    return index if prefix else replace(index, records=resolver.others())


def index_of(
    source: Source,
    format: str,
    root: object,
    world: TorchWorld,
    resolver: Resolver,
    metadata: dict[str, str],
) -> Index:
    """Return the index of the object of a pickle.

    Args:
        source: The file.
        format: Its format.
        root: The object.
        world: The world that the pickle was read with.
        resolver: Makes the entries.
        metadata: The metadata of the format.

    Raises:
        FormatError: If a claim about bytes is wrong.
        UnsafeError: If the object is a whole module.
    """
    _refuse_module(root)
    flat = flatten(root, source.budget)
    return Index(
        path=source.path,
        format=format,
        tensors={key: resolver.entry(key, ref) for key, ref in flat.tensors.items()},
        storages=resolver.storages,
        files={source.path: source.stamp},
        objects=flat.objects,
        metadata=metadata,
        blocked=tuple(dict.fromkeys((*world.blocked, *globals_in(flat.blocked)))),
        module_versions=flat.versions,
        blocked_keys=flat.blocked,
        blocked_tensors=flat.inside,
        templates=flat.templates,
        tree=(root,),
    )


def top_directory(records: dict[str, Record]) -> str:
    """Return the directory that all records are in, with its slash."""
    first = next(iter(records), "")
    top = first[: first.find("/") + 1]
    outside = next((name for name in records if not top or not name.startswith(top)), None)
    if outside is not None or top + "data.pkl" not in records:
        raise FormatError(
            "torch.save did not write this zip archive",
            entry=outside,
            expected="data.pkl and every other record under one top directory",
            found=f"{len(records)} records" if records else "none: it is empty",
            hint="Save it with torch.save or as safetensors.",
        )
    return top


def look_up(records: dict[str, Record], name: str) -> Record | None:
    """Return a record that an archive may lack.

    Raises:
        FormatError: If its name differs in case: torch would read it, and others would not.
    """
    if name not in records and name.lower() in map(str.lower, records):
        raise FormatError(
            "the name of a record differs in case from what torch writes",
            entry=name,
            expected="this spelling",
            found=next(other for other in records if other.lower() == name.lower()),
            hint="torch would read it, and other programs would not. Write the file again.",
        )
    return records.get(name)


class Again(NamedTuple):
    """How to save a file once more, so that its bytes are numbers of this machine.

    Attributes:
        packed: The hint for a file that another program compressed.
        swapped: The hint for a file of a big-endian machine.
    """

    packed: str
    swapped: str


_ONCE_MORE = "Save it once more: torch.save(torch.load(path), new)."
_AGAIN = Again(
    _ONCE_MORE,
    f"{_ONCE_MORE} Check tensors of uint16, uint32, uint64 and complex32: torch.load does not "
    "swap their bytes.",
)
_DCP_AGAIN = Again(*["Load the folder with torch.distributed.checkpoint, and save it again."] * 2)


def read_notes(
    source: Source, records: dict[str, Record], top: str, again: Again
) -> dict[str, str]:
    """Read the small text records of an archive, which must be valid for torch.

    Raises:
        FormatError: If a record is invalid, was compressed after torch wrote it, or is of a
            big-endian machine. The error names the way of `again`.
    """
    require_caseless(records)
    code = (f"{top}code/", f"{top}extra/")  # torch compresses the code of a program itself
    for name, each in records.items():
        if each.method != STORED and not name.startswith(code):
            raise FormatError(
                "a program other than torch compressed the file",
                entry=name,
                expected="records that are stored, as torch writes them",
                found="a deflated record",
                hint=again.packed,
            )
    notes = {}
    for name in (".format_version", ".storage_alignment", "byteorder", "version", ".data/version"):
        record = look_up(records, top + name)
        if record is None:
            continue
        text = read_record(source, record, _MAX_NOTE).decode("ascii", "replace")
        if name == "byteorder":
            expected, fits = "little or big", text in ("little", "big")
        else:
            text = text.strip()
            # Longer numbers are invalid anyhow, and could be slow to convert.
            number = int(text) if text.isdecimal() and len(text) < 19 else 0
            expected, fits = "a positive whole number", number > 0
            if name in ("version", ".data/version"):
                expected = f"{expected} up to {_VERSIONS[-1]}, which torch reads"
                fits = number in _VERSIONS
        notes[name.removeprefix(".data/").lstrip(".")] = text
        if not fits:
            what = "a record of the archive has an invalid value"
            raise FormatError(what, entry=record.name, expected=expected, found=text)
        if text == "big":
            raise FormatError(
                "the file was saved on a big-endian machine",
                entry=record.name,
                expected="little",
                found=text,
                hint=again.swapped,
            )
    if "version" not in notes:
        raise FormatError(
            "the archive lacks its version, so torch does not read it",
            expected=f"a record {top}version",
            hint="Save it with torch.save.",
        )
    return notes


def _refuse_module(root: object) -> None:
    """Refuse a whole pickled module with its own error, instead of one blocked name."""
    if isinstance(root, Blocked) and root.state is not None and "_modules" in root.state:
        raise UnsafeError(
            "the file is a pickled module: loading it would import and run its class",
            entry=root.name,
            expected="tensors in dicts and lists",
            hint="If you trust the file, load it with torch.load(weights_only=False) and save "
            "module.state_dict() instead.",
        )


_COMPLEX = ("complex32", "complex64", "complex128")
_SIGNED = {
    "conjugate": _COMPLEX,
    "negative": (*_COMPLEX, "float16", "bfloat16", "float32", "float64"),
}


class Resolver:
    """Makes entries from records of tensors, and checks every claim about bytes.

    Args:
        path: Path of the file.
        known: Name in the file -> its storage.
        folder: Start of the names in the file.
        prefix: Start of the names of storages in the index.

    Attributes:
        storages: Name -> storage that the entries use.
    """

    def __init__(
        self,
        path: str,
        known: Mapping[str, Storage],
        folder: str = "",
        prefix: str = "",
    ) -> None:
        self.storages: dict[str, Storage] = {}
        self._path, self._known = path, known
        self._folder, self._prefix = folder, prefix

    def entry(self, key: str, ref: TensorRef) -> TensorEntry:
        """Return the checked entry of one tensor."""
        if isinstance(ref, KindRef):
            return self._of_kind(key, ref)
        stored = ref.storage
        name = self._prefix + stored.key
        self.storages[name] = storage = self._storage(key, stored)
        shape, stride = _shape_and_stride(ref, key)
        (offset,) = whole_numbers((ref.offset,), key, "storage offset")
        itemsize, numel = ITEMSIZE[ref.dtype], math.prod(shape)
        nbytes = numel * itemsize
        # Elements from the first to the last one: a stride can lead far beyond the shape's product.
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if numel and (offset + span) * itemsize > storage.nbytes:
            raise FormatError(
                "a tensor reaches outside its storage",
                entry=key,
                expected=f"at most {storage.nbytes} bytes in {name}",
                found=f"shape {shape}, stride {stride}, offset {offset} of {ref.dtype}",
            )
        if nbytes > storage.nbytes and repeats_too_often(nbytes, storage.nbytes):
            raise FormatError(
                "a broadcast view is far larger than its storage",
                entry=key,
                found=f"shape {shape}, {nbytes} bytes over {storage.nbytes} stored ones",
            )
        if ref.lazy and ref.dtype not in _SIGNED[ref.lazy[0]]:
            raise FormatError(
                f"a {ref.lazy[0]} view has a dtype that does not support it", entry=key
            )
        chunks: tuple[Chunk, ...] = ()
        if numel:
            begin, origin = storage.offset + offset * itemsize, (0,) * len(shape)
            chunks = (Chunk(self._path, begin, span * itemsize, origin, shape),)
        return TensorEntry(
            key, ref.dtype, shape, stride, nbytes, stored.location, name, chunks,
            ref.requires_grad is True, ref.is_parameter, ref.lazy if numel else (),
        )  # fmt: skip

    def others(self) -> dict[str, Storage]:
        """Return the places of records with a checksum that no tensor uses, by name."""
        used = {self._folder + name.removeprefix(self._prefix) for name in self.storages}
        used |= self.storages.keys()  # else it would count as the record of this storage
        return {
            name: place
            for name, place in self._known.items()
            if place.crc32 is not None and name not in used
        }

    def _storage(self, key: str, ref: StorageRef) -> Storage:
        """Return the storage of a tensor. It must have exactly the declared size."""
        storage = self._known.get(self._folder + ref.key)
        if storage is None:
            expected = f"storage {self._prefix}{ref.key}"
            raise FormatError("the storage of a tensor is missing", entry=key, expected=expected)
        nbytes = ref.numel * STORED_SIZE[ref.dtype]
        if nbytes != storage.nbytes:
            raise FormatError(
                f"the size of a storage differs from what the tensor {printable(key, 100)!r} says",
                entry=self._folder + ref.key,
                expected=f"{ref.numel} elements, {nbytes} bytes",
                found=f"{storage.nbytes} bytes",
            )
        return storage._replace(location=ref.location)

    def _of_kind(self, key: str, ref: KindRef) -> TensorEntry:
        """Return the entry of a tensor that torch makes of others, all of them checked."""
        tensors = tuple([self.entry(key, inner) for inner in ref.tensors])
        if ref.kind.startswith("sparse"):
            shape = whole_numbers(ref.size, key, "size", "tuple")
            stride = row_major(shape)
        else:
            shape, stride = _shape_and_stride(ref, key)
        if math.prod(shape) >= 1 << 63:
            raise FormatError("a tensor has an invalid size", entry=key, found=list(shape))
        chunks = tuple([chunk for inner in tensors for chunk in inner.chunks])
        nbytes = sum(inner.nbytes for inner in tensors)
        storage = tensors[0].storage if tensors else key
        return TensorEntry(
            key, ref.dtype, shape, stride, nbytes, ref.storage.location, storage, chunks,
            ref.requires_grad is True, ref.is_parameter, (), Kind(ref.kind, tensors, ref.facts),
        )  # fmt: skip


def zip_resolver(
    source: Source,
    records: dict[str, Record],
    folder: str,
    prefix: str,
) -> Resolver:
    """Return the resolver of tensors whose storages are records of an archive.

    Args:
        source: The archive.
        records: Its directory.
        folder: Folder of the storages in the archive.
        prefix: Prefix of the names of storages.
    """
    known = {name: _storage_in(source, at) for name, at in records.items()}
    return Resolver(source.path, known, folder, prefix)


def _storage_in(source: Source, record: Record) -> Storage:
    start, crc = source.start + record.offset, record.crc32 or None
    if record.method == STORED:
        return Storage(source.path, start, record.size, "", crc)
    return Storage(source.path, 0, record.size, "", crc, record._replace(offset=start))


class _Strided(NamedTuple):
    """The shape and the strides of a tensor, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _shape_and_stride(ref: TensorRef, key: str) -> _Strided:
    """Return the checked shape and strides of a tensor."""
    shape = dense_shape(ref.size, key, "size", "tuple")
    stride = whole_numbers(ref.stride, key, "stride", "tuple")
    if len(shape) != len(stride):
        raise FormatError(
            "the numbers of strides and dimensions of a tensor differ",
            entry=key,
            expected=f"{len(shape)} strides",
            found=f"{len(stride)}",
        )
    return _Strided(shape, stride)


#: The folder of storages in an archive that torch writes to a file object.
_DATA = b"archive/data/"


def archive_layout(
    gaps: Sequence[tuple[int, bytes | bytearray]], tensors: Sequence[Stored], *, checked: bool
) -> Layout:
    """Lay out an archive that torch has written with holes for storages.

    Args:
        gaps: (first byte, bytes) of the written parts. There is a hole between each two.
        tensors: One for each storage, in the order of the archive. An empty one lacks a hole.
        checked: Whether to record the CRC-32 of every storage.

    Raises:
        FormatError: If the installed torch writes archives in another way.
    """
    base, last = gaps[-1]
    places = [at + CRC_IN_HEADER for at, name, _ in _headers(gaps) if name.startswith(_DATA)]
    starts = [start + len(data) for start, data in gaps[:-1]]
    found = [stop - start for start, (stop, _) in zip(starts, gaps[1:], strict=True)]
    sizes = [tensor.nbytes for tensor in tensors]
    if found != [*filter(None, sizes)] or len(places) != len(tensors):
        raise FormatError(
            "the installed torch lays out files in an unknown way",
            expected=f"{len(tensors)} storages of {sum(sizes)} bytes",
            found=f"{len(places)} storages, and holes of {sum(found)} bytes",
            hint="Update torchlift, or install a version of torch that it is tested with.",
        )
    holes, at, payloads = iter(starts), 0, []
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        at = next(holes) if nbytes else at  # an empty one is at the current position
        payloads.append(Payload(tensor, at))
        at += nbytes
    frame = partial(_frame, gaps, sizes, places)
    return Layout(base + len(last), tuple(payloads), checked, frame)


def pickle_in(gaps: Sequence[tuple[int, bytes | bytearray]]) -> bytes:
    """Return the pickle of such an archive: its first record."""
    first = gaps[0][1]
    *_, n_name, n_extra = LOCAL.unpack_from(first)
    start = LOCAL.size + n_name + n_extra
    _, _, nbytes = next(_headers(gaps))
    return bytes(first[start : start + nbytes])


def _headers(
    gaps: Sequence[tuple[int, bytes | bytearray]],
) -> Iterator[tuple[int, bytes, int]]:
    """Return (position in the last gap, name, size) of each record's header in the directory."""
    base, last = gaps[-1]
    end = len(last) - END.size - LOCATOR64.size - END64.size
    return headers(last, END64.unpack_from(last, end)[-1] - base, end)


def _frame(
    gaps: Sequence[tuple[int, bytes | bytearray]],
    sizes: Sequence[int],
    places: Sequence[int],
    sums: Iterable[int],
) -> Iterator[tuple[int, bytes]]:
    """Yield the parts that torch has written, with the CRC-32s of the payloads filled in."""
    known, left, number = [], iter(sums), 0
    start, data = gaps[0][0], bytearray(gaps[0][1])
    for nbytes in sizes:
        if nbytes:
            yield start, bytes(data)  # before the sum is taken: the next payload may decide it
            number += 1
            start, data = gaps[number][0], bytearray(gaps[number][1])
        known.append(next(left, 0))
        if nbytes:
            CRC.pack_into(data, CRC_IN_DESCRIPTOR, known[-1])
    for place, crc in zip(places, known, strict=True):
        CRC.pack_into(data, place, crc)
    yield start, bytes(data)

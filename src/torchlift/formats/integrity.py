"""Recompute every checksum that a checkpoint has. Standard library only."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, BinaryIO
from zlib import crc32

from torchlift._store.files import Opened
from torchlift._store.places import Stamp, hub_checksum, relative, shared_folder
from torchlift._store.url import Url
from torchlift._system.text import Facts, Summary, count_of, human, printable
from torchlift.errors import CheckpointError, FormatError, IntegrityError
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index
from torchlift.formats.file_object import index_of_object
from torchlift.formats.index import LOCAL_MAGIC, Index, Record, Storage
from torchlift.formats.source import Source, errors_name
from torchlift.formats.zip_archive import DEFLATED, STORED, inflated, read_directory

_BLOCK = 1 << 20  # bytes read at a time: they are still in the processor's cache when summed up
_BATCH = 32 << 20  # bytes that a thread takes on at a time
#: The same for URLs: bytes of a request, and how many requests are made at a time.
_RANGE, _AT_ONCE = 8 << 20, 8


#: Hexadecimal digits of checksums.
_DIGITS = {"crc32": 8, "git-sha1": 40, "sha256": 64}

#: What has a checksum, by name: storages, and other records of archives.
Checksums = tuple[Mapping[str, Storage], Mapping[str, Storage]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A storage, another record, or a file, whose bytes do not have the checksum that is recorded.

    Attributes:
        name: identity of the storage, name of the record, or the file.
        expected: the checksum that is recorded.
        found: that of the bytes; None where they are deflated and cannot be inflated.
        algorithm: ``"crc32"``, which the file records; of a file, ``"sha256"`` or ``"git-sha1"``,
            which a hub does.
    """

    name: str
    expected: int
    found: int | None
    algorithm: str = "crc32"

    @property
    def what(self) -> str:
        """Return what was found, as text."""
        broken = "deflated bytes that cannot be inflated"
        return broken if self.found is None else self._text(self.found)

    @property
    def right(self) -> str:
        """Return what was expected, as text."""
        return self._text(self.expected)

    def _text(self, value: int) -> str:
        return f"{self.algorithm} {value:0{_DIGITS[self.algorithm]}x}"


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Summary):
    """What `verify` found.

    Attributes:
        path: the checkpoint.
        checked: identities of the storages whose checksum was recomputed, or that of their file.
        unchecked: identities of the storages for which there is none.
        failed: those of `checked`, of `records` and of `files` whose bytes are wrong.
        records: names of the archive's other records whose checksum was recomputed: the pickle, the
            code of a program, notes.
        files: file -> the algorithm and the checksum of all of it that a hub records, with which it
            was compared, such as ``"sha256 2c26..."``.
        nbytes: bytes whose checksum was recomputed.
        unchecked_nbytes: bytes of `unchecked`.
    """

    path: str
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    failed: tuple[Failure, ...]
    nbytes: int = 0
    unchecked_nbytes: int = 0
    records: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether every checksum that there is agrees with the bytes."""
        return not self.failed

    def _summary(self) -> tuple[str, Facts]:
        checked, unchecked = len(self.checked), len(self.unchecked)
        by_files, total = len(self.files), checked + len(self.records) + len(self.files)
        verdict = "every checksum is right" if total else "nothing is wrong with its structure"
        if self.failed:
            verdict = f"damaged: {len(self.failed):,} of {count_of(total, 'checksum')} wrong"
        facts: Facts = []
        if total or not unchecked:
            what = count_of(checked, "storage")
            what += f" and {count_of(len(self.records), 'other record')}" if self.records else ""
            facts.append(("checked", f"{what}, {human(self.nbytes)}"))
        if by_files:
            kinds = sorted({text.partition(" ")[0] for text in self.files.values()})
            what = f"{count_of(by_files, 'file')}, {' and '.join(kinds)} as the hub records it"
            facts.append(("as a whole", what))
        if unchecked:
            size = f"{count_of(unchecked, 'storage')}, {human(self.unchecked_nbytes)}"
            facts.append(("not checked", f"{size}: the file records no checksum of these bytes"))
        for item in self.failed:
            sums = f"expected {item.right}, found {item.what.removeprefix(item.algorithm + ' ')}"
            facts.append((printable(item.name, 300), sums))
        return f"{self.path}: {verdict}", facts


def verify(
    path: str | os.PathLike[str] | BinaryIO, *, storage_options: Mapping[str, Any] | None = None
) -> VerifyReport:
    """Check a checkpoint's structure and recompute every checksum it records.

    torch's zip format stores a CRC-32 per record, which torch itself never reads back; what
    torchlift writes has them in safetensors, too. Other safetensors and torch files from before 1.6
    store none, so there only the structure is checked.

    Of a file in the cache of Hugging Face's libraries, and of one behind ``hf://``, the whole is
    compared, too, with the SHA-256 that the Hub records of large files; of small ones, it is what
    git calls them.

    Args:
        path: a file or a directory, its URL, or a file object, as for `torchlift.open`.
        storage_options: of a URL, as for `torchlift.open`.

    Raises:
        FormatError: the structure is wrong.
        IntegrityError: the file cannot be read, or changes meanwhile.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"weight": torch.ones(3)}, path)
        >>> torchlift.verify(path).ok
        True
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        return verify_index(resolved(read_index(path, storage_options=storage_options)))
    with index_of_object(path) as index:
        return verify_index(resolved(index))


def checksums(index: Index) -> Checksums:
    """Return what a checkpoint has checksums of: storages, and other records of its archives."""
    storages = {name: s for name, s in index.storages.items() if s.crc32 is not None}
    places = {(s.file, _place(s)) for s in storages.values()}
    bare = sorted((s.file, _place(s), n) for n, s in index.storages.items() if s.crc32 is None)
    records: dict[str, Storage] = {}
    root = shared_folder(index.files) if index.files else ""
    for path in index.files if index.format != "dcp" else ():  # whose files hold many archives
        with _opened(index, path) as file:
            if file.read(0, len(LOCAL_MAGIC)) != LOCAL_MAGIC:
                continue
        with errors_name(path), Source(path) as source:
            found = read_directory(source)
            # Not by the last name alone: shards in two folders may share it.
            folder = "" if len(index.files) == 1 else relative(path, root) + "/"
            for name, record in found.items():
                if (path, record.offset) in places or record.method not in (STORED, DEFLATED):
                    continue
                if record.crc32:
                    packed = record if record.method == DEFLATED else None
                    at = 0 if packed else record.offset
                    place = Storage(path, at, record.size, "", record.crc32, packed)
                    first = bisect.bisect_left(bare, (path, record.offset))
                    last = bisect.bisect_left(bare, (path, record.offset + record.nbytes))
                    # An array's header comes before its numbers, under the same checksum.
                    if last - first == 1:
                        storages[bare[first][2]] = place
                    else:
                        records[folder + name] = place
    return storages, records


def _place(storage: Storage) -> int:
    """Return the first byte in the file of what holds a storage."""
    return storage.offset if storage.packed is None else storage.packed.offset


def verify_index(
    index: Index,
    advance: Callable[[int], object] | None = None,
    known: Checksums | None = None,
) -> VerifyReport:
    """Verify the checkpoint of an index that is already at hand; see `verify`.

    Args:
        index: of the checkpoint.
        advance: called with a number of bytes as they are checked, from the calling thread.
        known: its `checksums`, if they are at hand, too.

    Raises:
        FormatError: one of its archives is not the one that was indexed.
        IntegrityError: a file cannot be read, or changes meanwhile.
    """
    known, recorded = known or checksums(index), hub_checksums(index)
    sums = sums_of(index, known, advance)
    return compared(index, known, sums, recorded, hashes_of(index, recorded, advance))


def hub_checksums(index: Index) -> dict[str, tuple[str, str]]:
    """Return file -> the algorithm and the checksum of all of it that a hub records, if it does."""
    found = {path: hub_checksum(path) for path in _stamps(index)}
    return {path: each for path, each in found.items() if each is not None}


def _stamps(index: Index) -> dict[str, Stamp]:
    return {**index.guides, **index.files}


def hashes_of(
    index: Index,
    recorded: Mapping[str, tuple[str, str]],
    advance: Callable[[int], object] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[str, int]:
    """Return the hash of each of some files, of which one after the other takes all of a core.

    Args:
        index: of the checkpoint.
        recorded: its `hub_checksums`, or some of them.
        advance: called with a number of bytes as they are checked, from the calling thread.
        part: the number of this reader, and how many there are.
    """
    files, found = [*recorded][part[0] :: part[1]], dict[str, int]()
    stamps = _stamps(index)
    sizes = [stamps[path].size for path in files]
    algorithms = [recorded[path][0] for path in files]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            values = pool.map(partial(_hash, index), files, sizes, algorithms)
            for path, size, value in zip(files, sizes, values, strict=True):
                found[path] = value
                if advance is not None:
                    advance(size)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for file in files:  # else an interrupt waits for a host that is silent
                if isinstance(file, Url):
                    file.store.cancel()
            raise
    return found


def _hash(index: Index, path: str, size: int, algorithm: str) -> int:
    """Return the hash of all of a file."""
    if algorithm == "sha256":
        total = hashlib.sha256()
    else:
        # Which protects from nobody: it is what git calls a file.
        total = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with _opened(index, path) as file:
        if file.is_local:
            for start in range(0, size, _BLOCK):
                total.update(file.read(start, _BLOCK))
            return int(total.hexdigest(), 16)
        with ThreadPoolExecutor(_AT_ONCE) as ahead:
            for start in range(0, size, _RANGE * _AT_ONCE):
                places = range(start, min(start + _RANGE * _AT_ONCE, size), _RANGE)
                for block in ahead.map(partial(file.read, nbytes=_RANGE), places):
                    total.update(block)
    return int(total.hexdigest(), 16)


def sums_of(
    index: Index,
    known: Checksums,
    advance: Callable[[int], object] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[int, int | None]:
    """Return number of a checksum -> that of the bytes; None if they cannot be inflated.

    Args:
        index: of the checkpoint.
        known: its `checksums`, which are numbered in their order.
        advance: called with a number of bytes as they are checked, from the calling thread.
        part: the number of this reader, and how many there are: each takes a part of the storages.
    """
    with_sum = [storage for some in known for storage in some.values()]
    batches = itertools.islice(_batches(with_sum), part[0], None, part[1])
    stores = {file.store for file in index.files if isinstance(file, Url)}
    sums: dict[int, int | None] = {}
    with ThreadPoolExecutor(_AT_ONCE if stores else os.cpu_count() or 1) as pool:
        try:
            for done in pool.map(partial(_crc32, index), batches):
                sums.update(done)
                if advance is not None:
                    advance(sum(with_sum[number].nbytes for number in done))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for store in stores:  # else an interrupt waits for a host that is silent
                store.cancel()
            raise
    return sums


def compared(
    index: Index,
    known: Checksums,
    sums: Mapping[int, int | None],
    recorded: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    hashes: Mapping[str, int] = MappingProxyType({}),
) -> VerifyReport:
    """Compare the checksums of bytes with those that a checkpoint records, and a hub.

    Args:
        index: of the checkpoint.
        known: its `checksums`.
        sums: its `sums_of`.
        recorded: its `hub_checksums`, or some of them.
        hashes: the `hashes_of` these.
    """
    storages, records = known
    # Not by name: an array of numpy's may be called as another one's record is.
    names, with_sum = [*storages, *records], [*storages.values(), *records.values()]
    failed = [
        Failure(name, storage.crc32 or 0, sums[number])
        for number, (name, storage) in enumerate(zip(names, with_sum, strict=True))
        if storage.crc32 != sums[number]
    ]
    failed += [
        Failure(path, right, hashes[path], algorithm)
        for path, (algorithm, digest) in recorded.items()
        if hashes[path] != (right := int(digest, 16))
    ]
    bare = {name: s for name, s in index.storages.items() if name not in storages}
    whole = [name for name, s in bare.items() if s.file in recorded]
    unchecked = {name: s.nbytes for name, s in bare.items() if s.file not in recorded}
    # Bytes that have two checksums count once.
    alone = sum(storage.nbytes for storage in with_sum if storage.file not in recorded)
    stamps = _stamps(index)
    return VerifyReport(
        index.path,
        (*storages, *whole),
        tuple(unchecked),
        tuple(failed),
        alone + sum(stamps[path].size for path in recorded),
        sum(unchecked.values()),
        tuple(records),
        {str(path): " ".join(each) for path, each in recorded.items()},
    )


def _batches(storages: Iterable[Storage]) -> Iterator[list[tuple[int, Storage]]]:
    """Yield work of about the same size: a large storage, or many small ones."""
    batch: list[tuple[int, Storage]] = []
    room = _BATCH
    for number, storage in enumerate(storages):
        batch.append((number, storage))
        room -= max(storage.nbytes, 1)
        if room <= 0:
            yield batch
            batch, room = [], _BATCH
    if batch:
        yield batch


def _crc32(index: Index, batch: Sequence[tuple[int, Storage]]) -> dict[int, int | None]:
    """Return number -> checksum of each storage."""
    found: dict[int, int | None] = {}
    for path, of_file in groupby(batch, key=lambda item: item[1].file):
        with _opened(index, path) as file:
            buffer = memoryview(bytearray(_BLOCK if file.is_local else _RANGE))
            for number, storage in of_file:
                found[number] = _crc_of(file, storage, buffer)
    return found


def _crc_of(file: Opened, storage: Storage, buffer: memoryview) -> int | None:
    """Return the checksum of a storage's bytes; None if they cannot be inflated."""
    if storage.packed is not None:
        return _inflated_crc(file, storage.packed)
    at, stop, crc = storage.offset, storage.offset + storage.nbytes, 0
    while at < stop:
        count = file.read_into([buffer[: stop - at]], at)
        if not count:
            raise IntegrityError("the file ends early", file=file.place)
        crc = crc32(buffer[:count], crc)
        at += count
    return crc


@contextmanager
def _opened(index: Index, path: str) -> Iterator[Opened]:
    """Open a file of a checkpoint, which must be the one that was indexed."""
    try:
        file = _stamps(index)[path].open(path)
        try:
            yield file
        finally:
            file.close()
    except CheckpointError:
        raise
    except OSError as error:
        raise IntegrityError(
            f"reading failed ({error.strerror})", file=path, hint="Check the disk."
        ) from error


def _inflated_crc(file: Opened, record: Record) -> int | None:
    """Return the checksum of what a deflated record holds; None if it cannot be inflated."""
    crc = 0
    try:
        for block in inflated(file.read, record._replace(crc32=0)):
            crc = crc32(block, crc)
    except FormatError:
        return None
    return crc

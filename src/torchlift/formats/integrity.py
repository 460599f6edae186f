"""`verify`: recompute every checksum of a checkpoint. Standard library only."""

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
#: The same for URLs: bytes of a request, how many are made at a time, and the gap that one
#: request may bridge.
_RANGE, _AT_ONCE, _NEAR = 8 << 20, 8, 1 << 20


#: Hexadecimal digits of checksums.
_DIGITS = {"crc32": 8, "git-sha1": 40, "sha256": 64}

#: Storages, and other records of archives, that have a checksum; each by name.
Checksums = tuple[Mapping[str, Storage], Mapping[str, Storage]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A storage, a record or a file whose bytes do not match the recorded checksum.

    Attributes:
        name: Name of the storage, of the record or of the file.
        expected: The recorded checksum.
        found: The checksum of the bytes, or None if compressed bytes cannot be inflated.
        algorithm: ``"crc32"``, which the file records. ``"sha256"`` or ``"git-sha1"`` for a whole
            file of the Hugging Face Hub.
    """

    name: str
    expected: int
    found: int | None
    algorithm: str = "crc32"

    @property
    def what(self) -> str:
        """Return the found checksum as text."""
        broken = "compressed bytes that cannot be inflated"
        return broken if self.found is None else self._text(self.found)

    @property
    def right(self) -> str:
        """Return the expected checksum as text."""
        return self._text(self.expected)

    def _text(self, value: int) -> str:
        return f"{self.algorithm} {value:0{_DIGITS[self.algorithm]}x}"


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Summary):
    """The result of `verify`.

    Attributes:
        path: Path of the checkpoint.
        checked: Names of the storages whose checksum was recomputed, or that of their file.
        unchecked: Names of the storages without a recorded checksum.
        failed: A `Failure` for each storage, record or file whose bytes are wrong.
        nbytes: Number of bytes whose checksum was recomputed.
        unchecked_nbytes: Number of bytes of ``unchecked``.
        records: Names of other records that were checked: the pickle, the code of a program.
        files: File -> the checksum of the whole file that the Hugging Face Hub records, such as
            ``"sha256 2c26..."``.
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
        """Return whether every recorded checksum matches the bytes."""
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
    """Check the structure of a checkpoint and recompute every checksum that it records.

    A torch file has a CRC-32 for each record, which torch never reads. So do safetensors files
    that torchlift wrote. Other safetensors files and GGUF files lack checksums: torchlift checks
    only their structure, and lists their tensors as ``unchecked``.

    A file of the Hugging Face Hub, in the local cache or behind ``hf://``, is also compared with
    the SHA-256 that the Hub records.

    Args:
        path: A file, a directory, a URL or a file object, as for `torchlift.open`.
        storage_options: Options for a URL. See :ref:`arg-storage-options`.

    Returns:
        The report. Wrong checksums are listed in ``failed`` and do not raise.

    Raises:
        FormatError: If the structure is wrong.
        IntegrityError: If the file cannot be read, or changes during the check.

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
    """Return the storages and the other records of archives that have a checksum."""
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
    """Verify a checkpoint whose index was read before.

    Args:
        index: Index of the checkpoint.
        advance: Called from this thread with the number of bytes that were just checked.
        known: Its `checksums`, or None to collect them.

    Raises:
        FormatError: If one of its archives was replaced.
        IntegrityError: If a file cannot be read, or changes during the check.
    """
    known, recorded = known or checksums(index), hub_checksums(index)
    sums = sums_of(index, known, advance)
    return compared(index, known, sums, recorded, hashes_of(index, recorded, advance))


def hub_checksums(index: Index) -> dict[str, tuple[str, str]]:
    """Return file -> algorithm and checksum of the whole file, for those that a hub records."""
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
    """Return file -> hash of the whole file. Each file takes one core.

    Args:
        index: Index of the checkpoint.
        recorded: Its `hub_checksums`, or some of them.
        advance: Called from this thread with the number of bytes that were just checked.
        part: Number of this reader, and the number of readers. Each reader takes some files.
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
            for file in files:  # else Ctrl-C waits for a host that does not answer
                if isinstance(file, Url):
                    file.store.cancel()
            raise
    return found


def _hash(index: Index, path: str, size: int, algorithm: str) -> int:
    """Return the hash of all of a file."""
    if algorithm == "sha256":
        total = hashlib.sha256()
    else:
        # Not for security: it is the name that git gives a file.
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
    """Return number of a storage -> CRC-32 of its bytes, or None if they cannot be inflated.

    Args:
        index: Index of the checkpoint.
        known: Its `checksums`. They are numbered in their order.
        advance: Called from this thread with the number of bytes that were just checked.
        part: Number of this reader, and the number of readers. Each reader takes some storages.
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
            for store in stores:  # else Ctrl-C waits for a host that does not answer
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
    """Compare the checksums of the bytes with the recorded ones.

    Args:
        index: Index of the checkpoint.
        known: Its `checksums`.
        sums: Its `sums_of`.
        recorded: Its `hub_checksums`, or some of them.
        hashes: The `hashes_of` these files.
    """
    storages, records = known
    # By number: an array of an npz file and another record may have the same name.
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
    # Bytes with two checksums, of a record and of the whole file, count once.
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
    """Yield batches of about the same size: one large storage, or many small ones."""
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
    """Return number -> checksum of each storage, or None if it cannot be inflated."""
    found: dict[int, int | None] = {}
    for path, of_file in groupby(batch, key=lambda item: item[1].file):
        with _opened(index, path) as file:
            items = [*of_file]
            ahead = _Ahead(file, [(s.offset, s.offset + s.nbytes) for _, s in items])
            for number, storage in items:
                if storage.packed is not None:
                    found[number] = _inflated_crc(file, storage.packed)
                    continue
                crc = 0
                for block in ahead.blocks(storage.offset, storage.offset + storage.nbytes):
                    crc = crc32(block, crc)
                found[number] = crc
    return found


class _Ahead:
    """Reads ranges of a file. Near ranges come with one request, which counts for a URL.

    Args:
        file: The file.
        ranges: First byte and end of each range, in the order of reading.
    """

    def __init__(self, file: Opened, ranges: Sequence[tuple[int, int]]) -> None:
        self._file, self._ends = file, dict[int, int]()
        self._buffer = memoryview(bytearray(_BLOCK if file.is_local else _RANGE))
        self._at = self._got = 0  # the bytes in the buffer
        end, following = 0, -1
        for start, stop in reversed(ranges):
            end = end if 0 <= following - stop <= _NEAR else stop
            self._ends[start], following = end, start

    def blocks(self, at: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of one range, in memory that the next block overwrites."""
        end = self._ends[at]
        while at < stop:
            if not self._at <= at < self._at + self._got:
                self._at = at
                self._got = self._file.read_into([self._buffer[: end - at]], at)
                if not self._got:
                    raise IntegrityError("the file ends early", file=self._file.place)
            first = at - self._at
            block = self._buffer[first : min(first + stop - at, self._got)]
            yield block
            at += len(block)


@contextmanager
def _opened(index: Index, path: str) -> Iterator[Opened]:
    """Open a file of a checkpoint. It must be the file that was indexed."""
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
            f"the file cannot be read ({error.strerror})", file=path, hint="Check the disk."
        ) from error


def _inflated_crc(file: Opened, record: Record) -> int | None:
    """Return the checksum of an inflated record, or None if it cannot be inflated."""
    crc = 0
    try:
        for block in inflated(file.read, record._replace(crc32=0)):
            crc = crc32(block, crc)
    except FormatError:
        return None
    return crc

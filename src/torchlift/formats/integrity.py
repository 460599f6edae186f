"""`verify`: recompute every checksum of a checkpoint. Standard library only."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

from torchlift._store.files import Opened, read_error
from torchlift._store.url import Url
from torchlift._system.text import Facts, Summary, count_of, human, printable
from torchlift.errors import CheckpointError, FormatError, IntegrityError
from torchlift.formats.detect import read_index
from torchlift.formats.file_object import index_of_object
from torchlift.formats.index import Index, Storage
from torchlift.formats.source import Windows

_BLOCK = 1 << 20  # bytes read at a time: they are still in the processor's cache when summed up
_BATCH = 32 << 20  # bytes that a thread takes on at a time
#: Of URLs: bytes of a request or of several small ones, and requests in parallel.
_RANGE, _AT_ONCE = 8 << 20, 8

#: Hexadecimal digits of checksums.
_DIGITS = {"crc32": 8, "sha256": 64}
#: The name of a file in the cache of the Hugging Face Hub, if it is a SHA-256.
_BLOB = re.compile("[0-9a-f]{64}")


class Checksum(NamedTuple):
    """A recorded checksum, and the bytes that it is about.

    Attributes:
        kind: ``"storage"``, ``"record"`` for another record of an archive, or ``"file"``.
        name: The name of the storage or record, or the path of the file.
        place: The file, the first byte and the length of these bytes.
        value: The recorded checksum: the CRC-32, or the SHA-256 of a file.
    """

    kind: str
    name: str
    place: Storage
    value: int

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm."""
        return "sha256" if self.kind == "file" else "crc32"


@dataclass(frozen=True, slots=True)
class Failure:
    """A storage, a record or a file whose bytes do not match the recorded checksum.

    Attributes:
        name: Name of the storage, of the record or of the file.
        expected: The recorded checksum.
        found: The checksum of the bytes, or None if compressed bytes cannot be inflated.
        algorithm: ``"crc32"``, which the file records, or ``"sha256"`` for a complete file, as the
            Hugging Face Hub or the caller has it.
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
        records: Names of other records that were checked: the pickle, the code of a program. Paths
            of files whose SHA-256 the cache of the Hugging Face Hub records, or the caller passed.
    """

    path: str
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    failed: tuple[Failure, ...]
    nbytes: int = 0
    unchecked_nbytes: int = 0
    records: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether every recorded checksum matches the bytes."""
        return not self.failed

    def _summary(self) -> tuple[str, Facts]:
        checked, unchecked = len(self.checked), len(self.unchecked)
        total = checked + len(self.records)
        verdict = "every checksum is right"
        if not total and unchecked:
            verdict = "the structure is right, and there are no checksums to compare"
        if self.failed:
            verdict = f"damaged: {len(self.failed):,} of {count_of(total, 'checksum')} wrong"
        facts: Facts = []
        if total or not unchecked:
            what = count_of(checked, "storage")
            what += f" and {count_of(len(self.records), 'other record')}" if self.records else ""
            facts.append(("checked", f"{what}, {human(self.nbytes)}"))
        if unchecked:
            size = f"{count_of(unchecked, 'storage')}, {human(self.unchecked_nbytes)}"
            facts.append(("not checked", f"{size}: the file records no checksum of these bytes"))
        for item in self.failed:
            sums = f"expected {item.right}, found {item.what.removeprefix(item.algorithm + ' ')}"
            facts.append((printable(item.name, 300), sums))
        return f"{self.path}: {verdict}", facts


def verify(
    path: str | os.PathLike[str] | BinaryIO,
    *,
    sha256: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check the structure of a checkpoint and recompute every checksum that it records.

    A torch file has a CRC-32 for each record, which torch never reads. So do safetensors files
    that torchlift wrote. Other safetensors files and GGUF files lack checksums: torchlift checks
    only their structure, and lists their tensors as ``unchecked``. A changed value there is not
    found.

    The cache of the Hugging Face Hub records the SHA-256 of each large file. torchlift compares it
    if the file itself lacks a checksum.

    Args:
        path: A file, a directory, a URL or a file object, as for `torchlift.open`.
        sha256: The SHA-256 of the complete file, as published, to compare.
        storage_options: Options for a URL. See :ref:`arg-storage-options`.

    Returns:
        The report. Wrong checksums are listed in ``failed`` and do not raise.

    Raises:
        FormatError: If the structure is wrong.
        IntegrityError: If the file cannot be read, or changes during the check.
        ValueError: If `sha256` is not 64 hexadecimal digits, or the checkpoint is several files.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"weight": torch.ones(3)}, path)
        >>> torchlift.verify(path).ok
        True
    """
    published = None if sha256 is None else parse_sha256(sha256)
    if isinstance(path, (str, bytes, os.PathLike)):
        index = read_places(path, storage_options=storage_options)
        return verify_index(index, known=checksums(index, published))
    with index_of_object(path) as index:
        return verify_index(index, known=checksums(index, published))


def read_places(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Index:
    """Return the index of a checkpoint with the places of all bytes, see `dcp.resolved`."""
    index = read_index(path, storage_options=storage_options)
    if index.format != "dcp":
        return index
    from torchlift.formats.dcp import resolved

    return resolved(index)


def parse_sha256(text: str) -> int:
    """Return a SHA-256 from its text, which may begin with ``sha256:``.

    Raises:
        ValueError: If it is not 64 hexadecimal digits.
    """
    digits = text.strip().lower().removeprefix("sha256:")
    if not _BLOB.fullmatch(digits):
        raise ValueError(f"sha256={text!r}: expected 64 hexadecimal digits")
    return int(digits, 16)


def checksums(index: Index, published: int | None = None) -> list[Checksum]:
    """Return the checksums of storages, of other records of archives, and of complete files.

    Args:
        index: Index of the checkpoint.
        published: The SHA-256 of its only file, as somebody else has published it.

    Raises:
        ValueError: If there is one, and the checkpoint is several files.
    """
    if published is not None and len({*index.files, *index.guides}) != 1:
        raise ValueError(
            f"sha256=: {index.path} is {count_of(len({*index.files, *index.guides}), 'file')}, and "
            "a SHA-256 is of one file. Pass the path of that file."
        )
    places = {name: s for name, s in index.storages.items() if s.crc32 is not None}
    places |= {name: s for name, s in index.records.items() if s.crc32 is not None}
    every = [
        Checksum("storage" if name in index.storages else "record", name, place, place.crc32 or 0)
        for name, place in places.items()
    ]
    for path in index.files:  # another file in the cache may have right checksums of its own
        digest = published if published is not None else _hub_checksum(path)
        if digest is not None:
            place = Storage(path, 0, index.files[path].size, "")
            every.append(Checksum("file", path, place, digest))
    return every


def _hub_checksum(path: str) -> int | None:
    """Return the SHA-256 of a file in the Hub's cache, which links to ``blobs/<SHA-256>``."""
    folder, name = os.path.split(os.path.realpath(path))
    # Only a link into `blobs` has the Hub's name. A plain file can have any name.
    is_blob = os.path.basename(folder) == "blobs" and os.path.islink(path)
    return int(name, 16) if is_blob and _BLOB.fullmatch(name) else None


def verify_index(
    index: Index,
    advance: Callable[[int], object] | None = None,
    known: Sequence[Checksum] | None = None,
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
    known = checksums(index) if known is None else known
    return compared(index, known, sums_of(index, known, advance))


def sums_of(
    index: Index,
    known: Sequence[Checksum],
    advance: Callable[[int], object] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[int, int | None]:
    """Return number of a checksum -> that of the bytes, or None if they cannot be inflated.

    Args:
        index: Index of the checkpoint.
        known: Its `checksums`, or some of them. They are numbered in their order.
        advance: Called from this thread with the number of bytes that were just checked.
        part: Number of this reader, and the number of readers. Each reader takes some of them.
    """
    stores = {file.store for file in index.files if isinstance(file, Url)}
    batches = _batches(known, _RANGE // 2 if stores else _BATCH)
    batches = itertools.islice(batches, part[0], None, part[1])
    sums: dict[int, int | None] = {}
    with ThreadPoolExecutor(_AT_ONCE if stores else os.cpu_count() or 1) as pool:
        try:
            for done in pool.map(partial(_sum_batch, index, known), batches):
                sums.update(done)
                if advance is not None:
                    advance(sum(known[number].place.nbytes for number in done))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for store in stores:  # else Ctrl-C waits for a host that does not answer
                store.cancel()
            raise
    return sums


def compared(
    index: Index, known: Sequence[Checksum], sums: Mapping[int, int | None]
) -> VerifyReport:
    """Compare the checksums of the bytes with the recorded ones.

    Args:
        index: Index of the checkpoint.
        known: Its `checksums`, or some of them.
        sums: Their `sums_of`.
    """
    failed = [
        Failure(each.name, each.value, sums[number], each.algorithm)
        for number, each in enumerate(known)
        if each.value != sums[number]
    ]
    storages = {each.name for each in known if each.kind == "storage"}
    files = {each.name for each in known if each.kind == "file"}
    bare = {name: s for name, s in index.storages.items() if name not in storages}
    whole = [name for name, s in bare.items() if s.file in files]
    unchecked = {name: s.nbytes for name, s in bare.items() if s.file not in files}
    # Bytes with two checksums, of a record and of the complete file, count once.
    once = [each for each in known if each.kind == "file" or each.place.file not in files]
    return VerifyReport(
        index.path,
        (*(each.name for each in known if each.kind == "storage"), *whole),
        tuple(unchecked),
        tuple(failed),
        sum(each.place.nbytes for each in once),
        sum(unchecked.values()),
        tuple(each.name for each in known if each.kind != "storage"),
    )


def _batches(known: Sequence[Checksum], size: int) -> Iterator[list[int]]:
    """Yield batches of about the same size: one large storage, or many small ones."""
    batch: list[int] = []
    room = size
    for number, each in enumerate(known):
        batch.append(number)
        room -= max(each.place.nbytes, 1)
        if room <= 0 or each.kind == "file":
            yield batch
            batch, room = [], size
    if batch:
        yield batch


def _sum_batch(
    index: Index, known: Sequence[Checksum], batch: Sequence[int]
) -> dict[int, int | None]:
    """Return number -> checksum of each of a batch, or None if it cannot be inflated."""
    found: dict[int, int | None] = {}
    for path, of_file in groupby(batch, key=lambda number: known[number].place.file):
        with _opened(index, path) as file:
            places = {number: known[number].place for number in of_file}
            windows = None
            if not file.is_local and sum(place.nbytes for place in places.values()) <= _RANGE:
                windows = Windows(file)  # near ranges share a request
                plain = [place for place in places.values() if place.packed is None]
                windows.expect((place.offset, place.offset + place.nbytes) for place in plain)
            for number, place in places.items():
                algorithm = known[number].algorithm
                if place.packed is None:
                    blocks = _blocks(file, place)
                    if windows is not None:
                        blocks = iter([windows.read(place.offset, place.nbytes)])
                    found[number] = _sum_up(blocks, algorithm)
                    continue
                from torchlift.formats.zip_archive import inflated

                try:
                    inside = inflated(file.read, place.packed._replace(crc32=0))
                    found[number] = _sum_up(inside, algorithm)
                except FormatError:
                    found[number] = None
    return found


def _sum_up(blocks: Iterable[bytes | memoryview], algorithm: str) -> int:
    if algorithm == "crc32":
        crc = 0
        for block in blocks:
            crc = crc32(block, crc)
        return crc
    total = hashlib.sha256()
    for block in blocks:
        total.update(block)
    return int(total.hexdigest(), 16)


def _blocks(file: Opened, place: Storage) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a storage, in memory that the next block overwrites."""
    at, stop = place.offset, place.offset + place.nbytes
    most = min(place.nbytes, _BLOCK if file.is_local else _RANGE)
    buffer = memoryview(bytearray(most))
    while at < stop:
        got = file.read_into([buffer[: stop - at]], at)
        if not got:
            raise IntegrityError("the file ends early", file=file.place)
        yield buffer[:got]
        at += got


@contextmanager
def _opened(index: Index, path: str) -> Iterator[Opened]:
    """Open a file of a checkpoint. It must be the file that was indexed."""
    try:
        file = index.files[path].open(path)
        try:
            yield file
            file.check()
        finally:
            file.close()
    except CheckpointError:
        raise
    except OSError as error:
        raise read_error("the file cannot be read", error, path, "Check the disk.") from error

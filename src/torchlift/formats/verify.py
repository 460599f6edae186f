"""Recompute every checksum that a checkpoint has. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from torchlift._system import Facts, Summary, count_of, human, printable
from torchlift.errors import IntegrityError
from torchlift.formats.crc import PartialCrc, whole_crc
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index, Storage

_BLOCK = 1 << 20  # bytes read at a time: they are still in the processor's cache when summed up
_BATCH = 32 << 20  # bytes that a thread takes on at a time


class _Range(NamedTuple):
    """Bytes of a storage, `stop` excluded."""

    name: str
    storage: Storage
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A storage whose bytes do not have the checksum that the file records."""

    name: str
    expected: int
    found: int


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Summary):
    """What `verify` found.

    Attributes:
        path: the checkpoint.
        checked: identities of the storages whose checksum was recomputed.
        unchecked: identities of the storages for which the file records none.
        failed: the storages of `checked` whose bytes are wrong.
        nbytes: bytes whose checksum was recomputed.
        unchecked_nbytes: bytes of `unchecked`.
    """

    path: str
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    failed: tuple[Failure, ...]
    nbytes: int = 0
    unchecked_nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Return whether every checksum that there is agrees with the bytes."""
        return not self.failed

    def _summary(self) -> tuple[str, Facts]:
        checked, unchecked = len(self.checked), len(self.unchecked)
        verdict = "every checksum is right" if checked else "nothing is wrong with its structure"
        if self.failed:
            verdict = f"damaged: {len(self.failed):,} of {count_of(checked, 'checksum')} wrong"
        facts: Facts = []
        if checked or not unchecked:
            facts.append(("checked", f"{count_of(checked, 'storage')}, {human(self.nbytes)}"))
        if unchecked:
            size = f"{count_of(unchecked, 'storage')}, {human(self.unchecked_nbytes)}"
            facts.append(("not checked", f"{size}: the file records no checksum of these bytes"))
        for item in self.failed:
            sums = f"expected crc32 {item.expected:08x}, found {item.found:08x}"
            facts.append((printable(item.name, 300), sums))
        return f"{self.path}: {verdict}", facts


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check a checkpoint's structure and recompute every checksum it records.

    torch's zip format stores a CRC-32 per storage, which torch itself never reads back; what
    torchlift writes has them in safetensors, too. Other safetensors and torch files from before 1.6
    store none, so there only the structure is checked.

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
    return verify_index(read_index(path))


def verify_index(index: Index, advance: Callable[[int], object] | None = None) -> VerifyReport:
    """Verify the checkpoint of an index that is already at hand; see `verify`.

    Args:
        index: of the checkpoint.
        advance: called with a number of bytes as they are checked, from the calling thread.
    """
    with_sum = {name: s for name, s in index.storages.items() if s.crc32 is not None}
    sums: dict[str, list[int]] = {name: [] for name in with_sum}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in pool.map(partial(_crc32, index), _batches(with_sum)):
            for name, _, value in done:
                sums[name].append(value)
            if advance is not None:
                advance(sum(nbytes for _, nbytes, _ in done))
    failed = [
        Failure(name, storage.crc32 or 0, found)
        for name, storage in with_sum.items()
        if storage.crc32 != (found := whole_crc(storage.nbytes, sums[name]))
    ]
    unchecked = tuple(name for name in index.storages if name not in with_sum)
    nbytes = sum(storage.nbytes for storage in with_sum.values())
    return VerifyReport(
        index.path, tuple(with_sum), unchecked, tuple(failed), nbytes, index.nbytes - nbytes
    )


def _batches(storages: Mapping[str, Storage]) -> Iterator[list[_Range]]:
    """Yield work of about the same size: ranges of a large storage, or many small ones."""
    batch: list[_Range] = []
    room = _BATCH
    for name, storage in storages.items():
        start = 0
        while start < storage.nbytes or not start:
            stop = min(storage.nbytes, start + room)
            batch.append(_Range(name, storage, start, stop))
            room -= max(stop - start, 1)
            if room <= 0:
                yield batch
                batch, room = [], _BATCH
            start = max(stop, 1)
    if batch:
        yield batch


def _crc32(index: Index, batch: Sequence[_Range]) -> list[tuple[str, int, int]]:
    """Return the name, the bytes and the sum of each range; see `PartialCrc`."""
    found = []
    buffer = memoryview(bytearray(_BLOCK))
    for path, ranges in groupby(batch, key=lambda item: item.storage.file):
        try:
            index.files[path].check(path)
            with open(path, "rb", buffering=0) as file:
                # Of another file's bytes at these places, every sum would be wrong.
                index.files[path].check(path, file.fileno())
                for name, storage, start, stop in ranges:
                    crc, at = PartialCrc(storage.nbytes), start
                    file.seek(storage.offset + start)
                    while at < stop:
                        got = file.readinto(buffer[: stop - at])
                        if not got:
                            raise IntegrityError("the file ends early", file=path)
                        crc.add(at, buffer[:got])
                        at += got
                    found.append((name, stop - start, crc.value()))
        except OSError as error:
            raise IntegrityError(
                f"reading failed ({error.strerror})", file=path, hint="Check the disk."
            ) from error
    return found

"""Recompute every checksum that a checkpoint has. Standard library only."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torchlift._system import printable
from torchlift.errors import IntegrityError
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index, Storage

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A storage whose bytes do not have the checksum that the file records."""

    name: str
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: the checkpoint.
        checked: identities of the storages whose checksum was recomputed.
        unchecked: identities of the storages for which the file records none.
        failed: the storages of `checked` whose bytes are wrong.
    """

    path: str
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    failed: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """Return whether every checksum that there is agrees with the bytes."""
        return not self.failed

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {len(self.checked) - len(self.failed)} storages good, "
            f"{len(self.failed)} bad, {len(self.unchecked)} without a checksum"
        ]
        lines += [
            f"  {item.name}: expected crc32 {item.expected:08x}, found {item.found:08x}"
            for item in self.failed
        ]
        return "\n".join(printable(line, 1000) for line in lines)


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check a checkpoint's structure and recompute every checksum it records.

    torch's zip format stores a CRC-32 per storage, which torch itself never reads back. safetensors
    stores none, so there only the structure is checked.

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


def verify_index(index: Index) -> VerifyReport:
    """Verify the checkpoint of an index that is already at hand; see `verify`."""
    with_sum = {name: s for name, s in index.storages.items() if s.crc32 is not None}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        sums = pool.map(lambda storage: _crc32(storage, index), with_sum.values())
        failed = [
            Failure(name, storage.crc32 or 0, found)
            for (name, storage), found in zip(with_sum.items(), sums, strict=True)
            if storage.crc32 != found
        ]
    unchecked = tuple(name for name in index.storages if name not in with_sum)
    return VerifyReport(index.path, tuple(with_sum), unchecked, tuple(failed))


def _crc32(storage: Storage, index: Index) -> int:
    value, left = 0, storage.nbytes
    try:
        with open(storage.file, "rb", buffering=0) as file:
            # Of another file's bytes at these places, every sum would be wrong.
            index.files[storage.file].check(storage.file, file.fileno())
            file.seek(storage.offset)
            while left:
                block = file.read(min(left, _BLOCK))
                if not block:
                    raise IntegrityError("the file ends early", file=storage.file)
                value = zlib.crc32(block, value)
                left -= len(block)
    except OSError as error:
        raise IntegrityError(
            f"reading failed ({error.strerror})", file=storage.file, hint="Check the disk."
        ) from error
    return value

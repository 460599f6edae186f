"""The layout of a torch file: the zip archive that ``torch.save`` would write.

Not only torch's reader counts on it: ``torch.load`` can be told to compute where a storage lies
instead of looking (``torch.utils.serialization.config.load.calculate_storage_offsets``), and then
counts on every padding and every descriptor that miniz, torch's writer, makes
(caffe2/serialize/inline_container.cc, third_party/miniz).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torchlift.formats.layout import Layout, Payload, Stored
from torchlift.formats.zip_directory import END, END64, END64_LOCATOR, FULL16, FULL32

#: The top directory. torch takes the name of the file, which may change later, or this word.
_TOP = "archive/"
_ALIGNMENT = 64
_NO_DATE = 33 << 16  # 1980-01-01, which zip counts from; in a local header torch leaves it out
_SERIALIZATION_ID = ".data/serialization_id"
_ID_DIGITS = 40
_HAS_DESCRIPTOR, _UTF8 = 0x8, 0x800

_LOCAL = struct.Struct("<4sHHHIIIIHH")
_CENTRAL = struct.Struct("<4sHHHHIIIIHHHHHII")


@dataclass(frozen=True, slots=True)
class _Record:
    """A file inside the archive."""

    name: bytes
    header: int
    nbytes: int
    data: bytes | None  # None: a payload, which others write

    @property
    def is_large(self) -> bool:
        """Whether a number of it does not fit in 32 bits."""
        return self.nbytes >= FULL32 or self.header >= FULL32

    @property
    def extra(self) -> bytes:
        """The extra field: numbers that did not fit, then as much padding as aligns the payload."""
        wide = _wide_field(self.nbytes, self.header) if self.is_large else b""
        start = self.header + _LOCAL.size + len(self.name) + len(wide) + 4
        padding = -start % _ALIGNMENT
        return wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding

    @property
    def start(self) -> int:
        """The first byte of the payload."""
        return self.header + _LOCAL.size + len(self.name) + len(self.extra)

    @property
    def stop(self) -> int:
        """The first byte behind the record."""
        descriptor = 0 if not self.nbytes else 24 if self.is_large else 16
        return self.start + self.nbytes + descriptor

    @property
    def flags(self) -> int:
        """Bits of the headers."""
        return _UTF8 | (_HAS_DESCRIPTOR if self.nbytes else 0)

    def local_header(self) -> bytes:
        """What stands before the payload."""
        fields = (b"PK\x03\x04", 0, self.flags, 0, 0, 0, 0, 0, len(self.name), len(self.extra))
        return _LOCAL.pack(*fields) + self.name + self.extra

    def descriptor(self, crc: int) -> bytes:
        """What stands behind it."""
        if not self.nbytes:
            return b""
        form = "<4sIQQ" if self.is_large else "<4sIII"
        return struct.pack(form, b"PK\x07\x08", crc, self.nbytes, self.nbytes)

    def central_header(self, crc: int) -> bytes:
        """What the directory says."""
        wide = _wide_field(self.nbytes, self.header) if self.is_large else b""
        size, header = min(self.nbytes, FULL32), min(self.header, FULL32)
        fields = (0, 0, self.flags, 0, 0, crc, size, size, len(self.name), len(wide))
        return _CENTRAL.pack(b"PK\x01\x02", *fields, 0, 0, 0, 0, header) + self.name + wide


def torch_zip_layout(tensors: Sequence[Stored], pickled: bytes | int) -> Layout:
    """Lay out a torch file.

    Args:
        tensors: one for each storage: the first has the key ``"0"`` in the pickle, and so on.
        pickled: the ``data.pkl``, see `torch_pickle`; or its length in bytes, where only the
            offsets are wanted and not the frame.

    Example:
        >>> layout = torch_zip_layout([Stored("w", "float32", (3,))], 100)
        >>> layout.payloads[0].offset, layout.nbytes
        (640, 1513)
    """
    length = pickled if isinstance(pickled, int) else len(pickled)
    before: list[tuple[str, int, bytes | None]] = [
        ("data.pkl", length, None if isinstance(pickled, int) else pickled),
        (".format_version", 1, b"1"),
        (".storage_alignment", 2, str(_ALIGNMENT).encode()),
        ("byteorder", 6, b"little"),
    ]
    stored = [(f"data/{number}", tensor.nbytes, None) for number, tensor in enumerate(tensors)]
    after = [("version", 2, b"3\n"), (_SERIALIZATION_ID, _ID_DIGITS, None)]
    records, at = [], 0
    for name, nbytes, data in (*before, *stored, *after):
        records.append(_Record((_TOP + name).encode(), at, nbytes, data))
        at = records[-1].stop
    first, last = len(before), len(before) + len(stored)
    payloads = map(Payload, tensors, (record.start for record in records[first:last]))
    end = sum(len(record.central_header(0)) for record in records)
    end += at + END64.size + END64_LOCATOR.size + END.size
    return Layout(end, tuple(payloads), True, partial(_frame, records, first))


def _frame(records: list[_Record], first: int, sums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Everything between the payloads, and the directory, given the payloads' CRC-32s."""
    # Two files with equal bytes get equal names, and nothing random is in a file.
    identity = hashlib.sha256(struct.pack(f"<{len(sums)}I", *sums))
    for record in records:
        identity.update(record.name + (record.data or b""))
    digits = str(int.from_bytes(identity.digest(), "little") % 10**_ID_DIGITS).zfill(_ID_DIGITS)
    directory, pending, at = bytearray(), bytearray(), 0
    for number, record in enumerate(records):
        pending += record.local_header()
        if first <= number < first + len(sums):
            crc = sums[number - first]
            yield at, bytes(pending)
            pending.clear()
            at = record.start + record.nbytes
        else:
            is_last = number == len(records) - 1
            data = digits.encode() if is_last else record.data
            assert data is not None
            crc = zlib.crc32(data)
            pending += data
        pending += record.descriptor(crc)
        directory += record.central_header(crc)
    yield at, bytes(pending + directory + _end(len(records), records[-1].stop, len(directory)))


def _end(count: int, start: int, nbytes: int) -> bytes:
    """The three records that say where the directory is; torch always writes all of them."""
    end64 = start + nbytes
    few, small, near = min(count, FULL16), min(nbytes, FULL32), min(start, FULL32)
    return (
        END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, nbytes, start)
        + END64_LOCATOR.pack(b"PK\x06\x07", 0, end64, 1)
        + END.pack(b"PK\x05\x06", 0, 0, few, few, small, near, 0)
    )


def _wide_field(nbytes: int, header: int) -> bytes:
    """The zip64 extra field: those of (size, size, offset) that do not fit in 32 bits."""
    numbers = [nbytes, nbytes] if nbytes >= FULL32 else []
    numbers += [header] if header >= FULL32 else []
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)

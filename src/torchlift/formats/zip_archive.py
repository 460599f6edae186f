"""The central directory of a zip archive: record name -> where its bytes are.

Written for archives of 100,000 records that nobody vouches for. The standard library's ``zipfile``
makes an object of thirty fields per record, keeps the last of two records with one name where torch
keeps the first, and does not say where a payload starts. Layout: PKWARE APPNOTE 6.3, sections 4.3
and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from torchlift.errors import FormatError
from torchlift.formats.source import Source, Window

STORED, DEFLATED = 0, 8

END = struct.Struct("<4sHHHHIIH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL = struct.Struct("<4s2xHH4x12xHH")
FULL32, FULL16 = 0xFFFFFFFF, 0xFFFF
_ENCRYPTED = 0x1 | 0x40 | 0x2000

#: Bytes read at once while headers lie close together: one read of a window is cheaper than the
#: hundreds of small ones it replaces, and a descriptor, unlike a mapping, cannot raise SIGBUS.
_WINDOW = 1 << 20
_DENSE = 1 << 14


class Record(NamedTuple):
    """One file inside the archive.

    Attributes:
        name: its name, top directory included.
        offset: first payload byte in the archive file.
        nbytes: payload bytes in the archive, compressed where `method` says so.
        size: bytes after decompression.
        crc32: checksum of the decompressed bytes; 0 means that none was written.
        method: `STORED`, `DEFLATED` or another compression number.
    """

    name: str
    offset: int
    nbytes: int
    size: int
    crc32: int
    method: int


class _Raw(NamedTuple):
    """A central directory entry before its local header has been looked at."""

    header: int
    name: bytes
    nbytes: int
    size: int
    crc32: int
    method: int


def read_directory(source: Source | Window) -> dict[str, Record]:
    """Read every record of a zip archive, in directory order.

    Returns:
        Record name -> record. Payload offsets come from each record's local header, because its
        padding differs from the one in the directory.

    Raises:
        FormatError: damaged, truncated, encrypted, split over disks, or records that share a name,
            overlap, or reach outside the archive.
    """
    count, start, nbytes = _find_directory(source)
    raw = _parse(source.read(start, nbytes), count)
    offsets = _payload_offsets(source, raw, start)
    records = {}
    for item, offset in zip(raw, offsets, strict=True):
        name = item.name.decode("utf-8")
        if name in records:
            raise FormatError(
                "two records have this name",
                entry=name,
                hint="Programs disagree on which of the two counts; write the file again.",
            )
        records[name] = Record(name, offset, item.nbytes, item.size, item.crc32, item.method)
    return records


def read_record(source: Source | Window, record: Record, limit: int) -> bytes:
    """Read one record whole, inflate it if necessary, and check its CRC32 where one was written.

    Args:
        source: the archive.
        record: what to read.
        limit: most bytes to accept, before and after decompression.

    Raises:
        FormatError: larger than `limit`, damaged, or compressed in an unknown way.
    """
    if max(record.size, record.nbytes) > limit:
        raise FormatError(
            "a record is too large to be read",
            entry=record.name,
            expected=f"at most {limit} bytes",
            found=f"{max(record.size, record.nbytes)} bytes",
        )
    data: bytes = source.read(record.offset, record.nbytes, record.name)
    if record.method == DEFLATED:
        data = _inflate(data, record)
    elif record.method != STORED:
        raise FormatError(
            "a record is compressed in an unknown way",
            entry=record.name,
            expected=f"method {STORED} or {DEFLATED}",
            found=f"method {record.method}",
        )
    if record.crc32 and zlib.crc32(data) != record.crc32:
        raise FormatError(
            "a record's CRC32 does not match its bytes",
            entry=record.name,
            expected=f"{record.crc32:#010x}",
            found=f"{zlib.crc32(data):#010x}",
            hint="The file was damaged after it was written; fetch it again.",
        )
    return data


def _inflate(data: bytes, record: Record) -> bytes:
    """Inflate raw deflate data that must give exactly `record.size` bytes."""
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    # The declared size is the cap, so a bomb costs one byte more than it admits to.
    result = engine.decompress(data, record.size + 1)
    if len(result) != record.size or not engine.eof:
        raise FormatError(
            "a compressed record does not have the size its header declares",
            entry=record.name,
            expected=f"{record.size} bytes",
            found=f"{len(result)}{'' if engine.eof else ' or more'} bytes",
        )
    return result


def _find_directory(source: Source | Window) -> tuple[int, int, int]:
    """Locate the central directory: (number of records, first byte, length in bytes)."""
    tail_start = max(0, source.size - END.size - FULL16)
    tail = source.read(tail_start, source.size - tail_start)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if len(tail) - at >= END.size:
            comment = END.unpack_from(tail, at)[-1]
            if at + END.size + comment == len(tail):
                break
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if at < 0:
        raise FormatError(
            "a zip archive without its directory",
            expected="an end-of-directory record in the last 64 KiB",
            found="none",
            hint="The file is truncated: an interrupted save or download. Fetch it again.",
        )
    _, disk, disk_start, _, count, nbytes, start, _ = END.unpack_from(tail, at)
    position = tail_start + at
    limit = position
    if FULL16 in (count, disk, disk_start) or FULL32 in (nbytes, start):
        count, nbytes, start, disk, disk_start, limit = _find_directory64(source, position)
    if disk or disk_start:
        raise FormatError("a zip archive split over several files", hint="Join the parts first.")
    if start + nbytes > limit or count * _CENTRAL.size > nbytes:
        raise FormatError(
            "the archive's directory does not fit in the file",
            expected=f"{count} records in the {limit} bytes before the end record",
            found=f"a directory of {nbytes} bytes at byte {start}",
        )
    return count, start, nbytes


def _find_directory64(source: Source | Window, end: int) -> tuple[int, int, int, int, int, int]:
    """The same from the zip64 end record, plus disk numbers and where the record starts."""
    at = end - END64_LOCATOR.size
    magic, disk, position, _ = END64_LOCATOR.unpack(
        source.read(at, END64_LOCATOR.size, "zip64 locator")
    )
    if magic != b"PK\x06\x07" or position > at:
        raise FormatError("a large zip archive without its zip64 locator")
    fields = END64.unpack(source.read(position, END64.size, "zip64 end record"))
    if fields[0] != b"PK\x06\x06":
        raise FormatError("a large zip archive without its zip64 end record")
    _, _, _, _, disk, disk_start, _, count, nbytes, start = fields
    return count, nbytes, start, disk, disk_start, position


def _parse(directory: bytes, count: int) -> list[_Raw]:
    """Split the central directory into its entries."""
    unpack, fixed = _CENTRAL.unpack_from, _CENTRAL.size
    records: list[_Raw] = []
    at = 0
    for _ in range(count):
        magic, flags, method, crc, nbytes, size, n_name, n_extra, n_comment, header = unpack(
            directory, at
        )
        name = directory[at + fixed : at + fixed + n_name]
        extra = at + fixed + n_name
        at = extra + n_extra + n_comment
        if magic != b"PK\x01\x02" or at > len(directory):
            raise FormatError("the archive's directory is damaged", found=f"record {len(records)}")
        if flags & _ENCRYPTED:
            raise FormatError("an encrypted record", entry=name.decode("utf-8", "replace"))
        if nbytes == FULL32 or size == FULL32 or header == FULL32:
            size, nbytes, header = _widen(
                directory[extra : extra + n_extra], size, nbytes, header, name
            )
        records.append(_Raw(header, name, nbytes, size, crc, method))
    if at != len(directory):
        raise FormatError(
            "the archive's directory has bytes that no record accounts for",
            expected=f"{len(directory)} bytes",
            found=f"{at} bytes in {count} records",
        )
    return records


def _widen(extra: bytes, size: int, nbytes: int, header: int, name: bytes) -> tuple[int, int, int]:
    """Replace 32-bit fields that are full by the 64-bit ones of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            # The extra field holds only those values that did not fit, in this order.
            values = [next(wide, -1) if v == FULL32 else v for v in (size, nbytes, header)]
            if -1 not in values:
                return values[0], values[1], values[2]
            break
        at += 4 + length
    raise FormatError(
        "a large record lacks its 64-bit sizes", entry=name.decode("utf-8", "replace")
    )


def _payload_offsets(source: Source | Window, records: list[_Raw], limit: int) -> list[int]:
    """First payload byte of each record, from local headers; checks that nothing overlaps."""
    order = sorted(range(len(records)), key=lambda i: records[i].header)
    offsets = [0] * len(records)
    read_header = _header_reader(source, len(records), limit)
    unpack, fixed = _LOCAL.unpack_from, _LOCAL.size
    previous_end = 0
    for i in order:
        header, name, nbytes, size, _, method = records[i]
        buffer, at = read_header(header, fixed + len(name), name)
        magic, flags, local_method, n_name, n_extra = unpack(buffer, at)
        payload = header + fixed + n_name + n_extra
        problem = None
        if magic != b"PK\x03\x04" or buffer[at + fixed : at + fixed + n_name] != name:
            problem = "a record's own header is damaged or names another record"
        elif header < previous_end:
            problem = "two records overlap"
        elif payload + nbytes > limit:
            problem = "a record reaches outside the archive"
        elif flags & _ENCRYPTED:
            problem = "an encrypted record"
        elif local_method != method or (method == STORED and nbytes != size):
            problem = "a record's headers disagree about its compression"
        if problem is not None:
            raise FormatError(problem, entry=name.decode("utf-8", "replace"))
        previous_end = payload + nbytes
        offsets[i] = payload
    return offsets


def _header_reader(
    source: Source | Window, count: int, limit: int
) -> Callable[[int, int, bytes], tuple[bytes, int]]:
    """A function (position, length, name) -> (buffer, index in it), buffered when that pays."""
    window = _WINDOW if count and limit // count < _DENSE else 0
    buffer, start = b"", 0

    def read(position: int, nbytes: int, name: bytes) -> tuple[bytes, int]:
        nonlocal buffer, start
        at = position - start
        if at < 0 or at + nbytes > len(buffer):
            if position + nbytes > limit:
                raise FormatError(
                    "a record's header lies outside the archive",
                    entry=name.decode("utf-8", "replace"),
                )
            buffer = source.read(position, min(max(nbytes, window), limit - position))
            start, at = position, 0
        return buffer, at

    return read

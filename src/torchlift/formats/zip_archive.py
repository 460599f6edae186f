"""Zip archives: read the directory (record name -> where its bytes are), and records.

The standard library's ``zipfile`` is not enough. It does not say where a payload starts. It keeps
the last of two records with one name, but torch keeps the first. It makes an object of thirty
fields per record. Layout: PKWARE APPNOTE 6.3, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from torchlift.errors import FormatError
from torchlift.formats.index import ENCRYPTED, LOCAL, LOCAL_MAGIC, Index, Record
from torchlift.formats.source import Source
from torchlift.formats.table import (
    ARCHIVES,
    NAMED_ARCHIVES,
    NAMED_FOLDERS,
    PROGRAMS,
    load,
    refuse_named,
)

STORED, DEFLATED = 0, 8

CENTRAL_MAGIC, DESCRIPTOR_MAGIC = b"PK\x01\x02", b"PK\x07\x08"
END_MAGIC, LOCATOR64_MAGIC, END64_MAGIC = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"

#: A header in the directory: magic, flags, method, CRC, size packed, size, lengths of name, extra
#: field and comment, attributes, position. Fields that torch does not use are padding.
CENTRAL = struct.Struct("<4s4xHH4xIIIHHH4xII")
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
END = struct.Struct("<4sHHHHIIH")
LOCATOR64 = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
FULL32, FULL16 = 0xFFFFFFFF, 0xFFFF
#: Position of the CRC-32 in a record's descriptor, and in its header in the directory.
CRC, CRC_IN_DESCRIPTOR, CRC_IN_HEADER = struct.Struct("<I"), 4, 16
#: The flag of a descriptor after the payload.
_DESCRIBED = 0x8
#: The attribute of a folder. torch leaves the memory of such a record unset, and reads that.
_FOLDER = 0x10
#: torch aligns payloads to this many bytes, or to the second number if a program requests it.
_ALIGNMENT, _MOST_ALIGNED = 64, 4096

#: Bytes to fetch from a URL: before the directory, of an extra field, after a pickle (for torch's
#: notes), at the end of an item.
_LAST, _LONG, _NOTES, _TAIL = 1 << 14, 1 << 9, 1 << 10, 1 << 10

#: Most bytes of a record that describes others, such as a pickle.
_MAX_RECORD = 1 << 30
#: Bytes to inflate at a time, and most bytes that one compressed byte can become.
_STEP, _MOST_DEFLATED = 1 << 18, 1032

_DAMAGED = "The file was damaged after it was written. Fetch it again."


def read_directory(source: Source) -> dict[str, Record]:
    """Read every record of a zip archive, in the order of their bytes.

    If two readers disagree about an archive, a file can show another content to each of them.
    Therefore this function refuses every archive that torch would read differently. torch's reader
    takes the last end record, whatever the length of its comment is. It takes a zip64 record if
    there is one, and ignores the case of ASCII letters in names (pytorch/pytorch,
    third_party/miniz-3.0.2/miniz.c).

    A request for each header at a URL would make 3,000 requests of an archive of 3,000 tensors.
    There a header is read only if its neighbours do not give the place of its payload.

    Returns:
        Name -> record. Payload offsets come from the local headers, because the directory has
        another padding.

    Raises:
        FormatError: If the archive is damaged, truncated, encrypted or split over disks, or if
            records share a name, overlap, or reach outside the archive.
    """
    place = _find_directory(source)
    # At a URL, the last records are fetched with it: the version, and the code of a program.
    if not source.start:
        source.expect([(place.start - _LAST, place.start + place.nbytes)])
    directory = source.read(place.start, place.nbytes)
    # A directory may list them in another order than that of their bytes.
    described: set[str] = set()
    records_of = _listed(directory, place.records, described)
    listed = sorted(records_of, key=attrgetter("offset"))
    if listed and listed[0].offset:
        what, hint = "there are bytes before the first record", "Remove these bytes."
        raise FormatError(what, entry=listed[0].name, hint=hint)
    stops = [*(each.offset for each in listed[1:]), place.start]
    starts: list[int | None] = [None] * len(listed)
    if source.is_remote:
        # Only a descriptor after a payload shows where it ends. torch writes one, zip does not.
        starts = [
            _foreseen(each, stop) if each.name in described else None
            for each, stop in zip(listed, stops, strict=False)
        ]
        unsure = [each for each, start in zip(listed, starts, strict=True) if start is None]
        sizes = [LOCAL.size + len(each.name.encode()) + _LONG for each in unsure]
        source.expect((e.offset, e.offset + n) for e, n in zip(unsure, sizes, strict=True))
    records: dict[str, Record] = {}
    end = 0
    for each, start in zip(listed, starts, strict=True):
        begin = _read_header(source, each) if start is None else start
        # Overlapping records can make a small file inflate to many times its size.
        if each.offset < end:
            raise FormatError("two records overlap", entry=each.name)
        end = begin + each.nbytes
        if end > place.start:
            raise FormatError("a record reaches outside the archive", entry=each.name)
        if each.name in records:
            raise _twice(each.name)
        records[each.name] = each._replace(offset=begin)
    return records


def checksum_places(source: Source) -> dict[str, int]:
    """Return the place of each record's CRC-32 in the directory of an archive that was read."""
    place = _find_directory(source)
    listed = headers(source.read(place.start, place.nbytes), 0, place.nbytes)
    return {name.decode(): place.start + at + CRC_IN_HEADER for at, name, _ in listed}


def headers(directory: bytes | bytearray, at: int, stop: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield (position, name, size) of each header in a directory that was checked or just made."""
    while at < stop:
        *_, size, n_name, n_extra, n_comment, _, _ = CENTRAL.unpack_from(directory, at)
        name = at + CENTRAL.size
        yield at, bytes(directory[name : name + n_name]), size
        at = name + n_name + n_extra + n_comment


def read_archive(source: Source) -> Index:
    """Read a zip archive, whose records decide on its format."""
    records = read_directory(source)
    first = next(iter(records), "")
    top = first[: first.find("/") + 1]  # torch's archives have one folder
    if f"{top}archive_format" in records or "serialized_exported_program.json" in records:
        refuse_named(records, PROGRAMS)
    for row in ARCHIVES:
        if row.is_one(records):
            return load(row.reader)(source, records)
    refuse_named(records, [*PROGRAMS, *NAMED_FOLDERS, *NAMED_ARCHIVES])
    names = {name.rpartition("/")[2].lower() for name in records}
    if "serialization_id" in names and "data.pkl" not in names:
        raise FormatError(
            "data.pkl is missing: the torch.save that wrote this file raised an error",
            hint="Save again. The error names the object that torch.save cannot write.",
        )
    return load(ARCHIVES[0].reader)(source, records)  # raises the error that names what is missing


def _foreseen(listed: Record, stop: int) -> int | None:
    """Return the first byte of a payload if both neighbours give the same place, else None.

    The payload begins after its own header, which torch pads to the alignment. It ends at the next
    header, after a descriptor. ``torch.load`` relies on both if
    ``torch.utils.serialization.config.load.calculate_storage_offsets`` is set.
    """
    numbers = 2 * (listed.nbytes >= FULL32) + (listed.offset >= FULL32)  # that exceed 32 bits
    wide = 4 + 8 * numbers if numbers else 0
    least = listed.offset + LOCAL.size + len(listed.name.encode()) + wide + 4
    descriptor = _WIDE_DESCRIPTOR if numbers else _DESCRIPTOR
    start = stop - listed.nbytes - (descriptor.size if listed.nbytes else 0)
    return None if start % _ALIGNMENT or not least <= start < least + _MOST_ALIGNED else start


def _read_header(source: Source, listed: Record) -> int:
    """Return the first byte of a payload by the local header, which must match the directory."""
    name = listed.name.encode()
    header = source.read(listed.offset, LOCAL.size + len(name), listed.name)
    magic, flags, method, n_name, n_extra = LOCAL.unpack_from(header)
    # Some programs read the directory, others the local header: both must agree.
    found = magic, n_name, header[LOCAL.size :], method, flags & ENCRYPTED
    if found != (LOCAL_MAGIC, len(name), name, listed.method, 0):
        what = "the header of a record is damaged or names another record"
        raise FormatError(what, entry=listed.name)
    # The local extra field is padding, which differs from the one in the directory.
    return listed.offset + len(header) + int(n_extra)


def expect_records(source: Source, records: Iterable[Record]) -> None:
    """Fetch records of a URL in parallel, because they are needed next."""
    if source.is_remote:
        source.expect((one.offset, one.offset + one.nbytes + _NOTES) for one in records)


def require_caseless(records: Mapping[str, Record]) -> None:
    """Refuse records whose names differ only in case. torch would read the first one for both.

    Raises:
        FormatError: If there are such records.
    """
    text = "".join(records)
    if text != text.lower() and len(small := Counter(map(str.lower, records))) < len(records):
        raise _twice(next(name for name in records if small[name.lower()] > 1))


def _twice(name: str) -> FormatError:
    return FormatError(
        "two records have the same name, capital letters aside",
        entry=name,
        hint="Programs disagree on which one counts. Write the file again.",
    )


def read_record(source: Source, record: Record, limit: int = _MAX_RECORD) -> bytes:
    """Read a whole stored record, and check its CRC-32 if it has one.

    Args:
        source: The archive.
        record: The record.
        limit: Most bytes to accept.

    Raises:
        FormatError: If it is larger than `limit`, or damaged.
    """
    if record.nbytes > limit:
        raise FormatError(
            "a record is too large",
            entry=record.name,
            expected=f"at most {limit} bytes",
            found=f"{record.nbytes} bytes",
        )
    data = source.read(record.offset, record.nbytes, record.name)
    _check_sum(record, zlib.crc32(data))
    return data


def _check_method(record: Record) -> None:
    """Refuse a record that is neither stored nor deflated, or whose sizes are impossible."""
    if record.method not in (STORED, DEFLATED):
        raise FormatError(
            "a record is compressed in an unknown way",
            entry=record.name,
            expected=f"method {STORED} or {DEFLATED}",
            found=f"method {record.method}",
            hint="Unpack the archive and pack it again without compression.",
        )
    most = record.nbytes * (_MOST_DEFLATED if record.method == DEFLATED else 1)
    if record.size > most or (record.method == STORED and record.size != record.nbytes):
        raise FormatError(
            "the two sizes of a record contradict each other",
            entry=record.name,
            expected=f"at most {most} bytes in {record.nbytes}",
            found=f"{record.size} bytes",
        )


def inflated(
    read: Callable[[int, int], bytes], record: Record, step: int = _STEP
) -> Iterator[bytes]:
    """Yield the content of a deflated record in blocks. Check its size and sum at the end.

    Args:
        read: (first byte, number of bytes) -> bytes of the file.
        record: The record. A bomb inflates to at most one byte more than its header declares.
        step: Most bytes of a block.

    Raises:
        FormatError: If it is damaged, or its size differs from its header.
    """
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    at, made, crc, data = 0, 0, 0, b""
    while not engine.eof and made <= record.size:
        if not data:
            data = read(record.offset + at, min(step, record.nbytes - at))
            at += len(data)
        try:
            # Output may remain after all input was consumed.
            block = engine.decompress(data, min(step, record.size - made + 1))
            if not data and not block:
                break
        except zlib.error as error:
            raise FormatError(
                "a compressed record is damaged",
                entry=record.name,
                found=str(error),
                hint=_DAMAGED,
            ) from error
        data = engine.unconsumed_tail
        made, crc = made + len(block), zlib.crc32(block, crc)
        if made <= record.size:
            yield block
    if made != record.size or not engine.eof:
        raise FormatError(
            "a compressed record does not have the size its header declares",
            entry=record.name,
            expected=f"{record.size} bytes",
            found=f"{made}{'' if engine.eof else ' or more'} bytes",
        )
    _check_sum(record, crc)


def _check_sum(record: Record, found: int) -> None:
    if record.crc32 and found != record.crc32:
        raise FormatError(
            "the CRC-32 of a record does not match its bytes",
            entry=record.name,
            expected=f"{record.crc32:#010x}",
            found=f"{found:#010x}",
            hint=_DAMAGED,
        )


class _Directory(NamedTuple):
    """The place of the directory: number of records, first byte, length in bytes."""

    records: int
    start: int
    nbytes: int


def _find_directory(source: Source) -> _Directory:
    """Locate the directory by the end records, which must agree."""
    # An item of a DCP file rarely has a comment: its last bytes are enough.
    short = [_TAIL] if source.start else []
    for nbytes in (*short, END.size + FULL16):
        tail_start = max(0, source.size - nbytes)
        tail = source.read(tail_start, source.size - tail_start)
        # The last signature with room for a record after it, as torch's reader takes it.
        at = tail.rfind(END_MAGIC, 0, max(0, len(tail) - END.size + len(END_MAGIC)))
        if at >= 0:
            break
    if at < 0:
        raise FormatError(
            "the zip archive lacks its directory",
            expected="an end-of-directory record in the last 64 KiB",
            found="none",
            hint="The file is truncated: an interrupted save or download. Fetch it again.",
        )
    *numbers, comment = END.unpack_from(tail, at)[1:]
    if comment != len(tail) - at - END.size:
        raise FormatError(
            "the zip archive does not end with its end record",
            expected=f"a comment of {len(tail) - at - END.size} bytes behind it",
            found=f"a declared comment of {comment} bytes",
            hint="The end of the file was changed, and programs disagree on what is in "
            "such a file. Fetch it again.",
        )
    limit = tail_start + at
    # torch reads the zip64 record whenever its locator exists, so both records must agree.
    at = max(0, limit - LOCATOR64.size)
    locator = source.read(at, limit - at)
    magic, wide, last = END64_MAGIC, numbers, limit
    if locator.startswith(LOCATOR64_MAGIC) and len(locator) == LOCATOR64.size:
        last, limit = at, LOCATOR64.unpack(locator)[2]
        magic, _, _, _, *wide = END64.unpack(source.read(limit, END64.size, "zip64 end record"))
    full = [FULL16] * 4 + [FULL32] * 2
    agree = all(a in (b, most) for a, b, most in zip(numbers, wide, full, strict=True))
    if magic != END64_MAGIC or limit > last or not agree:
        raise _directory_error("two end records that do not agree")
    disk, first_disk, here, count, nbytes, start = wide
    # Numbers that do not fit would make a reader skip records or read beyond the directory.
    if (disk, first_disk, here) != (0, 0, count) or start + nbytes > limit:
        found = f"{here} of {count} records on disk {disk}, in {nbytes} bytes at byte {start}"
        raise _directory_error(f"{found}, before an end record at byte {limit}")
    return _Directory(count, start, nbytes)


def _directory_error(found: str) -> FormatError:
    return FormatError("the directory of the archive is damaged", found=found, hint=_DAMAGED)


def _listed(directory: bytes, count: int, described: set[str]) -> Iterator[Record]:
    """Split the directory. The offset of a record is that of its local header.

    Args:
        directory: The bytes of the directory.
        count: The number of its records.
        described: Gets the names of the records with a descriptor after their payload.
    """
    at, stop = 0, len(directory)
    directory += bytes(CENTRAL.size)  # room for a last record that ends early: see the check below
    for number in range(count):
        (magic, flags, method, crc, packed, size, n_name, n_extra, n_comment, attributes, header,
        ) = CENTRAL.unpack_from(directory, at)  # fmt: skip
        extra = at + CENTRAL.size + n_name
        raw = directory[at + CENTRAL.size : extra]
        at = extra + n_extra + n_comment
        if magic != CENTRAL_MAGIC or at > stop:
            raise _directory_error(f"a damaged record {number}")
        name = raw.decode("utf-8", "replace")
        if name.encode() != raw or "\0" in name:
            what = "the name of a record is not UTF-8, or contains a zero byte"
            raise FormatError(what, entry=name)
        if flags & ENCRYPTED:
            raise FormatError("a record is encrypted", entry=name)
        if attributes & _FOLDER:
            raise FormatError(
                "a record is a folder",
                entry=name,
                hint="Zip the folder again, without records of folders: zip -0 -r -D.",
            )
        if FULL32 in (packed, size, header):
            numbers = (size, packed, header)
            size, packed, header = _widened(numbers, directory[extra : extra + n_extra], name)
        if flags & _DESCRIBED:
            described.add(name)
        record = Record(name, header, packed, size, crc, method)
        _check_method(record)
        yield record
    if at != stop:
        raise _directory_error(f"{count} records in {at} of {stop} bytes")


def _widened(numbers: tuple[int, ...], extra: bytes, name: str) -> list[int]:
    """Replace 32-bit numbers of all ones by the 64-bit numbers of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            # The extra field holds only the values that did not fit, in this order.
            values = [next(wide, -1) if number == FULL32 else number for number in numbers]
            if -1 not in values:
                return values
            break
        at += 4 + length
    raise FormatError("a large record lacks its 64-bit sizes", entry=name)

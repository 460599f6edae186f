"""Zip archives: read the directory (record name -> where its bytes are), and records.

Written for archives of 100,000 records that nobody vouches for. The standard library's ``zipfile``
makes an object of thirty fields per record, keeps the last of two records with one name where torch
keeps the first, and does not say where a payload starts. Layout: PKWARE APPNOTE 6.3, sections 4.3
and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from torchlift.errors import FormatError
from torchlift.formats.index import ENCRYPTED, LOCAL, LOCAL_MAGIC, Record
from torchlift.formats.source import Source

STORED, DEFLATED = 0, 8

CENTRAL_MAGIC, DESCRIPTOR_MAGIC = b"PK\x01\x02", b"PK\x07\x08"
END_MAGIC, LOCATOR64_MAGIC, END64_MAGIC = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"

#: Fields that neither torch's writer nor torch's reader uses are padding: zeros.
#: Magic, flags, method, CRC, size packed, size, lengths of name, extra field, comment, attributes,
#: position.
CENTRAL = struct.Struct("<4s4xHH4xIIIHHH4xII")
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
END = struct.Struct("<4sHHHHIIH")
LOCATOR64 = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
FULL32, FULL16 = 0xFFFFFFFF, 0xFFFF
#: Of a folder, as MS-DOS marked it: torch then leaves its memory as it was, and reads that.
_FOLDER = 0x10
#: Of the payloads of new records, in bytes, as torch does it.
ALIGNMENT = 64

#: Bytes read at once while headers lie close together: one read of a window is cheaper than the
#: hundreds of small ones it replaces, and a descriptor, unlike a mapping, cannot raise SIGBUS.
_WINDOW = 1 << 20
_DENSE = 1 << 14

#: Of a URL: bytes before the directory that are read with it; of an extra field, read with its
#: header; behind a pickle, where torch's notes are. Most bytes of a number; those of an item's end.
_LAST, _LONG, _NOTES, _MAX_NUMBER, _TAIL = 1 << 14, 1 << 9, 1 << 10, 1 << 5, 1 << 10

#: Price of a byte that is inflated.
_INFLATED = 8
#: Bytes that are inflated, or read to be inflated, at a time; and most that a byte can become.
_STEP, _MOST_DEFLATED = 1 << 18, 1032

_DAMAGED = "The file was damaged after it was written. Fetch it again."


def read_directory(source: Source) -> dict[str, Record]:
    """Read every record of a zip archive, in the order of their bytes.

    Where readers of such archives disagree, a file can show each of them another content, so that
    what is looked at is not what is loaded. Whatever torch's reader and this one would see
    differently is refused (pytorch/pytorch, third_party/miniz-3.0.2/miniz.c: it takes the last end
    record whatever its comment's length says, a zip64 record whenever there is one, and compares
    names without regard to the case of ASCII letters).

    Returns:
        Record name -> record. Payload offsets come from each record's local header, because its
        padding differs from the one in the directory.

    Raises:
        FormatError: damaged, truncated, encrypted, split over disks, or records that share a name,
            overlap, or reach outside the archive.
    """
    count, limit, nbytes = _find_directory(source)
    # Of a URL, what torch writes last is read with it: the version, and of a program its code.
    if not source.start:
        source.expect([(limit - _LAST, limit + nbytes)])
    directory = source.read(limit, nbytes)
    if source.is_remote:
        return _computed(source, sorted(_entries(directory, count)), limit)
    # A directory may list them in another order than that of their bytes.
    return _located(source, sorted(_entries(directory, count)), count, limit)


def _computed(source: Source, entries: list[_Entry], limit: int) -> dict[str, Record]:
    """Compute where torch puts the payloads, and read a header only if its neighbours disagree.

    A request for each header would make 3,000 requests of an archive of 3,000 tensors. A payload
    begins behind its own header and ends where the next record begins. If both give one place, it
    stands, as in torch's ``torch.utils.serialization.config.load.calculate_storage_offsets``.
    """
    alignment, known = ALIGNMENT, dict[int, Record]()
    for _ in range(2):
        unsure = []
        stops = [*(entry[0] for entry in entries[1:]), limit]
        for entry, stop in zip(entries, stops, strict=True):
            header, raw, packed, size, crc, method = entry
            if header in known:
                continue
            start, end = _expected_place(raw, header, packed, alignment)
            if end == stop and (method != STORED or packed == size):
                record = Record(_text(raw), start, packed, size, crc, method)
                known[header] = record
            else:
                unsure.append((entry, stop))
        noted = [entry for entry, _ in unsure if entry[1].endswith(b"/.storage_alignment")]
        if alignment != ALIGNMENT or not noted:
            break
        _expect_headers(source, noted)
        (record,) = _located(source, noted[:1], 1, limit, first=0).values()
        text = read_record(source, record, _MAX_NUMBER)
        alignment = int(text) if text.isdigit() and 0 < int(text) < 1 << 30 else ALIGNMENT
    _expect_headers(source, [entry for entry, _ in unsure])
    if entries and entries[0][0]:
        _located(source, entries[:1], 1, limit)  # raises the error for bytes before it
    located = _located(source, [entry for entry, _ in unsure], 0, limit, first=0)
    for (entry, stop), record in zip(unsure, located.values(), strict=True):
        if record.offset + record.nbytes > stop:
            raise FormatError("two records overlap", entry=record.name)
        known[entry[0]] = record
    records: dict[str, Record] = {}
    for entry in entries:
        record = known[entry[0]]
        if record.name in records:
            raise _twice(record.name)
        if record.name.encode("utf-8", "replace") != entry[1]:
            raise FormatError("the name of a record is not UTF-8", entry=record.name)
        records[record.name] = record
    _check_names(records)
    return records


def _expect_headers(source: Source, entries: Iterable[_Entry]) -> None:
    source.expect((header, header + LOCAL.size + len(raw) + _LONG) for header, raw, *_ in entries)


def expect_records(source: Source, records: Iterable[Record]) -> None:
    """Read records of a URL that are needed next, all at once."""
    if source.is_remote:
        source.expect((one.offset, one.offset + one.nbytes + _NOTES) for one in records)


def _located(
    source: Source, entries: Iterable[_Entry], count: int, limit: int, first: int | None = None
) -> dict[str, Record]:
    """Read the headers of records that are in the order of their bytes."""
    window = _WINDOW if count and limit // count < _DENSE else 0
    buffer, start, previous_end = b"", 0, 0
    unpack, fixed = LOCAL.unpack_from, LOCAL.size
    records: dict[str, Record] = {}
    for header, raw, packed, size, crc, method in entries:
        at, length = header - start, fixed + len(raw)
        if at + length > len(buffer):
            if header and not records and first is None:
                what, hint = (
                    "there are bytes before the first record",
                    "Remove the bytes before the archive.",
                )
                raise FormatError(what, entry=_text(raw), hint=hint)
            if header + length > limit:
                raise FormatError(
                    "the header of a record lies outside the archive", entry=_text(raw)
                )
            buffer = source.read(header, min(max(length, window), limit - header))
            start, at = header, 0
        magic, flags, local_method, n_name, n_extra = unpack(buffer, at)
        payload = header + length + n_extra
        problem = None
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise FormatError("the name of a record is not UTF-8", entry=_text(raw)) from error
        if magic != LOCAL_MAGIC or n_name != len(raw) or not buffer.startswith(raw, at + fixed):
            problem = "the header of a record is damaged or names another record"
        elif header < previous_end:
            problem = "two records overlap"
        elif payload + packed > limit:
            problem = "a record reaches outside the archive"
        elif flags & ENCRYPTED:
            problem = "a record is encrypted"
        elif local_method != method or (method == STORED and packed != size):
            problem = "the two headers of a record disagree about its compression"
        if problem is not None:
            raise FormatError(problem, entry=name)
        previous_end = payload + packed
        if name in records:
            raise _twice(name)
        records[name] = Record(name, payload, packed, size, crc, method)
    _check_names(records)
    return records


def _check_names(records: Mapping[str, Record]) -> None:
    """Refuse names that programs read differently."""
    text = "".join(records)
    if "\0" in text:
        name = next(name for name in records if "\0" in name)
        what = "the name of a record contains a zero byte"
        raise FormatError(what, entry=name)


def require_caseless(records: Mapping[str, Record]) -> None:
    """Refuse records whose names differ only in case, of which torch takes the first for both.

    Raises:
        FormatError: there are such records.
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


def read_record(source: Source, record: Record, limit: int) -> bytes:
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
            "a record is too large",
            entry=record.name,
            expected=f"at most {limit} bytes",
            found=f"{max(record.size, record.nbytes)} bytes",
        )
    check_method(record)
    if record.method == DEFLATED:
        # Each byte is interpreted, later.
        source.budget.spend(_INFLATED * record.size, record.name)
        return b"".join(inflated(source.read, record))
    data = source.read(record.offset, record.nbytes, record.name)
    _check_sum(record, zlib.crc32(data))
    return data


def check_method(record: Record) -> None:
    """Refuse a record that is neither stored nor deflated, or that cannot be what it says.

    Raises:
        FormatError: such a record.
    """
    if record.method not in (STORED, DEFLATED):
        raise FormatError(
            "a record is compressed in an unknown way",
            entry=record.name,
            expected=f"method {STORED} or {DEFLATED}",
            found=f"method {record.method}",
            hint="Unpack the archive and pack it again without compression.",
        )
    if record.method == DEFLATED and record.size > _MOST_DEFLATED * record.nbytes:
        raise FormatError(
            "a compressed record declares more bytes than it can hold",
            entry=record.name,
            expected=f"at most {_MOST_DEFLATED * record.nbytes} bytes in {record.nbytes}",
            found=f"{record.size} bytes",
        )


def inflated(
    read: Callable[[int, int], bytes], record: Record, step: int = _STEP
) -> Iterator[bytes]:
    """Yield what a deflated record holds, some at a time; its size and sum are checked at the end.

    Args:
        read: (first byte, number of bytes) -> bytes of the file.
        record: what to read. A bomb costs one byte more than it admits to.
        step: most bytes at a time.

    Raises:
        FormatError: it is damaged, or not as large as its header declares.
    """
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    at, made, crc, data = 0, 0, 0, b""
    while not engine.eof and made <= record.size:
        if not data:
            data = read(record.offset + at, min(step, record.nbytes - at))
            at += len(data)
        try:
            # All input may be taken, and output still be due.
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


def _find_directory(source: Source) -> tuple[int, int, int]:
    """Locate the central directory: (number of records, first byte, length in bytes)."""
    # Of an item among many behind a URL, some bytes are enough where the record is in them.
    short = [_TAIL] if source.is_remote and source.start else []
    for nbytes in (*short, END.size + FULL16):
        tail_start = max(0, source.size - nbytes)
        tail = source.read(tail_start, source.size - tail_start)
        # Of all signatures with room for a record behind them the last, whatever that says.
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
    at = max(0, limit - LOCATOR64.size)
    locator = source.read(at, limit - at)
    if locator.startswith(LOCATOR64_MAGIC) and len(locator) == LOCATOR64.size:
        limit = LOCATOR64.unpack(locator)[2]
        end = END64.unpack(source.read(limit, END64.size, "zip64 end record"))
        agree = all(
            few in (many, full)
            for few, many, full in zip(numbers, end[4:], [FULL16] * 4 + [FULL32] * 2, strict=True)
        )
        if end[0] != END64_MAGIC or limit > at or not agree:
            raise FormatError("the two end records of a large zip archive do not agree")
        numbers = [*end[4:]]
    elif FULL16 in numbers[:4] or FULL32 in numbers[4:]:
        raise FormatError("the large zip archive lacks its zip64 locator")
    disk, first_disk, here, count, nbytes, start = numbers
    if disk or first_disk or here != count:
        raise FormatError(
            "the zip archive is split over several files", hint="Join the files first."
        )
    if start + nbytes > limit or count * CENTRAL.size > nbytes:
        raise FormatError(
            "the directory of the archive does not fit in the file",
            expected=f"{count} records in the {limit} bytes before the end record",
            found=f"a directory of {nbytes} bytes at byte {start}",
        )
    return count, start, nbytes


_Entry = tuple[int, bytes, int, int, int, int]


def _entries(directory: bytes, count: int) -> Iterator[_Entry]:
    """Split the directory: (header's position, name, packed size, size, CRC, method) per record."""
    unpack, fixed = CENTRAL.unpack_from, CENTRAL.size
    at, stop = 0, len(directory)
    directory += bytes(fixed)  # the last record may end early, and is then damaged like any other
    for number in range(count):
        (magic, flags, method, crc, packed, size, n_name, n_extra, n_comment, attributes, header,
        ) = unpack(directory, at)  # fmt: skip
        extra = at + fixed + n_name
        name = directory[at + fixed : extra]
        at = extra + n_extra + n_comment
        if magic != CENTRAL_MAGIC or at > stop:
            raise FormatError("the directory of the archive is damaged", found=f"record {number}")
        if flags & ENCRYPTED:
            raise FormatError("a record is encrypted", entry=_text(name))
        if attributes & _FOLDER:
            raise FormatError(
                "a record is a folder",
                entry=_text(name),
                hint="Zip the folder again, without records of folders: zip -0 -r -D.",
            )
        if packed == FULL32 or size == FULL32 or header == FULL32:
            numbers = (size, packed, header)
            size, packed, header = _widened(numbers, directory[extra : extra + n_extra], name)
        yield header, name, packed, size, crc, method
    if at != stop:
        raise FormatError(
            "the directory of the archive has bytes outside of its records",
            expected=f"{stop} bytes",
            found=f"{at} bytes in {count} records",
        )


def _widened(numbers: tuple[int, ...], extra: bytes, name: bytes) -> list[int]:
    """Replace 32-bit numbers that are full by the 64-bit ones of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            # The extra field holds only those values that did not fit, in this order.
            values = [next(wide, -1) if number == FULL32 else number for number in numbers]
            if -1 not in values:
                return values
            break
        at += 4 + length
    raise FormatError("a large record lacks its 64-bit sizes", entry=_text(name))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _expected_place(name: bytes, header: int, nbytes: int, align: int) -> tuple[int, int]:
    """Return the first byte of a payload where torch puts it, and the first behind its record."""
    numbers = 2 * (nbytes >= FULL32) + (header >= FULL32)  # those that do not fit in 32 bits
    wide = 4 + 8 * numbers if numbers else 0
    start = header + LOCAL.size + len(name) + wide + 4
    start += -start % align
    descriptor = _WIDE_DESCRIPTOR if numbers else _DESCRIPTOR
    return start, start + nbytes + (descriptor.size if nbytes else 0)

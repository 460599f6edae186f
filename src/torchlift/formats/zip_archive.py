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

from torchlift.errors import FormatError
from torchlift.formats.index import ENCRYPTED, LOCAL, LOCAL_MAGIC, Record
from torchlift.formats.source import Source

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
#: The attribute of a folder. torch leaves the memory of such a record unset, and reads that.
_FOLDER = 0x10
#: Alignment of payloads in bytes, as torch writes them.
ALIGNMENT = 64

#: Bytes to read at once if headers lie close together: one read of a window replaces hundreds. A
#: read, unlike a mapping, cannot raise SIGBUS.
_WINDOW = 1 << 20
_DENSE = 1 << 14

#: Bytes to fetch from a URL: before the directory, of an extra field, after a pickle (for torch's
#: notes). Most bytes of a number. Bytes at the end of an item.
_LAST, _LONG, _NOTES, _MAX_NUMBER, _TAIL = 1 << 14, 1 << 9, 1 << 10, 1 << 5, 1 << 10

#: Price of a byte that is inflated.
_INFLATED = 8
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

    Returns:
        Name -> record. Payload offsets come from the local headers, because the directory has
        another padding.

    Raises:
        FormatError: If the archive is damaged, truncated, encrypted or split over disks, or if
            records share a name, overlap, or reach outside the archive.
    """
    count, limit, nbytes = _find_directory(source)
    # At a URL, the last records are fetched with it: the version, and the code of a program.
    if not source.start:
        source.expect([(limit - _LAST, limit + nbytes)])
    directory = source.read(limit, nbytes)
    if source.is_remote:
        return _computed(source, sorted(_entries(directory, count)), limit)
    # A directory may list them in another order than that of their bytes.
    return _located(source, sorted(_entries(directory, count)), count, limit)


def _computed(source: Source, entries: list[_Entry], limit: int) -> dict[str, Record]:
    """Compute the places of payloads, and read a header only if its neighbours disagree.

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
    """Fetch records of a URL in parallel, because they are needed next."""
    if source.is_remote:
        source.expect((one.offset, one.offset + one.nbytes + _NOTES) for one in records)


def _located(
    source: Source, entries: Iterable[_Entry], count: int, limit: int, first: int | None = None
) -> dict[str, Record]:
    """Read the headers of records, which must be in the order of their bytes."""
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
        # The local extra field is padding, which differs from the one in the directory.
        payload = header + length + n_extra
        problem = None
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise FormatError("the name of a record is not UTF-8", entry=_text(raw)) from error
        # Some programs read the directory, others the local header: both must agree.
        if magic != LOCAL_MAGIC or n_name != len(raw) or not buffer.startswith(raw, at + fixed):
            problem = "the header of a record is damaged or names another record"
        # Overlapping records can make a small file inflate to many times its size.
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
    """Refuse names that different programs read differently."""
    text = "".join(records)
    if "\0" in text:
        name = next(name for name in records if "\0" in name)
        what = "the name of a record contains a zero byte"
        raise FormatError(what, entry=name)


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


def read_record(source: Source, record: Record, limit: int) -> bytes:
    """Read a whole record, inflate it if necessary, and check its CRC-32 if it has one.

    Args:
        source: The archive.
        record: The record.
        limit: Most bytes to accept, before and after decompression.

    Raises:
        FormatError: If it is larger than `limit`, damaged, or compressed in an unknown way.
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
        # Each inflated byte is interpreted later, which costs time and memory.
        source.budget.spend(_INFLATED * record.size, record.name)
        return b"".join(inflated(source.read, record))
    data = source.read(record.offset, record.nbytes, record.name)
    _check_sum(record, zlib.crc32(data))
    return data


def check_method(record: Record) -> None:
    """Refuse a record that is neither stored nor deflated, or whose sizes are impossible.

    Raises:
        FormatError: If it is such a record.
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


def _find_directory(source: Source) -> tuple[int, int, int]:
    """Locate the central directory: (number of records, first byte, length in bytes)."""
    # An item of a DCP file at a URL rarely has a comment: its last bytes are enough.
    short = [_TAIL] if source.is_remote and source.start else []
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
    # Numbers that do not fit would make a reader skip records or read beyond the directory.
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
    directory += bytes(fixed)  # room for a last record that ends early, which fails the check below
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
    raise FormatError("a large record lacks its 64-bit sizes", entry=_text(name))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _expected_place(name: bytes, header: int, nbytes: int, align: int) -> tuple[int, int]:
    """Return the first byte of a payload as torch places it, and the first after its record."""
    numbers = 2 * (nbytes >= FULL32) + (header >= FULL32)  # how many do not fit in 32 bits
    wide = 4 + 8 * numbers if numbers else 0
    start = header + LOCAL.size + len(name) + wide + 4
    start += -start % align
    descriptor = _WIDE_DESCRIPTOR if numbers else _DESCRIPTOR
    return start, start + nbytes + (descriptor.size if nbytes else 0)

"""numpy's .npy (one array) and .npz (a zip archive of them), without numpy.

Format: numpy, ``numpy/lib/format.py``. An array of Python objects is a pickle. It is listed by name
and never read.
"""

from __future__ import annotations

import ast
import math
import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

from torchlift.errors import FormatError
from torchlift.formats.flattening import ROOT_TENSOR
from torchlift.formats.index import (
    ITEMSIZE,
    Chunk,
    Index,
    Lack,
    Record,
    Storage,
    TensorEntry,
    globals_in,
    row_major,
)
from torchlift.formats.source import Source, dense_shape
from torchlift.formats.table import NPY_MAGIC
from torchlift.formats.zip_archive import (
    STORED,
    expect_records,
    inflated,
)

#: NumPy's own limit for the header of an untrusted file.
_MAX_HEADER = 10_000
_MOST = 12 + _MAX_HEADER
_HEAD = 1 << 10  # bytes to fetch from a URL for a header of the usual length
_FIELDS = {"descr", "fortran_order", "shape"}
#: Kind and size of NumPy's type codes -> torch's name. NumPy knows ml_dtypes' bfloat16 as two raw
#: bytes, and vision_transformer reads such an array as bfloat16, too. One raw byte may be any of a
#: dozen dtypes.
_DTYPES = {
    "b1": "bool", "u1": "uint8", "i1": "int8", "u2": "uint16", "i2": "int16", "u4": "uint32",
    "i4": "int32", "u8": "uint64", "i8": "int64", "f2": "float16", "f4": "float32", "f8": "float64",
    "c8": "complex64", "c16": "complex128", "V2": "bfloat16", "f1": "float8_e5m2",
}  # fmt: skip
#: Kind of a type code -> the reason why torch has no tensor for it.
_KINDS = {
    "U": Lack.TEXT,
    "S": Lack.TEXT,
    "M": Lack.DATES,
    "m": Lack.DATES,
    "V": Lack.RAW,
    "f": Lack.REAL,
    "c": Lack.COMPLEX,
    "[": Lack.RECORDS,
}


def read_npy(source: Source) -> Index:
    """Read the index of a .npy file. The key of its array is ``tensor``.

    Raises:
        FormatError: If it is malformed or truncated.
    """
    return _index(source, {ROOT_TENSOR: Record("", 0, source.size, source.size, 0, STORED)})


def read_npz(source: Source, records: Mapping[str, Record]) -> Index:
    """Read the index of a .npz file. The key of an array is the name of its record.

    Raises:
        FormatError: If it is malformed, or compressed in another way than by NumPy.
    """
    for name in records:
        if not name.endswith(".npy"):
            raise FormatError("the record is not a NumPy array", entry=name)
        if name.removesuffix(".npy") in records:  # numpy tries the name without the suffix first
            raise FormatError("two arrays share this record", entry=name)
    return _index(source, {name.removesuffix(".npy"): at for name, at in records.items()})


def _index(source: Source, records: Mapping[str, Record]) -> Index:
    entries: dict[str, TensorEntry] = {}
    storages: dict[str, Storage] = {}
    whole: dict[str, Storage] = {}
    blocked: dict[str, str] = {}
    inside: dict[str, int] = {}
    heads = (record._replace(nbytes=min(record.nbytes, _HEAD)) for record in records.values())
    expect_records(source, heads)
    for key, record in records.items():
        code, shape, is_fortran, start = _header(source, key, record)
        packed = record if record.method != STORED else None
        begin = 0 if packed else record.offset
        if record.crc32:  # it covers the header, too
            whole[key] = Storage(source.path, begin, record.size, "", record.crc32, packed)
        dtype = _DTYPES.get(code[1:]) if code[:1] in "<>|=" else None
        if dtype is None and code[1:2] == "O":
            blocked[key] = f"numpy.dtype({code})"
            continue
        if dtype is None:
            blocked[key] = why = _KINDS.get(code[1:2], Lack.UNKNOWN)
            if why is not Lack.TEXT:  # numbers: no conversion may leave them out by itself
                inside[key] = 1
            continue
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        if nbytes != record.size - start:
            raise FormatError(
                "the size of an array does not match its shape and dtype",
                entry=key,
                expected=f"{nbytes} bytes for {dtype} {shape}",
                found=f"{record.size - start} bytes",
                hint="The file is truncated. Fetch it again.",
            )
        stride = row_major(shape[::-1])[::-1] if is_fortran else row_major(shape)
        origin = (0,) * len(shape)
        chunk = Chunk(source.path, begin + start, nbytes, origin, shape, packed=packed)
        chunks = (chunk,) if nbytes else ()
        swapped = code[0] == ">" and ITEMSIZE[dtype] > 1
        encoding = ("deflated",) * bool(packed and nbytes) + ("big-endian",) * swapped
        entries[key] = TensorEntry(
            key, dtype, shape, stride, nbytes, "cpu", key, chunks, encoding=encoding
        )
        storages[key] = Storage(source.path, begin + start, nbytes, "cpu", packed=packed)
    files = {source.path: source.stamp}
    return Index(
        source.path,
        "npz",
        entries,
        storages,
        files,
        blocked=globals_in(blocked),
        blocked_keys=blocked,
        blocked_tensors=inside,
        records=whole,
    )


class _Header(NamedTuple):
    """The header of an array: type code, shape, whether it is column-major, start of the data."""

    code: str
    shape: tuple[int, ...]
    is_fortran: bool
    start: int


def _header(source: Source, key: str, record: Record) -> _Header:
    """Read the header of an array."""
    if record.method == STORED:
        most = source.read(record.offset, min(record.size, _MOST), key)
    else:
        most = next(inflated(source.read, record, _MOST), b"")
    head = most[:12]
    size = 2 if head[6:7] == b"\1" else 4
    if len(head) < 12 or head[:6] != NPY_MAGIC or head[6:8] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise FormatError("the record is not a NumPy array", entry=key, found=repr(head))
    (length,) = struct.unpack_from("<H" if size == 2 else "<I", head, 8)
    start = 8 + size + length
    if length > _MAX_HEADER or start > record.size:
        raise FormatError(
            "the length of the header is invalid",
            entry=key,
            expected=f"at most {min(_MAX_HEADER, record.size - 8 - size)} bytes",
            found=f"{length} bytes",
        )
    text = most[8 + size : start]
    if head[6] < 3:
        text = re.sub(rb"(?<=\d)L(?=[,)])", b"", text)  # long integers of Python 2
    try:
        fields = ast.literal_eval(text.decode("utf-8" if head[6] == 3 else "latin1").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        fields = None
    is_header = isinstance(fields, dict) and fields.keys() == _FIELDS
    if not is_header or type(fields["fortran_order"]) is not bool:
        raise FormatError("the header of an array is malformed", entry=key, found=repr(text[:200]))
    shape = dense_shape(fields["shape"], key, "shape", "tuple")
    code = fields["descr"]
    if not isinstance(code, str):
        # numpy.load reads structured arrays, but those with objects are a pickle.
        code = "|O" if "|O" in repr(code) else "|[]"
    return _Header(code, shape, fields["fortran_order"], start)

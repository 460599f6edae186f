"""safetensors: a header length (u64), a JSON header, then all data without gaps.

Format: huggingface/safetensors, README "Format". The checks are those of its validator, and those
that JSON needs in Python, where ``true`` is an integer and 1e400 parses.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from reprlib import repr as short_repr
from typing import Any, NamedTuple

from torchlift.errors import Argument, FormatError, Hint, PlacementError
from torchlift.formats.index import (
    ITEMSIZE,
    SLICE,
    Chunk,
    Index,
    Kind,
    Records,
    Storage,
    TensorEntry,
    row_major,
)
from torchlift.formats.layout import Layout, Payload, Stored, is_unicode
from torchlift.formats.source import Source, dense_shape, parse_json, unique, whole_numbers

#: The format's own limit on the JSON header, in bytes.
MAX_HEADER = 100_000_000
#: The way out for a tensor or a header that does not fit into such a file.
_TORCH_FILE = Argument("format", '"torch-zip"', ("torch-zip",))

DTYPES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

#: Types of less than a byte -> name in torch, or the name that it would have; bits of an element.
_PACKED = {
    "F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6),
}  # fmt: skip
#: Two elements of F4 in the file are one of this dtype in torch.
_PAIR = "float4_e2m1fn_x2"

_FIELDS = "dtype", "shape", "data_offsets"
_fields = operator.itemgetter(*_FIELDS)

#: Key in the metadata: the CRC-32 of the header (with zeros for these digits), and of every tensor
#: with bytes, in their order. Each has eight hexadecimal digits.
_SUMS = "torchlift.crc32"
#: Key in the metadata: JSON of other names of tensors -> the key that the file has.
TIED_KEYS = "torchlift.ties"
#: Key in the metadata: the start of each slice in its tensor, by torch's HuggingFaceStorageWriter.
#: The size of the tensor is not recorded (pytorch/pytorch#155566).
_SLICES = "DCP_SHARDING_INFO"

#: A command that writes another header of the same length, and what it writes.
_REWRITE = (
    "python -c \"import sys; f = open(sys.argv[1], 'r+b'); "
    "n = int.from_bytes(f.read(8), 'little'); h = f.read(n); f.seek(8); "
    'f.write({})" model.safetensors'
)
_PAD = "h.rstrip(bytes(1)).ljust(n)"
_RENAME = "h.replace(b'%c__metadata__' % 34, b'%cmetadata____' % 34, 1)"


def read_safetensors(source: Source, *, sliced: bool = False) -> Index:
    """Read the index of a safetensors file, with the checksums and ties that torchlift notes.

    Args:
        source: The file.
        sliced: Whether the file must hold one rank's slices. Its entries are slices then.

    Raises:
        FormatError: If it is not such a file, or is damaged or inconsistent, or if `sliced` is
            wrong.
    """
    header, start = _read_header(source)
    # If another program rewrote the file and kept the metadata, it is first and its sums are old.
    is_last = bool(header) and next(reversed(header)) == "__metadata__"
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if type(metadata) is tuple:
        raise FormatError(
            "a tensor has the name under which the format stores texts",
            entry="__metadata__",
            expected="another name",
            hint=f"Rename it: {_REWRITE.format(_RENAME)}",
        )
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise FormatError(
            "the metadata does not map text to text",
            entry="__metadata__",
            found=type(metadata).__name__,
        )
    rows = _rows(header)
    # Bytes outside of all tensors could hide another file, or belong to a missing tensor.
    _check_cover(rows, source.size - start)
    # A slice has the name of the whole tensor: it must not pass for it.
    if (_SLICES in metadata) is not sliced:
        raise slices_error() if not sliced else _no_offset(_SLICES)
    stored = {key: row for key, row in rows.items() if row.nbytes}

    def entry(key: str, row: _Row) -> TensorEntry:
        begin, nbytes, dtype, shape = row
        chunk = Chunk(source.path, start + begin, nbytes, (0,) * len(shape), shape)
        chunks, name = (chunk,) if nbytes else (), ties.get(key, key)
        return TensorEntry(key, dtype, shape, row_major(shape), nbytes, "cpu", name, chunks)

    sums = _sums(source, start, metadata, list(stored)) if is_last else {}

    def storage(key: str, row: _Row) -> Storage:
        return Storage(source.path, start + row.begin, row.nbytes, "cpu", sums.get(key), None)

    noted = parse_json(metadata.get(TIED_KEYS, "{}").encode(), "the list of ties")
    texts = {key: name for key, name in noted.items() if type(name) is str and key not in rows}
    ties = {key: name for key, name in texts.items() if name in rows}
    rows |= {key: rows[name] for key, name in ties.items()}
    entries: Mapping[str, TensorEntry] = Records(rows, entry)
    if sliced:
        entries = _slices(entries, metadata.pop(_SLICES))
    storages, files = Records(stored, storage), {source.path: source.stamp}
    metadata = {key: text for key, text in metadata.items() if key not in (_SUMS, TIED_KEYS)}
    # safetensors.torch.save_model notes ties without a mark, so any text may mean something else.
    noted = {k: text for k, text in metadata.items() if text in rows and k not in (*rows, "format")}
    return Index(
        source.path, "safetensors", entries, storages, files, metadata=metadata, noted=noted
    )


def slices_error(hint: str = "Open the folder with the files of all ranks.") -> FormatError:
    """Return the error for a file that holds one rank's slices of tensors."""
    return FormatError(
        "the file holds one rank's slices of tensors",
        expected="the slices of all ranks",
        found="a file of HuggingFaceStorageWriter(save_distributed=True)",
        hint=hint,
    )


def _slices(entries: Mapping[str, TensorEntry], noted: str) -> dict[str, TensorEntry]:
    """Return tensors as slices of larger ones. The file shows their size up to its own slices."""
    offsets, made = parse_json(noted.encode(), _SLICES), {}
    for key, entry in entries.items():
        offset = offsets.get(key)
        start = whole_numbers(
            offset.get("saved_offsets") if isinstance(offset, dict) else None, key, "offset"
        )
        if len(start) != len(entry.shape):
            raise _no_offset(key)
        spans = tuple([(at, at + size) for at, size in zip(start, entry.shape, strict=True)])
        shape = dense_shape([stop for _, stop in spans], key, "shape")
        kind = Kind(SLICE, (entry,), (tuple([(span,) for span in spans]), None))
        made[key] = entry._replace(shape=shape, stride=row_major(shape), kind=kind)
    return made


def _no_offset(entry: str) -> FormatError:
    return FormatError("a slice does not say its place in the whole tensor", entry=entry)


def _sums(source: Source, start: int, metadata: dict[str, str], keys: list[str]) -> dict[str, int]:
    """Return key -> checksum of its bytes, if torchlift wrote the file.

    Raises:
        FormatError: If the header was changed.
    """
    # A damaged byte of the key's name must not make the checksums disappear.
    near = (k for k in metadata if len(k) == len(_SUMS) and sum(map(operator.ne, k, _SUMS)) < 2)
    name = next(near, _SUMS)
    digits = metadata.get(name, "")
    if len(digits) != 8 * (len(keys) + 1):  # another program changed the tensors
        return {}
    found = zlib.crc32(_noted(source.read(0, start), digits, "0" * len(digits)))
    is_hex = re.fullmatch("[0-9a-f]+", digits)
    if name != _SUMS or not is_hex or found != int(digits[:8], 16):
        raise FormatError(
            "the checksum of the header is wrong",
            entry="__metadata__",
            expected=f"crc32 {digits[:8]}",
            found=f"{found:08x}" if is_hex else "characters that are not hexadecimal digits",
            hint="Fetch or write the file again.",
        )
    return {key: int(digits[at : at + 8], 16) for at, key in zip(itertools.count(8, 8), keys)}


class _Row(NamedTuple):
    """A tensor in the header: first byte in the data, number of bytes, dtype and shape."""

    begin: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def _read_header(source: Source) -> tuple[dict[str, Any], int]:
    """Return the JSON header and the position of the first byte after it."""
    length = int.from_bytes(source.read(0, 8), "little")
    if length > MAX_HEADER or length > source.size - 8:
        raise FormatError(
            "the length of the header is invalid",
            expected=f"at most {min(MAX_HEADER, source.size - 8)} bytes",
            found=f"{length} bytes",
            hint="The file is truncated.",
        )
    header = source.read(8, length)
    if padding := len(header) - len(header.rstrip(b"\0")):
        raise FormatError(
            "the header is padded with bytes that are not JSON",
            expected="spaces",
            found=f"{padding} zero bytes",
            hint=f"Write spaces in their place: {_REWRITE.format(_PAD)}",
        )
    return parse_json(header, "the header", _described), 8 + length


def _described(pairs: list[tuple[str, Any]]) -> object:
    """Return (dtype, shape, data offsets) for the JSON object of a tensor, else a dict.

    JSON itself never gives a tuple. With `_rows`, this takes 0.16 s for 100,000 tensors. Dicts
    would take 0.25 s.
    """
    if len(pairs) == 3:
        (first, code), (second, shape), (third, offsets) = pairs
        named = first == "dtype" and second == "shape" and third == "data_offsets"
        if named and type(shape) is list:
            return code, shape, offsets
    found = unique(pairs)
    is_tensor = found.keys() >= set(_FIELDS) and type(found["shape"]) is list
    return _fields(found) if is_tensor else found


def _rows(header: dict[str, Any]) -> dict[str, _Row]:
    """Return checked rows in the order of their data: that of the header is arbitrary."""
    rows, last, is_sorted = {}, -1, True
    for key, value in header.items():
        if type(value) is not tuple:
            raise FormatError(
                "the description of a tensor has the wrong fields",
                entry=key,
                expected="dtype, data_offsets, and a list as the shape",
                found=", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}",
            )
        code, shape, offsets = value
        dtype = DTYPES.get(code) if type(code) is str else None
        if dtype is None or dtype == _PAIR:
            _, nbytes, dtype, shape = _packed(code, shape, key)
        else:
            nbytes = ITEMSIZE[dtype] if len(shape) <= 64 else 0
            for extent in shape if nbytes else ():
                nbytes *= extent if type(extent) is int and extent > 0 else 0
            if not nbytes:  # an empty tensor, or an invalid shape
                dense_shape(shape, key, "shape")
        begin, end = offsets if type(offsets) is list and len(offsets) == 2 else (None, None)
        if type(begin) is not int or type(end) is not int or begin < 0:
            whole_numbers(offsets, key, "data_offsets")
            raise FormatError("a tensor does not have two data offsets", entry=key)
        if end - begin != nbytes:
            dense_shape(shape, key, "shape")
            raise FormatError(
                "the size of a tensor does not match its shape and dtype",
                entry=key,
                expected=f"{nbytes} bytes for {dtype} {shape}",
                found=f"{end - begin} bytes",
            )
        is_sorted = is_sorted and last < begin
        last = begin
        rows[key] = _Row(begin, nbytes, dtype, tuple(shape))
    if is_sorted:  # sorting would take ten times as long
        return rows
    return {key: rows[key] for _, _, key in sorted((*row[:2], key) for key, row in rows.items())}


def _packed(code: object, shape: object, key: str) -> _Row:
    """Return the row, without its first byte, of a tensor with elements of less than a byte.

    Raises:
        FormatError: If the type is unknown, or the elements do not fill their last byte.
    """
    if type(code) is not str or code not in _PACKED:
        found = short_repr(code)
        raise FormatError("torchlift does not know this dtype", entry=key, found=found)
    (dtype, bits), sizes = _PACKED[code], dense_shape(shape, key, "shape")
    nbytes, rest = divmod(math.prod(sizes) * bits, 8)
    if rest:
        raise FormatError(
            "the elements of a tensor do not fill its last byte",
            entry=key,
            expected=f"a multiple of {8 // math.gcd(8, bits)} elements of {code}",
            found=f"shape {list(sizes)}",
        )
    if code == "F4" and sizes[-1] % 2 == 0:
        return _Row(0, nbytes, _PAIR, (*sizes[:-1], sizes[-1] // 2))
    return _Row(0, nbytes, dtype, sizes)


def _check_cover(rows: dict[str, _Row], size: int) -> None:
    """Refuse data that do not fill the `size` bytes after the header exactly once."""
    position = 0
    for key, (begin, nbytes, _, _) in rows.items():
        if begin != position:
            what = "two tensors overlap" if begin < position else "unused bytes before a tensor"
            raise FormatError(
                what,
                entry=key,
                expected=f"data at byte {position} behind the header",
                found=f"byte {begin}",
            )
        position += nbytes
    if position != size:
        missing = position - size
        raise FormatError(
            f"the file is truncated: {missing} bytes are missing"
            if missing > 0
            else "the file has bytes that belong to none of its tensors",
            expected=f"{position} bytes behind the header",
            found=f"{size} bytes",
            hint="Fetch or write the file again.",
        )


_ALIGNMENT = 64
_CODES = {name: code for code, name in DTYPES.items()}


def safetensors_layout(
    tensors: Iterable[Stored], metadata: Mapping[str, str], *, checked: bool = False
) -> Layout:
    """Lay out a safetensors file, widest items first, so that each tensor is aligned.

    Args:
        tensors: The tensors to store. Every key gets its own bytes.
        metadata: Text for the header.
        checked: Whether to note checksums in the metadata. Other readers ignore them.

    Raises:
        PlacementError: If the format lacks a dtype, or its limit for the header is exceeded.
        TypeError: If the metadata is not text.
        ValueError: If a text has surrogates, which a file cannot store.

    Example:
        >>> layout = safetensors_layout([Stored("w", "int8", (2,)), Stored("v", "float32", ())], {})
        >>> [(place.tensor.key, place.offset) for place in layout.payloads], layout.nbytes
        ([('v', 128), ('w', 132)], 134)
    """
    described: dict[str, Any] = {}
    places, at = [], 0
    for tensor in sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.key)):
        is_pair = tensor.dtype == _PAIR
        is_half = is_pair and tensor.shape == ()  # its two elements would need a dimension
        if tensor.key == "__metadata__":
            raise PlacementError(
                "a safetensors file stores texts under this name, not a tensor",
                entry=tensor.key,
                expected="another name",
                hint=Hint("Rename it, or save a torch file, which can hold it: ", _TORCH_FILE, "."),
            )
        if tensor.dtype not in _CODES or is_half:
            raise PlacementError(
                "a safetensors file cannot store this tensor",
                entry=tensor.key,
                expected=f"one of {', '.join(DTYPES.values())}",
                found=tensor.dtype,
                hint=Hint("A torch file can hold it: save with ", _TORCH_FILE, "."),
            )
        stop = at + tensor.nbytes
        described[tensor.key] = {
            "dtype": _CODES[tensor.dtype],
            "shape": (*tensor.shape[:-1], 2 * tensor.shape[-1]) if is_pair else tensor.shape,
            "data_offsets": [at, stop],
        }
        places.append((tensor, at))
        at = stop
    filled = [number for number, (tensor, _) in enumerate(places) if tensor.nbytes]
    # The digits have a fixed length, so the offsets of the data are known before the sums.
    blank = "0" * 8 * (1 + len(filled))
    if checked:
        metadata = {**metadata, _SUMS: blank}
    head = _head(described, metadata, last=checked)
    length = len(head)

    def frame(sums: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        if checked:
            known = list(sums)
            every = zlib.crc32(head), *(known[number] for number in filled)
            yield 0, _noted(head, blank, "".join(f"{each:08x}" for each in every))
        else:
            yield 0, head

    payloads = tuple(Payload(tensor, length + start) for tensor, start in places)
    return Layout(length + at, payloads, checked, frame)


def _noted(head: bytes, old: str, new: str) -> bytes:
    """Return a header with other digits of checksums."""
    return head.replace(f'"{_SUMS}":"{old}"'.encode(), f'"{_SUMS}":"{new}"'.encode())


def _head(described: Mapping[str, Any], metadata: Mapping[str, str], *, last: bool) -> bytes:
    """Return the bytes before the data, with the metadata first (as usual) or last."""
    for name, value in metadata.items():
        for text in (name, value):
            if not isinstance(text, str):
                raise TypeError(
                    f"metadata[{name!r}] = {value!r}: a safetensors file stores text only. Use "
                    "str() or json.dumps()"
                )
            if not is_unicode(text):
                raise ValueError(f"metadata[{name!r}] = {value!r}: lone surrogates are not text")
    noted = {"__metadata__": dict(metadata)} if metadata else {}
    described = {**described, **noted} if last else {**noted, **described}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    if len(header) > MAX_HEADER:
        raise PlacementError(
            "too many tensors for one safetensors file",
            expected=f"a header of at most {MAX_HEADER} bytes",
            found=f"{len(header)} bytes",
            hint=Hint("A torch file can hold them: save with ", _TORCH_FILE, "."),
        )
    return len(header).to_bytes(8, "little") + header

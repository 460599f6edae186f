"""GGUF, as llama.cpp writes it: metadata, float tensors that are mapped, and quantised blocks.

Format: ggml-org/ggml, docs/gguf.md. A quantised tensor is listed as float32, with the block type as
the entry's encoding. The ``gguf`` package computes the values.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from operator import length_hint
from typing import Any, NamedTuple

from torchlift._store.places import name_of, parent
from torchlift.errors import FormatError
from torchlift.formats.detect import read_file
from torchlift.formats.index import (
    GGUF_BLOCKS,
    ITEMSIZE,
    Chunk,
    Index,
    Storage,
    TensorEntry,
    row_major,
)
from torchlift.formats.sharded import put_together, read_shards
from torchlift.formats.source import Source, dense_shape
from torchlift.formats.unpickle import Budget

#: ggml's number of a type -> torch's name.
_PLAIN = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64",
    30: "bfloat16",
}  # fmt: skip
#: Number of a metadata type -> how it is stored; 8 is text, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_TEXT, _ARRAY = 8, 9
#: Bytes of a window. Guess for a word with its length, and most bytes to read ahead from a URL.
_WINDOW, _TEXT_BYTES, _MOST_AHEAD = 1 << 16, 20, 1 << 26
#: Metadata of a part of a model -> what it counts.
_SPLIT = ("split.no", "split.count", "split.tensors.count")
#: The name of a part, as llama.cpp writes it.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.ASCII)
_SHOWN = 1000  # bytes of a text that are kept: a chat template may have a hundred thousand


def read_gguf(source: Source) -> Index:
    """Read the index of a GGUF file.

    Raises:
        FormatError: If it is malformed, truncated, or of an unknown version.
    """
    cursor = _Cursor(source)
    cursor.take(4)
    version = cursor.number("<I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise FormatError(
            "torchlift does not read this version of GGUF",
            expected="2 or 3, little-endian",
            found=f"{swapped}, big-endian" if swapped in (2, 3) else version,
            hint="Convert it with the tools of llama.cpp.",
        )
    # A wrong count needs no check: the header ends early then.
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, str] = {"GGUF.version": str(version)}
    alignment = 32
    for _ in range(pairs):
        name = cursor.text("a name in the metadata")
        value = cursor.value(cursor.number("<I"), name)
        if name in metadata:
            raise FormatError("two values of the metadata have the same name", entry=name)
        metadata[name] = str(value)
        if name == "general.alignment":
            alignment = value
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        raise FormatError(
            "the alignment is invalid",
            entry="general.alignment",
            expected="a multiple of 8",
            found=repr(alignment),
        )
    described = [_entry(cursor, source.path) for _ in range(tensors)]
    # Offsets in the header count from the aligned end of the header.
    start = -(-cursor.at // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    storages: dict[str, Storage] = {}
    end, before = start, ""
    # Sorted by offset: two tensors over the same bytes would hide that one of them is missing.
    for entry in sorted(described, key=lambda entry: [chunk.offset for chunk in entry.chunks]):
        key = entry.key
        if key in entries:
            raise FormatError("two tensors have the same name", entry=key)
        entries[key] = entry
        for chunk in entry.chunks:
            at = start + chunk.offset
            source.check(at, chunk.nbytes, "a tensor", key)
            if at < end:
                raise FormatError("two tensors overlap", entry=key, found=f"{before!r} before it")
            end, before = at + chunk.nbytes, key
            entries[key] = entry._replace(chunks=(chunk._replace(offset=at),))
            storages[key] = Storage(source.path, at, chunk.nbytes, "cpu")
    files = {source.path: source.stamp}
    return Index(source.path, "gguf", entries, storages, files, metadata=metadata)


class Split(NamedTuple):
    """The numbers in a part of a model."""

    number: int  # of this part, from 0
    parts: int
    tensors: int  # in all parts

    @classmethod
    def of(cls, index: Index) -> Split | None:
        """Return what a file says, or None if it is the only one.

        Raises:
            FormatError: If one of the numbers is missing or invalid.
        """
        texts = [index.metadata.get(name, "") for name in _SPLIT]
        if texts[1] in ("", "0", "1"):
            return None
        for name, text in zip(_SPLIT, texts, strict=True):
            if not text.isdecimal():
                what = "the file is a part of a model, and a number is invalid"
                raise FormatError(what, file=index.path, entry=name, found=text or None)
        return cls(*map(int, texts))


def with_other_parts(index: Index) -> Index:
    """Return the index of a model. The first part stands for all parts, as in llama.cpp.

    Raises:
        FormatError: If it is another part, or the other parts are not beside it.
        UnsafeError: If a part is a link that leaves the directory.
    """
    split = Split.of(index)
    if split is None:
        return index
    match = _PART.fullmatch(name_of(index.path))
    stem = match[1] if match else "model"

    def name(number: int) -> str:
        return f"{stem}-{number + 1:05}-of-{split.parts:05}.gguf"

    if name_of(index.path) != name(0) or split.number:
        raise FormatError(
            f"the file is part {split.number + 1} of {split.parts} of a model",
            file=index.path,
            expected=f"the first part, {name(0)}",
            hint="Open the path of the first part. All parts must be in one folder, with names "
            f"from {name(0)} to {name(split.parts - 1)}.",
        )

    def read(path: str, budget: Budget) -> Index:
        return index if path == index.path else read_file(path, budget)

    names = map(name, range(split.parts))
    return join_parts(index.path, read_shards(parent(index.path), names, Budget(), read))


def join_parts(path: str, parts: Mapping[str, Index]) -> Index:
    """Join the parts of a model, or other GGUF files with different tensors.

    Args:
        path: Path of the whole.
        parts: Name -> index, in their order.

    Raises:
        FormatError: If the parts are of different models, or lack a tensor.
    """
    splits = [Split.of(index) for index in parts.values()]
    count = sum(len(index.tensors) for index in parts.values())
    for at, (name, split) in enumerate(zip(parts, splits, strict=True)):
        if any(splits) and split != (at, len(parts), count):
            raise FormatError(
                "the parts of a model do not belong together",
                entry=name,
                expected=f"part {at + 1} of {len(parts)}, {count} tensors in all",
                found=f"part {split.number + 1} of {split.parts}, {split.tensors} tensors in all"
                if split
                else "a complete model",
                hint="Fetch all parts of one model into a separate folder.",
            )
    made = put_together(path, parts, {}, {}, "gguf")
    texts = {name: text for name, text in made.metadata.items() if name not in _SPLIT}
    return replace(made, metadata=texts)


def _entry(cursor: _Cursor, path: str) -> TensorEntry:
    """Read the description of the next tensor. Its offset counts from the end of the header."""
    key = cursor.text("the name of a tensor")
    dims = cursor.number("<I")
    if dims > 64:
        raise FormatError("a tensor has too many dimensions", entry=key, found=dims)
    sizes = [cursor.number("<Q") for _ in range(dims)]
    # The first dimension is contiguous, unlike in torch.
    shape = dense_shape(sizes[::-1], key, "shape")
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    numel = math.prod(shape)
    if numel >= 1 << 60:
        raise FormatError("a tensor has an invalid shape", entry=key, found=shape)
    encoding: tuple[str, ...] = ()
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        dense = nbytes = numel * ITEMSIZE[dtype]
    elif kind in GGUF_BLOCKS:
        name, values, size = GGUF_BLOCKS[kind]
        if not shape or shape[-1] % values:
            raise FormatError(
                f"the rows of a tensor are not whole blocks of {name}",
                entry=key,
                expected=f"a multiple of {values}",
                found=shape,
            )
        dtype, encoding = "float32", (name,)
        dense, nbytes = numel * ITEMSIZE[dtype], numel // values * size
    else:
        raise FormatError(
            "torchlift does not know this type of tensor",
            entry=key,
            found=f"ggml type {kind}",
        )
    chunks = (Chunk(path, offset, nbytes, (0,) * len(shape), shape),) if nbytes else ()
    return TensorEntry(
        key, dtype, shape, row_major(shape), dense, "cpu", key, chunks, encoding=encoding
    )


class _Cursor:
    """A reader of consecutive values of a GGUF header, in windows.

    Attributes:
        at: Number of bytes that were taken.
    """

    def __init__(self, source: Source) -> None:
        self.at = 0
        self._source = source
        self._window, self._start = b"", 0
        # The rest of a list of texts, its length and its start.
        self._items, self._count, self._first = iter(range(0)), 0, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes, all of them or an error."""
        begin = self.at - self._start
        if not 0 <= begin <= begin + count <= len(self._window):
            left = self._check(count)
            ahead = self._ahead() if self._source.is_remote else _WINDOW
            self._window = self._source.read(self.at, min(max(count, ahead, _WINDOW), left))
            self._start, begin = self.at, 0
        self.at += count
        return self._window[begin : begin + count]

    def _ahead(self) -> int:
        """Return how many bytes are likely to be taken next: vocabularies are lists of texts."""
        left = length_hint(self._items)
        taken = self._count - left
        each = (self.at - self._first) / taken if taken > 1000 else _TEXT_BYTES
        # Later words are longer. A window never shrinks by more than half.
        guess = max(int(1.5 * each * left), len(self._window) // 2)
        return min(guess if left else 4 * len(self._window), _MOST_AHEAD)

    def skip(self, count: int) -> None:
        """Pass over bytes that must exist."""
        self._check(count)
        self.at += count

    def number(self, layout: str) -> Any:
        """Return the next number of a `struct` layout."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def _check(self, count: int) -> int:
        """Return the number of bytes left, or refuse a file that ends early."""
        left = self._source.size - self.at
        if count > left:
            raise FormatError(
                "the file ends early",
                expected=f"{count} bytes more",
                found=f"{left} bytes",
                hint="The file is truncated. Fetch it again.",
            )
        return left

    def text(self, what: str) -> str:
        """Return the next text."""
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{what} is not text", found=str(error)) from error

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        """Return the next value of the metadata. For an array, return its length as text."""
        if kind in _SCALARS:
            return self.number("<" + _SCALARS[kind])
        if kind == _TEXT:
            length = self.number("<Q")
            raw = self.take(min(length, _SHOWN))
            self.skip(length - len(raw))
            text = raw.decode(errors="replace")
            return text if length == len(raw) else f"{text}... ({length} bytes)"
        if kind != _ARRAY or depth > 3:
            raise FormatError(
                "a value of the metadata has an unknown type", entry=name, found=f"type {kind}"
            )
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        else:
            self._items = items = iter(range(count))
            self._count, self._first = count, self.at
            for _ in items:
                self.value(inner, name, depth + 1)
        return f"{count} values"

"""flax's msgpack files, scanned without the ``msgpack`` package: its decoder reads every weight.

Formats: msgpack/msgpack, spec.md; google/flax, ``flax/serialization.py``. An array is an extension
of type 1, which holds its shape, the name of its dtype and its bytes; a numpy scalar, of type 3,
holds the same. An array above 1 GiB is a map with flat runs of it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torchlift.errors import FormatError
from torchlift.formats.boxes import flat_entry
from torchlift.formats.flattening import ROOT_TENSOR
from torchlift.formats.index import ITEMSIZE, Index, Storage, row_major
from torchlift.formats.reader import Content, Reader
from torchlift.formats.source import Cursor, Source, dense_shape
from torchlift.formats.torch_pickle import Blocked, StorageRef, TensorRef, TorchWorld
from torchlift.formats.torch_zip import Resolver, index_of
from torchlift.formats.unpickle import STEP

#: A map whose first key is text, or an array by itself.
_START = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9\xda]|(?:\xc7.|\xc8..|\xc9....)\x01", re.DOTALL
)
_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_MAX_DEPTH = 100

#: First byte -> the value itself, or how the number behind it is stored.
_VALUES = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA + at: ">" + code for at, code in enumerate("fdBHIQbhiq")}
#: First byte -> what follows it, how its length is stored or what it is.
_SIZED: dict[int, tuple[str, str | int]] = {
    **{0xC4 + at: ("bin", ">" + code) for at, code in enumerate("BHI")},
    **{0xC7 + at: ("ext", ">" + code) for at, code in enumerate("BHI")},
    **{0xD4 + at: ("ext", 1 << at) for at in range(5)},
    **{0xD9 + at: ("str", ">" + code) for at, code in enumerate("BHI")},
    **{0xDC + at: ("array", ">" + code) for at, code in enumerate("HI")},
    **{0xDE + at: ("map", ">" + code) for at, code in enumerate("HI")},
    **{0x80 + size: ("map", size) for size in range(16)},
    **{0x90 + size: ("array", size) for size in range(16)},
    **{0xA0 + size: ("str", size) for size in range(32)},
}  # fmt: skip


def read_flax(content: Content) -> Index:
    """Read the index of a msgpack file of flax, without its arrays.

    Raises:
        FormatError: malformed, truncated, or an array whose bytes are not what its shape says.
    """
    source = content.source
    scan = _Scan(source)
    try:
        root = scan.value(0)
    except FormatError as error:
        error.entry = error.entry or ".".join(scan.path) or None
        raise
    if scan.at != source.size:
        raise FormatError("bytes after the end of the map", expected=scan.at, found=source.size)
    resolver = Resolver(source.path, lambda key, ref: scan.storages[ref.key])
    return _unchunked(index_of(source, "flax-msgpack", root, scan.world, resolver, {}))


class _Scan(Cursor):
    """Objects of msgpack, of which the arrays' bytes are passed over.

    Attributes:
        path: the keys that lead to the object.
        storages: first byte of an array, as text -> its bytes.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.path: list[str] = []
        self.source = source
        self.world = TorchWorld(source.budget)
        self.storages: dict[str, Storage] = {}

    def value(self, depth: int) -> Any:
        """Return the next object."""
        self.world.budget.spend(STEP)
        first = self.take(1)[0]
        if first < 0x80 or first >= 0xE0:
            return first - (first & 0x80) * 2
        if first in _VALUES:
            return _VALUES[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        if first not in _SIZED:
            raise FormatError("not an object of msgpack", found=f"byte {first:#x} at {self.at - 1}")
        kind, size = _SIZED[first]
        count = self.number(size) if isinstance(size, str) else size
        if kind == "ext":
            return self._extension(count)
        if kind == "bin":
            return self.take(count)
        if kind == "str":
            try:
                return self.take(count).decode()
            except UnicodeDecodeError as error:
                raise FormatError("a text that is not UTF-8", found=str(error)) from error
        if depth > _MAX_DEPTH:
            raise FormatError("containers nest too deep", expected=f"at most {_MAX_DEPTH} levels")
        self.world.budget.spend(2 * STEP)
        if kind == "array":
            return [self.value(depth + 1) for _ in range(count)]
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if type(key) not in (str, bytes):  # msgpack refuses others unless it is told not to
                raise FormatError("a name in a map is not text", found=f"a {type(key).__name__}")
            if key in found:
                raise FormatError("a name occurs twice in one map", entry=str(key))
            self.path.append(str(key))
            found[key] = self.value(depth + 1)
            self.path.pop()
        return found

    def _extension(self, nbytes: int) -> object:
        kind, end = self.number(">b"), self.at + nbytes
        if kind == _COMPLEX:
            value: object = self.value(_MAX_DEPTH)
            if not isinstance(value, list) or not all(type(x) is float for x in value):
                raise FormatError("a complex number that is not two numbers", found=repr(value))
            made: object = complex(*value)
        elif kind in (_ARRAY, _SCALAR):
            made = self._array()
        else:
            self.skip(nbytes)
            made = self.world.block(f"msgpack extension type {kind}", called=True)
        if self.at != end:
            raise FormatError("an extension is not as long as it says", expected=end, found=self.at)
        return made

    def _array(self) -> TensorRef | Blocked:
        # The entry is named where errors leave the scanner. Joined for each array, a long name
        # would be paid for by none of them.
        no_array = "an array that is not a shape, a dtype and bytes"
        if self.take(1) != b"\x93":
            raise FormatError(no_array)
        sizes, dtype = self.value(_MAX_DEPTH), self.value(_MAX_DEPTH)
        kind, size = _SIZED.get(self.take(1)[0], ("", 0))
        if type(dtype) is not str or kind not in ("bin", "str"):
            raise FormatError(no_array)
        nbytes = self.number(size) if isinstance(size, str) else size
        start = self.at
        self.skip(nbytes)
        if dtype not in ITEMSIZE:
            return self.world.block(f"numpy.dtype({dtype[:100]})", called=True)
        shape = dense_shape(sizes, ".".join(self.path[-1:]), "size")
        expected = math.prod(shape) * ITEMSIZE[dtype]
        if nbytes != expected:
            raise FormatError(
                "an array's bytes are not what its shape and dtype need",
                expected=f"{expected} bytes for {dtype} {shape}",
                found=f"{nbytes} bytes",
            )
        name = str(start)
        self.storages[name] = Storage(self.source.path, start, nbytes, "cpu")
        stored = StorageRef(dtype, name, "cpu", math.prod(shape))
        return TensorRef(stored, dtype, 0, shape, row_major(shape))


def _unchunked(index: Index) -> Index:
    """Put the arrays together that flax stores as flat runs, since msgpack ends at 2 GiB."""
    entries, objects = dict(index.entries), dict(index.objects)
    for marker in [key for key in objects if key.rpartition(".")[2] == _CHUNKED]:
        key = marker.removesuffix(_CHUNKED).removesuffix(".")
        prefix = key and key + "."
        del objects[marker]
        shape = dense_shape(
            [objects.pop(name) for name in _numbered(prefix + "shape.", objects)], key, "size"
        )
        runs = [entries.pop(name) for name in _numbered(prefix + "chunks.", entries)]
        places = [(c.file, c.offset, run.numel) for run in runs for c in run.chunks]
        dtypes = {run.dtype for run in runs}
        if len(dtypes) != 1 or sum(run.numel for run in runs) != math.prod(shape):
            raise FormatError(
                "an array in several runs that do not make up its shape",
                entry=key,
                expected=f"{math.prod(shape)} elements of one dtype",
                found=f"{[run.numel for run in runs[:10]]} of {sorted(dtypes)}",
            )
        whole = key or ROOT_TENSOR
        entries[whole] = flat_entry(whole, dtypes.pop(), shape, places, runs[0].storage)
    return replace(index, entries=entries, objects=objects)


def _numbered(prefix: str, values: Mapping[str, object]) -> Iterator[str]:
    """Return ``prefix0``, ``prefix1`` and so on, as far as there are such keys."""
    return itertools.takewhile(values.__contains__, (f"{prefix}{at}" for at in itertools.count()))


READER = Reader(lambda content: _START.match(content.head), read_flax)

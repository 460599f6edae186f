"""The one data structure every format is read into: names -> dtype, shape, strides, byte range.

Standard library only. Without torch, a process cannot run the code of a file that nobody trusts.
"""

from __future__ import annotations

import bisect
import fnmatch
import math
import re
import struct
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Self, TypeVar

from torchlift._store.places import Stamp
from torchlift._system.text import clipped_list, printable
from torchlift.errors import (
    Argument,
    FormatError,
    Hint,
    MismatchError,
    did_you_mean,
)

#: Keys of tensors, and keys of other values.
_Keys = tuple[Collection[str], Collection[str]]

#: The one dtype table: torch's name -> bytes per element. Formats map their own names onto these.
ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip

#: dtypes whose numbers need a scale -> dtype of the stored numbers.
QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}

#: The header of a zip record before its name, without fields that nobody uses: magic, flags,
#: method, lengths of name and extra field.
LOCAL = struct.Struct("<4s2xHH4x12xHH")
LOCAL_MAGIC = b"PK\x03\x04"
ENCRYPTED = 0x1 | 0x20 | 0x40 | 0x2000

_LEAVE_OUT = Hint("Load without it: ", Argument("allow_unexpected", "[...] with its name"), ". Or ")


def _of_array(what: str, call: str) -> tuple[str, str, Hint]:
    """Return the fields of a `Lack` of arrays: torch does not have a dtype for them.

    Args:
        what: The kind of values.
        call: The call that makes numbers of such an array. Empty if it does not hold any.
    """
    why, way = f"a dtype of torch for {what}", "read it with numpy.load(path)."
    if call:
        way = (
            f"make a tensor of it with torch.from_numpy(array{call}), and pass "
            "[path, {name: tensor}]. numpy.load(path) reads the array."
        )
    return why, f"the array needs {why}, which does not exist", Hint(_LEAVE_OUT, way)


class Lack(StrEnum):
    """What a value needs so that it can be rebuilt, besides a global. The text says it.

    Attributes:
        what: The error.
        hint: The way out.
    """

    what: str
    hint: Hint

    def __new__(cls, text: str, what: str, hint: Hint) -> Self:
        """Return a member with its error and its way out."""
        made = str.__new__(cls, text)
        made._value_, made.what, made.hint = text, what, hint
        return made

    AMBIGUOUS = (
        "a name of its own",
        "two values have this key after their containers are joined with dots",
        Hint(_LEAVE_OUT, "rename one of them in the program that saved the file."),
    )
    SLICED = (
        "the slices of the other ranks",
        "the file holds one rank's slice of this tensor",
        Hint(
            "Open the folder with the files of all N ranks, named model_world_size_N_rank_0.pt, "
            "model_world_size_N_rank_1.pt and so on."
        ),
    )
    UNEQUAL = (
        "one value on all ranks",
        "the ranks saved different values for this key, or files without checksums",
        Hint(
            "If one rank has the right value, pass [folder, "
            "{name: torchlift.open(file)[name]}] as the checkpoint, with the file of that rank."
        ),
    )
    PARTITIONED = (
        "DeepSpeed's universal checkpoint",
        "torchlift reads only the weights of a DeepSpeed ZeRO checkpoint",
        Hint(
            "To resume the training, load the folder with DeepSpeed. To resume on another number "
            "of ranks, make a universal checkpoint first, with DeepSpeed's ds_to_universal.py. To "
            "convert the weights, pass ",
            Argument("exclude", "['optimizer']", ("optimizer",)),
            ".",
        ),
    )
    NESTED = (
        "a nested tensor",
        "torchlift does not read nested tensors",
        Hint(
            _LEAVE_OUT,
            "load the file with torch.load(path), and save the rows of the tensor instead, "
            "[*tensor.unbind()].",
        ),
    )
    TEXT = _of_array("text", "")
    DATES = _of_array("dates and times", ".view('int64')")
    RAW = _of_array("raw bytes", ".view('uint8')")
    RECORDS = _of_array("records", "['name of a field'].copy()")
    REAL = _of_array("real numbers of this size", ".astype('float64')")
    COMPLEX = _of_array("complex numbers of this size", ".astype('complex128')")
    UNKNOWN = _of_array("this type", "")


#: The lacks that depend on ranks.
OF_RANKS = (Lack.SLICED, Lack.UNEQUAL)
#: The globals that make a nested tensor, strided and jagged. An error names the tensor instead.
_NESTED = (
    "torch._utils._rebuild_nested_tensor", "torch.nested._internal.nested_tensor._rebuild_njt",
    "torch.nested._internal.nested_tensor.NestedTensor",
)  # fmt: skip

#: The encoding of numbers that lie somewhere inside the bytes of their chunks, see `resolved`.
UNRESOLVED = "unresolved"

#: The kind of a tensor whose class a caller must allow, and the kind of one rank's slice.
SUBCLASS, SLICE = "subclass", "slice"

#: ggml's number of a block type -> its name, values in a block, bytes of a block.
GGUF_BLOCKS: dict[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
#: Name of a GGUF type -> values in a block, bytes of a block. Includes plain numbers, because a
#: rename may compute something of them.
_BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    **{name: (values, nbytes) for name, values, nbytes in GGUF_BLOCKS.values()},
}  # fmt: skip

#: Encodings that leave every element in its place.
_ELEMENTWISE = frozenset({"deflated", "big-endian", "conjugate", "negative"})


@lru_cache(256)  # a model has few shapes, and each tensor needs its strides a dozen times
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor, as torch gives them.

    Example:
        >>> row_major((2, 3, 4)), row_major((2, 0, 4))
        ((12, 4, 1), (4, 4, 1))
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements with these strides lie in row-major order without gaps."""
    dense = row_major(shape)
    if stride == dense or 0 in shape:  # most tensors: 0.17 us, and 0.76 with the line below
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, stride, dense, strict=True))


class Record(NamedTuple):
    """One file inside a zip archive.

    Attributes:
        name: Name, with its top directory.
        offset: First payload byte in the archive file.
        nbytes: Payload bytes in the archive, compressed or not.
        size: Bytes after decompression.
        crc32: Checksum of the decompressed bytes. 0 means that the writer recorded none.
        method: 0 for stored, 8 for deflated, or the number of another compression.
    """

    name: str
    offset: int
    nbytes: int
    size: int
    crc32: int
    method: int


class Chunk(NamedTuple):
    """A run of bytes in one file that holds one box of a tensor.

    Attributes:
        file: Absolute path of the file.
        offset: First byte in the file, or in the inflated bytes of `packed`.
        nbytes: Length in bytes.
        start: Index of the box's first element in the tensor. All zeros for a whole tensor.
        shape: Shape of the box. The tensor's shape for a whole tensor.
        stride: Strides of the box inside the run, in elements, if the run holds more than the box.
            None for the tensor's strides (a single chunk) or row-major (one of several).
        packed: The deflated record that holds the bytes, or None.
    """

    file: str
    offset: int
    nbytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    packed: Record | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a tensor that is not strided numbers: torch makes it of other tensors.

    Attributes:
        name: ``"sparse_coo"``, ``"sparse_csr"``, ``"sparse_csc"``, ``"sparse_bsr"``,
            ``"sparse_bsc"``, ``"per_tensor_affine"``, ``"per_channel_affine"``, ``"meta"``,
            ``"slice"`` (one rank's part of a tensor) or ``"subclass"`` (of an allowed class).
        tensors: The tensors that it is made of, in the order of torch's rebuilder.
        facts: The other arguments of that rebuilder.
        classes: Name in files -> class that the caller allowed.
    """

    name: str
    tensors: tuple[TensorEntry, ...] = ()
    facts: tuple[Any, ...] = ()
    classes: Mapping[str, type] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return self.name.replace("_", " ")


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint, described without reading its values.

    Attributes:
        key: Key of the tensor. Names of containers are joined with dots.
        dtype: Name of the torch dtype, such as ``"float32"``.
        shape: Sizes in elements.
        stride: Strides in elements.
        nbytes: Size of a dense copy in bytes: ``numel * itemsize``.
        location: Device tag of the save, such as ``"cuda:1"``. It never selects a device.
        storage: Name of the storage. Two entries with the same name share memory.
        chunks: The places of the bytes. A strided tensor has one chunk, an empty tensor none, and a
            tensor of a distributed checkpoint one chunk for each box.
        requires_grad: Whether it was saved with ``requires_grad``, if the format records it.
        is_parameter: Whether it was saved as a parameter, if the format records it.
        encoding: Steps that turn the stored bytes into values: ``"deflated"``, ``"big-endian"``,
            ``"conjugate"``, ``"negative"``, or a GGUF type such as ``"Q4_K"``. Mostly empty.
        kind: Kind of the tensor, if it is not strided numbers. Its chunks and `nbytes` are those
            of the tensors that it is made of.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    location: str
    storage: str
    chunks: tuple[Chunk, ...]
    requires_grad: bool = False
    is_parameter: bool = False
    encoding: tuple[str, ...] = ()
    kind: Kind | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Return the bytes per element, at least 1."""
        return ITEMSIZE.get(QUANTIZED.get(self.dtype, self.dtype), 1)

    @property
    def needs_assembly(self) -> bool:
        """Return whether the bytes are more than one strided run of plain numbers."""
        chunks = self.chunks
        is_box = len(chunks) == 1 and chunks[0].stride is not None
        return len(chunks) > 1 or is_box or bool(self.encoding) or self.kind is not None

    @property
    def is_plain(self) -> bool:
        """Return whether it is strided numbers that each have their own bytes."""
        return self.kind is None and _ELEMENTWISE.issuperset(self.encoding)

    @property
    def can_be_sliced(self) -> bool:
        """Whether a slice has bytes of its own in the file, as numbers or as whole blocks."""
        return self.is_plain or (self.kind is None and self.encoding[0] in _BLOCKS)

    @property
    def block(self) -> tuple[int, int]:
        """Return the number of values in a block, and the bytes of a block."""
        found = _BLOCKS.get(self.encoding[0]) if self.encoding else None
        return found or (1, self.itemsize)

    @property
    def type_name(self) -> str:
        """Return the dtype with the kind before it, or the type of quantised blocks."""
        if self.kind is not None:
            return f"{self.kind.name} {self.dtype}"
        return self.dtype if self.is_plain else self.encoding[0]

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie in row-major order without gaps, as torch defines it."""
        return is_row_major(self.shape, self.stride)


class Storage(NamedTuple):
    """A run of bytes that one or more entries use.

    Attributes:
        file: Absolute path of the file.
        offset: First byte in the file, or in the inflated bytes of `packed`.
        nbytes: Length in bytes.
        location: Device tag.
        crc32: Recorded checksum of the bytes, or None.
        packed: The deflated record that holds the bytes, or None.
    """

    file: str
    offset: int
    nbytes: int
    location: str
    crc32: int | None = None
    packed: Record | None = None


_Row = TypeVar("_Row")
_Record = TypeVar("_Record")


class Records(Mapping[str, _Record], Generic[_Row, _Record]):
    """A mapping that makes each record from a checked row when it is first used.

    Most records of a large file are never used. Opening a safetensors file of 90,000 tensors
    takes 0.25 s. It takes 0.6 to 0.7 s if all entries are made.

    Args:
        rows: Key -> the row.
        make: (key, row) -> the record. Called once for each key.
    """

    __slots__ = ("_made", "_make", "_rows")

    def __init__(self, rows: Mapping[str, _Row], make: Callable[[str, _Row], _Record]) -> None:
        self._rows = rows
        self._make = make
        self._made: dict[str, _Record] = {}

    def __getitem__(self, key: str) -> _Record:
        made = self._made.get(key)
        return (
            self._made.setdefault(key, self._make(key, self._rows[key])) if made is None else made
        )

    def items(self) -> ItemsView[str, _Record]:
        """Return all items, as those of a dict: without a call for each, which is half as fast."""
        known, make = self._made, self._make
        rows = self._rows.items()
        self._made = {key: known[key] if key in known else make(key, row) for key, row in rows}
        return self._made.items()

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # `make` cannot be pickled

    def __repr__(self) -> str:
        return repr(dict(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, slots=True)
class Array:
    """A NumPy array among the values that are not tensors.

    Attributes:
        code: NumPy's name of its dtype, such as ``"<f8"``.
        shape: Sizes in elements.
        columns: Whether the bytes are in column-major order.
        data: The bytes.
    """

    code: str
    shape: tuple[int, ...]
    columns: bool
    data: bytes

    def __repr__(self) -> str:
        return f"numpy array {self.code} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A placeholder for a value of an index.

    Attributes:
        key: Key of the value. In `Index.templates` only its end, after the key of the container.
    """

    key: str


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a checkpoint: everything but its weights.

    Attributes:
        path: Absolute path of the file or directory.
        format: ``"torch-zip"``, ``"torch-legacy"``, ``"torchscript"``,
            ``"safetensors"``, ``"sharded"``, ``"dcp"``, ``"gguf"``, ``"npz"`` or ``"zero"``.
        tensors: Key -> entry, in file order. It includes blocked ones, of one rank's slices and of
            classes that a caller may allow.
        storages: Name of a storage -> its place.
        files: Data file -> its stamp when the index was read.
        objects: Key -> value that is not a tensor.
        metadata: The text metadata of the format.
        blocked: Dotted names of globals that only an unpickler could rebuild.
        module_versions: Path of a module -> its local ``_metadata``, as torch saves it.
        blocked_keys: Key -> why its value cannot be rebuilt: the name of a global, or a ``Lack``.
        blocked_tensors: Key of such a value -> the number of tensors in it. A tensor in several
            values counts for the first one. Values without tensors are left out.
        templates: Key of a list, of a tuple or of an extra state with tensors -> its containers,
            with a ``Leaf`` for each value. Dotted keys alone do not tell a list from a dict.
        aside: Top containers without a model, such as an optimizer's. A load without a root
            leaves them out.
        tree: The saved object, made of records of the pickle. None if the format has names only.
        guides: File without values, such as an index of shards -> its stamp.
        noted: Name that the file leaves out -> the key of its values. Another library noted this
            tie. A load uses it if the model lacks a value. It is not a key.
        records: Name of another record of an archive, or of a storage that no tensor uses -> its
            place, if it has a checksum. If a storage has this name, the record holds the storage
            and a header.
        hidden: Key -> entry of a tensor that is not shown: those of single ranks in the folder of a
            `torchlift.Keeper`.
        entries: The tensors that are not blocked. It follows from `tensors` and `blocked_keys`.
    """

    path: str
    format: str
    tensors: Mapping[str, TensorEntry]
    storages: Mapping[str, Storage]
    files: Mapping[str, Stamp]
    objects: Mapping[str, object] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    module_versions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    blocked_keys: Mapping[str, str] = field(default_factory=dict)
    blocked_tensors: Mapping[str, int] = field(default_factory=dict)
    templates: Mapping[str, object] = field(default_factory=dict)
    aside: tuple[str, ...] = ()
    tree: tuple[object] | None = field(default=None, repr=False)
    guides: Mapping[str, Stamp] = field(default_factory=dict)
    noted: Mapping[str, str] = field(default_factory=dict, repr=False)
    records: Mapping[str, Storage] = field(default_factory=dict, repr=False)
    hidden: Mapping[str, TensorEntry] = field(default_factory=dict, repr=False)
    entries: Mapping[str, TensorEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries, blocked = self.tensors, self.blocked_keys
        if any(key in entries for key in blocked):
            entries = {key: entry for key, entry in entries.items() if key not in blocked}
        object.__setattr__(self, "entries", entries)

    @property
    def nbytes(self) -> int:
        """Return the size of all storages, in bytes."""
        return sum(storage.nbytes for storage in self.storages.values())

    def storage_of(self, entry: TensorEntry) -> Storage | None:
        """Return the storage of an entry, or None for a box, whose name is empty."""
        return self.storages.get(entry.storage) if entry.storage else None

    @property
    def names_code(self) -> bool:
        """Return whether unpickling the file would run code, rather than only rebuild data."""
        return not all(map(_DATA.match, self.blocked))

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of keys that share a storage, in file order."""
        groups: dict[str, list[str]] = {}
        for entry in self.entries.values():
            if entry.chunks:
                groups.setdefault(entry.storage, []).append(entry.key)
        return tuple(tuple(keys) for keys in groups.values() if len(keys) > 1)


def join(
    path: str, format: str, indexes: Sequence[Index], metadata: Mapping[str, str], conflict: str
) -> Index:
    """Join the indexes of several files, whose storages must have different names.

    Args:
        path: Path of the whole checkpoint.
        format: Its format.
        indexes: The indexes of its files.
        metadata: Its metadata.
        conflict: The message for a key that two files have.

    Raises:
        FormatError: If two files have the same key.
    """
    keyed = "tensors", "objects", "blocked_keys"
    rest = "blocked_tensors", "storages", "files", "module_versions", "templates", "records"
    names = (*keyed, *rest, "noted")
    merged: dict[str, Any] = {name: {} for name in names}
    for index in indexes:
        for key in {**index.tensors, **index.objects, **index.blocked_keys}:
            if any(key in merged[name] for name in keyed):
                raise FormatError(conflict, entry=key, found=f"again in {index.path}")
        for name, values in merged.items():
            values.update(getattr(index, name))
    blocked = tuple(dict.fromkeys(name for index in indexes for name in index.blocked))
    return Index(path=path, format=format, metadata=metadata, blocked=blocked, **merged)


def used_by(
    entries: Mapping[str, TensorEntry], storages: Mapping[str, Storage]
) -> dict[str, Storage]:
    """Return the storages that entries use."""
    names = {entry.storage for entry in entries.values()}
    spots = sorted(_spot(chunk) for entry in entries.values() for chunk in entry.chunks)

    def is_used(storage: Storage) -> bool:
        first = _spot(storage)
        at = bisect.bisect_left(spots, first)
        return at < len(spots) and spots[at] < first._replace(offset=first.offset + storage.nbytes)

    return {name: place for name, place in storages.items() if name in names or is_used(place)}


def still_checked(used: Mapping[str, Storage], indexes: Iterable[Index]) -> dict[str, Storage]:
    """Return the other records of indexes, and the storages without a tensor.

    Damage outside of the tensors that are left is still damage of the file.
    """
    found = {name: place for index in indexes for name, place in index.records.items()}
    for index in indexes:
        for name, place in index.storages.items():
            if place.crc32 is not None and name not in used:
                found[name] = place
    return found


class _Spot(NamedTuple):
    """A place: its file, the deflated record that holds it (or -1), and its first byte."""

    file: str
    record: int
    offset: int


def _spot(place: Chunk | Storage) -> _Spot:
    return _Spot(place.file, place.packed.offset if place.packed else -1, place.offset)


def renamed(index: Index, rename: Callable[[str], str | None]) -> Index:
    """Return an index of the keys to which `rename` gives a name, under these names.

    Storages that only other keys use are left out, so that sizes count these keys only.
    """

    def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
        names = ((rename(key), value) for key, value in values.items())
        return {name: value for name, value in names if name is not None}

    tensors = {name: entry._replace(key=name) for name, entry in chosen(index.tensors).items()}
    blocked_keys, storages = chosen(index.blocked_keys), used_by(tensors, index.storages)
    return replace(
        index,
        tensors=tensors,
        objects=chosen(index.objects),
        blocked_keys=blocked_keys,
        blocked_tensors=chosen(index.blocked_tensors),
        blocked=globals_in(blocked_keys),
        storages=storages,
        records=still_checked(storages, [index]),
    )


def free_name(index: Index, name: str) -> str:
    """Return the name, with underscores in front if a container or value at the top has it."""
    tops = {k.partition(".")[0] for k in (*index.entries, *index.objects, *index.blocked_keys)}
    while name in tops:
        name = f"_{name}"
    return name


def of_model(index: Index) -> Index:
    """Return an index without its containers that do not hold a model."""
    if not index.aside:
        return index
    aside = tuple(name + "." for name in index.aside)
    model = renamed(index, lambda key: None if key.startswith(aside) or key in index.aside else key)
    return replace(model, aside=())


def allowing(index: Index, classes: Mapping[str, type]) -> Index:
    """Return an index in which tensors of these classes, by dotted name, are entries.

    Tensors of classes that were allowed before may contain tensors of these classes.
    """
    if not classes:
        return index
    tensors = {key: _allowing(entry, classes) for key, entry in index.tensors.items()}
    blocked = {
        key: name
        for key, name in index.blocked_keys.items()
        if key not in tensors or name not in classes
    }
    loaded = (entry.kind for key, entry in tensors.items() if key not in blocked)
    if not any(kind is not None and kind.classes for kind in loaded):
        return index
    return replace(
        index,
        tensors=tensors,
        blocked_keys=blocked,
        blocked_tensors={k: n for k, n in index.blocked_tensors.items() if k in blocked},
        blocked=globals_in(blocked),
    )


def _allowing(entry: TensorEntry, classes: Mapping[str, type]) -> TensorEntry:
    """Return an entry that these classes may rebuild, with the entries that it is made of."""
    kind = entry.kind
    if kind is None or kind.name != SUBCLASS:
        return entry
    tensors = tuple([_allowing(inner, classes) for inner in kind.tensors])
    kind = replace(kind, tensors=tensors, classes={**kind.classes, **classes})
    return entry._replace(kind=kind)


def lacking(path: str, key: str, why: str | None) -> FormatError | None:
    """Return the error for a value that cannot be rebuilt, or None if a global is the reason.

    Args:
        path: Path of the checkpoint.
        key: Key of the value.
        why: The reason in `Index.blocked_keys`.
    """
    lack = Lack.NESTED if why in _NESTED else why
    if not isinstance(lack, Lack):
        return None
    return FormatError(lack.what, file=path, entry=key, hint=lack.hint)


#: What a glob pattern has, and a name does not.
_WILDCARD = re.compile(r"[*?[]")

#: Globals that cannot become entries, but are data: kinds of tensors.
_DATA = re.compile(r"torch\.(Tensor|UntypedStorage|_utils\._rebuild_\w+)$")


def globals_in(blocked_keys: Mapping[str, str]) -> tuple[str, ...]:
    """Return the globals that blocked values would have needed, each once."""
    names = (why for why in blocked_keys.values() if not isinstance(why, Lack))
    return tuple(dict.fromkeys(names))


def allowed(names: Iterable[str], patterns: Collection[str]) -> set[str]:
    """Return the names that match a pattern. ``*`` stands for any text, dots included.

    A bracket also matches itself: ``blocks[0].*`` matches ``blocks[0].w`` and ``blocks0.w``.
    """
    return set[str]().union(*_find_matches(names, patterns).values())


def _find_matches(names: Iterable[str], patterns: Iterable[str]) -> dict[str, set[str]]:
    """Return pattern -> the names that it matches.

    A name is looked up, and a pattern is compared only with names that begin as it does. Each of
    2,000 names compared with each of 100,000 took 116 s.
    """
    known, found = {*names}, dict[str, set[str]]()
    ordered = list[str]()
    for pattern in patterns:
        found[pattern] = known & {pattern}
        start = _WILDCARD.split(pattern, 1)[0]
        if start == pattern:
            continue
        ordered = ordered or sorted(known)
        near = _names_starting_with(start, ordered)
        for text in {pattern, pattern.replace("[", "[[]")}:
            found[pattern].update(filter(re.compile(fnmatch.translate(text)).match, near))
    return found


def _names_starting_with(start: str, ordered: list[str]) -> list[str]:
    """Return the names of a sorted list that start with a text."""
    first = bisect.bisect_left(ordered, start)
    last = bisect.bisect_right(ordered, start, first, key=lambda name: name[: len(start)])
    return ordered[first:last]


def left_out(
    tensors: Collection[str],
    others: Collection[str],
    include: Collection[str],
    exclude: Collection[str],
    path: str,
) -> set[str]:
    """Return the keys that patterns leave out.

    Args:
        tensors: Keys of tensors.
        others: Keys of other values.
        include: Patterns. A key must match at least one.
        exclude: Patterns. A key must match none.
        path: Path of the source, for errors.

    Raises:
        MismatchError: If a pattern matches nothing, or if the patterns leave out all tensors.
    """
    if not exclude and "*" in include:
        return set()
    keys = [*tensors, *others]
    found = _find_matches(keys, (*include, *exclude))
    for pattern, fitting in found.items():
        if pattern != "*" and not fitting:
            raise MismatchError(
                f"no key fits the pattern {pattern!r}",
                file=path,
                hint=did_you_mean(pattern, keys) or "Look at the keys with torchlift inspect.",
            )
    left, excluded = (
        {name for pattern in patterns for name in found[pattern]} for patterns in (include, exclude)
    )
    left -= excluded
    filters = f"include={list(include)!r}, exclude={list(exclude)!r}"
    kept = [key for key in tensors if key in left], left
    require_kept(path, (tensors, keys), kept, "the patterns leave out", filters)
    return {key for key in keys if key not in left}


def require_kept(path: str, before: _Keys, after: _Keys, leaves_out: str, filters: str) -> None:
    """Refuse a filter that leaves out every tensor, or every value of a source without tensors.

    Args:
        path: Path of the source.
        before: Keys of tensors, and others, before the filter.
        after: The same after the filter.
        leaves_out: Name of the filter, and a verb.
        filters: The arguments of the caller.

    Raises:
        MismatchError: If nothing is left.
    """
    kind = 0 if before[0] else 1
    if before[kind] and not after[kind]:
        raise MismatchError(
            f"{leaves_out} everything{' that is a tensor' * (not kind)}: {printable(filters, 300)}",
            file=path,
            found=f"left out: {clipped_list(before[kind])}",
            hint="List the keys with torchlift inspect, and select some of them.",
        )


def matching(index: Index, patterns: Sequence[str]) -> Index:
    """Return an index of the keys that match one of the glob patterns."""
    keys = allowed((*index.tensors, *index.objects, *index.blocked_keys), patterns)
    return renamed(index, lambda key: key if key in keys else None)

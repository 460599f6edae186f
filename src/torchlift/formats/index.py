"""The one data structure every format is read into: names -> dtype, shape, strides, byte range.

Standard library only. Nothing here knows torch, so a file nobody trusts can be looked at by a
process that could not run its code if it wanted to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchlift.errors import IntegrityError

#: The one dtype table: torch's name -> bytes per element. Formats map their own names onto these.
ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of bytes in one file that holds one box of a tensor.

    Attributes:
        file: absolute path of the file.
        offset: first byte, counted from the start of the file.
        nbytes: length in bytes.
        start: index of the box's first element in the tensor; all zeros for a whole tensor.
        shape: extent of the box; the tensor's shape for a whole tensor.
        stride: strides of the box inside the run, in elements, where the run holds more than the
            box. None: those of the tensor for its only chunk, row-major for one of several.
    """

    file: str
    offset: int
    nbytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint, described without reading it.

    Attributes:
        key: its name, containers joined by dots.
        dtype: torch's name of the element type, such as ``"float32"``.
        shape: sizes in elements.
        stride: strides in elements.
        nbytes: ``numel * itemsize``: what a dense copy takes, in bytes. A view of a larger storage
            counts only its own elements, a broadcast one (stride 0) every repetition.
        location: the device tag it was saved with, such as ``"cuda:1"``. Information, never obeyed.
        storage: identity of the bytes; two entries with an equal ``storage`` share memory.
        chunks: where the bytes are. One chunk covers the span from the first to the last element
            of a strided tensor; an empty tensor has none. Several are boxes that together are the
            tensor, as a distributed checkpoint stores it.
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

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps, as torch defines it."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if stride != expected:
                    return self.numel == 0
                expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes that one or more entries look into.

    Attributes:
        file: absolute path of the file.
        offset: first byte in the file.
        nbytes: length in bytes.
        location: device tag.
        crc32: checksum the format recorded, or None where it recorded none.
    """

    file: str
    offset: int
    nbytes: int
    location: str
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What identifies a file's content when it was indexed: size, mtime, device and inode."""

    size: int
    mtime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """That of an open file."""
        now = os.fstat(descriptor)
        return cls(now.st_size, now.st_mtime_ns, now.st_dev, now.st_ino)

    def check(self, file: str, descriptor: int) -> None:
        """Refuse an open file that is not the one that was indexed.

        Raises:
            IntegrityError: it has changed, or is another one under the same name.
        """
        found = FileStamp.of(descriptor)
        if found != self:
            raise IntegrityError(
                "the file changed after it was opened",
                file=file,
                expected=f"{self.size} bytes, modified at {self.mtime_ns} ns, inode {self.inode}",
                found=f"{found.size} bytes, modified at {found.mtime_ns} ns, inode {found.inode}",
                hint="Open the checkpoint again once nobody writes to it.",
            )


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands, in a template of a container, for the value that the index has under a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Index:
    """Everything a checkpoint says about itself, without its weights.

    Attributes:
        path: the file or directory that was opened, absolute.
        format: ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``.
        entries: key -> entry, in file order.
        storages: storage identity -> where its bytes are.
        files: every data file involved -> its stamp at the time of reading.
        objects: key -> leaf that is not a tensor.
        metadata: what the format itself records, as text.
        blocked: dotted names of globals that only an unpickler could rebuild; never imported.
        module_versions: torch's per-module ``_metadata`` (prefix -> local metadata), where present.
        blocked_keys: key -> the name of the global that its value would have needed.
        templates: key of a module's extra state -> its containers as they were, with a ``Leaf`` for
            every value. Dotted keys alone do not tell a list from a dict, nor 1 from "1".
    """

    path: str
    format: str
    entries: Mapping[str, TensorEntry]
    storages: Mapping[str, Storage]
    files: Mapping[str, FileStamp]
    objects: Mapping[str, object] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    module_versions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    blocked_keys: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, object] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of unique storage."""
        return sum(storage.nbytes for storage in self.storages.values())

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of keys that share a storage, in file order."""
        groups: dict[str, list[str]] = {}
        for entry in self.entries.values():
            if entry.chunks:
                groups.setdefault(entry.storage, []).append(entry.key)
        return tuple(tuple(keys) for keys in groups.values() if len(keys) > 1)


def under(index: Index, root: str) -> Index | None:
    """What `index` holds below the container `root`, with that prefix stripped; None if nothing.

    Storages that only other parts of the file use are left out, so sizes are those of the part.
    """
    prefix = root + "."
    cut = len(prefix)
    entries = {
        key[cut:]: replace(entry, key=key[cut:])
        for key, entry in index.entries.items()
        if key.startswith(prefix)
    }
    objects = {k[cut:]: v for k, v in index.objects.items() if k.startswith(prefix)}
    blocked = {k[cut:]: v for k, v in index.blocked_keys.items() if k.startswith(prefix)}
    if not (entries or objects or blocked):
        return None
    used = {entry.storage for entry in entries.values()}
    spots = {(c.file, c.offset) for e in entries.values() if len(e.chunks) > 1 for c in e.chunks}
    return replace(
        index,
        entries=entries,
        objects=objects,
        blocked_keys=blocked,
        blocked=tuple(dict.fromkeys(blocked.values())),
        storages={
            name: storage
            for name, storage in index.storages.items()
            if name in used or (storage.file, storage.offset) in spots
        },
        templates={
            k[cut:]: _cut_leaves(tree, cut)
            for k, tree in index.templates.items()
            if k.startswith(prefix)
        },
        module_versions={
            k[cut:] if k != root else "": v
            for k, v in index.module_versions.items()
            if k == root or k.startswith(prefix)
        },
    )


def _cut_leaves(tree: object, cut: int) -> object:
    if isinstance(tree, Leaf):
        return Leaf(tree.key[cut:])
    if isinstance(tree, dict):
        return {key: _cut_leaves(value, cut) for key, value in tree.items()}
    assert isinstance(tree, (list, tuple))
    return type(tree)([_cut_leaves(value, cut) for value in tree])

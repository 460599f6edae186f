"""Files of ``torch.save`` before torch 1.6: a stream of pickles and storages, or the older tar.

The stream: five pickles (magic, protocol, what the machine was, the object, the keys of its
storages), then for each key an int64 count of elements and their bytes, without any alignment. The
tar: ``storages`` and ``tensors``, in which pickles and bytes alternate, and ``pickle``, which
refers to both. All numbers are little-endian, whatever the machine was: torch converts them when it
writes (torch/csrc/serialization.cpp, ``THPStorage_writeFileRaw``) and reads ``little_endian``
nowhere.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.index import QUANTIZED, Index, Storage
from torchlift.formats.reader import Content, Reader
from torchlift.formats.source import Source, errors_name
from torchlift.formats.torch_pickle import (
    STORAGES,
    STORED_SIZE,
    Global,
    StorageRef,
    TensorRef,
    TorchWorld,
)
from torchlift.formats.torch_zip import Find, Resolver, index_of
from torchlift.formats.unpickle import Budget, read_pickle

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
#: The magic number as pickles spell it: in binary, and in protocols 0 and 1 as text.
_MAGIC_BYTES = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_MAGIC_TEXT = b"L%dL\n." % _MAGIC

#: Most bytes of one pickle, and bytes that are read first of a long and of a short one.
_MAX_PICKLE, _LONG, _OF_URL, _SHORT = 1 << 30, 1 << 22, 1 << 15, 1 << 9

_TAR_MAGIC, _TAR_MAGIC_AT, _BLOCK = b"ustar", 257, 512
_MEMBERS = ("sys_info", "pickle", "storages", "tensors")
#: An extended header as Python writes it for times. One could also change names and sizes.
_EXTENDED = re.compile(rb"(\d+ (mtime|atime|ctime|uid|gid|uname|gname)=[\w.-]*\n)*")

_World = TypeVar("_World", bound=TorchWorld)


def is_legacy(head: bytes) -> bool:
    """Return whether a file starts like a stream."""
    return _MAGIC_BYTES in head[:32] if head[:1] == b"\x80" else head.startswith(_MAGIC_TEXT)


def is_tar(head: bytes) -> bool:
    """Return whether a file starts like a tar archive."""
    return head.startswith(_TAR_MAGIC, _TAR_MAGIC_AT)


def _is_summed(header: bytes) -> bool:
    """Return whether a block is a header to who looks at nothing but its sum, as torch does."""
    found = sum(header[:148]) + sum(header[156:]) + 8 * 32
    return len(header) == _BLOCK and found == _number_in(header[148:156])


class _Stream:
    """Pickles and bytes that follow each other.

    Attributes:
        pos: the next byte.
    """

    def __init__(self, source: Source, what: str) -> None:
        self.source = source
        self.what = what
        self.pos = 0

    def pickle(
        self, what: str, make: Callable[[Budget], _World], first: int = _SHORT
    ) -> tuple[object, _World]:
        """Read one pickle.

        Args:
            what: what it is, for errors.
            make: makes the world that gives its names a meaning.
            first: bytes to try first.

        Returns:
            What it describes, and the world.
        """
        if self.source.is_remote:  # whose tensors are behind it: four times more is a request more
            first = min(first, _OF_URL)
        while True:
            rest = min(self.source.size - self.pos, _MAX_PICKLE)
            data = self.source.read(self.pos, min(first, rest), what)
            world = make(self.source.budget)
            try:
                with errors_name(self.source.path, what):
                    found, end = read_pickle(data, world)
            except FormatError as error:
                # Where a pickle ends is not known before it was read: it may only need more bytes.
                is_short = isinstance(error.__cause__, (IndexError, ValueError, struct.error))
                if first >= rest or not is_short:
                    raise
                first *= 4
                continue
            self.pos += end
            return found, world

    def plain(self, what: str) -> object:
        """Read a pickle of plain data.

        Raises:
            UnsafeError: it names a global.
        """
        found, world = self.pickle(what, TorchWorld)
        if world.blocked:
            raise UnsafeError(
                "a pickle of plain data names a global: unpickling it would run code",
                entry=what,
                found=next(iter(world.blocked)),
            )
        return found

    def numbers(self, layout: str) -> tuple[int, ...]:
        """Read numbers."""
        data = self.source.read(self.pos, struct.calcsize(layout), self.what)
        self.pos += len(data)
        return struct.unpack(layout, data)

    def storage(self, ref: StorageRef, what: str) -> Storage:
        """Skip a count of elements and their bytes; return where they are.

        Raises:
            FormatError: another count than the tensors say, or the file ends before.
        """
        (count,) = self.numbers("<q")
        start, nbytes = self.pos, ref.numel * STORED_SIZE[ref.dtype]
        if count != ref.numel:
            raise FormatError(
                "a storage does not have the size its tensors say",
                entry=what,
                expected=f"{ref.numel} elements",
                found=f"{count}",
            )
        self.source.check(start, nbytes, "a storage", what)
        self.pos += nbytes
        return Storage(self.source.path, self.source.start + start, nbytes, ref.location)


class _StreamWorld(TorchWorld):
    """Persistent ids of a stream.

    Attributes:
        views: key of a view -> the storage's key, the first element and how many.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.views: dict[str, tuple[str, int, int]] = {}

    def persistent(self, identity: object) -> object:
        """Return the storage, or the class of a module, that a persistent id describes."""
        if type(identity) is tuple and len(identity) == 4 and identity[0] == "module":
            return identity[1]  # a class, with the text of its source
        if type(identity) is not tuple or len(identity) != 6:
            return super().persistent(None)
        ref = super().persistent(identity[:5])
        if not isinstance(ref, StorageRef) or identity[5] is None:
            return ref
        key, start, numel = _fields(identity[5], (str, int, int), "a view of a storage", ref.key)
        if self.views.setdefault(key, (ref.key, start, numel)) != (ref.key, start, numel):
            raise FormatError("two views of storages have one key", entry=key)
        return replace(ref, view=(start, numel))


def _fields(found: object, kinds: Sequence[type], what: str, entry: str) -> tuple[Any, ...]:
    """Return a tuple of fields of the kinds that are expected."""
    fields = found if type(found) is tuple and len(found) == len(kinds) else ()
    if not fields or not all(map(isinstance, fields, kinds)):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise FormatError(
            f"{what} is not ({names})", entry=entry, found=f"a {type(found).__name__}"
        )
    return fields


def read_torch_legacy(source: Source) -> Index:
    """Read the index of a stream.

    What follows the last storage is left alone, as torch leaves it: several objects may have been
    saved into one file, and the first one counts.

    Raises:
        FormatError: not such a file, damaged, truncated or inconsistent.
        UnsafeError: a pickle of plain numbers names a global.
    """
    stream = _Stream(source, "the storages")
    if _is_summed(source.read(0, min(_BLOCK, source.size))):
        raise FormatError(
            "a stream of pickles that is a tar archive, too",
            hint="torch reads the archive and other programs the stream; write the file again.",
        )
    for what, expected in (("the magic number", _MAGIC), ("the protocol", _PROTOCOL)):
        found = stream.plain(what)
        if type(found) is not int or found != expected:
            raise FormatError("not a torch file, or damaged", entry=what, expected=expected)
    metadata = _machine(stream.plain("sys_info"))
    root, world = stream.pickle("the object", _StreamWorld, _LONG)
    keys = stream.plain("the storage keys")
    if not isinstance(keys, list):
        raise FormatError("the storage keys are not a list", found=f"a {type(keys).__name__}")
    if both := world.views.keys() & world.storages.keys():
        raise FormatError("a view of a storage has the key of a storage", entry=min(both))
    storages: dict[str, Storage] = {}
    if source.is_remote:
        counts, at = list[tuple[int, int]](), stream.pos
        for key in keys:
            ref = world.storages.get(key) if type(key) is str else None
            if ref is None:
                break
            counts.append((at, at + 8))
            at += 8 + max(0, ref.numel) * STORED_SIZE[ref.dtype]
        source.expect(counts)
    for key in keys:
        ref = world.storages.get(key) if type(key) is str else None
        if ref is None or key in storages:
            problem = "a storage that no tensor uses" if ref is None else "a storage is there twice"
            raise FormatError(problem, entry=str(key) if isinstance(key, (str, int)) else None)
        storages[key] = stream.storage(ref, key)
    resolver = Resolver(source.path, _finder(storages))
    return index_of(source, "torch-legacy", root, world, resolver, metadata)


def _machine(info: object) -> dict[str, str]:
    """Return what the file says about the machine that wrote it."""
    if not isinstance(info, dict):
        raise FormatError("sys_info is not a dict", entry="sys_info", found=type(info).__name__)
    return {
        key: str(value)
        for key, value in info.items()
        if type(key) is str and type(value) in (bool, int, str)
    }


def _finder(storages: Mapping[str, Storage]) -> Find:
    def find(key: str, ref: StorageRef) -> Storage:
        storage = storages.get(ref.key)
        if storage is None:
            raise FormatError(
                "a tensor's storage is missing", entry=key, expected=f"storage {ref.key}"
            )
        return storage

    return find


# ---- the tar


class _TarWorld(TorchWorld):
    """Persistent ids of the ``pickle`` in a tar: the numbers of tensors and storages."""

    def __init__(self, made: Mapping[str, object], budget: Budget) -> None:
        super().__init__(budget)
        self._made = made

    def persistent(self, identity: object) -> object:
        """Return the tensor or storage with a number, or the class of a module."""
        if type(identity) is tuple and identity:
            return identity[0]
        found = self._made.get(_number(identity, "a persistent id"))
        if found is None:
            raise FormatError("the pickle refers to a tensor that is not there", found=identity)
        return found


def read_torch_tar(content: Content) -> Index:
    """Read the index of a tar.

    Raises:
        FormatError: not one of torch, damaged, truncated or inconsistent.
        UnsafeError: a member would leave the directory, or a pickle of numbers names a global.
    """
    source = content.source
    members = _members(source)
    missing = [name for name in _MEMBERS[1:] if name not in members]
    if missing:
        raise FormatError(
            "a tar archive that torch.save did not write",
            expected=f"the members {', '.join(_MEMBERS)}",
            found=", ".join(list(members)[:10]) or "none",
            hint="Unpack it first.",
        )
    metadata = {}
    if "sys_info" in members:
        metadata = _machine(_Stream(members["sys_info"], "sys_info").plain("sys_info"))
    storages, made = _tar_storages(_Stream(members["storages"], "storages"))
    named = _tar_tensors(_Stream(members["tensors"], "tensors"), made)
    stream = _Stream(members["pickle"], "pickle")
    root, world = stream.pickle("pickle", partial(_TarWorld, made), _LONG)
    world.blocked = {**named, **world.blocked}
    resolver = Resolver(source.path, _finder(storages))
    return index_of(source, "torch-legacy", root, world, resolver, metadata)


_TENSOR_TYPES = {
    prefix + name.removeprefix("torch.").replace("Storage", "Tensor")
    for name in STORAGES
    for prefix in ("torch.", "torch.cuda.")
}


def _tar_storages(stream: _Stream) -> tuple[dict[str, Storage], dict[str, object]]:
    """Read ``storages``: where each one is; and what its number, or that of a view, stands for."""
    storages: dict[str, Storage] = {}
    made: dict[str, object] = {}
    for _ in range(_count(stream)):
        found, _ = stream.pickle("storages", TorchWorld)
        key, location, kind = _fields(found, (object, str, Global), "a storage", "storages")
        name = _number(key, "storages")
        if kind.name not in STORAGES or STORAGES[kind.name] in QUANTIZED or name in made:
            raise FormatError("a storage of no known type, or twice", entry=name, found=kind.name)
        (numel,) = stream.numbers("<q")
        if not 0 <= numel < 1 << 62:
            raise FormatError("a storage has an impossible size", entry=name, found=numel)
        stream.pos -= 8
        made[name] = ref = StorageRef(STORAGES[kind.name], name, location, numel)
        storages[name] = stream.storage(ref, name)
    views = stream.plain("the views in storages")
    for view in views if isinstance(views, list) else [None]:
        kinds = (object, object, int, int)
        target, root, first, numel = _fields(view, kinds, "a view of a storage", "storages")
        base, name = made.get(_number(root, "storages")), _number(target, "storages")
        if not isinstance(base, StorageRef) or base.view or name in made:
            raise FormatError("a view of a storage that is not there, or twice", entry=name)
        made[name] = replace(base, view=(first, numel))
    return storages, made


def _tar_tensors(stream: _Stream, made: dict[str, object]) -> dict[str, None]:
    """Read ``tensors`` and add what their numbers stand for; return the globals named in it."""
    named: dict[str, None] = {}
    for _ in range(_count(stream)):
        found, world = stream.pickle("tensors", TorchWorld)
        key, storage, _ = _fields(found, (object, object, object), "a tensor", "tensors")
        # Their types are only named; whatever else is named there, torch would import.
        named.update(dict.fromkeys(world.blocked.keys() - _TENSOR_TYPES))
        name, ref = _number(key, "tensors"), made.get(_number(storage, "tensors"))
        if not isinstance(ref, StorageRef) or name in made:
            raise FormatError("a tensor without its storage, or twice", entry=name)
        (ndim,) = stream.numbers("<i4x")
        if not 0 <= ndim <= 64:
            raise FormatError("a tensor of absurd dimensions", entry=name, found=ndim)
        size, stride = stream.numbers(f"<{ndim}q"), stream.numbers(f"<{ndim}q")
        (offset,) = stream.numbers("<q")
        made[name] = TensorRef(ref, ref.dtype or "uint8", offset, size, stride)
    return named


def _count(stream: _Stream) -> int:
    count = stream.plain(f"the count in {stream.what}")
    if type(count) is not int or not 0 <= count <= stream.source.size:
        raise FormatError("an impossible count", entry=stream.what)
    return count


def _number(key: object, what: str) -> str:
    """Return a key, which torch wrote as an integer in one place and as its text in another."""
    if type(key) is int and key.bit_length() < 65:
        return str(key)
    if type(key) is not str or len(key) > 30:
        raise FormatError("a key is not a number", entry=what, found=f"a {type(key).__name__}")
    return key


def _members(source: Source) -> dict[str, Source]:
    """Return the files of a tar by name.

    Written for archives that nobody vouches for: nothing is unpacked, and a link, a device or a
    name that leads elsewhere is refused.
    """
    members: dict[str, Source] = {}
    at = 0
    while at + _BLOCK <= source.size:
        header = source.read(at, _BLOCK)
        if not header.strip(b"\0"):
            break
        name = header[:100].partition(b"\0")[0].decode("utf-8", "replace")
        kind, size = header[156:157], _number_in(header[124:136])
        if not _is_summed(header):
            raise FormatError("the header of a member of the tar is damaged", entry=name)
        is_folder = kind == b"5" or (kind == b"\0" and name.endswith("/"))
        if size is None or (is_folder and size):  # a folder has no content to skip, to tarfile
            found = header[124:136]
            raise FormatError("a member of the tar has an impossible size", entry=name, found=found)
        start = at + _BLOCK
        member = source.window(start, size, "a member of the tar", name)
        at = start + -(-size // _BLOCK) * _BLOCK
        if kind == b"x":
            what = "an extended header of the tar"
            if not _EXTENDED.fullmatch(member.read_all(1 << 16, what)):
                raise FormatError(f"{what} that torch does not write", entry=name)
        if kind == b"x" or is_folder:  # an extended header is one of the next member
            continue
        name = name.removeprefix("./")
        is_elsewhere = header[345:346] != b"\0" or name.startswith("/") or ".." in name.split("/")
        if kind not in b"0\0" or is_elsewhere:  # the rest of a long name, its folders, is there
            raise UnsafeError(
                "a member of the tar is a link or a device, or leaves the directory",
                entry=name,
                expected=f"plain files {', '.join(_MEMBERS)}",
            )
        if name in members:
            raise FormatError("two members of the tar have this name", entry=name)
        if len(members) > 1000:
            raise FormatError("a tar archive of many files", hint="Unpack it first.")
        members[name] = member
    return members


def _number_in(field: bytes) -> int | None:
    """Return the octal number in a header, or None."""
    text = field.partition(b"\0")[0].strip(b" ")
    return int(text, 8) if re.fullmatch(b"[0-7]+", text) else None


TARS = Reader(lambda content: is_tar(content.head), read_torch_tar)

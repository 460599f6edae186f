"""Files of ``torch.save`` before torch 1.6: a stream of pickles and storages.

The file has five pickles: magic, protocol, a description of the machine, the object, and the keys
of its storages. For each key, an int64 count and the bytes of the elements follow, unaligned.
All numbers are little-endian on every machine: torch converts them when it writes
(torch/csrc/serialization.cpp, ``THPStorage_writeFileRaw``) and never reads ``little_endian``. The
tar archives of torch's first releases, and storages that are views of others, are refused.
"""

from __future__ import annotations

import re
import struct

from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.index import Index, Storage
from torchlift.formats.source import Source, errors_name
from torchlift.formats.table import LEGACY_MAGIC
from torchlift.formats.torch_pickle import STORED_SIZE, StorageRef, TorchWorld
from torchlift.formats.torch_zip import Resolver, index_of
from torchlift.formats.unpickle import read_pickle

_PROTOCOL = 1001
#: Most bytes of one pickle. First bytes to read: of a long one, at a URL, of a short one.
_MAX_PICKLE, _LONG, _OF_URL, _SHORT = 1 << 30, 1 << 22, 1 << 15, 1 << 9

#: Bytes of a header in a tar archive.
_BLOCK = 512


def _is_summed(header: bytes) -> bool:
    """Return whether torch takes a block for a tar header: it checks only the sum."""
    found = sum(header[:148]) + sum(header[156:]) + 8 * 32
    return len(header) == _BLOCK and found == _number_in(header[148:156])


class _Stream:
    """Consecutive pickles and bytes.

    Attributes:
        pos: Position of the next byte.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.pos = 0

    def pickle(self, what: str, first: int = _SHORT) -> tuple[object, TorchWorld]:
        """Read one pickle.

        Args:
            what: Name of the pickle in errors.
            first: Number of bytes to try first.

        Returns:
            The object, and the world.
        """
        if self.source.is_remote:  # the weights follow: a larger first read would fetch them
            first = min(first, _OF_URL)
        while True:
            rest = min(self.source.size - self.pos, _MAX_PICKLE)
            data = self.source.read(self.pos, min(first, rest), what)
            world = _StreamWorld(self.source.budget)
            try:
                with errors_name(self.source.path, what):
                    found, end = read_pickle(data, world)
            except FormatError as error:
                # The end of a pickle is only known after reading it: it may need more bytes.
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
            UnsafeError: If it names a global.
        """
        found, world = self.pickle(what)
        if world.blocked:
            raise UnsafeError(
                "a pickle of plain data names a global, and unpickling it would run code",
                entry=what,
                found=next(iter(world.blocked)),
            )
        return found

    def storage(self, ref: StorageRef, what: str) -> Storage:
        """Skip a count of elements and their bytes. Return their place.

        Raises:
            FormatError: If the file ends early.
        """
        count = int.from_bytes(self.source.read(self.pos, 8, what), "little", signed=True)
        start, nbytes = self.pos + 8, count * STORED_SIZE[ref.dtype]
        self.source.check(start, nbytes, "a storage", what)
        self.pos = start + nbytes
        return Storage(self.source.path, self.source.start + start, nbytes, ref.location)


class _StreamWorld(TorchWorld):
    """Persistent ids of a stream."""

    def persistent(self, identity: object) -> object:
        """Return the storage, or the class of a module, that a persistent id describes."""
        if type(identity) is tuple and len(identity) == 4 and identity[0] == "module":
            return identity[1]  # a class, which the file stores with its source text
        if type(identity) is not tuple or len(identity) != 6:
            return super().persistent(None)
        ref = super().persistent(identity[:5])
        if isinstance(ref, StorageRef) and identity[5] is not None:
            raise FormatError(
                "the storage of a tensor is a view of another storage, as before torch 0.4",
                entry=ref.key,
                hint="To read the file, load it with torch.load(path), and save the result with "
                "torch.save.",
            )
        return ref


def read_torch_legacy(source: Source) -> Index:
    """Read the index of a stream.

    Bytes after the last storage are ignored, as by torch: a file may hold several objects, and the
    first one counts.

    Raises:
        FormatError: If it is not such a file, or is damaged, truncated or inconsistent.
        UnsafeError: If a pickle of plain data names a global.
    """
    stream = _Stream(source)
    if _is_summed(source.read(0, min(_BLOCK, source.size))):
        raise FormatError(
            "the file is both a stream of pickles and a tar archive",
            hint="torch reads the archive, other programs the stream. Write the file again.",
        )
    for what, expected in (("the magic number", LEGACY_MAGIC), ("the protocol", _PROTOCOL)):
        found = stream.plain(what)
        if type(found) is not int or found != expected:
            raise FormatError(
                "the file is not a torch file, or is damaged", entry=what, expected=expected
            )
    metadata = _machine(stream.plain("sys_info"))
    root, world = stream.pickle("the object", _LONG)
    keys = stream.plain("the storage keys")
    if not isinstance(keys, list):
        raise FormatError("the storage keys are not a list", found=f"a {type(keys).__name__}")
    storages: dict[str, Storage] = {}
    for key in keys:
        ref = world.storages.get(key) if type(key) is str else None
        if ref is None or key in storages:
            problem = (
                "no tensor uses this storage" if ref is None else "the file has this storage twice"
            )
            raise FormatError(problem, entry=str(key) if isinstance(key, (str, int)) else None)
        storages[key] = stream.storage(ref, key)
    resolver = Resolver(source.path, storages)
    return index_of(source, "torch-legacy", root, world, resolver, metadata)


def _machine(info: object) -> dict[str, str]:
    """Return the description of the machine that wrote the file."""
    if not isinstance(info, dict):
        raise FormatError("sys_info is not a dict", entry="sys_info", found=type(info).__name__)
    return {
        key: str(value)
        for key, value in info.items()
        if type(key) is str and type(value) in (bool, int, str)
    }


def _number_in(field: bytes) -> int | None:
    """Return the octal number in a header, or None."""
    text = field.partition(b"\0")[0].strip(b" ")
    return int(text, 8) if re.fullmatch(b"[0-7]+", text) else None

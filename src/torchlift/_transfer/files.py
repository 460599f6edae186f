"""The data files of a checkpoint: opened once, checked to be the ones that were indexed, mapped.

And whether they lie on a disk of this machine or behind a network.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import torch

from torchlift._store.files import Opened
from torchlift._store.places import Stamp
from torchlift.errors import CheckpointError, FormatError, IntegrityError
from torchlift.formats.index import Record
from torchlift.formats.zip_archive import inflated

# Mapping a file there turns every page fault into a round trip: 30-50x slower than reading
# (huggingface/safetensors#562, sgl-project/sglang#37806).
# fmt: off
_NETWORK = (
    "9p afs beegfs ceph cifs coda davfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 "
    "orangefs panfs smb2 smb3 smbfs virtiofs wekafs"
)
_MOUNTS = "/proc/self/mountinfo"
_STEP = 8 << 20  # bytes of a deflated record that are read at a time


class Files:
    """The data files of one checkpoint, opened once and checked against their stamps.

    A file that is not the one that was indexed (truncated, replaced, written over) is refused here,
    because its offsets mean nothing any more, and a map past its end would be a SIGBUS.

    Args:
        stamps: every file -> what identifies it.

    Attributes:
        stamps: every file -> what identifies it.
        ahead: (file, first byte, number of bytes) -> what was read of a URL before it is asked for.
    """

    def __init__(self, stamps: Mapping[str, Stamp]) -> None:
        self.stamps = stamps
        self._opened: dict[str, Opened] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()
        self.ahead: dict[tuple[str, int, int], torch.Tensor] = {}
        # A checkpoint that nobody closes must not keep its descriptors for ever.
        weakref.finalize(self, _close_all, self._opened)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def descriptor(self, file: str) -> int:
        """An open file descriptor for `file`.

        Raises:
            IntegrityError: the file is gone or is not the one that was indexed.
        """
        with self._lock:
            return self._checked(file)

    def opened(self, file: str) -> Opened:
        """Return a file, open; of a URL, every read looks whether it is what was indexed.

        Raises:
            IntegrityError: the file is gone or is not the one that was indexed.
        """
        with self._lock:
            return self._open(file)

    def mapped(
        self, file: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """Bytes of `file` as a flat tensor over a private, writable, lazily read map.

        The tensor has a storage of its own, so that saving it does not save the whole file.
        Writing to it changes the process's memory, one page at a time, and never the file. The
        pages are file-backed until then: they cost no anonymous memory and can be evicted.

        Raises:
            IntegrityError: the file is gone, is not the one that was indexed, or cannot be mapped.
        """
        area = self._maps.get(file)
        if area is None:
            with self._lock:
                area = self._maps.get(file) or self._mapped(file)
        return torch.frombuffer(area, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def read(self, file: str, offset: int, nbytes: int) -> bytearray:
        """Return a few bytes of `file`, by one call of the system where it is open.

        Unlike `descriptor`, it looks at the stamp when it opens the file, and not at each call.

        Raises:
            IntegrityError: they cannot be read, or the file is not the one that was indexed.
        """
        opened = self._opened.get(file)
        descriptor = self.descriptor(file) if opened is None else opened.descriptor
        data, at = bytearray(nbytes), 0
        while at < nbytes:
            with _failing("cannot be read", file, self.stamps[file]):
                got = os.preadv(descriptor, [memoryview(data)[at:] if at else data], offset + at)
            if not got:
                raise IntegrityError("the file ends early", file=self.stamps[file].shown or file)
            at += got
        return data

    def inflated(self, file: str, record: Record) -> bytearray:
        """Return what a deflated record of `file` holds, in memory.

        Raises:
            IntegrityError: the file is not the one that was indexed, or is damaged.
        """
        stamp, at, whole = self.stamps[file], 0, bytearray(record.size)
        try:
            with _failing("cannot be read", file, stamp):
                # Of a URL, each step is a request of its own.
                for block in inflated(self.opened(file).read, record, _STEP):
                    whole[at : at + len(block)] = block
                    at += len(block)
        except FormatError as error:
            raise IntegrityError(
                error.reason,
                file=stamp.shown or file,
                entry=record.name,
                expected=error.expected,
                found=error.found,
                hint=error.hint,
            ) from error
        return whole

    def close(self) -> None:
        """Close the descriptors and forget the maps; tensors made from a map stay valid."""
        with self._lock:
            _close_all(self._opened)
            self._maps.clear()
            self.ahead.clear()

    def _open(self, file: str) -> Opened:
        found, stamp = self._opened.get(file), self.stamps[file]
        if found is None:
            hint = "The checkpoint's files must stay in place until it is loaded."
            with _failing("cannot be opened any more", file, stamp, hint):
                found = self._opened[file] = stamp.open(file)
        return found

    def _checked(self, file: str) -> int:
        descriptor = self._open(file).descriptor
        self.stamps[file].check(file, descriptor)
        return descriptor

    def _mapped(self, file: str) -> mmap.mmap:
        was_open = file in self._opened
        descriptor, stamp = self._checked(file), self.stamps[file]
        hint = 'Load with source="read", which needs no map.'
        with _failing("cannot be mapped", file, stamp, hint):
            # Without MAP_NORESERVE the kernel refuses a private writable map larger than RAM +
            # swap, although nothing is ever written to most of it. The constant is missing before
            # Python 3.13.
            flags = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
            area = self._maps[file] = mmap.mmap(
                descriptor, stamp.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        if not was_open:
            # The map has a descriptor of its own. Two for each of a thousand shards would be more
            # than most systems allow.
            self._opened.pop(file).close()
        return area


def _close_all(opened: dict[str, Opened]) -> None:
    while opened:
        opened.popitem()[1].close()


@contextmanager
def _failing(what: str, file: str, stamp: Stamp, hint: str | None = None) -> Iterator[None]:
    """Say of an error of the system what could not be done with which file."""
    try:
        yield
    except CheckpointError:  # some are Python's own, too
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "Allow more open files (ulimit -n): every file of the checkpoint needs one."
        reason = f"{what} ({error.strerror})"
        raise IntegrityError(reason, file=stamp.shown or file, hint=hint) from error


@lru_cache(maxsize=4096)  # asked for each tensor, of few files
def is_network(path: str | os.PathLike[str]) -> bool:
    """Whether `path` lives on a network or user-space (FUSE) file system.

    Where the answer cannot be found (no ``/proc``, an unknown device), the file counts as local.

    Example:
        >>> import tempfile
        >>> is_network(tempfile.gettempdir())
        False
    """
    kind = file_system(path)
    return kind in _NETWORK.split() or kind == "fuse" or kind.startswith("fuse.")


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that `path` lives on; empty where it cannot be found."""
    try:
        device = os.stat(path).st_dev
        return _kinds().get((os.major(device), os.minor(device)), "")
    except OSError:
        return ""


def _kinds() -> dict[tuple[int, int], str]:
    # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw": the optional fields before
    # " - " vary in number, so the type is found from the separator.
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as lines:
            found = re.findall(r"(?m)^\S+ \S+ (\d+):(\d+) .*? - (\S+)", lines.read())
    except OSError:
        return {}
    return {(int(major), int(minor)): kind for major, minor, kind in found}

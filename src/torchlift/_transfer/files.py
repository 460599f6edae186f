"""Open and map the data files of a checkpoint, and detect files that changed since the index.

`is_network` detects network file systems.
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
from typing import NamedTuple

import torch

from torchlift._store.files import Opened
from torchlift._store.places import Stamp
from torchlift.errors import CheckpointError, FormatError, IntegrityError
from torchlift.formats.index import Record
from torchlift.formats.zip_archive import inflated

# On these file systems each page fault of a map is a round trip: 30 to 50 times slower than a read
# (huggingface/safetensors#562, sgl-project/sglang#37806).
# fmt: off
_NETWORK = (
    "9p afs beegfs ceph cifs coda davfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 "
    "orangefs panfs smb2 smb3 smbfs virtiofs wekafs"
)
_MOUNTS = "/proc/self/mountinfo"
_STEP = 8 << 20  # bytes of a compressed record in one read


class Place(NamedTuple):
    """A byte range of a file or URL."""

    file: str
    offset: int  # the first byte
    nbytes: int


class Files:
    """The data files of one checkpoint, opened once and checked against their stamps.

    A file that was truncated, replaced or overwritten raises an error. Its offsets would be wrong,
    and a read from a map past its end would kill the process (SIGBUS).

    Args:
        stamps: The stamp of each file.

    Attributes:
        stamps: The stamp of each file.
        ahead: Bytes of URLs that `read_ahead` loaded before they are used.
    """

    def __init__(self, stamps: Mapping[str, Stamp]) -> None:
        self.stamps = stamps
        self._opened: dict[str, Opened] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.RLock()
        self.ahead: dict[Place, torch.Tensor] = {}
        # Else a checkpoint that is never closed would leak its descriptors.
        weakref.finalize(self, _close_all, self._opened)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def descriptor(self, file: str) -> int:
        """Return an open descriptor of a file.

        Raises:
            IntegrityError: If the file is missing or changed.
        """
        with self._lock:
            descriptor = self.open(file).descriptor
            self.stamps[file].check(file, descriptor)
            return descriptor

    def open(self, file: str) -> Opened:
        """Open a file or URL. Each read of a URL checks that the object has not changed.

        Raises:
            IntegrityError: If the file is missing or changed.
        """
        with self._lock:
            found, stamp = self._opened.get(file), self.stamps[file]
            if found is None:
                hint = "Keep the files of a checkpoint in place until it is loaded."
                with _translate_errors("cannot be opened any more", file, stamp, hint):
                    found = self._opened[file] = stamp.open(file)
            return found

    def map(
        self, file: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """Return bytes of a file as a flat tensor over a private, writable map.

        The tensor has its own storage, so that to save it does not save the complete file. A write
        to the tensor copies one page into memory of the process and does not change the file. Other
        pages stay file-backed: they use no anonymous memory, and the kernel can evict them.

        Raises:
            IntegrityError: If the file is missing, changed, or cannot be mapped.
        """
        area = self._maps.get(file)
        if area is None:
            with self._lock:
                area = self._maps.get(file) or self._map(file)
        return torch.frombuffer(area, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def read(self, file: str, offset: int, nbytes: int) -> bytearray:
        """Read a few bytes of a file, with one system call if the file is open.

        The stamp is compared when the file is opened, but not in each call as in `descriptor`.

        Raises:
            IntegrityError: If the file cannot be read or changed.
        """
        opened = self._opened.get(file)
        descriptor = self.descriptor(file) if opened is None else opened.descriptor
        data, at = bytearray(nbytes), 0
        while at < nbytes:
            with _translate_errors("cannot be read", file, self.stamps[file]):
                got = os.preadv(descriptor, [memoryview(data)[at:] if at else data], offset + at)
            if not got:
                raise IntegrityError("the file ends early", file=self.stamps[file].shown or file)
            at += got
        return data

    def inflate(self, file: str, record: Record) -> bytearray:
        """Return the decompressed bytes of a record.

        Raises:
            IntegrityError: If the record is damaged, or the file changed.
        """
        stamp, at, content = self.stamps[file], 0, bytearray(record.size)
        try:
            with _translate_errors("cannot be read", file, stamp):
                # Each step of a URL is one request.
                for block in inflated(self.open(file).read, record, _STEP):
                    content[at : at + len(block)] = block
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
        return content

    def close(self) -> None:
        """Close the descriptors and drop the maps. Tensors over a map stay valid."""
        with self._lock:
            _close_all(self._opened)
            self._maps.clear()
            self.ahead.clear()

    def _map(self, file: str) -> mmap.mmap:
        was_open = file in self._opened
        descriptor, stamp = self.descriptor(file), self.stamps[file]
        hint = 'Load with source="read", which needs no map.'
        with _translate_errors("cannot be mapped", file, stamp, hint):
            # Without MAP_NORESERVE the kernel refuses a private writable map larger than RAM and
            # swap together, although most of it is never written. Python 3.13 names the constant.
            flags = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
            area = self._maps[file] = mmap.mmap(
                descriptor, stamp.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        if not was_open:
            # The map has its own descriptor. Two for each of a thousand shards would exceed the
            # limit of most systems.
            self._opened.pop(file).close()
        return area


def _close_all(opened: dict[str, Opened]) -> None:
    while opened:
        opened.popitem()[1].close()


@contextmanager
def _translate_errors(
    what: str, file: str, stamp: Stamp, hint: str | None = None
) -> Iterator[None]:
    """Turn an `OSError` into an `IntegrityError` that names the file and what failed."""
    try:
        yield
    except CheckpointError:  # some of these are an OSError too, such as NotFound
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "Allow more open files with ulimit -n. Each file of the checkpoint needs one."
        reason = f"{what} ({error.strerror})"
        raise IntegrityError(reason, file=stamp.shown or file, hint=hint) from error


@lru_cache(maxsize=4096)  # called for each tensor, but with few different files
def is_network(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is on a network or user-space (FUSE) file system.

    The path counts as local if the file system cannot be found (no ``/proc``, an unknown device).

    Example:
        >>> import tempfile
        >>> is_network(tempfile.gettempdir())
        False
    """
    try:
        device = os.stat(path).st_dev
        with open(_MOUNTS, encoding="utf-8", errors="replace") as lines:
            mounts = lines.read()
    except OSError:
        return False
    # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw": the number of fields before
    # " - " varies, so that the type is found from the separator.
    kinds = dict(re.findall(r"(?m)^\S+ \S+ (\d+:\d+) .*? - (\S+)", mounts))
    kind = kinds.get(f"{os.major(device)}:{os.minor(device)}", "")
    return kind in _NETWORK.split() or kind == "fuse" or kind.startswith("fuse.")

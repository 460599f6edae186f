"""Open and map the data files of a checkpoint, and detect files that changed since the index.

`is_network` detects network file systems.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

import torch

from torchlift._store.files import FileStamp, Opened, change_error, read_error
from torchlift._store.places import Stamp
from torchlift._system.memory import c_function
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
#: Files of one checkpoint that are open at a time. A process may have 100, and sets have thousands.
MOST_OPEN = 16
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux. Python 3.13 names the second one.


class Place(NamedTuple):
    """A byte range of a file or URL."""

    file: str
    offset: int  # the first byte
    nbytes: int


class Files:
    """The data files of one checkpoint, checked against their stamps.

    At most `MOST_OPEN` local files stay open. Maps do not need a descriptor on Linux. A file that
    was truncated, replaced or overwritten raises an error. Its offsets would be wrong, and a read
    from a map past its end would kill the process (SIGBUS).

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
                local = [name for name, each in self._opened.items() if each.is_local]
                if len(local) > MOST_OPEN:
                    # Not closed: another thread may read it, and the last reader closes it.
                    del self._opened[local[0]]
            return found

    def check(self, files: Iterable[str] | None = None) -> None:
        """Raise an error if a local file was overwritten since it was indexed.

        Call this after all reads. A file that another file replaced keeps its content for those who
        have it open or mapped.

        Args:
            files: The files that were read. None checks all that are open or mapped.

        Raises:
            IntegrityError: If a file was overwritten.
        """
        for file in {*self._opened, *self._maps} if files is None else files:
            stamp, opened = self.stamps[file], self._opened.get(file)
            if not isinstance(stamp, FileStamp):
                continue
            with suppress(FileNotFoundError):  # the file was removed, but is open or mapped
                found = FileStamp.of(file if opened is None else opened.descriptor)
                is_same = (found.device, found.inode) == (stamp.device, stamp.inode)
                if is_same and found != stamp:
                    raise change_error(stamp.shown or file, str(stamp), str(found))

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
        """Read a few bytes of a file.

        Raises:
            IntegrityError: If the file cannot be read or changed.
        """
        opened = self._opened.get(file) or self.open(file)
        descriptor, data, at = opened.descriptor, bytearray(nbytes), 0
        while at < nbytes:
            with _translate_errors("cannot be read", file, self.stamps[file]):
                got = os.preadv(descriptor, [memoryview(data)[at:] if at else data], offset + at)
            if not got:
                raise IntegrityError("the file ends early", file=self.stamps[file].shown or file)
            at += got
        self.stamps[file].check(file, descriptor)
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
            self.check([file])
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
        descriptor, stamp = self.descriptor(file), self.stamps[file]
        hint = 'Load with source="read", which needs no map.'
        with _translate_errors("cannot be mapped", file, stamp, hint):
            area = self._maps[file] = _map_file(descriptor, stamp.size)
        return area


def _map_file(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a file, private and writable. On Linux the map does not need a descriptor.

    `mmap.mmap` duplicates the descriptor of a file. A thousand shards would exceed the limit. So it
    gets an anonymous map, and the file is mapped in its place.
    """
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if sys.platform != "linux" or not nbytes:
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=prot)
    # Without MAP_NORESERVE the kernel refuses a private writable map larger than RAM and swap
    # together, although most of it is never written.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    area = mmap.mmap(-1, nbytes, flags=flags | mmap.MAP_ANONYMOUS, prot=prot)
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    options = (ctypes.c_size_t(nbytes), prot, flags | _MAP_FIXED, descriptor, ctypes.c_long(0))
    if c_function("mmap")(place, *options) == -1:
        return mmap.mmap(descriptor, nbytes, flags=flags, prot=prot)  # raises the error
    return area


def _close_all(opened: dict[str, Opened]) -> None:
    while opened:
        opened.popitem()[1].close()


@contextmanager
def _translate_errors(
    what: str, file: str, stamp: Stamp, hint: str | None = None
) -> Iterator[None]:
    """Turn an `OSError` into an error that names the file and what failed."""
    try:
        yield
    except CheckpointError:  # some of these are an OSError too, such as NotFound
        raise
    except OSError as error:
        raise read_error(what, error, stamp.shown or file, hint) from error


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

"""Whether a path lies on a disk of this machine or behind a network. Standard library only."""

from __future__ import annotations

import os
from functools import lru_cache

# Mapping a file there turns every page fault into a round trip: 30-50x slower than reading
# (huggingface/safetensors#562, sgl-project/sglang#37806).
# fmt: off
_NETWORK = (
    "9p afs beegfs ceph cifs coda davfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 "
    "orangefs panfs smb2 smb3 smbfs virtiofs wekafs"
)
_MOUNTS = "/proc/self/mountinfo"


def is_network(path: str | os.PathLike[str]) -> bool:
    """Whether `path` lives on a network or user-space (FUSE) file system.

    Where the answer cannot be found (no ``/proc``, an unknown device), the file counts as local.

    Example:
        >>> import tempfile
        >>> is_network(tempfile.gettempdir())
        False
    """
    try:
        device = os.stat(path).st_dev
        kind = _kinds().get((os.major(device), os.minor(device)), "")
    except (OSError, AttributeError):  # Windows has neither device numbers nor ``/proc``
        return False
    return kind in _NETWORK.split() or kind == "fuse" or kind.startswith("fuse.")


@lru_cache(maxsize=1)
def _kinds() -> dict[tuple[int, int], str]:
    kinds: dict[tuple[int, int], str] = {}
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw": the optional
                # fields before " - " vary in number, so the type is found from the separator.
                before, separator, after = line.partition(" - ")
                fields = before.split()
                if separator and len(fields) > 2:
                    major, _, minor = fields[2].partition(":")
                    kinds[int(major), int(minor)] = after.split()[0]
    except (OSError, ValueError, IndexError):
        return {}
    return kinds

"""Whether several ranks mean one file when each names the file that it is going to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from torchlift._transfer import write as unfinished
from torchlift.errors import PlacementError


class Destination(NamedTuple):
    """What a rank says of the file that it is going to write.

    Attributes:
        path: absolute, with links followed.
        machine: where the path means that, or an empty text where machines cannot be told apart.
        folder: device and inode of its folder on that machine, or None where it sees none.
    """

    path: str
    machine: str
    folder: tuple[int, int] | None

    @classmethod
    def of(cls, path: str) -> Destination:
        """Look at a path from here.

        Example:
            >>> Destination.of("/nowhere/../x.pt")[::2]
            ('/x.pt', (..., ...))
        """
        real = os.path.realpath(path)
        try:
            found = os.stat(os.path.dirname(real))
        except OSError:
            return cls(real, unfinished.machine(), None)
        return cls(real, unfinished.machine(), (found.st_dev, found.st_ino))

    def may_be(self, other: Destination) -> bool:
        """Whether the two can be one file, for all that is known.

        Machines may have a folder under different names, and so may containers on one machine; but
        on one machine a folder has one number.
        """
        if self.path == other.path:
            return True
        if os.path.basename(self.path) != os.path.basename(other.path):
            return False
        if not self.machine or self.machine != other.machine:
            return True
        return self.folder is not None and self.folder == other.folder


def require_one(destinations: Sequence[Destination]) -> None:
    """Return when all ranks can mean one file.

    Raises:
        PlacementError: they do not, on every rank.
    """
    first = destinations[0]
    for rank, other in enumerate(destinations):
        if not other.may_be(first):
            raise PlacementError(
                "the ranks do not save to the same path",
                expected=f"{first.path}, as on rank 0",
                found=f"{other.path} on rank {rank}",
                hint="Pass one path on all ranks; a relative one depends on the current folder.",
            )

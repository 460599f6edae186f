"""Memory that a constructor can read or write without torch: NumPy arrays, storages, addresses."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from torchlift._model.torch_private import key_of, storage_uses


@dataclass(slots=True)
class Outside:
    """The real memory of a recorded storage, which other code than torch may have.

    A constructor gets it from torch, or torch gets it from the constructor, such as a NumPy array.

    Attributes:
        memory: The real one.
        stand_in: The one on meta, which calls are recorded with.
        checksum: Checksum of the content that torch knows of. None if torch has not used it yet.
        stays: Whether the constructor may write there without holding it, by an address.
        is_written: Whether a recorded call wrote to the storage.
        budget: Number of bytes that `has_changed_again` may still read.
    """

    memory: torch.UntypedStorage
    stand_in: torch.UntypedStorage
    checksum: int | None = None
    stays: bool = False
    is_written: bool = False
    budget: int = 1 << 30

    def contains(self, other: torch.UntypedStorage) -> bool:
        """Return whether all of another storage lies in this memory."""
        start = other.data_ptr() - self.memory.data_ptr()
        return 0 <= start <= start + other.nbytes() <= self.memory.nbytes()

    def overlaps(self, other: torch.UntypedStorage) -> bool:
        """Return whether a part of another storage lies in this memory."""
        start = other.data_ptr() - self.memory.data_ptr()
        return -other.nbytes() < start < self.memory.nbytes()

    def view_on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is recorded for a tensor in this memory."""
        start = tensor.data_ptr() - self.memory.data_ptr()
        made = torch.empty(0, dtype=tensor.dtype, device=self.stand_in.device)
        offset = start // tensor.element_size()
        return made.set_(self.stand_in, offset, tensor.shape, tensor.stride())

    def note(self) -> None:
        """Remember the content of now as known to torch."""
        memory: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.memory)
        self.checksum = zlib.crc32(memory.numpy())

    def has_changed(self) -> bool:
        """Return whether something else than torch wrote there since `note`."""
        known = self.checksum
        if known is None:
            return False
        self.note()
        return self.checksum != known

    def has_changed_again(self) -> bool:
        """Return `has_changed`, as long as the budget lasts."""
        # Without one, a file of 300 tensors in one array would be read 300 times.
        self.budget -= self.memory.nbytes()
        return self.budget >= 0 and self.has_changed()

    def is_held(self) -> bool:
        """Return whether somebody else can still write there."""
        return self.stays or storage_uses(key_of(self.memory)) > 1

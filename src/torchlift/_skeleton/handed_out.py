"""Memory that a constructor can read or write without torch: NumPy arrays, storages, addresses."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from torchlift._model.torch_private import key_of, storage_uses

#: Element size in bytes -> a dtype that is compared and copied bit by bit.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Memory:
    """The real memory of a recorded storage.

    Attributes:
        memory: the real one.
        stand_in: the one on meta, which calls are recorded with.
    """

    memory: torch.UntypedStorage
    stand_in: torch.UntypedStorage

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


@dataclass(slots=True)
class HandedOut(Memory):
    """Memory with replayed values that the constructor was given.

    Attributes:
        width: bytes that are compared at once: an element, so that no number is mixed of two.
        stays: whether the constructor may write there without holding it, by an address.
        known: the content that torch knows of.
    """

    width: int
    stays: bool
    known: torch.Tensor

    @classmethod
    def of(cls, real: torch.Tensor, stand_in: torch.UntypedStorage) -> HandedOut:
        """Return the memory of a tensor, with its content as it is now."""
        memory, width = real.untyped_storage(), real.element_size()
        return cls(memory, stand_in, width, False, elements_of(memory, width).clone())

    def note(self) -> None:
        """Remember the content as it is."""
        self.known = elements_of(self.memory, self.width).clone()

    def show(self, content: torch.UntypedStorage) -> None:
        """Write what torch has made of the storage into the memory."""
        elements_of(self.memory, self.width).copy_(elements_of(content, self.width))
        self.note()

    def changed(self) -> torch.Tensor | None:
        """Return a mask of the elements that were written since `note`, or None."""
        found = elements_of(self.memory, self.width)
        return None if torch.equal(found, self.known) else found != self.known

    def is_held(self) -> bool:
        """Return whether somebody else can still write there."""
        return self.stays or storage_uses(key_of(self.memory)) > 1


@dataclass(slots=True)
class Foreign(Memory):
    """Memory that torch did not make, such as a NumPy array. A replay reads it.

    Attributes:
        checksum: Checksum of its content when torch first used it, or None before that.
        is_written: Whether torch wrote there. Only the recording contains that write.
    """

    checksum: int | None = None
    is_written: bool = False

    def note(self) -> None:
        """Remember the content of now, if none is remembered."""
        if self.checksum is None:
            self.checksum = self._sum()

    def has_changed(self) -> bool:
        """Return whether something else wrote there after torch had read or written it."""
        return self.checksum is not None and self.checksum != self._sum()

    def _sum(self) -> int:
        content: Any = elements_of(self.memory, 1).numpy()
        return zlib.crc32(content)


def elements_of(storage: torch.UntypedStorage, width: int) -> torch.Tensor:
    """Return a flat tensor over a storage, with elements of so many bytes, or of one byte."""
    width = min(width, 8)
    dtype = torch.uint8 if storage.nbytes() % width else _WHOLE[width]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)

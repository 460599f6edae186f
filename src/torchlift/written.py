"""Whether a tensor over a private map still holds what the file says.

torch counts what is written through a tensor, but not what is written through its ``.data`` or
through NumPy. The kernel knows: a page that was written to is the process's own and no longer the
file's. Where it cannot be asked, the bytes are compared.
"""

from __future__ import annotations

import os

import torch

from torchlift.checkpoint import MappedViews
from torchlift.formats import Index, TensorEntry

_PAGEMAP = "/proc/self/pagemap"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_WORD = 8  # bytes per page in the page map
_PIECE = 1 << 17  # words per read: the pages of 512 MiB


class Written:
    """Finds the tensors of an index's views that somebody wrote to."""

    def __init__(self, index: Index) -> None:
        self._index = index
        try:
            self._pagemap: int | None = os.open(_PAGEMAP, os.O_RDONLY)
        except OSError:
            self._pagemap = None

    def close(self) -> None:
        """Close what was opened to find out."""
        if self._pagemap is not None:
            os.close(self._pagemap)
            self._pagemap = None

    def differs(self, tensor: torch.Tensor, entry: TensorEntry) -> bool:
        """Whether a view of the entry holds other values than the file."""
        if self._is_untouched(tensor):
            return False
        views = MappedViews(self._index)
        try:
            return not same_bits(tensor, views.view(entry))
        finally:
            views.close()

    def _is_untouched(self, tensor: torch.Tensor) -> bool:
        """Whether all pages are the file's for sure; False where that cannot be found out."""
        if not tensor.numel():
            return True
        if self._pagemap is None:
            return False
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize
        first = tensor.data_ptr() // _PAGE
        stop = (tensor.data_ptr() + span - 1) // _PAGE + 1
        for at in range(first, stop, _PIECE):
            count = min(_PIECE, stop - at)
            try:
                words = os.pread(self._pagemap, count * _WORD, at * _WORD)
            except OSError:
                return False
            if len(words) != count * _WORD or _has_own_pages(words):
                return False
        return True


def _has_own_pages(words: bytes) -> bool:
    if words.count(0) == len(words):
        return False  # none was looked at yet, let alone written to
    pages = torch.frombuffer(bytearray(words), dtype=torch.int64)
    # Bits 63 and 62: in memory, or swapped out. Bit 61: it belongs to the file.
    exists, of_file = (pages >> 62) & 3 != 0, (pages >> 61) & 1 == 1
    return bool((exists & ~of_file).any())


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal, a NaN to itself too.

    Example:
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    return torch.equal(_bytes_of(one), _bytes_of(two))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Not flatten(): a single element may keep a stride that a view as bytes refuses.
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)

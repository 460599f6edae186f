"""Find values that differ between ranks under one key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import torch

from torchlift._model.dtensor import Spans
from torchlift._model.handlers import inner_tensors, is_wrapper
from torchlift._save.blocks import Block, Workspace, tensor_blocks
from torchlift.errors import PlacementError

#: The hint for values that each rank has of its own.
OWN_NAMES = (
    'Save them under a name of each rank, such as {f"rank{rank}": state}, or make shards DTensors.'
)
#: The hint if the values of one rank may be saved for all.
TAKE_FIRST = f'{OWN_NAMES} If the first rank\'s values are the right ones, pass replicated="rank0".'

Key = TypeVar("Key", bound=Hashable)


class HeldPart(NamedTuple):
    """A part of a tensor that several ranks may hold.

    Attributes:
        key: of the tensor.
        spans: the ranges of a DTensor, or None for a plain tensor.
    """

    key: str
    spans: Spans | None


class Checksum(NamedTuple):
    """The checksum of values that other ranks may hold, too.

    Attributes:
        dtype: of the values.
        shape: of the values.
        digest: BLAKE2b of their bytes in row-major order. Different values can have one CRC-32.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes


class Difference(NamedTuple):
    """Two ranks that hold different values under one name.

    Attributes:
        first: the first rank that holds some.
        other: the first rank after it whose values differ.
    """

    first: int
    other: int


def checksum_of(tensor: torch.Tensor, work: Workspace) -> Checksum:
    """Return the checksum of a tensor that is not a DTensor."""
    made = hashlib.blake2b(digest_size=16)
    _add(tensor, work, made.update)
    return Checksum(tensor.dtype, tuple(tensor.shape), made.digest())


def _add(tensor: torch.Tensor, work: Workspace, update: Callable[[Block], None]) -> None:
    if is_wrapper(tensor):
        for inner in inner_tensors(tensor):
            _add(inner, work, update)
    elif tensor.layout is torch.strided and not tensor.is_quantized:  # no mesh saves others
        for data in tensor_blocks(tensor, tensor.dtype, work):
            update(data)


def find_differences(by_rank: Mapping[int, Mapping[Key, object]]) -> dict[Key, Difference]:
    """Return the keys under which two ranks have different checksums, or other facts."""
    first: dict[Key, tuple[int, object]] = {}
    found: dict[Key, Difference] = {}
    for who, facts in sorted(by_rank.items()):
        for key, fact in facts.items():
            other, expected = first.setdefault(key, (who, fact))
            if fact != expected:
                found.setdefault(key, Difference(other, who))
    return found


def difference_error(
    names: Mapping[str, Difference], hint: str, path: str | None = None
) -> PlacementError:
    """Return the error for keys under which ranks hold different values."""
    name, found = next(iter(names.items()))
    more = f" (and so do {len(names) - 1} more names)" if len(names) > 1 else ""
    return PlacementError(
        "the ranks hold different values under one name",
        entry=name,
        file=path,
        expected="the same on every rank, or a DTensor for what is sharded",
        found=f"the values of rank {found.other} differ from those of rank {found.first}{more}",
        hint=hint,
    )

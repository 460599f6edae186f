"""Join the pieces of a tensor that lie in several files or items, and check that they fill it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torchlift._system.text import clipped_list
from torchlift.errors import FormatError
from torchlift.formats.index import Chunk
from torchlift.formats.unpickle import STEP, Budget

#: Most pairs of pieces that are compared to name two that overlap.
_MOST_PAIRS = 10_000
_ONE_SAVE = "The files are of different saves. Fetch the files of one save."


class Piece(NamedTuple):
    """What one file holds of a tensor.

    Attributes:
        key: Key of the tensor.
        dtype: Dtype of the tensor, as this file has it.
        shape: Shape of the whole tensor, as this file has it.
        file: The file.
        chunk: A box of the tensor and the place of its bytes. None if the file holds no element,
            or the same box as another piece.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    chunk: Chunk | None


class Whole(NamedTuple):
    """A tensor that its pieces fill: its shape, and a chunk for each piece."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def assemble(pieces: Sequence[Piece], budget: Budget, *, grows: bool = False) -> Whole:
    """Join the pieces of one tensor, at least one.

    Args:
        pieces: The pieces.
        budget: Budget for reading the checkpoint.
        grows: Whether each file has the shape only up to the end of its own piece.

    Raises:
        FormatError: If files disagree about the dtype or the shape, a piece reaches outside of the
            tensor, two pieces overlap, or pieces are missing.

    Example:
        >>> rows = [Chunk("a", 0, 8, (0,), (2,)), Chunk("b", 0, 4, (2,), (1,))]
        >>> assemble([Piece("w", "float32", (3,), c.file, c) for c in rows], Budget()).shape
        (3,)
    """
    key, dtype, shape, *_ = pieces[0]
    if grows and len({len(piece.shape) for piece in pieces}) == 1:
        shape = tuple(map(max, zip(*(piece.shape for piece in pieces), strict=True)))
        pieces = [piece._replace(shape=shape) for piece in pieces]
    if any(piece.dtype != dtype or piece.shape != shape for piece in pieces):
        raise differing_error(key, pieces)
    chunks = tuple([piece.chunk for piece in pieces if piece.chunk is not None])
    if not (len(chunks) == 1 and chunks[0].shape == shape and not any(chunks[0].start)):
        _require_filled(key, shape, chunks, budget)
    return Whole(shape, chunks)


def differing_error(key: str, pieces: Sequence[Piece]) -> FormatError:
    """Return the error for files that disagree about a tensor."""
    first: dict[str, str] = {}
    for piece in pieces:
        first.setdefault(f"{piece.dtype} {list(piece.shape)}", piece.file)
    return FormatError(
        "the files have different shapes or dtypes of a tensor",
        entry=key,
        expected="one shape and one dtype",
        found=clipped_list(f"{what} in {file}" for what, file in first.items()),
        hint=_ONE_SAVE,
    )


def _require_filled(
    key: str, shape: tuple[int, ...], chunks: Sequence[Chunk], budget: Budget
) -> None:
    """Refuse chunks that reach outside of a tensor, overlap, or leave gaps.

    Chunks are not compared in pairs, because thousands of them would take minutes. They fill the
    tensor once if and only if their corners, with alternating signs, cancel to its own corners.
    """
    # Without the dimensions that every box fills: the work doubles with each dimension.
    dims = [
        at
        for at, size in enumerate(shape)
        if any(chunk.start[at] or chunk.shape[at] != size for chunk in chunks)
    ]
    budget.spend(STEP * len(chunks) << len(dims), key)
    for chunk in chunks:
        if any(chunk.start[at] + chunk.shape[at] > shape[at] for at in dims):
            raise FormatError(
                "a piece of a tensor lies outside of it",
                file=chunk.file,
                entry=key,
                expected=f"a box inside of {list(shape)}",
                found=_box_text(chunk),
                hint=_ONE_SAVE,
            )
    corners: dict[tuple[int, ...], int] = {}
    whole = [(-1, (0,) * len(shape), shape)] * (0 not in shape)
    for sign, start, sizes in [*((1, c.start, c.shape) for c in chunks), *whole]:
        ends = [((start[at], 1), (start[at] + sizes[at], -1)) for at in dims]
        for corner in itertools.product(*ends):
            place = tuple(at for at, _ in corner)
            corners[place] = corners.get(place, 0) + sign * math.prod(s for _, s in corner)
    if any(corners.values()):
        raise _unfilled_error(key, shape, chunks)


def _unfilled_error(key: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> FormatError:
    stored, numel = sum(math.prod(chunk.shape) for chunk in chunks), math.prod(shape)
    pairs = itertools.islice(itertools.combinations(chunks, 2), _MOST_PAIRS)
    pair = next((pair for pair in pairs if _overlap(*pair)), None)
    if pair is not None or stored >= numel:
        one, other = pair or chunks[:2]
        return FormatError(
            "two pieces of a tensor overlap",
            file=other.file,
            entry=key,
            expected=f"{numel} elements, each once",
            found=f"{_box_text(other)}, and {_box_text(one)} in {one.file}"
            if pair
            else f"{stored} elements in {len(chunks)} pieces",
            hint=_ONE_SAVE,
        )
    return FormatError(
        "pieces of a tensor are missing",
        entry=key,
        expected=f"{numel} elements, each once",
        found=f"{stored} in {len(chunks)} pieces",
        hint="A rank's file may be missing, or its save failed. Fetch all files of the save.",
    )


def _overlap(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)


def _box_text(chunk: Chunk) -> str:
    return f"a box of {list(chunk.shape)} at {list(chunk.start)}"

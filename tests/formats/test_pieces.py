"""One check of the pieces of a tensor, for every format that has pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchlift.errors import FormatError
from torchlift.formats.boxes import Box
from torchlift.formats.index import Chunk
from torchlift.formats.pieces import Piece, assemble
from torchlift.formats.unpickle import Budget


def pieces(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Piece]:
    """One piece for each box, each in a file of its own, and a file without an element."""
    found = [Piece("w", "int8", shape, "empty", None)]
    for number, (start, sizes) in enumerate(boxes):
        chunk = Chunk(f"file {number}", 0, 1, start, sizes)
        found.append(Piece("w", "int8", shape, chunk.file, chunk))
    return found


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes: halves of the whole, of which one may be moved, doubled or left out."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        start, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        for first, size in ((0, cut), (cut, sizes[dim] - cut)):
            at = (*start[:dim], start[dim] + first, *start[dim + 1 :])
            boxes.append((at, (*sizes[:dim], size, *sizes[dim + 1 :])))
    boxes = [box for box in boxes if 0 not in box[1]]
    change = draw(st.sampled_from(["nothing", "nothing", "move", "double", "drop"]))
    start, sizes = boxes.pop()
    if change == "move":
        start = tuple([at + draw(st.integers(0, 2)) for at in start])
    return shape, boxes + [(start, sizes)] * {"double": 2, "drop": 0}.get(change, 1)


@settings(max_examples=300, deadline=None)
@example(((4,), [((0,), (2,)), ((1,), (2,))]))  # an overlap, and a gap of its size
@given(_boxes())
def test_boxes_are_accepted_if_they_hold_each_element_once(
    given: tuple[tuple[int, ...], list[Box]],
) -> None:
    """Gaps, overlaps and boxes outside of the tensor are refused."""
    shape, boxes = given
    held = sorted(
        index
        for start, sizes in boxes
        for index in itertools.product(
            *(range(at, at + size) for at, size in zip(start, sizes, strict=True))
        )
    )
    if held == [*itertools.product(*map(range, shape))]:
        assert len(assemble(pieces(shape, boxes), Budget()).chunks) == len(boxes)
        return
    with pytest.raises(FormatError) as caught:
        assemble(pieces(shape, boxes), Budget())
    error = caught.value
    outside = any(
        at + n > m for start, sizes in boxes for at, n, m in zip(start, sizes, shape, strict=True)
    )
    twice = len(held) != len({*held})
    reasons = {
        "a piece of a tensor lies outside of it": outside,
        "two pieces of a tensor overlap": twice and not outside,
        "pieces of a tensor are missing": not twice and not outside,
    }
    assert [reason for reason, holds in reasons.items() if holds] == [error.reason]
    assert (error.entry, error.file is None) == ("w", not (outside or twice))
    assert all((error.expected, error.found, error.hint))


def test_of_thousands_of_pieces_an_overlap_is_found_without_comparing_all() -> None:
    """The pair may stay unnamed, but the tensor is refused."""
    rows = [((at, 0), (1, 1)) for at in range(3000)]
    with pytest.raises(FormatError, match="overlap") as caught:
        assemble(pieces((3000, 1), [*rows, rows[-1]]), Budget(1 << 20))
    assert caught.value.found == "3001 elements in 3001 pieces"

"""Boxes of tensors as runs of bytes: against slicing, for every layout in the file."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchlift.formats.boxes import (
    Placement,
    at_indices,
    joined,
    narrowed,
    permuted,
    placed_spans,
    row_major,
    rows,
    runs_of,
)
from torchlift.formats.index import Chunk, TensorEntry


def entry(shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> TensorEntry:
    stride = row_major(shape) if stride is None else stride
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    chunk = Chunk("f", 0, span, (0,) * len(shape), shape)
    numel = len(list(itertools.product(*map(range, shape))))
    return TensorEntry("w", "uint8", shape, stride, numel, "cpu", "s", (chunk,))


def gathered(part: TensorEntry) -> list[int]:
    """The positions in the file of a part's elements, in row-major order of the part."""
    found = [-1] * part.nbytes
    for run in rows(part):
        for row, i in itertools.product(range(run.many), range(run.numel)):
            place = run.at + row * run.apart + i
            assert found[place] == -1, "an element was read twice"
            found[place] = run.offset + row * run.step + i
    return found


def positions(stride: tuple[int, ...], spans: Any) -> list[int]:
    dims = [[i for start, stop in dim for i in range(start, stop)] for dim in spans]
    return [
        sum(i * s for i, s in zip(index, stride, strict=True)) for index in itertools.product(*dims)
    ]


SPANS = [
    [[(0, 4)], [(0, 6)], [(0, 5)]],
    [[(1, 3)], [(0, 6)], [(0, 5)]],
    [[(0, 4)], [(2, 5)], [(0, 5)]],
    [[(0, 4)], [(0, 6)], [(4, 5)]],
    [[(0, 1), (3, 4)], [(0, 6)], [(0, 5)]],
    [[(0, 4)], [(0, 2), (4, 6)], [(1, 2), (3, 5)]],
    [[(2, 2)], [(0, 6)], [(0, 5)]],
]


@pytest.mark.parametrize("stride", [(30, 5, 1), (1, 4, 24), (60, 10, 2)])
@pytest.mark.parametrize("into", [(30, 5, 1), (70, 7, 1), (1, 4, 24), (200, 20, 3)])
@pytest.mark.parametrize("spans", SPANS)
def test_rows_fill_memory_of_any_strides(
    stride: tuple[int, ...], into: tuple[int, ...], spans: Any
) -> None:
    """Every element of a part once, where it belongs in a view of other memory."""
    part = narrowed(entry((4, 6, 5), stride), spans)
    indices = itertools.product(*map(range, part.shape))
    places = [sum(i * s for i, s in zip(index, into, strict=True)) for index in indices]
    found: dict[int, int] = {}
    every = list(rows(part, into))
    for _, offset, at, numel, many, step, apart in every:
        for row, i in itertools.product(range(many), range(numel)):
            assert at + row * apart + i not in found, "an element was read twice"
            found[at + row * apart + i] = offset + row * step + i
    assert [found[place] for place in places] == positions(stride, spans)
    assert len(found) == len(places)
    shortest = min((each.numel for each in every), default=0)
    assert runs_of(part, into) == (len(every), shortest)


@given(st.permutations([0, 1, 2]), st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=4))
def test_parts_of_parts_are_those_of_torch(order: list[int], changes: list[Any]) -> None:
    """Every second index, other dimensions, a part, or two parts that are joined again."""
    expected = torch.arange(120).view(4, 6, 5).permute(order)
    part = entry((4, 6, 5), (30, 5, 1))
    part = permuted(part, order)
    for kind, dim, start, size in changes:
        dim %= 3
        start = min(start, expected.shape[dim])
        if kind < 2:
            indices = range(start, expected.shape[dim], 1 + kind)
            part, expected = (
                at_indices(part, dim, indices),
                expected.index_select(dim, torch.tensor(indices, dtype=torch.int64)),
            )
        elif kind < 4:
            stop = min(start + size, expected.shape[dim])
            spans = [[(0, n)] for n in expected.shape]
            spans[dim] = [(start, stop)]
            part, expected = narrowed(part, spans), expected.narrow(dim, start, stop - start)
        elif kind == 4:
            part, expected = permuted(part, [1, 2, 0]), expected.permute(1, 2, 0)
        else:
            cut = [range(start), range(start, expected.shape[dim])]
            part = joined([at_indices(part, dim, one) for one in cut], dim)
    assert part.shape == tuple(expected.shape)
    assert gathered(part) == expected.flatten().tolist()


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2)])
@pytest.mark.parametrize("size", range(1, 14))
def test_data_parallel_shards_over_tensor_parallel_ones_are_torchs(
    size: int, mesh: tuple[int, int]
) -> None:
    """Tensor parallelism divides first, although its mesh dimension is the inner one."""
    placements = [Placement(0, mesh[1]), Placement(0)]
    for outer, inner in itertools.product(*map(range, mesh)):
        found = placed_spans((size,), mesh, placements, (outer, inner))
        held = [i for start, stop in found[0] for i in range(start, stop)]
        whole = torch.arange(size)
        for parts, number in (mesh[1], inner), (mesh[0], outer):
            chunks = whole.chunk(parts)
            whole = chunks[number] if number < len(chunks) else whole[:0]
        assert held == whole.tolist()


def test_boxes_of_two_files_stay_two() -> None:
    """Although one begins in its file where the other one ends."""
    made = []
    for name, offset in ("a", 0), ("b", 8):
        chunk = Chunk(name, offset, 8, (0,), (2,))
        made.append(TensorEntry("w", "float32", (2,), (1,), 8, "cpu", "", (chunk,)))
    found = joined(made, 0)
    assert [(one.file, one.start, one.nbytes) for one in found.chunks] == [
        ("a", (0,), 8),
        ("b", (2,), 8),
    ]

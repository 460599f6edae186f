"""Parametrise a test so that any two values meet, instead of each combination of all."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**values: Any) -> pytest.MarkDecorator:
    """Return the mark for a few rows, in which each value of a name meets each of another name.

    Take it if what could break depends on two of the parameters at most.
    """
    lists = [[*each] for each in values.values()]
    places = [*map(range, map(len, lists))]
    pairs = [
        ((one, a), (two, b))
        for one, two in combinations(range(len(lists)), 2)
        for a, b in product(places[one], places[two])
    ]
    left, chosen = dict.fromkeys(pairs), []
    while left:
        fixed = dict(next(iter(left)))
        rows = product(*([fixed[at]] if at in fixed else each for at, each in enumerate(places)))
        best = max(
            rows, key=lambda row: sum(two in left for two in combinations(enumerate(row), 2))
        )
        for two in combinations(enumerate(best), 2):
            left.pop(two, None)
        chosen.append(tuple(each[at] for each, at in zip(lists, best, strict=True)))
    return pytest.mark.parametrize(tuple(values), chosen)

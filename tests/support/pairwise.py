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
    rows = [*product(*(range(len(each)) for each in lists))]
    meets = {row: {*combinations(enumerate(row), 2)} for row in rows}
    left, chosen = set().union(*meets.values()), []
    while left:
        best = max(rows, key=lambda row: len(meets[row] & left))
        left -= meets[best]
        chosen.append(tuple(each[at] for each, at in zip(lists, best, strict=True)))
    return pytest.mark.parametrize(tuple(values), chosen)

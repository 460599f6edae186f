"""Random models with loading code of their own, compared with torch's `load_state_dict`.

`random_loads` makes them; run as a program, it takes many more.
"""

from __future__ import annotations

import collections

import pytest
from random_loads import run


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:.*got no value from.*:UserWarning")
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_random_model_is_loaded_as_torch_loads_it_or_left_as_it_was(first: int) -> None:
    """Values, flags, attributes and reported keys; a plan and a failed load change nothing."""
    ends = collections.Counter(map(run, range(first, first + 100)))
    assert min(ends["loaded"], ends["refused"]) > 10

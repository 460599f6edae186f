"""Random models through every door of `load`, compared with torch's `load_state_dict`.

`random_doors` makes them.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
from random_doors import DOORS, Door, run, run_shards

import torchlift
from torchlift import swap
from torchlift.distributed import on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*got no value from.*:UserWarning"),
]


@pytest.mark.parametrize("door", DOORS)
def test_a_random_model_is_as_in_torch_by_every_door(door: Door, tmp_path: Path) -> None:
    """Values, dtypes, strides, flags, ties, shared memory, gradients, names, attributes."""
    ends = collections.Counter(run(seed, door, tmp_path) for seed in range(60))
    assert ends["loaded"] > 25
    assert ends["refused by both"] > 5


@pytest.mark.parametrize("door", [DOORS[1], DOORS[8]])
def test_the_flag_of_torch_that_swaps_on_conversion_changes_nothing(door, tmp_path, monkeypatch):
    """Of a live model and of a skeleton."""
    load = torchlift.load

    def load_with_the_flag(*args: Any, **options: Any) -> Any:
        with swap.preserving_references():
            return load(*args, **options)

    monkeypatch.setattr(torchlift, "load", load_with_the_flag)
    ends = collections.Counter(run(seed, door, tmp_path) for seed in range(20))
    assert ends["loaded"] > 8


@pytest.mark.distributed
def test_a_random_model_of_fsdp2_is_as_in_torch(tmp_path: Path) -> None:
    """Also if a hook renames a value (179), or a module with code lacks one on meta (356)."""
    found = on_ranks(2, run_shards, [*range(20), 179, 356], str(tmp_path))
    assert found[0] == found[1]
    assert found[0]["loaded"] > 8

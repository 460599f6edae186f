"""What ``tools/saves.py`` measures: every way saves the same state, beside the steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import saves

import torchlift
from torchlift.distributed import on_ranks

pytestmark = pytest.mark.slow


MIB = 2**20


@pytest.mark.distributed
@pytest.mark.parametrize("way", [saves.COPY, saves.KEEPER, "async_with_pinned_mem"])
def test_a_way_saves_the_whole_state_beside_the_steps(tmp_path: Path, way: str) -> None:
    """Both checkpoints are there and have all bytes; the call returns before these are written."""
    if way == "async_with_pinned_mem":
        pytest.importorskip("torchtitan", reason="it is installed for Python 3.11 and newer")
    run = saves.slowest(on_ranks(saves.RANKS, saves.run, way, MIB, 1, str(tmp_path), timeout=300.0))
    assert len(run.blocked) == len(run.total) == 1
    assert 0 < run.blocked[0] < run.total[0]
    table = saves.table(MIB, {saves.COPY: [run], way: [run]})
    assert saves.WAYS[way] in table
    found = sorted(tmp_path.iterdir())
    assert len(found) == (0 if way == saves.COPY else 2)
    for path in found:
        with torchlift.open(path) as ckpt:
            assert ckpt.nbytes >= run.shard * saves.RANKS * 0.99  # the steps of Adam once

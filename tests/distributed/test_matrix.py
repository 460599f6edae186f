"""Every kind of optimizer in every kind of wrapping, from one process to four."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_workers

pytest.importorskip("torchao")


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "checks"), [(1, 30), (2, 38), (4, 12)])
def test_training_goes_on_as_if_it_had_not_been_saved(
    ranks: int, checks: int, tmp_path: Path
) -> None:
    """Bit by bit, from a state read as it is, flat, whole or on rank 0, before a step or after."""
    found = run_workers(Path(__file__).with_name("workers_matrix.py"), ranks, tmp_path)
    assert len(found) == checks
    failed = [f"{name}: {text}" for name, text in found.items() if text]
    assert not failed, "\n".join(failed)

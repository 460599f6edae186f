"""Models in torch's wrappers for ranks: one naming, and no rank's piece for the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_workers


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every check on two ranks."""
    out = tmp_path_factory.mktemp("wrapped")
    return run_workers(Path(__file__).with_name("workers_wrapped.py"), 2, out)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    [
        "each_wrapper_loads_what_any_of_them_saved",
        "an_optimizer_of_flat_pieces_is_refused_on_all_ranks",
        "a_keeper_refuses_flat_pieces_on_all_ranks",
    ],
)
def test_wrapped_models_on_two_ranks(results: dict[str, str], check: str) -> None:
    """Saved, loaded, or refused, on both alike."""
    assert results[check] == ""

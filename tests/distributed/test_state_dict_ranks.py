"""The state dict functions on several processes: as torch's where torch's are right, else right."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ranks import run_workers

pytestmark = pytest.mark.distributed


@cache
def results(ranks: int) -> dict[str, str]:
    """What every check of the workers came to; they are started once per number of ranks."""
    with TemporaryDirectory() as out:
        return run_workers(Path(__file__).with_name("workers_state.py"), ranks, Path(out))


def failures(ranks: int, compared: bool) -> list[str]:
    found = {name: text for name, text in results(ranks).items() if ("," in name) == compared}
    assert found
    return [f"{name}: {text}" for name, text in found.items() if text]


@pytest.mark.parametrize(("ranks", "at_least"), [(1, 16), (2, 33), (4, 5)])
def test_results_are_torch_s_in_every_wrapping_and_for_every_optimizer(
    ranks: int, at_least: int
) -> None:
    """Sixteen wrappings, and eight optimizers in one of each kind; every option."""
    assert sum("," in name for name in results(ranks)) >= at_least
    assert not failures(ranks, compared=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_torch_gets_wrong_is_right_on_every_rank(ranks: int) -> None:
    """Missing keys, empty dicts, partial loads, pipelines and meta models, from rank 0 or not."""
    assert not failures(ranks, compared=False)

"""`digest` on a mesh: the number of the whole, on every rank, whatever each of them holds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ranks import on_ranks, run_workers

CHECKS = [
    "every_layout_has_the_number_of_the_whole",
    "every_wrapper_has_the_number_of_the_model",
    "meshes_inside_of_others_have_the_number_of_the_whole",
    "a_name_that_one_rank_lacks_ends_all",
    "stages_are_added_up",
    "stages_that_are_sharded_are_added_up",
    "ranks_without_tensors_add_nothing",
    "what_one_rank_cannot_add_ends_all",
    "values_that_are_not_finite_end_all",
]


@cache
def results(ranks: int) -> dict[str, str]:
    """Every check on every rank."""
    with TemporaryDirectory() as out:
        return run_workers(Path(__file__).with_name("workers_digest.py"), ranks, Path(out))


@on_ranks([2, 4], CHECKS)
def test_digest_on_ranks(ranks: int, check: str) -> None:
    """It is that of one process, or one error on all of them."""
    assert results(ranks)[check] == ""

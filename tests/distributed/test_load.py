"""Loading into tensors that are spread over ranks, from files that any number of ranks wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_saves_then_loads

pytestmark = [pytest.mark.distributed, pytest.mark.every_world]

WORLDS = (1, 2, 4)  # of two and four ranks the shards of odd sizes overlap, and some are empty
WORKERS = Path(__file__).with_name("workers_load.py")


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, str]]:
    """Every check on every number of ranks, after each number of ranks has saved."""
    return run_saves_then_loads(WORKERS, WORLDS)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        "loads_into_fsdp",
        "loads_into_hsdp",
        "loads_into_tensor_parallel",
        "loads_into_two_dimensions",
        "loads_every_placement",
        "refuses_partial_sums",
        "reads_its_shards_and_no_more",
        "a_transform_gets_a_tensor_of_the_same_layout",
        "what_the_file_lacks_is_replayed_in_shards",
        "a_class_s_own_load_state_dict_is_called_on_every_rank",
        "loads_after_a_forward_pass",
        "a_sharded_skeleton_is_materialized_in_shards",
        "a_load_that_a_hook_undoes_is_not_seen_by_the_next_pass",
        "a_part_of_a_checkpoint_is_the_same_part_on_all_ranks",
    ],
)
def test_each_rank_loads_its_shards(
    results: dict[int, dict[str, str]], ranks: int, check: str
) -> None:
    """Live, meta and skeleton models, every mode and source: equal to what torch distributes."""
    assert results[ranks][check] == ""


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        "one_rank_that_fails_stops_all",
        "meshes_that_overlap_in_one_rank_load_together",
        "code_of_the_model_that_refuses_on_one_rank_stops_all",
        "a_class_s_own_load_state_dict_that_fails_on_one_rank_stops_all",
        "a_wrong_argument_on_one_rank_stops_all",
        "what_all_ranks_meet_is_said_plainly",
        "replicas_load_together_when_asked",
    ],
)
def test_all_ranks_load_or_none_does(
    results: dict[int, dict[str, str]], ranks: int, check: str
) -> None:
    """An error of one rank is raised by every rank before anything has changed."""
    assert results[ranks][check] == ""


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        "loads_what_any_number_of_ranks_saved",
        "the_reader_serves_dcp",
        "every_kind_of_shard_comes_through_dcp_and_convert",
    ],
)
def test_checkpoints_of_any_mesh_load_onto_any_other(
    results: dict[int, dict[str, str]], ranks: int, check: str
) -> None:
    """DCP directories (sync, async) and consolidated files of 1, 2 and 4 ranks, onto each."""
    assert results[ranks][check] == ""


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_failed_consolidated_save_leaves_the_old_file(
    results: dict[int, dict[str, str]], ranks: int
) -> None:
    """Every rank raises, the file is what it was, and there is no debris."""
    assert results[ranks]["a_save_that_fails_leaves_the_old_file"] == ""

"""Pipelines, meshes without rank 0, named process groups: gathered, saved and loaded on ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from ranks import run_workers
from torch import nn

from torchlift.distributed import StateDictOptions, get_model_state_dict

#: What shows more where a stage, or what is beside a mesh, is several ranks.
ON_FOUR = [
    "each_stage_is_gathered_by_its_own_ranks",
    "plain_values_that_differ_are_one_error_on_every_rank",
    "a_tensor_on_a_mesh_without_this_rank_is_refused",
    "the_ranks_of_a_process_group_load_and_read_together",
]
ON_TWO = [
    *ON_FOUR,
    "a_replica_without_dtensors_is_read_by_rank_0_alone",
    "memory_that_a_rank_lacks_stops_all_before_anything_travels",
    "what_rank_0_sends_may_be_what_its_model_has",
    "a_replica_loads_alone",
    "threads_with_a_process_group_each_load_at_the_same_time",
    "a_group_without_a_backend_for_the_cpu_agrees_over_gloo",
]


@cache
def results(ranks: int) -> dict[str, str]:
    """Every check on every rank."""
    with TemporaryDirectory() as out:
        return run_workers(Path(__file__).with_name("workers_stages.py"), ranks, Path(out))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "check"),
    [*((2, check) for check in ON_TWO), *((4, check) for check in ON_FOUR)],
)
def test_ranks_with_other_tensors_end_the_same_way(ranks: int, check: str) -> None:
    """Nothing is lost, nobody waits for ever, and one rank's fault is everybody's."""
    assert results(ranks)[check] == ""


def test_one_process_gathers_its_own() -> None:
    """Without a process group nothing is exchanged."""
    model = nn.Linear(2, 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert torch.equal(get_model_state_dict(model, options=options)["bias"], model.bias)

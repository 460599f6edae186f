"""Checks of LenientPlanner that run on every rank of a process group."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, main
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from torchlift.distributed import CheckpointReader, LenientPlanner, get_model_state_dict
from torchlift.errors import MismatchError

OUT = Path(sys.argv[1])


def model(seed: int, head: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, head))
    fully_shard(made, mesh=cpu_mesh())
    return made


def saved(name: str) -> Path:
    path = OUT / name
    dcp.save({"model": get_model_state_dict(model(0))}, checkpoint_id=path)
    return path


def refusals(state: Any, reader: Any, planner: Any) -> dict[int, BaseException]:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=planner)
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def loads_shards_and_lists_the_rest() -> None:
    path = saved("sharded")
    for reader in (dcp.FileSystemReader(path), CheckpointReader(path)):
        other = model(1, head=4)
        state = {"model": get_model_state_dict(other), "epoch": 3}
        planner = LenientPlanner(allow_missing=["epoch"], ignore_mismatched=True)
        dcp.load(state, storage_reader=reader, planner=planner)
        assert torch.equal(other[0].weight.full_tensor(), model(0)[0].weight.full_tensor())
        assert torch.equal(other[1].weight.full_tensor(), model(1, head=4)[1].weight.full_tensor())
        assert planner.missing_keys == ["epoch"]
        assert set(planner.mismatched) == {"model.1.weight", "model.1.bias"}
        assert set(planner.loaded) == {"model.0.weight", "model.0.bias"}


def a_mismatch_on_one_rank_is_an_error_on_both() -> None:
    path = OUT / "plain"
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=path)
    size = 3 if dist.get_rank() else 2
    state = {"a": torch.zeros(2), "b": torch.zeros(size)}
    ((rank, error),) = refusals(state, CheckpointReader(path), LenientPlanner()).items()
    assert rank == 0  # which compares for all
    assert isinstance(error, MismatchError)
    assert error.mismatched == {"b": ((3,), (2,))}
    assert not state["a"].any()
    planner = LenientPlanner(ignore_mismatched=True)
    dcp.load(state, storage_reader=CheckpointReader(path), planner=planner)
    assert list(planner.mismatched) == ["b"]
    assert state["b"].tolist() == [[1, 1], [0, 0, 0]][dist.get_rank()]


def stages_share_a_checkpoint() -> None:
    path = OUT / "stages"
    dcp.save({name: torch.ones(2) for name in ("first", "last", "other")}, checkpoint_id=path)
    mine = ["first", "last"][dist.get_rank()]
    state = {mine: torch.zeros(2), f"{mine}.new": torch.zeros(1)}
    error = refusals(state, CheckpointReader(path), LenientPlanner())[0]
    assert isinstance(error, MismatchError)
    assert error.missing_keys == ["first.new", "last.new"]
    planner = LenientPlanner(strict=False)
    dcp.load(state, storage_reader=CheckpointReader(path), planner=planner)
    assert planner.unexpected_keys == ["other"]
    assert planner.missing_keys == ["first.new", "last.new"]
    assert sorted(planner.loaded) == ["first", "last"]
    assert state[mine].all()


def what_is_missing_and_on_meta_is_refused() -> None:
    """Nothing says which value it has: torch gives it memory of any content."""
    path = OUT / "meta"
    dcp.save({"body": torch.ones(4)}, checkpoint_id=path)
    state: dict[str, Any] = {"body": torch.empty(4, device="meta")}
    dcp.load(state, storage_reader=CheckpointReader(path), planner=LenientPlanner())
    assert state["body"].all()
    state = {"body": torch.zeros(4)}
    if dist.get_rank():
        state["more"] = [torch.empty(2, device="meta")]
    planner = LenientPlanner(allow_missing=["*"])
    error = refusals(state, CheckpointReader(path), planner)[0]
    assert isinstance(error, MismatchError)
    assert error.entry == "more.0"
    assert "materialize" in str(error)
    assert not state["body"].any()
    state = {"model": {"body": torch.zeros(4)}}
    dcp.save({"model": {"body": torch.ones(4), 0: torch.ones(2)}}, checkpoint_id=OUT / "shape")
    if not dist.get_rank():
        state["model"][0] = torch.empty(3, device="meta")
    planner = LenientPlanner(ignore_mismatched=True)
    error = refusals(state, CheckpointReader(OUT / "shape"), planner)[0]
    assert isinstance(error, MismatchError)
    assert error.entry == "model.0"
    assert error.mismatched == {"model.0": ((3,), (2,))}


def a_refused_load_leaves_the_state_dict_as_it_is() -> None:
    """On every rank, whichever it was that something did not fit on."""
    path = OUT / "refused"
    dcp.save({"model": {"a": torch.ones(4), "b": [torch.ones(2)]}}, checkpoint_id=path)
    blank = [torch.empty(4, device="meta"), torch.empty(2, device="meta")]
    inside: dict[str, Any] = {"a": blank[0], "b": [blank[1]]}
    state: dict[str, Any] = {"model": inside}
    if dist.get_rank():
        inside["new"] = 1
    inner = inside["b"]
    planner = LenientPlanner()
    assert isinstance(refusals(state, CheckpointReader(path), planner)[0], MismatchError)
    assert state["model"] is inside
    assert inside["a"] is blank[0]
    assert inside["b"] is inner
    assert inner[0] is blank[1]
    planner = LenientPlanner(strict=False)
    dcp.load(state, storage_reader=CheckpointReader(path), planner=planner)
    assert inside["a"].tolist() == [1, 1, 1, 1]
    assert inner[0].tolist() == [1, 1]
    with torch.device("meta"):
        sharded = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(sharded, mesh=cpu_mesh())
    wanted = {"model": dict(sharded.state_dict())}
    kept = dict(wanted["model"])
    source = saved("source")
    planner = LenientPlanner(allow_unexpected=())
    wanted["more"] = {"x": 1}
    refusals(wanted, CheckpointReader(source), planner)
    assert all(wanted["model"][name] is kept[name] for name in kept)
    del wanted["more"]
    dcp.load(wanted, storage_reader=CheckpointReader(source), planner=planner)
    for name, value in model(0).state_dict().items():
        assert torch.equal(wanted["model"][name].full_tensor(), value.full_tensor()), name


def what_is_on_meta_is_loaded_into_the_given_containers() -> None:
    """Of any kind, with keys of any kind, and objects beside it."""
    there: dict[str, Any] = {"a": {"x": torch.arange(2.0), 0: torch.ones(2)}, "c": 5}
    dcp.save({**there, "b": [torch.ones(3)]}, checkpoint_id=OUT / "nested")
    inner = {"x": torch.empty(2, device="meta"), 0: torch.empty(2, device="meta")}
    behind = [torch.empty(3, device="meta")]
    state: dict[str, Any] = {"a": inner, "b": behind, "c": 0}
    dcp.load(state, storage_reader=CheckpointReader(OUT / "nested"), planner=LenientPlanner())
    assert state["a"] is inner
    assert state["b"] is behind
    found = [each.tolist() for each in (inner["x"], inner[0], behind[0])]
    assert found == [[0, 1], [1, 1], [1, 1, 1]]
    assert state["c"] == 5
    flat = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    planner = dcp.DefaultSavePlanner(**flat)
    dcp.save({"a": torch.ones(2), "c": 5}, checkpoint_id=OUT / "flat", planner=planner)
    state = {"a": torch.empty(2, device="meta"), "c": 0}
    reader = CheckpointReader(OUT / "flat")
    dcp.load(state, storage_reader=reader, planner=LenientPlanner(**flat))
    assert state["a"].tolist() == [1, 1]
    assert state["c"] == 5


def a_file_that_is_none_is_an_error_on_both() -> None:
    path = OUT / "junk"
    path.write_bytes(b"junk")
    dist.barrier()
    found = refusals({"a": torch.zeros(2)}, CheckpointReader(path), LenientPlanner())
    assert list(found) == [0, 1]


if __name__ == "__main__":
    main(
        {
            "shards": loads_shards_and_lists_the_rest,
            "one rank": a_mismatch_on_one_rank_is_an_error_on_both,
            "stages": stages_share_a_checkpoint,
            "meta": what_is_missing_and_on_meta_is_refused,
            "containers": what_is_on_meta_is_loaded_into_the_given_containers,
            "refused": a_refused_load_leaves_the_state_dict_as_it_is,
            "junk": a_file_that_is_none_is_an_error_on_both,
        }
    )

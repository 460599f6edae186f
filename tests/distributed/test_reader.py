"""CheckpointReader in one process: torch's own load, over files that are not torch's own."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from zoo import same

import torchlift
from torchlift.distributed import CheckpointReader
from torchlift.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def expected() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = dict(nn.Linear(2048, 3).state_dict())
    return {**state, "half": torch.randn(5).half(), "scalar": torch.tensor(2.5)}


def write(kind: str, folder: Path) -> Path:
    state, path = expected(), folder / kind
    if kind == "torch":
        torch.save({"model": state, "step": 7}, path)
    elif kind == "safetensors":
        save_file({f"model.{key}": value for key, value in state.items()}, path)
    else:
        dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_every_format_is_read(tmp_path: Path, kind: str) -> None:
    """Into contiguous tensors, into views with gaps, and with a cast on the way."""
    state = {key: torch.zeros_like(value) for key, value in expected().items()}
    state["weight"] = torch.zeros(3, 4096)[:, ::2]
    state["half"] = torch.zeros(5, dtype=torch.float64)
    dcp.load(state, storage_reader=CheckpointReader(write(kind, tmp_path), root="model"))
    for key, value in expected().items():
        assert torch.equal(state[key], value.to(state[key].dtype)), key


def test_objects_and_an_open_checkpoint(tmp_path: Path) -> None:
    """What is not a tensor comes too, and a checkpoint that is open already will do."""
    with torchlift.open(write("torch", tmp_path)) as ckpt:
        state = {"step": 0, "model": {"scalar": torch.zeros(())}}
        dcp.load(state, storage_reader=CheckpointReader(ckpt))
    assert state == {"step": 7, "model": {"scalar": torch.tensor(2.5)}}


def test_another_checkpoint_can_be_named_in_the_call(tmp_path: Path) -> None:
    """As with torch's own reader, checkpoint_id decides."""
    first = write("torch", tmp_path)
    other = tmp_path / "other"
    torch.save({"model": {"scalar": torch.tensor(1.5)}}, other)
    state = {"scalar": torch.zeros(())}
    dcp.load(state, checkpoint_id=other, storage_reader=CheckpointReader(first, root="model"))
    assert state["scalar"] == 1.5


def test_a_bad_file_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    """Where there is nobody to wait, the constructor says so."""
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(FormatError, match="junk"):
        CheckpointReader(tmp_path / "junk")


@pytest.mark.parametrize("partial", [False, True])
def test_what_only_a_pickle_could_rebuild_is_refused_by_its_name(
    tmp_path: Path, partial: bool
) -> None:
    """It is not called missing, and nothing of the same load has arrived when it is refused."""
    saved = {
        "model": {"weight": torch.ones(2)},
        "when": timedelta(3),
        "config": {"depth": 2, "ratio": Fraction(1, 3)},
        "mixed": [1, Fraction(1, 2)],
    }
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for key, name, what in [
        ("when", "when", "datetime.timedelta"),
        ("config", "config.ratio", "fractions.Fraction"),
        ("mixed", "mixed", "fractions.Fraction"),
    ]:
        state = {"model": {"weight": torch.zeros(2)}, key: saved[key]}
        with pytest.raises(CheckpointException, match=f"UnsafeError.*'{name}'.*{what}"):
            dcp.load(
                state,
                storage_reader=CheckpointReader(tmp_path / "dcp"),
                planner=DefaultLoadPlanner(allow_partial_load=partial),
            )
        assert state["model"]["weight"].tolist() == [0, 0]
    rest = {"model": {"weight": torch.zeros(2)}, "config": {"depth": 0}}
    dcp.load(rest, storage_reader=CheckpointReader(tmp_path / "dcp"))
    assert rest == {"model": {"weight": rest["model"]["weight"]}, "config": {"depth": 2}}
    assert rest["model"]["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_dtypes_and_devices_are_not_text(tmp_path: Path, kind: str) -> None:
    """An index has text in their place, and a group of an optimizer may have a dtype."""
    saved = {
        "dtype": torch.int8,
        "groups": [{"dtype": torch.bfloat16, "betas": (0.5, torch.device("cpu"))}],
        "name": "torch.int8",
    }
    path = tmp_path / kind
    if kind == "torch":
        torch.save(saved, path)
    else:
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    found = {"dtype": None, "groups": [{"dtype": None, "betas": (0.0, None)}], "name": ""}
    dcp.load(found, storage_reader=CheckpointReader(path))
    assert found == saved


@pytest.mark.parametrize("kind", ["torch", "dcp", "lift"])
def test_an_optimizer_without_tensors_is_loaded(tmp_path: Path, kind: str) -> None:
    """dcp.load looks for each value of a group, as it would save them."""
    model = nn.Linear(2, 1)
    saving = torch.optim.SGD([{"params": model.parameters(), "tags": [1, {"a": 2}]}], lr=0.3)
    state = {"model": model.state_dict(), "optimizer": saving.state_dict()}
    path = tmp_path / kind
    if kind == "torch":
        torch.save(state, path)
    elif kind == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        torchlift.save(state, path, format="dcp")
    group = {"params": nn.Linear(2, 1).parameters(), "tags": [0, {"a": 0}]}
    loading = torch.optim.SGD([group], lr=0.1)
    found = {"model": nn.Linear(2, 1).state_dict(), "optimizer": loading.state_dict()}
    dcp.load(found, storage_reader=CheckpointReader(path))
    assert same(found, state)


@pytest.mark.parametrize("item", [{1: 2}, {"a": {1: 2}}, Counter(a=1), OrderedDict(a=1)])
def test_a_list_with_another_kind_of_dict_is_one_value(tmp_path: Path, item: Any) -> None:
    """In parts, a counter would come back as a dict, and torch would look for other keys."""
    path = tmp_path / "x"
    torchlift.save({"w": torch.ones(1), "items": [item]}, path, format="dcp")
    found = torchlift.open(path).tree("items")
    assert found == [item]
    assert type(found[0]) is type(item)
    state = {"w": torch.zeros(1), "items": [copy.deepcopy(item)]}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert state["items"] == [item]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_that_are_no_dense_numbers_are_refused_by_name(tmp_path: Path) -> None:
    """The others load."""
    path = tmp_path / "sparse.pt"
    torch.save({"odd": torch.eye(2).to_sparse(), "w": torch.ones(2)}, path)
    reader = CheckpointReader(path)
    state = {"w": torch.zeros(2)}
    dcp.load(state, storage_reader=reader)
    assert state["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointException, match="'odd': the file has a sparse coo"):
        dcp.load({"odd": torch.zeros(4)}, storage_reader=reader)

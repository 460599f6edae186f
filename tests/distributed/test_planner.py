"""LenientPlanner: what a checkpoint has is loaded by torch's own load, and the rest is listed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_workers
from torch.distributed.checkpoint.api import CheckpointException

import torchlift
from torchlift.distributed import CheckpointReader, LenientPlanner
from torchlift.errors import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def saved() -> dict[str, Any]:
    return {
        "model": {"body": torch.arange(4.0), "head": torch.ones(3, 2), "norm": [torch.ones(2)]},
        "step": 7,
    }


def wanted() -> dict[str, Any]:
    """A state with a key that was renamed, one of another shape, and an object that is new."""
    return {
        "model": {
            "body": torch.zeros(4),
            "head": torch.zeros(5, 2),
            "new": torch.full((2,), 3.0),
            "norm": [torch.zeros(2)],
        },
        "epoch": 1,
    }


@pytest.fixture(params=["torch's reader", "CheckpointReader", "a torch file"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "a torch file":
        torch.save(saved(), tmp_path / "x.pt")
        return CheckpointReader(tmp_path / "x.pt")
    dcp.save(saved(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    kind = dcp.FileSystemReader if request.param == "torch's reader" else CheckpointReader
    return kind(tmp_path / "dcp")


def refusal(state: dict[str, Any], reader: Any, planner: LenientPlanner) -> MismatchError:
    """Return what a load raises, of which torch makes its own."""
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=planner)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, MismatchError)
    return error


def test_one_error_lists_all_that_does_not_fit(reader: Any) -> None:
    """Missing and mismatched keys, of tensors and objects; nothing has been loaded then."""
    state = wanted()
    error = refusal(state, reader, LenientPlanner())
    assert error.missing_keys == ["epoch", "model.new"]
    assert error.mismatched == {"model.head": ((5, 2), (3, 2))}
    assert error.unexpected_keys == ["step"]
    assert str(reader.path) in str(error)
    assert "missing (2): epoch, model.new" in str(error)
    assert "unexpected" not in str(error)
    assert state["model"]["body"].tolist() == [0, 0, 0, 0]
    assert state["epoch"] == 1


def test_what_may_be_missing_or_of_another_shape_stays(reader: Any) -> None:
    """The rest is loaded in place, and the lists say what happened."""
    state = wanted()
    body, before = state["model"]["body"], state["model"]["head"].clone()
    planner = LenientPlanner(allow_missing=["*.new", "epoch"], ignore_mismatched=True)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert body.tolist() == [0, 1, 2, 3]
    assert state["model"]["norm"][0].tolist() == [1, 1]
    assert torch.equal(state["model"]["head"], before)
    assert state["model"]["new"].tolist() == [3, 3]
    assert state["epoch"] == 1
    assert planner.missing_keys == ["epoch", "model.new"]
    assert planner.unexpected_keys == ["step"]
    assert sorted(planner.loaded) == ["model.body", "model.norm.0"]
    assert planner.mismatched["model.head"].found == (3, 2)
    assert str(planner).splitlines() == [
        "loaded 2 values",
        "  missing (2): epoch, model.new",
        "  unexpected (1): step",
        "  mismatched (1): model.head: model [5, 2], checkpoint [3, 2]",
    ]
    state["model"]["head"] = torch.zeros(3, 2)
    planner = LenientPlanner(strict=False)
    dcp.load(
        state, storage_reader=reader, planner=planner
    )  # a planner is for one load after another
    assert planner.missing_keys == ["epoch", "model.new"]
    assert not planner.mismatched


def test_objects_are_loaded_and_unexpected_keys_can_be_refused(reader: Any) -> None:
    """As torch does it; () in place of the default asks for every key of the checkpoint."""
    state: dict[str, Any] = {"model": {"body": torch.zeros(4)}, "step": 0}
    error = refusal(state, reader, LenientPlanner(allow_unexpected=["*.norm.*"]))
    assert error.unexpected_keys == ["model.head", "model.norm.0"]
    assert "unexpected (1): model.head" in str(error)
    planner = LenientPlanner(allow_unexpected=["*.norm.*", "*.head"])
    dcp.load(state, storage_reader=reader, planner=planner)
    assert state["step"] == 7


def test_a_load_in_which_nothing_fits_is_an_error(reader: Any) -> None:
    """Also where everything may be missing; torch's allow_partial_load goes on with nothing."""
    state = {"module.body": torch.zeros(4), "module.head": torch.zeros(3, 2)}
    error = refusal(state, reader, LenientPlanner(strict=False, allow_missing=["*"]))
    assert error.reason == "nothing in the checkpoint fits the model"
    assert error.hint == "The checkpoint has model.body, model.head, model.norm.0, step."
    state = {"model": {"body": torch.zeros(9), "head": torch.zeros(9)}}
    error = refusal(state, reader, LenientPlanner(strict=False, ignore_mismatched=True))
    assert error.reason == "nothing in the checkpoint fits the model"
    assert error.mismatched.keys() == {"model.body", "model.head"}
    assert "another configuration" in error.hint
    flat = {"body": torch.zeros(4), "head": torch.zeros(3, 2)}
    error = refusal(flat, reader, LenientPlanner(strict=False))
    assert error.hint == (
        "Some of the checkpoint's names start with 'model.': pass root='model' to load these "
        "alone, or rename=remap.strip('model.'). torchlift.load takes that."
    )
    dcp.load(flat, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert not flat["body"].any()


@pytest.mark.parametrize("name", ["allow_missing", "allow_unexpected"])
def test_a_text_is_no_list_of_patterns(name: str) -> None:
    """As load says it, when the planner is made."""
    with pytest.raises(TypeError, match=f"{name}='head'"):
        LenientPlanner(**{name: "head"})  # type: ignore[arg-type]


def test_keys_of_checkpoints_from_before_torch_2_4_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which flattened lists only where they held tensors: torch's planner knows both ways."""
    from torch.distributed.checkpoint import _version

    state = {"model": {"body": torch.ones(2)}, "groups": [{"lr": 0.5}]}
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    monkeypatch.setattr(_version, "_derived_version", None)
    here = {"model": {"body": torch.zeros(2)}, "groups": [{"lr": 0.1}]}
    planner = LenientPlanner(allow_unexpected=())
    dcp.load(here, storage_reader=CheckpointReader(tmp_path / "old"), planner=planner)
    assert here["groups"] == [{"lr": 0.5}]
    assert planner.loaded == ["groups", "model.body"]


@pytest.mark.parametrize(("own", "shown"), [(torch.tensor(0), "model"), (3, "checkpoint")])
def test_a_tensor_is_no_object(own: Any, shown: str, tmp_path: Path) -> None:
    """Nor the other way round: torch puts the one in the other's place, or ends in an assertion."""
    kept = 7 if shown == "model" else torch.tensor(7)
    dcp.save({"body": torch.ones(2), "step": kept}, checkpoint_id=tmp_path, no_dist=True)
    state = {"body": torch.zeros(2), "step": own}
    error = refusal(state, CheckpointReader(tmp_path), LenientPlanner())
    assert error.mismatched == {"step": ((), ())}
    assert f"step: only the {shown} has a tensor" in str(error)
    assert not state["body"].any()
    planner = LenientPlanner(ignore_mismatched=True)
    dcp.load(state, storage_reader=CheckpointReader(tmp_path), planner=planner)
    assert planner.loaded == ["body"]
    assert list(planner.mismatched) == ["step"]
    assert state["step"] is own


names = st.sets(st.sampled_from("abcdef"), min_size=1)


@given(there=names, here=names, allowed=names)
def test_every_key_is_in_exactly_one_list(
    tmp_path_factory: pytest.TempPathFactory, there: set[str], here: set[str], allowed: set[str]
) -> None:
    """Loaded, missing or unexpected; and an error where one is missing that may not be, or all."""
    path = tmp_path_factory.mktemp("any") / "x.pt"
    torch.save({name: torch.ones(1) for name in sorted(there)}, path)
    state = {name: torch.zeros(1) for name in sorted(here)}
    planner = LenientPlanner(allow_missing=allowed)
    missing = here - there
    refused = missing - allowed or not here & there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=CheckpointReader(path), planner=planner)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        assert isinstance(cause, MismatchError)
        assert refused
        assert set(cause.missing_keys) == missing
        assert not any(tensor.any() for tensor in state.values())
        return
    assert not refused
    assert set(planner.loaded) == {name for name in here if state[name].all()} == here & there
    assert set(planner.missing_keys) == missing
    assert set(planner.unexpected_keys) == there - here


@pytest.mark.distributed
def test_every_rank_ends_the_same_way(tmp_path: Path) -> None:
    """With what another rank lacks in its lists, and its error."""
    found = run_workers(Path(__file__).with_name("workers_planner.py"), 2, tmp_path)
    assert len(found) == 7
    assert not any(found.values()), found


def test_it_is_public() -> None:
    """And named where it is imported from."""
    assert "LenientPlanner" in torchlift.distributed.__all__

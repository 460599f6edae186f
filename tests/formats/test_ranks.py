"""Folders with a file of each rank: joined to whole tensors, or refused for what they are."""

from __future__ import annotations

import importlib
import io
import json
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from doors import refused_by_all
from rank_files import Described, Era, make_model, save_ranks, torch_file
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from zoo import Holder

import torchlift
from torchlift import remap
from torchlift.distributed import CheckpointReader, on_ranks
from torchlift.errors import CheckpointError, FormatError

FSDP, SLICES = ["fsdp", "placed"], ["slices", "buckets", "holes"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved, in folders by what it is."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(2, save_ranks, str(folder))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of these folders, to be damaged."""
    return Path(shutil.copytree(saved / request.param, tmp_path / request.param))


def whole_of(saved: Path, name: str) -> dict[str, torch.Tensor]:
    whole = torch.load(saved / "whole.pt")
    return {k: v for k, v in whole.items() if name != "fsdp" or re.match(r"\d\.", k)}


def require_equal(found: Any, whole: dict[str, torch.Tensor]) -> None:
    for key, value in whole.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*FSDP, *SLICES])
def test_the_slices_of_all_ranks_are_whole_tensors(saved: Path, name: str, tmp_path: Path) -> None:
    """By every door: rows, columns, replicas, plain buffers, sizes that do not divide."""
    place, whole = saved / name, whole_of(saved, name)
    with torchlift.open(place) as ckpt:
        assert ckpt.format == "sharded"
        assert not ckpt.blocked_keys
        for found in (ckpt, pickle.loads(pickle.dumps(ckpt)), ckpt.tree()):
            require_equal(found, whole)
    model = make_model()
    extra = [key for key in whole if key not in model.state_dict()]
    torchlift.load(model, place, allow_unexpected=extra)
    require_equal(model.state_dict(), {k: v for k, v in whole.items() if k not in extra})
    for target in ("a.safetensors", "a.pt"):
        made = tmp_path / target
        torchlift.convert(place, made, exclude=["optimizer.*"] if name == "fsdp" else [])
        assert torchlift.digest(made) == torchlift.digest(whole)
    assert torchlift.verify(place).ok
    state = {key: torch.zeros_like(value) for key, value in whole.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process
        dcp.load(state, storage_reader=CheckpointReader(place), no_dist=True)
    require_equal(state, whole)


@pytest.mark.distributed
def test_the_optimizer_of_all_ranks_is_beside_the_model(saved: Path, tmp_path: Path) -> None:
    """Its state is whole, too, and loads into an optimizer; a load of a model leaves it out."""
    moments = torch.load(saved / "moments.pt")
    with torchlift.open(saved / "fsdp") as ckpt:
        require_equal(ckpt, {f"optimizer.state.{key}": value for key, value in moments.items()})
        assert ckpt.objects["optimizer.param_groups"][0]["lr"] == 0.5
        assert ckpt.tree("optimizer")["state"][0]["exp_avg"].shape == (7, 5)
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in (saved / "fsdp").glob("optim_*"):
        shutil.copy(path, alone)
    for place in (saved / "fsdp", alone):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        torchlift.load_optimizer(model, optimizer, place)
        assert optimizer.param_groups[0]["lr"] == 0.5
        state = optimizer.state_dict()["state"]
        require_equal({f"{n}.{k}": v for n in state for k, v in state[n].items()}, moments)


MESHES: dict[str, Callable[[Era], tuple[list[object], list[int]]]] = {
    "rows and columns": lambda era: (
        [era.placed("Shard", dim=0), era.placed("Shard", dim=1)], [2, 3],
    ),
    "replicas of rows": lambda era: ([era.placed("Replicate"), era.placed("Shard", dim=0)], [2, 3]),
    "strided": lambda era: (
        [era.placed("_StridedShard", dim=0, split_factor=3), era.placed("Shard", dim=0)], [2, 3],
    ),
    "in another order": lambda era: ([era.placed("Shard", dim=0)] * 2, [2, 3]),
    "more ranks than rows": lambda era: ([era.placed("Shard", dim=0)], [16]),
}  # fmt: skip


@pytest.mark.parametrize("era", range(3), ids=["2.4", "2.8", "2.10"])
@pytest.mark.parametrize("name", MESHES)
def test_dtensors_of_older_versions_are_read(tmp_path: Path, era: int, name: str) -> None:
    """Their classes had other modules, and meshes were tensors of ranks."""
    classes = Era(era)
    placements, mesh = MESHES[name](classes)
    whole, count, changed = torch.arange(12 * 6.0).view(12, 6), torch.Size(mesh).numel(), {}
    if name == "in another order":
        entry = Described(classes.kinds["ShardOrderEntry"], None, 0, (1, 0))
        changed = {"shard_order": (entry,)}
    for rank in range(count):
        at = [rank // mesh[-1], rank % mesh[-1]][-len(mesh) :]
        if name == "more ranks than rows":
            local = whole.chunk(16)[rank] if rank < 12 else whole[:0]
        elif name == "rows and columns":
            local = whole.chunk(2)[at[0]].chunk(3, 1)[at[1]]
        else:  # sharded by the second dimension of the mesh, and then by the first
            local = whole.chunk(3)[at[1]]
            local = local if name == "replicas of rows" else local.chunk(2)[at[0]]
        made = classes.dtensor(local.clone(), whole.shape, placements, mesh, at, changed)
        path = tmp_path / f"model_world_size_{count}_rank_{rank}.pt"
        classes.save(path, {"w": made, "tied": made})
    with torchlift.open(tmp_path) as ckpt:
        assert torch.equal(ckpt["w"], whole)
        assert ckpt.aliases == (("w", "tied"),)
        state = ckpt.state_dict()
        assert state["w"].data_ptr() == state["tied"].data_ptr()


# -- what one rank has, by itself


def test_one_rank_s_slice_is_never_taken_for_the_whole(tmp_path: Path) -> None:
    """A file of one rank is opened for what it is; the hint leads to the whole tensors."""
    era, whole = Era(), torch.arange(8.0).view(4, 2)
    first, second = sorted(era.save_rows(tmp_path / "d", whole).iterdir())
    model, dtensor = Holder({"w": torch.zeros(2, 2)}), torch.distributed.tensor.DTensor
    doors: list[Callable[[Any], Any]] = [
        lambda path: torchlift.open(path)["w"],
        lambda path: torchlift.open(path).get("w"),
        lambda path: torchlift.open(path).tree(),
        lambda path: torchlift.open(path, root="w"),
        lambda path: torchlift.open(path, allow_classes=[dtensor])["w"],
        lambda path: torchlift.load(model, path),
        lambda path: torchlift.load(model, path, strict=False),
        lambda path: torchlift.load(model, [first, path]),
        lambda path: torchlift.plan(model, path),
        lambda path: torchlift.convert(path, tmp_path / "to.safetensors"),
        torchlift.digest,
    ]
    for path in (first, second, shutil.copy(first, tmp_path / "x.pt")):
        for door in doors:
            with pytest.raises(FormatError, match="one rank's slice of this tensor") as caught:
                door(path)
            assert "Open the folder with the files of all N ranks" in str(caught.value.hint)
    assert not model.w.any()
    assert not list(tmp_path.glob("to.*"))
    # The way out: by their names, in one folder.
    (tmp_path / "out").mkdir()
    shutil.move(second, tmp_path / "out" / "model_world_size_2_rank_1.pt")
    shutil.move(tmp_path / "x.pt", tmp_path / "out" / "model_world_size_2_rank_0.pt")
    assert torch.equal(torchlift.open(tmp_path / "out")["w"], whole)
    # What is whole in a file beside slices stays usable.
    shard = era.dtensor(whole[:2], whole.shape, [era.placed("Shard", dim=0)], [2], [0])
    half = era.save(tmp_path / "half.pt", {"model": {"w": whole}, "optimizer": {"s": shard}})
    assert torch.equal(torchlift.open(half, root="model")["w"], whole)


@pytest.mark.distributed
def test_one_slice_of_safetensors_is_never_taken_for_the_whole(saved: Path, tmp_path: Path) -> None:
    """A header does not say how large the tensor is; the hint leads to the whole tensors."""
    files = sorted((saved / "slices").iterdir())
    (tmp_path / "one").mkdir()
    alone = shutil.copy(files[0], tmp_path / "one")
    for place in (files[0], io.BytesIO(files[1].read_bytes()), alone, tmp_path / "one"):
        error = refused_by_all(place, tmp_path, "one rank's slices of tensors")
    with pytest.raises(FormatError, match="one rank's slices of tensors"):
        torchlift.convert([*map(str, files)], tmp_path / "to.safetensors")
    # The way out of a folder with one file, for which nothing says that it is all.
    assert "If there was one process only" in str(error.hint)
    function, module = re.findall(r"call (\w+)\(.* of (\S+), and", str(error.hint))[0]
    (tmp_path / "whole").mkdir()
    keys = dict.fromkeys(safe_open(files[0], "pt").keys(), 1)
    found = getattr(importlib.import_module(module), function)
    found(str(saved / "slices"), str(tmp_path / "whole"), keys)
    whole = whole_of(saved, "slices")
    require_equal(torchlift.open(tmp_path / "whole"), {key: whole[key] for key in keys})
    assert torchlift.open(files[0].parent)["rows"].shape == (3, 4)


# -- what is missing, or does not fit


@pytest.mark.parametrize("lost", range(3))
def test_a_rank_that_is_missing_is_named(tmp_path: Path, lost: int) -> None:
    """The names of the others say how many there were; so of an optimizer's files."""
    whole = Era().save_rows(tmp_path / "d", torch.zeros(6, 2), 3)
    file = torch_file(whole, "optim", lost, 3, {"state": {}})
    with pytest.raises(FormatError, match="2 rank's files are missing"):
        torchlift.open(whole)
    file.unlink()
    (whole / f"model_world_size_3_rank_{lost}.pt").unlink()
    with pytest.raises(FormatError, match="a rank's file is missing") as caught:
        torchlift.open(whole)
    assert caught.value.entry == f"model_world_size_3_rank_{lost}.pt"


def test_a_rank_with_two_files_is_refused(tmp_path: Path) -> None:
    """The weights would be of two saves. The message names both files."""
    folder = Era().save_rows(tmp_path / "d", torch.zeros(4, 2))
    stale = folder / "model_world_size_2_rank_00.pt"
    shutil.copy(folder / "model_world_size_2_rank_0.pt", stale)
    with pytest.raises(FormatError, match="two files have one number") as caught:
        torchlift.open(folder)
    assert caught.value.found == f"model_world_size_2_rank_0.pt, {stale.name}"
    stale.rename(tmp_path / stale.name)  # as the hint says
    assert torchlift.open(folder)["w"].shape == (4, 2)


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    """By four ranks and by two; and files of different content under one save's names."""
    era = Era()
    folder = era.save_rows(tmp_path / "d", torch.zeros(8, 2), 4)
    era.save_rows(folder, torch.zeros(8, 2), 2)
    with pytest.raises(FormatError, match="the files are of several saves"):
        torchlift.open(folder)
    for path in folder.glob("model_world_size_4_*"):
        path.unlink()  # as the hint says
    assert torchlift.open(folder)["w"].shape == (8, 2)
    for other in torch.zeros(9, 2), torch.zeros(8, 2, dtype=torch.half), torch.zeros(8):
        era.save_rows(tmp_path / "other", other)
        shutil.copy(tmp_path / "other" / "model_world_size_2_rank_1.pt", folder)
        with pytest.raises(FormatError, match="different shapes or dtypes of a tensor") as caught:
            torchlift.open(folder)
        assert caught.value.entry == "w"


_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "partial": ({"placements": ["Partial"]}, "not Partial"),
    "another class": ({"placements": ["DeviceMesh"]}, "not DeviceMesh"),
    "no placements": ({"placements": None}, "its placements"),
    "too many": ({"placements": ["Shard", "Shard"]}, "one for each dimension of its mesh"),
    "a dimension too many": ({"placements": [("Shard", {"dim": 2})]}, "not Shard"),
    "a negative one": ({"placements": [("Shard", {"dim": -1})]}, "not Shard"),
    "no factor": ({"placements": [("_StridedShard", {"dim": 0, "split_factor": 0})]}, "Strided"),
    "no mesh": ({"mesh": None}, "the shape of its mesh"),
    "order": ({"shard_order": (3,)}, "the order of its shards"),
}


@pytest.mark.parametrize("name", _LAYOUTS)
def test_a_layout_that_nobody_knows_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Partial sums are no values; and what a class of the future does is not guessed."""
    era, (changed, text) = Era(), _LAYOUTS[name]
    if isinstance(changed.get("placements"), list):
        each = [(p, {"dim": 0}) if isinstance(p, str) else p for p in changed["placements"]]
        changed = {"placements": tuple(era.placed(kind, **state) for kind, state in each)}
    shard = era.placed("Shard", dim=0)
    for rank in range(2):
        made = era.dtensor(torch.zeros(2, 2), (4, 2), [shard], [2], [rank], changed)
        era.save(tmp_path / "d" / f"model_world_size_2_rank_{rank}.pt", {"w": made})
    with pytest.raises(FormatError, match="the layout of a DTensor is unknown") as caught:
        torchlift.open(tmp_path / "d")
    assert caught.value.entry == "w"
    assert text in str(caught.value.expected)
    with pytest.raises(CheckpointError, match="one rank's slice"):
        torchlift.open(tmp_path / "d" / "model_world_size_2_rank_0.pt")["w"]


def test_not_a_number_on_all_ranks_is_one_value(tmp_path: Path) -> None:
    """Also within containers. It does not equal itself, but all ranks saved it."""
    plain = {"loss": math.nan, "seen": [1.0, {"a": (math.nan, 2)}]}
    for rank in range(2):
        torch_file(tmp_path, "model", rank, 2, {"w": torch.tensor([math.nan]), **plain})
    assert torchlift.diff(tmp_path, {"w": torch.tensor([math.nan]), **plain}).equal
    for other in ({"loss": 1.0}, {"seen": [1.0, {"a": (math.nan, 3)}]}):
        torch_file(tmp_path, "model", 1, 2, {"w": torch.tensor([math.nan]), **plain, **other})
        assert torchlift.open(tmp_path).blocked_keys.keys() == other.keys()


@pytest.mark.distributed
def test_values_that_differ_between_ranks_are_never_those_of_the_first(
    saved: Path, tmp_path: Path
) -> None:
    """Such as the statistics of a BatchNorm; who knows which value counts can say so."""
    folder, model, name = saved / "buffers", make_model(), "2.running_mean"
    for door in (
        lambda: torchlift.open(folder)[name],
        lambda: torchlift.load(model, folder),
        lambda: torchlift.convert(folder, tmp_path / "to.pt"),
    ):
        with pytest.raises(FormatError, match="the ranks saved different values") as caught:
            door()
        assert caught.value.entry == name
        assert "[folder, {name: torchlift.open(file)[name]}]" in str(caught.value.hint)
    file = folder / "model_world_size_2_rank_1.pt"
    torchlift.load(model, [folder, {name: torchlift.open(file)[name]}])
    require_equal(model.state_dict(), {**whole_of(saved, "fsdp"), name: torch.ones(3)})


def test_plain_pieces_of_ranks_are_not_whole_tensors(tmp_path: Path) -> None:
    """One on some ranks only; one without a checksum to compare; a value that is no tensor."""
    # FSDP1 keeps flat pieces of an optimizer, each on the ranks that have some of it.
    flat = {0: {0: torch.zeros(4), 1: torch.zeros(2)}, 1: {1: torch.zeros(3)}}
    for rank in range(2):
        state = {"same": torch.ones(2), "size": torch.ones(1 + rank)}
        moments = {number: {"exp_avg": piece} for number, piece in flat[rank].items()}
        torch_file(tmp_path, "model", rank, 2, state)
        torch_file(tmp_path, "optim", rank, 2, {"state": moments, "param_groups": [{"lr": rank}]})
    with torchlift.open(tmp_path) as ckpt:
        assert [*ckpt] == ["same"]
        assert {*ckpt.blocked_keys} == {
            "size", "optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg",
            "optimizer.param_groups",
        }  # fmt: skip
    chosen = [tmp_path, {"size": torch.ones(1)}]
    torchlift.convert(chosen, tmp_path / "out" / "both.safetensors")
    assert {*torchlift.open(tmp_path / "out" / "both.safetensors")} == {"same", "size"}
    for path in tmp_path.glob("model_*"):  # what torch wrote before 1.6 has no checksums
        torch.save({"same": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match="or files without checksums"):
        torchlift.open(tmp_path)["same"]


def test_replicas_of_a_slice_that_differ_are_refused(tmp_path: Path) -> None:
    """Where both are whole storages, their checksums show it."""
    era, mesh = Era(), [2, 2]
    ways = [era.placed("Replicate"), era.placed("Shard", dim=0)]
    for rank in range(4):
        at = [rank // 2, rank % 2]
        local = torch.full((2, 2), float(rank == 3))
        made = era.dtensor(local, (4, 2), ways, mesh, at)
        era.save(tmp_path / f"model_world_size_4_rank_{rank}.pt", {"w": made})
    with pytest.raises(FormatError, match="the ranks saved different values"):
        torchlift.open(tmp_path)["w"]


@pytest.mark.distributed
@pytest.mark.parametrize("folder", SLICES[1:], indirect=True)
def test_a_folder_of_slices_that_lacks_a_file_is_refused(
    folder: Path, saved: Path, tmp_path: Path
) -> None:
    """By the gap in a tensor: a rank that holds nothing of a file does not write it."""
    first = min(folder.iterdir())
    first.rename(tmp_path / first.name)
    error = refused_by_all(folder, tmp_path, "pieces of a tensor are missing")
    assert error.entry in load_file(tmp_path / first.name)
    assert "rank's file may be missing" in str(error.hint)
    (tmp_path / first.name).rename(first)  # as the hint says
    require_equal(torchlift.open(folder), whole_of(saved, "slices"))


def slice_file(path: Path, state: dict[str, torch.Tensor], **offsets: object) -> None:
    noted = {key: {"saved_offsets": offset} for key, offset in offsets.items()}
    save_file(state, path, {"DCP_SHARDING_INFO": json.dumps(noted)})


def _name(rank: int, at: int = 1, count: int = 1) -> str:
    return f"shard-{rank:05}-model-{at:05}-of-{count:05}.safetensors"


_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an overlap": ({"w": [1, 0]}, "overlap"),
    "dimensions": ({"w": [2]}, "a slice does not say its place"),
    "no key": ({"v": [2, 0]}, "offset"),
    "a fraction": ({"w": [2.5, 0]}, "offset"),
    "a negative one": ({"w": [-2, 0]}, "offset"),
    "a huge one": ({"w": [2**62, 2**62]}, "pieces of a tensor are missing"),
}


@pytest.mark.parametrize("name", _FAULTS)
def test_slices_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    """Their places come from a stranger."""
    offsets, text = _FAULTS[name]
    slice_file(tmp_path / _name(1), {"w": torch.zeros(2, 2)}, w=[0, 0])
    slice_file(tmp_path / _name(2), {"w": torch.zeros(2, 2)}, **offsets)
    with pytest.raises(FormatError, match=text):
        torchlift.open(tmp_path)


def test_slices_beside_other_weights_are_refused(tmp_path: Path) -> None:
    """Which of them is meant, nobody knows; but an index says it."""
    for rank in (1, 2):
        slice_file(tmp_path / _name(rank), {"w": torch.zeros(2, 2)}, w=[2 * rank - 2, 0])
    assert torchlift.open(tmp_path)["w"].shape == (4, 2)
    other = tmp_path / "other.safetensors"
    save_file({"w": torch.ones(4, 2)}, other)
    with pytest.raises(FormatError, match="and other files of weights"):
        torchlift.open(tmp_path)
    other.rename(tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="two checkpoints of one model"):
        torchlift.open(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert torchlift.open(tmp_path)["w"].sum() == 8


# -- slices without a record


def _llama(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    whole = {
        f"layers.{at}.{name}.weight": torch.randn(4, 6)
        for at in range(2)
        for name in ("wq", "wo", "norm")
    }
    for rank in range(2):
        state = {
            key: value.clone() if "norm" in key else value.chunk(2, int("wo" in key))[rank].clone()
            for key, value in whole.items()
        }
        torch.save(state, folder / f"consolidated.{rank:02}.pth")
    return whole


def test_slices_without_a_record_are_refused_and_can_be_merged(tmp_path: Path) -> None:
    """Nothing says along which dimension each is cut: whoever knows it can say so."""
    folder, model = tmp_path / "d", torch.nn.Module()
    whole = _llama(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for place in (folder, files[0], str(files[1]), files):
        for door in (
            lambda place: torchlift.load(model, place),
            lambda place: torchlift.convert(place, tmp_path / "to.pt"),
        ):
            with pytest.raises(FormatError, match="do not say how to join them") as caught:
                door(place)
            hint = 'torchlift.remap.merge("{n}.*.wq.weight", "*.wq.weight", cat=0)'
            assert hint in str(caught.value.hint)
    slices = {
        f"{number}.{key}": value
        for number, file in enumerate(files)
        for key, value in torchlift.open(file).items()
    }
    rename = remap.merge("{n}.*.wq.weight", "*.wq.weight", cat=0)
    rename |= remap.merge("{n}.*.wo.weight", "*.wo.weight", cat=1)
    rename |= remap.rules([(r"^0\.(.*norm.*)", r"\1"), (r"^\d\..*norm", None)])
    torchlift.convert(slices, tmp_path / "to.safetensors", rename=rename)
    assert torchlift.digest(tmp_path / "to.safetensors") == torchlift.digest(whole)


def test_the_only_slice_is_the_model(tmp_path: Path) -> None:
    """The smallest llama is one file, and a model that is not split has rank 0 alone."""
    for name in ("consolidated.00.pth", "mp_rank_00_model_states.pt"):
        folder = tmp_path / name
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / name)
        (folder / "params.json").write_text("{}")
        for place in (folder, folder / name):
            assert torch.equal(torchlift.open(place)["w"], torch.ones(2))
            torchlift.convert(place, tmp_path / "to.pt", overwrite=True)


@pytest.mark.parametrize(
    "name",
    ["consolidated.0{}.safetensors", "tp_rank_0{}_pp_rank_000/model.ckpt",
     "mp_rank_0{}_model_states.pt", "mp_rank_0{}/model_weights.ckpt",
     "mp_rank_0{}/model_optim_rng.pt",
     "model-rank-{}-part-0.safetensors", "rank{}.safetensors", "reshard-model_part-{}.pt",
     "model_weight_pp-rank-0-of-1_tp-rank-{}-of-2.safetensors", "model{}-mp2.safetensors",
     "layer_00-model_0{}-model_states.pt", "weights.tp{}.safetensors"],
)  # fmt: skip
def test_one_of_the_slices_of_other_programs_is_not_the_model(tmp_path: Path, name: str) -> None:
    """Neither the folder nor one file loads with half of each weight."""
    files = [tmp_path / "slices" / name.format(rank) for rank in range(2)]
    for file in files:
        torchlift.save({"w": torch.ones(2)}, file)
    model = Holder({"w": torch.zeros(2)})
    for place in (tmp_path / "slices", *files, files):
        with pytest.raises(FormatError, match="do not say how to join them"):
            torchlift.load(model, place)
    assert not model.w.any()
    torchlift.load(model, torchlift.open(files[0]))  # as the way out says
    assert model.w.sum() == 2

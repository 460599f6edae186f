"""Directories of torch.distributed.checkpoint, read without an unpickler and without a group."""

from __future__ import annotations

import io
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import Call
from dcp_files import describe, write_dcp
from hub_files import damage
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import WriteItem

import torchlift
from torchlift.errors import FormatError, UnsafeError

# What torch says of a save or load without a process group, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with tensors of several layouts, an optimizer and plain objects."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "opt": optimizer.state_dict(),
        "odd": torch.arange(6).view(2, 3).t(),
        "none": torch.empty(0, 4),
        "step": 7,
        "names": ["a", "b"],
    }
    dcp.save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    return tmp_path / "ck"


def metadata_of(path: Path) -> Metadata:
    with open(path / ".metadata", "rb") as file:
        return pickle.load(file)  # type: ignore[no-any-return]


def change(path: Path, edit: Callable[[Metadata], object]) -> Path:
    metadata = metadata_of(path)
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


GRID = [((0, 0), (3, 2)), ((0, 2), (3, 3)), ((3, 0), (2, 5))]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (5, 5))],
        [((0, 0), (2, 5)), ((2, 0), (2, 5)), ((4, 0), (1, 5))],
        [((0, 0), (5, 1)), ((0, 1), (5, 4))],
        GRID,
        [((0, 0), (5, 5)), ((5, 0), (0, 5))],
    ],
    ids=["one", "rows", "columns", "grid", "empty"],
)
@pytest.mark.parametrize("source", ["mmap", "read"])
@pytest.mark.parametrize("mode", ["assign", "copy", "swap"])
def test_a_tensor_in_chunks_is_put_together(
    tmp_path: Path, boxes: Any, source: Any, mode: Any
) -> None:
    """Whatever the boxes: as a view, into a live model, onto a skeleton, cast or not."""
    whole = torch.randn(5, 5)
    items = {}
    for start, shape in boxes:
        part = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
        torch.save(whole[part].clone(), item := io.BytesIO())
        items["weight", start] = item.getvalue()
    path = write_dcp(tmp_path / "ck", {"weight": describe((5, 5), *boxes)}, items)
    with torchlift.open(path) as ckpt:
        assert torch.equal(ckpt["weight"], whole)
    make = partial(nn.Linear, 5, 5, bias=False)
    for model in (make(), torchlift.skeleton(make)):
        torchlift.load(model, path, mode=mode, source=source)
        assert torch.equal(model.weight, whole)
    model = torchlift.skeleton(make)
    torchlift.load(model, path, mode=mode, source=source, dtype=torch.float16)
    assert torch.equal(model.weight, whole.half())
    doubled = torchlift.skeleton(make)
    torchlift.load(doubled, path, transform=lambda key, t: t * 2, source=source)
    assert torch.equal(doubled.weight, whole * 2)


def test_metadata_per_rank_is_merged(saved: Path) -> None:
    """Without coordination each rank writes its own metadata; replicas count once."""
    os.rename(saved / ".metadata", saved / "__0.metadata")
    second = saved / "__1.metadata"
    second.write_bytes((saved / "__0.metadata").read_bytes())
    with torchlift.open(saved) as ckpt:
        assert ckpt.objects["step"] == 7
        assert ckpt["model.weight"].shape == (2, 3)
    metadata = pickle.loads(second.read_bytes())
    metadata.state_dict_metadata["model.weight"].size = torch.Size([3, 3])
    second.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="the files have different shapes or dtypes of a tensor"):
        torchlift.open(saved)


EVIL = Call(os.system, "echo run > evil")


def _info(metadata: Metadata, key: str) -> _StorageInfo:
    return next(v for k, v in metadata.storage_data.items() if k.fqn == key)


def _set(key: str, **values: object) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        vars(_info(metadata, key)).update(values)

    return edit


def _exchange(a: str, b: str) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        first, second = vars(_info(metadata, a)), vars(_info(metadata, b))
        kept = dict(first)
        first.update(second)
        second.update(kept)

    return edit


def _chunks(*boxes: tuple[list[int], list[int]]) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.weight"].chunks = [
            ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in boxes
        ]
        first = next(at for at in metadata.storage_data if at.fqn == "model.weight")
        for start, _ in boxes:
            other = MetadataIndex("model.weight", torch.Size(start))
            metadata.storage_data.setdefault(other, metadata.storage_data[first])

    return edit


#: What is wrong -> how the metadata is changed, and words of the error.
REFUSED: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "foreign global": (lambda m: m.state_dict_metadata.update(x=EVIL), "foreign global"),
    "foreign planner": (lambda m: setattr(m, "planner_data", EVIL), "foreign global"),
    "absolute": (_set("model.weight", relative_path="/etc/passwd"), "plain relative"),
    "missing file": (_set("model.weight", relative_path="__9_0.distcp"), "a shard is missing"),
    "negative": (_set("model.weight", offset=-5), "invalid size or offset"),
    "not a number": (_set("model.weight", offset="5"), "invalid size or offset"),
    "elsewhere": (_set("model.weight", offset=3), "__0_0.distcp"),
    "an item of two": (
        lambda m: vars(_info(m, "model.weight")).update(vars(_info(m, "model.bias"))),
        "two items overlap in the file"),
    "another item": (
        _exchange("model.weight", "model.bias"),
        r"an item differs from the metadata; expected float32 \[2, 3\]"),
    "transformed": (
        _set("model.weight", transform_descriptors=["zstd"]), "transformed the bytes.*zstd"),
    "no chunk": (_chunks(), "pieces of a tensor are missing"),
    "fewer dimensions": (_chunks(([0], [6])), "other dimensions than its tensor"),
    "no file": (lambda m: m.storage_data.clear(), "does not say in which file"),
    "not a mapping": (lambda m: setattr(m, "storage_data", None), "incomplete"),
    "a key that is not text": (
        lambda m: m.state_dict_metadata.update({1: m.state_dict_metadata["model.weight"]}),
        "a key that is not text; found a int"),
    **{f"{name} is {value}": (
        lambda m, name=name, value=value: setattr(
            m.state_dict_metadata["model.weight"], name, value), f"'model.weight': {words}")
       for name, value, words in (
           ("chunks", None, "the metadata of a tensor is malformed"),
           ("properties", None, "a tensor has an unknown dtype"),
           ("size", torch.Size([2**62 - 1]), ".*dimensions"))},
    "no name of a file": (
        _set("model.weight", relative_path=3), "'model.weight': an item's file is not a name"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_metadata_is_refused_and_nothing_runs(
    saved: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an error that says what is wrong, before a byte is allocated for it."""
    edit, text = REFUSED[what]
    change(saved, edit)
    monkeypatch.chdir(saved)
    is_unsafe = what in ("foreign global", "foreign planner", "absolute")
    with pytest.raises(UnsafeError if is_unsafe else FormatError, match=f"(?s){text}"):
        torchlift.open(saved)
    assert not (saved / "evil").exists()


def test_a_list_that_was_saved_in_part_is_a_dict_by_position(saved: Path) -> None:
    """A whole one is a list; a key of which no path is told is a name at the top."""
    assert type(torchlift.open(saved).tree()["opt"]["param_groups"]) is list

    def edit(metadata: Metadata) -> None:
        del metadata.planner_data["odd"], metadata.planner_data["step"]
        metadata.planner_data["list.2"] = ("list", 2)
        metadata.state_dict_metadata["list.2"] = metadata.state_dict_metadata.pop("step")
        metadata.storage_data[MetadataIndex("list.2")] = _info(metadata, "step")

    tree = torchlift.open(change(saved, edit)).tree()
    assert tree["list"] == {"2": 7}
    assert tree["odd"].shape == (3, 2)


def test_objects_that_need_code_are_listed_and_blocked(tmp_path: Path) -> None:
    """They come neither as tensors nor as objects, and asking for one says why."""
    dcp.save(
        {"w": torch.ones(2), "bad": EVIL, "mixed": {"t": torch.ones(1)}},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    with torchlift.open(tmp_path) as ckpt:
        assert set(ckpt) == {"w", "mixed.t"}
        assert ckpt.blocked == ("posix.system",)
        with pytest.raises(UnsafeError, match=r"posix.system"):
            ckpt["bad"]


class AsMegatron(DefaultSavePlanner):
    """Sharded objects are packed already, as in megatron.core's ``MCoreSavePlanner``."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def packed(*shards: object) -> io.BytesIO:
    """What megatron.core makes of a rank's shards of an object."""
    stream = io.BytesIO()
    torch.save(list(shards), stream)
    return stream


@pytest.fixture
def torch_dist(tmp_path: Path) -> Path:
    """A directory of Megatron's ``torch_dist``, from when ``common.pt`` was beside it."""
    path = tmp_path / "run" / "iter_0000100"
    state = {
        "decoder.layers.weight": torch.randn(2, 4, 3),
        "optimizer.state.exp_avg.decoder.layers.weight": torch.randn(24),
        "decoder.layers.core_attention._extra_state/shard_0_2": packed(io.BytesIO(b"te")),
        "decoder.layers.core_attention._extra_state/shard_1_2": packed(None),
        "rng_state/shard_0.0_1.1": packed([{"seed": 5, "torch": torch.get_rng_state()}]),
    }
    planner = AsMegatron(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(path)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    common = {
        "args": Namespace(hidden_size=4), "iteration": 100, "checkpoint_version": 3.0,
        "optimizer": {"param_groups": [{"lr": 0.1}], "steps": [torch.tensor(3.0)]},
    }  # fmt: skip
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    metadata = metadata_of(path)
    name = "megatron.core.dist_checkpointing.strategies.torch"
    named = [name.rsplit(".", at)[0] for at in range(4, -1, -1)]
    sys.modules.update({each: ModuleType(each) for each in named})
    made = type("MCoreMetadata", (), {"__module__": name})
    sys.modules[name].MCoreMetadata = made  # type: ignore[attr-defined]
    other = made()
    vars(other).update(vars(metadata), mcore_data={"a": {"shape": (2, 3)}})
    other.all_local_plans = [planner.plan]  # type: ignore[attr-defined]
    (path / ".metadata").write_bytes(pickle.dumps(other))
    for each in named:
        del sys.modules[each]
    return path


def test_a_directory_of_megatron_is_read(torch_dist: Path) -> None:
    """Tensors, sharded objects one by one, and what is in ``common.pt``; classes are not needed."""
    with pytest.raises(FormatError, match=f"but in folders; found {torch_dist.name}"):
        torchlift.open(torch_dist.parent)
    with torchlift.open(torch_dist) as ckpt:
        assert ckpt.format == "dcp"
        assert ckpt["decoder.layers.weight"].shape == (2, 4, 3)
        assert ckpt["optimizer.state.exp_avg.decoder.layers.weight"].shape == (24,)
        assert torch.equal(ckpt["rng_state/shard_0.0_1.1.0.0.torch"], torch.get_rng_state())
        assert ckpt.objects["rng_state/shard_0.0_1.1.0.0.seed"] == 5
        extra = "decoder.layers.core_attention._extra_state/shard_"
        assert ckpt.objects[extra + "1_2"] == [None]
        assert ckpt.objects["iteration"] == 100
        assert ckpt.objects["optimizer.param_groups"] == [{"lr": 0.1}]
        assert ckpt["optimizer.steps.0"].item() == 3
        assert ckpt.blocked == ("_io.BytesIO", "argparse.Namespace")
        with pytest.raises(UnsafeError, match=r"'args': .*argparse\.Namespace"):
            ckpt["args"]
    assert torchlift.verify(torch_dist).ok
    assert "megatron" not in sys.modules


def test_items_like_others_are_checked_as_if_they_were_the_first(tmp_path: Path) -> None:
    """Many shards of two shapes: each has its own numbers and checksum, and each is checked."""
    state = {f"w{i}": torch.randn(*((4, 3) if i % 3 else (3, 4))) for i in range(20)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with torchlift.open(tmp_path) as ckpt:
        assert torchlift.diff(ckpt, state).equal
        chunk = ckpt.entries["w7"].chunks[0]
    assert len(torchlift.verify(tmp_path).checked) == 20
    damage(Path(chunk.file), chunk.offset + 5)
    assert len(torchlift.verify(tmp_path).failed) == 1


def read_damaged(folder: Path, state: dict[str, torch.Tensor], key: str) -> list[object]:
    """Save, and change each second byte beside an item's values. Where are these, or why not?"""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (chunk,) = torchlift.open(folder).entries[key].chunks
    place, good = _info(metadata_of(folder), key), Path(chunk.file).read_bytes()
    behind, found = chunk.offset + chunk.nbytes, list[object]()
    for at in [*range(place.offset, chunk.offset, 2),
               *range(behind, place.offset + place.length, 2)]:  # fmt: skip
        Path(chunk.file).write_bytes(good[:at] + bytes([good[at] ^ 0x21]) + good[at + 1 :])
        try:
            found.append(torchlift.open(folder).entries[key].chunks[0].offset - place.offset)
        except FormatError as error:
            found.append(error.reason)
    return found


def test_damage_beside_values_is_seen_in_one_of_many_equal_items(tmp_path: Path) -> None:
    """A later item is read by the form of the first. An item that is alone has no such form."""
    state = {name: torch.full((4,), float(at)) for at, name in enumerate("abc")}
    many = read_damaged(tmp_path / "many", state, "c")
    assert many == read_damaged(tmp_path / "one", {"c": state["c"]}, "c")
    assert len({*many}) > 5


@pytest.mark.parametrize("lost", range(3))
def test_the_metadata_of_a_rank_that_is_missing_is_named(tmp_path: Path, lost: int) -> None:
    """Its keys would be missing without a word; the last one is known by its data."""
    for rank in range(3):
        dcp.save({f"w{rank}": torch.ones(2)}, checkpoint_id=tmp_path / str(rank), no_dist=True)
        place = metadata_of(tmp_path / str(rank))
        for info in place.storage_data.values():
            info.relative_path = f"__{rank}_0.distcp"
        (tmp_path / f"__{rank}.metadata").write_bytes(pickle.dumps(place))
        os.rename(tmp_path / str(rank) / "__0_0.distcp", tmp_path / f"__{rank}_0.distcp")
        (tmp_path / str(rank) / ".metadata").unlink()
        (tmp_path / str(rank)).rmdir()
    assert sorted(torchlift.open(tmp_path)) == ["w0", "w1", "w2"]
    (tmp_path / f"__{lost}.metadata").unlink()
    match = f"'__{lost}.metadata': a rank's metadata is missing; expected 3 files; found 2"
    with pytest.raises(FormatError, match=match):
        torchlift.open(tmp_path)


def test_data_without_metadata_is_no_checkpoint(saved: Path) -> None:
    """It is written last; what else is in the folder is not the checkpoint."""
    (saved / ".metadata").unlink()
    torch.save({"iteration": 3}, saved / "common.pt")
    with pytest.raises(FormatError, match=r"its metadata is missing.*__0_0\.distcp"):
        torchlift.open(saved)


def test_a_record_of_metadata_with_arguments_or_two_states_is_refused(saved: Path) -> None:
    """No pickler writes them, and they would mean something to torch."""
    data = (saved / ".metadata").read_bytes()
    name = b"_StorageInfo"
    at = data.index(name)
    call = data.index(b")\x81", at)
    (saved / ".metadata").write_bytes(data[:call] + b"K\1\x85\x81" + data[call + 2 :])
    with pytest.raises(FormatError, match="made with arguments"):
        torchlift.open(saved)
    for opcodes, what in ((b"}b.", "two states"), (b"(K\1e.", "adds items to an object")):
        (saved / ".metadata").write_bytes(data[:-1] + opcodes)
        with pytest.raises(FormatError, match=what):
            torchlift.open(saved)


def test_a_file_beside_the_metadata_of_megatron_is_as_strange_as_the_rest(torch_dist: Path) -> None:
    """A pipe, a link elsewhere, a key that the metadata has, too."""
    common = torch_dist / "common.pt"
    torch.save({"decoder": {"layers.weight": 3}}, common)
    with pytest.raises(FormatError, match=r"'decoder\.layers\.weight': two tensors or objects"):
        torchlift.open(torch_dist)
    os.rename(common, torch_dist.parent / "common.pt")
    os.symlink(torch_dist.parent / "common.pt", common)
    with pytest.raises(UnsafeError, match="a link that leaves the directory"):
        torchlift.open(torch_dist)
    common.unlink()
    os.mkfifo(common)
    with pytest.raises(FormatError, match="not a regular file"):
        torchlift.open(torch_dist)
    common.unlink()
    with pytest.raises(FormatError, match=r"'common\.pt': a shard is missing"):
        torchlift.open(torch_dist)
    (torch_dist / "metadata.json").write_text('{"by": "another program"}')
    assert "iteration" not in torchlift.open(torch_dist).objects


def test_what_megatron_stores_of_all_ranks_may_be_a_sharded_object(tmp_path: Path) -> None:
    """Newer versions have no ``common.pt``, and nothing is missing then."""
    state = {"w": torch.ones(2), "common_state/shard_0_1": packed({"iteration": 100})}
    planner = AsMegatron(flatten_state_dict=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), planner=planner, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with torchlift.open(tmp_path) as ckpt:
        assert "w" in ckpt

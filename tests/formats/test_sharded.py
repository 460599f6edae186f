"""Checkpoints in several files, and directories."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import read_tensor
from doors import refused_by_all
from hub_files import hub_cache
from range_server import serving
from safetensors.torch import save_file
from transformers.utils.hub import get_checkpoint_shard_files

import torchlift
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.detect import read_index

INDEX = "model.safetensors.index.json"


def write_index(directory, weight_map, name=INDEX, **rest):
    path = directory / name
    path.write_text(json.dumps({"weight_map": weight_map, **rest}))
    return path


@pytest.fixture
def sharded(tmp_path):
    """Two safetensors shards and their index."""
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "s-00001-of-00002.safetensors")
    save_file({"c": torch.full((3,), 2.0)}, tmp_path / "s-00002-of-00002.safetensors")
    write_index(
        tmp_path,
        {
            "a": "s-00001-of-00002.safetensors",
            "b": "s-00001-of-00002.safetensors",
            "c": "s-00002-of-00002.safetensors",
        },
        metadata={"total_size": 28},
    )
    return tmp_path


def test_torch_shards_keep_their_storages_apart(tmp_path):
    """Each torch file has a storage data/0: they are not aliases of each other."""
    for i in (1, 2):
        torch.save({f"w{i}": torch.full((2,), float(i))}, tmp_path / f"pytorch_model-{i}.bin")
    write_index(tmp_path, {f"w{i}": f"pytorch_model-{i}.bin" for i in (1, 2)},
                "pytorch_model.bin.index.json")  # fmt: skip
    index = read_index(tmp_path)
    assert index.aliases == ()
    assert set(index.storages) == {f"pytorch_model-{i}.bin/data/0" for i in (1, 2)}
    assert read_tensor(index.entries["w2"]).tolist() == [2, 2]


def test_tensors_that_the_index_forgets_are_kept(sharded):
    """A shard's tensors are part of the checkpoint whether the index lists them or not."""
    names = "s-00001-of-00002.safetensors", "s-00002-of-00002.safetensors"
    write_index(sharded, dict(zip("ac", names, strict=True)))
    assert list(read_index(sharded).entries) == ["a", "b", "c"]


@pytest.mark.parametrize("listed", ["s-00001-of-00002", "s-00002-of-00002"])
def test_a_shard_that_the_index_forgets_is_named(sharded, listed):
    """If it lies beside the others: their names count it. A list of the files is the way out."""
    path = write_index(sharded, {"a" if "1-of" in listed else "c": f"{listed}.safetensors"})
    shards = sorted(sharded.glob("*.safetensors"))
    (forgotten,) = [shard for shard in shards if shard.stem != listed]
    for place in (path, sharded):
        error = refused_by_all(place, sharded)
        assert (error.entry, error.file) == (forgotten.name, str(path))
    with serving(sharded) as server, pytest.raises(FormatError) as caught:
        torchlift.open(server.url(INDEX))
    assert caught.value.entry == forgotten.name
    assert "files as a list" in str(caught.value.hint)
    torchlift.convert(shards, sharded / "out" / "x.safetensors")
    assert {*torchlift.open(sharded / "out" / "x.safetensors")} == {"a", "b", "c"}
    forgotten.unlink()  # an index of one part, beside that part
    assert {*torchlift.open(path)} == ({"a", "b"} if "1-of" in listed else {"c"})


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_an_index_with_a_byte_order_mark_is_named(sharded, encoding):
    """transformers does not read it, either; the line that removes it works."""
    index = sharded / INDEX
    mark = "\ufeff" if encoding.endswith("be") else ""
    index.write_text(mark + index.read_text(), encoding)
    with pytest.raises(ValueError, match=r"BOM|codec|decode"):
        get_checkpoint_shard_files(str(sharded), str(index))
    for place in (index, sharded):
        error = refused_by_all(place, sharded, "the index starts with a byte order mark")
        assert error.file == str(index)
    eval(str(error.hint).partition(": ")[2].rstrip("."), {"path": index})
    assert list(read_index(index).entries) == ["a", "b", "c"]


def test_the_index_decides_between_two_shards(sharded):
    """A key in two shards is taken from the one that the index names; without one, an error."""
    save_file(
        {"a": torch.full((2,), 9.0), "c": torch.ones(1)}, sharded / "s-00002-of-00002.safetensors"
    )
    assert read_tensor(read_index(sharded).entries["a"]).tolist() == [0, 0]
    (sharded / INDEX).unlink()
    with pytest.raises(FormatError, match=r"'a'.*two shards hold this key"):
        read_index(sharded)


@pytest.mark.parametrize("key", ["zz", "c"])
def test_a_key_that_its_shard_lacks_is_refused(sharded, key):
    """Whether another shard has it or nobody: a list of the shards is the way out."""
    shards = sorted(sharded.glob("*.safetensors"))
    write_index(sharded, {key: shards[0].name, "a": shards[1].name})
    with pytest.raises(FormatError, match="which lacks it") as caught:
        read_index(sharded)
    assert caught.value.entry in (key, "a")
    assert "as a list to torchlift.load or torchlift.convert" in str(caught.value.hint)
    torchlift.convert(shards, sharded / "x.safetensors")
    assert {*torchlift.open(sharded / "x.safetensors")} == {"a", "b", "c"}


@pytest.mark.parametrize("how", ["renamed", "two folders", "one link", "above"])
def test_links_that_lead_elsewhere_are_passed_as_a_list(sharded, tmp_path_factory, how):
    """No single folder has all of the files under these names."""
    away, shards = tmp_path_factory.mktemp("away"), sorted(sharded.glob("*.safetensors"))
    for at, shard in enumerate(shards[: 1 if how == "one link" else 2]):
        folder = away / str(at if how == "two folders" else 0)
        folder.mkdir(exist_ok=True)
        target = folder / (f"blob{at}" if how == "renamed" else shard.name)
        shard.rename(target)
        if how != "above":
            shard.symlink_to(target)
            continue
        names = {"a": "../x", "c": str(target)}
        write_index(sharded, names)
        shards[at] = target
    with pytest.raises(UnsafeError) as caught:
        torchlift.open(sharded)
    assert "as a list to torchlift.load or torchlift.convert" in str(caught.value.hint)
    torchlift.convert(shards, away / "x.safetensors")
    assert {*torchlift.open(away / "x.safetensors")} == {"a", "b", "c"}


def test_the_hub_cache_layout_is_allowed(sharded, tmp_path_factory):
    """Links from a snapshot into the blobs of the same repository are how the cache is built."""
    top = tmp_path_factory.mktemp("hub")
    snapshot = hub_cache(top, {file.name: file.read_bytes() for file in sharded.iterdir()})
    assert list(read_index(snapshot).entries) == ["a", "b", "c"]
    assert list(read_index(snapshot / INDEX).entries) == ["a", "b", "c"]
    save_file({"a": torch.ones(1)}, top / "secret.safetensors")
    shard = snapshot / "s-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(top / "secret.safetensors")
    with pytest.raises(UnsafeError):
        read_index(snapshot)


def test_a_plain_map_of_keys_to_files_is_an_index(tmp_path):
    """accelerate takes an index without "weight_map", too."""
    save_file({"a": torch.ones(2)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.zeros(2), "metadata": torch.ones(1)}, tmp_path / "x-2.safetensors")
    shards = {"a": "x-1.safetensors", "b": "x-2.safetensors", "metadata": "x-2.safetensors"}
    index = tmp_path / "x.index.json"
    index.write_text(json.dumps(shards))
    assert set(read_index(tmp_path).entries) == {"a", "b", "metadata"}
    index.write_text(json.dumps({**shards, "b": "../x-2.safetensors"}))
    with pytest.raises(UnsafeError, match="leaves the directory"):
        read_index(tmp_path)
    index.write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(FormatError, match=r"not an index of a checkpoint.*'model_type': 'bert'"):
        read_index(tmp_path)


def test_a_variant_counts_only_where_nothing_else_is(tmp_path):
    """The model that its library loads first, or an index. Of several variants, none is guessed."""
    save_file({"w": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    assert list(read_index(tmp_path).entries) == ["w"]
    save_file({"w3": torch.ones(1)}, tmp_path / "model.fp8.safetensors")
    match = r"several checkpoints; found model\.fp16\.safetensors, model\.fp8.*path of one"
    with pytest.raises(FormatError, match=match):
        read_index(tmp_path)
    shard = "model-00001-of-00001.bf16.safetensors"
    save_file({"w2": torch.ones(1)}, tmp_path / shard)
    write_index(tmp_path, {"w2": shard}, "model.safetensors.index.bf16.json")
    assert list(read_index(tmp_path).entries) == ["w2"]
    torch.save({"b": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert list(read_index(tmp_path).entries) == ["b"]
    save_file({"m": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(read_index(tmp_path).entries) == ["m"]


def test_a_directory_of_components_names_them(tmp_path):
    """A pipeline of diffusers is several models; each is opened by its own path."""
    for name in ("unet", "vae", "scheduler"):
        (tmp_path / name).mkdir()
    name = "diffusion_pytorch_model.safetensors"
    save_file({"w": torch.ones(1)}, tmp_path / "unet" / name)
    save_file({"w": torch.ones(1)}, tmp_path / "vae" / name.replace(".", ".fp16.", 1))
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    match = r"but in folders; found unet, vae\. Pass the path of .*/unet'"
    with pytest.raises(FormatError, match=match):
        read_index(tmp_path)
    assert list(read_index(tmp_path / "vae").entries) == ["w"]


def test_directories_without_a_checkpoint_say_so(tmp_path):
    """The files that are there are listed. One file beside them would be the checkpoint."""
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FormatError, match=r"does not contain a checkpoint.*notes\.txt"):
        read_index(tmp_path)
    for name, save, format in (
        ("last.ckpt", torch.save, "torch-zip"), ("any.safetensors", save_file, "safetensors"),
    ):  # fmt: skip
        save({"w": torch.ones(1)}, tmp_path / name)
        assert read_index(tmp_path).format == format
        (tmp_path / name).unlink()


def _shards(directory, names):
    for name in names:
        save_file({name: torch.zeros(1)}, directory / name)


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00008.safetensors", "model-00000-of-00008.safetensors",
     "model.fp16-00001-of-00008.safetensors", "model-00001-of-00008.fp16.safetensors"],
)  # fmt: skip
def test_one_shard_of_a_set_is_no_checkpoint(tmp_path, name):
    """A folder of nothing but it is refused, with the names of the others; its path is opened."""
    _shards(tmp_path, [name])
    with pytest.raises(FormatError, match="7 shards are missing") as caught:
        read_index(tmp_path)
    assert caught.value.entry in (name.replace("1-", "2-", 1), name.replace("0-", "1-", 1))
    assert caught.value.expected == "8 files"
    assert caught.value.found.startswith("1, without model")
    assert caught.value.found.endswith("and 2 more")
    assert list(read_index(tmp_path / name).entries) == [name]


def test_a_set_of_a_billion_is_refused_at_once(tmp_path):
    """The names of the others are not made."""
    _shards(tmp_path, ["m-000000007-of-999999999.safetensors"])
    with pytest.raises(FormatError, match=r"999999998 shards are missing.*and 999999993 more"):
        read_index(tmp_path)


def test_a_set_that_counts_from_nought_is_one(tmp_path):
    """Some writers do."""
    _shards(tmp_path, [f"m-0000{at}-of-00002.safetensors" for at in range(2)])
    assert len(read_index(tmp_path).entries) == 2

"""`open` and `Checkpoint`: a lazy, read-only mapping whose tensors are views of a private map."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import resource
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from checkpoint_files import Call, tensor, write_safetensors, write_zip
from damaged_files import damage, flip
from int8_weights import Int8
from safetensors.torch import save_file
from small_models import saved
from torch import nn
from zoo import same

import torchlift
from torchlift.errors import CheckpointError, FormatError, IntegrityError, UnsafeError


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A training checkpoint: a model, an optimizer's state and plain objects."""
    return saved(
        {
            "model": {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)},
            "optimizer": {"state": {0: {"exp_avg": torch.full((2,), 3.0)}}, "lr": 0.1},
            "epoch": 4,
        },
        tmp_path,
    )


def test_a_checkpoint_is_a_mapping_in_file_order(nested):
    """Keys of nested containers are joined by dots and come in the order of the file."""
    with torchlift.open(nested) as ckpt:
        assert isinstance(ckpt, Mapping)
        assert list(ckpt) == ["model.layer.weight", "model.layer.bias", "optimizer.state.0.exp_avg"]
        assert len(ckpt) == 3
        assert "model.layer.bias" in ckpt
        assert "epoch" not in ckpt
        assert ckpt.get("epoch") is None
        assert {key: value.tolist() for key, value in ckpt.items()} == {
            "model.layer.weight": [[1.0] * 3] * 2,
            "model.layer.bias": [0.0, 0.0],
            "optimizer.state.0.exp_avg": [3.0, 3.0],
        }


def test_objects_are_the_leaves_that_are_not_tensors(nested):
    """Numbers and text are at hand without a tensor being touched."""
    ckpt = torchlift.open(nested)
    assert ckpt.objects == {"optimizer.lr": 0.1, "epoch": 4}
    assert (ckpt.format, ckpt.path, ckpt.nbytes) == ("torch-zip", str(nested), 24 + 8 + 8)
    assert ckpt.metadata["byteorder"] == "little"


@pytest.mark.parametrize("attribute", ["entries", "objects", "metadata"])
def test_what_a_checkpoint_says_cannot_be_changed(nested, attribute):
    """The mapping and its fields are read-only, so two users of one checkpoint agree."""
    ckpt = torchlift.open(nested)
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(ckpt, attribute)["epoch"] = 5
    with pytest.raises(TypeError, match="does not support item assignment"):
        ckpt["model.layer.bias"] = torch.ones(2)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("model.layer.wieght", r"model\.layer\.wieght.*Did you mean 'model\.layer\.weight"),
        ("zzz", r"^'zzz'$"),
        ("model", r"^'model' is a container. Use ckpt.tree\('model'\)$"),
        ("epoch", r"^'epoch' is not a tensor. Use ckpt.objects\['epoch'\]$"),
    ],
)
def test_a_key_that_is_no_tensor_is_named_for_what_it_is(nested, key, says):
    """A typo gets a near name. A container and a plain value have another way."""
    with pytest.raises(KeyError, match=says):
        torchlift.open(nested)[key]


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("modle", "does not contain this container; found at the top: epoch, .*mean 'model'"),
        ("epoch", "this key is a value, not a contai"),
        ("model.layer.bias", "this key is a value, not a contai"),
    ],
)
def test_a_root_that_is_no_container_is_called_so(nested, root, says):
    """A tensor or an object holds no keys, and an unknown name gets those that there are."""
    with pytest.raises(FormatError, match=f"{root!r}: .*{says}"):
        torchlift.open(nested, root=root)


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1), "c": torch.ones(2)}}, "a.b"),
        ({1: torch.ones(1), "1": torch.zeros(1), "a.c": torch.ones(2)}, "1"),
        ({"a.b": 3, "a": {"b": torch.zeros(1), "c": torch.ones(2)}, "a.": {}}, "a.b"),
        ({1: 1, "1": 2, "a": {"c": torch.ones(2)}}, "1"),
    ],
)
def test_two_paths_to_one_key_are_an_error_of_that_key(tmp_path, state, key):
    """It is refused when it is asked for, and left out where it is allowed to be."""
    ckpt = torchlift.open(saved(state, tmp_path))
    with pytest.raises(FormatError, match=rf"'{key}': two values have this key"):
        ckpt[key]
    assert ckpt.blocked == ()
    assert key not in ckpt.entries
    assert key not in ckpt.objects
    assert dict(ckpt.blocked_keys) == {key: "a name of its own"}
    assert f"{key} needs a name of its own" in str(ckpt)
    with pytest.raises(FormatError, match=rf"'{key}': two values have this key"):
        torchlift.open(tmp_path / "model.pt", root=key)
    with pytest.raises(FormatError, match=rf"'{key}': two values have this key"):
        ckpt.get(key, None)
    assert torch.equal(ckpt["a.c"], torch.ones(2))


def test_a_model_that_does_not_ask_for_an_ambiguous_key_is_loaded(tmp_path):
    """One that does is refused, whatever is allowed."""
    path = saved({"c": torch.ones(2), "n": {"b": torch.ones(1)}, "n.b": torch.ones(1)}, tmp_path)
    model = torch.nn.Module()
    model.c = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(FormatError, match=r"'n\.b': two values.*allow_unexpected="):
        torchlift.load(model, path)
    torchlift.load(model, path, allow_unexpected=["n.b"])
    assert torch.equal(model.c, torch.ones(2))
    model.n = torch.nn.Module()
    model.n.b = torch.nn.Parameter(torch.zeros(1))
    for options in ({"strict": False}, {"allow_unexpected": ["*"]}):
        with pytest.raises(FormatError, match=r"'n\.b': two values"):
            torchlift.load(model, path, **options)


def test_saving_the_state_dict_again_does_not_grow_the_file(tmp_path):
    """Neither shared storages nor the map behind all of them are written more than once."""
    big = torch.randn(1000)
    state = {"a": big, "b": big[100:], "c": torch.randn(1000), "d": torch.randn(2)}
    path = saved(state, tmp_path)
    ckpt = torchlift.open(path)
    again = saved(ckpt.state_dict(), tmp_path, "again.pt")
    one = saved({"d": ckpt["d"]}, tmp_path, "one.pt")
    assert abs(again.stat().st_size - path.stat().st_size) < 512
    assert one.stat().st_size < 2048
    assert all(same(torch.load(again)[key], value) for key, value in state.items())


def test_a_closed_checkpoint_gives_no_more_tensors(tmp_path):
    """What was taken stays valid, even when the file is gone; taking more is an error."""
    path = saved({"w": torch.arange(3.0), "v": torch.ones(1)}, tmp_path)
    with torchlift.open(path) as ckpt:
        taken = ckpt["w"]
    path.unlink()
    assert taken.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"the checkpoint is closed\. Take what you need ins"):
        ckpt["v"]
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        ckpt.state_dict()
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        torchlift.load(nn.Module(), ckpt)
    ckpt.close()
    assert ckpt.entries["v"].shape == (1,)


def test_a_checkpoint_leaves_no_open_files_behind(tmp_path):
    """Opening keeps no descriptor, and those that tensors needed go with them, closed or not."""
    path = saved({"w": torch.ones(1)}, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    ckpt = torchlift.open(path)
    assert len(os.listdir("/proc/self/fd")) == before
    kept = ckpt["w"]
    ckpt.close()
    assert torchlift.open(path)["w"].item() == kept.item() == 1
    torchlift.load(nn.ParameterDict({"w": torch.zeros(1)}), path, source="read")
    del kept, ckpt
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def shards(tmp_path) -> Path:
    """A set of 150 shards. Every fourth tensor is large enough to be read by a job of its own."""
    names = {f"w{i}": f"{i}.safetensors" for i in range(150)}
    for number, (key, name) in enumerate(names.items()):
        save_file({key: torch.full((300_000 if number % 4 == 0 else 3,), float(number))},
                  tmp_path / name)  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


def _parameters(path: Path) -> nn.Module:
    with torchlift.open(path) as ckpt:
        return nn.ParameterDict({key: torch.zeros(e.shape) for key, e in ckpt.entries.items()})


MANY: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: torchlift.load(_parameters(path).to("meta"), path),
    "load, live": lambda path: torchlift.load(_parameters(path), path),
    "load, read": lambda path: torchlift.load(_parameters(path).to("meta"), path, source="read"),
    "convert": lambda path: torchlift.convert(path, path / "new.pt", overwrite=True),
    "convert, cast": lambda path: torchlift.convert(
        path, path / "new.pt", dtype="float16", overwrite=True
    ),
    "save": lambda path: torchlift.save(torchlift.open(path), path / "new.pt"),
    "diff": lambda path: torchlift.diff(path, path),
    "digest": torchlift.digest,
    "verify": torchlift.verify,
    "stats": lambda path: [ckpt.stats(key) for ckpt in [torchlift.open(path)] for key in ckpt],
}


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open so many files more than it has open."""
    torchlift.load(nn.Linear(1, 1), nn.Linear(1, 1).state_dict())  # imports
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))  # pools of other tests keep connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("door", MANY)
def test_a_set_of_shards_takes_a_fixed_number_of_descriptors(shards, door):
    """50 more are enough, although each of 150 files is read or mapped."""
    with few_descriptors(50):
        MANY[door](shards)


@pytest.mark.parametrize("door", ["load, read", "convert", "digest", "verify"])
def test_too_few_descriptors_are_no_damage(shards, door):
    """The error says how to get more, and that works."""
    MANY[door](shards)  # imports, which need descriptors, too
    with ExitStack() as taken, few_descriptors(8):
        with suppress(OSError):
            while True:
                taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(CheckpointError) as caught:
            MANY[door](shards)
    assert type(caught.value) is CheckpointError
    assert "ulimit -n" in caught.value.hint
    MANY[door](shards)


@pytest.mark.parametrize("how", ["shorter", "replaced", "overwritten", "gone", "a pipe"])
def test_a_file_that_is_not_the_one_that_was_opened_is_refused(tmp_path, how):
    """Offsets of another file mean nothing, and a map past its end would be a crash."""
    path = saved({"w": torch.ones(1000)}, tmp_path)
    ckpt = torchlift.open(path)
    damage(path, how)
    text = "cannot be opened any more" if how == "gone" else "the file changed after it was opened"
    with pytest.raises(IntegrityError, match=text) as caught:
        ckpt["w"]
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("pad", range(8))
def test_a_misaligned_storage_comes_out_aligned(tmp_path, pad):
    """A header of any length before the data gives a tensor with the right values and address."""
    header = {"w": {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode() + b" " * pad
    path = write_safetensors(tmp_path / "m.safetensors", text, struct.pack("<3d", 1, 2, 3))
    value = torchlift.open(path)["w"]
    assert value.tolist() == [1, 2, 3]
    assert value.data_ptr() % 8 == 0


def test_what_would_run_code_is_listed_and_refused(tmp_path):
    """A file that names a foreign function opens, says so, and runs nothing."""
    witness = tmp_path / "witness"
    path = write_zip(
        tmp_path / "x.pt", {"w": tensor(), "trap": Call(os.mkdir, str(witness)), "n": 1}
    )
    ckpt = torchlift.open(path)
    assert ckpt.blocked == (f"{os.mkdir.__module__}.mkdir",)
    assert list(ckpt) == ["w"]
    assert "trap" not in ckpt
    with pytest.raises(UnsafeError, match=r"'trap': only unpickling could rebuild it.*mkdir") as e:
        ckpt["trap"]
    assert "root= for a part" in str(e.value)
    assert list(ckpt.state_dict()) == ["w"]
    assert not witness.exists()


def facts_of(ckpt: torchlift.Checkpoint) -> tuple[object, ...]:
    """What a checkpoint is, and says that it holds, without anything of this process."""
    values = {key: value.tolist() for key, value in ckpt.state_dict().items()}
    return ckpt.path, ckpt.format, ckpt.root, dict(ckpt.entries), dict(ckpt.objects), values


@pytest.fixture(params=["file", "shards", "dcp"])
def layout(request, tmp_path) -> Path:
    """A model below a container, as a file, in shards, and as DCP has it."""
    state = {"model": {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}, "epoch": 4}
    if request.param == "file":
        return saved(state, tmp_path)
    folder = tmp_path / "folder"
    if request.param == "dcp":
        torchlift.save(state, folder, format="dcp")
    else:
        folder.mkdir()
        for at, (key, value) in enumerate(state["model"].items(), 1):
            save_file({f"model.{key}": value}, folder / f"model-0000{at}-of-00002.safetensors")
    return folder


@pytest.mark.parametrize("root", [None, "model"])
@pytest.mark.parametrize("by", [pickle, cloudpickle])
def test_a_checkpoint_travels_as_its_path_and_is_opened_again(layout, monkeypatch, root, by):
    """With the container that was taken; what travels is small, whatever the file's size."""
    monkeypatch.chdir(layout.parent)
    ckpt = torchlift.open(layout.name, root=root)
    sent = by.dumps(ckpt)
    monkeypatch.chdir("/")
    assert facts_of(pickle.loads(sent)) == facts_of(ckpt)
    assert facts_of(copy.deepcopy(ckpt)) == facts_of(ckpt)
    assert len(sent) < 1000


def test_classes_that_were_allowed_travel_with_a_checkpoint(tmp_path):
    """Each by its name, with the one that files have for it."""
    weight = Int8(torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1))
    path = saved({"weight": weight}, tmp_path)
    ckpt = torchlift.open(path, allow_classes=[(Int8, "int8_weights.Int8")])
    again = pickle.loads(pickle.dumps(ckpt))
    assert again._allowed == ckpt._allowed
    assert type(again["weight"]) is Int8


@pytest.mark.parametrize("how", ["other", "junk", "gone"])
def test_another_content_is_no_checkpoint_that_was_sent(layout, how):
    """What was opened here is what is opened there, or an error says that it is not."""
    sent = pickle.dumps(torchlift.open(layout))
    files = [layout] if layout.is_file() else sorted(layout.glob("[!.]*"))
    if how == "gone":
        files[-1].unlink()
    else:
        content = files[-1].read_bytes()
        files[-1].write_bytes(content if how == "other" else b"junk")
    with pytest.raises(IntegrityError) as caught:
        pickle.loads(sent)
    assert str(layout) in str(caught.value)


def test_a_checkpoint_without_a_path_says_why_it_cannot_travel(nested):
    """Of a file object, whatever is behind it; and a closed one is closed."""
    buffer = io.BytesIO(nested.read_bytes())
    with nested.open("rb") as file, torchlift.open(nested) as closed:
        opened = [torchlift.open(buffer), torchlift.open(file)]
    for ckpt, name in zip(opened, ("<BytesIO>", str(nested)), strict=True):
        with (
            ckpt,
            pytest.raises(CheckpointError, match="cannot be pickled: it was opened") as caught,
        ):
            pickle.dumps(ckpt)
        assert caught.value.file == name
    with pytest.raises(CheckpointError, match="is closed"):
        pickle.dumps(closed)


def test_errors_about_a_file_object_name_what_was_passed(tmp_path, nested):
    """Its class, in whatever a caller gets to see, and never a temporary copy."""
    content = nested.read_bytes()
    flip(nested, "model.layer.weight")
    flipped = nested.read_bytes()
    acts: list[Callable[[], object]] = [
        lambda: torchlift.open(io.BytesIO(content[:-100])),
        lambda: torchlift.open(io.BytesIO(content), root="none"),
        lambda: ckpt.tree("none"),
        lambda: torchlift.load(nn.Linear(3, 2), io.BytesIO(content)),
        lambda: torchlift.convert(io.BytesIO(flipped), tmp_path / "new.pt"),
        lambda: torchlift.convert(io.BytesIO(flipped), tmp_path / "new.pt", dtype="float16"),
    ]
    with torchlift.open(io.BytesIO(content)) as ckpt:
        assert str(ckpt).startswith("<BytesIO>")
        for act in acts:
            with pytest.raises(CheckpointError) as caught:
                act()
            assert caught.value.file == "<BytesIO>", repr(caught.value)
            assert os.path.join(tempfile.gettempdir(), "tmp") not in str(caught.value)


@pytest.mark.parametrize("change", ["hard link", "chmod", "rename and back"])
def test_what_changes_no_content_is_no_change(tmp_path: Path, change: str) -> None:
    """Backups link files, and tools set their rights: size, time of writing and inode decide."""
    path, state = tmp_path / "m.pt", {"w": torch.arange(4.0)}
    torch.save(state, path)
    ckpt = torchlift.open(path)
    if change == "hard link":
        os.link(path, tmp_path / "backup.pt")
    elif change == "chmod":
        path.chmod(0o400)
    else:
        path.rename(tmp_path / "away").rename(path)
    model = nn.ParameterDict({"w": torch.zeros(4)})
    torchlift.load(model, ckpt, verify=True)
    assert torch.equal(model["w"], state["w"])
    assert torch.equal(ckpt["w"], state["w"])
    assert torchlift.diff(ckpt, state).equal
    torchlift.convert(ckpt, tmp_path / "to.safetensors")
    assert torchlift.diff(pickle.loads(pickle.dumps(ckpt)), state).equal


def test_a_set_of_other_files_is_no_checkpoint_that_was_sent(tmp_path):
    """The files that it had are as they were, and there is an index that names another one."""
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    sent = pickle.dumps(torchlift.open(tmp_path))
    save_file({"b": torch.ones(1)}, tmp_path / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"b": "other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match="consists of other files"):
        pickle.loads(sent)

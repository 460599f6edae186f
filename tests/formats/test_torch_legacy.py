"""Torch files from before 1.6: what is read of them is what torch.load reads."""

from __future__ import annotations

import io
import struct
import warnings

import pytest
import torch
from checkpoint_files import (
    MAGIC,
    PROTOCOL,
    TarId,
    legacy_id,
    legacy_tensor,
    pickled,
    same_as,
    tar_members,
    write_legacy,
    write_tar,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from range_server import serving
from torch import nn

import torchlift
from torchlift.formats.index import ITEMSIZE
from torchlift.formats.torch_pickle import STORAGE_DTYPES


@pytest.fixture
def path(tmp_path):
    return tmp_path / "old.pt"


def save(obj, path, **options):
    torch.save(obj, path, _use_new_zipfile_serialization=False, **options)
    return torchlift.open(path)


def load(path, weights_only=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the types that such files name are deprecated
        return torch.load(path, weights_only=weights_only)


def equal(path, expected, weights_only=True, format="torch-legacy"):
    """Whether every tensor of a file is torch.load's."""
    loaded = load(path, weights_only)
    ckpt = torchlift.open(path)
    assert list(ckpt) == expected
    assert ckpt.format == format
    return all(same_as(loaded[key], ckpt[key]) for key in expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", [name for name in ITEMSIZE if hasattr(torch, name)])
def test_every_dtype_is_read(path, name):
    """Each dtype that torch writes into such a file comes back with its bytes."""
    dtype = getattr(torch, name)
    value = torch.arange(1, 1 + 3 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    if name == "bool":
        value = torch.tensor([True, False, True])
    ckpt = save({"b": torch.ones(1, dtype=torch.uint8), "w": value}, path)
    assert same_as(value, ckpt["w"])
    if name in STORAGE_DTYPES.values():  # of others torch.load fails on torch.save's files
        assert equal(path, ["b", "w"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_recognised(path, protocol):
    """The magic number is found, whichever protocol wrote it."""
    save({"w": torch.ones(2)}, path, pickle_protocol=protocol)
    # With weights_only=True torch knows the opcodes of protocol 2 only.
    assert equal(path, ["w"], weights_only=False)


@pytest.mark.parametrize("is_zip", [False, True])
def test_pickles_of_text_are_refused_and_torch_saves_them_again(path, is_zip):
    """Protocol 1 writes truth, long integers and the magic number as text."""
    state = {"w": torch.ones(2), "done": True, "seed": 2**40}
    torch.save(state, path, pickle_protocol=1, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        torchlift.FormatError,
        match=r"an opcode that torch\.save does not write in protocols 2 to 5",
    ) as caught:
        torchlift.open(path)
    assert "load it with torch.load(path, weights_only=False), and save" in caught.value.hint
    torch.save(load(path, weights_only=False), path)
    assert torchlift.open(path).objects == {"done": True, "seed": 2**40}


def test_objects_parameters_and_versions_are_kept(path):
    """What is beside the tensors is what a torch zip file has."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weight = nn.Parameter(torch.ones(2))
    ckpt = save({"model": model.state_dict(), "p": weight, "epoch": 4, "lr": [0.1, None]}, path)
    assert ckpt.objects == {"epoch": 4, "lr": [0.1, None]}
    assert ckpt._index.module_versions["model.1"] == {"version": 2}
    assert (ckpt.entries["p"].is_parameter, ckpt.entries["p"].requires_grad) == (True, True)
    assert ckpt.metadata["protocol_version"] == "1001"


@pytest.mark.parametrize("options", [{}, {"source": "read"}, {"source": "mmap"}, {"mode": "copy"}])
def test_a_model_loads_and_nothing_is_checked(path, options):
    """In every way of loading, however the bytes are aligned; such a file has no checksums."""
    model, other = nn.Linear(3, 5), nn.Linear(3, 5)
    save({"pad": torch.ones(3, dtype=torch.uint8), "model": model.state_dict()}, path)
    torchlift.load(other, path, root="model", **options)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    report = torchlift.verify(path)
    assert (report.ok, report.checked, len(report.unchecked)) == (True, (), 3)


def test_a_view_of_a_storage_is_refused_and_torch_saves_it_again(path):
    """Files of torch before 0.4 describe a storage that is a slice of another one."""
    left = legacy_id("0", 4, ("view-a", 1, 2))
    write_legacy(
        path, {"whole": legacy_tensor(), "slice": legacy_tensor((2,), (1,), identity=left)}
    )
    with pytest.raises(torchlift.FormatError, match="a view of another storage") as caught:
        torchlift.open(path)
    assert caught.value.entry == "0"
    assert "load it with torch.load(path), and save the result" in caught.value.hint
    torch.save(load(path), path)
    assert equal(path, ["whole", "slice"], format="torch-zip")
    assert torchlift.open(path)["slice"].tolist() == [2, 3]


def test_bytes_are_little_endian_whatever_the_machine_was(path):
    """Torch converts them when it writes, and never looks at what the file says of it."""
    write_legacy(path, {"w": legacy_tensor()}, head=(MAGIC, PROTOCOL, {"little_endian": False}))
    assert equal(path, ["w"])
    ckpt = torchlift.open(path)
    assert ckpt["w"].tolist() == [[1, 2], [3, 4]]
    assert ckpt.metadata["little_endian"] == "False"


def test_the_first_of_several_objects_counts(path):
    """What was saved behind it into the same file is left alone, as torch leaves it."""
    write_legacy(path, {"w": legacy_tensor()}, behind=pickled(MAGIC) + b"more")
    assert equal(path, ["w"])


def test_a_pickle_longer_than_what_is_read_first_is_read(path):
    """The end of a pickle is not known before it was read: more is read where it is needed."""
    text = "x" * (9 << 20)
    ckpt = save({"text": text, "w": torch.ones(2)}, path)
    assert ckpt.objects["text"] == text
    assert equal(path, ["w"])


def test_a_whole_module_is_named(path):
    """It is refused as what it is."""
    torch.save(nn.Linear(1, 1), path, _use_new_zipfile_serialization=False)
    with pytest.raises(torchlift.UnsafeError, match=r"pickled module.*state_dict\(\)"):
        torchlift.open(path)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_behind_a_quantised_one_are_read(path):
    """Its own bytes have the size of its elements."""
    quantised = torch.quantize_per_tensor(torch.randn(7), 0.1, 0, torch.qint8)
    state = {"a": torch.ones(3), "q": quantised, "b": torch.arange(5)}
    ckpt = save(state, path)
    assert list(ckpt) == ["a", "q", "b"]
    assert torch.equal(ckpt["q"], quantised)
    assert torch.equal(ckpt["b"], state["b"])


def test_a_directory_of_old_shards_is_found(tmp_path):
    """Files of a directory are known by their content, old ones too."""
    for number in (1, 2):
        name = tmp_path / f"pytorch_model-0000{number}-of-00002.bin"
        save({f"w{number}": torch.full((2,), float(number))}, name)
    ckpt = torchlift.open(tmp_path)
    assert {key: value.tolist() for key, value in ckpt.items()} == {"w1": [1, 1], "w2": [2, 2]}


def tar(path):
    """A tar of two tensors over one storage, a view of it, and another storage."""
    values = struct.pack("<4f", 1, 2, 3, 4)
    found = {
        "obj": {"a": TarId("11"), "b": TarId("12"), "v": TarId("13"), "n": 5,
                "d": TarId("14")},
        "storages": [
            (1, "cpu", torch.FloatStorage, 4, values),
            (2, "cpu", torch.DoubleStorage, 1, struct.pack("<d", 2.5)),
        ],
        "tensors": [(11, 1, (2, 2), (2, 1), 0), (12, 1, (2, 2), (1, 2), 0), (13, 3, (2,), (1,), 0),
                    (14, 2, (), (), 0)],
        "views": [(3, 1, 2, 2)],
    }  # fmt: skip
    return write_tar(path, tar_members(**found))


def test_a_tar_is_named_and_torch_saves_it_again(path):
    """Torch's oldest format, as a file, as a file object, in a folder and behind a URL."""
    tar(path)
    with serving(path.parent) as server:
        for door in (path, io.BytesIO(path.read_bytes()), path.parent, server.url(path.name)):
            with pytest.raises(
                torchlift.FormatError, match=r"tar archive of torch\.save"
            ) as caught:
                torchlift.open(door)
    assert "load it with torch.load(path, weights_only=False), and save" in caught.value.hint
    torch.save(load(path, weights_only=False), path)
    ckpt = torchlift.open(path)
    assert ckpt["v"].tolist() == [3, 4]
    assert ckpt.aliases == (("a", "b"),)
    assert ckpt.objects == {"n": 5}


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool", "uint16", "complex64"]),
    permute=st.booleans(),
)
def test_any_state_dict_round_trips(tmp_path_factory, shapes, dtype, permute):
    """Whatever torch.save wrote is what the index describes."""
    path = tmp_path_factory.mktemp("f") / "x.pt"
    tensors = [torch.zeros(s).uniform_(0, 9).to(getattr(torch, dtype)) for s in shapes]
    tensors = [t.permute(tuple(reversed(range(t.dim())))) if permute else t for t in tensors]
    ckpt = save({f"w{i}": t for i, t in enumerate(tensors)}, path)
    assert all(map(same_as, tensors, ckpt.values()))

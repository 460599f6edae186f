"""Torch zip files that torch.save wrote: what the index says is what torch.load gives."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    assert_as_loaded,
    big_endian,
    other_kinds,
    read_tensor,
    tensor,
    write_zip,
)
from damaged_files import refused
from dcp_files import describe, write_dcp
from kinds import KINDS
from torch import nn
from torch.distributed import checkpoint as dcp
from zoo import same

import torchlift
from torchlift.errors import CheckpointError, FormatError, UnsafeError
from torchlift.formats.detect import read_index
from torchlift.formats.index import Lack, globals_in, lacking
from torchlift.formats.summary import to_json, to_text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def save(obj, path, **options):
    torch.save(obj, path, **options)
    return read_index(path)


def test_a_device_that_torch_does_not_know_is_told(path):
    """Its name is there, and so is everything else; the containers need a device."""
    data = pickle.dumps({"on": torch.device("cuda", 1), "epoch": 3}, 2).replace(b"cuda", b"cudR")
    write_zip(path, data=data)
    with torchlift.open(path) as ckpt:
        assert dict(ckpt.objects) == {"on": "cudR:1", "epoch": 3}
        with pytest.raises(FormatError, match="does not support this device") as raised:
            ckpt.tree()
        assert (raised.value.entry, raised.value.found) == ("on", "cudR:1")


def test_a_bare_tensor_has_a_name(path):
    """A file that holds one tensor and no container has the key 'tensor'."""
    index = save(torch.arange(3.0), path)
    assert read_tensor(index.entries["tensor"]).tolist() == [0, 1, 2]
    assert save([torch.ones(1), 2], path).objects == {"1": 2}
    assert save(5, path).objects == {"object": 5}
    assert save({}, path).entries == {}


OF_OTHERS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Sparse .* tensor support is in beta", "torch.quantize_per_", "TypedStorage is deprecated",
        "The PyTorch API of nested tensors", "Sparse invariant checks are implicitly disabled",
    )
]  # fmt: skip


def of_others(test):
    """Mark a test of `other_kinds`, of which torch warns."""
    for mark in OF_OTHERS:
        test = mark(test)
    return test


@of_others
@pytest.mark.parametrize(
    "options", [{}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False}], ids=str
)
def test_tensors_made_of_others_are_those_of_torch_load(path, options):
    """Sparse, quantised, on meta, storages: listed at once, made when asked for."""
    state = other_kinds()
    torch.save(state, path, **options)
    ckpt = torchlift.open(path)
    assert ckpt.blocked == ()
    assert [key for key in state if key not in ckpt] == ["dtypes"]
    assert ckpt.objects["dtypes"] == ["torch.qint8", "torch.int4"]
    assert_as_loaded(state, ckpt)
    if ckpt.format == "torch-zip":  # of old files torch reads no untyped storages
        assert_as_loaded(torch.load(path, weights_only=False), ckpt)
    with torchlift.open(path) as again:
        one, two = (
            {key: value for key, value in each.items() if not value.is_meta}
            for each in (ckpt, again)
        )
        assert torchlift.diff(one, two).equal


@of_others
def test_the_index_says_what_is_known_of_a_tensor_made_of_others(path):
    """Shape, dtype, bytes and what it is made of, without torch."""
    torch.save(other_kinds(), path)
    index = read_index(path)
    facts = {
        key: (entry.dtype, entry.shape, entry.nbytes, entry.kind and entry.kind.name)
        for key, entry in index.entries.items()
    }
    count = int(KINDS["coo"]._nnz())
    assert facts["coo"] == ("float32", (8, 6), count * (2 * 8 + 4), "sparse_coo")
    assert facts["csr"] == ("float32", (8, 6), (9 + count) * 8 + count * 4, "sparse_csr")
    assert facts["tensor"] == ("quint8", (8, 6), 48, "per_tensor_affine")
    assert facts["channels"] == ("qint8", (8, 6), 48 + 8 * 16, "per_channel_affine")
    assert facts["meta"] == ("float32", (3, 2), 0, "meta")
    assert facts["storage"] == ("float32", (12,), 48, None)
    assert facts["bytes"] == ("uint8", (6,), 6, None)
    assert index.entries["meta"].location == "meta"
    assert index.entries["parameter"].is_parameter
    assert ("shared", "storage", "w") in index.aliases
    assert "sparse_bsr float32" in to_text(index, rows=50)
    shown = json.loads(json.dumps(to_json(index)))["tensors"]
    assert {each["key"]: each["kind"] for each in shown} == {k: f[3] for k, f in facts.items()}


@of_others
def test_tensors_made_of_others_are_found_below_a_container_and_in_shards(path, tmp_path):
    """Their storages come with them, under the names that shards give them."""
    torch.save({"model": other_kinds(), "rest": torch.ones(1000)}, path)
    ckpt, loaded = torchlift.open(path, root="model"), torch.load(path)["model"]
    assert_as_loaded(loaded, ckpt)
    assert ckpt.nbytes < torchlift.open(path).nbytes - 3999
    for number, key in enumerate(("coo", "channels"), 1):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        (tmp_path / "shards").mkdir(exist_ok=True)
        torch.save({key: loaded[key]}, tmp_path / "shards" / name)
    path.unlink()
    assert_as_loaded(
        {key: loaded[key] for key in ("coo", "channels")}, torchlift.open(tmp_path / "shards")
    )


@of_others
@pytest.mark.parametrize("kind", ["coo", "bsr", "tensor", "meta"])
def test_a_model_is_not_filled_from_tensors_made_of_others(path, kind):
    """Before anything changes: torch has no copy from them either. A transform may make one."""
    model = nn.Linear(2, 2, bias=False)
    value = other_kinds()[kind]
    model.weight = nn.Parameter(torch.ones(value.shape))
    before = model.weight.detach().clone()
    torch.save({"weight": value}, path)
    with pytest.raises(CheckpointError, match=r"'weight': the value cannot be .* transform="):
        torchlift.load(model, path)
    assert torch.equal(model.weight, before)


@of_others
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_blocked_and_its_rows_are_saved(path, layout):
    """It is named, what lies beside it loads, and the way out keeps its values."""
    rows, model = [torch.randn(2, 3), torch.randn(4, 3)], nn.Linear(1, 1, bias=False)
    nested = torch.nested.nested_tensor(rows, layout=layout)
    torch.save({"weight": torch.ones(1, 1), "n": nested, "p": nn.Parameter(nested)}, path)
    with torchlift.open(path) as ckpt:
        assert list(ckpt) == ["weight"]
        assert ckpt.blocked_keys.keys() == {"n", "p"}
        assert any("nested" in name for name in ckpt.blocked)
        for door in (lambda: ckpt["n"], ckpt.tree, lambda: torchlift.load(model, ckpt)):
            with pytest.raises(FormatError, match="does not read nested tensors") as caught:
                door()
        assert r"[*tensor.unbind()]" in str(caught.value)
        torchlift.load(model, ckpt, allow_unexpected=["n", "p"])
    loaded = torch.load(path)
    torch.save({"n": [*loaded["n"].unbind()]}, path)
    with torchlift.open(path) as ckpt:
        assert all(map(torch.equal, ckpt.tree()["n"], rows))


def test_the_tensors_in_what_is_blocked_are_counted(path):
    """In the arguments and in the state of what only a foreign class could make."""
    weights = torch.ones(2)
    state = {
        "a": Foreign({"x": weights, "y": [torch.ones(1), weights]}), "b": Foreign("none"),
        "c": [weights, Foreign(weights)], "w": weights,
    }  # fmt: skip
    torch.save(state, path)
    ckpt = torchlift.open(path)
    name = f"{Foreign.__module__}.Foreign"
    assert ckpt.blocked == (name,)
    assert dict(ckpt.blocked_keys) == dict.fromkeys(("a", "b", "c.1"), name)
    assert dict(ckpt.blocked_tensors) == {"a": 2}
    assert f"a needs {name} (2 tensors in it)" in str(ckpt)
    with pytest.raises(UnsafeError, match="found 2 tensors in it"):
        ckpt["a"]
    assert dict(torchlift.open(path, root="c").blocked_tensors) == {}


def test_a_tensor_of_a_dtype_that_no_entry_has_is_counted_as_blocked(path):
    """Named by the tensor, or by its storage."""
    bits = torch.arange(8, dtype=torch.uint8).view(torch.bits8)
    scales, zeros = torch.ones(4), torch.zeros(4)
    packed = torch.quantize_per_channel(torch.ones(4, 4), scales, zeros, 0, torch.quint4x2)
    torch.save({"w": torch.ones(2), "bits": bits, "packed": packed}, path)
    ckpt = torchlift.open(path)
    assert list(ckpt) == ["w"]
    names = {"bits": "torch.bits8", "packed": "torch.QUInt4x2Storage"}
    assert dict(ckpt.blocked_keys) == names
    assert dict(ckpt.blocked_tensors) == {"bits": 1, "packed": 1}
    with pytest.raises(UnsafeError, match=r"'bits': .*found 1 tensor in it"):
        torchlift.digest(path)


class Foreign:
    """A class that only the program has that saved the file."""

    def __init__(self, content):
        self.content = content


def test_empty_storages_of_one_key_have_the_types_they_are_given(path):
    """Torch makes nothing anew each time that it is named, with the dtype that is named there."""
    state = [
        tensor((0,), (1,), numel=0),
        tensor((0,), (1,), numel=0, storage_type=torch.IntStorage),
    ]
    write_zip(path, state, storages={"0": b""})
    ckpt, loaded = torchlift.open(path), torch.load(path)
    assert [value.dtype for value in loaded] == [torch.float32, torch.int32]
    assert [value.dtype for value in ckpt.values()] == [torch.float32, torch.int32]


def lazy_views():
    """Tensors of which torch stores other numbers than they show."""
    values, real = torch.randn(3, 2, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)
    return {
        "w": values, "conj": values.conj(), "conj.t": values.conj().t(),
        "neg": real.conj().imag, "both": torch.randn(2, dtype=torch.complex128).conj()[1:],
        "none": torch.empty(0, dtype=torch.complex64).conj(),
    }  # fmt: skip


def test_conjugate_and_negative_views_show_what_torch_shows(path):
    """The bytes are taken from the file as they are, and the bit is applied to them."""
    torch.save(lazy_views(), path)
    ckpt, loaded = torchlift.open(path), torch.load(path)
    assert ckpt.blocked == ()
    for key, value in loaded.items():
        assert same(value.resolve_conj().resolve_neg(), ckpt[key].resolve_conj())
    assert ckpt["conj"].is_conj()
    assert ckpt["conj.t"].stride() == loaded["conj.t"].stride()
    assert ckpt["conj"].untyped_storage().data_ptr() == ckpt["w"].untyped_storage().data_ptr()
    assert ckpt.entries["neg"].encoding == ("negative",)


def save_again(error: FormatError, path: Path, new: Path) -> None:
    """Run the line that an error names."""
    line = re.search(r"torch\.save\(.*\), new\)", str(error.hint))
    assert line is not None
    eval(line[0], {"torch": torch, "path": path, "new": new})


def test_a_file_of_a_big_endian_machine_is_refused_and_its_way_out_works(path, tmp_path):
    """torch turns the bytes around, but not those of dtypes that the hint names."""
    state = {"w": torch.randn(3, 4), "u": torch.tensor([1, 2], dtype=torch.int32).to(torch.uint32)}
    torch.save(state, path)
    other, new = big_endian(path, tmp_path / "big.pt"), tmp_path / "new.pt"
    error = refused(other, "saved on a big-endian machine")
    assert (error.entry, error.expected) == ("checkpoint/byteorder", "little")
    assert "uint32" in str(error.hint)
    save_again(error, other, new)
    with torchlift.open(new) as ckpt:
        assert torch.equal(ckpt["w"], state["w"])
        assert ckpt["u"].tolist() == [1 << 24, 2 << 24]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_big_endian_items_is_refused_and_its_way_out_works(path, tmp_path):
    """torch loads each item as it loads a file."""
    torch.save(torch.arange(4.0), path)
    item = big_endian(path, tmp_path / "big.pt").read_bytes()
    folder = write_dcp(tmp_path / "d", {"w": describe((4,), ((0,), (4,)))}, {("w", (0,)): item})
    with pytest.raises(FormatError, match="saved on a big-endian machine") as caught:
        torchlift.open(folder)["w"]
    assert caught.value.hint == (
        "Load the folder with torch.distributed.checkpoint, and save it again."
    )
    state = {"w": torch.zeros(4)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    dcp.save(state, checkpoint_id=tmp_path / "new", no_dist=True)
    assert torchlift.open(tmp_path / "new")["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "version"])
def test_a_file_that_another_program_compressed_is_refused_and_its_way_out_works(
    path, tmp_path, name
):
    """One record is enough, whichever it is."""
    state, other, new = {"w": torch.zeros(300, 20)}, tmp_path / "x.pt", tmp_path / "new.pt"
    torch.save(state, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as archive:
        for info in old.infolist():
            method = zipfile.ZIP_DEFLATED if info.filename.endswith(f"/{name}") else 0
            archive.writestr(info.filename, old.read(info), method)
    error = refused(other, "a program other than torch compressed the file")
    assert error.entry == f"checkpoint/{name}"
    save_again(error, other, new)
    assert torch.equal(torchlift.open(new)["w"], state["w"])


class Complex(nn.Module):
    """One parameter of complex numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 300, dtype=torch.complex64))


@pytest.mark.parametrize(
    "options", [{}, {"source": "read"}, {"mode": "assign"}, {"transform": lambda key, value: value}]
)
def test_a_model_gets_the_values_of_a_conjugate_view(path, options):
    """Resolved: a parameter that is lazily conjugate would surprise its optimizer."""
    model, other = Complex(), Complex()
    torch.save({"w": model.w.detach().conj()}, path)
    torchlift.load(other, path, **options)
    assert torch.equal(other.w.detach(), model.w.detach().conj())
    assert not other.w.is_conj()


def test_a_directory_in_another_order_than_the_records(path):
    """Some tools list what they changed last; the records stay where they are."""
    saved = {str(number): torch.arange(4) + number for number in range(3)}
    torch.save(saved, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist.reverse()
        archive._didModify = True
    assert torch.equal(torch.load(path)["2"], saved["2"])
    assert_as_loaded(saved, torchlift.open(path))


@pytest.mark.parametrize("lack", Lack)
def test_a_reason_is_a_member_also_after_a_journey(path, lack):
    """A text that a file contains is none, whatever it says."""
    assert pickle.loads(pickle.dumps(lack)) is lack
    error = lacking(str(path), "w", lack)
    assert error is not None
    assert (error.reason, error.hint, error.entry) == (lack.what, lack.hint, "w")
    assert lacking(str(path), "w", str(lack)) is None
    assert globals_in({"w": lack, "v": "os.system"}) == ("os.system",)

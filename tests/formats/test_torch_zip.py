"""Torch zip files that torch.save wrote: what the index says is what torch.load gives."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from checkpoint_files import (
    assert_as_loaded,
    big_endian,
    other_kinds,
    read_tensor,
    write_zip,
)
from damaged_files import refused
from kinds import KINDS
from torch import nn
from zoo import Holder, same

import torchlift
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.detect import read_index
from torchlift.formats.summary import to_text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def save(obj, path, **options):
    torch.save(obj, path, **options)
    return read_index(path)


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
    index, count = read_index(path), int(KINDS["coo"]._nnz())
    for key, *expected in [
        ("coo", "float32", (8, 6), count * (2 * 8 + 4), "sparse_coo"),
        ("csr", "float32", (8, 6), (9 + count) * 8 + count * 4, "sparse_csr"),
        ("tensor", "quint8", (8, 6), 48, "per_tensor_affine"),
        ("channels", "qint8", (8, 6), 48 + 8 * 16, "per_channel_affine"),
        ("meta", "float32", (3, 2), 0, "meta"),
        ("storage", "float32", (12,), 48, None),
    ]:
        entry = index.entries[key]
        kind = entry.kind and entry.kind.name
        assert [entry.dtype, entry.shape, entry.nbytes, kind] == expected, key
    assert ("shared", "storage", "w") in index.aliases
    assert "sparse_bsr float32" in to_text(index, rows=50)


@of_others
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_blocked_and_its_rows_are_saved(path, layout):
    """It is named, what lies beside it loads, and the way out keeps its values."""
    rows, model = [torch.randn(2, 3), torch.randn(4, 3)], nn.Linear(1, 1, bias=False)
    nested = torch.nested.nested_tensor(rows, layout=layout)
    torch.save({"weight": torch.ones(1, 1), "n": nested}, path)
    with torchlift.open(path) as ckpt:
        assert list(ckpt) == ["weight"]
        for door in (lambda: ckpt["n"], ckpt.tree, lambda: torchlift.load(model, ckpt)):
            with pytest.raises(FormatError, match="does not read nested tensors") as caught:
                door()
        assert r"[*tensor.unbind()]" in str(caught.value)
        torchlift.load(model, ckpt, allow_unexpected=["n"])
    torch.save({"n": [*torch.load(path)["n"].unbind()]}, path)
    assert all(map(torch.equal, torchlift.open(path).tree()["n"], rows))


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


class Foreign:
    """A class that only the program has that saved the file."""

    def __init__(self, content):
        self.content = content


def test_conjugate_and_negative_views_show_what_torch_shows(path):
    """The bytes are taken from the file as they are, and the bit is applied to them."""
    values, real = torch.randn(3, 2, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)
    state = {
        "w": values, "conj": values.conj(), "conj.t": values.conj().t(),
        "neg": real.conj().imag, "both": torch.randn(2, dtype=torch.complex128).conj()[1:],
        "none": torch.empty(0, dtype=torch.complex64).conj(),
    }  # fmt: skip
    torch.save(state, path)
    ckpt, loaded = torchlift.open(path), torch.load(path)
    assert ckpt.blocked == ()
    for key, value in loaded.items():
        assert same(value.resolve_conj().resolve_neg(), ckpt[key].resolve_conj())
    assert ckpt["conj"].is_conj()
    assert ckpt["conj.t"].stride() == loaded["conj.t"].stride()
    assert ckpt["conj"].untyped_storage().data_ptr() == ckpt["w"].untyped_storage().data_ptr()
    assert ckpt.entries["neg"].encoding == ("negative",)


def test_a_file_of_a_big_endian_machine_is_refused_and_its_way_out_works(path, tmp_path):
    """torch turns the bytes around, but not those of dtypes that the hint names."""
    state = {"w": torch.randn(3, 4), "u": torch.tensor([1, 2], dtype=torch.int32).to(torch.uint32)}
    torch.save(state, path)
    other, new = big_endian(path, tmp_path / "big.pt"), tmp_path / "new.pt"
    error = refused(other, "saved on a big-endian machine")
    assert (error.entry, error.expected) == ("checkpoint/byteorder", "little")
    assert "uint32" in str(error.hint)
    line = re.search(r"torch\.save\(.*\), new\)", str(error.hint))
    assert line is not None
    eval(line[0], {"torch": torch, "path": other, "new": new})
    with torchlift.open(new) as ckpt:
        assert torch.equal(ckpt["w"], state["w"])
        assert ckpt["u"].tolist() == [1 << 24, 2 << 24]


@pytest.mark.parametrize(
    "options", [{}, {"source": "read"}, {"mode": "assign"}, {"transform": lambda key, value: value}]
)
def test_a_model_gets_the_values_of_a_conjugate_view(path, options):
    """Resolved: a parameter that is lazily conjugate would surprise its optimizer."""
    value = torch.randn(4, 300, dtype=torch.complex64)
    model = Holder({"w": torch.zeros_like(value)})
    torch.save({"w": value.conj()}, path)
    torchlift.load(model, path, **options)
    assert torch.equal(model.w.detach(), value.conj())
    assert not model.w.is_conj()


def test_a_device_that_torch_does_not_know_is_told(path):
    """Its name is there, and so is everything else; the containers need a device."""
    data = pickle.dumps({"on": torch.device("cuda", 1), "epoch": 3}, 2).replace(b"cuda", b"cudR")
    write_zip(path, data=data)
    with torchlift.open(path) as ckpt:
        assert dict(ckpt.objects) == {"on": "cudR:1", "epoch": 3}
        with pytest.raises(FormatError, match="does not support this device") as raised:
            ckpt.tree()
        assert (raised.value.entry, raised.value.found) == ("on", "cudR:1")

"""numpy's files: every array is the one that numpy reads; nothing in them is unpickled."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import npy_bytes as npy

import torchlift
from torchlift.errors import FormatError, IntegrityError, PlacementError, UnsafeError
from torchlift.formats.detect import read_index

CODES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_dtype_shape_and_order_is_numpy_s(tmp_path, order, save):
    """Both byte orders, C and Fortran, scalars and empty arrays, mapped or inflated."""
    arrays = {
        f"{code}.{n}": np.asarray(np.arange(np.prod(shape)).reshape(shape), order=layout).astype(
            order + code if code != "?" else code
        )
        for code in CODES
        for n, (shape, layout) in enumerate(
            [((3, 4), "C"), ((3, 4), "F"), ((), "C"), ((0, 2), "C")]
        )
    }
    save(tmp_path / "m.npz", **arrays)
    with torchlift.open(tmp_path / "m.npz") as ckpt:
        assert list(ckpt) == list(arrays)
        for key, array in arrays.items():
            native = array.astype(array.dtype.newbyteorder("="))
            assert torch.equal(ckpt[key], torch.from_numpy(native.copy())), key
            assert ckpt.entries[key].shape == array.shape
    assert torchlift.verify(tmp_path / "m.npz").ok


def test_names_that_differ_in_capitals_are_two_arrays(tmp_path):
    """Numpy tells them apart, unlike the reader of torch's archives."""
    np.savez(tmp_path / "x.npz", w=np.zeros(2), W=np.ones(2))
    with torchlift.open(tmp_path / "x.npz") as ckpt:
        assert [(key, tensor.sum().item()) for key, tensor in ckpt.items()] == [("w", 0), ("W", 2)]
    assert torchlift.verify(tmp_path / "x.npz").ok


def test_what_only_unpickling_could_rebuild_is_listed(tmp_path):
    """Objects, alone or in records. NumPy needs a pickle for these alone."""
    np.savez(
        tmp_path / "m.npz", w=np.ones(2), objects=np.array([print], dtype=object),
        record=np.zeros(2, dtype=[("a", "f4"), ("b", "O")]),
    )  # fmt: skip
    with torchlift.open(tmp_path / "m.npz") as ckpt:
        assert list(ckpt) == ["w"]
        assert ckpt.blocked == ("numpy.dtype(|O)",)
        for key in "objects", "record":
            with pytest.raises(UnsafeError) as caught:
                ckpt[key]
            assert "numpy.load(path, allow_pickle=True)" in caught.value.hint


@pytest.mark.parametrize("order", "<>|")
def test_bfloat16_is_read(tmp_path, order):
    """NumPy writes ml_dtypes' bfloat16 as two raw bytes, in each byte order and layout."""
    values = torch.randn(2, 3).to(torch.bfloat16)
    raw = values.view(torch.int16).numpy().astype((">" if order == ">" else "<") + "i2")
    header = "{'descr': '%sV2', 'fortran_order': %s, 'shape': (2, 3)}"
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("c.npy", npy(header % (order, False), raw.tobytes()))
        archive.writestr("f.npy", npy(header % (order, True), raw.tobytes("F")))
    (tmp_path / "tensor.npy").write_bytes(npy(header % (order, False), raw.tobytes()))
    torchlift.convert(tmp_path / "m.npz", tmp_path / "m.safetensors")
    for name in "m.npz", "m.safetensors", "tensor.npy":
        with torchlift.open(tmp_path / name) as ckpt:
            for key in ckpt:
                assert ckpt[key].dtype == torch.bfloat16
                assert torch.equal(ckpt[key], values), (name, key)


#: Name -> an array without a dtype of torch, and the numbers that it holds.
FOREIGN = {
    "records": (
        np.array([(1.5, 2)], dtype=[("x", "f4"), ("y", "i2")]), lambda a: a["x"].copy(), "records"
    ),
    "raw bytes": (np.zeros(3, "V3"), lambda a: a.view("uint8"), "raw bytes"),
    "float8": (np.zeros(3, "V1"), lambda a: a.view("uint8"), "raw bytes"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), lambda a: a.view("int64"), "dates and times"),
    "long doubles": (np.ones(2, "g"), lambda a: a.astype("float64"), "real numbers of this size"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_numbers_without_a_dtype_of_torch_are_named_and_never_left_out(tmp_path, name):
    """Nothing of them is a pickle. The ways out work: a tensor of the numbers, and exclude."""
    array, to_numbers, what = FOREIGN[name]
    path, out = tmp_path / "m.npz", tmp_path / "m.safetensors"
    np.savez(path, w=np.ones(2), other=array)
    with torchlift.open(path) as ckpt, pytest.raises(FormatError) as caught:
        ckpt["other"]
    assert caught.value.entry == "other"
    assert what in caught.value.reason
    assert "torch.from_numpy" in caught.value.hint
    assert ckpt.blocked == ()
    for target in "m.safetensors", "m.pt", "m.index.json":
        with pytest.raises(FormatError) as caught:
            torchlift.convert(path, tmp_path / target)
        assert caught.value.entry == "other"
        assert "exclude=['other']" in caught.value.hint
    numbers = torch.from_numpy(to_numbers(np.load(path)["other"]))
    torchlift.convert([path, {"other": numbers}], out)
    assert torch.equal(torchlift.open(out)["other"], numbers)
    assert torchlift.convert(path, tmp_path / "w.pt", exclude=["other"]).tensors == 1


def test_text_is_no_tensor_and_the_report_says_that_it_is_left_out(tmp_path):
    """Text is plain data, which safetensors never keep. A torch file has to be told."""
    np.savez(tmp_path / "m.npz", w=np.ones(2), words=np.array(["a"]), codes=np.array([b"b"]))
    report = torchlift.convert(tmp_path / "m.npz", tmp_path / "m.safetensors")
    assert {key: "text" in why for key, why in report.lost.items()} == {"words": 1, "codes": 1}
    with pytest.raises(FormatError) as caught:
        torchlift.load(torch.nn.Linear(1, 2), tmp_path / "m.npz")
    assert caught.value.entry == "words"
    with pytest.raises(FormatError) as caught:
        torchlift.convert(tmp_path / "m.npz", tmp_path / "m.pt")
    assert "exclude=['words']" in caught.value.hint


def compressed_model(path: Path) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """A model, and an archive with other values for it."""
    model = torch.nn.Sequential(torch.nn.Embedding(30, 20), torch.nn.Linear(20, 2))
    arrays = {
        key: np.full(tuple(value.shape), number, ">f4" if number else "<f4")
        for number, (key, value) in enumerate(model.state_dict().items())
    }
    np.savez_compressed(path, **arrays)
    return model, arrays


@pytest.mark.parametrize(
    "options", [{}, {"source": "mmap"}, {"mode": "copy"}, {"dtype": torch.bfloat16}]
)
def test_a_compressed_archive_is_read_into_memory(tmp_path, options):
    """The plan reports it, whatever was asked for."""
    path = tmp_path / "m.npz"
    model, arrays = compressed_model(path)
    plan = torchlift.plan(model, path, **options)
    assert {item.source for item in plan.loaded.values()} == {"read"}
    assert "deflated in the file, so that it is inflated into memory (3 tensors)" in str(plan)
    assert plan.peak_bytes >= 4 * 600
    torchlift.load(model, path, **options)
    for key, value in model.state_dict().items():
        assert torch.equal(value.float(), torch.from_numpy(arrays[key].astype("<f4")))


def test_what_is_compressed_cannot_stay_on_disk(tmp_path):
    """It would take memory, which is not what the caller asked for."""
    model, _ = compressed_model(tmp_path / "m.npz")
    with pytest.raises(PlacementError, match="cannot stay on disk, where it is deflated"):
        torchlift.load(model, tmp_path / "m.npz", device="disk")


def test_an_array_that_lies_about_its_size_stops_early(tmp_path):
    """It inflates to the size in its header, and to one byte more at most."""
    size, real = 0x01020304, 0x01080304
    head = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (########,)}")
    head = head.replace(b"########", b"%d" % (size - len(head)))
    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", head + bytes(real - len(head)))
    data = path.read_bytes().replace(struct.pack("<I", real), struct.pack("<I", size))
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="found 16909061 or more"):
        torchlift.open(path)["w"]


def test_a_name_that_is_another_ones_record_is_refused(tmp_path: Path) -> None:
    """Under ``a.npy`` numpy gives the record of that name, and not the array that is called so."""
    np.savez(tmp_path / "a.npz", **{"a": np.ones(1), "a.npy": np.zeros(1)})
    assert np.load(tmp_path / "a.npz")["a.npy"].tolist() == [1]
    with pytest.raises(FormatError, match="two arrays share this record"):
        read_index(tmp_path / "a.npz")

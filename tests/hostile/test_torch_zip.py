"""Torch zip files that lie about tensors made of others. `test_hazards` has all other lies."""

from __future__ import annotations

import struct
from collections import OrderedDict

import pytest
import torch
from checkpoint_files import Call, StorageId, tensor, write_zip
from damaged_files import refused

import torchlift
from torchlift.errors import FormatError
from torchlift.formats.detect import read_index


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bad.pt"


def test_every_version_that_torch_reads_is_read(path):
    """The range is that of the installed torch."""
    for version in range(1, 11):
        write_zip(path, {"w": tensor()}, notes={"version": b"%d" % version})
        torch.load(path)
        assert read_index(path).metadata == {"version": str(version)}
    write_zip(path, {"w": tensor()}, notes={"version": b"11"})
    with pytest.raises(RuntimeError, match="maximum supported version for reading is 10"):
        torch.load(path)


INDICES = tensor((2, 2), (2, 1), storage_type=torch.LongStorage, storage="i")
VALUES = tensor((2,), (1,))
NUMBERS = StorageId("storage", torch.QInt8Storage, "q", "cpu", 16)


def sparse(layout="torch.sparse_coo", data=(INDICES, VALUES, (3, 3))):
    return Call(torch._utils._rebuild_sparse_tensor, layout, data)


def quantised(params, storage=NUMBERS, size=(4, 4), stride=(4, 1), offset=0):
    function = torch._utils._rebuild_qtensor
    return Call(function, storage, offset, size, stride, params, False, OrderedDict())


def meta(*arguments):
    return Call(torch._utils._rebuild_meta_tensor_no_storage, *arguments)


def write_others(path, obj, indices=(0, 1, 1, 2)):
    """A file with a storage of four int64 beside others of 16 bytes."""
    storages = {"0": bytes(16), "q": bytes(16), "i": struct.pack("<4q", *indices)}
    storages["n"] = struct.pack("<4q", -1, -2, -3, -4)
    return write_zip(path, obj, storages=storages)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (sparse("torch.strided"), "does not accept"),
        (sparse("torch.sparse_csr"), "does not accept"),
        (sparse(data=(INDICES, 5, (3, 3))), "does not accept"),
        (sparse(data=(INDICES, sparse(), (3, 3))), "does not accept"),
        (sparse(data=(INDICES, VALUES, (1 << 40, 1 << 40))), "'w': a tensor has an invalid"),
        (sparse(data=(INDICES, tensor((9,), (1,)), (3, 3))), "'w': a tensor reaches outside"),
        (quantised((torch.per_tensor_affine, "0.1", 0)), "does not accept"),
        (quantised((torch.per_channel_affine, [0.1], [0], 2)), "does not accept"),
        (quantised((torch.per_channel_affine, ["a"], [0], 0)), "does not accept"),
        (quantised((0.1, 0), storage=StorageId("storage", torch.FloatStorage, "0", "cpu", 4)),
         "does not accept"),
        (quantised((torch.per_tensor_affine, 0.1, 0), size=(4, 5)), "'w': a tensor reaches outs"),
        (Call(torch._utils._rebuild_tensor_v2, NUMBERS, 0, (4,), (1,), False, OrderedDict()),
         "does not accept"),
        (meta(torch.qint8, (2,), (1,)), "does not accept"),
        (meta(torch.float32, (1 << 40, 1 << 40), (1, 1)), "'w': a tensor has an invalid size"),
    ],
)  # fmt: skip
def test_an_impossible_tensor_made_of_others_is_refused(path, made, match):
    """Nothing is made of what does not fit, and the tensor is named as soon as it has a name."""
    write_others(path, {"w": made})
    refused(path, match)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_")
@pytest.mark.parametrize(
    ("made", "match"),
    [
        (sparse(data=(INDICES, VALUES, (2, 2))), "size is inconsistent with indices"),
        (sparse(data=(INDICES, VALUES, (3, 3, 3))), "sparse coo tensor"),
        (sparse(data=(VALUES, VALUES, (3, 3))), "sparse coo tensor"),
        (sparse("torch.sparse_csr", (INDICES, INDICES, VALUES, (3, 3))), "sparse csr tensor"),
        (sparse("torch.sparse_bsc", (INDICES, INDICES, VALUES, (3, 3))), "sparse bsc tensor"),
        (quantised((torch.per_tensor_affine, 0.1, 300)), "zero_point 300 is above"),
        (quantised((torch.per_channel_affine, [0.1] * 3, [0] * 3, 0)), "3 scales for 4 channels"),
        (quantised((torch.per_channel_affine, [0.1] * 4, [0] * 3, 0)), "per channel affine tensor"),
    ],
)  # fmt: skip
def test_values_that_make_no_tensor_are_refused_when_it_is_asked_for(path, made, match):
    """Torch would read and write outside of memory with some of them; the others stay readable."""
    write_others(path, {"w": made, "v": VALUES}, (0, 1, 3, 2))
    with torchlift.open(path) as ckpt:
        assert ckpt["v"].tolist() == [0, 0]
        with pytest.raises(FormatError, match=match) as caught:
            ckpt["w"]
    assert (caught.value.file, caught.value.entry) == (str(path), "w")


def test_a_huge_tensor_on_meta_or_of_few_values_takes_no_memory(path):
    """Its shape is all that there is of it."""
    few = sparse(data=(INDICES, VALUES, (1 << 30, 1 << 30)))
    write_others(path, {"m": meta(torch.float32, (1 << 31, 1 << 31), (1 << 31, 1)), "s": few})
    with torchlift.open(path) as ckpt:
        assert ckpt["m"].is_meta
        assert ckpt["s"].shape == (1 << 30, 1 << 30)
        assert ckpt.nbytes == 48

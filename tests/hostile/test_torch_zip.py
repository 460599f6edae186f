"""Torch zip files that lie about records, storages and views: an error that names the entry."""

from __future__ import annotations

import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from checkpoint_files import Call, StorageId, tensor, write_safetensors, write_zip
from damaged_files import refused

import torchlift
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.detect import read_index


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bad.pt"


def test_magic_and_then_junk_is_refused(path):
    """A zip signature alone does not make a checkpoint."""
    path.write_bytes(b"PK\x03\x04" + b"junk" * 100)
    refused(path, "lacks its directory.*truncated")


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.9, 0.99])
def test_a_truncated_archive_is_refused(path, keep):
    """A download that stopped early is an error, wherever it stopped."""
    torch.save({"w": torch.ones(100)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(path, "truncated")


def test_a_damaged_directory_is_refused(path):
    """A directory whose entries are overwritten is an error."""
    write_zip(path, {"w": tensor()})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"PK\x01\x02", b"PK\x01\xff", 1))
    refused(path, "directory of the archive is damaged")


def test_a_record_outside_the_top_directory_is_refused(path):
    """All records are under one directory in a file of torch.save."""
    write_zip(path, {"w": tensor()})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../evil", b"x")
    assert refused(path, "did not write").entry == "../evil"


def test_an_entry_with_the_place_of_another_record_is_refused(path):
    """Two names would show the same bytes."""
    write_zip(path, {"w": tensor()}, storages={"0": bytes(16), "1": bytes(16)})
    data = bytearray(path.read_bytes())
    (offset,) = struct.unpack_from("<I", data, data.rfind(b"archive/data/0") - 46 + 42)
    struct.pack_into("<I", data, data.rfind(b"archive/data/1") - 46 + 42, offset)
    path.write_bytes(bytes(data))
    refused(path, "names another record")


def test_records_with_one_header_inside_another_payload_overlap(path):
    """A record hidden in the payload of another one is an error."""
    hidden = struct.pack("<4s22xHH", b"PK\x03\x04", 14, 0) + b"archive/data/1" + bytes(16)
    write_zip(path, {"w": tensor()}, storages={"0": hidden, "1": bytes(16)})
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.rfind(b"archive/data/1") - 46 + 42, data.find(hidden))
    path.write_bytes(bytes(data))
    assert refused(path, "overlap").entry == "archive/data/1"


def test_a_duplicate_record_is_refused(path):
    """Readers disagree on which of two equal names counts, so neither does."""
    write_zip(path, {"w": tensor()})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data/0", b"x" * 16)
    assert refused(path, "two records").entry == "archive/data/0"


def test_an_encrypted_record_is_refused(path):
    """Ciphertext is not weights."""
    write_zip(path, {"w": tensor()})
    data = bytearray(path.read_bytes())
    data[data.rfind(b"archive/data/0") - 46 + 8] |= 1
    path.write_bytes(bytes(data))
    assert refused(path, "encrypted").entry == "archive/data/0"


def test_bytes_behind_the_archive_are_refused(path):
    """Something appended to a file means that it is not the file that was written."""
    write_zip(path, {"w": tensor()})
    path.write_bytes(path.read_bytes() + b"trailing")
    error = refused(path, "does not end with its end record")
    assert (error.expected, error.found) == (
        "a comment of 8 bytes behind it", "a declared comment of 0 bytes",
    )  # fmt: skip


def test_a_compressed_record_is_refused_before_it_is_inflated(path):
    """A pickle that would inflate to a gigabyte, and a storage of another compression."""
    write_zip(path, data=bytes(1 << 27), method=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 18
    error = refused(path, "a program other than torch compressed the file")
    assert error.entry == "archive/data.pkl"
    write_zip(path, {"w": tensor()}, storage_method=zipfile.ZIP_BZIP2)
    assert refused(path, "compressed in an unknown way").entry == "archive/data/0"


def test_a_damaged_pickle_fails_its_checksum(path):
    """The CRC32 of data.pkl is always checked: it decides everything else."""
    write_zip(path, {"w": tensor()})
    data = bytearray(path.read_bytes())
    data[data.find(b"cpu")] ^= 1
    path.write_bytes(bytes(data))
    assert refused(path, "CRC-32 of a record does not match").entry == "archive/data.pkl"


@pytest.mark.parametrize("note", ["version", ".storage_alignment", ".format_version"])
@pytest.mark.parametrize("value", [b"0", b"-1", b"", b"x", b"9" * 900, b"\xff", b"1.5"])
def test_absurd_numbers_beside_the_pickle_are_refused(path, note, value):
    """Versions and alignments are positive whole numbers."""
    write_zip(path, {"w": tensor()}, notes={note: value})
    assert refused(path, "an invalid value").entry == f"archive/{note}"


def test_missing_notes_are_tolerated(path):
    """Old torch versions did not write all of them, and torch needs the version alone."""
    write_zip(path, {"w": tensor()}, notes={"version": b"2\n"})
    assert read_index(path).metadata == {"version": "2"}
    write_zip(path, {"w": tensor()}, notes={})
    refused(path, "lacks its version, so torch does not read it")


@pytest.mark.parametrize(
    "notes", [{"version": b"11"}, {"version": b"3", ".data/version": b"11"}, {"VERSION": b"3"}]
)
def test_a_version_that_torch_refuses_is_refused(path, notes):
    """Up to ten, wherever torch looks for it; a name in capitals is what torch finds, too."""
    write_zip(path, {"w": tensor()}, notes=notes)
    if "VERSION" not in notes:
        with pytest.raises(RuntimeError, match="maximum supported version for reading is 10"):
            torch.load(path)
    refused(path, "up to 10, which torch reads|differs in case from what torch writes")


def test_every_version_that_torch_reads_is_read(path):
    """The range is that of the installed torch."""
    for version in range(1, 11):
        write_zip(path, {"w": tensor()}, notes={"version": b"%d" % version})
        torch.load(path)
        assert read_index(path).metadata == {"version": str(version)}


def test_an_unknown_byte_order_is_refused(path):
    """Numbers in an order that nobody knows are refused, not returned scrambled."""
    write_zip(path, {"w": tensor()}, notes={"byteorder": b"pdp"})
    assert refused(path, "an invalid value").entry == "archive/byteorder"


@pytest.mark.parametrize(
    ("metadata", "match"),
    [({"conj": True}, "a conjugate view has a dtype that does not support it"),
     ({"neg": True, "conj": True}, "a conjugate view has a dtype that does not support it")],
)  # fmt: skip
def test_an_impossible_lazy_view_is_refused(path, metadata, match):
    """Real numbers have no conjugate ones."""
    real = tensor()
    real.parts = (real.parts[0], (*real.parts[1], metadata))
    write_zip(path, {"w": real})
    assert refused(path, match).entry == "w"


def test_a_negative_view_of_whole_numbers_is_refused(path):
    """Torch has such views of floating-point numbers only."""
    whole = tensor(storage_type=torch.IntStorage)
    whole.parts = (whole.parts[0], (*whole.parts[1], {"neg": True}))
    write_zip(path, {"w": whole})
    assert refused(path, "a negative view has a dtype that does not support it").entry == "w"


INDICES = tensor((2, 2), (2, 1), storage_type=torch.LongStorage, storage="i")
VALUES = tensor((2,), (1,))
NUMBERS = StorageId("storage", torch.QInt8Storage, "q", "cpu", 16)
NEGATIVE = tensor((2, 2), (2, 1), storage_type=torch.LongStorage, storage="n")
OFFSETS = tensor((2,), (1,), storage_type=torch.LongStorage, storage="i")
BEYOND = tensor((3,), (1,), storage_type=torch.LongStorage, storage="i")


def sparse(layout="torch.sparse_coo", data=(INDICES, VALUES, (3, 3))):
    return Call(torch._utils._rebuild_sparse_tensor, layout, data)


def quantised(params, storage=NUMBERS, size=(4, 4), stride=(4, 1), offset=0):
    function = torch._utils._rebuild_qtensor
    return Call(function, storage, offset, size, stride, params, False, OrderedDict())


def meta(*arguments):
    return Call(torch._utils._rebuild_meta_tensor_no_storage, *arguments)


def nested(*arguments):
    return Call(torch._utils._rebuild_nested_tensor, *arguments)


def jagged(*, tensors=None, kind=None, **given):
    """A jagged tensor; `tensors` are those that its state sets again."""
    from torch.nested._internal import nested_tensor as njt

    names = {"_values": "values", "_offsets": "offsets", "_lengths": "lengths"}
    state = {attribute: given.get(name) for attribute, name in names.items()}
    state |= {"_ragged_idx": given.get("_ragged_idx", 1), **(tensors or {})}
    kind = kind or njt.NestedTensor
    return Call(torch._tensor._rebuild_from_type_v2, njt._rebuild_njt, kind, (given,), state)


def write_others(path, obj, indices=(0, 1, 1, 2)):
    """A file with a storage of four int64 beside others of 16 bytes."""
    storages = {"0": bytes(16), "q": bytes(16), "i": struct.pack("<4q", *indices)}
    storages["n"] = struct.pack("<4q", -1, -2, -3, -4)
    return write_zip(path, obj, storages=storages)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (sparse("torch.strided"), "does not accept"),
        (sparse(["torch.sparse_coo"]), "does not accept"),
        (sparse("torch.sparse_csr"), "does not accept"),
        (sparse(data=()), "does not accept"),
        (sparse(data=(INDICES, (3, 3))), "does not accept"),
        (sparse(data=(INDICES, 5, (3, 3))), "does not accept"),
        (sparse(data=(INDICES, VALUES, (3, 3), "yes")), "does not accept"),
        (sparse(data=(INDICES, sparse(), (3, 3))), "does not accept"),
        (sparse(data=(INDICES, VALUES, 9)), "'w': a tensor has an invalid size"),
        (sparse(data=(INDICES, VALUES, (3, -1))), "'w': a tensor has an invalid size"),
        (sparse(data=(INDICES, VALUES, (1 << 40, 1 << 40))), "'w': a tensor has an invalid"),
        (sparse(data=(INDICES, tensor((9,), (1,)), (3, 3))), "'w': a tensor reaches outside"),
        (sparse(data=(tensor(storage="x"), VALUES, (3, 3))), "'w': the storage of a tensor"),
        (quantised((torch.per_tensor_affine, 0.1)), "does not accept"),
        (quantised((torch.per_tensor_affine, "0.1", 0)), "does not accept"),
        (quantised((torch.per_tensor_affine, 0.1, 0.5)), "does not accept"),
        (quantised((torch.per_tensor_symmetric, 0.1, 0)), "does not accept"),
        (quantised((torch.per_channel_affine, [0.1], [0], 2)), "does not accept"),
        (quantised((torch.per_channel_affine, [0.1], [0], -1)), "does not accept"),
        (quantised((torch.per_channel_affine, ["a"], [0], 0)), "does not accept"),
        (quantised((torch.per_channel_affine, VALUES, [0], 0)), "does not accept"),
        (quantised((0.1, 0), storage=StorageId("storage", torch.FloatStorage, "0", "cpu", 4)),
         "does not accept"),
        (quantised((torch.per_tensor_affine, 0.1, 0), size=(4, 5)), "'w': a tensor reaches outs"),
        (quantised((torch.per_tensor_affine, 0.1, 0), stride=(4,)), "'w': the numbers of st"),
        (Call(torch._utils._rebuild_tensor_v2, NUMBERS, 0, (4,), (1,), False, OrderedDict()),
         "does not accept"),
        (meta("float32", (2,), (1,)), "does not accept"),
        (meta(torch.qint8, (2,), (1,)), "does not accept"),
        (meta(torch.float32, (2,), (1, 1)), "'w': the numbers of stride"),
        (meta(torch.float32, (1 << 40, 1 << 40), (1, 1)), "'w': a tensor has an invalid size"),
        (Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, 5, torch.float32, "xla", False),
         "does not accept"),
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


@pytest.mark.parametrize(
    "made",
    [
        nested(VALUES, INDICES, INDICES, OFFSETS),
        nested(VALUES, (0, 0)),
        jagged(values=VALUES, offsets=OFFSETS),
        jagged(values=VALUES, offsets=OFFSETS, tensors={"data": VALUES}),
        jagged(offsets=(0, 1), kind=torch.Tensor),
    ],
)
def test_a_nested_tensor_is_blocked_whatever_it_is_made_of(path, made):
    """Torch reads outside of memory with some of them; the others stay readable."""
    write_others(path, {"w": made, "v": VALUES})
    with torchlift.open(path) as ckpt:
        assert ckpt["v"].tolist() == [0, 0]
        with pytest.raises(FormatError, match="nested tensors") as caught:
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


def test_unknown_metadata_of_a_tensor_is_blocked(path):
    """What a backend keeps beside a tensor may change what it shows."""
    odd = tensor()
    odd.parts = (odd.parts[0], (*odd.parts[1], {"scale": 2}))
    write_zip(path, {"w": odd})
    assert "with metadata" in read_index(path).blocked_keys["w"]


@pytest.mark.parametrize("numel", [3, 5, 0, 2**40, 2**61])
def test_a_storage_of_another_size_is_refused(path, numel):
    """A storage has exactly the bytes of its elements."""
    write_zip(path, {"w": tensor(numel=numel)})
    error = refused(path, "the size of a storage differs")
    assert error.entry == "archive/data/0"
    assert error.found == "16 bytes"


@pytest.mark.parametrize("numel", [-1, 2**63, 1.5, True, "4", None])
def test_an_impossible_storage_is_refused(path, numel):
    """A number of elements is a whole number that fits into memory."""
    write_zip(path, {"w": tensor(numel=numel)})
    refused(path, "a persistent id is not a storage")


def test_a_missing_storage_is_refused(path):
    """A tensor whose record is not in the archive is an error with its key."""
    write_zip(path, {"w": tensor(storage="7")})
    error = refused(path, "storage of a tensor is missing")
    assert (error.entry, error.expected) == ("w", "storage data/7")


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((5,), (1,), 0), ((2,), (1,), 3), ((2, 2), (3, 1), 1), ((1,), (0,), 4), ((2,), (2**62,), 0)],
)
def test_a_view_outside_its_storage_is_refused(path, size, stride, offset):
    """The last element of a view lies inside the storage."""
    write_zip(path, {"w": tensor(size, stride, offset)})
    assert refused(path, "outside its storage").entry == "w"


@pytest.mark.parametrize(
    ("size", "stride", "offset", "match"),
    [
        ((-1,), (1,), 0, "invalid size"),
        ((2,), (-1,), 1, "invalid stride"),
        ((2,), (1,), -1, "invalid storage offset"),
        ((2**63,), (0,), 0, "invalid size"),
        ((2.0,), (1,), 0, "invalid size"),
        ((True,), (1,), 0, "invalid size"),
        ((2,), (True,), 0, "invalid stride"),
        ((2,), (1,), True, "invalid storage offset"),
        ((2,), (1, 1), 0, "numbers of strides and dimensions"),
        ((2,), (), 0, "numbers of strides and dimensions"),
        ("ab", (1, 1), 0, "invalid size; expected a tuple"),
        ((1,) * 65, (1,) * 65, 0, "at most 64"),
        ((2**40,), (0,), 0, "far larger"),
        ((2**62, 2**62), (0, 0), 0, "far larger"),
    ],
)
def test_impossible_sizes_and_strides_are_refused(path, size, stride, offset, match):
    """Sizes, strides and offsets are whole, not negative, and of equal number."""
    write_zip(path, {"w": tensor(size, stride, offset)})
    assert refused(path, match).entry == "w"


def test_a_true_among_equal_ones_is_still_refused(path):
    """That (True,) equals (1,) in Python does not make it a shape."""
    write_zip(path, {"v": tensor((1,), (1,)), "w": tensor((True,), (1,))})
    assert refused(path, "invalid size").entry == "w"


def test_a_whole_module_says_what_it_is(path):
    """A pickled module is refused with the way to a state dict."""
    torch.save(torch.nn.Linear(1, 1), path)
    error = refused(path, r"pickled module.*state_dict\(\)", UnsafeError)
    assert error.entry == "torch.nn.modules.linear.Linear"


def test_other_zip_archives_say_what_they_are(path):
    """A numpy archive and an arbitrary one are recognised."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"")
    refused(path, "NumPy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", b"")
    refused(path, r"torch\.save did not write")
    with zipfile.ZipFile(path, "w"):
        pass
    refused(path, r"torch\.save did not write")


def test_a_hundred_thousand_claimed_records_are_not_allocated(path):
    """A count that does not fit in the directory is refused before it is used."""
    write_zip(path, {"w": tensor()})
    data = bytearray(path.read_bytes())
    struct.pack_into("<HH", data, data.rfind(b"PK\x05\x06") + 8, 60_000, 60_000)
    path.write_bytes(bytes(data))
    refused(path, "the directory of the archive is damaged")


def test_a_directory_beyond_the_file_is_refused(path):
    """Offsets in the end record are checked against the file."""
    write_zip(path, {"w": tensor()})
    data = bytearray(path.read_bytes())
    struct.pack_into("<II", data, data.rfind(b"PK\x05\x06") + 12, 2**31, 2**31)
    path.write_bytes(bytes(data))
    refused(path, "damaged; found 4 of 4 records")


def test_the_suffix_does_not_matter(tmp_path):
    """The content decides the format."""
    index = read_index(write_zip(tmp_path / "x.safetensors", {"w": tensor()}))
    assert index.format == "torch-zip"
    write_safetensors(tmp_path / "x.pt", {})
    assert read_index(tmp_path / "x.pt").format == "safetensors"

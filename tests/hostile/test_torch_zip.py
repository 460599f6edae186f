"""Torch zip files that lie about records, storages and views: an error that names the entry."""

from __future__ import annotations

import struct
import zipfile

import pytest
import torch
from checkpoint_files import tensor, write_safetensors, write_zip

from torchlift.errors import FormatError, UnsafeError
from torchlift.formats import read_index


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bad.pt"


def refused(path, match, kind=FormatError):
    """The error of reading a file, whose message must fit and name the file."""
    with pytest.raises(kind, match=match) as caught:
        read_index(path)
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_magic_and_then_junk_is_refused(path):
    """A zip signature alone does not make a checkpoint."""
    path.write_bytes(b"PK\x03\x04" + b"junk" * 100)
    refused(path, "without its directory.*truncated")


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
    refused(path, "directory is damaged")


def test_a_record_outside_the_top_directory_is_refused(path):
    """All records are under one directory in a file of torch.save."""
    write_zip(path, {"w": tensor()})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../evil", b"x")
    assert refused(path, "did not write").entry == "../evil"


def test_overlapping_records_are_refused(path):
    """Two records that claim the same bytes are an error."""
    write_zip(path, {"w": tensor()}, storages={"0": bytes(16), "1": bytes(16)})
    data = bytearray(path.read_bytes())
    at = data.rfind(b"archive/data/0") - 46
    (offset,) = struct.unpack_from("<I", data, at + 42)
    # A second local header inside the payload of the first record.
    inner = struct.pack("<4s22xHH", b"PK\x03\x04", 14, 0)
    first = data.find(b"archive/data/0") + 14
    data[first:first] = b""
    struct.pack_into("<I", data, data.rfind(b"archive/data/1") - 46 + 42, offset)
    path.write_bytes(bytes(data))
    refused(path, "names another record|overlap")
    assert len(inner) == 30


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
        "a comment of 8 bytes behind it", "0 bytes, by its own account",
    )  # fmt: skip


def test_a_compressed_storage_is_never_weights(path):
    """Deflated storages are refused by name, not handed out as numbers."""
    write_zip(path, {"w": tensor()}, storage_method=zipfile.ZIP_DEFLATED)
    assert refused(path, "storage is compressed").entry == "archive/data/0"


def test_a_deflate_bomb_is_not_inflated(path):
    """A pickle that would inflate to a gigabyte is refused from its header."""
    write_zip(path, data=bytes(1 << 27), method=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 18
    assert refused(path, "too large").entry == "archive/data.pkl"


def test_a_deflate_bomb_that_lies_about_its_size_stops_early(path):
    """Inflation ends one byte after the declared size."""
    size = 0x01020304  # the bytes of a round number may also stand in a date
    write_zip(path, data=bytes(size), method=zipfile.ZIP_DEFLATED)
    data = path.read_bytes().replace(struct.pack("<I", size), struct.pack("<I", 1000))
    path.write_bytes(data)
    refused(path, "does not have the size")


def test_a_damaged_pickle_fails_its_checksum(path):
    """The CRC32 of data.pkl is always checked: it decides everything else."""
    write_zip(path, {"w": tensor()})
    data = bytearray(path.read_bytes())
    data[data.find(b"cpu")] ^= 1
    path.write_bytes(bytes(data))
    assert refused(path, "CRC32 does not match").entry == "archive/data.pkl"


@pytest.mark.parametrize("note", ["version", ".storage_alignment", ".format_version"])
@pytest.mark.parametrize("value", [b"0", b"-1", b"", b"x", b"9" * 900, b"\xff", b"1.5"])
def test_absurd_numbers_beside_the_pickle_are_refused(path, note, value):
    """Versions and alignments are positive whole numbers."""
    write_zip(path, {"w": tensor()}, notes={note: value})
    assert refused(path, "makes no sense").entry == f"archive/{note}"


def test_missing_notes_are_tolerated(path):
    """Old torch versions did not write all of them, and torch needs the version alone."""
    write_zip(path, {"w": tensor()}, notes={"version": b"2\n"})
    assert read_index(path).metadata == {"version": "2"}
    write_zip(path, {"w": tensor()}, notes={})
    refused(path, "without its version, which torch does not read")


@pytest.mark.parametrize(
    "notes", [{"version": b"11"}, {"version": b"3", ".data/version": b"11"}, {"VERSION": b"3"}]
)
def test_a_version_that_torch_refuses_is_refused(path, notes):
    """Up to ten, wherever torch looks for it; a name in capitals is what torch finds, too."""
    write_zip(path, {"w": tensor()}, notes=notes)
    if "VERSION" not in notes:
        with pytest.raises(RuntimeError, match="maximum supported version for reading is 10"):
            torch.load(path)
    refused(path, "up to 10, which torch reads|not written as torch writes it")


def test_every_version_that_torch_reads_is_read(path):
    """The range is that of the installed torch."""
    for version in range(1, 11):
        write_zip(path, {"w": tensor()}, notes={"version": b"%d" % version})
        torch.load(path)
        assert read_index(path).metadata == {"version": str(version)}


def test_an_unknown_byte_order_is_refused(path):
    """Numbers in an order that nobody knows are refused, not returned scrambled."""
    write_zip(path, {"w": tensor()}, notes={"byteorder": b"pdp"})
    assert refused(path, "makes no sense").entry == "archive/byteorder"


@pytest.mark.parametrize(
    ("metadata", "match"),
    [({"conj": True}, "a conjugate view of numbers that have none"),
     ({"neg": True, "conj": True}, "a conjugate view of numbers that have none")],
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
    assert refused(path, "a negative view of numbers that have none").entry == "w"


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
    error = refused(path, "does not have the size")
    assert error.entry == "archive/data/0"
    assert error.found == "16 bytes"


@pytest.mark.parametrize("numel", [-1, 2**63, 1.5, True, "4", None])
def test_an_impossible_storage_is_refused(path, numel):
    """A number of elements is a whole number that fits into memory."""
    write_zip(path, {"w": tensor(numel=numel)})
    refused(path, "impossible number of elements")


def test_a_missing_storage_is_refused(path):
    """A tensor whose record is not in the archive is an error with its key."""
    write_zip(path, {"w": tensor(storage="7")})
    error = refused(path, "storage is missing")
    assert (error.entry, error.expected) == ("w", "record data/7")


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
        ((-1,), (1,), 0, "impossible size"),
        ((2,), (-1,), 1, "impossible stride"),
        ((2,), (1,), -1, "impossible storage offset"),
        ((2**63,), (0,), 0, "impossible size"),
        ((2.0,), (1,), 0, "impossible size"),
        ((True,), (1,), 0, "impossible size"),
        ((2,), (True,), 0, "impossible stride"),
        ((2,), (1,), True, "impossible storage offset"),
        ((2,), (1, 1), 0, "one stride per dimension"),
        ((2,), (), 0, "one stride per dimension"),
        ("ab", (1, 1), 0, "size is not a tuple"),
        ((1,) * 65, (1,) * 65, 0, "at most 64"),
        ((2**40,), (0,), 0, "absurdly larger"),
        ((2**62, 2**62), (0, 0), 0, "absurdly larger"),
    ],
)
def test_impossible_sizes_and_strides_are_refused(path, size, stride, offset, match):
    """Sizes, strides and offsets are whole, not negative, and of equal number."""
    write_zip(path, {"w": tensor(size, stride, offset)})
    assert refused(path, match).entry == "w"


def test_a_true_among_equal_ones_is_still_refused(path):
    """That (True,) equals (1,) in Python does not make it a shape."""
    write_zip(path, {"v": tensor((1,), (1,)), "w": tensor((True,), (1,))})
    assert refused(path, "impossible size").entry == "w"


def test_a_whole_module_says_what_it_is(path):
    """A pickled module is refused with the way to a state dict."""
    torch.save(torch.nn.Linear(1, 1), path)
    error = refused(path, r"whole pickled module.*state_dict\(\)", UnsafeError)
    assert error.entry == "torch.nn.modules.linear.Linear"


def test_other_zip_archives_say_what_they_are(path):
    """A numpy archive and an arbitrary one are recognised."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"")
    refused(path, "numpy")
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
    refused(path, "does not fit")


def test_a_directory_beyond_the_file_is_refused(path):
    """Offsets in the end record are checked against the file."""
    write_zip(path, {"w": tensor()})
    data = bytearray(path.read_bytes())
    struct.pack_into("<II", data, data.rfind(b"PK\x05\x06") + 12, 2**31, 2**31)
    path.write_bytes(bytes(data))
    refused(path, "does not fit")


def test_the_suffix_does_not_matter(tmp_path):
    """The content decides the format."""
    index = read_index(write_zip(tmp_path / "x.safetensors", {"w": tensor()}))
    assert index.format == "torch-zip"
    write_safetensors(tmp_path / "x.pt", {})
    assert read_index(tmp_path / "x.pt").format == "safetensors"

"""Old torch files that lie: an error that names the entry, and nothing of them runs."""

from __future__ import annotations

import os
import struct
import tarfile

import pytest
import torch
from checkpoint_files import (
    MAGIC,
    PROTOCOL,
    Call,
    StorageId,
    TarId,
    legacy_id,
    legacy_tensor,
    pickled,
    tar_members,
    write_legacy,
    write_tar,
)
from damaged_files import refused

import torchlift
from torchlift.errors import CheckpointError, FormatError, UnsafeError
from torchlift.formats import read_index

INFO = {"little_endian": True}
VALUES = struct.pack("<4f", 1, 2, 3, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "old.pt"


def test_a_file_that_ends_early_is_refused_wherever_it_ends(path):
    """In the header, in a pickle, in a count, in a storage: an error, never another tensor."""
    write_legacy(path, {"w": legacy_tensor(), "v": legacy_tensor(identity=legacy_id("1"))},
                 {"0": (4, VALUES), "1": (4, VALUES)})  # fmt: skip
    data = path.read_bytes()
    for end in range(1, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(FormatError):
            read_index(path)
    assert refused(path, "reaches past the end.*truncated").entry == "1"


@pytest.mark.parametrize(
    ("head", "match", "entry"),
    [
        ((MAGIC, MAGIC, INFO), "not a torch file", "the protocol"),
        ((MAGIC, 1002, INFO), "not a torch file", "the protocol"),
        ((MAGIC, True, INFO), "not a torch file", "the protocol"),
        ((MAGIC, PROTOCOL, [1]), "sys_info is not a dict", "sys_info"),
    ],
)
def test_a_wrong_header_is_refused(path, head, match, entry):
    """Two magic numbers, another protocol, or no description of the machine."""
    write_legacy(path, {"w": legacy_tensor()}, head=head)
    assert refused(path, match).entry == entry


@pytest.mark.parametrize("place", ["protocol", "sys_info", "keys"])
def test_a_global_where_plain_data_belongs_is_refused(path, place):
    """Torch would import it before it looks at the weights."""
    evil = Call(os.system, "touch /tmp/torchlift-was-here")
    protocol, info = (evil if place == name else right
                      for name, right in (("protocol", PROTOCOL), ("sys_info", INFO)))  # fmt: skip
    keys = [evil] if place == "keys" else None
    write_legacy(path, {"w": legacy_tensor()}, head=(MAGIC, protocol, info), keys=keys)
    error = refused(path, "would run code", UnsafeError)
    assert error.found == "posix.system"
    assert not os.path.exists("/tmp/torchlift-was-here")


def test_a_global_in_the_object_is_listed(path):
    """What is beside it can be read."""
    write_legacy(path, {"w": legacy_tensor(), "evil": Call(os.system, "true")})
    ckpt = torchlift.open(path)
    assert ckpt.blocked == ("posix.system",)
    assert ckpt["w"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("count", [-1, 3, 5, 2**40, -(2**63), 2**63 - 1])
def test_a_count_that_is_not_the_tensors_is_refused(path, count):
    """The elements of a storage are those that its tensors say, never fewer and never negative."""
    write_legacy(path, {"w": legacy_tensor()}, {"0": (count, VALUES)})
    error = refused(path, "does not have the size its tensors say")
    assert (error.entry, error.found) == ("0", str(count))


def test_a_huge_storage_is_refused_before_it_is_allocated(path):
    """Both agree on a size that the file does not have."""
    huge = legacy_tensor(identity=legacy_id(numel=2**60))
    write_legacy(path, {"w": huge}, {"0": (2**60, VALUES)})
    assert refused(path, "reaches past the end").entry == "0"


@pytest.mark.parametrize(
    ("keys", "match"),
    [(["0", "0"], "is there twice"), (["0", "9"], "that no tensor uses"), ([], "is missing"),
     ({"0": 1}, "are not a list"), ([["0"]], "that no tensor uses"), ([0], "that no tensor uses")],
)  # fmt: skip
def test_storage_keys_that_are_not_those_of_the_tensors_are_refused(path, keys, match):
    """Twice, unknown, missing, or no keys at all."""
    write_legacy(path, {"w": legacy_tensor()}, keys=keys)
    refused(path, match)


@pytest.mark.parametrize(
    ("view", "match"),
    [
        (("v", 3, 2), "view reaches outside its storage"),
        (("v", -1, 2), "impossible view of its storage"),
        (("v", 0, -2), "impossible view of its storage"),
        (("v", 2**62, 2**62), "view reaches outside its storage"),
        (("v", 1, 1), "tensor reaches outside its storage"),
        (("v", True, 4), "impossible view of its storage"),
        (("v", 0), "a view of a storage is not"),
        ((["v"], 0, 4), "a view of a storage is not"),
        ("view", "a view of a storage is not"),
    ],
)
def test_a_view_outside_its_storage_is_refused(path, view, match):
    """A view lies inside its storage, and a tensor inside its view."""
    write_legacy(path, {"w": legacy_tensor((2,), (1,), identity=legacy_id(view=view))})
    assert refused(path, match).entry in ("w", "0")


def test_two_views_of_one_key_are_refused(path):
    """Torch would take the first for both."""
    views = [legacy_id(view=("v", first, 2)) for first in (0, 2)]
    write_legacy(
        path, {f"w{i}": legacy_tensor((2,), (1,), identity=v) for i, v in enumerate(views)}
    )
    assert refused(path, "two views of storages have one key").entry == "v"


@pytest.mark.parametrize(
    "other", [legacy_id(numel=2), legacy_id(storage_type=torch.IntStorage), legacy_id(numel=5)]
)
def test_tensors_that_disagree_about_a_storage_are_refused(path, other):
    """Torch would take the first one's word for both."""
    write_legacy(path, {"a": legacy_tensor(), "b": legacy_tensor((1,), (1,), identity=other)})
    assert refused(path, "one storage is described in two ways").entry == "0"


@pytest.mark.parametrize("identity", [StorageId("storage", 1), StorageId(), TarId(5), TarId("x")])
def test_a_persistent_id_that_is_no_storage_is_refused(path, identity):
    """Neither a tuple of five as in newer files nor anything else."""
    write_legacy(path, {"w": identity})
    refused(path, "persistent id is not a storage")


@pytest.mark.parametrize(
    ("size", "stride", "offset", "match"),
    [((5,), (1,), 0, "outside its storage"), ((-1,), (1,), 0, "impossible size"),
     ((2,), (-1,), 1, "impossible stride"), ((2**40,), (0,), 0, "absurdly larger"),
     ((2,), (1,), 2**62, "outside its storage"), ((1,) * 65, (1,) * 65, 0, "at most 64")],
)  # fmt: skip
def test_impossible_tensors_are_refused(path, size, stride, offset, match):
    """As in newer files."""
    write_legacy(path, {"w": legacy_tensor(size, stride, offset)})
    assert refused(path, match).entry == "w"


# ---- the tar


def members_of(**changes):
    right = {
        "obj": {"w": TarId("11")},
        "storages": [(1, "cpu", torch.FloatStorage, 4, VALUES)],
        "tensors": [(11, 1, (2, 2), (2, 1), 0)],
        "views": [],
    }
    return tar_members(**{**right, **changes})


def test_a_truncated_tar_is_refused_wherever_it_ends(path):
    """Cut at any block or inside one, its files are incomplete."""
    write_tar(path, members_of())
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        *_, last = archive.getmembers()
    end = last.offset_data + last.size
    for stop in [*range(512, end, 100), end - 1]:
        path.write_bytes(data[:stop])
        refused(path, "truncated|did not write|reaches past")


def special(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "info",
    [
        special("link", tarfile.SYMTYPE, "/etc/passwd"), special("hard", tarfile.LNKTYPE, "pickle"),
        special("null", tarfile.CHRTYPE), special("disk", tarfile.BLKTYPE),
        special("pipe", tarfile.FIFOTYPE), special("/etc/cron.d/x", tarfile.REGTYPE),
        special("../x", tarfile.REGTYPE), special("a/../../x", tarfile.REGTYPE),
    ],
    ids=lambda info: info.name,
)  # fmt: skip
def test_members_that_are_no_plain_files_are_refused(path, info):
    """Links, devices, pipes, absolute names and names that leave the directory."""
    write_tar(path, members_of(), info)
    assert refused(path, "leaves the directory", UnsafeError).entry == info.name


def with_header(path, change):
    """The tar with its first header changed and its checksum made right."""
    data = bytearray(path.read_bytes())
    at = next(i for i in range(0, len(data), 512) if data[i : i + 8] == b"sys_info")
    change(data, at)
    data[at + 148 : at + 156] = b"%06o\0 " % (
        sum(data[at : at + 512]) - sum(data[at + 148 : at + 156]) + 256
    )
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"x" * 12]
)
def test_impossible_sizes_are_refused(path, size):
    """Larger than the file, negative, in base 256, or no number."""
    write_tar(path, members_of())
    with_header(path, lambda data, at: data.__setitem__(slice(at + 124, at + 136), size))
    assert refused(path, "impossible size|past the end").entry == "sys_info"


def test_a_damaged_header_is_refused(path):
    """The checksum of a header is checked."""
    write_tar(path, members_of())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"sys_info\0", b"sys_infp\0", 1))
    refused(path, "header of a member of the tar is damaged")


def test_two_members_of_one_name_are_refused(path):
    """Programs disagree on which of the two counts."""
    write_tar(path, members_of(), special("pickle", tarfile.REGTYPE))
    assert refused(path, "two members").entry == "pickle"


def test_an_extended_header_that_renames_or_resizes_is_refused(path):
    """Python's tarfile would obey it."""
    info = tarfile.TarInfo("extra")
    info.pax_headers = {"size": "99999999"}
    write_tar(path, members_of(), info)
    refused(path, "extended header")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"storages": [(1, "cpu", torch.FloatStorage, -1, VALUES)]}, "impossible size"),
        ({"storages": [(1, "cpu", torch.FloatStorage, 2**61, VALUES)]}, "past the end"),
        ({"storages": [(1, "cpu", os.system, 4, VALUES)]}, "a storage is not"),
        ({"storages": [(1, "cpu", torch.float32, 4, VALUES)]}, "no known type"),
        ({"storages": [(1, "cpu", torch.FloatStorage, 4, VALUES)] * 2}, "twice"),
        ({"storages": [((1,), "cpu", torch.FloatStorage, 4, VALUES)]}, "key is not a number"),
        ({"views": [(3, 1, 3, 2)], "tensors": [(11, 3, (1,), (1,), 0)]}, "outside its storage"),
        ({"views": [(3, 1, -1, 2)], "tensors": [(11, 3, (1,), (1,), 0)]}, "impossible view"),
        ({"views": [(3, 9, 0, 2)]}, "that is not there"),
        ({"views": [(1, 1, 0, 2)]}, "twice"),
        ({"views": [(3, 1, 0, 2), (4, 3, 0, 1)]}, "that is not there"),
        ({"views": [3]}, "a view of a storage is not"),
        ({"views": [Call(os.system, "true")]}, "would run code"),
        ({"tensors": [(11, 9, (1,), (1,), 0)]}, "without its storage"),
        ({"tensors": [(1, 1, (1,), (1,), 0)]}, "twice"),
        ({"tensors": [(11, 1, (5,), (1,), 0)]}, "outside its storage"),
        ({"tensors": [(11, 1, (-1,), (1,), 0)]}, "impossible size"),
        ({"obj": {"w": TarId("99")}}, "a tensor that is not there"),
        ({"obj": {"w": TarId([1])}}, "key is not a number"),
    ],
)
def test_impossible_storages_views_and_tensors_are_refused(path, changes, match):
    """Every number in the tar is checked against its bytes."""
    write_tar(path, members_of(**changes))
    with pytest.raises(CheckpointError, match=match):
        read_index(path)


def test_a_global_among_the_tensors_types_is_listed(path):
    """Torch would import it; only the types of tensors are expected there."""
    members = members_of()
    members["tensors"] = pickled(1) + pickled((11, 1, os.system)) + struct.pack(
        "<i4x5q", 2, 2, 2, 2, 1, 0
    )  # fmt: skip
    write_tar(path, members)
    assert torchlift.open(path).blocked == ("posix.system",)


def test_a_count_larger_than_the_file_is_refused(path):
    """Before anything is made of it."""
    write_tar(path, {**members_of(), "tensors": pickled(2**60)})
    assert refused(path, "an impossible count").entry == "tensors"


# ---- what torch, and tarfile for it, reads in another way


def _header_changed(path, member, start, content):
    """Change a tar's header of a member, with the sum set right again."""
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        at = archive.getmember(member).offset
        at = (
            archive.getmember(member).offset_data - 512 if data[at + 156 : at + 157] == b"x" else at
        )
    data[at + start : at + start + len(content)] = content
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    path.write_bytes(data)
    return path


@pytest.fixture
def tar(path):
    """A tar of one tensor."""
    state, storages = {"w": TarId("2")}, [(1, "cpu", torch.FloatStorage, 4, VALUES)]
    return write_tar(path, tar_members(state, storages, [(2, 1, (2, 2), (2, 1), 0)]))


def test_a_folder_with_a_size_is_refused(path, tar):
    """tarfile takes what is behind it for the next member, and others skip it."""
    folder = tarfile.TarInfo("folder")
    folder.type, folder.size = tarfile.DIRTYPE, 512
    members = tar_members({}, [], [])
    refused(write_tar(path, members, folder), "impossible size")
    write_tar(path, {**members, "older.": bytes(512)})
    _header_changed(_header_changed(path, "older.", 156, b"\0"), "older.", 5, b"/")
    refused(path, "impossible size")


def test_a_name_ends_at_its_first_zero(tar):
    """As tarfile ends it: the member is one of the four, and not a fifth."""
    _header_changed(tar, "storages", len("storages"), b"\0x")
    assert torchlift.open(tar)["w"].tolist() == torch.load(tar, weights_only=False)["w"].tolist()


def test_the_folders_of_a_long_name_are_a_part_of_it(tar):
    """tarfile would not find the member that the short field alone names."""
    with pytest.raises(UnsafeError, match="leaves the directory"):
        read_index(_header_changed(tar, "storages", 345, b"elsewhere"))
    with pytest.raises(KeyError):
        torch.load(tar, weights_only=False)


def test_a_size_ends_at_its_first_zero(tar):
    """A number behind it is none to tarfile."""
    refused(_header_changed(tar, "tensors", 124, b"\0" + b"0000001000\0"), "impossible size")


def test_a_stream_that_is_a_tar_too_is_refused(path):
    """torch looks for a tar first, and for nothing of one but the sum of its header."""
    info = {"little_endian": True, "pad": "x" * 1000}
    write_legacy(path, {"w": legacy_tensor()}, head=(MAGIC, PROTOCOL, info))
    assert torchlift.open(path)["w"].tolist() == [[1, 2], [3, 4]]
    data = bytearray(path.read_bytes())
    data[124:136] = data[136:148] = b"00000000000\0"
    data[100:124], data[329:345] = b"0000644\0" * 3, b"0000000\0" * 2
    data[148:157] = b" " * 8 + b"0"
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    with tarfile.open(path) as archive:  # what torch takes it for
        assert archive.getnames()
    refused(path, "a tar archive, too")


def test_a_view_with_the_key_of_a_storage_is_refused(path):
    """torch keeps both in one table, where the first that has a key counts."""
    view = legacy_id(view=("1", 0, 2))
    tensor = legacy_tensor((2,), (1,), identity=view)
    other = legacy_tensor(identity=legacy_id("1"))
    storages = {"0": (4, VALUES), "1": (4, VALUES[::-1])}
    write_legacy(path, {"w": tensor, "v": other}, storages)
    assert refused(path, "a view of a storage has the key of a storage").entry == "1"

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
    write_legacy,
)
from damaged_files import refused

import torchlift
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.detect import read_index

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
    error = refused(
        path, "the size of a storage differs|a storage reaches past the end of the file"
    )
    assert error.entry == "0"


def test_a_huge_storage_is_refused_before_it_is_allocated(path):
    """Both agree on a size that the file does not have."""
    huge = legacy_tensor(identity=legacy_id(numel=2**60))
    write_legacy(path, {"w": huge}, {"0": (2**60, VALUES)})
    assert refused(path, "reaches past the end").entry == "0"


@pytest.mark.parametrize(
    ("keys", "match"),
    [(["0", "0"], "has this storage twice"), (["0", "9"], "no tensor uses"), ([], "is missing"),
     ({"0": 1}, "are not a list"), ([["0"]], "no tensor uses"), ([0], "no tensor uses")],
)  # fmt: skip
def test_storage_keys_that_are_not_those_of_the_tensors_are_refused(path, keys, match):
    """Twice, unknown, missing, or no keys at all."""
    write_legacy(path, {"w": legacy_tensor()}, keys=keys)
    refused(path, match)


@pytest.mark.parametrize(
    "view", [("v", 3, 2), ("v", 2**62, 2**62), ("v", 0), (["v"], 0, 4), "view"]
)
def test_a_view_of_a_storage_is_refused_whatever_it_says(path, view):
    """Nothing is computed with its numbers."""
    write_legacy(path, {"w": legacy_tensor((2,), (1,), identity=legacy_id(view=view))})
    assert refused(path, "a view of another storage").entry == "0"


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
    [((5,), (1,), 0, "outside its storage"), ((-1,), (1,), 0, "invalid size"),
     ((2,), (-1,), 1, "invalid stride"), ((2**40,), (0,), 0, "far larger"),
     ((2,), (1,), 2**62, "outside its storage"), ((1,) * 65, (1,) * 65, 0, "at most 64")],
)  # fmt: skip
def test_impossible_tensors_are_refused(path, size, stride, offset, match):
    """As in newer files."""
    write_legacy(path, {"w": legacy_tensor(size, stride, offset)})
    assert refused(path, match).entry == "w"


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
    refused(path, "a stream of pickles and a tar archive")

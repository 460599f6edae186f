"""One file, two readers: what torchlift shows of it is what torch.load reads, or it is refused."""

from __future__ import annotations

import collections
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    MAGIC,
    PROTOCOL,
    Call,
    StorageId,
    legacy_tensor,
    pickled,
    tensor,
    write_legacy,
    write_zip,
)
from damaged_files import refused
from second_readers import OWNERS, Refused, by_owner, differences, made, valid
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_parameter_with_state

import torchlift
from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.torch_pickle import ACTING

_END, _LOCATOR64, _END64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"


def _archive(directory: Path, fill: float) -> bytes:
    torch.save({"w": torch.full((4,), fill)}, directory / "a.pt")
    return (directory / "a.pt").read_bytes()


def _end(count: int, nbytes: int, start: int, comment: int = 0) -> bytes:
    return struct.pack("<4sHHHHIIH", _END, 0, 0, count, count, nbytes, start, comment)


def _end64(count: int, nbytes: int, start: int, at: int) -> bytes:
    return struct.pack(
        "<4sQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, nbytes, start
    ) + struct.pack("<4sIQI", _LOCATOR64, 0, at, 1)


def _two_in_one(directory: Path) -> tuple[bytes, tuple[int, int, int], tuple[int, int, int]]:
    """Two archives one behind the other without their ends, and where each one's directory is.

    The offsets in the second one's directory count from the start of the whole.
    """
    parts, places = b"", []
    for fill in (1.0, 2.0):
        data = bytearray(_archive(directory, fill))
        # Count, length and start of the directory, from the zip64 end record.
        count, nbytes, start = struct.unpack_from("<QQQ", data, data.rfind(_END64) + 32)
        header = start
        for _ in range(count):
            (offset,) = struct.unpack_from("<I", data, header + 42)
            struct.pack_into("<I", data, header + 42, offset + len(parts))
            header += 46 + sum(struct.unpack_from("<HHH", data, header + 28))
        places.append((count, nbytes, len(parts) + start))
        parts += data[: start + nbytes]
    return parts, places[0], places[1]


def _comment_that_does_not_fit(directory: Path) -> bytes:
    both, first, second = _two_in_one(directory)
    inner = _end(*second, comment=7)
    return both + _end(*first, comment=len(inner)) + inner


def _zip64_beside_full_numbers(directory: Path) -> bytes:
    both, first, second = _two_in_one(directory)
    return both + _end64(*second, at=len(both)) + _end(*first)


def _bytes_before(directory: Path) -> bytes:
    both, _, second = _two_in_one(directory)
    return both + _end(*second)


def _behind(directory: Path) -> bytes:
    return _archive(directory, 1.0) + b"behind"


def _names(directory: Path, *changes: tuple[bytes, bytes]) -> bytes:
    data = _archive(directory, 1.0)
    for old, new in changes:
        assert old in data
        data = data.replace(old, new)
    return data


def _other_case(directory: Path) -> bytes:
    """A second data.pkl, in capitals, with one name of the same length beside it."""
    path = directory / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, fill in (("DATA.PKL", 0), ("data.pkl", 1)):
            archive.writestr(
                f"a/{name}", pickled({"w": tensor(offset=fill, size=(1,), stride=(1,))})
            )
        archive.writestr("a/version", b"3")
        archive.writestr("a/data/0", struct.pack("<4f", 1, 2, 3, 4))
    return path.read_bytes()


def _folder(directory: Path) -> bytes:
    data = bytearray(_archive(directory, 1.0))
    data[data.rfind(b"a/data/0") - 46 + 38] |= 0x10
    return bytes(data)


POLYGLOTS = {
    "a comment that does not fit": (_comment_that_does_not_fit, "end with its end record"),
    "zip64 numbers beside others": (_zip64_beside_full_numbers, "two end records.*do not agree"),
    "an archive before the archive": (_bytes_before, "there are bytes before the first record"),
    "bytes behind": (_behind, "end with its end record"),
    "names that differ in case": (_other_case, "two records have the same name"),
    "a pickle in capitals": (
        lambda d: _names(d, (b"data.pkl", b"DATA.pkl")), "torch.save did not write"),
    "a byte order in capitals": (
        lambda d: _names(d, (b"byteorder", b"BYTEORDER")), "differs in case"),
    "a storage in capitals": (
        lambda d: _names(d, (b"a/data/0", b"a/DATA/0")), "storage of a tensor is missing"),
    "a zero byte": (lambda d: _names(d, (b"a/byteorder", b"a/byte\0rder")), "zero byte"),
    "a folder": (_folder, r"a record is a folder.*zip -0 -r -D"),
    "a name that is not UTF-8": (
        lambda d: _names(d, (b"a/byteorder", b"a/byte\xffrder")), "name of a record is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", POLYGLOTS)
def test_an_archive_that_shows_two_contents_is_refused(tmp_path: Path, name: str) -> None:
    """Each reads in one way by the letter of the format, and in another by some program."""
    make, match = POLYGLOTS[name]
    path = tmp_path / "x.pt"
    path.write_bytes(make(tmp_path))
    with pytest.raises(FormatError, match=match) as caught:
        read_index(path)
    assert str(caught.value).isprintable()


def test_a_stream_that_is_a_tar_too_is_refused(tmp_path: Path) -> None:
    """torch looks for a tar first, and for nothing of one but the sum of its header."""
    path = tmp_path / "old.pt"
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


def _tensor_pickle(key: bytes = b"0", kind: bytes = b"FloatStorage", offset: int = 0) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\n" + kind
        + b"\nX\1\0\0\0" + key + b"X\3\0\0\0cpuK\4tQ" + b"K%cK\1\x85K\1\x85\x89}tR" % offset
    )  # fmt: skip


_W = b"X\1\0\0\0w"
#: Pickles of which a reader that takes them at their word shows other weights.
CRAFTED = {
    "BUILD on a tensor": (
        b"\x80\2}" + _W + _tensor_pickle() + _tensor_pickle(offset=2) + b"\x85bs.",
        "gives a state to an object without one"),
    "two types of one storage": (
        b"\x80\2}(" + _W + _tensor_pickle() + b"X\1\0\0\0v" + _tensor_pickle(kind=b"IntStorage")
        + b"u.", "one storage is described in two ways"),
    "a class that is not called": (
        b"\x80\2}" + _W + b"ccollections\nOrderedDict\n](" + b"X\1\0\0\0a" + _tensor_pickle()
        + b"\x86e\x85\x81s.", "instead of a call"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_a_pickle_that_means_something_else_to_torch_is_refused(tmp_path: Path, name: str) -> None:
    """State for a tensor, a storage of two dtypes, and an object made without its constructor."""
    data, match = CRAFTED[name]
    numbers = struct.pack("<4f", 1, 2, 3, 4)
    path = write_zip(tmp_path / "x.pt", data=data, storages={"0": numbers})
    with pytest.raises(FormatError, match=match):
        read_index(path)


@pytest.mark.parametrize("name", ACTING)
def test_attributes_that_show_other_numbers_are_not_set(tmp_path: Path, name: str) -> None:
    """State with ``data`` in it replaces a tensor's values; such a tensor is listed as blocked."""
    parameter = Call(_rebuild_parameter_with_state, tensor(), True, collections.OrderedDict(),
                     {name: 1})  # fmt: skip
    typed = Call(_rebuild_from_type_v2, tensor.__globals__["_rebuild_tensor_v2"], torch.Tensor,
                 (StorageId("storage", torch.FloatStorage, "0", "cpu", 4), 0, (1,), (1,), False,
                  collections.OrderedDict()), ({"mine": 1}, {name: 1}))  # fmt: skip
    index = read_index(write_zip(tmp_path / "x.pt", {"p": parameter, "t": typed, "w": tensor()}))
    assert list(index.entries) == ["w"]
    assert sorted(index.blocked_keys) == ["p", "t"]


def test_all_attributes_that_act_are_known() -> None:
    """Of what can be set on a tensor of the installed torch, the rest shows no other numbers."""
    hidden = ("grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype")
    acting = []
    for name in dir(torch.Tensor):
        for value in (torch.full((2,), 7.0), True, None, ("N",)):
            made = torch.zeros(2)
            try:
                setattr(made, name, value)
                changed = not isinstance(made, torch.Tensor) or made.names != (None,)
                changed = changed or made.tolist() != [0, 0] or made.requires_grad
            except Exception:  # torch says so in many ways
                continue
            if changed and name not in (*ACTING, *hidden):
                acting.append(name)
    assert acting == []


# Pickles whose meaning depends on when or how something is looked at: name -> opcodes. ------------


def _rebuilt(size: bytes = b"K\1\x85", metadata: bytes = b"", kind: bytes = b"Float") -> bytes:
    """A tensor over the only storage, of eight bytes' worth of elements or fewer."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\n" + kind + b"Storage\n"
        b"X\1\0\0\0" + b"0X\3\0\0\0cpuK\4tQK\0" + size + b"K\1\x85\x89"
        b"ccollections\nOrderedDict\n)R" + metadata + b"tR"
    )  # fmt: skip


def _key(name: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(name)) + name


_LIST = b"](K\4eq\1"  # [4], remembered
_MORE = b"h\1(K\4e"  # the same list, with a 4 more
_SIZES = _rebuilt().replace(b"K\1\x85K\1\x85", _LIST + b"](K\1eq\2")
_LATER = {
    "sizes and strides that grow after the call": (
        b"(" + _key(b"w") + _SIZES + _key(b"s") + _MORE + _key(b"t") + b"h\2(K\4eu", "both"),
    "attributes that are set after the call": (
        b"(" + _key(b"w") + b"ctorch._utils\n_rebuild_parameter_with_state\n(" + _rebuilt()
        + b"\x89ccollections\nOrderedDict\n)R}q\3tR" + _key(b"s") + b"h\3" + _key(b"data")
        + b"K\1su", "both"),
    "an OrderedDict whose pairs grow after the call": (
        b"(" + _key(b"w") + b"ccollections\nOrderedDict\n](" + _key(b"a") + _rebuilt()
        + b"\x86eq\4\x85R" + _key(b"s") + b"h\4(" + _key(b"b") + b"K\1\x86eu", "both"),
    "metadata that says no": (
        b"(" + _key(b"w") + _rebuilt(metadata=b"}" + _key(b"neg") + b"\x89s") + b"u", "both"),
    "metadata that says no to a conjugate": (
        b"(" + _key(b"w") + _rebuilt(metadata=b"}" + _key(b"conj") + b"\x89s",
                                     kind=b"ComplexFloat") + b"u", "both"),
    "metadata that grows after the call": (
        b"(" + _key(b"w") + _rebuilt(metadata=b"}q\5") + _key(b"m") + b"h\5" + _key(b"neg")
        + b"\x88su", "both"),
    "an OrderedDict whose state replaces a method": (
        _key(b"o") + b"ccollections\nOrderedDict\n)R}" + _key(b"keys") + b"Nsbs", "refused"),
    "an OrderedDict with attributes": (
        _key(b"o") + b"ccollections\nOrderedDict\n)R}" + _key(b"version") + b"K\1sbs", "both"),
    "an octal number": (_key(b"n") + b"I010\ns", "neither"),
    "a hexadecimal number": (_key(b"n") + b"I0x10\ns", "neither"),
    "a place in the memo that is negative": (_key(b"n") + b"p-1\nNs", "neither"),
    "a device beside the text that names it": (
        b"(" + _key(b"l") + b"](}(" + _key(b"cpu") + b"K\1ctorch\ndevice\n" + _key(b"cpu")
        + b"\x85RK\2ueu", "both"),
    "gradients of whole numbers": (
        b"(" + _key(b"w") + _rebuilt(kind=b"Int").replace(b"\x89", b"\x88") + b"u", "neither"),
    "fewer arguments than it takes": (
        _key(b"w") + _rebuilt().replace(b"\x89ccollections\nOrderedDict\n)R", b"") + b"s",
        "neither"),
    "a type that makes a tensor a parameter": (
        _key(b"w") + b"ctorch._tensor\n_rebuild_from_type_v2\n("
        + _rebuilt()[:-2].replace(b"v2\n(", b"v2\nctorch.nn.parameter\nParameter\n(", 1)
        + b"t}tRs", "both"),
}  # fmt: skip


@pytest.mark.parametrize("name", _LATER)
def test_a_pickle_means_what_it_means_to_torch(tmp_path: Path, name: str) -> None:
    """What a call was given is what it was at the call; what decides is what decides for torch."""
    opcodes, expected = _LATER[name]
    kind = 8 if b"ComplexFloat" in opcodes else 4
    numbers = struct.pack("<8f", *range(1, 9))[: 4 * kind]
    path = write_zip(tmp_path / "x.pt", data=b"\x80\2}" + opcodes + b".", storages={"0": numbers})
    assert differences("torch-zip", path) == (expected, [])


#: Format -> files of it that each test run compares; what takes long to read is compared less.
_COUNTS = {
    "programs": 500, "legacy programs": 250, "torch-zip": 300,
    "torch-legacy": 150, "torchscript": 30, "safetensors": 300,
    "npz": 100, "npy": 200,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what torch says of its own formats
@pytest.mark.parametrize("name", OWNERS)
def test_the_owner_of_a_format_reads_the_same(tmp_path: Path, name: str) -> None:
    """Random pickles, and files with something changed: the same from both readers, or refused."""
    seeds = valid(name, tmp_path)
    place = tmp_path / "opened"
    place.mkdir()
    verdicts = collections.Counter[str]()
    for seed in range(_COUNTS[name]):
        verdict, found = differences(name, made(name, seed, place, seeds))
        assert not found, f"{name} {seed}: {found}"
        verdicts[verdict] += 1
    assert verdicts["both"] > _COUNTS[name] / 20


def test_the_readers_that_are_compared_do_differ_where_files_do(tmp_path: Path) -> None:
    """A comparison that finds nothing ever is none: here it is asked of two other files."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OWNERS, "torch-zip", lambda path: {"w": torch.zeros(2)})
        assert differences("torch-zip", tmp_path / "x")[0] == "different"
    with pytest.raises(Refused):
        by_owner("torch-zip", tmp_path / "none")


def test_metadata_that_contains_itself_is_refused_by_its_tree(tmp_path: Path) -> None:
    """It is beside the items of an OrderedDict, where nobody looks for containers."""
    inner = b"}q\x09" + _key(b"a") + b"h\x09s"
    state = b"}" + _key(b"_metadata") + inner + b"sb"
    data = b"\x80\2}" + _key(b"o") + b"ccollections\nOrderedDict\n)R" + state + b"s."
    ckpt = torchlift.open(write_zip(tmp_path / "x.pt", data=data))
    with ckpt, pytest.raises(FormatError, match="contain themselves"):
        ckpt.tree()

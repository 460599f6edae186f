"""Small files that ask for much: each is read or refused in proportion to its own bytes.

`guarded.answers` fails where it takes more, in calls or in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    write_safetensors,
    write_zip,
)
from dcp_files import describe, write_dcp
from guarded import answers
from pickle_programs import colliding_pairs
from rank_files import Era
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from torchlift.formats.detect import read_index

pytestmark = pytest.mark.slow


# Pickles ------------------------------------------------------------------------------------------


def _text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def _int(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _again(function: str, argument: bytes, times: int = 5_000, call: bytes = b"h\1h\0\x85R"):
    """A list of the results of one function, called again and again with one argument."""
    module, name = function.rsplit(".", 1)
    head = argument + b"q\x000c" + f"{module}\n{name}\n".encode() + b"q\x010"
    return head + b"](" + call * times + b"e."


_MANY = b"(" + b"".join(map(_int, range(10_000)))
_LONG = _text(b"x" * 200_000)
_PAIRS = b"](" + b"".join(_int(i) + b"N\x86" for i in range(10_000)) + b"e"
_DICT = _MANY + b"d"


#: A tuple of 64 tuples of 64 tuples of 64 leaves, a few hundred bytes long; memo 9.
_HEAVY = b"Nq\x070" + b"(" + b"h\x07" * 64 + b"tq\x080(" + b"h\x08" * 64 + b"tq\x090"


#: A quantised tensor whose scales are a list of 10,000 numbers, made again and again.
_SCALES = (
    b"ctorch._utils\n_rebuild_qtensor\nq\x010(X\7\0\0\0storagectorch\nQInt8Storage\nX\1\0\0\x000"
    b"X\3\0\0\0cpuK\x10tQq\x020" + _MANY + b"lq\x030"
)
_WITH_SCALES = b"h\1(h\2K\0K\x10\x85K\1\x85(ctorch\nper_channel_affine\nh\3h\3K\0t\x89NtR"


PICKLES: dict[str, Callable[[], bytes]] = {
    "scales": lambda: _SCALES + b"](" + _WITH_SCALES * 2_000 + b"e.",
    "encode": lambda: _again("_codecs.encode", _LONG),
    "bytearray": lambda: _again("builtins.bytearray", b"B" + _LONG[1:]),
    "bytes": lambda: _again("builtins.bytes", _LONG, call=b"(h\1h\0X\6\0\0\0latin1o"),
    "set": lambda: _again("builtins.set", _MANY + b"t"),
    "frozenset": lambda: _again("builtins.frozenset", _MANY + b"l"),
    "OrderedDict": lambda: _again("collections.OrderedDict", _PAIRS),
    "Size": lambda: _again("torch.Size", _MANY + b"l"),
    "Counter": lambda: _again("collections.Counter", _DICT),
    "defaultdict": lambda: _again("collections.defaultdict", _DICT, call=b"h\1Nh\0\x86R"),
    "slice": lambda: _again("builtins.slice", _MANY + b"t", call=b"h\1h\0R"),
    "device": lambda: _again("torch.device", _LONG),
    "numpy code": lambda: _again("numpy.dtype", _text(b"<" * 200_000)),
    "metadata of a tensor": lambda: (
        b"ctorch._utils\n_rebuild_tensor_v2\nq\x010(X\7\0\0\0storagectorch\nFloatStorage\n"
        b"X\1\0\0\x000X\3\0\0\0cpuK\4tQq\x020(" + b"".join(
            _int(i) + b"N" for i in range(10_000)) + b"dq\x030]("
        + b"h\1(h\2K\0))\x89Nh\3tR" * 5_000 + b"e."),
    "colliding tuples": lambda: b"}(" + b"".join(
        _int(a) + _int(b) + b"\x86N" for a, b in colliding_pairs(20_000)) + b"u.",
    "a heavy key": lambda: _HEAVY + b"](" + b"}h\x09Ns" * 5_000 + b"e.",
    "empty lists": lambda: b"](" + b"]" * 300_000 + b"e.",
    "objects that are thrown away": lambda: b"}0" * 300_000 + b"N.",
    "a memo of millions": lambda: b"N" + b"\x94" * 300_000 + b".",
    "one list a million times": lambda: b"](" + b"N" * 1_000 + b"eq\0" + b"0](" + b"h\0" * 300_000
        + b"e.",
    "one text a thousand times": lambda: _LONG + b"q\x000](" + b"h\0" * 10_000 + b"e.",
    "one text under many keys": lambda: _LONG + b"q\x000}(" + b"".join(
        _int(i) + b"h\0" for i in range(10_000)) + b"u.",
    "versions of many dicts": lambda: b"}X\x09\0\0\0_metadata}X\1\0\0\0a}(" + b"".join(
        _int(i) + b"N" for i in range(3_000)) + b"ussq\x000}(" + b"".join(
        _int(i) + b"ccollections\nOrderedDict\n)Rh\0b" for i in range(3_000)) + b"u.",
}  # fmt: skip


def _in_zip(directory: Path, data: bytes) -> Path:
    return write_zip(directory / "stored.pt", data=data)


def _as_item(directory: Path, data: bytes) -> Path:
    """A distributed checkpoint with one object, which is that pickle."""
    item = write_zip(directory / "item", data=data).read_bytes()
    (directory / "item").unlink()
    return write_dcp(directory / "item.dcp", {"x": BytesStorageMetadata()}, {"x": item})


def _as_metadata(directory: Path, data: bytes) -> Path:
    (directory / "metadata.dcp").mkdir()
    (directory / "metadata.dcp" / ".metadata").write_bytes(data)
    return directory / "metadata.dcp"


#: Those that are tried in every place where a format has a pickle.
_EVERYWHERE = (
    "encode", "set", "colliding tuples", "a heavy key", "empty lists", "a memo of millions",
)  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_costs_in_proportion_to_its_bytes(tmp_path: Path, name: str) -> None:
    """In a torch file, as an object of a directory, and as its metadata."""
    places = [_in_zip] + [_as_item, _as_metadata] * (name in _EVERYWHERE)
    paths = [make(tmp_path, PICKLES[name]()) for make in places]
    assert len(answers(*paths)) == len(paths)


# Directories --------------------------------------------------------------------------------------


def test_an_item_is_read_for_one_name_only(tmp_path: Path) -> None:
    """A thousand names, or chunks, of one item would be a thousand tensors."""
    torch.save(torch.ones(1000, 100), tmp_path / "i")
    item = (tmp_path / "i").read_bytes()
    box = ((0, 0), (1000, 100))
    keys = [f"k{at}" for at in range(1_000)]
    one = _StorageInfo("__0_0.distcp", 0, len(item))
    names = write_dcp(
        tmp_path / "names", {key: describe(box[1], box) for key in keys}, {"k0": item},
        {MetadataIndex(key, (0, 0)): one for key in keys},
    )  # fmt: skip
    boxes = [((1000 * at, 0), box[1]) for at in range(1_000)]
    chunks = write_dcp(
        tmp_path / "chunks", {"k0": describe((1_000_000, 100), *boxes)}, {"k0": item},
        {MetadataIndex("k0", start): one for start, _ in boxes},
    )  # fmt: skip
    assert all("two items overlap in the file" in answer.text for answer in answers(names, chunks))


def _many_corners(path: Path) -> Path:
    """A box of forty dimensions has 2**40 corners."""
    shape, half = (2,) * 40, ((0,) * 40, (1,) + (2,) * 39)
    boxes = [half, *(((1,) * at + (0,) * (40 - at), (1,) * 40) for at in range(1, 40))]
    boxes.append(((0,) * 40, shape))
    stored = {("w", torch.Size(start)): b"x" for start, _ in boxes}
    return write_dcp(path / "d", {"w": describe(shape, *boxes)}, stored)


def _shared_chunks(path: Path) -> Path:
    """One list of ten thousand chunks in ten thousand tensors."""
    tensors = {f"k{at}": describe((10_000,)) for at in range(10_000)}
    chunks = describe((10_000,), *(((at,), (1,)) for at in range(10_000))).chunks
    for each in tensors.values():
        each.chunks = chunks
    return write_dcp(path / "d", tensors, {})


def _many_descriptors(path: Path) -> Path:
    """An error names the first few transforms of an item, clipped."""
    named = _StorageInfo("__0_0.distcp", 0, 0, ["z" * 100_000] * 100_000)
    box = describe((1,), ((0,), (1,)))
    return write_dcp(path / "d", {"w": box}, {}, {MetadataIndex("w", (0,)): named})


PAID = "expands to far more data than it stores"
PLACES: list[tuple[Callable[[Path], Path], str]] = [
    (_many_corners, PAID),
    (_shared_chunks, PAID),
    (_many_descriptors, "a writer transformed"),
    # A path of two long texts, made thousands of times.
    (
        lambda path: _as_metadata(path, _again("pathlib.PosixPath", _LONG, call=b"h\1h\0h\0\x86R")),
        PAID,
    ),
]


@pytest.mark.parametrize(("make", "words"), PLACES)
def test_what_asks_for_much_is_paid_for(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    """By the bytes of the files, whatever is said of them."""
    ((_, _, answer),) = answers(make(tmp_path))
    assert words in answer


def test_one_shard_is_read_once_however_it_is_spelled(tmp_path: Path) -> None:
    """By dots and slashes, by links, by hard links: a thousand names of one file."""
    header = {f"k{at}": {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
              for at in range(1_200)}  # fmt: skip
    write_safetensors(tmp_path / "a", header, bytes(1_200))
    (tmp_path / "inside").symlink_to(tmp_path)
    names = ["./" * at + "a" for at in range(1_000)]
    for at in range(100):
        os.link(tmp_path / "a", tmp_path / f"hard{at}")
        names += [f"hard{at}", "inside/" * (at % 30) + "a"]
    index = tmp_path / "x.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(header, names, strict=True))}))
    ((_, _, answer),) = answers(index)
    assert answer == "read"
    assert len(read_index(index).storages) == len(header)


def _zero(
    path: Path,
    shapes: list[dict[str, tuple[int, ...]]],
    vectors: list[torch.Tensor],
    world: int = 20,
) -> Path:
    """A ZeRO directory of stage 3, in which every rank has these vectors."""
    path.mkdir()
    module = {"module": {"b": torch.ones(1)}, "param_shapes": shapes, "buffer_names": ["b"]}
    torch.save(module, path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    optimizer = {"fp32_flat_groups": vectors, "partition_count": world}
    for rank in range(world):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path / name)
    return path


def test_a_parameter_in_many_ranks_costs_in_proportion_to_their_bytes(tmp_path: Path) -> None:
    """Three thousand parameters on twenty ranks; one vector a hundred times is refused."""
    names = {f"k{at}": (20,) for at in range(3_000)}
    true = _zero(tmp_path / "true", [names], [torch.zeros(3_000)])
    more, alias = {f"k{at}": (20,) for at in range(24_000)}, torch.zeros(240)
    false = _zero(tmp_path / "false", [more], [alias.view(-1) for _ in range(100)])
    first, second = answers(true, false)
    assert first.kind == "Index"
    assert "expands to far more data than it stores" in second.text


def _dtensors(era: Era, path: Path, count: int, placements: object, mesh: tuple[int, ...]) -> Path:
    """A file with many DTensors of one layout, each of which is one object of the pickle."""
    local = torch.zeros(1 << 16, 1)
    made = [era.dtensor(local, (1 << 20, 1), [], mesh, [0] * len(mesh)) for _ in range(count)]
    (parts,) = (each for each in made[0].reduced[1][3] if each)
    parts["_spec"].reduced[2]["placements"] = placements
    for each in made:
        each.reduced[1][3][1].update(parts)
    return era.save(path, {f"k{at}": each for at, each in enumerate(made)})


def test_layouts_of_dtensors_cost_in_proportion_to_their_bytes(tmp_path: Path) -> None:
    """Blocks without end, one layout for many, one tensor of many names."""
    era = Era()
    many, some = (era.placed("_StridedShard", dim=0, split_factor=n) for n in (1 << 50, 1 << 12))
    one = era.dtensor(torch.zeros(2), (4,), [era.placed("Shard", dim=0)], [2], [0])
    paths = [
        _dtensors(era, tmp_path / "blocks.pt", 1, (many,), (2,)),
        _dtensors(era, tmp_path / "blocks of blocks.pt", 2, (some, some), (2, 2)),
        _dtensors(era, tmp_path / "blocks for many.pt", 1_000, (some,), (2,)),
        era.save(tmp_path / "names.pt", dict.fromkeys(map(str, range(100_000)), one)),
    ]
    for path, answer in zip(paths, answers(*paths), strict=True):
        assert PAID in answer.text, path


def test_absurd_numbers_of_ranks_are_refused_at_once(tmp_path: Path) -> None:
    """As the name of a file, and in a file."""
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp" / "model_world_size_999999999_rank_0.pt").write_bytes(b"x")
    named, told = (
        _zero(tmp_path / name, [{"w": (2,)}], [torch.zeros(1)], world=2) for name in "ab"
    )
    (named / "zero_pp_rank_999999999_mp_rank_00_optim_states.pt").write_bytes(b"x")
    other = {"partition_count": 10**15, "fp32_flat_groups": [torch.zeros(1)]}
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": other}, told / name)
    first, second, third = answers(tmp_path / "fsdp", named, told)
    assert "rank's files are missing" in first.text
    assert "expected 1,000,000,000 files; found 3, without zero_pp_rank_2_" in second.text
    assert "found 2, without zero_pp_rank_2_" in third.text

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
    Call,
    pickled,
    tensor,
    write_safetensors,
    write_script,
    write_zip,
)
from dcp_files import describe, write_dcp
from guarded import answers
from pickle_programs import colliding_pairs
from rank_files import Era
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import torchlift
from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.unpickle import Budget

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


def _heavy_key(leaf: bytes) -> bytes:
    """A tuple of 64 tuples of 64 tuples of 64 leaves, a few hundred bytes long; memo 9."""
    return leaf + b"q\x07" + b"0(" + b"h\x07" * 64 + b"tq\x080(" + b"h\x08" * 64 + b"tq\x090"


#: A quantised tensor whose scales are a list of 10,000 numbers, made again and again.
_SCALES = (
    b"ctorch._utils\n_rebuild_qtensor\nq\x010(X\7\0\0\0storagectorch\nQInt8Storage\nX\1\0\0\x000"
    b"X\3\0\0\0cpuK\x10tQq\x020" + _MANY + b"lq\x030"
)
_WITH_SCALES = b"h\1(h\2K\0K\x10\x85K\1\x85(ctorch\nper_channel_affine\nh\3h\3K\0t\x89NtR"


PICKLES: dict[str, Callable[[], bytes]] = {
    "scales": lambda: _SCALES + b"](" + _WITH_SCALES * 2_000 + b"e.",
    "scales under many keys": lambda: _SCALES + _WITH_SCALES + b"q\x040](" + b"h\4" * 5_000 + b"e.",
    "what blocked objects hold": lambda: _MANY + b"lq\x000cno\nclass\nq\x010](" + b"h\1h\0\x85R"
        * 5_000 + b"e.",
    "a sparse tensor under many keys": lambda: b"ctorch._utils\n_rebuild_sparse_tensor\n("
        b"X\x10\0\0\0torch.sparse_coo(" + pickled(tensor())[2:-1] + b"q\x630h\x63h\x63("
        + b"K\2" * 64 + b"tttRq\x630](" + b"h\x63" * 100_000 + b"e.",
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
    "call in a call": lambda: (
        b"ctorch._tensor\n_rebuild_from_type_v2\nq\1" + b"(h\1N" * 900 + b")" + b"Nt" * 900
        + b"R."),
    "complex keys": lambda: b"](" + b"".join(
        b"cbuiltins\ncomplex\nG" + struct.pack(">d", -1000003.0 * i) + b"G"
        + struct.pack(">d", float(i)) + b"\x86RN\x86" for i in range(20_000)) + b"eq\0"
        + b"0ccollections\nOrderedDict\nh\0\x85R.",
    "colliding tuples": lambda: b"}(" + b"".join(
        _int(a) + _int(b) + b"\x86N" for a, b in colliding_pairs(20_000)) + b"u.",
    "colliding items of a set": lambda: b"\x8f(" + b"".join(
        _int(a) + _int(b) + b"\x86" for a, b in colliding_pairs(20_000)) + b"\x90.",
    "a heavy key": lambda: _heavy_key(b"N") + b"](" + b"}h\x09Ns" * 5_000 + b"e.",
    "a heavy key of text": lambda: _heavy_key(_text(b"y" * 5_000)) + b"}h\x09Ns.",
    "the text of a heavy key": lambda: _heavy_key(_text(b"y" * 60)) + b"](" + b"}h\x09}h\x09Nss"
        * 300 + b"e.",
    "empty lists": lambda: b"](" + b"]" * 300_000 + b"e.",
    "empty dicts": lambda: b"](" + b"}" * 300_000 + b"e.",
    "empty sets": lambda: b"](" + b"\x8f" * 300_000 + b"e.",
    "objects that are thrown away": lambda: b"}0" * 300_000 + b"N.",
    "a memo of millions": lambda: b"N" + b"\x94" * 300_000 + b".",
    "one list a million times": lambda: b"](" + b"N" * 1_000 + b"eq\0" + b"0](" + b"h\0" * 300_000
        + b"e.",
    "an empty list a million times": lambda: b"]q\x000](" + b"h\0" * 300_000 + b"e.",
    "one tensor a million times": lambda: pickled(tensor())[2:-1] + b"q\x630](" + b"h\x63" * 300_000
        + b"e.",
    "one text a thousand times": lambda: _LONG + b"q\x000](" + b"h\0" * 10_000 + b"e.",
    "one text under many keys": lambda: _LONG + b"q\x000}(" + b"".join(
        _int(i) + b"h\0" for i in range(10_000)) + b"u.",
    "one dict under many keys": lambda: b"}(" + b"".join(
        _int(i) + b"N" for i in range(3_000)) + b"uq\x000}(" + b"".join(
        _int(i) + b"h\0" for i in range(3_000)) + b"u.",
    "a long key above many": lambda: b"}" + _LONG + b"}(" + b"".join(
        _int(i) + b"N" for i in range(10_000)) + b"us.",
    "versions of many dicts": lambda: b"}X\x09\0\0\0_metadata}X\1\0\0\0a}(" + b"".join(
        _int(i) + b"N" for i in range(3_000)) + b"ussq\x000}(" + b"".join(
        _int(i) + b"ccollections\nOrderedDict\n)Rh\0b" for i in range(3_000)) + b"u.",
    "a name in versions": lambda: b"}X\x09\0\0\0_metadata}X\1\0\0\0a}" + _heavy_key(
        _text(b"z" * 5_000)) + b"h\x09Nsssq\x060"
        b"ccollections\nOrderedDict\n)Rh\x06b.",
    "extra states": lambda: b"}(" + b"".join(
        _int(i) + b"N" for i in range(3_000)) + b"uq\x000}(" + b"".join(
        _text(b"m%d._extra_state" % i) + b"h\0" for i in range(3_000)) + b"u.",
    "a storage tag": lambda: b"ctorch._utils\n_rebuild_tensor_v2\nq\x010(X\7\0\0\0storagectorch\n"
        b"FloatStorage\nX\1\0\0\x000" + _LONG + b"K\4tQq\x020](" + b"h\1(h\2K\0))\x89NtR" * 20_000
        + b"e.",
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
    "encode",
    "set",
    "colliding tuples",
    "a heavy key",
    "empty lists",
    "a memo of millions",
)


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_costs_in_proportion_to_its_bytes(tmp_path: Path, name: str) -> None:
    """In a torch file, as an object of a directory, and as its metadata."""
    places = [_in_zip] + [_as_item, _as_metadata] * (name in _EVERYWHERE)
    paths = [make(tmp_path, PICKLES[name]()) for make in places]
    assert len(answers(*paths)) == len(paths)


# Directories --------------------------------------------------------------------------------------


def _stored(path: Path, value: object) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


def test_an_item_is_read_for_one_name_only(tmp_path: Path) -> None:
    """A thousand names, or chunks, of one item would be a thousand tensors."""
    item = _stored(tmp_path / "i", torch.ones(1000, 100))
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


def test_a_broadcast_item_is_refused(tmp_path: Path) -> None:
    """A box over one number (stride 0) would make a tensor of 8 GiB out of 1.5 KB."""
    view = pickled({"w": tensor((1 << 15, 1 << 15), (0, 0), numel=1)}["w"])
    item = write_zip(tmp_path / "i", data=view, storages={"0": bytes(4)}).read_bytes()
    halves = [((at << 15, 0), (1 << 15, 1 << 15)) for at in range(2)]
    path = write_dcp(
        tmp_path / "d", {"w": describe((1 << 16, 1 << 15), *halves)},
        {("w", start): item for start, _ in halves},
    )  # fmt: skip
    with pytest.raises(
        FormatError, match=r"an item does not store its numbers.*4294967296 bytes.*found 4 bytes"
    ):
        torchlift.open(path)


def _nested_corners(size: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rows and columns that bend around each other: half of all boxes are open at any place."""
    rows = [((at, at), (1, size - at)) for at in range(size)]
    columns = [((at + 1, at), (size - at - 1, 1)) for at in range(size - 1)]
    return rows + columns


def test_thousands_of_chunks_are_not_compared_in_pairs(tmp_path: Path) -> None:
    """Nor is anything else looked at once for each pair, whatever the boxes are."""
    boxes = _nested_corners(3_000)
    stored = {("w", torch.Size(start)): b"x" for start, _ in boxes}
    fitting = write_dcp(tmp_path / "fitting", {"w": describe((3_000, 3_000), *boxes)}, stored)
    (start, sizes) = boxes[10]
    wrong = [*boxes[:10], ((start[0] + 1, start[1]), sizes), *boxes[11:]]
    stored = {("w", torch.Size(start)): b"x" for start, _ in wrong}
    other = write_dcp(tmp_path / "other", {"w": describe((3_000, 3_000), *wrong)}, stored)
    one = {("w", torch.Size((0,) * 40)): b"x"}
    shape = (3,) * 2 + (1,) * 38
    corners = write_dcp(tmp_path / "corners", {"w": describe(shape, ((0,) * 40, (1,) * 40))}, one)
    first, second, third = (found.text for found in answers(fitting, other, corners))
    assert "overlap" not in first, "they fit, and no item is one"
    assert "missing" not in first
    assert "two pieces of a tensor overlap" in second
    assert "pieces of a tensor are missing" in third


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


def _shared_attributes(path: Path) -> Path:
    """Of a script: one dict is the state of thousands of objects, each of which copies it."""
    state = b"}(" + b"".join(_int(at) + b"N" for at in range(10_000)) + b"uq\x000"
    data = b"\x80\x02" + state + b"c__torch__\nM\nq\x010](" + b"h\1)\x81h\0b" * 20_000 + b"e."
    return write_script(path / "x", None, data=data)


PAID = "expands to far more data than it stores"
PLACES: list[tuple[Callable[[Path], Path], str]] = [
    (_many_corners, PAID), (_shared_chunks, PAID), (_shared_attributes, PAID),
    (_many_descriptors, "a writer transformed"),
    # A path of two long texts, made thousands of times.
    (lambda path: _as_metadata(
        path, _again("pathlib.PosixPath", _LONG, call=b"h\1h\0h\0\x86R")), PAID),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), PLACES)
def test_what_asks_for_much_is_paid_for(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    """By the bytes of the files, whatever is said of them."""
    ((_, _, answer),) = answers(make(tmp_path))
    assert words in answer


def test_one_shard_is_read_once_however_it_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By dots and slashes, by links, by hard links: two thousand names of one file."""
    header = {f"k{at}": {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
              for at in range(3_000)}  # fmt: skip
    write_safetensors(tmp_path / "a", header, bytes(3_000))
    (tmp_path / "inside").symlink_to(tmp_path)
    names = ["./" * at + "a" for at in range(1_000)] + [
        "." + "/" * at + "a" for at in range(1, 900)
    ]
    for at in range(100):
        os.link(tmp_path / "a", tmp_path / f"hard{at}")
        names += [f"hard{at}", "inside/" * (at % 30) + "a"]
    index = {"weight_map": dict(zip(header, names, strict=False))}
    (tmp_path / "x.index.json").write_text(json.dumps(index))
    ((_, _, answer),) = answers(tmp_path / "x.index.json")
    assert answer == "read"
    opened: list[str] = []
    true = open
    monkeypatch.setattr(
        "builtins.open", lambda file, *a, **k: opened.append(str(file)) or true(file, *a, **k)
    )
    found = read_index(tmp_path / "x.index.json")
    monkeypatch.undo()
    assert list(found.entries) == list(header)
    assert len(found.storages) == len(header)
    assert sum(not name.endswith(".json") for name in opened) == 1


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
    """Blocks without end, dimensions without end, one layout for many, one tensor of many names."""
    era = Era()
    shard, replica = era.placed("Shard", dim=0), era.placed("Replicate")
    many = [era.placed("_StridedShard", dim=0, split_factor=n) for n in (1 << 50, 1 << 19, 1 << 12)]
    paths = {
        "blocks": _dtensors(era, tmp_path / "a.pt", 1, (many[0],), (2,)),
        "fewer": _dtensors(era, tmp_path / "b.pt", 1, (many[1],), (2,)),
        "blocks of blocks": _dtensors(era, tmp_path / "c.pt", 2, (many[2], many[2]), (2, 2)),
        "blocks for many": _dtensors(era, tmp_path / "d.pt", 1_000, (many[2],), (2,)),
        "placements": _dtensors(era, tmp_path / "e.pt", 1_000, (replica,) * 100_000, (2,)),
        "dimensions": _dtensors(
            era, tmp_path / "f.pt", 1_000, (shard, *[replica] * 63), (16, *[1] * 63)
        ),
    }
    one = era.dtensor(torch.zeros(2), (4,), [shard], [2], [0])
    paths["names"] = era.save(tmp_path / "g.pt", dict.fromkeys(map(str, range(100_000)), one))
    found = dict(zip(paths, answers(*paths.values()), strict=True))
    for name in ("blocks", "fewer", "blocks of blocks", "blocks for many", "names"):
        assert "expands to far more data than it stores" in found[name].text, name
    for name in ("placements", "dimensions"):
        assert found[name].kind == "Index" or "expands to far more" in found[name].text, name


def test_absurd_names_of_slices_are_refused_at_once(tmp_path: Path) -> None:
    """Numbers of ranks and of files that nobody has."""
    for at, name in enumerate((
        "model_world_size_999999999_rank_0.pt", "shard-00001-model-00001-of-999999999.safetensors",
        "shard-999999999-model-00001-of-00001.safetensors",
    )):  # fmt: skip
        (tmp_path / str(at)).mkdir()
        (tmp_path / str(at) / name).write_bytes(b"x")
    for answer in answers(*(tmp_path / str(at) for at in range(3))):
        assert "rank's" in answer.text  # files are missing, or one rank's slices are not all


def test_absurd_numbers_of_ranks_are_refused_at_once(tmp_path: Path) -> None:
    """As the name of a file, and in a file."""
    named = _zero(tmp_path / "named", [{"w": (2,)}], [torch.zeros(1)], world=2)
    (named / "zero_pp_rank_999999999_mp_rank_00_optim_states.pt").write_bytes(b"x")
    told = _zero(tmp_path / "told", [{"w": (2,)}], [torch.zeros(1)], world=2)
    other = {"partition_count": 10**15, "fp32_flat_groups": [torch.zeros(1)]}
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": other}, told / name)
    first, second = answers(named, told)
    assert "expected 1,000,000,000 files; found 3, without zero_pp_rank_2_" in first.text
    assert "found 2, without zero_pp_rank_2_" in second.text


def test_what_people_save_is_far_below_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models, optimizers, plain data of every protocol: less than half of what their bytes give."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(50)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "history": [{"step": at, "loss": at / 3, "tags": [], "more": {}} for at in range(5_000)],
        "numbers": list(range(100_000)), "none": [None] * 100_000,
        "keys": {(at, "a"): (at,) for at in range(5_000)}, "set": set(range(5_000)),
    }  # fmt: skip
    budgets: list[Budget] = []
    grow = Budget.grow
    monkeypatch.setattr(Budget, "grow", lambda b, n: (budgets.append(b), grow(b, n))[1])
    for protocol in (2, 4):
        for name, state in states.items():
            path = tmp_path / f"{name}{protocol}.pt"
            torch.save(state, path, pickle_protocol=protocol)
            budgets.clear()
            read_index(path)
            whole = Budget(path.stat().st_size).left
            assert budgets[0].left > whole / 2, (name, protocol, budgets[0].left / whole)


def test_a_call_is_what_it_was_when_it_was_made(tmp_path: Path) -> None:
    """The net below the tests of pickles: they are not all refused for being malformed."""
    path = write_zip(tmp_path / "x.pt", {"a": Call(bytearray, b"x" * 9), "b": torch.Size([1])})
    assert read_index(path).objects == {"a": bytearray(b"x" * 9), "b": (1,)}

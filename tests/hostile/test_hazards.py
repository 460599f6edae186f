"""Bad inputs of every format and kind, each read by a child under guard: who says what, and where.

The child (`guarded.answers`) fails where anything is imported, run or opened besides the file, and
where reading takes more steps or memory than the size of a file allows.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    MAGIC,
    Call,
    Script,
    TarId,
    gguf_bytes,
    legacy_id,
    legacy_tensor,
    npy_bytes,
    pickled,
    tar_members,
    tensor,
    weight,
    write_legacy,
    write_program,
    write_safetensors,
    write_script,
    write_tar,
    write_zip,
)
from dcp_files import describe, write_dcp
from guarded import Answer, answers
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

RUN = Call(os.system, "touch torchlift-was-here")
LONG = "\x1b[2J\x07\r\u202e" + "n" * 5_000

Make = Callable[[Path], Path]


def put(content: bytes) -> Make:
    """A file with this content."""

    def make(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return make


def cut(make: Make, keep: int) -> Make:
    """The first bytes of another file; with a negative number, all but the last ones."""
    return lambda path: put(make(path).read_bytes()[:keep])(path)


def changed(make: Make, old: bytes, new: bytes, last: bool = False) -> Make:
    """Another file with some bytes replaced, where they come first or last."""

    def replaced(path: Path) -> Path:
        data = make(path).read_bytes()
        at = data.rfind(old) if last else data.find(old)
        assert at >= 0
        return put(data[:at] + new + data[at + len(old) :])(path)

    return replaced


def zipped(obj: object = None, **rest: Any) -> Make:
    return lambda path: write_zip(path, obj, **rest)


def script(root: object = None, **rest: Any) -> Make:
    return lambda path: write_script(path, root, **rest)


def program(weights: object, records: dict[str, bytes] | None = None) -> Make:
    return lambda path: write_program(path, weights, records)


def legacy(obj: object, *arguments: Any, **rest: Any) -> Make:
    return lambda path: write_legacy(path, obj, *arguments, **rest)


def tar(obj: object, *, numel: int = 4, shape: tuple[int, ...] = (2, 2), **members: bytes) -> Make:
    values = struct.pack("<4f", 1, 2, 3, 4)
    strides = tuple(1 for _ in shape)
    made = tar_members(
        obj, [(1, "cpu", torch.FloatStorage, numel, values)], [(2, 1, shape, strides, 0)]
    )
    return lambda path: write_tar(path, {**made, **members})


def safetensors(header: object, data: bytes = b"") -> Make:
    return lambda path: write_safetensors(path, header, data)


def described(*shape: object, at: tuple[object, object] = (0, 8), dtype: object = "F32") -> object:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


def npz(**records: bytes) -> Make:
    def make(path: Path) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in records.items():
                archive.writestr(f"{name}.npy", content)
        return path

    return make


def index(weight_map: object, **shards: dict[str, object]) -> Make:
    """A directory with an index and shards of safetensors, each of eight bytes."""

    def make(path: Path) -> Path:
        path.mkdir()
        for name, header in shards.items():
            write_safetensors(path / name, header, bytes(8))
        (path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return path

    return make


def link(path: Path) -> Path:
    index({"w": "a"})(path)
    write_safetensors(path.parent / "outside", {"w": described(2)}, bytes(8))
    (path / "a").symlink_to(path.parent / "outside")
    return path


GOOD = {"w": tensor()}
MODEL = Script("Model", {"w": tensor()})
EMPTY = pickled({})
CALL = b"cos\nsystem\nX\1\0\0\0x\x85R"
F32 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"
ONE = ("I", 3), ("Q", 1), ("Q", 0)


def gguf(*values: object, data: bytes = b"") -> Make:
    return put(gguf_bytes(*values) + data)


def gguf_tensor(shape: tuple[int, ...], kind: int = 0, at: int = 0, name: str = "w") -> Make:
    sizes = [("Q", size) for size in shape]
    return gguf(*ONE, name, ("I", len(shape)), *sizes, ("I", kind), ("Q", at), data=bytes(99))


def one(shape: Any = (2,), **changes: Any) -> Make:
    """A distributed checkpoint of one tensor, with one thing changed in what is said of it."""

    def make(path: Path) -> Path:
        torch.save(torch.ones(2), path.with_suffix(".item"))
        item = path.with_suffix(".item").read_bytes()
        places = {MetadataIndex("w", (0,)): _StorageInfo(
            changes.get("file", "__0_0.distcp"), changes.get("at", 0), changes.get("nbytes", len(item)),
        )} if {"file", "at", "nbytes"} & changes.keys() else {}  # fmt: skip
        boxes = changes.get("boxes", [((0,), (2,))])
        return write_dcp(path, {changes.get("key", "w"): describe(shape, *boxes)},
                         {("w", (0,)): item}, places)  # fmt: skip

    return make


def metadata(content: bytes) -> Make:
    def make(path: Path) -> Path:
        path.mkdir()
        (path / ".metadata").write_bytes(content)
        return path

    return make


#: What is wrong -> a maker of it, the class of the answer, its entry, words of it.
ROWS: dict[str, tuple[Make, str, str | None, str]] = {
    # 1. Files that end early, or hold something else behind their first bytes.
    "an empty file": (put(b""), "F", None, "an empty file"),
    "zip and junk": (put(b"PK\3\4" + b"junk" * 99), "F", None, "without its directory"),
    "legacy and junk": (put(pickled(MAGIC) + b"junk" * 99), "F", "?", ""),
    "tar and junk": (put(bytes(257) + b"ustar" + b"junk" * 99), "F", "?", ""),
    "safetensors and junk": (put(bytes(8) + b"{" + b"junk" * 99), "F", "?", ""),
    "GGUF and junk": (put(b"GGUF" + b"junk" * 99), "F", "?", ""),
    "numpy and junk": (put(b"\x93NUMPY" + b"junk" * 99), "F", "?", ""),
    "metadata of junk": (metadata(b"junk" * 99), "F", "?", ""),
    "a cut directory": (cut(zipped(GOOD), -40), "F", "?", ""),
    "a cut script": (cut(script(MODEL), -40), "F", "?", ""),
    "a cut program": (cut(program({"w": weight()}), -40), "F", "?", ""),
    "a cut npz": (cut(npz(w=npy_bytes(F32, bytes(8))), -40), "F", "?", ""),
    "a cut stream": (cut(legacy({"w": legacy_tensor()}), -3), "F", "?", ""),
    "a cut tar": (cut(tar(TarId("2")), 1500), "F", "?", ""),
    "a cut GGUF": (cut(gguf_tensor((2,)), 40), "F", "?", ""),
    "cut metadata": (metadata(pickled({"a": 1})[:-1]), "F", "?", ""),
    "a record outside the top": (zipped(GOOD, notes={"../../evil": b""}), "F", "?", ""),
    "a script's record outside": (changed(script(MODEL), b"m/version", b"n/version", last=True), "F", "?", ""),
    "a record twice": (zipped(GOOD, storages={"0": bytes(16), "\xdf": b"", "\u1e9e": b""}), "F", "?", ""),
    # 2. Checksums and encryption.
    "a wrong checksum": (changed(zipped(GOOD), b"cpu", b"cpv"), "F", "?", ""),
    "a script's wrong checksum": (changed(script(MODEL), b"cpu", b"cpv"), "F", "?", ""),
    "a program's wrong checksum": (changed(program({"w": weight()}), b"weight_0", b"weight_1"), "F", "?", ""),
    # 3. Deflated records.
    "a deflated storage": (zipped(GOOD, storage_method=zipfile.ZIP_DEFLATED), "F", "?", ""),
    "a bomb": (zipped(data=bytes(1 << 27), method=zipfile.ZIP_DEFLATED), "F", "?", ""),
    "a bomb of code": (script(MODEL, code=bytes(1 << 27), method=zipfile.ZIP_DEFLATED), "F", "?", ""),
    # 4. Notes.
    "version 0": (zipped(GOOD, notes={"version": b"0"}), "F", "?", ""),
    "an alignment of -1": (zipped(GOOD, notes={"version": b"3", ".storage_alignment": b"-1"}), "F", "?", ""),
    "no byte order": (zipped(GOOD, notes={"version": b"3", "byteorder": b"pdp"}), "F", "?", ""),
    "a program's version": (program({"w": weight()}, {".data/version": b"x"}), "F", "?", ""),
    "GGUF's alignment": (gguf(("I", 3), ("Q", 0), ("Q", 1), "general.alignment", ("I", 4), ("I", 0)), "F", "?", ""),
    # 5. Storages.
    "a larger storage": (zipped({"w": tensor(numel=5)}), "F", "?", ""),
    "a smaller storage": (zipped({"w": tensor(numel=3)}), "F", "?", ""),
    "a negative storage": (zipped({"w": tensor(numel=-4)}), "F", "?", ""),
    "an overflowing storage": (zipped({"w": tensor(numel=2**63)}), "F", "?", ""),
    "a missing storage": (zipped({"w": tensor(storage="7")}), "F", "?", ""),
    "a stream's larger storage": (legacy({"w": legacy_tensor()}, {"0": (5, bytes(16))}), "F", "?", ""),
    "a stream's huge storage": (legacy({"w": legacy_tensor(identity=legacy_id(numel=2**60))}, {"0": (2**60, bytes(16))}), "F", "?", ""),
    "a tar's huge storage": (tar(TarId("2"), numel=2**60), "F", "?", ""),
    "a tar's negative storage": (tar(TarId("2"), numel=-4), "F", "?", ""),
    "a script's missing storage": (script(Script("Model", {"w": tensor(storage="9")})), "F", "?", ""),
    "a program's missing storage": (program({"w": weight(path_name="weight_9")}), "F", "?", ""),
    "an array longer than its record": (npz(w=npy_bytes(F32, bytes(7))), "F", "?", ""),
    "GGUF past the end": (gguf_tensor((99,)), "F", "?", ""),
    # 6. Views.
    "a view outside": (zipped({"w": tensor((5,), (1,))}), "F", "?", ""),
    "a negative stride": (zipped({"w": tensor((2,), (-1,), 1)}), "F", "?", ""),
    "an overflowing size": (zipped({"w": tensor((2**63,), (0,))}), "F", "?", ""),
    "two sizes, one stride": (zipped({"w": tensor((2, 2), (1,))}), "F", "?", ""),
    "a huge broadcast view": (zipped({"w": tensor((2**40,), (0,))}), "F", "?", ""),
    "a stream's view outside": (legacy({"w": legacy_tensor((5,), (1,))}), "F", "?", ""),
    "a tar's view outside": (tar(TarId("2"), shape=(9,)), "F", "?", ""),
    "a script's view outside": (script(Script("Model", {"w": tensor((5,), (1,))})), "F", "?", ""),
    "a program's view outside": (program({"w": weight((5,), (1,))}), "F", "?", ""),
    # 7. Globals.
    "a call": (zipped({**GOOD, "x": RUN}), "Index", None, ""),
    "a script's call": (script(Script("Model", {"w": tensor(), "x": RUN}), constants=(RUN,)), "Index", None, ""),
    "a stream's call": (legacy({"w": legacy_tensor(), "x": RUN}), "Index", None, ""),
    "a tar's call": (tar(RUN), "Index", None, ""),
    "a call for a count": (legacy({}, keys=RUN), "U", "?", ""),
    "a call for a tar's count": (tar(TarId("2"), storages=pickled(RUN)), "U", "?", ""),
    "a call in metadata": (metadata(pickled(RUN)), "U", "?", ""),
    "an array of objects": (npz(w=npy_bytes(F32.replace("<f4", "|O"), pickled(RUN))), "Index", None, ""),
    "a header that calls": (put(npy_bytes("__import__('os').system('x')")), "F", "?", ""),
    # 8. Pickles: see test_pickle.py for those that are refused in a torch file.
    "a stream of a huge bytearray": (changed(legacy({}), EMPTY, b"\x80\x02cbuiltins\nbytearray\n\x8a\5\0\0\0\0\2\x85R."), "F", "?", ""),
    "a stream nested deep": (changed(legacy({}), EMPTY, b"\x80\x02" + b"(" * 100_000 + b"."), "F", "?", ""),
    "a stream that holds itself": (changed(legacy({}), EMPTY, b"\x80\x02]q\0h\0a."), "Index", None, ""),
    "a script nested deep": (script(data=b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "F", "?", ""),
    "constants nested deep": (script(MODEL, constants=Call(set, (((((),),),),))), "F", "?", ""),
    "metadata nested deep": (metadata(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "F", "?", ""),
    "metadata that underflows": (metadata(b"\x80\x02R."), "F", "?", ""),
    # 9. safetensors.
    "a header of 2**64-1": (put(b"\xff" * 8 + b"{}"), "F", "?", ""),
    "a header past the file": (put(struct.pack("<Q", 99) + b'{"w": 1}'), "F", "?", ""),
    "an overlap": (safetensors({"a": described(2), "b": described(2, at=(4, 12))}, bytes(12)), "F", "?", ""),
    "a hole": (safetensors({"a": described(2), "b": described(2, at=(12, 20))}, bytes(20)), "F", "?", ""),
    "trailing data": (safetensors({"a": described(2)}, bytes(9)), "F", "?", ""),
    "short data": (safetensors({"a": described(2)}, bytes(7)), "F", "?", ""),
    "a float dimension": (safetensors({"a": described(2.0)}, bytes(8)), "F", "?", ""),
    "a negative dimension": (safetensors({"a": described(-2)}, bytes(8)), "F", "?", ""),
    "a true dimension": (safetensors({"a": described(True, 2)}, bytes(8)), "F", "?", ""),
    "a dtype nobody knows": (safetensors({"a": described(2, dtype="F5")}, bytes(8)), "F", "?", ""),
    # 10. Indexes.
    "an absolute shard": (index({"w": "/etc/passwd"}), "U", "?", ""),
    "a shard above": (index({"w": "a/../../b"}), "U", "?", ""),
    "a backslash": (index({"w": "..\\b"}), "U", "?", ""),
    "a drive": (index({"w": "C:b"}), "U", "?", ""),
    "a link out": (link, "U", "?", ""),
    "a key its shard lacks": (index({"v": "a"}, a={"w": described(2)}), "F", "?", ""),
    "a missing shard": (index({"w": "a"}), "F", "?", ""),
    "an index in an index": (index({"w": "x.index.json"}), "F", "?", ""),
    # 11. Distributed checkpoints.
    "an item above": (one(file="../x"), "U", "?", ""),
    "an item past the end": (one(nbytes=10**9), "F", "?", ""),
    "an item far outside": (one(at=2**62), "F", "?", ""),
    "chunks that overlap": (one((3,), boxes=[((0,), (2,)), ((1,), (2,))]), "F", "?", ""),
    "chunks with a gap": (one((3,)), "F", "?", ""),
    "a chunk outside": (one((1,)), "F", "?", ""),
    # 12. Something else.
    "a whole module": (lambda path: (torch.save(torch.nn.Linear(1, 1), path), path)[1], "F", "?", ""),
    "a text": (put(b"hello\n" * 99), "F", None, ""),
    "an empty directory": (lambda path: (path.mkdir(), path)[1], "F", None, ""),
    "a zip of texts": (npz(), "F", "?", ""),
    "a plain pickle": (put(pickled(RUN)), "F", None, ""),
    # 15. Sizes.
    "65 dimensions": (zipped({"w": tensor((1,) * 65, (1,) * 65)}), "F", "?", ""),
    "65 dimensions in a script": (script(Script("Model", {"w": tensor((1,) * 65, (1,) * 65)})), "F", "?", ""),
    "65 dimensions in a program": (program({"w": weight((1,) * 65, (1,) * 65)}), "F", "?", ""),
    "65 dimensions in a stream": (legacy({"w": legacy_tensor((1,) * 65, (1,) * 65)}), "F", "?", ""),
    "65 dimensions in a tar": (tar(TarId("2"), shape=(1,) * 65), "F", "?", ""),
    "65 dimensions of GGUF": (gguf_tensor((1,) * 65), "F", "?", ""),
    "65 dimensions of numpy": (put(npy_bytes(F32.replace("(2,)", str((1,) * 65)), bytes(4))), "F", "?", ""),
    "an empty array of huge sizes": (put(npy_bytes(F32.replace("2,", f"0, {2**62}, {2**62}"))), "F", "?", ""),
    "GGUF, empty and huge": (gguf_tensor((2**59, 2**59, 0)), "F", "?", ""),
    "a program's, empty and huge": (program({"w": weight((0, 2**62, 2**62), (1, 1, 1))}), "F", "?", ""),
    "a stream's, empty and huge": (legacy({"w": legacy_tensor((0, 2**62, 2**62), (1, 1, 1))}), "F", "?", ""),
    "a size of 5,000 digits": (put(npy_bytes(F32.replace("2,", "0x" + "f" * 5000 + ","), bytes(8))), "F", "?", ""),
    "a header with a list as a key": (put(npy_bytes("{[]: 1}")), "F", "?", ""),
    # 16. Names.
    "an odd name": (zipped({LONG: tensor(numel=5)}), "F", "?", ""),
    "an odd storage": (legacy({"w": legacy_tensor(identity=legacy_id(LONG[:300]))}), "F", "?", ""),
    "an odd key of storages": (legacy({"w": legacy_tensor()}, keys=["0", LONG]), "F", "?", ""),
    "an odd name in a script": (script(Script("Model", {LONG: tensor(numel=5)})), "F", "?", ""),
    "an odd class": (script(Script("X" + LONG[:300].replace("\r", ""), {"w": tensor(numel=5)})), "F", "?", ""),
    "an odd name in a program": (program({LONG: weight(dtype=99)}), "F", "?", ""),
    "an odd record of a program": (program({"w": weight(path_name=LONG)}), "F", "?", ""),
    "an odd device of a program": (program({"w": weight((5,), (1,), device={"type": LONG})}), "F", "?", ""),
    "an odd name in GGUF": (gguf_tensor((2,), 99, name=LONG), "F", "?", ""),
    "an odd value in GGUF": (gguf(("I", 3), ("Q", 0), ("Q", 1), LONG, ("I", 99)), "F", "?", ""),
    "an odd array": (npz(**{LONG: npy_bytes(F32, bytes(7))}), "F", "?", ""),
    "an odd type of array": (npz(w=npy_bytes(F32.replace("<f4", "\x9b" + "n" * 5_000), bytes(7))), "Index", None, ""),
    "an odd tensor of a tar": (tar(TarId("\x1b[2J" * 5)), "F", "?", ""),
    "an odd member of a tar": (lambda path: write_tar(path, {"/" + LONG[:60]: b""}), "U", "?", ""),
    "an odd name in metadata": (one(key=LONG), "F", "?", ""),
    "an odd file in metadata": (one(file=LONG), "F", "?", ""),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What one child says of all of them."""
    directory = tmp_path_factory.mktemp("hazards")
    paths = [make(directory / str(at)) for at, (make, *_) in enumerate(ROWS.values())]
    return dict(zip(ROWS, answers(*paths), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_input_is_answered_with_its_cause(told: dict[str, Answer], name: str) -> None:
    """The class of the error, the entry it is about, and what is wrong; or an index."""
    _, kind, entry, words = ROWS[name]
    assert told[name].kind == kind
    assert told[name].entry == entry
    assert re.search(words, told[name].text), told[name].text

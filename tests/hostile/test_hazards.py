"""Bad inputs of every format and kind, each read by a child under guard: who says what, and where.

The child (`guarded.answers`) fails where anything is imported, run or opened besides the file, and
where reading takes more steps or memory than the size of a file allows.
"""

from __future__ import annotations

import json
import os
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
    write_legacy,
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


def legacy(obj: object, *arguments: Any, **rest: Any) -> Make:
    return lambda path: write_legacy(path, obj, *arguments, **rest)


def tar(obj: object) -> Make:
    storages = [(1, "cpu", torch.FloatStorage, 4, struct.pack("<4f", 1, 2, 3, 4))]
    return lambda path: write_tar(path, tar_members(obj, storages, [(2, 1, (2, 2), (1, 1), 0)]))


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


BYTES = {"w": tensor((4,), (1,), numel=1 << 28, storage_type=torch.ByteStorage)}
GOOD = {"w": tensor()}
MODEL = Script("Model", {"w": tensor()})
EMPTY = pickled({})
F32 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"
ONE = ("I", 3), ("Q", 1), ("Q", 0)


def gguf(*values: object, data: bytes = b"") -> Make:
    return put(gguf_bytes(*values) + data)


def gguf_tensor(shape: tuple[int, ...], kind: int = 0, at: int = 0, name: str = "w") -> Make:
    sizes = [("Q", size) for size in shape]
    return gguf(*ONE, name, ("I", len(shape)), *sizes, ("I", kind), ("Q", at), data=bytes(99))


def gguf_part(number: int, count: int, tensors: int) -> Make:
    """A part of a model, with what it says about the others."""
    texts = {"split.no": number, "split.count": count, "split.tensors.count": tensors}
    pairs = [each for key, value in texts.items() for each in (key, ("I", 11), ("q", value))]
    return gguf(("I", 3), ("Q", 0), ("Q", 3), *pairs)


def one(shape: Any = (2,), **changes: Any) -> Make:
    """A distributed checkpoint of one tensor, with one thing changed in what is said of it."""

    def make(path: Path) -> Path:
        torch.save(torch.ones(2), path.with_suffix(".item"))
        item = path.with_suffix(".item").read_bytes()
        info = _StorageInfo("__0_0.distcp", 0, len(item))
        for name in ("relative_path", "offset", "length"):
            setattr(info, name, changes.get(name, getattr(info, name)))
        boxes = changes.get("boxes", [((0,), (2,))])
        return write_dcp(path, {changes.get("key", "w"): describe(shape, *boxes)},
                         {("w", (0,)): item},
                         {MetadataIndex("w", start): info for start, _ in boxes})  # fmt: skip

    return make


def metadata(content: bytes) -> Make:
    def make(path: Path) -> Path:
        path.mkdir()
        (path / ".metadata").write_bytes(content)
        return path

    return make


FORMAT, UNSAFE, READ = "FormatError", "UnsafeError", "Index"

#: What is wrong -> a maker of it, the class of the answer, its entry, words of it.
ROWS: dict[str, tuple[Make, str, str | None, str]] = {
    # 1. Files that end early, or hold something else behind their first bytes.
    "an empty file": (put(b""), FORMAT, None, "an empty file"),
    "zip and junk": (put(b"PK\3\4" + b"junk" * 99),
        FORMAT, None, "the zip archive lacks its directory"),
    "legacy and junk": (put(pickled(MAGIC) + b"junk" * 99),
        FORMAT, "the protocol", "the pickle refers to an object that it has not made"),
    "tar and junk": (put(bytes(257) + b"ustar" + b"junk" * 99),
        FORMAT, None, "a tar archive"),
    "safetensors and junk": (put(bytes(8) + b"{" + b"junk" * 99),
        FORMAT, None, "the header is not valid JSON"),
    "GGUF and junk": (put(b"GGUF" + b"junk" * 99),
        FORMAT, None, "torchlift does not read this version of GGUF"),
    "numpy and junk": (put(b"\x93NUMPY" + b"junk" * 99),
        FORMAT, "tensor", "the record is not a NumPy array"),
    "metadata of junk": (metadata(b"junk" * 99),
        FORMAT, None, "the pickle refers to an object that it has not made"),
    "a cut directory": (cut(zipped(GOOD), -40),
        FORMAT, None, "the zip archive lacks its directory"),
    "a cut script": (cut(script(MODEL), -40), FORMAT, None, "the zip archive lacks its directory"),
    "a cut npz": (cut(npz(w=npy_bytes(F32, bytes(8))), -40),
        FORMAT, None, "the zip archive lacks its directory"),
    "a cut stream": (cut(legacy({"w": legacy_tensor()}), -3),
        FORMAT, "0", "a storage reaches past the end of the file"),
    "a cut tar": (cut(tar(TarId("2")), 1500),
        FORMAT, None, "a tar archive of torch.save"),
    "a cut GGUF": (cut(gguf_tensor((2,)), 40), FORMAT, None, "the file ends early"),
    "cut metadata": (metadata(pickled({"a": 1})[:-1]), FORMAT, None, "the pickle ends early"),
    "a record outside the top": (
        changed(zipped(GOOD), b"archive/version", b"brchive/version", last=True),
        FORMAT, "brchive/version", "names another record"),
    "a script's record outside": (changed(script(MODEL), b"m/version", b"n/version", last=True),
        FORMAT, "n/version", "the header of a record is damaged or names another record"),
    "a record in capitals, too": (
        zipped(GOOD, storages={"0": bytes(16), "\xdf": b"", "\u1e9e": b""}),
        FORMAT, "archive/data/\xdf", "capital letters aside"),
    # 2. Checksums and encryption.
    "a wrong checksum": (changed(zipped(GOOD), b"cpu", b"cpv"),
        FORMAT, "archive/data.pkl", "the CRC-32 of a record does not match its bytes"),
    "a script's wrong checksum": (changed(script(MODEL), b"cpu", b"cpv"),
        FORMAT, "m/data.pkl", "the CRC-32 of a record does not match its bytes"),
    # 3. Deflated records.
    "a deflated storage": (zipped(GOOD, storage_method=zipfile.ZIP_DEFLATED),
        FORMAT, "archive/data/0", "a program other than torch compressed the file"),
    "a storage of bzip2": (zipped(GOOD, storage_method=zipfile.ZIP_BZIP2),
        FORMAT, "archive/data/0", "a record is compressed in an unknown way"),
    "a deflated storage that cannot be so large": (
        changed(zipped(BYTES, storages={"0": bytes(0x10203)}, storage_method=zipfile.ZIP_DEFLATED),
            struct.pack("<I", 0x10203), struct.pack("<I", 1 << 28), last=True),
        FORMAT, "archive/data/0", "the two sizes of a record contradict each other"),
    "a bomb": (zipped(data=bytes(1 << 27), method=zipfile.ZIP_DEFLATED),
        FORMAT, "archive/data.pkl", "a program other than torch compressed the file"),
    # 4. Notes.
    "version 0": (zipped(GOOD, notes={"version": b"0"}),
        FORMAT, "archive/version", "a record of the archive has an invalid value"),
    "an alignment of -1": (zipped(GOOD, notes={"version": b"3", ".storage_alignment": b"-1"}),
        FORMAT, "archive/.storage_alignment", "a record of the archive has an invalid value"),
    "an unknown byte order": (zipped(GOOD, notes={"version": b"3", "byteorder": b"pdp"}),
        FORMAT, "archive/byteorder", "a record of the archive has an invalid value"),
    "GGUF's alignment": (
        gguf(("I", 3), ("Q", 0), ("Q", 1), "general.alignment", ("I", 4), ("I", 0)),
        FORMAT, "general.alignment", "the alignment is invalid"),
    # 5. Storages.
    "a larger storage": (zipped({"w": tensor(numel=5)}),
        FORMAT, "archive/data/0", "the size of a storage differs from what the tensor 'w' says"),
    "a smaller storage": (zipped({"w": tensor(numel=3)}),
        FORMAT, "archive/data/0", "the size of a storage differs from what the tensor 'w' says"),
    "a negative storage": (zipped({"w": tensor(numel=-4)}),
        FORMAT, "0", "a persistent id is not a storage"),
    "an overflowing storage": (zipped({"w": tensor(numel=2**63)}),
        FORMAT, "0", "a persistent id is not a storage"),
    "a missing storage": (zipped({"w": tensor(storage="7")}),
        FORMAT, "w", "the storage of a tensor is missing"),
    "a stream's larger storage": (legacy({"w": legacy_tensor()}, {"0": (5, bytes(16))}),
        FORMAT, "0", "a storage reaches past the end of the file"),
    "a stream's huge storage": (
        legacy({"w": legacy_tensor(identity=legacy_id(numel=2**60))}, {"0": (2**60, bytes(16))}),
        FORMAT, "0", "a storage reaches past the end of the file"),
    "a script's missing storage": (script(Script("Model", {"w": tensor(storage="9")})),
        FORMAT, "w", "the storage of a tensor is missing"),
    "an array longer than its record": (npz(w=npy_bytes(F32, bytes(7))),
        FORMAT, "w", "the size of an array does not match its shape and dtype"),
    "GGUF past the end": (gguf_tensor((99,)),
        FORMAT, "w", "a tensor reaches past the end of the file"),
    # 6. Views.
    "a view outside": (zipped({"w": tensor((5,), (1,))}),
        FORMAT, "w", "a tensor reaches outside its storage"),
    "a negative stride": (zipped({"w": tensor((2,), (-1,), 1)}),
        FORMAT, "w", "a tensor has an invalid stride"),
    "an overflowing size": (zipped({"w": tensor((2**63,), (0,))}),
        FORMAT, "w", "a tensor has an invalid size"),
    "two sizes, one stride": (zipped({"w": tensor((2, 2), (1,))}),
        FORMAT, "w", "the numbers of strides and dimensions of a tensor differ"),
    "a huge broadcast view": (zipped({"w": tensor((2**40,), (0,))}),
        FORMAT, "w", "a broadcast view is far larger than its storage"),
    "a stream's view outside": (legacy({"w": legacy_tensor((5,), (1,))}),
        FORMAT, "w", "a tensor reaches outside its storage"),
    "a script's view outside": (script(Script("Model", {"w": tensor((5,), (1,))})),
        FORMAT, "w", "a tensor reaches outside its storage"),
    # 7. Globals.
    "a call": (zipped({**GOOD, "x": RUN}), READ, None, "without posix.system"),
    "a script's call": (script(Script("Model", {"w": tensor(), "x": RUN}), constants=(RUN,)),
        READ, None, "without posix.system"),
    "a stream's call": (legacy({"w": legacy_tensor(), "x": RUN}),
        READ, None, "without posix.system"),
    "a tar's call": (tar(RUN), FORMAT, None, "a tar archive of torch.save"),
    "a call for a count": (legacy({}, keys=RUN),
        UNSAFE, "the storage keys", "a pickle of plain data names a global"),
    "a call in metadata": (metadata(pickled(RUN)),
        UNSAFE, "posix.system", "the metadata names a foreign global, which torch"),
    "an array of objects": (npz(w=npy_bytes(F32.replace("<f4", "|O"), pickled(RUN))),
        READ, None, "without numpy.dtype(|O)"),
    "a header that calls": (put(npy_bytes("__import__('os').system('x')")),
        FORMAT, "tensor", "the header of an array is malformed"),
    # 8. Pickles: see test_pickle.py for those that are refused in a torch file.
    "a stream of a huge bytearray": (
        changed(legacy({}), EMPTY, b"\x80\x02cbuiltins\nbytearray\n\x8a\5\0\0\0\0\2\x85R."),
        FORMAT, "builtins.bytearray", "a global is called with arguments that it does not accept"),
    "a stream nested deep": (changed(legacy({}), EMPTY, b"\x80\x02" + b"(" * 100_000 + b"."),
        FORMAT, "the object", "the pickle nests too deep"),
    "a stream that holds itself": (changed(legacy({}), EMPTY, b"\x80\x02]q\0h\0a."),
        FORMAT, "0", "no tensor uses this storage"),
    "a script nested deep": (script(data=b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        FORMAT, "m/data.pkl", "the TorchScript archive does not contain a module"),
    "constants nested deep": (script(MODEL, constants=Call(set, (((((),),),),))),
        FORMAT, "m/constants.pkl", "a dictionary key is a large or deeply nested tuple"),
    "metadata nested deep": (metadata(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        FORMAT, None, "the file is not the metadata of a DCP checkpoint"),
    "metadata that underflows": (metadata(b"\x80\x02R."),
        FORMAT, None, "the pickle takes more than its stack holds"),
    # 9. safetensors.
    "a header of 2**64-1": (put(b"\xff" * 8 + b"{}"),
        FORMAT, None, "the length of the header is invalid"),
    "a header past the file": (put(struct.pack("<Q", 99) + b'{"w": 1}'),
        FORMAT, None, "the length of the header is invalid"),
    "an overlap": (safetensors({"a": described(2), "b": described(2, at=(4, 12))}, bytes(12)),
        FORMAT, "b", "two tensors overlap"),
    "a hole": (safetensors({"a": described(2), "b": described(2, at=(12, 20))}, bytes(20)),
        FORMAT, "b", "unused bytes before a tensor"),
    "trailing data": (safetensors({"a": described(2)}, bytes(9)),
        FORMAT, None, "the file has bytes that belong to none of its tensors"),
    "short data": (safetensors({"a": described(2)}, bytes(7)),
        FORMAT, None, "the file is truncated"),
    "a float dimension": (safetensors({"a": described(2.0)}, bytes(8)),
        FORMAT, "a", "a tensor has an invalid shape"),
    "a negative dimension": (safetensors({"a": described(-2)}, bytes(8)),
        FORMAT, "a", "a tensor has an invalid shape"),
    "a true dimension": (safetensors({"a": described(True, 2)}, bytes(8)),
        FORMAT, "a", "a tensor has an invalid shape"),
    "a dtype nobody knows": (safetensors({"a": described(2, dtype="F5")}, bytes(8)),
        FORMAT, "a", "torchlift does not know this dtype"),
    # 10. Indexes.
    "an absolute shard": (index({"w": "/etc/passwd"}),
        UNSAFE, "/etc/passwd", "a shard's name is not a plain relative one"),
    "a shard above": (index({"w": "a/../../b"}),
        UNSAFE, "a/../../b", "a shard's name leaves the directory"),
    "a backslash": (index({"w": "..\\b"}),
        UNSAFE, "..\\b", "a shard's name is not a plain relative one"),
    "a drive": (index({"w": "C:b"}), UNSAFE, "C:b", "a shard's name is not a plain relative one"),
    "a link out": (link, UNSAFE, "a", "a shard is a link that leaves the directory"),
    "a key its shard lacks": (index({"v": "a"}, a={"w": described(2)}),
        FORMAT, "v", "the index maps this key to a, which lacks it"),
    "a missing shard": (index({"w": "a"}), FORMAT, "a", "a shard is missing"),
    "an index in an index": (index({"w": "x.index.json"}),
        FORMAT, None, "a text file, not a checkpoint"),
    "a shard that the index forgets": (
        index({"w": "s-01-of-02.pt"},
            **{f"s-0{at}-of-02.pt": {"w": described(2)} for at in (1, 2)}),
        FORMAT, "s-02-of-02.pt", "the index leaves out a file of the set that it names"),
    "a marked index": (put(b"\xef\xbb\xbf{}"),
        FORMAT, None, "the index starts with a byte order mark"),
    "a part of GGUF": (gguf_part(1, 2, 9), FORMAT, None, "the file is part 2 of 2 of a model"),
    "a part of a billion": (gguf_part(0, 10**9, 9),
        FORMAT, None, "the file is part 1 of 1000000000 of a model"),
    "a part of GGUF without a number": (gguf_part(-1, 2, 9),
        FORMAT, "split.no", "the file is a part of a model, and a number is invalid"),
    # 11. Distributed checkpoints.
    "an item above": (one(relative_path="../x"),
        UNSAFE, "../x", "a shard's name leaves the directory"),
    "an item past the end": (one(length=10**9),
        FORMAT, "w", "an item reaches past the end of the file"),
    "an item far outside": (one(offset=2**62),
        FORMAT, "w", "an item reaches past the end of the file"),
    "chunks that overlap": (one((3,), boxes=[((0,), (2,)), ((1,), (2,))]),
        FORMAT, "w", "two pieces of a tensor overlap"),
    "chunks with a gap": (one((3,)), FORMAT, "w", "pieces of a tensor are missing"),
    "a chunk outside": (one((1,)), FORMAT, "w", "a piece of a tensor lies outside of it"),
    # 12. Something else.
    "a whole module": (lambda path: (torch.save(torch.nn.Linear(1, 1), path), path)[1],
        UNSAFE, "torch.nn.modules.linear.Linear", "the file is a pickled module"),
    "a text": (put(b"hello\n" * 99), FORMAT, None, "a text file, not a checkpoint"),
    "the directory is empty": (lambda path: (path.mkdir(), path)[1],
        FORMAT, None, "the directory is empty"),
    "a zip of texts": (npz(), FORMAT, None, "torch.save did not write this zip archive"),
    "a plain pickle": (put(pickled(RUN)), UNSAFE, None, "a pickle that torch.save did not write"),
    # 15. Sizes.
    "65 dimensions": (zipped({"w": tensor((1,) * 65, (1,) * 65)}),
        FORMAT, "w", "a tensor has an invalid size"),
    "65 dimensions in a script": (script(Script("Model", {"w": tensor((1,) * 65, (1,) * 65)})),
        FORMAT, "w", "a tensor has an invalid size"),
    "65 dimensions in a stream": (legacy({"w": legacy_tensor((1,) * 65, (1,) * 65)}),
        FORMAT, "w", "a tensor has an invalid size"),
    "65 dimensions of GGUF": (gguf_tensor((1,) * 65),
        FORMAT, "w", "a tensor has too many dimensions"),
    "65 dimensions of numpy": (put(npy_bytes(F32.replace("(2,)", str((1,) * 65)), bytes(4))),
        FORMAT, "tensor", "a tensor has an invalid shape"),
    "an empty array of huge sizes": (put(npy_bytes(F32.replace("2,", f"0, {2**62}, {2**62}"))),
        FORMAT, "tensor", "a tensor has an invalid shape"),
    "GGUF, empty and huge": (gguf_tensor((2**59, 2**59, 0)),
        FORMAT, "w", "a tensor has an invalid shape"),
    "a stream's, empty and huge": (legacy({"w": legacy_tensor((0, 2**62, 2**62), (1, 1, 1))}),
        FORMAT, "w", "a tensor has an invalid size"),
    "a size of 5,000 digits": (put(npy_bytes(F32.replace("2,", "0x" + "f" * 5000 + ","), bytes(8))),
        FORMAT, "tensor", "a tensor has an invalid shape"),
    "a header with a list as a key": (put(npy_bytes("{[]: 1}")),
        FORMAT, "tensor", "the header of an array is malformed"),
    # 16. Names.
    "an odd name": (zipped({LONG: tensor(numel=5)}),
        FORMAT, "archive/data/0", "the size of a storage differs from what the tensor"),
    "an odd storage": (legacy({"w": legacy_tensor(identity=legacy_id(LONG[:300]))}),
        FORMAT, "0", "no tensor uses this storage"),
    "an odd key of storages": (legacy({"w": legacy_tensor()}, keys=["0", LONG]),
        FORMAT, LONG, "no tensor uses this storage"),
    "an odd name in a script": (script(Script("Model", {LONG: tensor(numel=5)})),
        FORMAT, "m/data/0", "the size of a storage differs"),
    "an odd class": (script(Script("X" + LONG[:300].replace("\r", ""), {"w": tensor(numel=5)})),
        FORMAT, "m/data/0", "the size of a storage differs"),
    "an odd name in GGUF": (gguf_tensor((2,), 99, name=LONG),
        FORMAT, LONG, "torchlift does not know this type of tensor"),
    "an odd value in GGUF": (gguf(("I", 3), ("Q", 0), ("Q", 1), LONG, ("I", 99)),
        FORMAT, LONG, "a value of the metadata has an unknown type"),
    "an odd array": (npz(**{LONG: npy_bytes(F32, bytes(7))}),
        FORMAT, LONG, "the size of an array does not match"),
    "an odd type of array": (npz(w=npy_bytes(F32.replace("<f4", "\x9b" + "n" * 5_000), bytes(7))),
        READ, None, "read"),
    "an odd member of a tar": (lambda path: write_tar(path, {"/\x1b[2J\r": b""}),
        FORMAT, None, "a tar archive"),
    "an odd name in metadata": (one(key=LONG), FORMAT, LONG, "does not say in which file"),
    "an odd file in metadata": (one(relative_path=LONG), FORMAT, LONG, "a shard is missing"),
}  # fmt: skip


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
    assert words in told[name].text

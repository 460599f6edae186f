"""Bad inputs of every format and kind, each read by a child under guard: who says what, and where.

The child (`guarded.answers`) fails where anything is imported, run or opened besides the file, and
where reading takes more steps or memory than the size of a file allows.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_files import (
    MAGIC,
    PROTOCOL,
    Call,
    OddId,
    Script,
    StorageId,
    gguf_bytes,
    legacy_id,
    legacy_tensor,
    npy_bytes,
    pickled,
    script_opcodes,
    tensor,
    write_legacy,
    write_safetensors,
    write_script,
    write_tar,
    write_zip,
)
from dcp_files import describe, write_dcp
from guarded import Answer, answers
from pickle_programs import colliding_pairs
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


def patched(make: Make, change: Callable[[bytearray], object]) -> Make:
    """Another file whose bytes a function changes."""

    def patch(path: Path) -> Path:
        data = bytearray(make(path).read_bytes())
        change(data)
        return put(bytes(data))(path)

    return patch


def added(make: Make, name: str) -> Make:
    """An archive with one record more."""

    def add(path: Path) -> Path:
        with warnings.catch_warnings(), zipfile.ZipFile(make(path), "a") as archive:
            warnings.simplefilter("ignore")  # that a name occurs twice
            archive.writestr(name, b"x" * 16)
        return path

    return add


def central(data: bytearray, record: bytes) -> int:
    """Return where the directory of an archive describes a record."""
    return data.rfind(record) - 46


def zipped(obj: object = None, **rest: Any) -> Make:
    return lambda path: write_zip(path, obj, **rest)


def pickle_of(code: bytes) -> Make:
    """A torch file whose pickle has these opcodes."""
    return zipped(data=code)


def noted(**metadata: object) -> Call:
    """A tensor with metadata of a backend."""
    kind = torch.IntStorage if metadata.pop("whole", False) else torch.FloatStorage
    odd = tensor(storage_type=kind)
    odd.parts = (odd.parts[0], (*odd.parts[1], metadata))
    return odd


def script(root: object = None, **rest: Any) -> Make:
    return lambda path: write_script(path, root, **rest)


def legacy(obj: object, *arguments: Any, **rest: Any) -> Make:
    return lambda path: write_legacy(path, obj, *arguments, **rest)


def tar(obj: object) -> Make:
    return lambda path: write_tar(path, obj)


def safetensors(header: object, data: bytes = b"") -> Make:
    return lambda path: write_safetensors(path, header, data)


def described(*shape: object, at: tuple[object, object] = (0, 8), dtype: object = "F32") -> object:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


def named(name: str, content: bytes) -> Make:
    """A file that is opened by this name."""

    def make(path: Path) -> Path:
        path.mkdir()
        return put(content)(path / name)

    return make


def npz(method: int = zipfile.ZIP_STORED, **records: bytes) -> Make:
    def make(path: Path) -> Path:
        with zipfile.ZipFile(path, "w", method) as archive:
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
INFO = {"little_endian": True}
HIDDEN = struct.pack("<4s22xHH", b"PK\3\4", 14, 0) + b"archive/data/1" + bytes(16)
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


def calls(command: bytes) -> dict[str, bytes]:
    """A call of ``os.system`` by every opcode that can name it."""
    arguments = b"X" + struct.pack("<I", len(command)) + command
    short = b"\x8c" + bytes([len(command)]) + command
    return {
        "GLOBAL": b"\x80\x02cposix\nsystem\n(" + arguments + b"tR.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93(" + short + b"tR.",
        "OBJ": b"(cposix\nsystem\n" + arguments + b"o.",
        "NEWOBJ": b"\x80\x02cposix\nsystem\n(" + arguments + b"t\x81.",
        "NEWOBJ_EX": b"\x80\x04cposix\nsystem\n(" + arguments + b"t}\x92.",
        "BUILD": b"\x80\x02cposix\nsystem\n)R}X\x01\x00\x00\x00a" + arguments + b"sb.",
    }


def text_of(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


SHARED_TUPLE = b"N" + b"2\x86" * 60


def nested_dicts(levels: int) -> bytes:
    """A dict that is twice in a dict that is twice in a dict ..."""
    step = b"q%c0}" + text_of("a") + b"h%cs" + text_of("b") + b"h%cs"
    return b"}" + b"".join(step.replace(b"%c", bytes([i])) for i in range(levels)) + b"."


#: Pickles that try to allocate, to recurse or to confuse -> what is wrong with them.
PICKLES = {
    "a call of bytearray with a size": (
        b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R.", "bytearray"),
    "bytes of 2**40": (b"\x8e" + struct.pack("<Q", 2**40) + b"x.", "ends early"),
    "bytes of 2**63": (b"\x8e" + struct.pack("<Q", 2**63) + b"x.", "ends early"),
    "a bytearray of 2**40": (b"\x96" + struct.pack("<Q", 2**40) + b"x.", "ends early"),
    "text of 2**32": (b"X" + b"\xff" * 4 + b"x.", "ends early"),
    "an integer of 2**31 bytes": (b"\x8b" + b"\xff\xff\xff\x7f" + b"x.", "is too long"),
    "an integer of negative length": (b"\x8b" + b"\xff\xff\xff\xff" + b"x.", "is too long"),
    "an integer of 10,000 digits": (b"I" + b"1" * 10_000 + b"\n.", "damaged"),
    "integers that collide": (b"}(" + b"".join(
        b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(9000))
        + b"u.", "more than 64 bits"),
    "tuples that collide": (b"}(" + b"".join(b"".join(
        b"\x8a\x08" + struct.pack("<q", one) for one in pair) + b"\x86N"
        for pair in colliding_pairs(3_000)) + b"u.", "expands to far more data"),
    "30,000 marks": (b"(" * 30_000 + b"t" * 30_000 + b".", "nests too deep"),
    "30,000 nested lists": (b"]" * 30_000 + b"a" * 29_999 + b".", "nest too deep"),
    "30,000 nested tuples": (b")" + b"\x85" * 30_000 + b".", "nest too deep"),
    "30,000 nested dicts": (
        (b"}" + text_of("a")) * 30_000 + b"N" + b"s" * 30_000 + b".", "nest too deep"),
    "a nested tuple as a key": (b"})" + b"\x85" * 30_000 + b"Ns.", "nested tuple"),
    "a shared tuple as a key": (b"}" + SHARED_TUPLE + b"Ns.", "nested tuple"),
    "a shared tuple in a set": (b"\x8f(" + SHARED_TUPLE + b"\x90.", "nested tuple"),
    "a shared tuple in a frozenset": (b"(" + SHARED_TUPLE + b"\x91.", "nested tuple"),
    "a shared tuple as a value": (
        b"}" + text_of("k") + SHARED_TUPLE + b"s.", "expands"),
    "dicts shared 60 levels deep": (nested_dicts(60), "expands"),
    "a list as a key": (b"}]Ns.", "key is a container"),
    "a key of a thousand bits": (b"}\x8a\x7f" + b"\x01" * 127 + b"Ns.", "more than 64 bits"),
    "a dict that contains itself": (b"}q\0" + text_of("a") + b"h\0s.", "contain themselves"),
    "a list that contains itself": (b"]q\0h\0a.", "contain themselves"),
    "a tuple with a list that contains it": (b"]q\0h\0\x85a.", "contain themselves"),
    "nothing": (b"", "ends early"),
    "only STOP": (b".", "wrong number"),
    "no STOP": (b"\x80\x02}", "ends early"),
    "two objects": (b"NN.", "wrong number"),
    "an open mark": (b"(N.", "wrong number"),
    "a stack underflow": (b"R.", "more than its stack holds"),
    "an underflow below a mark": (b"N(R.", "more than its stack holds"),
    "a tuple without its mark": (b"Nt.", "more than its stack holds"),
    "an unknown memo index": (b"h\x07.", "has not made"),
    "an unknown opcode": (b"\xff.", "uses an opcode that torch"),
    "protocol 9": (b"\x80\x09N.", "pickle protocol is unknown"),
    "the extension registry": (b"\x82\x01.", "uses an opcode that torch"),
    "a text persistent id": (b"Pstorage\n.", "uses an opcode that torch"),
    "a class by INST": (b"(iposix\nsystem\n.", "uses an opcode that torch"),
    "a text memo": (b"}p9999999999999\n0Ng9999999999999\n.", "uses an opcode that torch"),
    "a text float": (b"F1_0\n.", "uses an opcode that torch"),
    "a text long": (b"L" + b"9" * 9**5, "uses an opcode that torch"),
    "a quoted text": (b"S'" + b"\\x41" * 9**5 + b"'\n.", "uses an opcode that torch"),
    "a raw text": (b"V\\ud800\n.", "uses an opcode that torch"),
    "an out-of-band buffer": (b"\x97.", "uses an opcode that torch"),
    "text that is not UTF-8": (b"X\x01\0\0\0\xff.", "not valid UTF-8"),
    "a lone surrogate": (b"X\x03\0\0\0\xed\xa0\x80.", "not valid UTF-8"),
    "a call of a number": (b"K\x01)R.", "not a global"),
    "a call with a list": (b"ccollections\nOrderedDict\n]R.", "not a tuple"),
    "a state on a list": (b"]}b.", "without one"),
    "a state on an allowed global": (b"ccollections\nOrderedDict\n}b.", "without one"),
    "items put into a global": (b"ccollections\nOrderedDict\nNa.", "not a container"),
    "a persistent id that is a number": (b"K\x01Q.", "not a storage"),
    "a persistent id of another kind": (b"(K\x01K\x01K\x01K\x01K\x01tQ.", "not a storage"),
    "a tensor of a number": (
        b"ctorch._utils\n_rebuild_tensor\n(K\x01K\x01K\x01K\x01tR.", "does not accept"),
    "too few arguments": (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "does not accept"),
    "a key without a value": (b"(NNNd.", "damaged"),
    "bytes behind the pickle": (b"N.x", "followed by other bytes"),
}  # fmt: skip
PAST = "a storage reaches past the end of the file"
ABSURD = (b"0", b"-1", b"", b"x", b"9" * 900, b"\xff", b"1.5")

FORMAT, UNSAFE, READ = "FormatError", "UnsafeError", "Index"

#: Makers of one tensor with these sizes, strides and offset.
VIEWED: dict[str, Callable[..., Make]] = {
    "a view": lambda *view: zipped({"w": tensor(*view)}),
    "a stream's view": lambda *view: legacy({"w": legacy_tensor(*view)}),
    "a script's view": lambda *view: script(Script("Model", {"w": tensor(*view)})),
}


class Row(NamedTuple):
    """A maker of a bad input, and its answer: words, the entry (... for any) and the class."""

    make: Make
    words: str
    entry: Any = ...
    kind: str = FORMAT


#: What is wrong -> the values of its `Row`.
ROWS: dict[str, tuple[Any, ...]] = {
    # 1. Files that end early, or hold something else behind their first bytes.
    "a damaged directory": (changed(zipped(GOOD), b"PK\1\2", b"PK\1\xff"),
        "directory of the archive is damaged"),
    "more records than fit": (
        patched(zipped(GOOD), lambda data: struct.pack_into(
            "<HH", data, data.rfind(b"PK\5\6") + 8, 60_000, 60_000)),
        "the directory of the archive is damaged"),
    "a directory beyond the file": (
        patched(zipped(GOOD), lambda data: struct.pack_into(
            "<II", data, data.rfind(b"PK\5\6") + 12, 2**31, 2**31)),
        "found 4 of 4 records"),
    "bytes behind an archive": (patched(zipped(GOOD), lambda data: data.extend(b"trailing")),
        "does not end with its end record; expected a comment of 8 bytes"),
    "a record above the top": (added(zipped(GOOD), "../evil"), "did not write", "../evil"),
    "a record twice": (added(zipped(GOOD), "archive/data/0"), "two records", "archive/data/0"),
    "an encrypted record": (
        patched(zipped(GOOD), lambda data: data.__setitem__(
            at := central(data, b"archive/data/0") + 8, data[at] | 1)),
        "encrypted", "archive/data/0"),
    "the place of another record": (
        patched(zipped(GOOD, storages={"0": bytes(16), "1": bytes(16)}), lambda data:
            data.__setitem__(slice(at := central(data, b"archive/data/1") + 42, at + 4),
                data[(of := central(data, b"archive/data/0") + 42) : of + 4])),
        "names another record"),
    "a record inside of another": (
        patched(zipped(GOOD, storages={"0": HIDDEN, "1": bytes(16)}), lambda data: struct.pack_into(
            "<I", data, central(data, b"archive/data/1") + 42, data.find(HIDDEN))),
        "overlap", "archive/data/1"),
    "an empty file": (put(b""), "an empty file"),
    "a cut tar": (cut(tar({"n": 5}), 1500), "a tar archive of torch.save"),
    "a record outside the top": (
        changed(zipped(GOOD), b"archive/version", b"brchive/version", last=True),
        "names another record", "brchive/version"),
    "a record in capitals, too": (
        zipped(GOOD, storages={"0": bytes(16), "\xdf": b"", "\u1e9e": b""}),
        "capital letters aside", "archive/data/\xdf"),
    # 2. Checksums and encryption.
    "a wrong checksum": (changed(zipped(GOOD), b"cpu", b"cpv"),
        "the CRC-32 of a record does not match its bytes", "archive/data.pkl"),
    # 3. Deflated records.
    "a deflated storage": (zipped(GOOD, storage_method=zipfile.ZIP_DEFLATED),
        "a program other than torch compressed the file", "archive/data/0"),
    "a storage of bzip2": (zipped(GOOD, storage_method=zipfile.ZIP_BZIP2),
        "a record is compressed in an unknown way", "archive/data/0"),
    "a deflated storage that cannot be so large": (
        changed(zipped(BYTES, storages={"0": bytes(0x10203)}, storage_method=zipfile.ZIP_DEFLATED),
            struct.pack("<I", 0x10203), struct.pack("<I", 1 << 28), last=True),
        "the two sizes of a record contradict each other", "archive/data/0"),
    "a bomb": (zipped(data=bytes(1 << 27), method=zipfile.ZIP_DEFLATED),
        "a program other than torch compressed the file", "archive/data.pkl"),
    "a deflated array that is broken": (
        patched(npz(zipfile.ZIP_DEFLATED, w=npy_bytes(F32, bytes(8))), lambda data:
            data.__setitem__(slice(at := 30 + len("w.npy"), at + 8), b"\xff" * 8)),
        "a compressed record is damaged; found Error", "w.npy"),
    # 4. Notes.
    **{f"{note} of {value[:9]!r}": (zipped(GOOD, notes={"version": b"3", note: value}),
        "a record of the archive has an invalid value", f"archive/{note}")
       for note in ("version", ".storage_alignment", ".format_version") for value in ABSURD},
    "only a version": (zipped(GOOD, notes={"version": b"2\n"}), "read", ..., READ),
    "no version": (zipped(GOOD, notes={}), "lacks its version, so torch does not"),
    "version 11 elsewhere": (zipped(GOOD, notes={"version": b"3", ".data/version": b"11"}),
        "up to 10, which torch reads"),
    "a version in capitals": (zipped(GOOD, notes={"VERSION": b"3"}),
        "differs in case from what torch writes"),
    "an unknown byte order": (zipped(GOOD, notes={"version": b"3", "byteorder": b"pdp"}),
        "a record of the archive has an invalid value", "archive/byteorder"),
    "GGUF's alignment": (
        gguf(("I", 3), ("Q", 0), ("Q", 1), "general.alignment", ("I", 4), ("I", 0)),
        "the alignment is invalid", "general.alignment"),
    # 5. Storages.
    **{f"a storage of {numel} elements": (zipped({"w": tensor(numel=numel)}),
        "the size of a storage differs from what the tensor 'w' says", "archive/data/0")
       for numel in (3, 5, 0, 2**40, 2**61)},
    **{f"a storage of {numel!r}": (
        zipped({"w": tensor(numel=numel)}), "a persistent id is not a storage", "0")
       for numel in (-1, 2**63, 1.5, True, "4", None)},
    **{f"a stream's storage of {count}": (
        legacy({"w": legacy_tensor()}, {"0": (count, bytes(16))}), words, "0")
       for count, words in (
           (3, "the size of a storage differs"), (-1, PAST), (5, PAST), (2**40, PAST),
           (-(2**63), PAST))},
    **{f"a stream's keys {keys}": (legacy({"w": legacy_tensor()}, keys=keys), words)
       for keys, words in (
           (["0", "0"], "has this storage twice"), (["0", "9"], "no tensor uses"),
           ([], "is missing"), ({"0": 1}, "are not a list"), ([["0"]], "no tensor uses"),
           ([0], "no tensor uses"))},
    **{f"a stream's view {view}": (
        legacy({"w": legacy_tensor((2,), (1,), identity=legacy_id(view=view))}),
        "a view of another storage", "0")
       for view in (("v", 3, 2), ("v", 2**62, 2**62), ("v", 0), (["v"], 0, 4), "view")},
    **{f"a stream's other storage, {at}": (
        legacy({"a": legacy_tensor(), "b": legacy_tensor((1,), (1,), identity=other)}),
        "one storage is described in two ways", "0")
       for at, other in enumerate((
           legacy_id(numel=2), legacy_id(storage_type=torch.IntStorage), legacy_id(numel=5)))},
    **{f"a stream's odd id, {at}": (legacy({"w": identity}), "persistent id is not a storage")
       for at, identity in enumerate((
           StorageId("storage", 1), StorageId(), OddId(5), OddId("x")))},
    "a missing storage": (zipped({"w": tensor(storage="7")}),
        "the storage of a tensor is missing; expected storage data/7", "w"),
    "a stream's huge storage": (
        legacy({"w": legacy_tensor(identity=legacy_id(numel=2**60))}, {"0": (2**60, bytes(16))}),
        "a storage reaches past the end of the file", "0"),
    # 6. Views.
    **{f"{name} {view} outside": (make(*view), "a tensor reaches outside its storage", "w")
       for view in (((5,), (1,)), ((2,), (1,), 3), ((2, 2), (3, 1), 1), ((1,), (0,), 4),
                    ((2,), (2**62,)), ((2,), (1,), 2**62))
       for name, make in VIEWED.items()},
    **{f"{name} {str(view)[:40]}": (make(*view), words, "w")
       for view, words in (
           (((-1,), (1,)), "invalid size"), (((2**63,), (0,)), "invalid size"),
           (((2.0,), (1,)), "invalid size"), (((True,), (1,)), "invalid size"),
           (("ab", (1, 1)), "invalid size; expected a tuple"),
           (((1,) * 65, (1,) * 65), "at most 64"),
           (((2,), (-1,), 1), "invalid stride"), (((2,), (True,)), "invalid stride"),
           (((2,), (1,), -1), "invalid storage offset"),
           (((2,), (1,), True), "invalid storage offset"),
           (((2,), (1, 1)), "numbers of strides and dimensions"),
           (((2,), ()), "numbers of strides and dimensions"),
           (((2**40,), (0,)), "far larger"), (((2**62, 2**62), (0, 0)), "far larger"))
       for name, make in VIEWED.items()},
    "a true size among ones": (zipped({"v": tensor((1,), (1,)), "w": tensor((True,), (1,))}),
        "invalid size", "w"),
    "a conjugate of reals": (zipped({"w": noted(conj=True)}),
        "a conjugate view has a dtype that does not support it", "w"),
    "a negative conjugate of reals": (zipped({"w": noted(neg=True, conj=True)}),
        "a conjugate view has a dtype that does not support it", "w"),
    "a negative of whole numbers": (zipped({"w": noted(whole=True, neg=True)}),
        "a negative view has a dtype that does not support it", "w"),
    "metadata of a backend": (zipped({"w": noted(scale=2)}), "with metadata", ..., READ),
    # 7. Globals.
    **{f"a call by {opcode}": (pickle_of(code), "without posix.system", ..., READ)
       for opcode, code in calls(b"touch torchlift-was-here").items()},
    "a module that nobody has imported": (pickle_of(b"\x80\2cantigravity\nfly\n."),
        "without antigravity.fly", ..., READ),
    **{f"a call in a stream's {place}": (
        legacy({"w": legacy_tensor()}, head=(MAGIC, *head), keys=[RUN] if at == 2 else None),
        "found posix.system", ..., UNSAFE)
       for at, (place, head) in enumerate({"protocol": (RUN, INFO), "sys_info": (PROTOCOL, RUN),
                                           "keys": (PROTOCOL, INFO)}.items())},
    **{f"a stream with {str(head)[:30]}": (
        legacy({"w": legacy_tensor()}, head=(MAGIC, *head)), words, entry)
       for head, entry, words in (
           ((MAGIC, INFO), "the protocol", "not a torch file"),
           ((1002, INFO), "the protocol", "not a torch file"),
           ((True, INFO), "the protocol", "not a torch file"),
           ((PROTOCOL, [1]), "sys_info", "sys_info is not a dict"))},
    "a script's call": (script(Script("Model", {"w": tensor(), "x": RUN}), constants=(RUN,)),
        "without posix.system", ..., READ),
    "a stream's call": (legacy({"w": legacy_tensor(), "x": RUN}),
        "without posix.system", ..., READ),
    "a tar's call": (tar(RUN), "a tar archive of torch.save"),
    "a call in metadata": (metadata(pickled(RUN)),
        "the metadata names a foreign global, which torch", "posix.system", UNSAFE),
    "an array of objects": (npz(w=npy_bytes(F32.replace("<f4", "|O"), pickled(RUN))),
        "without numpy.dtype(|O)", ..., READ),
    "a header that calls": (put(npy_bytes("__import__('os').system('x')")),
        "the header of an array is malformed", "tensor"),
    # 8. Pickles.
    **{name: (pickle_of(code), words) for name, (code, words) in PICKLES.items()},
    "a memo index of two billion": (
        pickle_of(b"}r\xff\xff\xff\x7f" + text_of("k") + b"j\xff\xff\xff\x7f0Ns."),
        "read", ..., READ),
    **{f"a script of {root!r}": (script(root), "does not contain a module", "m/data.pkl")
       for root in ({}, [1], 5, None)},
    "a script of a tensor": (script(tensor()), "does not contain a module", "m/data.pkl"),
    **{f"{depth} modules in each other": (
        script(data=b"\x80\x02" + b"c__torch__\nModel\n)\x81}X\1\0\0\0m" * depth
            + b"c__torch__\nModel\n)\x81" + script_opcodes({"w": tensor()}) + b"b"
            + b"sb" * depth + b"."),
        "nest") for depth in (150, 5000)},
    "a module inside of itself": (
        script(data=b"\x80\x02c__torch__\nModel\n)\x81q\xc8" + script_opcodes({"w": tensor()})
            + b"X\1\0\0\0mh\xc8sb."),
        "contain themselves"),
    "modules shared sixty times": (
        script(data=b"\x80\x02c__torch__\nModel\n)\x81" + script_opcodes({"w": tensor()})
            + b"bq\xc8" + b"0c__torch__\nModel\n)\x81}(X\1\0\0\0ah\xc8X\1\0\0\0bh\xc8ubq\xc8" * 60
            + b"."),
        "expands to far more"),
    "a module named CONSTANTS": (script(Script("Model", {"CONSTANTS": MODEL}), constants=(1,)),
        "the name of the program's constants", "CONSTANTS"),
    **{f"a text of classes {code[:9]!r}": (
        script(MODEL, code=code, method=zipfile.ZIP_DEFLATED), "read", ..., READ)
       for code in (b"class Model(Module):\n", bytes(1 << 26), b"\xff\n")},
    "constants in a dict": (script(Script("Model", {}), constants={"a": 1}),
        "constants are not a tuple", "m/constants.pkl"),
    "a stream of a huge bytearray": (
        changed(legacy({}), EMPTY, b"\x80\x02cbuiltins\nbytearray\n\x8a\5\0\0\0\0\2\x85R."),
        "a global is called with arguments that it does not accept", "builtins.bytearray"),
    "a stream nested deep": (changed(legacy({}), EMPTY, b"\x80\x02" + b"(" * 100_000 + b"."),
        "the pickle nests too deep", "the object"),
    "a stream that holds itself": (changed(legacy({}), EMPTY, b"\x80\x02]q\0h\0a."),
        "no tensor uses this storage", "0"),
    "metadata nested deep": (metadata(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        "the file is not the metadata of a DCP checkpoint"),
    "metadata that underflows": (metadata(b"\x80\x02R."),
        "the pickle takes more than its stack holds"),
    # 9. safetensors.
    "a hole at the start": (
        safetensors({"a": described(2, at=(4, 12)), "b": described(2, at=(12, 20))}, bytes(20)),
        "unused bytes before a tensor", "a"),
    **{f"a header of {length} bytes": (put(struct.pack("<Q", length) + b'{"w":' + bytes(50)),
        "the length of the header is invalid")
       for length in (2**63, 2**64 - 1, 100_000_001)},
    **{f"a shape of {str(shape)[:20]}": (
        safetensors({"a": {**described(2), "shape": shape}}, bytes(8)), words, "a")
       for shape, words in (
           *((shape, "invalid shape") for shape in (
               [2**63], ["2"], [None], [2.0], [-2], [True, 2])),
           ([1] * 65, "at most 64"), (2, "expected dtype, data_offsets, and a list as the shape"),
           ([3], "does not match its shape"), ([2**62, 2**62], "does not match its shape"))},
    **{f"offsets of {at!r}": (
        safetensors({"a": {**described(2), "data_offsets": at}}, bytes(8)), words, "a")
       for at, words in (
           ([8, 0], "does not match its shape"), ([0], "two data offsets"),
           ([0, 4, 8], "two data offsets"), ([-8, 0], "an invalid data_offsets"),
           ([0.0, 8], "an invalid data_offsets"), ([0, 2**70], "does not match its shape"),
           (None, "an invalid data_offsets"), ("08", "an invalid data_offsets"))},
    **{f"a dtype of {dtype!r}": (safetensors({"a": described(2, dtype=dtype)}, bytes(8)),
        f"torchlift does not know this dtype; found {dtype!r}", "a")
       for dtype in ("F5", "F4_E2M1", "f32", "", 4, None, ["F32"])},
    **{f"{nbytes} bytes of {shape} {dtype}": (
        safetensors({"a": described(*shape, dtype=dtype, at=(0, nbytes))}, bytes(nbytes)),
        words, "a")
       for dtype, shape, nbytes, words in (
           ("F4", (), 1, "do not fill its last byte; expected a multiple of 2"),
           ("F4", (3,), 2, "do not fill its last byte; expected a multiple of 2"),
           ("F6_E2M3", (3,), 3, "do not fill its last byte; expected a multiple of 4"),
           ("F6_E3M2", (4,), 4, "does not match its shape and dtype"),
           ("F4", (4,), 4, "does not match its shape and dtype"),
           ("F6_E3M2", (1 << 62, 1 << 62, 0), 0, "an invalid shape"))},
    **{f"a header of {text[:40]!r}": (safetensors(text), words)
       for text, words in (
           (b"{", "not valid JSON"), (b"{\xff}", "not valid JSON"),
           (b'{"w": NaN}', "not valid JSON"),
           (b'{"a": {"a":' * 50_000 + b"1" + b"}}" * 50_000, "nests too deep"),
           (b"{" + b'"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests too deep"),
           (b'{"w":1,"w":2}', "name occurs twice"),
           (b'{"w":{"dtype":"F32","dtype":"F32"}}', "name occurs twice"),
           (b'{"w":1}', "the wrong fields"), (b'{"w":{}}', "the wrong fields"),
           (b'{"w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}', "invalid shape"),
           (b'{"__metadata__":{"\\ud800":"x"}}', "not valid JSON"),
           (b'{"__metadata__":{"a":1}}', "does not map text to text"),
           (b'{"__metadata__":[]}', "does not map text to text"),
           (b'{"w":' + b"1" * 10_000 + b"}", "not valid JSON"))},
    "a header past the file": (put(struct.pack("<Q", 99) + b'{"w": 1}'),
        "the length of the header is invalid"),
    "an overlap": (safetensors({"a": described(2), "b": described(2, at=(4, 12))}, bytes(12)),
        "two tensors overlap", "b"),
    "a hole": (safetensors({"a": described(2), "b": described(2, at=(12, 20))}, bytes(20)),
        "unused bytes before a tensor", "b"),
    # 10. Indexes.
    **{f"a shard named {name!r}": (index({"w": name}), "a shard's name ", name, UNSAFE)
       for name in ("../x", "a/../../b", "/etc/passwd", "a\\..\\x", "C:\\x", "C:b", "", "x\0y",
                    "..")},
    **{f"an index of {text[:30]!r}": (named("x.index.json", text), words)
       for text, words in (
           (b"{}", "the JSON file is not an index"),
           (b'{"weight_map": []}', "not an index of a checkpoint"),
           (b'{"weight_map": {"a": 1}}', "not an index of a checkpoint"),
           (b'{"weight_map": {"a": "x", "a": "y"}}', "name occurs twice"),
           (b'{"weight_map": {}, "metadata": 3}', "metadata is not a map"),
           (b'{"weight_map": ', "not valid JSON"), (b'{"a":' * 100_000, "nests too deep"))},
    "a link out": (link, "a shard is a link that leaves the directory", "a", UNSAFE),
    "a key its shard lacks": (index({"v": "a"}, a={"w": described(2)}),
        "the index maps this key to a, which lacks it", "v"),
    "an index in an index": (index({"w": "x.index.json"}), "a text file, not a checkpoint"),
    "a shard that the index forgets": (
        index({"w": "s-01-of-02.pt"},
            **{f"s-0{at}-of-02.pt": {"w": described(2)} for at in (1, 2)}),
        "the index leaves out a file of the set that it names", "s-02-of-02.pt"),
    "a marked index": (put(b"\xef\xbb\xbf{}"), "the index starts with a byte order mark"),
    "a part of GGUF": (gguf_part(1, 2, 9), "the file is part 2 of 2 of a model"),
    "a part of a billion": (gguf_part(0, 10**9, 9), "the file is part 1 of 1000000000 of a model"),
    "a part of GGUF without a number": (gguf_part(-1, 2, 9),
        "the file is a part of a model, and a number is invalid", "split.no"),
    # 11. Distributed checkpoints.
    "an item above": (one(relative_path="../x"),
        "a shard's name leaves the directory", "../x", UNSAFE),
    "an item past the end": (one(length=10**9), "an item reaches past the end of the file", "w"),
    "an item far outside": (one(offset=2**62), "an item reaches past the end of the file", "w"),
    "chunks that overlap": (one((3,), boxes=[((0,), (2,)), ((1,), (2,))]),
        "two pieces of a tensor overlap", "w"),
    "chunks with a gap": (one((3,)), "pieces of a tensor are missing", "w"),
    "a chunk outside": (one((1,)), "a piece of a tensor lies outside of it", "w"),
    # 12. Something else.
    **{f"a whole module, {way}": (
        lambda path, is_zip=is_zip: (torch.save(torch.nn.Linear(1, 1), path,
            _use_new_zipfile_serialization=is_zip), path)[1],
        "the file is a pickled module", "torch.nn.modules.linear.Linear", UNSAFE)
       for way, is_zip in (("zip", True), ("stream", False))},
    "a text": (put(b"hello\n" * 99), "a text file, not a checkpoint"),
    "the directory is empty": (lambda path: (path.mkdir(), path)[1], "the directory is empty"),
    "a zip of texts": (npz(), "torch.save did not write this zip archive"),
    "a plain pickle": (put(pickled(RUN)), "a pickle that torch.save did not write", ..., UNSAFE),
    # 15. Sizes.
    **{f"an array, {at}": (put(content), words, "tensor")
       for at, (content, words) in enumerate((
           (b"\x93NUMPY", "not a NumPy array"), (npy_bytes(F32, version=9), "not a NumPy array"),
           (npy_bytes(F32, bytes(7)), "found 7 bytes"), (npy_bytes(F32, bytes(9)), "found 9 bytes"),
           (b"\x93NUMPY\1\0\xff\xff", "not a NumPy array"),
           (npy_bytes("(" * 5000), "is malformed"), (npy_bytes("{'descr': '<f4'}"), "is malformed"),
           (npy_bytes(F32.replace("(2,)", "(-1,)")), "invalid shape"),
           (npy_bytes(F32.replace("(2,)", "(2.0,)")), "invalid shape"),
           (npy_bytes(F32.replace("(2,)", "(1 << 62,)")), "is malformed"),
           (npy_bytes(F32.replace("(2,)", f"({2**62}, 8)")), "does not match its shape"),
           (npy_bytes(F32.replace("False", "1"), bytes(8)), "is malformed"),
           (npy_bytes(F32.replace("(2,)", "(2LL,)"), bytes(8)), "is malformed"),
           (npy_bytes(F32.replace("(2,)", "(L,)"), bytes(8)), "is malformed")))},
    **{f"GGUF, {at}": (gguf(*values), words)
       for at, (values, words) in enumerate((
           ((("I", 1),), "version of GGUF; expected"), ((("I", 3 << 24),), "big-endian"),
           ((("I", 3), ("Q", 1 << 60), ("Q", 0)), "the file ends early"),
           ((("I", 3), ("Q", 0), ("Q", 1), "a", ("I", 99)), "has an unknown type"),
           ((("I", 3), ("Q", 0), ("Q", 1), "a", ("I", 8), ("Q", 1 << 63)), "ends early"),
           ((("I", 3), ("Q", 0), ("Q", 1), "a", ("I", 9), ("I", 10), ("Q", 1 << 62)), "ends early"),
           ((("I", 3), ("Q", 0), ("Q", 2), *["a", ("I", 7), ("?", 1)] * 2),
            "two values of the metadata"),
           ((*ONE, "w", ("I", 1), ("Q", 1 << 62), ("I", 0), ("Q", 0)), "invalid shape"),
           ((*ONE, "w", ("I", 1), ("Q", 4), ("I", 77), ("Q", 0)), "found ggml type 77"),
           ((*ONE, "w", ("I", 1), ("Q", 31), ("I", 2), ("Q", 0)), "not whole blocks of Q4_0"),
           ((*ONE, "w", ("I", 1), ("Q", 4), ("I", 0), ("Q", 0)), "past the end of the file"),
           ((("I", 3), ("Q", 2), ("Q", 0), *["w", ("I", 1), ("Q", 0), ("I", 0), ("Q", 0)] * 2),
            "two tensors have the same name")))},
    "65 dimensions in metadata": (one((1,) * 65), "a tensor has an invalid size", "w"),
    "65 dimensions of GGUF": (gguf_tensor((1,) * 65), "a tensor has too many dimensions", "w"),
    "65 dimensions of numpy": (put(npy_bytes(F32.replace("(2,)", str((1,) * 65)), bytes(4))),
        "a tensor has an invalid shape", "tensor"),
    "an empty array of huge sizes": (put(npy_bytes(F32.replace("2,", f"0, {2**62}, {2**62}"))),
        "a tensor has an invalid shape", "tensor"),
    "GGUF, empty and huge": (gguf_tensor((2**59, 2**59, 0)), "a tensor has an invalid shape", "w"),
    "a stream's, empty and huge": (legacy({"w": legacy_tensor((0, 2**62, 2**62), (1, 1, 1))}),
        "a tensor has an invalid size", "w"),
    "a size of 5,000 digits": (put(npy_bytes(F32.replace("2,", "0x" + "f" * 5000 + ","), bytes(8))),
        "a tensor has an invalid shape", "tensor"),
    "a header with a list as a key": (put(npy_bytes("{[]: 1}")),
        "the header of an array is malformed", "tensor"),
    # 16. Names.
    "an odd record": (added(zipped(GOOD), LONG), "did not write"),
    "an odd key of a storage": (zipped({"w": tensor(storage=LONG[:300])}),
        "the storage of a tensor is missing", "w"),
    "an odd global": (pickle_of(b"c" + LONG[:300].encode() + b"\nx\nK\1\x85R0N.N"),
        "followed by other bytes"),
    "a lone surrogate in JSON": (
        safetensors(b'{"\\ud83d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "surrogates not allowed"),
    "metadata that is a list": (safetensors(b'{"__metadata__":[1]}', b""),
        "the metadata does not map text to text", "__metadata__"),
    "an odd name": (zipped({LONG: tensor(numel=5)}),
        "the size of a storage differs from what the tensor", "archive/data/0"),
    "an odd name in GGUF": (gguf_tensor((2,), 99, name=LONG),
        "torchlift does not know this type of tensor", LONG),
    "an odd type of array": (npz(w=npy_bytes(F32.replace("<f4", "\x9b" + "n" * 5_000), bytes(7))),
        "read", ..., READ),
    "an odd name in metadata": (one(key=LONG), "does not say in which file", LONG),
    "an odd file in metadata": (one(relative_path=LONG), "a shard is missing", LONG),
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What one child says of all of them."""
    directory = tmp_path_factory.mktemp("hazards")
    paths = [row[0](directory / str(at)) for at, row in enumerate(ROWS.values())]
    return dict(zip(ROWS, answers(*paths), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_input_is_answered_with_its_cause(told: dict[str, Answer], name: str) -> None:
    """The class of the error, the entry it is about, and what is wrong; or an index."""
    row = Row(*ROWS[name])
    assert told[name].kind == row.kind
    assert row.entry is ... or told[name].entry == row.entry
    assert row.words in told[name].text

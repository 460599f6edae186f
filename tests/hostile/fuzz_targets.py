"""Coverage-guided fuzzing: one format for as long as libFuzzer is told to.

    PYTHONPATH=src:tests python tests/hostile/fuzz_targets.py gguf -runs=10000000 corpus/gguf

Whatever bytes a file has, `torchlift.open` and everything that lists its content ends with an
answer or with a `CheckpointError` that knows its cause; nothing is imported, run, written, or
opened besides the file itself; and memory stays within what a small file may cost.

An input is a list of parts, each behind its length: the records of an archive, a header and its
data. Files are put together from them, so that a change in a pickle is not lost to a checksum or a
length before it is met. The last part, if there is one left over, changes bytes of the whole.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import resource
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["torchlift.formats"]):
    from torchlift.formats.zip_archive import (
        CENTRAL,
        CENTRAL_MAGIC,
        END,
        LOCAL,
        LOCAL_MAGIC,
        end_records,
    )

import gguf
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import (
    Call,
    Script,
    StorageId,
    TarId,
    assert_in_bounds,
    pickled,
    tar_members,
    tensor,
    weight,
    write_legacy,
    write_program,
    write_script,
    write_zip,
)
from guarded import guard, look

import torchlift
from torchlift.formats import Index

Parts = list[bytes]

_LONGEST = 8192  # bytes of an input
_MEMORY = 256 << 20  # bytes above what the process has when it starts
_NUMBERS = [0, 1, 2, 3, 7, 63, 64, 65, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40,
            2**60, 2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip


# Parts and files ----------------------------------------------------------------------------------


def joined(parts: Parts) -> bytes:
    """The input that stands for these parts."""
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def parts_of(data: bytes) -> Parts:
    """The parts that an input stands for; any bytes stand for some."""
    parts, at = [], 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("<H", data, at)
        parts.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return parts


def _changed(content: bytes, changes: bytes) -> bytes:
    """The same bytes with some replaced: two bytes of place and one of value for each."""
    found = bytearray(content)
    for at in range(0, len(changes) - 2, 3):
        found[int.from_bytes(changes[at : at + 2], "little") % len(found)] = changes[at + 2]
    return bytes(found)


def _archive(parts: Parts) -> bytes:
    """A zip archive of names and contents, without checksums; a name with a ~ is deflated."""
    payloads, directory, count = bytearray(), bytearray(), len(parts) // 2
    for name, content in zip(parts[0::2], parts[1::2], strict=False):
        packed, method, name = content, 0, name
        if name.startswith(b"~"):
            engine = zlib.compressobj(1, zlib.DEFLATED, -15)
            packed, method, name = engine.compress(content) + engine.flush(), 8, name[1:]
        sizes = len(packed), len(content), len(name)
        directory += CENTRAL.pack(
            CENTRAL_MAGIC, 0, method, 0, *sizes, 0, 0, 0, len(payloads)
        ) + name  # fmt: skip
        payloads += LOCAL.pack(LOCAL_MAGIC, 0, method, len(name), 0) + name + packed
    end = end_records(count, len(payloads), len(directory))
    changes = parts[-1] if len(parts) % 2 else b""
    end = end[-END.size :] if len(changes) % 3 else end
    return _changed(bytes(payloads + directory) + end, changes)


def _tar(parts: Parts) -> bytes:
    """A tar of names and contents, with right checksums; a name with a ~ is an extended header."""
    found = bytearray()
    for name, content in zip(parts[0::2], parts[1::2], strict=False):
        header = bytearray(512)
        header[: len(name[:100])] = name[:100]
        header[124:136] = b"%011o\0" % len(content)
        header[148:156], header[156:157] = b" " * 8, b"x" if name.startswith(b"~") else b"0"
        header[257:265] = b"ustar\x0000"
        header[148:156] = b"%06o\0 " % sum(header)
        found += header + content + bytes(-len(content) % 512)
    return _changed(bytes(found) or bytes(512), parts[-1] if len(parts) % 2 else b"")


def _plain(parts: Parts) -> bytes:
    return parts[0] if parts else b""


def _safetensors(parts: Parts) -> bytes:
    header, data, changes = [*parts, b"", b"", b""][:3]
    return _changed(struct.pack("<Q", len(header)) + header + data, changes)


# Seeds --------------------------------------------------------------------------------------------


def _records(path: Path) -> Parts:
    with zipfile.ZipFile(path) as archive:
        return [part for info in archive.infolist()
                for part in (info.filename.encode(), archive.read(info))] + [b""]  # fmt: skip


def _late(data: bytes) -> bytes:
    """The same pickle with long indexes, as those of hundreds of tensors have."""
    made, wide = bytearray(), {"BINPUT": b"r", "BINGET": b"j"}
    ends = [*[at for _, _, at in pickletools.genops(data)][1:], len(data)]
    for (opcode, argument, at), end in zip(pickletools.genops(data), ends, strict=True):
        code = wide.get(opcode.name)
        made += code + struct.pack("<I", argument + 256) if code else data[at:end]
    return bytes(made)


def _zip_seeds(path: Path) -> Iterator[Parts]:
    state = {"w": tensor(), "t": tensor((2, 2), (1, 2)), "n": {"e": [tensor((), ()), 3]}, "lr": 0.1}
    found = [
        torch.nn.Linear(2, 2).state_dict(),
        {"w": torch.ones(2, dtype=torch.bfloat16), "p": torch.nn.Parameter(base)},
        {"c": torch.ones(1, dtype=torch.complex64).conj(), "d": torch.float16},
        {"o": {1: {"step": 3, "m": base}}, "s": {1, 2}, "b": b"x"},
    ]
    for value in found:
        for protocol in (2, 4):
            torch.save(value, path, pickle_protocol=protocol)
            yield _records(path)
    yield _records(write_zip(path, state))
    yield _records(write_zip(path, {"evil": Call(os.getenv, "HOME"), "w": tensor()}))
    data = _late(pickled([tensor(storage="0"), tensor((4,), (1,)), tensor((), ())]))
    yield _records(write_zip(path, data=data))
    parts = _records(path)
    yield [b"~" + parts[0], *parts[1:]]


base = torch.arange(6.0).reshape(2, 3)


def _legacy_seeds(path: Path) -> Iterator[Parts]:
    for value in (torch.nn.Linear(2, 2).state_dict(), {"w": base, "t": base.t(), "n": [3, "x"]}):
        for protocol in (0, 2):
            torch.save(value, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
            yield [path.read_bytes()]
    view = StorageId("storage", torch.FloatStorage, "0", "cpu", 4, ("v", 1, 2))
    viewed = Call(torch._utils._rebuild_tensor_v2, view, 0, (2,), (1,), False, {})
    yield [write_legacy(path, {"w": viewed, "evil": Call(os.getenv, "HOME")}).read_bytes()]


def _tar_seeds(path: Path) -> Iterator[Parts]:
    values = struct.pack("<4f", 1, 2, 3, 4)
    storages = [(1, "cpu", torch.FloatStorage, 4, values), ("7", "cpu", torch.ByteStorage, 1, b"x")]
    tensors = [(2, 1, (2, 2), (2, 1), 0), (3, 9, (), (), 0)]
    state = {"w": TarId("2"), "n": 5, "v": TarId("3")}
    members = tar_members(state, storages, tensors, [(9, 1, 1, 2)])
    parts = [part for name, content in members.items() for part in (name.encode(), content)]
    yield [*parts, b""]
    yield [b"~x", b"20 mtime=1480000000.25\n"[:23], *parts, b""]


def _script_seeds(path: Path) -> Iterator[Parts]:
    inner = Script("Model", {"w": tensor(), "plain": Script("Plain", {"w": tensor()})})
    model = Script("Model", {"w": tensor(), "b": tensor(), "inner": inner, "n": 5})
    yield _records(write_script(path, model, constants=(tensor(), 5)))
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    yield _small(_records(path))


def _small(parts: Parts) -> Parts:
    """Without the records that only say where in a program something was written."""
    pairs = zip(parts[0::2], parts[1::2], strict=False)
    return [part for pair in pairs if b"debug" not in pair[0] for part in pair] + [b""]


def _program_seeds(path: Path) -> Iterator[Parts]:
    weights = {"w": weight(), "v": weight((2,), (1,), storage_offset={"as_int": 2})}
    yield _records(write_program(path, weights))
    torch.save(torch.ones(2), path.with_suffix(".one"))
    one = path.with_suffix(".one").read_bytes()
    record = {"data/weights/weight_1": one}
    pickled_weight = weight(path_name="weight_1", use_pickle=True)
    listed = {"p": pickled_weight, "o": weight(tensor_meta=None), "s": weight(layout=1)}
    yield _records(write_program(path, listed, record))
    yield [b"serialized_state_dict.pt", one, b"serialized_constants.pt", one, b""]
    models = {f"data/{kind}s/{name}_{kind}s_config.json": b'{"config": {}}'
              for kind in ("weight", "constant") for name in ("a", "model")}  # fmt: skip
    yield _records(write_program(path, weights, {**models, "models/a.json": b"{}"}))


def _safetensors_seeds(path: Path) -> Iterator[Parts]:
    header = {"__metadata__": {"format": "pt"},
              "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
              "b": {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]},
              "e": {"dtype": "I64", "shape": [0, 3], "data_offsets": [10, 10]}}  # fmt: skip
    yield [json.dumps(header).encode(), bytes(10), b""]
    yield [b"{}   ", b"", b""]


def _sharded_seeds(path: Path) -> Iterator[Parts]:
    header = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    index = {"metadata": {"total_size": 2, "x": [1]}, "weight_map": {"a": "a.st", "w": "b.pt"}}
    yield [json.dumps(index).encode(), json.dumps(header).encode(), bytes(2), b""]
    spelled = {"weight_map": {"a": "./d/../a.st", "w": "loop//b.pt", "b": "/etc/passwd"}}
    yield [json.dumps(spelled).encode(), json.dumps(header).encode(), bytes(2), b""]


def _dcp_seeds(path: Path) -> Iterator[Parts]:
    import warnings

    states = [{"w": base, "v": torch.ones(2, dtype=torch.int8)},
              {"m": {"w": base}, "o": {"step": 3, "lr": [0.1]}}]  # fmt: skip
    for at, state in enumerate(states):
        folder = path.with_suffix(f".{at}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        # Small archives without checksums instead of the ones that torch pads to kilobytes.
        data = bytearray()
        stored = (folder / "__0_0.distcp").read_bytes()
        for info in metadata.storage_data.values():
            item = zipfile.ZipFile(io.BytesIO(stored[info.offset : info.offset + info.length]))
            parts = [part for name in item.namelist() if "alignment" not in name
                     for part in (name.encode(), item.read(name))]  # fmt: skip
            made = _archive(parts)
            info.offset, info.length = len(data), len(made)
            data += made
        yield [pickle.dumps(metadata), bytes(data), b""]


def _gguf_seeds(path: Path) -> Iterator[Parts]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "bb"])
    writer.add_array("scores", [0.5] * 3)
    writer.add_tensor("f32", np.ones((2, 3), np.float32))
    blocks = gguf.quants.quantize(np.ones((1, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield [path.read_bytes()]


def _npz_seeds(path: Path) -> Iterator[Parts]:
    path = path.with_suffix(".npz")
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.asfortranarray(np.ones((2, 2), ">i2")),
              "e": np.ones((0, 3)), "s": np.array(5)}  # fmt: skip
    np.savez(path, **arrays)
    yield _records(path)
    np.savez(path, o=np.array([None], dtype=object), t=np.ones(2, "i4,f8"), u=np.array(["x"]))
    yield _records(path)


def _npy_seeds(path: Path) -> Iterator[Parts]:
    for parts in _npz_seeds(path):
        yield from ([content] for content in parts[1::2])


def _one(make: Callable[[Parts], bytes]) -> Callable[[Parts], dict[str, bytes]]:
    return lambda parts: {"x": make(parts)}


def _shards(parts: Parts) -> dict[str, bytes]:
    return {"a.st": _safetensors(parts[1:]), "x": _plain(parts)}


def _directory(parts: Parts) -> dict[str, bytes]:
    metadata, data, changes = [*parts, b"", b"", b""][:3]
    return {".metadata": metadata, "__0_0.distcp": _changed(data or b"\0", changes)}


#: Format -> what to open, the files that parts stand for (what stays is made once), and seeds.
FORMATS: dict[str, tuple[str, Callable[[Parts], dict[str, bytes]], Callable[..., Iterator[Parts]]]]
FORMATS = {
    "torch-zip": ("x", _one(_archive), _zip_seeds),
    "torch-legacy": ("x", _one(_plain), _legacy_seeds),
    "torch-tar": ("x", _one(_tar), _tar_seeds),
    "torchscript": ("x", _one(_archive), _script_seeds),
    "pt2": ("x", _one(_archive), _program_seeds),
    "safetensors": ("x", _one(_safetensors), _safetensors_seeds),
    "sharded": ("x", _shards, _sharded_seeds),
    "dcp": ("", _directory, _dcp_seeds),
    "gguf": ("x", _one(_plain), _gguf_seeds),
    "npz": ("x", _one(_archive), _npz_seeds),
    "npy": ("x", _one(_plain), _npy_seeds),
}


# Mutations ----------------------------------------------------------------------------------------


def mutated(data: bytes, longest: int, seed: int) -> bytes:
    """Another input, changed in one part or two: as what it is, or as bytes."""
    draw = random.Random(seed)
    parts = parts_of(data) or [b""]
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(parts))
        part = parts[at]
        kind = draw.random()
        if kind < 0.08 and len(parts) > 2:
            other = draw.randrange(0, len(parts) - 1, 2)
            pair = parts[other : other + 2]
            parts[other : other + 2] = draw.choice(([], pair * 2))
        elif kind < 0.12:
            parts[at] = parts[draw.randrange(len(parts))]
        elif kind < 0.25 and len(part) > 8:
            number = struct.pack("<Q", draw.choice(_NUMBERS))[: draw.choice((1, 2, 4, 8))]
            place = draw.randrange(len(part))
            parts[at] = part[:place] + number + part[place + len(number) :]
        elif kind < 0.6 and part[:1] == b"{":
            parts[at] = _other_json(part, draw)
        elif kind < 0.6 and part[-1:] == b"." and part[:1] in b"\x80cl(]}":
            parts[at] = _other_pickle(part, draw)
        elif kind < 0.6 and part[:6] == b"\x93NUMPY":
            length = int.from_bytes(part[8:10], "little")
            text = atheris.Mutate(part[10 : 10 + length], length + 40)
            parts[at] = part[:8] + struct.pack("<H", len(text)) + text + part[10 + length :]
        else:
            parts[at] = atheris.Mutate(part, len(part) + 64)
    return joined(parts)[:longest]


_MADE = [
    *(bytes((code,)) for code in b"N)]}\x88(t\x85\x86\x87RbsueadlQ02.\x81\x8f\x90\x91\x92\x94"),
    b"K\x01", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"q\x00", b"h\x00",
    b"X\x01\0\0\0a",
    *(b"c" + name.encode() + b"\n" for name in (
        "torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_tensor_v3", "torch\nSize",
        "torch._utils\n_rebuild_parameter", "torch._tensor\n_rebuild_from_type_v2", "os\nsystem",
        "collections\nOrderedDict", "collections\ndefaultdict", "builtins\nset", "torch\nfloat16",
        "builtins\nbytearray", "_codecs\nencode", "numpy\ndtype", "torch.storage\nUntypedStorage",
    )),
]  # fmt: skip


def _other_pickle(data: bytes, draw: random.Random) -> bytes:
    """A pickle with an opcode removed, doubled, moved, or another one put in."""
    try:
        starts = [at for _, _, at in pickletools.genops(data)]
    except Exception:  # not a pickle any more
        return atheris.Mutate(data, len(data) + 64)
    codes = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, other = draw.randrange(len(codes)), draw.randrange(len(codes))
        kind = draw.randrange(5)
        if kind == 0 and len(codes) > 1:
            del codes[at]
        elif kind == 1:
            codes.insert(at, codes[other])
        elif kind == 2:
            codes[at], codes[other] = codes[other], codes[at]
        else:
            codes[at : at + (kind == 3)] = [draw.choice(_MADE)]
    return b"".join(codes)


_NAMES = ["", "a", "__metadata__", "\ud83d", "x\x1b[2J" * 9, "w" * 400, "F64", "../x", "a.st",
          "weight_0"]  # fmt: skip


def _other_json(data: bytes, draw: random.Random) -> bytes:
    """A JSON text with one value or name replaced, removed or doubled."""
    try:
        root = json.loads(data)
    except ValueError:
        return atheris.Mutate(data, len(data) + 64)
    places: list[tuple[object, object]] = []
    values = []

    def walk(value: object) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            places.append((value, key))
            values.append(inner)
            if isinstance(inner, (dict, list)):
                walk(inner)

    walk(root)
    if not places:
        return b'{"a": 1}'
    holder, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(["", "a", "__metadata__", "\ud83d", "x\x1b" * 9, "w" * 400])] = holder[
            key
        ]
    elif kind == 2:
        holder[key] = json.loads(json.dumps(draw.choice(values)))
    else:
        holder[key] = draw.choice([*_NUMBERS, *_NAMES, -1, None, True, 1.5, 1e300, [], {}, [[]]])
    return json.dumps(root, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")


# The property -------------------------------------------------------------------------------------


_open = torchlift.open  # which is imported when it is first looked up


def _opened(path: str) -> Index:
    """What `torchlift.open` finds, once everything that lists it has been asked."""
    with _open(path) as ckpt:
        keys = [*ckpt, *ckpt.objects, *ckpt.blocked_keys, *ckpt.aliases, *ckpt.blocked, repr(ckpt)]
        assert len(keys) > len(ckpt.entries)
        assert_in_bounds(ckpt.index)
        return ckpt.index


def main() -> None:
    """Fuzz the format that the first argument names; the others are libFuzzer's."""
    name, *options = sys.argv[1:]
    opened, make, seeds = FORMATS[name]
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        os.mkdir(os.path.join(folder, "opened"))
        os.mkdir(os.path.join(folder, "seeds"))
        place = os.path.join(folder, "opened")
        if name == "sharded":
            write_zip(Path(place, "b.pt"), {"w": tensor()})
            os.symlink(place, os.path.join(place, "loop"))
        files: dict[str, io.FileIO] = {}

        def one_input(data: bytes) -> None:
            for file, content in make(parts_of(data)).items():
                if file not in files:
                    path = os.path.join(place, file)
                    files[file] = open(path, "wb", buffering=0)  # noqa: SIM115 - kept open
                files[file].seek(0)
                files[file].write(content)
                files[file].truncate()
            with guard(place):
                look(os.path.join(place, opened), _opened)

        found = list(seeds(Path(folder, "seeds", "made")))
        corpus = os.path.join(folder, "corpus")
        os.mkdir(corpus)
        for at, parts in enumerate(found):
            Path(corpus, str(at)).write_bytes(joined(parts))
        for parts in found:  # whatever is imported when it is first used
            one_input(joined(parts))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = _MEMORY + pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        folders = [option for option in options if not option.startswith("-")]
        options = [option for option in options if option.startswith("-")]
        arguments = [sys.argv[0], f"-max_len={_LONGEST}", "-timeout=10", "-print_final_stats=1",
                     *options, *folders, corpus]  # fmt: skip
        atheris.Setup(arguments, one_input, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

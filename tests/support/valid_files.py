"""Valid files of every format, as the parts that they are put together from.

The records of an archive, a header and its data: so that what is changed in a pickle is not lost to
a checksum or a length before anybody reads it. The last part, if there is one left over, changes
bytes of the whole.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import struct
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import checkpoint_files as cf
import gguf
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import Call, Script, StorageId, pickled, tensor
from rank_files import Era
from zero_files import Zero

from torchlift.formats.zip_archive import (
    CENTRAL,
    CENTRAL_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR64,
    LOCATOR64_MAGIC,
)

Parts = list[bytes]

#: What means something wherever it is: marks, calls, the largest numbers.
_BYTES = [0, 1, 0x28, 0x52, 0x7F, 0x80, 0xFF]


# Parts and files ----------------------------------------------------------------------------------


def _changed(content: bytes, changes: bytes) -> bytes:
    """The same bytes with some replaced: two bytes of place and one of value for each."""
    found = bytearray(content)
    for at in range(0, len(changes) - 2, 3):
        found[int.from_bytes(changes[at : at + 2], "little") % len(found)] = changes[at + 2]
    return bytes(found)


def changed(part: bytes, draw: random.Random) -> bytes:
    """The same bytes with a few replaced, a run of them removed or doubled, or others put in."""
    start, end = sorted(draw.choices(range(len(part) + 1), k=2))
    run = part[start:end]
    others = bytes(draw.choices(_BYTES, k=draw.randint(1, 4)))
    other = draw.choice([others, others, others, b"", run * 2, part[start - 8 : start]])
    return part[:start] + other + part[start + len(others) if other is others else end :]


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
    end = _end_records(count, len(payloads), len(directory))
    changes = parts[-1] if len(parts) % 2 else b""
    end = end[-END.size :] if len(changes) % 3 else end
    return _changed(bytes(payloads + directory) + end, changes)


def _end_records(count: int, start: int, nbytes: int) -> bytes:
    """The three records that say where the directory is, as torch writes them."""
    return (
        END64.pack(END64_MAGIC, END64.size - 12, 0x031E, 45, 0, 0, count, count, nbytes, start)
        + LOCATOR64.pack(LOCATOR64_MAGIC, 0, start + nbytes, 1)
        + END.pack(END_MAGIC, 0, 0, count, count, nbytes, start, 0)
    )


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
    noted = torch.ones(2, dtype=torch.uint16)
    noted.note = "a tensor with an attribute"  # type: ignore[attr-defined]
    found: list[object] = [
        torch.nn.Linear(2, 2).state_dict(),
        {"w": torch.ones(2, dtype=torch.bfloat16), "p": torch.nn.Parameter(base)},
        {"c": torch.ones(1, dtype=torch.complex64).conj(), "d": torch.float16},
        {"o": {1: {"step": 3, "m": base}}, "s": {1, 2}, "b": b"x"},
        {"n": np.float32(1.5), "c": Counter("ab"), "d": defaultdict(list, a=1), "t": noted},
        {"v": torch.device("cuda", 0), "i": slice(1, 2), "m._extra_state": {"x": [base, 1]}},
    ]
    for value in found:
        for protocol in (2, 4):
            torch.save(value, path, pickle_protocol=protocol)
            yield _records(path)
    yield _records(cf.write_zip(path, state))
    pairs = Call(OrderedDict, [[1, 2], [(1, "a"), 3]])
    yield _records(cf.write_zip(path, {"evil": Call(os.getenv, "HOME"), "w": tensor(), "p": pairs}))
    numbers = StorageId("storage", torch.QInt8Storage, "q", "cpu", 16)
    whole = tensor((2, 2), (2, 1), storage_type=torch.LongStorage, storage="i")
    schemes = (torch.per_tensor_affine, 0.1, 0), (torch.per_channel_affine, [0.1] * 4, [0] * 4, 0)
    others = {
        "s": Call(torch._utils._rebuild_sparse_tensor, "torch.sparse_coo",
                  (whole, tensor((2,), (1,)), (3, 3), True)),
        "n": Call(torch._utils._rebuild_nested_tensor, tensor((4,), (1,)), whole, whole, whole),
        "m": Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (2,), (1,), False),
        "q": [Call(torch._utils._rebuild_qtensor, numbers, 0, (4, 4), (4, 1), scheme, False, {})
              for scheme in schemes],
        "storage": numbers,
    }  # fmt: skip
    storages = {"0": bytes(16), "q": bytes(16), "i": bytes(32)}
    yield _records(cf.write_zip(path, others, storages=storages))
    data = _late(pickled({"a": tensor(), "b": tensor((4,), (1,)), "c": tensor((), ())}))
    yield _records(cf.write_zip(path, data=data))
    yield _records(path)


base = torch.arange(6.0).reshape(2, 3)


def _legacy_seeds(path: Path) -> Iterator[Parts]:
    for value in (torch.nn.Linear(2, 2).state_dict(), {"w": base, "t": base.t(), "n": [3, "x"]}):
        for protocol in (2, 4):
            torch.save(value, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
            yield [path.read_bytes()]
    state = {"w": cf.legacy_tensor(), "evil": Call(os.getenv, "HOME")}
    yield [cf.write_legacy(path, state).read_bytes()]


def _script_seeds(path: Path) -> Iterator[Parts]:
    inner = Script("Model", {"w": tensor(), "plain": Script("Plain", {"w": tensor()})})
    model = Script("Model", {"w": tensor(), "b": tensor(), "inner": inner, "n": 5})
    stored = {"data/0": bytes(16), "constants/0": bytes(16)}
    yield _records(cf.write_script(path, model, constants=(tensor(), 5), storages=stored))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    yield _small(_records(path))


def _small(parts: Parts) -> Parts:
    """Without the records that only say where in a program something was written."""
    pairs = zip(parts[0::2], parts[1::2], strict=False)
    return [part for pair in pairs if b"debug" not in pair[0] for part in pair] + [b""]


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
    spelled = {"weight_map": {"a": "./a.st", "w": ".//b.pt"}}
    yield [json.dumps(spelled).encode(), json.dumps(header).encode(), bytes(2), b""]


def _dcp_seeds(path: Path) -> Iterator[Parts]:
    states = [{"w": base, "v": torch.ones(2, dtype=torch.int8)},
              {"m": {"w": base}, "o": {"step": 3, "lr": [0.1]}}]  # fmt: skip
    for at, state in enumerate(states):
        folder = path.with_suffix(f".{at}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
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
    blocks = gguf.quants.quantize(np.ones((1, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    with cf.gguf_writer(path) as writer:
        writer.add_array("tokens", ["a", "bb"])
        writer.add_array("scores", [0.5] * 3)
        writer.add_tensor("f32", np.ones((2, 3), np.float32))
        writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    yield [path.read_bytes()]


def _npz_seeds(path: Path) -> Iterator[Parts]:
    path = path.with_suffix(".npz")
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.asfortranarray(np.ones((2, 2), ">i2")),
              "e": np.ones((0, 3)), "s": np.array(5)}  # fmt: skip
    np.savez(path, **arrays)
    parts = _records(path)
    yield parts
    yield [b"~" * (at % 2 == 0 and at < 4) + part for at, part in enumerate(parts)]
    np.savez(path, o=np.array([None], dtype=object), t=np.ones(2, "i4,f8"), u=np.array(["x"]))
    yield _records(path)


def _npy_seeds(path: Path) -> Iterator[Parts]:
    for parts in _npz_seeds(path):
        yield from ([content] for content in parts[1::2])


#: (file, record) of each part of a directory of torch files.
_ZERO: list[tuple[str, bytes]] = []
_FSDP: list[tuple[str, bytes]] = []


def _zero_seeds(path: Path) -> Iterator[Parts]:
    values = [{"w": base, "b": torch.ones(3)}, {"e": torch.ones(4)}]
    zero = Zero(3, 2, values, {"f": torch.ones(5)}, {"n": torch.ones(2)}, {"t": "w"})
    yield _folder_parts(zero.write(path.with_suffix(".zero")), _ZERO)


def _fsdp_seeds(path: Path) -> Iterator[Parts]:
    yield _folder_parts(Era().save_rows(path.with_suffix(".fsdp"), torch.ones(3, 2)), _FSDP)


def _folder_parts(folder: Path, names: list[tuple[str, bytes]]) -> Parts:
    found = [(file.name, _records(file)) for file in sorted(folder.iterdir())]
    names[:] = [(name, record) for name, parts in found for record in parts[:-1:2]]
    return [content for _, parts in found for content in parts[1::2]]


def _folder_files(names: list[tuple[str, bytes]], parts: Parts) -> dict[str, bytes]:
    records: dict[str, Parts] = {}
    for (name, record), content in zip(names, parts, strict=False):
        records.setdefault(name, []).extend((record, content))
    return {name: _archive(pairs) for name, pairs in records.items()}


def _one(make: Callable[[Parts], bytes]) -> Callable[[Parts], dict[str, bytes]]:
    return lambda parts: {"x": make(parts)}


def _shards(parts: Parts) -> dict[str, bytes]:
    return {"a.st": _safetensors(parts[1:]), "b.pt": _SHARD, "x": _plain(parts)}


_SHARD = _archive(
    [b"a/data.pkl", pickled({"w": tensor()}), b"a/version", b"3", b"a/data/0", bytes(16)]
)


def _directory(parts: Parts) -> dict[str, bytes]:
    metadata, data, changes = [*parts, b"", b"", b""][:3]
    return {".metadata": metadata, "__0_0.distcp": _changed(data or b"\0", changes)}


#: Format -> what to open, the files that parts stand for (what stays is made once), and seeds.
FORMATS: dict[str, tuple[str, Callable[[Parts], dict[str, bytes]], Callable[..., Iterator[Parts]]]]
FORMATS = {
    "torch-zip": ("x", _one(_archive), _zip_seeds),
    "torch-legacy": ("x", _one(_plain), _legacy_seeds),
    "torchscript": ("x", _one(_archive), _script_seeds),
    "safetensors": ("x", _one(_safetensors), _safetensors_seeds),
    "sharded": ("x", _shards, _sharded_seeds),
    "dcp": ("", _directory, _dcp_seeds),
    "gguf": ("x", _one(_plain), _gguf_seeds),
    "npz": ("x", _one(_archive), _npz_seeds),
    "npy": ("x", _one(_plain), _npy_seeds),
    "zero": ("", partial(_folder_files, _ZERO), _zero_seeds),
    "fsdp": ("", partial(_folder_files, _FSDP), _fsdp_seeds),
}


def write_valid(folder: Path, name: str, parts: Parts | None = None) -> Path:
    """Write the first valid files of a format, or those of some parts. Return what to open."""
    opened, make, seeds = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    if parts is None:
        parts = next(iter(seeds(folder.with_name("made"))))
    for file, content in make(parts).items():
        (folder / file).write_bytes(content)
    return folder / opened

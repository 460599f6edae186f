"""Checkpoint files made byte by byte, right and wrong, and tensors read back from an index."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
from kinds import KINDS
from torch._utils import _rebuild_tensor_v2
from zoo import parts_of, same

from torchlift.formats.index import Index, TensorEntry


class StorageId:
    """Pickled as a persistent id."""

    def __init__(self, *identity: object) -> None:
        self.identity = identity


class Call:
    """Pickled as the call of a global."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.parts = (function, arguments)

    def __reduce__(self):
        return self.parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.identity if isinstance(obj, StorageId) else None


def pickled(obj: object, protocol: int = 2) -> bytes:
    """The pickle of an object that may contain `StorageId` and `Call`."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol).dump(obj)
    return buffer.getvalue()


def tensor(
    size: object = (2, 2),
    stride: object = (2, 1),
    offset: object = 0,
    *,
    numel: object = 4,
    storage_type: object = torch.FloatStorage,
    storage: str = "0",
    location: str = "cpu",
) -> Call:
    """A tensor as ``torch.save`` would describe it; every part can be wrong."""
    identity = StorageId("storage", storage_type, storage, location, numel)
    return Call(_rebuild_tensor_v2, identity, offset, size, stride, False, OrderedDict())


def write_zip(
    path: Path,
    obj: object = None,
    *,
    data: bytes | None = None,
    storages: dict[str, bytes] | None = None,
    notes: dict[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
    storage_method: int = zipfile.ZIP_STORED,
) -> Path:
    """A torch zip archive around an object or a pickle; one storage of 16 bytes by default."""
    notes = {"version": b"3\n", "byteorder": b"little"} if notes is None else notes
    with zipfile.ZipFile(path, "w") as archive:
        content = pickled(obj) if data is None else data
        archive.writestr("archive/data.pkl", content, compress_type=method)
        for name, note in notes.items():
            archive.writestr(f"archive/{name}", note)
        for name, values in ({"0": bytes(16)} if storages is None else storages).items():
            archive.writestr(f"archive/data/{name}", values, compress_type=storage_method)
    return path


MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def legacy_id(
    storage: str = "0",
    numel: object = 4,
    view: object = None,
    storage_type: object = torch.FloatStorage,
) -> StorageId:
    """A storage as files from before torch 1.6 refer to it."""
    return StorageId("storage", storage_type, storage, "cpu", numel, view)


def legacy_tensor(
    size: object = (2, 2),
    stride: object = (2, 1),
    offset: object = 0,
    *,
    identity: StorageId | None = None,
) -> Call:
    """A tensor over such a storage."""
    identity = identity or legacy_id()
    return Call(_rebuild_tensor_v2, identity, offset, size, stride, False, OrderedDict())


def write_legacy(
    path: Path,
    obj: object,
    storages: Mapping[str, tuple[int, bytes]] | None = None,
    *,
    head: Sequence[object] = (MAGIC, PROTOCOL, {"little_endian": True}),
    keys: object = None,
    behind: bytes = b"",
) -> Path:
    """A stream of pickles around an object; one storage of four floats by default."""
    values = struct.pack("<4f", 1, 2, 3, 4)
    storages = {"0": (4, values)} if storages is None else storages
    keys = list(storages) if keys is None else keys
    pickles = [pickled(item) for item in (*head, obj, keys)]
    data = [struct.pack("<q", count) + payload for count, payload in storages.values()]
    path.write_bytes(b"".join(pickles + data) + behind)
    return path


class OddId(StorageId):
    """Pickled as a persistent id that is not a tuple."""

    def __init__(self, identity: object) -> None:
        self.identity = identity  # type: ignore[assignment]


def write_tar(path: Path, obj: object) -> Path:
    """A tar of torch 0.1 around an object without tensors."""
    members = {
        "sys_info": pickled({"protocol_version": 1000, "little_endian": True}),
        "pickle": pickled(obj),
        "storages": pickled(0) + pickled([]),
        "tensors": pickled(0),
    }
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1_480_000_000.25  # type: ignore[assignment]  # as of a real file
            archive.addfile(info, io.BytesIO(content))
    return path


@contextmanager
def gguf_writer(path: Path, **options: Any) -> Iterator[gguf.GGUFWriter]:
    """A writer of llama.cpp's package for a file, which is complete when the block ends."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    yield writer
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Script:
    """An object of the TorchScript class ``__torch__.{kind}``, with a state."""

    def __init__(self, kind: str, state: object) -> None:
        self.kind, self.state = kind, state


def script_opcodes(obj: object) -> bytes:
    """The opcodes of an object that may contain `Script`, in a dict or in its state."""
    if isinstance(obj, Script):
        return f"c__torch__\n{obj.kind}\n)".encode() + b"\x81" + script_opcodes(obj.state) + b"b"
    if isinstance(obj, dict):
        items = [script_opcodes(item) for pair in obj.items() for item in pair]
        return b"}(" + b"".join(items) + b"u"
    return pickled(obj)[2:-1]


def write_script(
    path: Path,
    root: object,
    *,
    data: bytes | None = None,
    constants: object = (),
    code: bytes = b"",
    storages: Mapping[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> Path:
    """A TorchScript archive around an object; one storage of 16 bytes by default."""
    records = {
        "data.pkl": b"\x80\x02" + script_opcodes(root) + b"." if data is None else data,
        "code/__torch__.py": code,
        "constants.pkl": pickled(constants),
        "version": b"3\n",
        **({"data/0": bytes(16)} if storages is None else storages),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            is_code = name.startswith("code/")
            archive.writestr(f"m/{name}", content, method if is_code else zipfile.ZIP_STORED)
    return path


def big_endian(path: Path, made: Path) -> Path:
    """The same torch zip file as from a big-endian machine: its numbers have four bytes."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("/byteorder"):
                data = b"big"
            if "/data/" in info.filename:
                count = len(data) // 4
                data = struct.pack(f">{count}I", *struct.unpack(f"<{count}I", data))
            new.writestr(info.filename, data)
    return made


def same_as(loaded: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, with equal strides, once nothing is lazy."""
    return same(loaded, found) and loaded.stride() == found.stride()


def other_kinds() -> dict[str, object]:
    """Tensors that torch makes of others, or of none, and storages; torch warns of some."""
    marked, shared = torch.ones(2, 2).to_sparse(), torch.arange(12.0)
    marked.note = "mine"
    return {
        **KINDS, "marked": marked, "parameter": torch.nn.Parameter(KINDS["coo"]),
        "none": torch.empty(0, 3).to_sparse(),
        "scalar": torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 0, torch.quint8),
        "meta": torch.empty(2, 3, device="meta").t(),
        "shared": shared, "part": shared[3:7].to_sparse(), "storage": shared.storage(),
        "bytes": torch.arange(6, dtype=torch.uint8).untyped_storage(), "w": shared[2:5],
        "dtypes": [torch.qint8, torch.int4],
    }  # fmt: skip


def assert_as_loaded(loaded: Mapping[str, object], ckpt: Mapping[str, torch.Tensor]) -> None:
    """Every tensor and storage that torch.load gave is that of the checkpoint, bit by bit."""
    for key, value in loaded.items():
        if isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            dtype = value.dtype if isinstance(value, torch.TypedStorage) else torch.uint8
            value = torch.empty(0, dtype=dtype).set_(value, 0, (len(value),), (1,))
        if isinstance(value, torch.Tensor):
            (facts, tensors), (found, others) = parts_of(value), parts_of(ckpt[key])
            assert facts == found, key
            assert len(tensors) == len(others)
            for one, two in zip(tensors, others, strict=True):
                assert same_as(one, two), key


def write_safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file around a header that is JSON or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def gguf_bytes(*values: object) -> bytes:
    """The start of a GGUF file: numbers as they are given, texts with their length."""
    data = b"GGUF"
    for value in values:
        if isinstance(value, str):
            data += struct.pack("<Q", len(value.encode())) + value.encode()
        else:
            code, number = value  # type: ignore[misc]
            data += struct.pack("<" + code, number)
    return data


def npy_bytes(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """A numpy file of one array with this header."""
    text = header.encode("latin1")
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H", len(text)) + text + data


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """A tensor made of nothing but the byte range, shape and stride of an entry."""
    dtype = getattr(torch, entry.dtype)
    if not entry.chunks:
        return torch.empty_strided(entry.shape, entry.stride, dtype=dtype)
    (chunk,) = entry.chunks
    with open(chunk.file, "rb") as file:
        file.seek(chunk.offset)
        data = bytearray(file.read(chunk.nbytes))
    assert len(data) == chunk.nbytes
    return torch.frombuffer(data, dtype=dtype).as_strided(entry.shape, entry.stride)


def assert_in_bounds(index: Index) -> None:
    """Every byte range lies in a file of the index, inside its entry's storage, or in any."""
    for storage in index.storages.values():
        assert storage.offset + storage.nbytes <= index.files[storage.file].size
    dense = [
        inner
        for entry in index.entries.values()
        for inner in (entry.kind.tensors if entry.kind else [entry])
    ]
    for entry in dense:
        own = index.storages.get(entry.storage)
        for chunk in entry.chunks:
            assert any(
                storage.file == chunk.file
                and storage.offset <= chunk.offset
                and chunk.offset + chunk.nbytes <= storage.offset + storage.nbytes
                for storage in (
                    [own] if own and len(entry.chunks) == 1 else index.storages.values()
                )
            )

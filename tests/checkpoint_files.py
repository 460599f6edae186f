"""Checkpoint files made byte by byte, right and wrong, and tensors read back from an index."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch._utils import _rebuild_tensor_v2

from torchlift.formats import Index, TensorEntry


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
    top: str = "archive/",
    method: int = zipfile.ZIP_STORED,
    storage_method: int = zipfile.ZIP_STORED,
) -> Path:
    """A torch zip archive around an object or a pickle; one storage of 16 bytes by default."""
    notes = {"version": b"3\n", "byteorder": b"little"} if notes is None else notes
    with zipfile.ZipFile(path, "w") as archive:
        content = pickled(obj) if data is None else data
        archive.writestr(top + "data.pkl", content, compress_type=method)
        for name, note in notes.items():
            archive.writestr(top + name, note)
        for name, values in ({"0": bytes(16)} if storages is None else storages).items():
            archive.writestr(f"{top}data/{name}", values, compress_type=storage_method)
    return path


def write_safetensors(path: Path, header: object, data: bytes = b"", pad: int = 0) -> Path:
    """A safetensors file around a header that is JSON or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) + pad) + text + data)
    return path


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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN and dtypes without arithmetic included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def assert_in_bounds(index: Index) -> None:
    """Every byte range lies in a file of the index, inside its entry's storage."""
    for entry in index.entries.values():
        for chunk in entry.chunks:
            storage = index.storages[entry.storage]
            assert storage.offset <= chunk.offset
            assert chunk.offset + chunk.nbytes <= storage.offset + storage.nbytes
            assert storage.offset + storage.nbytes <= index.files[chunk.file].size

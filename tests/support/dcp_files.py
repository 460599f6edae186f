"""Distributed checkpoints made item by item, right and wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def write_dcp(
    path: Path, described: dict[str, Any], items: dict[Any, bytes], at: dict[Any, Any] | None = None
) -> Path:
    """A distributed checkpoint with these items, one behind the other; `at` says otherwise."""
    path.mkdir()
    places, data = {}, b""
    for key, item in items.items():
        index = MetadataIndex(key) if isinstance(key, str) else MetadataIndex(*key)
        places[index] = _StorageInfo("__0_0.distcp", len(data), len(item))
        data += item
    (path / "__0_0.distcp").write_bytes(data)
    metadata = Metadata(described, None, {**places, **(at or {})})
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def describe(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)

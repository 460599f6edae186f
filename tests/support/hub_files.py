"""Files as the cache of Hugging Face's libraries lays them out, and damage to them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def hub_cache(folder: Path, files: dict[str, bytes]) -> Path:
    """Lay files out as the cache of Hugging Face's libraries has them; return the snapshot."""
    snapshot, blobs = folder / "models--org--name/snapshots/abc", folder / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, content in files.items():
        sha = hashlib.sha256(content).hexdigest()
        if name.endswith(".json"):
            sha = hashlib.sha1(content).hexdigest()
        (blobs / sha).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{sha}")
    return snapshot


def hub_files(folder: Path, numel: int = 300_000) -> dict[str, bytes]:
    """Two shards without checksums of their own, and their index."""
    contents = {}
    for number, key in enumerate("ab", 1):
        save_file({key: torch.arange(float(numel)) + number}, folder / "shard")
        contents[f"model-0000{number}-of-00002.safetensors"] = (folder / "shard").read_bytes()
    index = {"metadata": {}, "weight_map": dict(zip("ab", contents, strict=True))}
    return {**contents, "model.safetensors.index.json": json.dumps(index).encode()}


def damage(path: Path, at: int = -1) -> None:
    """Flip a bit of a byte, by default the last one, as a failing disk does."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.resolve().write_bytes(content)

"""Checkpoints in several files: an index of the form ``*.index.json`` names the file of each key.

The names in an index are a stranger's, so no shard may lie outside the index's own directory. One
layout is let through: in the Hugging Face cache, ``models--x/snapshots/<revision>/`` holds links
into ``models--x/blobs/``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torchlift.errors import CheckpointError, FormatError, UnsafeError
from torchlift.formats.index import FileStamp, Index, Storage, TensorEntry
from torchlift.formats.source import Source, parse_json

#: Most bytes of an index: that of a million tensors has about 100 MB.
_MAX_INDEX = 1 << 28

_CACHE_ROOT = re.compile(r"(models|datasets|spaces)--.+")

_ReadFile = Callable[[str], Index]


def read_sharded(path: str, read_file: _ReadFile) -> Index:
    """Read all shards that an ``*.index.json`` names, each once.

    Tensors that a shard holds and the index does not mention are kept: other loaders see them too.

    Args:
        path: absolute path of the index.
        read_file: reads one shard.

    Raises:
        FormatError: a malformed index, a missing shard, or a key that its shard lacks.
        UnsafeError: a shard outside the index's directory.
    """
    with Source(path) as source:
        if source.size > _MAX_INDEX:
            raise FormatError("the index is too large", expected=f"at most {_MAX_INDEX} bytes")
        content = parse_json(source.read(0, source.size), "the index")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(type(v) is str for v in weight_map.values()):
        raise FormatError(
            "an index without a map from keys to files",
            entry="weight_map",
            expected='{"weight_map": {"key": "file"}}',
        )
    directory = os.path.dirname(path)
    names = list(dict.fromkeys(weight_map.values()))
    # All names are checked before the first file is opened.
    files = {name: locate(directory, name) for name in names}
    shards = {name: _read_shard(read_file, file) for name, file in files.items()}
    for key, name in weight_map.items():
        shard = shards[name]
        if key not in shard.entries and key not in shard.objects and key not in shard.blocked_keys:
            raise FormatError(
                f"the index says that this key is in {name}, which lacks it",
                file=path,
                entry=key,
                hint="The index and the shards are of different checkpoints; fetch both again.",
            )
    return _Merge(path, shards, weight_map).index(_metadata(content.get("metadata")))


def read_set(path: str, names: Iterable[str], read_file: _ReadFile) -> Index:
    """Read the complete set ``x-00001-of-0000N`` of a directory that has no index.

    Args:
        path: absolute path of the directory.
        names: file names of the shards.
        read_file: reads one shard.

    Raises:
        FormatError: two shards hold the same key.
        UnsafeError: a shard is a link that leaves the directory.
    """
    files = {name: locate(path, name) for name in sorted(names)}
    shards = {name: _read_shard(read_file, file) for name, file in files.items()}
    return _Merge(path, shards, {}).index({})


def locate(directory: str, name: str) -> str:
    """The path of a shard, if it stays inside `directory`.

    Raises:
        UnsafeError: absolute, ``..``, a backslash, a drive, or a link that leads elsewhere.
        FormatError: no such file, or not a regular one.
    """
    parts = name.split("/")
    if not name or "\\" in name or ":" in name or "\0" in name or name.startswith("/"):
        problem: str | None = "a shard's name is not a plain relative one"
    else:
        problem = "a shard's name leaves the directory" if ".." in parts else None
    path = os.path.join(directory, name) if problem is None else ""
    if path and not _inside(directory, path):
        problem = "a shard is a link that leaves the directory"
    if problem is not None:
        raise UnsafeError(
            problem,
            entry=name,
            expected="a file in the same directory",
            found=os.path.realpath(path) if path else None,
            hint="Where you trust it, open that file itself, or copy it next to the index.",
        )
    if not os.path.exists(path):
        raise FormatError("a shard is missing", entry=name, expected=path, hint="Fetch it again.")
    return path


def _inside(directory: str, path: str) -> bool:
    """Whether `path`, links followed, is in `directory` or in the blobs of its cache."""
    base, real = os.path.realpath(directory), os.path.realpath(path)
    if real.startswith(os.path.join(base, "")):
        return True
    root, _, below = base.rpartition(f"{os.sep}snapshots{os.sep}")
    is_cache = bool(below) and _CACHE_ROOT.fullmatch(os.path.basename(root)) is not None
    return is_cache and os.path.dirname(real) == os.path.join(root, "blobs")


def _read_shard(read_file: _ReadFile, file: str) -> Index:
    try:
        return read_file(file)
    except CheckpointError as error:
        if error.file is None:
            error.file = file
        raise


def _metadata(found: object) -> dict[str, str]:
    """The index's metadata as text; it is optional and not always text."""
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FormatError("the index's metadata is not a map", entry="metadata")
    return {k: v if type(v) is str else json.dumps(v) for k, v in found.items()}


class _Merge:
    """Shards put together under one index, each storage named after its shard."""

    def __init__(self, path: str, shards: dict[str, Index], weight_map: dict[str, Any]) -> None:
        self.path = path
        self.weight_map = weight_map
        self.entries: dict[str, TensorEntry] = {}
        self.storages: dict[str, Storage] = {}
        self.files: dict[str, FileStamp] = {}
        self.objects: dict[str, object] = {}
        self.metadata: dict[str, str] = {}
        self.blocked: dict[str, None] = {}
        self.versions: dict[str, Any] = {}
        self.templates: dict[str, object] = {}
        self.blocked_keys: dict[str, str] = {}
        for name, shard in shards.items():
            self._add(name, shard)

    def _add(self, name: str, shard: Index) -> None:
        """Add one shard's content; the index decides which of two shards a key is taken from."""
        for key, entry in shard.entries.items():
            if self._claims(key, name):
                self.entries[key] = replace(entry, storage=f"{name}/{entry.storage}")
        for key, value in shard.objects.items():
            if self._claims(key, name):
                self.objects[key] = value
        for key, needed in shard.blocked_keys.items():
            if self._claims(key, name):
                self.blocked_keys[key] = needed
        for storage, where in shard.storages.items():
            self.storages[f"{name}/{storage}"] = where
        self.files.update(shard.files)
        self.metadata = {**shard.metadata, **self.metadata}
        self.blocked.update(dict.fromkeys(shard.blocked))
        self.versions.update(shard.module_versions)
        self.templates.update(shard.templates)

    def _claims(self, key: str, name: str) -> bool:
        """Whether `key` is to be taken from the shard `name`."""
        owner = self.weight_map.get(key, name)
        if owner == name and (
            key in self.entries or key in self.objects or key in self.blocked_keys
        ):
            raise FormatError(
                "two shards hold this key and no index says which one counts",
                entry=key,
                found=f"again in {name}",
            )
        return bool(owner == name)

    def index(self, extra: dict[str, str]) -> Index:
        """The whole."""
        return Index(
            path=self.path,
            format="sharded",
            entries=self.entries,
            storages=self.storages,
            files=self.files,
            objects=self.objects,
            metadata={**self.metadata, **extra},
            blocked=tuple(self.blocked),
            module_versions=self.versions,
            templates=self.templates,
            blocked_keys=self.blocked_keys,
        )

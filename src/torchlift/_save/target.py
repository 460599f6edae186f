"""The place and the format of a checkpoint that is saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchlift._save.files import write_errors
from torchlift._save.layouts import (
    Output,
    OwnFile,
    add_objects,
    dcp_output,
    safetensors_output,
    sharded_output,
    torch_output,
)
from torchlift._save.pickling import AS_TENSOR
from torchlift._save.values import State, ties_of
from torchlift._store.places import (
    exists,
    inside,
    is_folder,
    is_url,
    name_of,
    names_in,
    parent,
    place_of,
)
from torchlift._store.uploads import require_writable
from torchlift._system.text import parse_size
from torchlift.errors import CheckpointError, NotFound, PlacementError
from torchlift.formats.folders import PREFERRED
from torchlift.formats.layout import FORMATS, INDEX_SUFFIX, SETS, SUFFIXES, format_for
from torchlift.formats.table import DCP_METADATA, is_index, metadata_files

_SHARD = 5 * 10**9  # bytes, as in Hugging Face's libraries
_IN_FOLDER = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint is saved, and in which format.

    Attributes:
        path: absolute path or URL.
        format: ``"torch-zip"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``.
        limit: maximum size of a shard in bytes, or None.
    """

    path: str
    format: str
    limit: int | None

    @classmethod
    def of(
        cls,
        path: str | bytes | os.PathLike[str],
        format: str | None,
        size: int | str | None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Target:
        """Return the target that a caller's arguments describe.

        Raises:
            PlacementError: If nothing can be written to the URL.
            ValueError: If the format is unknown, or the arguments contradict each other.
        """
        given = os.fsdecode(path)
        with write_errors(given):  # there may be no current folder
            place = place_of(given, storage_options)
        if is_url(place):
            require_writable(place)
            given = place  # without its secrets
        found = format_for(given, format, (*FORMATS, *SETS))
        limit = None if size is None else parse_size(size)
        if limit is not None and found in ("torch-zip", "dcp"):
            raise ValueError(f"max_shard_size={size!r}: only safetensors have shards")
        if limit is not None and limit < 1:
            raise ValueError(f"max_shard_size={size!r}: expected a size such as '5GB'")
        if found == "safetensors" and _is_folder(place):
            place = inside(place, _IN_FOLDER)  # as save_pretrained does
        if found == "sharded" and not place.lower().endswith(INDEX_SUFFIX):
            is_file = place.lower().endswith(".safetensors") and not _is_folder(place)
            place = _with_suffix(place if is_file else inside(place, _IN_FOLDER))
        return cls(place, found, limit)

    @property
    def head(self) -> str:
        """Return the path of the only file, or of the file that lists the others."""
        return inside(self.path, DCP_METADATA) if self.format == "dcp" else self.path

    @property
    def heads(self) -> list[str]:
        """Return the paths that readers take for the same checkpoint. One of them is written."""
        if self.format == "dcp":
            return [self.head]
        if self.format != "sharded":
            return [self.path, _with_suffix(self.path)]
        # transformers looks for the one file first.
        one = name_of(self.path)[: -len(INDEX_SUFFIX)]
        is_file = os.path.splitext(one)[1].lower() in SUFFIXES
        return [self.path, *([inside(parent(self.path), one)] if is_file else [])]

    def require_free_place(self, head: str) -> None:
        """Refuse a place with a checkpoint of another format, which readers would load instead.

        Args:
            head: path of the only file, or of the file that lists the others.

        Raises:
            CheckpointError: If there is one.
        """
        folder, name = parent(head), name_of(head)
        heads = [each for each in self.heads if each != head]
        if is_url(head) and self.format not in ("safetensors", "sharded"):
            heads = []  # which costs a request, and few sets of torch files are in a store
        other = [name_of(each) for each in heads if exists(each)]
        if (self.format in SETS or name in PREFERRED) and _is_folder(folder):
            names = names_in(folder)
            if self.format == "dcp":
                other += [name for name in names if is_index(name) or name in PREFERRED]
            else:
                other += metadata_files(names)
        if other:
            raise CheckpointError(
                "the folder contains a checkpoint of another format, which readers may load",
                file=inside(folder, other[0]),
                hint="Save into another folder, or remove that checkpoint first.",
            )

    @property
    def only_tensors(self) -> bool:
        """Return whether the format stores tensors only."""
        return self.format in ("safetensors", "sharded")

    def require_storable(self, state: State, metadata: object) -> None:
        """Refuse values and metadata that the format does not store.

        Raises:
            PlacementError: If there is such a value.
            TypeError: If the metadata is not a mapping.
            ValueError: If there is metadata, and the format is not safetensors.
        """
        if metadata is not None and not isinstance(metadata, Mapping):
            raise TypeError(f"metadata: expected a mapping, found a {type(metadata).__name__}")
        if metadata and not self.only_tensors:
            raise ValueError(
                "a torch file does not store metadata: save as safetensors, or put the text into "
                "the state dict"
            )
        if self.only_tensors and state.objects:
            key, value = next(iter(state.objects.items()))
            raise PlacementError(
                "cannot be stored in a safetensors file",
                entry=key,
                expected="a dense tensor with values",
                found=state.lost.get(key, type(value).__name__),
                hint="Save as a torch file or as DCP, which hold plain data, or leave it out. "
                f"{AS_TENSOR}",
            )

    def lay_out(self, state: State, checksum: bool) -> Output:
        """Lay out the files of a state that one process writes.

        Raises:
            PlacementError: If the format does not store a key or a value.
        """
        values, metadata, limit = state.values, state.metadata, self.limit
        if self.format == "torch-zip":
            return torch_output(self.path, state, checksum)
        if self.format == "dcp":
            own = OwnFile(0)
            for value in values:
                own.add_box((0,) * len(value.shape), value, checksum)
            add_objects(own, state.objects)
            stored = {value.key: value.stored for value in values}
            return dcp_output(self.path, state, stored, own, ties_of(values))
        # They stand in front of the values, and a store gets all bytes in order.
        checksum = checksum and not is_url(self.path)
        if self.format == "sharded":
            return sharded_output(self.path, values, limit or _SHARD, metadata, checksum)
        one = safetensors_output(self.path, values, metadata, checksum)
        if limit is None or one.nbytes <= limit:
            return one
        return sharded_output(_with_suffix(self.path), values, limit, metadata, checksum)


def _with_suffix(path: str) -> str:
    """Return the path of the index of a file's shards."""
    return inside(parent(path), name_of(path) + INDEX_SUFFIX)


def _is_folder(place: str) -> bool:
    try:
        return is_folder(place)
    except NotFound:
        return False

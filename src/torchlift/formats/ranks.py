"""Folders in which each rank has a file of its slices, joined to whole tensors or refused.

FSDP trainers (verl, SkyRL) call the files ``model_world_size_N_rank_R.pt``, and torch's
``HuggingFaceStorageWriter(save_distributed=True)`` calls them ``shard-R-model-I-of-N.safetensors``.
Both say where each slice lies. What llama and Megatron write does not.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from torchlift._system.text import clipped_list
from torchlift.errors import FormatError
from torchlift.formats.boxes import Box, check_boxes, placed
from torchlift.formats.index import (
    SLICE,
    SLICED,
    UNEQUAL,
    Chunk,
    Index,
    Storage,
    TensorEntry,
    globals_in,
    row_major,
    used_by,
)
from torchlift.formats.reader import Content, Reader
from torchlift.formats.safetensors import read_safetensors, slices_error
from torchlift.formats.sharded import MOST_MISSING, claimed, missing, read_shards
from torchlift.formats.source import Source, errors_name
from torchlift.formats.unpickle import ENTRY, STEP, Budget

_FSDP = re.compile(r"(model|optim)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt", re.ASCII)
_SHARD = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors", re.ASCII)
#: Slices that nothing says how to join: llama's, and those of Megatron and of DeepSpeed with it.
_BARE = re.compile(
    r"consolidated\.(\d\d+)\.pth|mp_rank_(\d\d+)(?:_\d{3})*(?:_model_states\.pt)?", re.ASCII
)
#: In the metadata of slices: the version of what they note.
_VERSION = "DCP_VERSION"
_DEFLATED = "deflated"


def read_fsdp(content: Content) -> Index:
    """Read the index of a folder with files of FSDP's ranks.

    The model's tensors have its own names. An optimizer's state is below ``optimizer``.

    Raises:
        FormatError: a rank's file is missing, the ranks disagree, or a tensor has no layout.
        UnsafeError: a link leads out of the folder.
    """
    path, kinds = content.path, dict[str, dict[int, str]]()
    worlds = set[int]()
    for match in filter(None, map(_FSDP.fullmatch, content.names)):
        kinds.setdefault(match[1], {})[int(match[3])] = match[0]
        worlds.add(int(match[2]))
    world = max(worlds)
    if len(worlds) > 1 or any(max(there) >= world for there in kinds.values()):
        raise _several_saves(name for there in kinds.values() for name in there.values())
    for kind, there in kinds.items():
        lacking = (rank for rank in range(world) if rank not in there)
        if some := list(islice(lacking, MOST_MISSING)):
            names = [f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in some]
            raise missing(names, world, len(there), "rank's file")
    joined, aside = _Joined(path), ""
    for kind, there in sorted(kinds.items()):  # the model first
        if kind == "optim" and joined.indexes:
            aside = "optimizer"
            while any(key.partition(".")[0] == aside for key in joined.keys):
                aside = f"_{aside}"  # the model has one of that name
        names = [there[rank] for rank in range(world)]
        joined.add(read_shards(path, names, content.read_file, joined.budget), aside)
    return replace(joined.index(), aside=(aside,) if aside else ())


def read_slices(content: Content) -> Index:
    """Read the index of a folder of safetensors that hold one rank's slices each.

    Nothing in it says how many ranks there were, nor how large the tensors are. If the last ranks'
    files are missing, nothing can show it.

    Raises:
        FormatError: a file is missing between others, the slices leave gaps or overlap, or there
            are files of one rank only.
        UnsafeError: a link leads out of the folder.
    """
    names = [name for name in content.names if name.endswith(".safetensors")]
    if others := [name for name in names if not _SHARD.fullmatch(name)]:
        raise FormatError(
            "slices of tensors beside other files of weights",
            found=clipped_list(others),
            hint="Give the path of the one you mean, or move the slices to a folder of their own.",
        )
    there = {(int(m[1]), int(m[2])): m[3] for m in filter(None, map(_SHARD.fullmatch, names))}
    ranks, total = max(rank for rank, _ in there), next(iter(there.values()))
    count = ranks * int(total)
    every = product(range(1, ranks + 1), range(1, int(total) + 1))
    if some := list(islice((pair for pair in every if pair not in there), MOST_MISSING)):
        lacking = [f"shard-{rank:05}-model-{at:05}-of-{total}.safetensors" for rank, at in some]
        raise missing(lacking, count, min(len(there), count - len(some)), "rank's file")
    if len(there) > count or len({*there.values()}) > 1:
        raise _several_saves(names)
    if ranks == 1:
        raise slices_error(
            "Fetch the files of the other ranks. If there was one process only, call "
            "consolidate_safetensors_files(folder, new_folder, {key: 1, ...}), with every key, of "
            "torch.distributed.checkpoint._consolidate_hf_safetensors, and open the new folder."
        )
    joined = _Joined(content.path, grows=True)
    joined.add(read_shards(content.path, names, _read_slices, joined.budget))
    noted = {k: v for index in joined.indexes for k, v in index.metadata.items()}
    return replace(joined.index(), metadata={k: v for k, v in noted.items() if k != _VERSION})


def _read_slices(path: str, budget: Budget) -> Index:
    with errors_name(path), Source(path, budget) as source:
        return read_safetensors(source, sliced=True)


def _several_saves(names: Iterable[str]) -> FormatError:
    return FormatError(
        "the files of several saves, by different numbers of ranks",
        found=clipped_list(sorted(names)),
        hint="Move the files of one save into a folder of their own, and open that.",
    )


@dataclass(slots=True)
class _Joined:
    """The files of all ranks, put together.

    Attributes:
        path: of the folder.
        grows: whether a slice shows the size of its tensor only up to its own end.
        budget: what reading the folder may still cost.
        indexes: of the files.
        entries, storages, objects, blocked, tensors: as in an `Index`.
        tree: what each rank saved, if all ranks saved the same containers.
        first: boxes of a tensor -> the first key that has them; the others are ties.
    """

    path: str
    grows: bool = False
    budget: Budget = field(default_factory=Budget)
    indexes: list[Index] = field(default_factory=list)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    first: dict[tuple[Chunk, ...], str] = field(default_factory=dict)
    tree: tuple[Any] | None = None

    @property
    def keys(self) -> Iterable[str]:
        """Return the keys of all values."""
        return (*self.entries, *self.objects, *self.blocked)

    def add(self, files: Mapping[str, Index], container: str = "") -> None:
        """Add the files of all ranks, in their order, perhaps below a container."""
        prefix, parts = f"{container}." if container else "", dict[str, list[TensorEntry]]()
        for name, index in files.items():
            one = claimed(name, index, {})
            self.indexes.append(one)
            self.storages |= one.storages
            entries = one.every or one.entries
            self.budget.grow(16 * len(entries))  # each has paid for itself when its file was read
            for key, entry in entries.items():
                parts.setdefault(prefix + key, []).append(entry)
            for key, value in one.objects.items():
                if self.objects.setdefault(prefix + key, value) != value:
                    self.blocked[prefix + key] = UNEQUAL
            self.blocked |= {prefix + k: v for k, v in one.blocked_keys.items() if v != SLICED}
            self.tensors |= {prefix + k: count for k, count in one.blocked_tensors.items()}
        self._add_tree(self.indexes[-len(files) :], container)
        for key, found in parts.items():
            if key in self.blocked:
                continue
            self.budget.spend(ENTRY + len(key))
            with errors_name(self.path, key):
                made = self._joined(key, found, len(files))
            if made is None or key in self.objects:
                self.blocked[key], self.tensors[key] = UNEQUAL, 1
            else:
                self.entries[key] = made._replace(key=key)

    def _add_tree(self, ranks: Sequence[Index], container: str) -> None:
        """Keep the containers of the first rank, unless others have what it lacks."""
        keys = [{*one.entries, *one.objects, *one.blocked_keys} for one in ranks]
        tree = ranks[0].tree if all(some == keys[0] for some in keys) else None
        if container and tree is not None and self.tree is not None:
            (model,), (inner,) = self.tree, tree
            tree = ({**model, container: inner},) if isinstance(model, dict) else None
        self.tree = tree

    def index(self) -> Index:
        """Return the index of the whole."""
        first, gone = self.indexes[0], self.blocked
        return Index(
            self.path,
            "sharded",
            self.entries,
            used_by(self.entries, self.storages),
            {file: stamp for index in self.indexes for file, stamp in index.files.items()},
            {key: value for key, value in self.objects.items() if key not in gone},
            blocked=globals_in(gone),
            module_versions=first.module_versions,
            blocked_keys=gone,
            blocked_tensors={key: count for key, count in self.tensors.items() if key in gone},
            templates=first.templates,
            tree=self.tree,
            confirm={file: seen for index in self.indexes for file, seen in index.confirm.items()},
        )

    def _joined(self, key: str, parts: Sequence[TensorEntry], ranks: int) -> TensorEntry | None:
        """Return a tensor of all ranks; None if they have different values for it."""
        kinds = [part.kind for part in parts if part.kind is not None and part.kind.name == SLICE]
        first = parts[0]
        if not kinds:
            # FSDP1 keeps the state of a parameter in flat pieces, which are on some ranks only.
            is_same = len({self._marks(part) for part in parts}) == 1
            return first if len(parts) == ranks and (ranks == 1 or is_same) else None
        if lacks := next((lacks for _, lacks in (kind.facts for kind in kinds) if lacks), None):
            raise FormatError("a DTensor that is not laid out in a known way", expected=lacks)
        local = [kind.tensors[0] for kind in kinds]
        shapes = {part.shape for part in parts}
        if self.grows and len({*map(len, shapes)}) == 1:
            shapes = {tuple([max(sizes) for sizes in zip(*shapes, strict=True)])}
        stored = {(*(e for e in one.encoding if e != _DEFLATED),) for one in local if one.chunks}
        is_one = len({part.dtype for part in parts}) == len(shapes) == 1 and len(stored) < 2
        if len(kinds) < len(parts) or not is_one:
            raise FormatError(
                "the ranks disagree about a tensor",
                found=clipped_list(
                    dict.fromkeys(f"{part.type_name} {list(part.shape)}" for part in parts)
                ),
                hint="The files are of different saves: fetch those of one.",
            )
        boxes: dict[Box, tuple[Chunk, TensorEntry]] = {}
        for one, kind in zip(local, kinds, strict=True):
            for chunk in placed(one, kind.facts[0]):
                self.budget.spend(STEP)
                _, known = boxes.setdefault((chunk.start, chunk.shape), (chunk, one))
                if known is not one and self.grows:  # its writer stores each box once
                    raise FormatError("two files have the same slice of a tensor", found=chunk.file)
                if known is not one and self._differ(known, one):
                    return None
        (shape,) = shapes
        check_boxes(key, shape, list(boxes), self.budget)
        chunks = tuple([chunk for chunk, _ in boxes.values()])
        encoding = tuple(
            dict.fromkeys(name for one in local if one.chunks for name in one.encoding)
        )
        return first._replace(
            stride=row_major(shape),
            shape=shape,
            nbytes=math.prod(shape) * first.itemsize,
            location=local[0].location,
            storage=self.first.setdefault(chunks, key),
            chunks=chunks,
            encoding=tuple(encoding),
            kind=None,
        )

    def _marks(self, entry: TensorEntry) -> tuple[object, ...]:
        """Return what entries have in common if checksums show that their values are equal."""
        kind, storage = entry.kind, self.storages.get(entry.storage)
        if kind is not None:
            inner = tuple([self._marks(one) for one in kind.tensors])
            return entry.dtype, entry.shape, kind.name, repr(kind.facts), inner
        sums = [
            (chunk.offset - storage.offset, storage.nbytes, storage.crc32)
            if storage is not None and storage.crc32 is not None
            else id(chunk)
            for chunk in entry.chunks
        ]
        return entry.dtype, entry.shape, entry.stride, entry.encoding, *sums

    def _differ(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Return whether checksums show that two replicas of a slice have different values."""
        stored = [self.storages[entry.storage] for entry in (one, other)]
        # Of a part of a storage, the rest may be what nobody wrote.
        if any(found.nbytes != one.nbytes or found.crc32 is None for found in stored):
            return False
        return one.stride == other.stride and stored[0].crc32 != stored[1].crc32


# -- slices that nothing says how to join


def bare_slices(names: Collection[str]) -> list[str]:
    """Return the names in a folder of a model's slices, if there are several.

    Example:
        >>> bare_slices(["consolidated.01.pth", "params.json", "consolidated.00.pth"])
        ['consolidated.00.pth', 'consolidated.01.pth']
        >>> bare_slices(["consolidated.00.pth", "params.json"])
        []
    """
    found = sorted(filter(_BARE.fullmatch, names))
    # Of one kind: the first letters tell.
    return found if len(found) > 1 and found[0][:2] == found[-1][:2] else []


def bare_slices_error(names: list[str], path: str) -> FormatError:
    """Return the error for one or all of a model's slices."""
    return FormatError(
        "slices of a model, which do not say how they fit together",
        file=path,
        found=clipped_list(names),
        hint="Open each one with torchlift.open, put the tensors of all into one dict with the "
        "number of the slice before their names, and pass that with a rename for each kind of "
        'weight: torchlift.remap.merge("{n}.*.wq.weight", "*.wq.weight", cat=0).',
    )


def refuse_bare_slice(path: str) -> None:
    """Refuse a file, or a folder, that is one of a model's slices in a folder with others.

    Raises:
        FormatError: it is.
    """
    for _ in range(2):  # Megatron's files lie in a folder each
        path, name = os.path.split(path)
        names = os.listdir(path) if _BARE.fullmatch(name) and os.path.isdir(path) else []
        if several := bare_slices(names):
            raise bare_slices_error(several, os.path.join(path, name))


def _raise_bare(content: Content) -> Index:
    raise bare_slices_error(bare_slices(content.names), content.path)


FSDP = Reader(lambda content: any(map(_FSDP.fullmatch, content.names)), read_fsdp)
SLICES = Reader(lambda content: any(map(_SHARD.fullmatch, content.names)), read_slices)
BARE = Reader(lambda content: bare_slices(content.names), _raise_bare)

"""Folders with a file of slices for each rank: join the slices to whole tensors, or refuse them.

FSDP trainers (verl, SkyRL) write ``model_world_size_N_rank_R.pt``, and torch's
``HuggingFaceStorageWriter(save_distributed=True)`` writes ``shard-R-model-I-of-N.safetensors``.
Both say where each slice lies. The files of llama and Megatron do not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from torchlift._system.text import clipped_list
from torchlift.errors import FormatError
from torchlift.formats.boxes import Box, boxed, placed
from torchlift.formats.index import (
    SLICE,
    Chunk,
    Index,
    Lack,
    Storage,
    TensorEntry,
    free_name,
    globals_in,
    join,
    renamed,
    still_checked,
    used_by,
)
from torchlift.formats.pieces import Piece, assemble, differing_error
from torchlift.formats.safetensors import read_safetensors, slices_error
from torchlift.formats.sharded import by_number, claimed, read_shards, require_files
from torchlift.formats.source import Source, errors_name
from torchlift.formats.table import FSDP_FILE, SLICE_FILE
from torchlift.formats.unpickle import ENTRY, STEP, Budget

#: Words around the number of a slice, for which ``#`` stands.
_SLICE_WORDS = re.compile(
    r"(?<![a-z])(?:rank|part|layer|mp|tp|pp|consolidated|\d-model)[-_.]?#|#-mp\d", re.ASCII
)
#: Names of rank's files that say how they are joined.
_LAID_OUT = re.compile(r".*(?:_world_size_|zero_pp_rank_)\d", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
#: Key in the metadata of slices: the version of their notes.
_VERSION = "DCP_VERSION"


def read_fsdp(path: str, names: Iterable[str]) -> Index:
    """Read the index of a folder with files of FSDP's ranks.

    The model's tensors have its own names. An optimizer's state is below ``optimizer``.

    Raises:
        FormatError: If a rank lacks a file or has two, the ranks disagree, or a layout is unknown.
        UnsafeError: If a link leads out of the folder.
    """
    matches = [*filter(None, map(FSDP_FILE.fullmatch, names))]
    worlds = {int(match[2]) for match in matches}
    world = max(worlds)
    if len(worlds) > 1 or any(int(match[3]) >= world for match in matches):
        raise _several_saves(match[0] for match in matches)
    kinds = {
        kind: by_number((int(match[3]), match[0]) for match in matches if match[1] == kind)
        for kind in dict.fromkeys(match[1] for match in matches)
    }
    for kind, there in kinds.items():
        name = f"{kind}_world_size_{world}_rank_{{}}.pt"
        require_files(there, range(world), world, name.format)

    def read_all(kind: str) -> Index:
        names, budget = [kinds[kind][rank] for rank in range(world)], Budget()
        return _join(path, read_shards(path, names, budget), budget)

    if len(kinds) == 1:
        return read_all(*kinds)
    model = read_all("model")
    aside = free_name(model, "optimizer")
    optimizer = renamed(read_all("optim"), lambda key: f"{aside}.{key}")
    both = join(path, "sharded", [model, optimizer], {}, "the model has this key, too")
    saved = [*(model.tree or ()), *(optimizer.tree or ())]
    is_saved = len(saved) > 1 and isinstance(saved[0], dict)
    return replace(
        both, aside=(aside,), tree=({**saved[0], aside: saved[1]},) if is_saved else None
    )


def read_slices(path: str, names: Iterable[str]) -> Index:
    """Read the index of a folder of safetensors that hold one rank's slices each.

    The files do not say how many ranks there were, nor how large the tensors are. Missing slices
    of the last ranks cannot be detected. A rank writes a file only if it holds some of its tensors.
    A missing file is therefore detected by the gap that it leaves in a tensor.

    Raises:
        FormatError: If the slices leave gaps or overlap, all files of one number are missing, or
            only one rank has files.
        UnsafeError: If a link leads out of the folder.
    """
    names = [name for name in names if name.endswith(".safetensors")]
    if others := [name for name in names if not SLICE_FILE.fullmatch(name)]:
        raise FormatError(
            "the folder holds slices of tensors and other files of weights",
            found=clipped_list(others),
            hint="Pass the path of one file, or move the slices to a separate folder.",
        )
    matches = [*filter(None, map(SLICE_FILE.fullmatch, names))]
    ranks, numbers = {int(match[1]) for match in matches}, {int(match[2]) for match in matches}
    if len(totals := {match[3] for match in matches}) > 1 or max(numbers) > int(min(totals)):
        raise _several_saves(names)
    (total,) = totals
    name = f"shard-*-model-{{:05}}-of-{total}.safetensors".format
    require_files(numbers, range(1, int(total) + 1), int(total), name)
    if len(ranks) == 1:
        raise slices_error(
            "Fetch the files of the other ranks. If there was one process only, call "
            "consolidate_safetensors_files(folder, new_folder, {key: 1, ...}), with every key, of "
            "torch.distributed.checkpoint._consolidate_hf_safetensors, and open the new folder."
        )
    budget = Budget()
    found = read_shards(path, names, budget, _read_slices)
    noted = {k: v for index in found.values() for k, v in index.metadata.items() if k != _VERSION}
    return replace(_join(path, found, budget, grows=True), metadata=noted)


def _read_slices(path: str, budget: Budget) -> Index:
    with errors_name(path), Source(path, budget) as source:
        return read_safetensors(source, sliced=True)


def _several_saves(names: Iterable[str]) -> FormatError:
    return FormatError(
        "the files are of several saves with different numbers of ranks",
        found=clipped_list(sorted(names)),
        hint="Move the files of one save into a separate folder, and open it.",
    )


def _keys(index: Index) -> dict[str, None]:
    return dict.fromkeys((*index.entries, *index.objects, *index.blocked_keys))


def _join(path: str, files: Mapping[str, Index], budget: Budget, *, grows: bool = False) -> Index:
    """Join the indexes of all ranks.

    Args:
        path: Path of the folder.
        files: Name -> index, in the order of ranks.
        budget: Budget for reading the folder.
        grows: Whether a slice shows the size of its tensor only up to its own end.

    Raises:
        FormatError: As for `_whole`.
    """
    ranks = [claimed(name, index, {}) for name, index in files.items()]
    storages = {key: found for one in ranks for key, found in one.storages.items()}
    entries, objects, blocked = dict[str, TensorEntry](), dict[str, object](), dict[str, str]()
    parts: dict[str, dict[str, TensorEntry]] = {}
    for name, one in zip(files, ranks, strict=True):
        budget.grow(16 * len(one.tensors))  # each entry was paid for when its file was read
        for key, entry in one.tensors.items():
            parts.setdefault(key, {})[name] = entry
        blocked |= {key: why for key, why in one.blocked_keys.items() if why is not Lack.SLICED}
        for key, value in one.objects.items():
            if not _is_same(objects.setdefault(key, value), value):
                blocked[key] = Lack.UNEQUAL
    first: dict[tuple[Chunk, ...], str] = {}
    for key, found in parts.items():
        made = None
        if key not in blocked and key not in objects:
            budget.spend(ENTRY + len(key))
            with errors_name(path, key):
                made = _whole(key, found, len(ranks), storages, budget, grows)
        if made is None:
            blocked.setdefault(key, Lack.UNEQUAL)
        else:  # two names of one tensor have the same boxes, and get the same storage
            entries[key] = (
                made if made.storage else made._replace(storage=first.setdefault(made.chunks, key))
            )
    counts = {key: count for one in ranks for key, count in one.blocked_tensors.items()}
    counts = {**dict.fromkeys(parts, 1), **counts}
    used = used_by(entries, storages)
    same = all(_keys(one).keys() == _keys(ranks[0]).keys() for one in ranks)
    return replace(
        ranks[0],
        path=path,
        format="sharded",
        tensors=entries,
        storages=used,
        records=still_checked(used, ranks),
        files={file: stamp for one in ranks for file, stamp in one.files.items()},
        objects={key: value for key, value in objects.items() if key not in blocked},
        metadata={},
        blocked=globals_in(blocked),
        blocked_keys=blocked,
        blocked_tensors={key: counts[key] for key in blocked if key in counts},
        # The containers of one rank may lack keys that other ranks saved.
        tree=ranks[0].tree if same else None,
    )


def _is_same(one: object, other: object) -> bool:
    """Return whether two ranks saved one value. NaN, which does not equal itself, is one."""
    if one == other or (one != one and other != other):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    for kind in (list, tuple):
        if isinstance(one, kind) and isinstance(other, kind):
            return len(one) == len(other) and all(map(_is_same, one, other))
    return False


def _whole(
    key: str,
    parts: Mapping[str, TensorEntry],
    ranks: int,
    storages: Mapping[str, Storage],
    budget: Budget,
    grows: bool,
) -> TensorEntry | None:
    """Return the whole tensor, or None if checksums do not show that replicas are equal.

    Raises:
        FormatError: If the ranks disagree about the tensor, or its slices do not fill it.
    """
    every = [*parts.values()]
    kinds = [part.kind for part in every if part.kind is not None and part.kind.name == SLICE]
    if not kinds:
        # A plain value must be on all ranks. FSDP1 keeps flat pieces on some ranks only.
        is_same = ranks == 1 or len({_marks(part, storages) for part in every}) == 1
        return every[0] if len(every) == ranks and is_same else None
    if lacks := next((kind.facts[1] for kind in kinds if kind.facts[1]), None):
        raise FormatError("the layout of a DTensor is unknown", expected=lacks)
    encodings = {kind.tensors[0].encoding for kind in kinds if kind.tensors[0].chunks}
    if len(kinds) < len(every) or len(encodings) > 1:
        shown = [Piece(key, part.type_name, part.shape, file, None) for file, part in parts.items()]
        raise differing_error(key, shown)
    pieces: list[Piece] = []
    boxes: dict[Box, TensorEntry] = {}
    differ = False
    for (file, part), kind in zip(parts.items(), kinds, strict=True):
        (one,) = kind.tensors
        pieces.append(Piece(key, part.dtype, part.shape, file, None))
        for chunk in placed(one, kind.facts[0]):
            budget.spend(STEP)
            known = boxes.setdefault((chunk.start, chunk.shape), one)
            if known is one or grows:  # a writer whose files grow stores each box once
                pieces.append(pieces[-1]._replace(chunk=chunk))
            else:
                differ = differ or _differ(known, one, storages)
    # Without this check, a missing rank would leave a part of the tensor unset.
    whole = assemble(pieces, budget, grows=grows)
    first = every[0]._replace(encoding=next(iter(encodings), ()))
    return None if differ else boxed(first, whole.shape, whole.chunks)


def _marks(entry: TensorEntry, storages: Mapping[str, Storage]) -> tuple[object, ...]:
    """Return a value that is equal for two entries if checksums show that they are equal."""
    storage = storages.get(entry.storage)
    what = entry.dtype, entry.shape, entry.stride, entry.encoding
    if entry.kind is None and not entry.chunks:
        return what
    if entry.kind is not None or storage is None or storage.crc32 is None:
        return (id(entry),)
    starts = [chunk.offset - storage.offset for chunk in entry.chunks]
    return *what, *starts, storage.nbytes, storage.crc32


def _differ(one: TensorEntry, other: TensorEntry, storages: Mapping[str, Storage]) -> bool:
    """Return whether checksums show that two replicas of a slice have different values."""
    pair = [storages[entry.storage] for entry in (one, other)]
    # The checksum of a larger storage may differ in bytes outside of this slice.
    is_known = all(s.crc32 is not None and s.nbytes == one.nbytes for s in pair)
    return is_known and one.stride == other.stride and pair[0].crc32 != pair[1].crc32


# -- slices without a layout


@dataclass(frozen=True, slots=True)
class Family:
    """Files or folders whose names differ in one number only, which counts up from 0 or 1.

    Attributes:
        before: the text before the number.
        after: the text after it.
        members: number -> name.
    """

    before: str
    after: str
    members: Mapping[int, str]

    @property
    def are_slices(self) -> bool:
        """Return whether the names have a word for slices. Their content decides if they are."""
        match = _SLICE_WORDS.search(f"{self.before}#{self.after}")
        if match is None or _LAID_OUT.match(f"{self.before}0{self.after}"):
            return False
        return 0 in self.members or "rank" not in match[0]  # rank8 may be the rank of a LoRA

    def name(self, number: int) -> str:
        """Return the name of a member, which may be missing."""
        width = min(len(name) for name in self.members.values())
        digits = width - len(self.before) - len(self.after)
        return f"{self.before}{number:0{digits}}{self.after}"


def families(names: Iterable[str]) -> list[Family]:
    """Return the groups of names that differ in one number, those with words for slices first.

    A name with several numbers is in several groups. At most half of the numbers are missing.

    Example:
        >>> [[*each.members.values()] for each in families(["a1.pt", "a2.pt", "b1.pt", "a700.pt"])]
        []
        >>> [[*each.members.values()] for each in families(["a_1.pt", "a_2.pt", "x_1.pt"])]
        [['a_1.pt', 'a_2.pt']]
    """
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name in sorted(names):
        for number in _NUMBER.finditer(name):
            group = groups.setdefault((name[: number.start()], name[number.end() :]), {})
            group[int(number[0])] = name
    found = [
        Family(*place, members)
        for place, members in groups.items()
        if len(members) > 1 and min(members) < 2 and max(members) < 2 * len(members)
    ]
    return sorted(found, key=lambda each: not each.are_slices)


def has_slice_words(name: str) -> bool:
    """Return whether a name has a word for slices next to a number."""
    places = (number.span() for number in _NUMBER.finditer(name))
    return any(_SLICE_WORDS.search(f"{name[:start]}#{name[end:]}") for start, end in places)


def refuse_slices(names: Collection[str], path: str) -> NoReturn:
    """Raise the error for a model's slices without a layout."""
    raise FormatError(
        "the files are slices of a model, and do not say how to join them",
        file=path,
        found=clipped_list(names),
        hint="Open each one with torchlift.open. Put the tensors of all into one dict, with the "
        "number of the slice before their names. Pass the dict with a rename for each kind of "
        'weight: torchlift.remap.merge("{n}.*.wq.weight", "*.wq.weight", cat=0). '
        "If each file is a complete model, pass torchlift.open(file).",
    )

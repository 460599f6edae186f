"""Find the checkpoint in a folder: by its files, or because it is the only one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from torchlift._store.places import exists, head_of, inside, is_url, name_of, names_in, parent
from torchlift._system.text import clipped_list, printable
from torchlift.errors import FormatError
from torchlift.formats.detect import (
    CUT,
    cut_error,
    read_file,
    read_index,
    read_whole,
    refuse_unpacked,
)
from torchlift.formats.index import Index
from torchlift.formats.ranks import Family, families, has_slice_words, refuse_slices
from torchlift.formats.sharded import (
    AS_LIST,
    CACHE_ROOT,
    SHARD,
    by_number,
    locate,
    parse_index,
    put_together,
    read_sharded,
    read_shards,
    require_files,
)
from torchlift.formats.source import Source
from torchlift.formats.table import (
    DCP_METADATA,
    DCP_SUFFIX,
    FOLDERS,
    HEAD,
    NAMED_FILES,
    NAMED_FOLDERS,
    PROGRAMS,
    find_format,
    is_index,
    load,
    metadata_files,
    refuse_named,
)
from torchlift.formats.unpickle import Budget

_INDEX = ".index.json"
#: The end of an index's name, with its variant, if any.
_SUFFIX_OF_INDEX = re.compile(r"(\.\w+)?\.index(\.\w+)?\.json$", re.ASCII)
#: If a folder has several files, one of these is the model.
PREFERRED = (
    "model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin",
    "diffusion_pytorch_model.bin", "pytorch_model_fsdp.bin", "adapter_model.safetensors",
    "adapter_model.bin",
)  # fmt: skip
#: Files that transformers takes before an index of the same name.
_BEFORE_INDEX = re.compile(r"model(?:\.\w+)?\.safetensors|pytorch_model(?:\.\w+)?\.bin", re.ASCII)
_SEVERAL = "the directory holds several checkpoints"
_FOLDERS_INSIDE = "the directory does not contain a checkpoint itself, but in folders"
_MOST_FOLDERS = 1000
#: Most groups of names that are compared, which reads two files of each.
_MOST_FAMILIES = 4
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


def read_folder(path: str) -> Index:
    """Read the checkpoint in a directory.

    Raises:
        FormatError: If the directory does not have exactly one checkpoint.
        UnsafeError: If a link leads out of the directory.
    """
    names = _without_notes(names_in(path))
    if (data := [name for name in names if name.endswith(DCP_SUFFIX)]) and not metadata_files(
        names
    ):
        raise FormatError(
            "the DCP checkpoint is incomplete: its metadata is missing",
            expected=f"the file {DCP_METADATA}, which a save writes last",
            found=clipped_list(data, limit=10),
            hint="The save or the copy was interrupted. Save or fetch it again.",
        )
    if read := _reader_of(path, names):
        return read()
    if snapshot := _snapshot_in(path, names):
        return replace(read_folder(snapshot), path=path)
    if components := _components(path, names):
        raise _several(_FOLDERS_INSIDE, components, path)
    refuse_unpacked([path, *_folders(path, names), *([] if is_url(path) else [parent(path)])])
    refuse_named(names, [*PROGRAMS, *NAMED_FOLDERS])
    if cut := next(filter(CUT.fullmatch, names), None):
        raise cut_error(inside(path, cut))
    if found := [name for name in names if _may_be_weights(inside(path, name))]:
        read_file(locate(path, found[0]), Budget())  # raises the error that names the format
        raise _several("the directory holds files with unexpected names", found, path)
    raise FormatError(
        "the directory does not contain a checkpoint" if names else "the directory is empty",
        expected="an *.index.json, safetensors or torch files",
        found=clipped_list(names, limit=10) or None,
        hint="Pass the path of the file or directory with the weights.",
    )


def _reader_of(path: str, names: list[str]) -> Callable[[], Index] | None:
    """Return the function that reads the checkpoint of these files, or None without one."""
    indexes = [name for name in names if is_index(name)]
    others = [*indexes, *(name for name in PREFERRED if name in names)]
    rows = [(row, parts[0]) for row in FOLDERS if (parts := row.is_one(names))]
    if len(rows) + bool(others) > 1 and rows:
        return partial(_refuse_two, [*others, *(name for _, name in rows)], path)
    for row, _ in rows:
        return partial(load(row.reader), path, names)
    if indexes:
        return partial(_read_index_in, path, indexes, names)
    # Megatron and NeMo have a folder for each rank.
    for family in families(map(os.path.basename, _folders(path, names))):
        members = [*family.members.values()]
        if family.are_slices and all(_has_checkpoint(inside(path, each)) for each in members[:2]):
            return partial(refuse_slices, members, path)
    if others:
        return lambda: read_whole(locate(path, others[0]), Budget())
    files = [name for name in names if _is_weights(inside(path, name))]
    return partial(_read_some, path, files, names) if files else None


def _is_weights(path: str) -> bool:
    """Return whether a file has a suffix of weights. A tokenizer may end in ``.bin``, too."""
    if not path.endswith(_PICKLED):
        return path.endswith((".safetensors", ".gguf"))
    row = find_format(head_of(path, HEAD)) if _is_file(path) else None
    return row is not None and not row.is_guide


def _may_be_weights(path: str) -> bool:
    """Return whether a file has a suffix of weights, or starts like a format that is known."""
    if path.endswith(_PICKLED) or is_url(path):  # reading the head would be a request per file
        return path.endswith(_PICKLED) and _is_file(path)
    head = head_of(path, HEAD) if _is_file(path) else b""
    return any(re.match(row.pattern, head, re.DOTALL) for row in NAMED_FILES)


def _snapshot_in(path: str, names: Iterable[str]) -> str | None:
    """Return the folder of the current revision in the cache of one repository of the Hub.

    Raises:
        FormatError: If the cache has several revisions, and does not say which one is current.
    """
    if is_url(path) or not CACHE_ROOT.fullmatch(name_of(path)) or "snapshots" not in names:
        return None
    folder, main = inside(path, "snapshots"), os.path.join("refs", "main")
    revisions, current = sorted(names_in(folder)), []
    if exists(inside(path, main)):
        with Source(locate(path, main)) as source:
            current = [source.read_all(HEAD, "the name of the revision").decode().strip()]
    return inside(folder, _preferred(folder, revisions, current)) if revisions else None


def _several(what: str, names: list[str], path: str) -> FormatError:
    example = inside(path, names[0])
    hint = f"Pass the path of one of them, such as {printable(example, 300)!r}."
    return FormatError(what, found=clipped_list(names, limit=10), hint=hint)


def _components(path: str, names: list[str]) -> list[str]:
    """Return the names of folders in a directory that hold a checkpoint."""
    return [os.path.basename(each) for each in _folders(path, names) if _has_checkpoint(each)]


def _has_checkpoint(place: str) -> bool:
    """Return whether a place is a file, or a folder with a checkpoint."""
    if not os.path.isdir(place):
        return os.path.isfile(place)
    try:
        return _reader_of(place, _without_notes(os.listdir(place))) is not None
    except OSError:  # such as lost+found, which only root may read
        return False


def _without_notes(names: Iterable[str]) -> list[str]:
    """Return names in order, without the notes of macOS about each file."""
    return sorted(name for name in names if not name.startswith("._"))


def _folders(path: str, names: list[str]) -> list[str]:
    """Return the paths of folders in a directory, but none for a URL (a request for each)."""
    paths = [] if is_url(path) else [os.path.join(path, name) for name in names[:_MOST_FOLDERS]]
    return [each for each in paths if os.path.isdir(each) and not os.path.islink(each)]


def _refuse_two(names: list[str], path: str) -> NoReturn:
    raise _several("the directory holds two checkpoints of one model", names, path)


def _read_index_in(path: str, indexes: list[str], names: list[str]) -> Index:
    """Read the index in a folder, or the file that transformers takes in its place.

    Raises:
        FormatError: If there are several, and transformers does not take one of them.
    """
    order = (found for one in PREFERRED for found in (one, one + _INDEX) if found in names)
    name = next(order, None) or _preferred(path, indexes, ())
    single = _SUFFIX_OF_INDEX.sub(r"\2\1", name) if name in indexes else name
    for index in indexes:  # several, or one and the file whose shards it lists
        if _SUFFIX_OF_INDEX.sub(r"\2\1", index) != single:
            continue
        with Source(locate(path, index)) as source:
            if single not in names or single in parse_index(source).weight_map.values():
                return replace(read_sharded(source), path=path)
        if not _BEFORE_INDEX.fullmatch(single):
            _refuse_two([single, index], path)
    return read_whole(locate(path, single), Budget())


def _read_some(path: str, files: list[str], names: list[str]) -> Index:
    """Read the only set of files, or the only file if no folder has a checkpoint.

    Args:
        path: The directory.
        files: The names of files with weights.
        names: All names in the directory.

    Raises:
        FormatError: If there are several checkpoints, or a file of the set is missing.
    """
    sets: dict[tuple[str, ...], list[re.Match[str]]] = {}
    for match in filter(None, map(SHARD.fullmatch, files)):
        sets.setdefault((match[1], match[3], match[4]), []).append(match)
    if len(sets) == 1:
        ((stem, total, suffix), matches), *_ = sets.items()
        there = by_number((int(match[2]), match[0]) for match in matches)
        first, width = min(1, *there), len(matches[0][2])
        every = range(first, first + int(total))
        require_files(
            there, every, len(every), lambda n: f"{stem}-{n:0{width}}-of-{total}{suffix}", "shard"
        )
        return _read_set(path, there.values())
    if len(files) > 1:
        return _read_pieces(path, files)
    if components := _components(path, names):
        raise _several(_SEVERAL, [*files, *components], path)
    return read_whole(locate(path, files[0]), Budget())


def _read_set(path: str, names: Iterable[str]) -> Index:
    """Read a complete set of files of one checkpoint, without an index."""
    found = read_shards(path, names, Budget())
    if all(index.format == "gguf" for index in found.values()):
        from torchlift.formats.gguf import join_parts

        return join_parts(path, found)
    return put_together(path, found, {}, {})


def _read_pieces(path: str, names: list[str]) -> Index:
    """Read files whose names count up, if each has tensors of its own.

    Raises:
        FormatError: If they are not pieces of one checkpoint, or one of them is missing.
    """
    apart: list[Family] = []
    for family in families(names)[:_MOST_FAMILIES]:
        members = [family.members[number] for number in sorted(family.members)]
        if not _share_keys(*(read_file(locate(path, name), Budget()) for name in members[:2])):
            apart.append(family)
        elif family.are_slices:
            refuse_slices(members, path)
    for family in apart:
        if len(family.members) == len(names):
            first, last = min(family.members), max(family.members)
            every = range(first, last + 1)
            require_files(family.members, every, len(every), family.name, "piece")
            return _read_set(path, [family.members[number] for number in every])
    error = _several(_SEVERAL, names, path)
    if apart and not names[0].endswith(".gguf"):
        shown = clipped_list(apart[0].members.values(), limit=10)
        error.hint = f"Some files have different tensors: {shown}. To join them, {AS_LIST}"
    raise error


def _share_keys(one: Index, other: Index) -> bool:
    return not one.entries.keys().isdisjoint(other.entries)


def refuse_slice(path: str) -> None:
    """Refuse a file or folder that is one of several slices of a model.

    Raises:
        FormatError: If it is one.
        CheckpointError: If its name is that of a slice, and another one cannot be read.
    """
    below: tuple[str, ...] = ()
    for _ in range(2):  # Megatron has a folder for each file
        folder, name = os.path.split(path)
        is_likely = has_slice_words(name) and os.path.isdir(folder)
        for family in families(os.listdir(folder)) if is_likely else ():
            members = [*family.members.values()]
            if not family.are_slices or name not in members or (below and "rank" not in name):
                continue
            others = (os.path.join(folder, each, *below) for each in members if each != name)
            one, other = os.path.join(path, *below), next(filter(_has_checkpoint, others), None)
            if other and _share_keys(read_index(one), read_index(other)):
                refuse_slices(members, one)
        path, below = folder, (name, *below)


def _is_file(path: str) -> bool:
    """Return whether a path is a file. A URL counts as one."""
    return is_url(path) or os.path.isfile(path)


def _preferred(path: str, names: list[str], preferred: Sequence[str]) -> str:
    """Return the only name, or the first preferred one."""
    for name in names if len(names) == 1 else preferred:
        if name in names:
            return name
    raise _several(_SEVERAL, names, path)

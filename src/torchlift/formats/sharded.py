"""Checkpoints in several files: an index of the form ``*.index.json`` names the file of each key.

The names in an index are not trusted, so no shard may lie outside of the index's directory. The one
exception is the Hugging Face cache: ``models--x/snapshots/<revision>/`` holds links into
``models--x/blobs/``.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torchlift._store.places import exists, in_parallel, inside, is_url, open_place, parent
from torchlift._store.url import Url
from torchlift._system.text import clipped_list, count_of, printable
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.detect import read_file
from torchlift.formats.index import Index, TensorEntry, join
from torchlift.formats.source import Source, errors_name, parse_json
from torchlift.formats.unpickle import Budget

#: The name of one file of a set.
SHARD = re.compile(r"(.+)-(\d{2,9})-of-(\d{2,9})((?:\.\w+)+)", re.ASCII)
#: The way out if an index and its shards do not fit together.
AS_LIST = "pass the files as a list to torchlift.load or torchlift.convert."
#: Most files beside a set that are looked for.
_MOST_LOOKED = 10_000

#: Most bytes of an index: that of a million tensors has about 100 MB.
_MAX_INDEX = 1 << 28

#: The name of a repository's folder in the cache of the Hub.
CACHE_ROOT = re.compile(r"(models|datasets|spaces)--.+")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

_Number = TypeVar("_Number")


class ParsedIndex(NamedTuple):
    """The content of an index."""

    weight_map: Mapping[str, str]  # key -> file
    metadata: dict[str, str]


def read_sharded(source: Source) -> Index:
    """Read all shards that an ``*.index.json`` names, each once.

    Tensors of a shard that the index does not list are kept, as by other loaders.

    Args:
        source: The index.

    Raises:
        FormatError: If the index is malformed, a shard is missing, or a shard lacks its key.
        UnsafeError: If a shard lies outside of the index's directory.
    """
    weight_map, metadata = parse_index(source)
    directory = parent(source.path)
    shards = read_shards(directory, weight_map.values(), source.budget)
    for key, name in weight_map.items():
        shard = shards[name]
        if key not in shard.entries and key not in shard.objects and key not in shard.blocked_keys:
            raise FormatError(
                f"the index maps this key to {name}, which lacks it",
                file=source.path,
                entry=key,
                hint=f"The index is of another checkpoint. Fetch it again, or {AS_LIST}",
            )
    _refuse_forgotten(source.path, shards)
    # One name for each shard: an index may spell one file in a thousand ways.
    names = {id(shard): name for name, shard in reversed(shards.items())}
    claims = {key: names[id(shards[name])] for key, name in weight_map.items()}
    shards = {name: shards[name] for name in dict.fromkeys(claims.values())}
    made = put_together(source.path, shards, claims, metadata)
    return replace(made, guides={source.path: source.stamp})


def parse_index(source: Source) -> ParsedIndex:
    """Return what an ``*.index.json`` says.

    Raises:
        FormatError: If it is malformed, or JSON of another kind.
    """
    with errors_name(source.path):
        content = parse_json(source.read_all(_MAX_INDEX, "the index"), "the index")
    weight_map = content.get("weight_map", content)
    is_whole = weight_map is content  # accelerate also writes the map itself
    if not _is_map(weight_map) or (is_whole and not _names_weights(weight_map)):
        raise FormatError(
            "the JSON file is not an index of a checkpoint",
            expected='{"weight_map": {"key": "file"}}',
            found=printable(str(content), 200),  # it may be an error page
            hint="Pass the path of the weights, of their *.index.json, or of their folder.",
        )
    metadata = {} if is_whole else content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise FormatError("the index's metadata is not a map", entry="metadata")
    text = {k: v if type(v) is str else json.dumps(v) for k, v in metadata.items()}
    return ParsedIndex(weight_map, text)


def _refuse_forgotten(index: str, named: Iterable[str]) -> None:
    """Refuse an index that names some files of a set ``x-1-of-N``, if others lie beside them.

    Raises:
        FormatError: If there is such a file.
    """
    sets: dict[tuple[str, ...], dict[int, str]] = {}
    for match in filter(None, map(SHARD.fullmatch, named)):
        sets.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = match[2]
    folder, most = parent(index), MOST_MISSING if is_url(index) else _MOST_LOOKED
    for (stem, total, suffix), known in sets.items():
        first = min(1, *known)
        others = (n for n in range(first, first + int(total)) if n not in known)
        width = len(next(iter(known.values())))
        names = [f"{stem}-{n:0{width}}-of-{total}{suffix}" for n in itertools.islice(others, most)]
        is_there = in_parallel(folder, exists, [inside(folder, name) for name in names])
        if forgotten := [*itertools.compress(names, is_there)]:
            raise FormatError(
                "the index leaves out a file of the set that it names",
                file=index,
                entry=forgotten[0],
                expected=count_of(int(total), "file"),
                found=f"{len(known)}, without {clipped_list(forgotten)}",
                hint=f"Fetch the index again, or {AS_LIST}",
            )


def _is_map(content: object) -> bool:
    return isinstance(content, dict) and all(type(name) is str for name in content.values())


def _names_weights(content: Mapping[str, str]) -> bool:
    return bool(content) and all(name.endswith(_WEIGHTS) for name in content.values())


def locate(directory: str, name: str) -> str:
    """Return the path of a shard, if it stays inside `directory`.

    Raises:
        UnsafeError: If the name is absolute, has ``..``, a backslash or a drive, or is a link that
            leaves the directory.
        FormatError: If the file does not exist.
    """
    return locate_all(directory, [name])[name]


#: Most names of missing files in one message.
MOST_MISSING = 6


def missing(names: Sequence[str], expected: int, found: int, what: str = "shard") -> FormatError:
    """Return the error that names missing files of a checkpoint.

    Args:
        names: Names of the missing files: all of them, or the first ones.
        expected: Number of files of the checkpoint.
        found: Number of files that exist.
        what: Name of a file in the message, in the singular.
    """
    count = expected - found
    shown = ", ".join(printable(name, 200) for name in names[: MOST_MISSING - 1])
    more = f" and {count - MOST_MISSING + 1} more" if count >= MOST_MISSING else ""
    return FormatError(
        f"a {what} is missing" if count == 1 else f"{count} {what}s are missing",
        entry=names[0],
        expected=count_of(expected, "file"),
        found=f"{found}, without {shown}{more}",
        hint="The save or the copy was interrupted. Fetch the missing files.",
    )


def by_number(files: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return number -> name of the files of ranks, or of a set, in the order of the numbers.

    Raises:
        FormatError: If two names have one number, such as ``rank_0`` and a stale ``rank_00``.
    """
    found: dict[int, str] = {}
    for number, name in sorted(files):
        if other := found.get(number):
            raise FormatError(
                "two files have one number, so one of them is of another save",
                entry=name,
                found=f"{printable(other, 200)}, {printable(name, 200)}",
                hint="Move the older file into another folder.",
            )
        found[number] = name
    return found


def require_files(
    there: Collection[_Number],
    every: Iterable[_Number],
    count: int,
    name: Callable[[_Number], str],
    what: str = "rank's file",
) -> None:
    """Refuse a checkpoint with missing numbered files.

    Args:
        there: Numbers of the files that exist.
        every: Numbers of all files. Only those of the first missing files are listed.
        count: Number of all files.
        name: Number -> name of the file.
        what: Name of a file in the message, in the singular.
    """
    lacking = (number for number in every if number not in there)
    if some := list(itertools.islice(lacking, MOST_MISSING)):
        raise missing([*map(name, some)], count, min(len(there), count - len(some)), what)


def locate_all(directory: str, names: Iterable[str], *, is_sure: bool = False) -> dict[str, str]:
    """Return the path of each name as `locate` does: one path for all names of one file.

    A file has endless names, such as ``./a``, ``.//a`` and links. It must be read only once.

    Args:
        directory: The directory of the files.
        names: Names of files.
        is_sure: Whether to skip the check that files exist, if it takes a request for each.
    """
    plain: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if not name or name.startswith("/") or any(char in name for char in "\\:\0"):
            raise _unsafe("a shard's name is not a plain relative one", name)
        if ".." in name.split("/"):
            raise _unsafe("a shard's name leaves the directory", name)
        plain[name] = posixpath.normpath(name)  # before a system call for each spelling
    paths = {name: inside(directory, name) for name in dict.fromkeys(plain.values())}
    if outside := {n: os.path.realpath(p) for n, p in paths.items() if not _inside(directory, p)}:
        what = "a shard is a link that leaves the directory"
        raise _unsafe(what, *next(iter(outside.items())), _way_to(outside, len(paths)))
    there = [True] * len(paths)
    if not (is_sure and is_url(directory)):
        there = in_parallel(directory, exists, list(paths.values()))
    if lacking := sorted(name for name, is_there in zip(paths, there, strict=True) if not is_there):
        raise missing(lacking, len(paths), len(paths) - len(lacking))
    found: dict[str, str] = {}
    first: dict[tuple[int, int], str] = {}
    for name, path in paths.items():
        if isinstance(path, Url):  # URLs have no links
            found[name] = path
            continue
        status = os.stat(path)
        found[name] = first.setdefault((status.st_dev, status.st_ino), path)
    return {name: found[plain[name]] for name in plain}


def _unsafe(what: str, name: str, found: str | None = None, way_out: str = AS_LIST) -> UnsafeError:
    return UnsafeError(
        what,
        entry=name,
        expected="a file in the same directory",
        found=found,
        hint=f"If you trust it, {way_out}",
    )


def _way_to(outside: Mapping[str, str], count: int) -> str:
    """Return how to open links that leave their directory.

    Args:
        outside: Name of a link -> the file that it leads to.
        count: Number of files of the checkpoint.
    """
    folders = {os.path.dirname(path) for path in outside.values()}
    same = all(os.path.basename(path) == name for name, path in outside.items())
    if len(outside) < count or (count > 1 and not (same and len(folders) == 1)):
        return AS_LIST  # one of the files alone would be a part of the checkpoint
    place = next(iter(outside.values() if count == 1 else folders))
    return f"open {printable(place, 300)!r}."


def _inside(directory: str, path: str) -> bool:
    """Return whether `path`, without links, is in `directory` or in the blobs of its cache."""
    if isinstance(path, Url):
        return True
    base, real = os.path.realpath(directory), os.path.realpath(path)
    if real.startswith(os.path.join(base, "")):
        return True
    root, _, below = base.rpartition(f"{os.sep}snapshots{os.sep}")
    is_cache = bool(below) and CACHE_ROOT.fullmatch(os.path.basename(root)) is not None
    return is_cache and os.path.dirname(real) == os.path.join(root, "blobs")


def read_shards(
    directory: str,
    names: Iterable[str],
    budget: Budget,
    read: Callable[[str, Budget], Index] = read_file,
) -> dict[str, Index]:
    """Return name -> index of files in one folder. Files behind a URL are read in parallel."""
    # All names are checked before the first file is opened.
    files = locate_all(directory, names)
    places = list(dict.fromkeys(files.values()))
    if is_url(directory):  # each in parallel, with its own budget: it costs a request anyhow
        found = in_parallel(directory, lambda file: read(file, Budget()), places)
    else:
        found = [read(file, budget) for file in places]
    shards = dict(zip(places, found, strict=True))
    return {name: shards[file] for name, file in files.items()}


def put_together(
    path: str,
    shards: Mapping[str, Index],
    weight_map: Mapping[str, str],
    metadata: dict[str, str],
    format: str = "sharded",
) -> Index:
    """Join shards to one index."""
    for shard in shards.values():
        metadata = {**shard.metadata, **metadata}
    mine = [claimed(name, shard, weight_map) for name, shard in shards.items()]
    conflict = "two shards hold this key and no index says which one counts"
    return join(path, format, mine, metadata, conflict)


def claimed(name: str, shard: Index, weight_map: Mapping[str, str]) -> Index:
    """Return a shard without the keys that the index takes from other shards.

    The names of its storages get the shard's name as a prefix.
    """

    def mine(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if weight_map.get(key, name) == name}

    return replace(
        shard,
        tensors={key: _prefixed(entry, name) for key, entry in mine(shard.tensors).items()},
        storages={f"{name}/{key}": place for key, place in shard.storages.items()},
        records={f"{name}/{key}": place for key, place in shard.records.items()},
        objects=mine(shard.objects),
        blocked_keys=mine(shard.blocked_keys),
        blocked_tensors=mine(shard.blocked_tensors),
    )


def _prefixed(entry: TensorEntry, name: str) -> TensorEntry:
    """Return an entry whose storages are named for their shard."""
    kind = entry.kind
    if kind is not None:
        kind = replace(kind, tensors=tuple([_prefixed(inner, name) for inner in kind.tensors]))
    return entry._replace(storage=f"{name}/{entry.storage}", kind=kind)


def index_content(files: Mapping[str, Iterable[str]], nbytes: int) -> bytes:
    """Return an index of shards, as Hugging Face lays it out.

    Args:
        files: Name of a shard -> its keys.
        nbytes: Size of all tensors, in bytes.

    Example:
        >>> json.loads(index_content({"a": ["w"]}, 8))
        {'metadata': {'total_size': 8}, 'weight_map': {'w': 'a'}}
    """
    weight_map = {key: name for name, keys in files.items() for key in keys}
    content = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def shards_of(path: str) -> set[str]:
    """Return the names of weight files that an index names in its own folder.

    Raises:
        CheckpointError, OSError, ValueError: If it cannot be read.
    """
    with closing(open_place(path)) as file:
        content = json.loads(file.read(0, min(file.size, _MAX_INDEX)))
    found = content["weight_map"] if isinstance(content.get("weight_map"), dict) else content
    names = {name for name in found.values() if type(name) is str and os.sep not in name}
    return {name for name in names if name.endswith(_WEIGHTS)}

"""Which checkpoint a directory holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from torchlift.errors import FormatError
from torchlift.formats.dcp import metadata_files, read_dcp
from torchlift.formats.index import Index
from torchlift.formats.sharded import locate, read_set, read_sharded
from torchlift.formats.sniff import is_zip

_SHARD = re.compile(r"(.+)-(\d{2,9})-of-(\d{2,9})(\.\w+)", re.ASCII)
_INDEX = ".index.json"
#: Of several indexes or files, as Hugging Face repositories have them, these are the model.
_PREFERRED = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


def read_directory_of_files(path: str, read_file: Callable[[str], Index]) -> Index:
    """Read the checkpoint in a directory.

    In this order: the metadata of a distributed checkpoint (DCP); an ``*.index.json`` and its
    shards; safetensors files; torch files. Within each,
    a single file is taken, or a complete set ``x-00001-of-0000N``, or the one that is named as the
    model of a Hugging Face repository. Anything else is ambiguous, and an error that lists it.

    Args:
        path: absolute path of the directory.
        read_file: reads one file.

    Raises:
        FormatError: nothing, or more than one thing, that could be meant.
        UnsafeError: a link leads out of the directory.
    """
    names = sorted(os.listdir(path))
    described = metadata_files(names)
    if described:
        return read_dcp(path, described)
    indexes = [name for name in names if name.endswith(_INDEX)]
    if indexes:
        name = _choose(indexes, [name + _INDEX for name in _PREFERRED])
        return _renamed(read_sharded(locate(path, name), read_file), path)
    found = [name for name in names if name.endswith(".safetensors")] or [
        name for name in names if name.endswith(_PICKLED) and _is_torch(os.path.join(path, name))
    ]
    if not found:
        what = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
        raise FormatError(
            "a directory without a checkpoint" if names else "an empty directory",
            expected="an *.index.json, safetensors or torch files",
            found=what or None,
            hint="Give the path of the file or directory that holds the weights.",
        )
    if len(found) > 1 and _is_complete_set(found):
        return read_set(path, found, read_file)
    return read_file(locate(path, _choose(found, list(_PREFERRED))))


def _is_torch(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return is_zip(file.read(4), 0)


def _choose(names: list[str], preferred: list[str]) -> str:
    """The only name, or the first preferred one."""
    if len(names) == 1:
        return names[0]
    for name in preferred:
        if name in names:
            return name
    raise FormatError(
        "a directory with several checkpoints",
        found=", ".join(names),
        hint="Give the path of the one you mean.",
    )


def _is_complete_set(names: list[str]) -> bool:
    """Whether the names are exactly ``x-1-of-N`` to ``x-N-of-N``.

    Raises:
        FormatError: they are of one set, but not all of it.
    """
    matches = [_SHARD.fullmatch(name) for name in names]
    sets = {(m[1], m[3], m[4]) for m in matches if m}
    if len(sets) != 1 or not all(matches):
        return False
    ((stem, total, suffix),) = sets
    numbers = {int(m[2]) for m in matches if m}
    missing = [n for n in range(1, min(int(total), 10_000) + 1) if n not in numbers]
    if missing or len(numbers) != int(total):
        raise FormatError(
            "a set of shards that is not complete",
            expected=f"{int(total)} files {stem}-...-of-{total}{suffix}",
            found=f"{len(numbers)}, without number {missing[:5]}",
            hint="Fetch the missing ones.",
        )
    return True


def _renamed(index: Index, path: str) -> Index:
    """The same index under the path that was asked for."""
    from dataclasses import replace

    return replace(index, path=path)

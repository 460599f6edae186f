"""Find the reader of a path from its content, or name the format that torchlift does not read."""

from __future__ import annotations

import os
import re
import shlex
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from torchlift._store.files import read_error
from torchlift._store.places import (
    exists,
    head_of,
    inside,
    is_folder,
    is_url,
    name_of,
    names_in,
    parent,
    place_of,
    readable,
)
from torchlift._system.memory import collection_paused
from torchlift._system.text import clipped_list, printable
from torchlift.errors import CheckpointError, FormatError, NotAllowed, NotFound, UnsafeError
from torchlift.formats.index import Index
from torchlift.formats.source import Source, errors_name
from torchlift.formats.table import (
    DCP_METADATA,
    DCP_SUFFIX,
    EXPECTED,
    FILES,
    FOLDERS,
    HEAD,
    NAMED_FILES,
    TENSORFLOW,
    TENSORFLOW_DATA,
    TENSORFLOW_INDEX,
    find_format,
    is_text,
    load,
)
from torchlift.formats.unpickle import Budget

#: The first global of a pickle, as protocols from 4 on and earlier ones write it.
_CALLED = re.compile(
    rb"\x8c.([\w.]{1,200})\x94\x8c.(\w{1,100})\x94\x93|c([\w.]{1,200})\n(\w{1,100})\n", re.DOTALL
)
#: That global in the metadata of a DCP checkpoint.
_OF_DCP = "torch.distributed.checkpoint.metadata.Metadata"

#: Exceptions that a damaged file can make a reader raise.
_DAMAGE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError, struct.error, zlib.error,
)  # fmt: skip

#: One of the pieces into which a program cut a file, such as ``x.gguf.part1of2``.
CUT = re.compile(
    r"(.+\.(?:safetensors|gguf|pth?|bin|ckpt|npz))[.-]"
    r"(?:(?:part|split)[-_.]?|(?=\d+$|a[a-z]$))(\d+(?:of\d+)?|[a-z]{1,2})",
    re.DOTALL | re.ASCII,
)


def read_index(
    path: str | os.PathLike[str],
    *,
    alone: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Index:
    """Read the index of a checkpoint file or directory, whatever its format.

    This loads neither torch nor an unpickler, and reads no weights. It takes the time to read the
    header: about a millisecond for a file of a few hundred tensors.

    Args:
        path: A file, a directory or a URL. The content selects the format. One exception is
            ``*.distcp``, which would pass for a torch file of one item.
        alone: Whether the file is a temporary copy, which cannot be an index of other files.
        storage_options: Options for a URL, as for `torchlift.open`.

    Returns:
        The index. Byte offsets count from the start of each file.

    Raises:
        FormatError: If the path is missing, malformed, or not a checkpoint that torchlift reads.
        UnsafeError: If it names a file outside its own directory.

    Example:
        >>> import tempfile, os
        >>> header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
        >>> with open(path, "wb") as file:
        ...     _ = file.write(len(header).to_bytes(8, "little") + header + bytes(8))
        >>> read_index(path).entries["w"].shape
        (2,)
    """
    name = os.fsdecode(path)
    if not name:  # an unset variable: nobody means the current directory
        raise FormatError("the path is empty", hint="Pass the path of a file or directory.")
    absolute = readable(place_of(name, storage_options))
    try:
        with collection_paused(), errors_name(absolute):
            # HTTP cannot list a folder, but the metadata names every file of it.
            if name_of(absolute) == DCP_METADATA and exists(absolute):
                return load(FOLDERS[0].reader)(parent(absolute), [DCP_METADATA])
            if is_folder(absolute):
                return load("torchlift.formats.folders.read_folder")(absolute)
            return read_whole(absolute, Budget() if alone else None)
    except CheckpointError as error:
        is_cut = not alone and CUT.fullmatch(name_of(absolute))
        if is_cut and not isinstance(error, OSError) and not is_folder(absolute):
            raise cut_error(absolute) from error
        if type(error) is FormatError and is_url(absolute) and "/blob/" in absolute:
            # A hub or a forge shows this address as a page.
            bytes_at = absolute.replace("/blob/", "/resolve/", 1)
            error.hint = f"If this is the page of a file on a hub, open its bytes: {bytes_at}"
        raise
    except FileNotFoundError as error:
        with errors_name(absolute):
            _refuse_part(absolute)
        hint = _elsewhere(name)
        raise NotFound("no such file or directory", file=absolute, hint=hint) from error
    except PermissionError as error:
        raise NotAllowed("the file cannot be read", file=absolute, found=str(error)) from error
    except OSError as error:
        raise read_error("the file cannot be read", error, absolute, kind=FormatError) from error
    except _DAMAGE as error:
        raise FormatError(
            "the file is damaged", file=absolute, found=f"{type(error).__name__}: {error}"
        ) from error


#: Suffixes of weight files, which names of repositories do not have.
_OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json", ".gguf", ".npz", ".npy")


def _elsewhere(name: str) -> str:
    """Return the hint for a path that does not exist, and may mean something else."""
    if name[0] == "~":
        return "The file does not exist: check the path. A ~ stands for nothing here: expand it."
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", name):
        return f"A path has one slash too few for a URL: pass it as text, {match[1]}://..."
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(_OF_FILES)
    if is_name and not os.path.exists(os.path.dirname(name)):
        return (
            f"If this is the name of a repository on the Hugging Face Hub, open hf://{name}, or "
            f"download it first: hf download {name} --local-dir {name.rpartition('/')[2]}"
        )
    return "The file does not exist: check the path."


def read_whole(path: str, budget: Budget | None = None) -> Index:
    """Read a file of any format, with the other files of its checkpoint."""
    index = read_file(path, budget)
    names = [row.complete for row in FILES if row.complete and row.name == index.format]
    return load(names[0])(index) if names else index


def read_file(path: str, budget: Budget | None = None) -> Index:
    """Read one file of any format. A shard (with a budget) cannot be an index of more shards."""
    with errors_name(path), Source(path, budget) as source:
        if name_of(path).endswith(DCP_SUFFIX):  # several torch files in one: the last would be read
            raise _part_of_dcp(path)
        head = source.read(0, min(HEAD, source.size))
        row = find_format(head)
        if row is not None and not (row.is_guide and budget is not None):
            return load(row.reader)(source)
        if _called(head) == _OF_DCP:
            raise _part_of_dcp(path)
        if budget is None:  # else it is a part of another checkpoint, or a temporary copy
            _refuse_part(path)
        raise _foreign(head, source.size)


def _refuse_part(path: str) -> None:
    """Refuse a path that names a part of a checkpoint which the files next to it show."""
    if is_url(path):
        return
    refuse_unpacked([parent(path), parent(parent(path))])
    index = f"{path}.index"
    is_prefix = os.path.isfile(index) and re.match(TENSORFLOW_INDEX, head_of(index, HEAD))
    if is_prefix or re.fullmatch(TENSORFLOW_DATA, name_of(path)):
        raise FormatError("this is a TensorFlow checkpoint", expected=EXPECTED, hint=TENSORFLOW)


def refuse_unpacked(folders: Iterable[str]) -> None:
    """Refuse a torch file that was unpacked. macOS unpacks downloads without being asked."""
    for folder in folders:
        if all(exists(inside(folder, name)) for name in ("data.pkl", "version")):
            raise FormatError(
                "this is a torch file that was unpacked into a folder",
                file=folder,
                expected="the file itself",
                hint=f"Run this in the parent folder: zip -0 -r -D model.pt "
                f"{shlex.quote(os.path.basename(folder))}",
            )


def _part_of_dcp(path: str) -> FormatError:
    # Many servers cannot list a folder. A folder on a disk may have one metadata file per rank.
    whole = inside(parent(path), DCP_METADATA) if is_url(path) else parent(path)
    return FormatError(
        "this is one file of a DCP checkpoint",
        expected="the folder, or its .metadata",
        hint=f"Open {printable(whole, 300)!r}.",
    )


def _called(head: bytes) -> str | None:
    """Return the first global of the pickle at the start of a file, or None."""
    called = _CALLED.search(head) if head[:1] == b"\x80" else None
    return b".".join(filter(None, called.groups())).decode("ascii", "replace") if called else None


def _foreign(head: bytes, size: int) -> CheckpointError:
    """Return the error for a file of a foreign format, by its first bytes."""
    for row in NAMED_FILES:
        if re.match(row.pattern, head, re.DOTALL):
            name = _called(head)
            kind = UnsafeError if name else FormatError
            return kind(f"this is {row.what}", expected=EXPECTED, found=name, hint=row.hint)
    what, found = "not a checkpoint that torchlift reads", None
    hint = (
        "Check that the right file was fetched, completely. If another library reads this format, "
        "pass the dict of tensors that it returns."
    )
    if not size:
        what = "an empty file"
    elif not head.strip(b"\0"):
        what = "a file that starts with zeros only"
    elif head.lstrip()[:1] == b"<":
        what = "a web page or another XML text"
        hint = "A login or error page was saved instead of the file; fetch it again."
    elif is_text(head):
        what = "a text file, not a checkpoint"
        found = printable(head.decode(errors="replace").strip(), 200)  # it may be an error page
    else:
        found = f"{size} bytes starting with {head[:8]!r}"
    return FormatError(f"this is {what}", expected=EXPECTED, found=found, hint=hint)


def cut_error(path: str) -> FormatError:
    """Return the error for a piece of a file that was cut."""
    match = CUT.fullmatch(name_of(path))
    assert match is not None
    names = [name_of(path)] if is_url(path) else names_in(parent(path))
    pieces = [each for each in map(CUT.fullmatch, names) if each and each[1] == match[1]]
    pieces.sort(key=lambda each: (len(each[2]), each[2]))
    joined = " ".join(shlex.quote(each[0]) for each in pieces)
    hint = f"Run this in the folder of all pieces: cat {joined} > {shlex.quote(match[1])}"
    if len(pieces) < int(match[2].partition("of")[2] or 1):
        hint = "Fetch the other pieces into the same folder."
    return FormatError(
        "the file is a piece of a file that was cut",
        file=path,
        expected=match[1],
        found=clipped_list([each[0] for each in pieces], limit=10),
        hint=hint,
    )

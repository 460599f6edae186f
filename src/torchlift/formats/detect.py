"""What a file is, from its first bytes; above all, what it is that torchlift does not read."""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Callable

from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.dcp import metadata_files, read_dcp
from torchlift.formats.index import Index
from torchlift.formats.safetensors import read_safetensors
from torchlift.formats.sharded import locate, read_set, read_sharded
from torchlift.formats.torch_zip import read_torch_zip

#: Bytes at the start of a file that the detectors see.
HEAD = 512

_SAVE_AGAIN = "Where you trust the file, load it with torch.load and save it again with torch.save."

#: (offset, magic, what it is, what to do). The first that fits counts.
_FOREIGN: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
     "a torch file in the format used before torch 1.6, which torchlift does not read yet",
     _SAVE_AGAIN),
    (257, b"ustar", "a tar archive (torch's oldest format is one)",
     f"Unpack it first, or: {_SAVE_AGAIN}"),
    (0, b"version https://git-lfs.github.com/spec/",
     "a git-lfs pointer: the place of the weights, not the weights",
     "Fetch the file itself: git lfs pull."),
    (0, b"GGUF", "a GGUF file", "Convert it with the tools of llama.cpp or gguf-py."),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes", "Read it with h5py."),
    (0, b"\x93NUMPY", "a numpy array", "Read it with numpy.load."),
    (0, b"\x1f\x8b", "a gzip archive", "Decompress it first."),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive", "Decompress it first."),
    (0, b"\xfd7zXZ\0", "an xz archive", "Decompress it first."),
    (0, b"BZh", "a bzip2 archive", "Decompress it first."),
    (0, b"\x7fELF", "a program", "It holds no checkpoint."),
    *((0, bytes((0x80, protocol)), "a pickle that torch.save did not write",
       "Only unpickling could read it, which can run any code: ask for a file written by "
       "torch.save or safetensors.") for protocol in range(2, 6)),
)  # fmt: skip


def is_zip(head: bytes, size: int) -> bool:
    """Whether it starts like a zip archive."""
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether it starts like safetensors, even one whose header length is absurd."""
    return head[8:9] == b"{" and not _is_text(head[:8])


def is_json(head: bytes, size: int) -> bool:
    """Whether it starts like a JSON object."""
    return head.lstrip()[:1] == b"{" and _is_text(head)


def foreign(head: bytes, size: int) -> FormatError:
    """The error for a file that no reader takes: what it is and what to do."""
    expected = "a torch or safetensors file, or an *.index.json"
    for offset, magic, what, hint in _FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return FormatError(what, expected=expected, hint=hint)
    hint = "Check that the right file was fetched, completely."
    if not size:
        return FormatError("an empty file", expected=expected, hint=hint)
    if not head.strip(b"\0"):
        return FormatError("a file that starts with zeros only", expected=expected, hint=hint)
    if head.lstrip()[:1] == b"<":
        hint = "A login or error page was saved instead of the file; fetch it again."
        return FormatError("a web page or another XML text", expected=expected, hint=hint)
    if _is_text(head):
        return FormatError("a text file, not a checkpoint", expected=expected, hint=hint)
    return FormatError(
        "not a checkpoint that torchlift reads",
        expected=expected,
        found=f"{size} bytes starting with {head[:8]!r}",
        hint=hint,
    )


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The head may end within a character.
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode("utf-8")
    return bool(text) and all(c.isprintable() or c in "\r\n\t" for c in text)


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


def read_index(path: str | os.PathLike[str]) -> Index:
    """Read the index of a checkpoint file or directory, whatever its format.

    Neither torch nor an unpickler is involved, and no weight is read. The time is that of reading
    the header: about a millisecond for a file of a few hundred tensors.

    Args:
        path: a file or a directory. Its name does not matter, only its content.

    Returns:
        The index; byte offsets count from the start of each file.

    Raises:
        FormatError: missing, malformed, or not a checkpoint that torchlift reads.
        UnsafeError: it names a file outside its own directory.

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
    if not name:  # a setting that is not set: the current directory is not what was meant
        raise FormatError("an empty path", hint="Pass the path of a file or a directory.")
    absolute = os.path.abspath(name)
    try:
        return _read(absolute)
    except CheckpointError as error:
        if error.file is None:
            error.file = absolute
        raise
    except FileNotFoundError as error:
        raise FormatError(
            "no such file or directory",
            file=absolute,
            hint="The file does not exist: check the path."
            + (" A ~ stands for nothing here: expand it first." if name[0] == "~" else ""),
        ) from error
    except OSError as error:
        raise FormatError("the file cannot be read", file=absolute, found=str(error)) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
        zlib.error,
    ) as error:
        raise FormatError(
            "the file is damaged", file=absolute, found=f"{type(error).__name__}: {error}"
        ) from error


def _read(path: str) -> Index:
    """Read a directory, or a file of any format."""
    if os.path.isdir(path):
        return read_directory_of_files(path, _read_data_file)
    return _read_file(path, _READERS)


def _read_data_file(path: str) -> Index:
    """Read a file that holds tensors itself: a shard cannot be an index of further shards."""
    return _read_file(path, _DATA_READERS)


def _read_file(path: str, readers: tuple[tuple[_Detector, _Reader], ...]) -> Index:
    if not stat.S_ISREG(os.stat(path).st_mode):
        # Opening a named pipe would wait for somebody to write into it.
        raise FormatError("not a regular file", file=path)
    with open(path, "rb") as file:
        head = file.read(HEAD)
        size = os.fstat(file.fileno()).st_size
    for detect, read in readers:
        if detect(head, size):
            return read(path)
    error = foreign(head, size)
    error.file = path
    raise error


def _read_json(path: str) -> Index:
    return read_sharded(path, _read_data_file)


_Detector = Callable[[bytes, int], bool]
_Reader = Callable[[str], Index]

_DATA_READERS: tuple[tuple[_Detector, _Reader], ...] = (
    (is_zip, read_torch_zip),
    (is_safetensors, read_safetensors),
)
_READERS = (*_DATA_READERS, (is_json, _read_json))

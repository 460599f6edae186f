"""Find the reader of a path from its content, or name the format that torchlift does not read.

A new format is one file with a function that reads it, and one line in `_read_file`,
`_read_archive` or `_reader_of`.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

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
from torchlift._system.text import printable
from torchlift.errors import CheckpointError, FormatError, NotAllowed, NotFound, UnsafeError
from torchlift.formats.dcp import DCP_METADATA, DCP_SUFFIX, metadata_files, read_dcp
from torchlift.formats.gguf import join_parts, read_gguf, with_other_parts
from torchlift.formats.index import LOCAL_MAGIC, Index
from torchlift.formats.npz import NPY_MAGIC, read_npy, read_npz
from torchlift.formats.ranks import (
    Family,
    families,
    fsdp_files,
    has_slice_words,
    read_fsdp,
    read_slices,
    refuse_slices,
    slice_files,
)
from torchlift.formats.safetensors import read_safetensors
from torchlift.formats.sharded import (
    AS_LIST,
    CACHE_ROOT,
    SHARD,
    by_number,
    is_index,
    locate,
    parse_index,
    put_together,
    read_sharded,
    read_shards,
    require_files,
)
from torchlift.formats.source import Source, errors_name, marked_encoding
from torchlift.formats.torch_legacy import is_legacy, is_tar, read_torch_legacy, refuse_tar
from torchlift.formats.torch_zip import read_torch_zip
from torchlift.formats.torchscript import read_torchscript
from torchlift.formats.unpickle import Budget
from torchlift.formats.zero import read_zero, zero_files
from torchlift.formats.zip_archive import END_MAGIC, read_directory

#: Bytes at the start of a file that decide on its format.
HEAD = 512
_EXPECTED = "a file of torch (TorchScript, too), safetensors, GGUF or numpy, or an *.index.json"
_TENSORFLOW = "Read it with tf.train.load_checkpoint, and save its arrays with numpy.savez."
#: The start of a checkpoint's index, with the number of its shards, and the name of a shard.
_TENSORFLOW_INDEX = rb"\0\0[\4-\x0f]\x08[\1-\xff]{1,3}\x1a[\2]\x08"
_TENSORFLOW_DATA = r".*\.data-\d{5}-of-\d{5}"
_REPACK = "If it was unpacked, run this in the parent folder: zip -0 -r -D model.pt"
#: (pattern of the first bytes, name of the format, hint). The first match counts.
_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (rb"version https://git-lfs\.github\.com/spec/",
     "a git-lfs pointer: the place of the weights, not the weights",
     "Fetch the file itself: git lfs pull."),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes (.h5)", "Read it with h5py."),
    (rb"\x1f\x8b|BZh|\xfd7zXZ\0|\x28\xb5\x2f\xfd", "a gzip, bzip2, xz or zstd archive",
     "Decompress it first."),
    (rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", "a 7z or rar archive", "Unpack it first."),
    (rb"\0\x05\x16\x07", "notes of macOS (AppleDouble) about a file, not the file",
     "Open the file of the same name without the ._ in front."),
    (rb"tjgg|lmgg|fmgg|algg", "a ggml file from before GGUF",
     "Convert it to GGUF with the llama.cpp of its time, or fetch the model as GGUF."),
    (rb".{4}(?:ET1\d|FT01)", "an ExecuTorch program (.pte), or the weights of one (.ptd)",
     "It was compiled from a model: save the state dict of that model."),
    (rb".{4}TFL3", "a TensorFlow Lite model", "Read it with tf.lite.Interpreter."),
    (rb"ptrt|ftrt", "an engine of TensorRT",
     "Its weights are compiled into it: use the model that it was made from."),
    (rb"\x08\x01\x12", "a TensorFlow SavedModel", _TENSORFLOW),
    (_TENSORFLOW_INDEX, "a TensorFlow checkpoint", _TENSORFLOW),
    (rb"\x08[\x03-\x1f](?:\x12(?:\0|[\x01-\x7f][ -~])|[\x1a\x22\x28\x32\x3a\x42])", "an ONNX model",
     "Read it with onnx: its numpy_helper gives each initializer as an array."),
    (rb"\x80[\2-\5].*[\0\7]storage[q\x94]", "the data.pkl of a torch file, without its values",
     f"Open the torch file itself. {_REPACK} model"),
    (rb"\x80[\2-\5].*(?:c|\x8c.)numpy[.\n]", "a pickle of NumPy arrays",
     "Only unpickling reads it, which can run any code. If you trust its author, load it with "
     "pickle.load, make tensors with torch.from_numpy, and save these with torchlift.save."),
    (rb"\x80[\2-\5]", "a pickle that torch.save did not write",
     "Only unpickling could read it, which can run any code: ask for a file written by "
     "torch.save or safetensors."),
    # A map whose first name is text, or an array by itself.
    (rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9\xda]|(?:\xc7.|\xc8..|\xc9....)\x01",
     "a msgpack file, such as flax writes",
     "Load it with flax.serialization.msgpack_restore, and save its arrays with safetensors.flax."),
)  # fmt: skip
#: A record of exported programs before torch 2.8.
_OLD_PROGRAM = "serialized_exported_program.json"
#: The same with the name of a record of a zip archive, or of a file in a directory.
_FOREIGN_NAMES: tuple[tuple[str, str, str], ...] = (
    (rf"[^/]+/models/[^/]+\.json|{re.escape(_OLD_PROGRAM)}",
     "an exported program (torch.export.save)",
     "If you trust the file, load its weights with torch: "
     "torchlift.load(model, torch.export.load(path).state_dict)"),
    (r"[^/]+/archive_format", "a compiled program (AOTInductor), which includes its weights",
     "Save the state dict of the model that it was compiled from."),
    (r"model\.weights\.h5", "a Keras model (.keras)",
     "Read it with keras, or take model.weights.h5 out of it and read that with h5py."),
    (r"(?:.*/)?saved_model\.pb", "a TensorFlow SavedModel", _TENSORFLOW),
    (_TENSORFLOW_DATA, "a TensorFlow checkpoint", _TENSORFLOW),
    (r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt", "a checkpoint of orbax (jax)",
     "Read it with orbax, and save its arrays with numpy.savez or safetensors."),
    (r"(?:.*/)?\.data/extern_modules", "a package of torch.package",
     "Load it with torch.package.PackageImporter, and save its tensors with torchlift.save."),
    (r"(?:.*/)?[^/]+\.(?:safetensors|gguf|pth?|bin|ckpt|msgpack)",
     "an archive with a checkpoint in it", "Unpack it first."),
)  # fmt: skip
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
#: One of the pieces into which a program cut a file, such as ``x.gguf.part1of2``.
_CUT = re.compile(
    r"(.+\.(?:safetensors|gguf|pth?|bin|ckpt|npz))[.-]"
    r"(?:(?:part|split)[-_.]?|(?=\d+$|a[a-z]$))(\d+(?:of\d+)?|[a-z]{1,2})",
    re.DOTALL | re.ASCII,
)
_SEVERAL = "the directory holds several checkpoints"
_FOLDERS_INSIDE = "the directory does not contain a checkpoint itself, but in folders"
_MOST_FOLDERS = 1000
#: Most groups of names that are compared, which reads two files of each.
_MOST_FAMILIES = 4
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


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
                return read_dcp(parent(absolute), [DCP_METADATA])
            if is_folder(absolute):
                return _read_directory(absolute)
            return _read_whole(absolute, Budget() if alone else None)
    except CheckpointError as error:
        is_cut = not alone and _CUT.fullmatch(name_of(absolute))
        if is_cut and not isinstance(error, OSError) and not is_folder(absolute):
            raise _cut_error(absolute) from error
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


def _read_whole(path: str, budget: Budget | None = None) -> Index:
    """Read a file of any format, with the other parts of its model."""
    index = _read_file(path, budget)
    return with_other_parts(index, _read_file) if index.format == "gguf" else index


def _read_file(path: str, budget: Budget | None = None) -> Index:
    """Read one file of any format. A shard (with a budget) cannot be an index of more shards."""
    with errors_name(path), Source(path, budget) as source:
        if name_of(path).endswith(DCP_SUFFIX):  # several torch files in one: the last would be read
            raise _part_of_dcp(path)
        head = source.read(0, min(HEAD, source.size))
        if _is_zip(head):
            return _read_archive(source)
        if is_legacy(head):
            return read_torch_legacy(source)
        if is_tar(head):
            refuse_tar(source)
        if _is_safetensors(head):
            return read_safetensors(source)
        if head[:4] == b"GGUF":
            return read_gguf(source)
        if head[:6] == NPY_MAGIC:
            return read_npy(source)
        if _is_json(head) and budget is None:
            return read_sharded(source, _read_file)
        if _called(head) == _OF_DCP:
            raise _part_of_dcp(path)
        if budget is None:  # else it is a part of another checkpoint, or a temporary copy
            _refuse_part(path)
        raise _foreign(head, source.size)


def _read_archive(source: Source) -> Index:
    """Read a zip archive, whose records decide on its format."""
    records = read_directory(source)
    first = next(iter(records), "")
    top = first[: first.find("/") + 1]  # torch's archives have one folder
    if any(name in records for name in (f"{top}archive_format", _OLD_PROGRAM)):
        _refuse_foreign(records, _FOREIGN_NAMES)  # torch.load may find a second content in it
    if f"{top}constants.pkl" in records:
        return read_torchscript(source, records)
    if f"{top}data.pkl" in records:
        return read_torch_zip(source, records=records)
    if first.endswith(".npy"):
        return read_npz(source, records)
    _refuse_foreign(records, _FOREIGN_NAMES)
    names = {name.rpartition("/")[2].lower() for name in records}
    if "serialization_id" in names and "data.pkl" not in names:
        raise FormatError(
            "data.pkl is missing: the torch.save that wrote this file raised an error",
            hint="Save again. The error names the object that torch.save cannot write.",
        )
    return read_torch_zip(source, records=records)  # raises the error that names what is missing


def _refuse_part(path: str) -> None:
    """Refuse a path that names a part of a checkpoint which the files next to it show."""
    if is_url(path):
        return
    _refuse_unpacked([parent(path), parent(parent(path))])
    index = f"{path}.index"
    is_prefix = os.path.isfile(index) and re.match(_TENSORFLOW_INDEX, head_of(index, HEAD))
    if is_prefix or re.fullmatch(_TENSORFLOW_DATA, name_of(path)):
        raise FormatError("this is a TensorFlow checkpoint", expected=_EXPECTED, hint=_TENSORFLOW)


def _refuse_unpacked(folders: Iterable[str]) -> None:
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


def _refuse_foreign(names: Iterable[str], known: Iterable[tuple[str, str, str]]) -> None:
    """Refuse an archive or a directory of another program that has one of these names."""
    for pattern, what, hint in known:
        if found := next((name for name in names if re.fullmatch(pattern, name, re.DOTALL)), None):
            raise FormatError(f"this is {what}", expected=_EXPECTED, found=found, hint=hint)


def _is_zip(head: bytes) -> bool:
    return head[:4] in (LOCAL_MAGIC, END_MAGIC)


def _is_safetensors(head: bytes) -> bool:
    """Return whether it starts like safetensors, even one whose header length is absurd."""
    header = head[8:].lstrip(b" \t\r\n")[:1]
    return (header == b"{" or (not header and len(head) == HEAD)) and not _is_text(head[:8])


def _is_json(head: bytes) -> bool:
    if marked_encoding(head):  # the reader refuses the mark by name
        return head[2:].lstrip(b"\xbf\0 \t\r\n")[:1] == b"{"
    return head.lstrip()[:1] == b"{" and _is_text(head)


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # The head may end in the middle of a character.
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode()
    return bool(text) and all(c.isprintable() or c in "\r\n\t" for c in text)


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
    for magic, what, hint in _FOREIGN:
        if re.match(magic, head, re.DOTALL):
            name = _called(head)
            kind = UnsafeError if name else FormatError
            return kind(f"this is {what}", expected=_EXPECTED, found=name, hint=hint)
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
    elif _is_text(head):
        what = "a text file, not a checkpoint"
        found = printable(head.decode(errors="replace").strip(), 200)  # it may be an error page
    else:
        found = f"{size} bytes starting with {head[:8]!r}"
    return FormatError(f"this is {what}", expected=_EXPECTED, found=found, hint=hint)


def _read_directory(path: str) -> Index:
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
            found=_listed(data),
            hint="The save or the copy was interrupted. Save or fetch it again.",
        )
    if read := _reader_of(path, names):
        return read()
    if snapshot := _snapshot_in(path, names):
        return replace(_read_directory(snapshot), path=path)
    if components := _components(path, names):
        raise _several(_FOLDERS_INSIDE, components, path)
    _refuse_unpacked([path, *_folders(path, names), *([] if is_url(path) else [parent(path)])])
    _refuse_foreign(names, _FOREIGN_NAMES[:-1])
    if cut := next(filter(_CUT.fullmatch, names), None):
        raise _cut_error(inside(path, cut))
    if found := [name for name in names if _may_be_weights(inside(path, name))]:
        _read_file(locate(path, found[0]), Budget())  # raises the error that names the format
        raise _several("the directory holds files with unexpected names", found, path)
    raise FormatError(
        "the directory does not contain a checkpoint" if names else "the directory is empty",
        expected="an *.index.json, safetensors or torch files",
        found=_listed(names) or None,
        hint="Pass the path of the file or directory with the weights.",
    )


def _reader_of(path: str, names: list[str]) -> Callable[[], Index] | None:
    """Return the function that reads the checkpoint of these files, or None without one."""
    indexes = [name for name in names if is_index(name)]
    others = [*indexes, *(name for name in PREFERRED if name in names)]
    metadata, ranks = metadata_files(names), fsdp_files(names)
    for parts, read in (
        (metadata, partial(read_dcp, path, metadata)),
        (zero_files(names), partial(read_zero, path, names, _read_file)),
        ([match[0] for match in ranks], partial(read_fsdp, path, ranks, _read_file)),
    ):
        if parts:
            return partial(_refuse_two, [*others, parts[0]], path) if others else read
    if indexes:
        return partial(_read_index_in, path, indexes, names)
    if slice_files(names):
        return partial(read_slices, path, names)
    # Megatron and NeMo have a folder for each rank.
    for family in families(map(os.path.basename, _folders(path, names))):
        members = [*family.members.values()]
        if family.are_slices and all(_has_checkpoint(inside(path, each)) for each in members[:2]):
            return partial(refuse_slices, members, path)
    if others:
        return lambda: _read_whole(locate(path, others[0]), Budget())
    files = [name for name in names if _is_weights(inside(path, name))]
    return partial(_read_some, path, files, names) if files else None


def _is_weights(path: str) -> bool:
    """Return whether a file has a suffix of weights. A tokenizer may end in ``.bin``, too."""
    if not path.endswith(_PICKLED):
        return path.endswith((".safetensors", ".gguf"))
    head = head_of(path, HEAD) if _is_file(path) else b""
    return _is_zip(head) or is_legacy(head) or is_tar(head)


def _may_be_weights(path: str) -> bool:
    """Return whether a file has a suffix of weights, or starts like a format that is known."""
    if path.endswith(_PICKLED) or is_url(path):  # reading the head would be a request per file
        return path.endswith(_PICKLED) and _is_file(path)
    head = head_of(path, HEAD) if _is_file(path) else b""
    return any(re.match(magic, head, re.DOTALL) for magic, *_ in _FOREIGN)


def _cut_error(path: str) -> FormatError:
    """Return the error for a piece of a file that was cut."""
    match = _CUT.fullmatch(name_of(path))
    assert match is not None
    names = [name_of(path)] if is_url(path) else names_in(parent(path))
    pieces = [each for each in map(_CUT.fullmatch, names) if each and each[1] == match[1]]
    pieces.sort(key=lambda each: (len(each[2]), each[2]))
    joined = " ".join(shlex.quote(each[0]) for each in pieces)
    hint = f"Run this in the folder of all pieces: cat {joined} > {shlex.quote(match[1])}"
    if len(pieces) < int(match[2].partition("of")[2] or 1):
        hint = "Fetch the other pieces into the same folder."
    return FormatError(
        "the file is a piece of a file that was cut",
        file=path,
        expected=match[1],
        found=_listed([each[0] for each in pieces]),
        hint=hint,
    )


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
    return FormatError(what, found=_listed(names), hint=hint)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")


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
                return replace(read_sharded(source, _read_file), path=path)
        if not _BEFORE_INDEX.fullmatch(single):
            _refuse_two([single, index], path)
    return _read_whole(locate(path, single), Budget())


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
    return _read_whole(locate(path, files[0]), Budget())


def _read_set(path: str, names: Iterable[str]) -> Index:
    """Read a complete set of files of one checkpoint, without an index."""
    found = read_shards(path, names, _read_file, Budget())
    if all(index.format == "gguf" for index in found.values()):
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
        if not _share_keys(*(_read_file(locate(path, name), Budget()) for name in members[:2])):
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
        members = [*apart[0].members.values()]
        error.hint = (
            f"Some files have different tensors: {_listed(members)}. To join them, {AS_LIST}"
        )
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

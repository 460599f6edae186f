"""The formats: how to recognise each one by its content, and the function that reads it.

To add a format, write a reader in a file of its own, and add a row here. The reader is imported
when its format is met. `docs/formats.rst` shows these tables.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torchlift.errors import FormatError
from torchlift.formats.index import LOCAL_MAGIC, Index
from torchlift.formats.source import marked_encoding

#: Bytes at the start of a file that decide on its format.
HEAD = 2048

#: The number at the start of a stream of torch, as pickles spell it: in binary, and in protocols 0
#: and 1, which are refused.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little") + b".", b"L%dL\n." % LEGACY_MAGIC
NPY_MAGIC = b"\x93NUMPY"
_EMPTY_ZIP = b"PK\x05\x06"

DCP_METADATA, DCP_SUFFIX = ".metadata", ".distcp"
_METADATA_OF_RANK = re.compile(r"__(\d{1,9})\.metadata", re.ASCII)
FSDP_FILE = re.compile(r"(model|optim)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt", re.ASCII)
SLICE_FILE = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors", re.ASCII)
#: A file of DeepSpeed. A folder is one of ZeRO if a name has the first two groups.
ZERO_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?(zero_pp_rank_)(\d{1,9})_)?mp_rank_(\d{1,9})_(model|optim)_states\.pt",
    re.ASCII,
)

EXPECTED = "a file of torch (TorchScript, too), safetensors, GGUF or numpy, or an *.index.json"
TENSORFLOW = "Read it with tf.train.load_checkpoint, and save its arrays with numpy.savez."
#: The start of a checkpoint's index, with the number of its shards, and the name of a shard.
TENSORFLOW_INDEX = rb"\0\0[\4-\x0f]\x08[\1-\xff]{1,3}\x1a[\2]\x08"
TENSORFLOW_DATA = r".*\.data-\d{5}-of-\d{5}"


class Format(NamedTuple):
    """A row: a format that torchlift reads.

    Attributes:
        name: The value of ``ckpt.format``. Empty if the content decides on it.
        content: How to recognise it, for the docs.
        reader: Dotted name of the function that reads it. It gets a `Source`. In an archive, it
            gets the records, too. In a folder, it gets the path and all names.
        is_one: Whether the content is of this format: the first bytes of a file, or the names of
            the records of an archive. For a folder, the names of the files that show it.
        complete: Dotted name of a function that adds the other files of a checkpoint to the index
            of the first one.
        is_guide: Whether the file holds no values, but names other files.
    """

    name: str
    content: str
    reader: str
    is_one: Callable[..., Any]
    complete: str = ""
    is_guide: bool = False


class Named(NamedTuple):
    """A row: a kind of file that torchlift names, but does not read.

    Attributes:
        pattern: Pattern of the first bytes, or of the name of a record or of a file in a folder.
        what: Its name.
        hint: What to do.
    """

    pattern: Any
    what: str
    hint: str


def load(name: str) -> Callable[..., Index]:
    """Import a reader by its dotted name."""
    module, _, function = name.rpartition(".")
    found: Callable[..., Index] = getattr(importlib.import_module(module), function)
    return found


# -- tests of content


def _is_legacy(head: bytes) -> bool:
    return _LEGACY[0] in head[:32] if head[:1] == b"\x80" else head.startswith(_LEGACY[1])


def _is_safetensors(head: bytes) -> bool:
    """Return whether it starts like safetensors, even one whose header length is absurd.

    The format lacks a magic number. The length of the header may look like that of another one.
    """
    header = head[8:].lstrip(b" \t\r\n")[:1]
    fits = header == b"{" or (not header and len(head) == HEAD)
    return fits and not is_text(head[:8]) and not head.startswith((b"GGUF", NPY_MAGIC))


def _is_json(head: bytes) -> bool:
    if marked_encoding(head):  # the reader refuses the mark by name
        return head[2:].lstrip(b"\xbf\0 \t\r\n")[:1] == b"{"
    return head.lstrip()[:1] == b"{" and is_text(head)


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # The head may end in the middle of a character.
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode()
    return bool(text) and all(c.isprintable() or c in "\r\n\t" for c in text)


def _top(records: Iterable[str]) -> str:
    """Return the folder of an archive's first record. An archive of torch has one folder."""
    first = next(iter(records), "")
    return first[: first.find("/") + 1]


def _is_program(records: Collection[str]) -> bool:
    return f"{_top(records)}constants.pkl" in records


def _is_torch(records: Collection[str]) -> bool:
    return f"{_top(records)}data.pkl" in records and not _is_program(records)


def _is_npz(records: Collection[str]) -> bool:
    is_array = next(iter(records), "").endswith(".npy")
    return is_array and not _is_program(records) and not _is_torch(records)


def metadata_files(names: Iterable[str]) -> list[str]:
    """Return the files that describe a distributed checkpoint: one, one per rank, or none.

    Example:
        >>> metadata_files(["__0_0.distcp", ".metadata"]), metadata_files(["model.pt"])
        (['.metadata'], [])
    """
    names = list(names)
    if DCP_METADATA in names:
        return [DCP_METADATA]
    found = filter(None, map(_METADATA_OF_RANK.fullmatch, names))
    return [match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def is_index(name: str) -> bool:
    """Return whether a file's name is that of an index of shards, with or without a variant.

    Example:
        >>> is_index("model.safetensors.index.json"), is_index("model.safetensors.index.fp16.json")
        (True, True)
    """
    return re.fullmatch(r".+\.index(?:\.\w+)?\.json", name, re.DOTALL) is not None


def _of_zero(names: Iterable[str]) -> list[str]:
    return [name for name in names if (match := ZERO_FILE.fullmatch(name)) and match[1]]


def _of_fsdp(names: Iterable[str]) -> list[str]:
    return [*filter(FSDP_FILE.fullmatch, names)]


def _of_slices(names: Iterable[str]) -> list[str]:
    # An index says which files count.
    return [*filter(SLICE_FILE.fullmatch, names)] if not any(map(is_index, names)) else []


# -- the tables

_HERE = "torchlift.formats."

#: Files, by their first bytes.
FILES: list[Format] = [
    Format("", "a zip archive", f"{_HERE}zip_archive.read_archive",
           lambda head: head.startswith((LOCAL_MAGIC, _EMPTY_ZIP))),
    Format("gguf", "the magic number ``GGUF``", f"{_HERE}gguf.read_gguf",
           lambda head: head.startswith(b"GGUF"), complete=f"{_HERE}gguf.with_other_parts"),
    Format("npz", "one ``.npy``", f"{_HERE}npz.read_npy",
           lambda head: head.startswith(NPY_MAGIC)),
    Format("torch-legacy", "the magic number of ``torch.save`` before 1.6",
           f"{_HERE}torch_legacy.read_torch_legacy", _is_legacy),
    Format("safetensors", "the length of a JSON header, then the header",
           f"{_HERE}safetensors.read_safetensors", _is_safetensors),
    Format("sharded", "a text ``*.index.json`` and its shards, or a folder that contains them",
           f"{_HERE}sharded.read_sharded", _is_json, is_guide=True),
]  # fmt: skip

#: Zip archives, by the names of their records.
ARCHIVES: list[Format] = [
    Format("torch-zip", "a zip archive, as ``torch.save`` writes it since torch 1.6",
           f"{_HERE}torch_zip.read_torch_zip", _is_torch),
    Format("torchscript", "a zip archive with ``constants.pkl``",
           f"{_HERE}torchscript.read_torchscript", _is_program),
    Format("npz", "a zip archive of ``.npy`` files", f"{_HERE}npz.read_npz", _is_npz),
]  # fmt: skip

#: Folders, by the names of their files. `folders` has the rule for folders without such names.
FOLDERS: list[Format] = [
    Format("dcp",
           "a folder with ``.metadata``, as ``torch.distributed.checkpoint`` and Megatron's "
           "``torch_dist`` write it",
           f"{_HERE}dcp.read_dcp", metadata_files),
    Format("zero",
           "a folder with DeepSpeed's ``*_optim_states.pt`` and ``*_model_states.pt``, such as "
           "``global_step500``",
           f"{_HERE}zero.read_zero", _of_zero),
    Format("sharded", "a folder with FSDP's ``model_world_size_N_rank_R.pt`` of each rank",
           f"{_HERE}ranks.read_fsdp", _of_fsdp),
    Format("sharded", "a folder with torch's ``shard-R-model-I-of-N.safetensors`` of each rank",
           f"{_HERE}ranks.read_slices", _of_slices),
]  # fmt: skip

_UNPACKED = "If it was unpacked, run this in the parent folder: zip -0 -r -D model.pt"
#: Files that are only named, by their first bytes. The first match counts.
NAMED_FILES: list[Named] = [
    Named(rb"version https://git-lfs\.github\.com/spec/",
          "a git-lfs pointer: the place of the weights, not the weights",
          "Fetch the file itself: git lfs pull."),
    Named(rb"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes (.h5)", "Read it with h5py."),
    Named(rb"\x1f\x8b|BZh|\xfd7zXZ\0|\x28\xb5\x2f\xfd", "a gzip, bzip2, xz or zstd archive",
          "Decompress it first."),
    Named(rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", "a 7z or rar archive", "Unpack it first."),
    # torch writes an extended header, its times, and the header of a first member.
    Named(rb"(?=.{257}ustar)(?:.{512}){0,3}(?:sys_info|pickle|storages|tensors)\0",
          "a tar archive of torch.save, as the first releases of torch wrote it",
          "If you trust the file, load it with torch.load(path, weights_only=False), and save the "
          "result with torch.save."),
    Named(rb".{257}ustar", "a tar archive", "Unpack it first."),
    Named(rb"\0\x05\x16\x07", "notes of macOS (AppleDouble) about a file, not the file",
          "Open the file of the same name without the ._ in front."),
    Named(rb"tjgg|lmgg|fmgg|algg", "a ggml file from before GGUF",
          "Convert it to GGUF with the llama.cpp of its time, or fetch the model as GGUF."),
    Named(rb".{4}(?:ET1\d|FT01)", "an ExecuTorch program (.pte), or the weights of one (.ptd)",
          "It was compiled from a model: save the state dict of that model."),
    Named(rb".{4}TFL3", "a TensorFlow Lite model", "Read it with tf.lite.Interpreter."),
    Named(rb"ptrt|ftrt", "an engine of TensorRT",
          "Its weights are compiled into it: use the model that it was made from."),
    Named(rb"\x08\x01\x12", "a TensorFlow SavedModel", TENSORFLOW),
    Named(TENSORFLOW_INDEX, "a TensorFlow checkpoint", TENSORFLOW),
    Named(rb"\x08[\x03-\x1f](?:\x12(?:\0|[\x01-\x7f][ -~])|[\x1a\x22\x28\x32\x3a\x42])",
          "an ONNX model",
          "Read it with onnx: its numpy_helper gives each initializer as an array."),
    Named(rb"\x80[\2-\5].*[\0\7]storage[q\x94]",
          "the data.pkl of a torch file, without its values",
          f"Open the torch file itself. {_UNPACKED} model"),
    Named(rb"\x80[\2-\5].*(?:c|\x8c.)numpy[.\n]", "a pickle of NumPy arrays",
          "Only unpickling reads it, which can run any code. If you trust its author, load it with "
          "pickle.load, make tensors with torch.from_numpy, and save these with torchlift.save."),
    Named(rb"\x80[\2-\5]", "a pickle that torch.save did not write",
          "Only unpickling could read it, which can run any code: ask for a file written by "
          "torch.save or safetensors."),
    # A map whose first name is text, or an array by itself.
    Named(rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9\xda]"
          rb"|(?:\xc7.|\xc8..|\xc9....)\x01",
          "a msgpack file, such as flax writes",
          "Load it with flax.serialization.msgpack_restore, and save its arrays with "
          "safetensors.flax."),
]  # fmt: skip

#: Programs, by the name of a record. Their archives are never read: torch.load may find a second
#: content in them.
PROGRAMS: list[Named] = [
    Named(r"[^/]+/models/[^/]+\.json|serialized_exported_program\.json",
          "an exported program (torch.export.save)",
          "If you trust the file, load its weights with torch: "
          "torchlift.load(model, torch.export.load(path).state_dict)"),
    Named(r"[^/]+/archive_format", "a compiled program (AOTInductor), which includes its weights",
          "Save the state dict of the model that it was compiled from."),
]  # fmt: skip

#: Archives and folders that are only named, by the name of a record or file.
NAMED_FOLDERS: list[Named] = [
    Named(r"model\.weights\.h5", "a Keras model (.keras)",
          "Read it with keras, or take model.weights.h5 out of it and read that with h5py."),
    Named(r"(?:.*/)?saved_model\.pb", "a TensorFlow SavedModel", TENSORFLOW),
    Named(TENSORFLOW_DATA, "a TensorFlow checkpoint", TENSORFLOW),
    Named(r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt", "a checkpoint of orbax (jax)",
          "Read it with orbax, and save its arrays with numpy.savez or safetensors."),
    Named(r"(?:.*/)?\.data/extern_modules", "a package of torch.package",
          "Load it with torch.package.PackageImporter, and save its tensors with torchlift.save."),
]  # fmt: skip
#: The same for archives only. In a folder, these names are weights.
NAMED_ARCHIVES: list[Named] = [
    Named(r"(?:.*/)?[^/]+\.(?:safetensors|gguf|pth?|bin|ckpt|msgpack)",
          "an archive with a checkpoint in it", "Unpack it first."),
]  # fmt: skip


def find_format(head: bytes) -> Format | None:
    """Return the format of a file by its first bytes, or None."""
    return next((row for row in FILES if row.is_one(head)), None)


def refuse_named(names: Iterable[str], rows: Iterable[Named]) -> None:
    """Refuse an archive or a folder that has the name of a row.

    Raises:
        FormatError: If it does.
    """
    for row in rows:
        if found := next((n for n in names if re.fullmatch(row.pattern, n, re.DOTALL)), None):
            raise FormatError(f"this is {row.what}", expected=EXPECTED, found=found, hint=row.hint)

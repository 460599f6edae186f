"""The libraries that own the formats, as second readers of every file that torchlift reads.

What torchlift shows of a file is what its owner's library reads, or the file is refused. Files are
valid ones with something changed (see `valid_files`), or pickles made as programs.
"""

from __future__ import annotations

import collections
import pickle
import random
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import pickled, write_zip
from pickle_programs import STORAGES, program
from torch.distributed.checkpoint.api import CheckpointException
from valid_files import FORMATS, Parts, changed

import torchlift
from torchlift.errors import CheckpointError


class Refused(Exception):
    """The owner's library does not read the file."""


# Containers ---------------------------------------------------------------------------------------


def tensors(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested containers by their dotted keys; a key may come twice.

    Raises:
        Refused: containers nest without end.
    """
    if depth > 101:
        raise Refused("nests too deep")
    if isinstance(value, torch.Tensor):
        yield key if depth else "tensor", value
    elif isinstance(value, dict):
        for name, item in dict.items(value):
            yield from tensors(item, f"{key}.{name}" if depth else str(name), depth + 1)
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from tensors(item, f"{key}.{at}" if depth else str(at), depth + 1)


def same(ours: object, theirs: object, depth: int = 0) -> bool:
    """Whether two objects are equal, type by type and bit by bit."""
    if depth > 120:
        raise Refused("nests too deep")
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and same_tensor(ours, theirs)
    if isinstance(theirs, (torch.storage.TypedStorage, torch.UntypedStorage)):
        return isinstance(ours, torch.Tensor)
    if isinstance(theirs, torch.Size):
        theirs = tuple(theirs)
    if isinstance(theirs, torch.serialization.StorageType):
        return isinstance(ours, str)
    if isinstance(theirs, (type, torch.qscheme)) or callable(theirs):
        return isinstance(ours, str)
    if isinstance(theirs, collections.defaultdict):
        theirs = dict(theirs)
    if isinstance(theirs, (torch.dtype,)) and isinstance(ours, str):
        return str(theirs) == ours
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        ours_items, their_items = list(dict.items(ours)), list(dict.items(theirs))
        return len(ours_items) == len(their_items) and all(
            same(a, b, depth + 1) and same(x, y, depth + 1)
            for (a, x), (b, y) in zip(ours_items, their_items, strict=True)
        ) and same(getattr(ours, "_metadata", None), vars(theirs).get("_metadata")
                   if isinstance(theirs, OrderedDict) else None, depth + 1)  # fmt: skip
    if isinstance(theirs, (list, tuple)):
        assert isinstance(ours, (list, tuple))
        return len(ours) == len(theirs) and all(
            same(a, b, depth + 1) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(theirs, (set, frozenset)):
        assert isinstance(ours, (set, frozenset))
        return sorted(map(repr, ours)) == sorted(map(repr, theirs))
    return repr(ours) == repr(theirs)


#: Elements of a tensor that are compared one by one.
_LARGEST = 1 << 20


def same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors show the same, in the same shape and strides."""
    if theirs.layout != torch.strided:
        if ours.layout != theirs.layout or ours.shape != theirs.shape:
            return False
        pairs = [(ours._indices(), theirs._indices()), (ours._values(), theirs._values())] if (
            theirs.layout == torch.sparse_coo) else [(ours.values(), theirs.values())]  # fmt: skip
        return all(same_tensor(a, b) for a, b in pairs)
    if theirs.is_quantized or theirs.is_meta or theirs.is_nested:
        return ours.dtype == theirs.dtype and ours.is_meta == theirs.is_meta
    if theirs.numel() > _LARGEST:  # a view that repeats what is stored
        return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    plain = [one.detach().resolve_conj().resolve_neg() for one in (ours, theirs)]
    # A negative view is one to torch and a copy to torchlift, which says so.
    is_like = theirs.is_neg() or ours.stride() == theirs.stride()
    return is_like and _bits(plain[0]) == _bits(plain[1])


def _bits(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    """Shape, dtype and the elements in order."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return tensor.shape, tensor.dtype, raw


def _same_facts(entry: torchlift.TensorEntry, theirs: torch.Tensor) -> bool:
    """Whether a file says what a tensor is to a model."""
    is_parameter = isinstance(theirs, torch.nn.Parameter)
    return (entry.requires_grad, entry.is_parameter) == (theirs.requires_grad, is_parameter)


# Owners -------------------------------------------------------------------------------------------


def _loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _script(path: Path) -> Any:
    return dict(torch.jit.load(str(path), map_location="cpu").state_dict())


def _safetensors(path: Path) -> Any:
    return safetensors.torch.load_file(path)


def _dcp(path: Path) -> Any:
    with open(path / ".metadata", "rb") as file:
        made = _Metadata(file).load()
    if not all(isinstance(key, str) for key in made.state_dict_metadata):
        raise Refused("keys")
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in made.state_dict_metadata.items()
        if hasattr(value, "chunks")
    }
    reader = dcp.FileSystemReader(path)
    planner = dcp.default_planner.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # not an Exception
        raise Refused(str(error)[:200]) from None
    return state


class _Metadata(pickle.Unpickler):
    """Reads metadata once before torch does, to refuse what names more than metadata needs."""

    def find_class(self, module: str, name: str) -> Any:
        fits = module.startswith(("torch.distributed.checkpoint.", "pathlib", "collections"))
        if fits or (module == "torch" and "." not in name) or name == "_get_layout":
            return super().find_class(module, name)
        raise Refused(name)


def _gguf(path: Path) -> Any:
    found: dict[str, torch.Tensor] = {}
    for one in gguf.GGUFReader(path).tensors:
        if one.name in found:
            raise Refused("twice")
        values = gguf.quants.dequantize(one.data, one.tensor_type)
        found[one.name] = torch.from_numpy(np.array(values))
    return found


def _numpy(path: Path) -> Any:
    found = np.load(path, allow_pickle=False)
    arrays = {"tensor": found} if isinstance(found, np.ndarray) else {
        name: found[name] for name in found.files
    }  # fmt: skip
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="K"))
            for name, array in arrays.items() if array.dtype.kind in "biufc"
            and array.dtype != np.longdouble and array.dtype != np.clongdouble}  # fmt: skip


#: Format -> readers, which raise or return containers; the last one counts for what is refused.
OWNERS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "torch-zip": {"weights_only": _loaded},
    "torchscript": {"jit.load": _script},
    "safetensors": {"safetensors": _safetensors},
    "dcp": {"dcp.load": _dcp},
    "gguf": {"gguf": _gguf},
    "npz": {"numpy": _numpy},
    "npy": {"numpy": _numpy},
}  # fmt: skip
OWNERS |= dict.fromkeys(("torch-legacy", "programs", "legacy programs"), OWNERS["torch-zip"])


def by_owner(read: Callable[[Path], Any], path: Path) -> Any:
    """What an owner's library reads.

    Raises:
        Refused: it does not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read(path)
        except Exception as error:  # libraries raise whatever their code does
            raise Refused(f"{type(error).__name__}: {error}") from error


def differences(name: str, path: Path) -> tuple[str, list[str]]:
    """How torchlift and the owner of a format read a file: a verdict, and what differs.

    The verdict is ``both``, ``neither``, ``refused`` (by torchlift) or ``accepted`` (by torchlift
    alone), or ``different``.
    """
    try:
        with torchlift.open(path) as ckpt, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = {}
            for key in ckpt:
                try:
                    ours[key] = ckpt[key]
                except CheckpointError:
                    continue  # what a value is made of may be refused when it is asked for
            late = [key for key in ckpt if key not in ours]
            hidden = {*ckpt.blocked_keys, *late}
            hidden |= {"tensor"} if "object" in hidden else set()
            try:
                tree = ckpt.tree()
            except CheckpointError:
                tree = Refused
            entries = dict(ckpt.entries)
            has_tree = ckpt._index.tree is not None and ckpt.format not in ("dcp", "torchscript")
    except CheckpointError:
        ours = None
    found: list[str] = []
    taken = 0
    for reader, read in OWNERS[name].items():
        try:
            whole = by_owner(read, path)
            theirs = list(tensors(whole))
        except Refused:
            continue
        taken += 1
        if ours is None:
            continue
        if name == "torchscript":
            # Only the text of the program says which tensors no state dict has.
            names = {key for key, _ in theirs}
            ours = {key: value for key, value in ours.items() if key in names}
        counts = Counter(key for key, _ in theirs)
        missing = [key for key, _ in theirs if key not in ours and not any(
            key == one or key.startswith(one + ".") for one in hidden)]  # fmt: skip
        found += [f"{reader}: lacks {key!r}" for key in missing]
        by_key = dict(theirs)
        for key, tensor in ours.items():
            if key not in by_key:
                stored = name not in ("torch-zip", "torch-legacy") and "program" not in name
                if stored or not _is_storage(whole, key):
                    found.append(f"{reader}: has no {key!r}")
            elif counts[key] > 1:
                found.append(f"{reader}: two of {key!r}")
            elif has_tree and not same_tensor(tensor, by_key[key]):
                found.append(f"{reader}: other {key!r}: {tensor} and {by_key[key]}")
            elif has_tree and not _same_facts(entries[key], by_key[key]):
                found.append(f"{reader}: other facts of {key!r}: {entries[key]}, {by_key[key]}")
            elif not has_tree and not _same_numbers(tensor, by_key[key]):
                found.append(f"{reader}: other {key!r}: {tensor} and {by_key[key]}")
        if has_tree and tree is not Refused:
            with_storages = not found
            if with_storages and not same(tree, whole):
                found.append(f"{reader}: another tree: {tree} and {whole}")
    if found:
        return "different", found
    if ours is None:
        return ("refused" if taken else "neither"), []
    return ("both" if taken else "refused" if late else "accepted"), []


def _same_numbers(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal, where one reader has them in another dtype or layout."""
    return ours.shape == theirs.shape and (
        ours.numel() > _LARGEST or _bits(ours.detach()) == _bits(theirs.detach())
    )


def _is_storage(whole: Any, key: str) -> bool:
    """Whether a key leads to a storage, of which torchlift makes a tensor."""

    def reach(value: Any, rest: str) -> bool:
        if isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return not rest
        items: Iterable[tuple[object, Any]] = ()
        if isinstance(value, dict):
            items = dict.items(value)
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        return any(
            (rest == str(name) and reach(item, ""))
            or (rest.startswith(f"{name}.") and reach(item, rest[len(str(name)) + 1 :]))
            for name, item in items
        )

    return reach(whole, key) or (key == "tensor" and reach(whole, ""))


# Files --------------------------------------------------------------------------------------------


def valid(name: str, folder: Path) -> list[Parts]:
    """Valid files of a format that its owner reads, as their parts."""
    if name not in FORMATS:
        return []
    # The first script is made by hand: torch finds no attributes in the text of its classes.
    return list(FORMATS[name][2](folder / "made"))[name == "torchscript" :]


def made(name: str, seed: int, folder: Path, seeds: list[Parts]) -> Path:
    """Write the file of a format that a seed stands for."""
    draw, path = random.Random(seed), folder / "x"
    if name == "legacy programs":
        return _legacy(path, program(seed))
    if name.endswith("programs"):
        stored = {key: content for key, (_, _, content) in STORAGES.items()}
        return write_zip(path, data=program(seed), storages=stored)
    opened, make, _ = FORMATS[name]
    parts = list(draw.choice(seeds))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        at = draw.randrange(len(parts))
        parts[at] = changed(parts[at], draw)
    if name == "npz":  # zipfile wants checksums
        with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for record, content in zip(parts[0::2], parts[1::2], strict=False):
                archive.writestr(record.decode("latin1").replace("\0", "") or "r", content)
        return path
    for file, content in make(parts).items():
        (folder / file).write_bytes(content)
    return folder / opened


def _legacy(path: Path, data: bytes) -> Path:
    """A stream around a program; the ids of its storages get a view, which is none."""
    data = data.replace(b"tQ", b"NtQ")
    used = [key for key in STORAGES if b"X\1\0\0\0" + key.encode() + b"X\3\0\0\0cpu" in data]
    head = b"".join(pickled(item) for item in (0x1950A86A20F9469CFC6C, 1001, {"a": 1}))
    content = [struct.pack("<q", STORAGES[key][1]) + STORAGES[key][2] for key in used]
    path.write_bytes(head + data + pickled(used) + b"".join(content))
    return path

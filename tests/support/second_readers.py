"""The libraries that own the formats, as second readers of every file that torchlift reads.

What torchlift shows of a file is what its owner's library reads, or the file is refused. Files are
valid ones with something changed (see `valid_files`), or pickles made as programs.
"""

from __future__ import annotations

import collections
import random
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from checkpoint_files import pickled, write_zip
from pickle_programs import STORAGES, program
from valid_files import FORMATS, Parts, changed

import torchlift
from torchlift.errors import CheckpointError


class Refused(Exception):
    """The owner's library does not read the file."""


# Containers ---------------------------------------------------------------------------------------


_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
Leaves = Iterator[tuple[str, torch.Tensor | None]]


def tensors(value: Any, key: str = "", depth: int = 0) -> Leaves:
    """The tensors of nested containers by their dotted keys, and None for a storage.

    A key may come twice.

    Raises:
        Refused: containers nest without end.
    """
    if depth > 101:
        raise Refused("nests too deep")
    if isinstance(value, (torch.Tensor, *_STORAGES)):
        yield key if depth else "tensor", value if isinstance(value, torch.Tensor) else None
        return
    is_list = isinstance(value, (list, tuple))
    items = enumerate(value) if is_list else dict.items(value) if isinstance(value, dict) else ()
    for name, item in items:
        yield from tensors(item, f"{key}.{name}" if depth else str(name), depth + 1)


def same(ours: Any, theirs: Any, depth: int = 0) -> bool:
    """Whether two objects are equal, type by type and bit by bit."""
    if depth > 120:
        raise Refused("nests too deep")
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and same_tensor(ours, theirs)
    if isinstance(theirs, _STORAGES):
        return isinstance(ours, torch.Tensor)
    if isinstance(theirs, torch.dtype) and isinstance(ours, str):
        return str(theirs) == ours
    if isinstance(theirs, (type, torch.qscheme, torch.serialization.StorageType)) or (
        callable(theirs)
    ):
        return isinstance(ours, str)
    for kind, plain in ((torch.Size, tuple), (collections.defaultdict, dict)):
        theirs = plain(theirs) if isinstance(theirs, kind) else theirs
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        noted = [getattr(one, "_metadata", None) for one in (ours, theirs)]
        pairs = [[*dict.items(one)] for one in (ours, theirs)]
        return same(*pairs, depth) and same(*noted, depth + 1)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(
            same(a, b, depth + 1) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(theirs, (set, frozenset)):
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


# Owners -------------------------------------------------------------------------------------------


def _loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _script(path: Path) -> Any:
    return dict(torch.jit.load(str(path), map_location="cpu").state_dict())


def _numpy(path: Path) -> Any:
    found = np.load(path, allow_pickle=False)
    arrays = {"tensor": found} if isinstance(found, np.ndarray) else {
        name: found[name] for name in found.files
    }  # fmt: skip
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="K"))
            for name, array in arrays.items() if array.dtype.kind in "biufc"
            and array.dtype != np.longdouble and array.dtype != np.clongdouble}  # fmt: skip


#: Format -> its owner's reader, which raises or returns containers.
OWNERS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(("torch-zip", "torch-legacy", "programs", "legacy programs"), _loaded),
    "torchscript": _script, "safetensors": safetensors.torch.load_file, "npz": _numpy,
    "npy": _numpy,
}  # fmt: skip


def by_owner(name: str, path: Path) -> Any:
    """What the owner's library of a format reads.

    Raises:
        Refused: it does not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return OWNERS[name](path)
        except Exception as error:  # libraries raise whatever their code does
            raise Refused(f"{type(error).__name__}: {error}") from error


class Shown(NamedTuple):
    """What torchlift shows of a file.

    Attributes:
        entries: of the index.
        values: of the keys whose values can be made.
        tree: the containers, or None.
        hidden: keys of what is listed as blocked or is refused when it is asked for.
        late: the latter.
        has_tree: whether the containers are those of the owner.
    """

    entries: dict[str, torchlift.TensorEntry]
    values: dict[str, torch.Tensor]
    tree: Any
    hidden: set[str]
    late: set[str]
    has_tree: bool


def _shown(path: Path) -> Shown:
    with torchlift.open(path) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, tree = {}, None
        for key in ckpt:
            with suppress(CheckpointError):
                values[key] = ckpt[key]
        with suppress(CheckpointError):
            tree = ckpt.tree()
        late = {*ckpt} - {*values}
        hidden = {*ckpt.blocked_keys, *late}
        hidden |= {"tensor"} if "object" in hidden else set()
        has_tree = ckpt._index.tree is not None and ckpt.format != "torchscript"
        return Shown(dict(ckpt.entries), values, tree, hidden, late, has_tree)


def differences(name: str, path: Path) -> tuple[str, list[str]]:
    """How torchlift and the owner of a format read a file: a verdict, and what differs.

    The verdict is ``both``, ``neither``, ``refused`` (by torchlift) or ``accepted`` (by torchlift
    alone), or ``different``.
    """
    ours: Shown | None = None
    with suppress(CheckpointError):
        ours = _shown(path)
    try:
        whole = by_owner(name, path)
        theirs = [*tensors(whole)]
    except Refused:
        return ("neither" if ours is None else "refused" if ours.late else "accepted"), []
    if ours is None:
        return "refused", []
    by_key, counts = dict(theirs), Counter(key for key, _ in theirs)
    found = [
        f"lacks {key!r}" for key, value in theirs
        if value is not None and key not in ours.values
        and not any(key == one or key.startswith(f"{one}.") for one in ours.hidden)
    ]  # fmt: skip
    for key, mine in ours.values.items():
        other = by_key.get(key)
        # Only the text of a program says which tensors no state dict has.
        if key not in by_key and name != "torchscript":
            found.append(f"has no {key!r}")
        elif counts[key] > 1:
            found.append(f"two of {key!r}")
        elif other is not None and not (same_tensor if ours.has_tree else _same_numbers)(
            mine, other
        ):
            found.append(f"other {key!r}: {mine} and {other}")
        elif other is not None and ours.has_tree:
            entry, is_parameter = ours.entries[key], isinstance(other, torch.nn.Parameter)
            if (entry.requires_grad, entry.is_parameter) != (other.requires_grad, is_parameter):
                found.append(f"other facts of {key!r}: {entry}, {other}")
    if not found and ours.has_tree and ours.tree is not None and not same(ours.tree, whole):
        found.append(f"another tree: {ours.tree} and {whole}")
    return ("different" if found else "both"), found


def _same_numbers(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal, where one reader has them in another dtype or layout."""
    return ours.shape == theirs.shape and (
        ours.numel() > _LARGEST or _bits(ours.detach()) == _bits(theirs.detach())
    )


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

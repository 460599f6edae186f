"""Make the pickle of a torch file, out of names, dtypes and shapes: no tensor is at hand.

Records that hold no values are pickled as what ``torch.save`` makes of tensors, so the opcodes are
the same, and everything that reads those of torch reads these.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from torchlift._model import REBUILD_V2, REBUILD_V3
from torchlift.errors import FormatError, PlacementError
from torchlift.formats import (
    ITEMSIZE,
    MAX_INT,
    STORAGE_DTYPES,
    Budget,
    Stored,
    TorchWorld,
    check_key,
    flatten,
    is_unicode,
    lacking,
    read_torch_pickle,
    row_major,
)

_STORAGES = {dtype: name.removeprefix("torch.") for name, dtype in STORAGE_DTYPES.items()}


class Shared(NamedTuple):
    """In place of a tensor: the storage that holds it, and where in it.

    Attributes:
        number: of the storage.
        first: its first element there.
        shape: its sizes; None where the storage is one dense tensor, of which it is the whole.
        stride: in elements.
    """

    number: int
    first: int = 0
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()


class Rebuilt(NamedTuple):
    """In place of a tensor of a subclass: the call that torch pickles it as.

    Attributes:
        function: one of torch's, which makes it.
        arguments: its class and what that has, with `Shared` for the tensors inside.
    """

    function: Any
    arguments: Any


def pickled(saved: object, tensors: Sequence[Stored], *, checked: bool = True) -> bytes:
    """Pickle containers of plain data, with `Shared` for the tensors in them.

    Args:
        saved: what a reader gets.
        tensors: one for each storage.
        checked: whether to find out that torchlift reads it back.

    Raises:
        PlacementError: it does not.

    Example:
        >>> import torch, pickletools
        >>> data = pickled({"w": Shared(0)}, [Stored("w", "float32", (2, 3))])
        >>> [arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"]
        ['torch._utils _rebuild_tensor_v2', 'torch FloatStorage', 'collections OrderedDict']
    """
    file = io.BytesIO()
    # A pickle refers back to a string that is the same object, and which equal ones are differs
    # from process to process: a file's offsets would.
    _Pickler(file, tensors).dump(_canonical(saved, {}))
    data = file.getvalue()
    if checked:
        _require_readable(data)
    return data


class _Items(NamedTuple):
    """In place of a set: what it has, in an order that hashes do not decide."""

    items: list[Any]


def _number(value: Any) -> Any:
    """Return the Python number that a scalar of numpy is, such as a best loss; all else as it is.

    Its class is none that ``torch.load`` takes from a file with ``weights_only=True``.
    """
    numpy: Any = sys.modules.get("numpy")
    is_numpys = numpy is not None and isinstance(value, (numpy.number, numpy.bool_))
    return value.item() if is_numpys else value


def is_array(value: Any) -> bool:
    """Return whether it is an array of numpy that a list tells all of, but for its dtype.

    None of objects, fields or times, and no subclass: a list has no mask.
    """
    numpy: Any = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.ndarray, numpy.memmap)
    return type(value) in kinds and value.dtype.kind in "biufcSU"


def _text(value: str) -> str:
    """Return the one object that all equal strings become."""
    # Of one character, C code takes those that `chr` gives, whatever is interned.
    return chr(ord(value)) if len(value) == 1 else sys.intern(value)


def _canonical(value: Any, made: dict[int, Any]) -> Any:
    """Return plain data of which equal strings are one object, and no containers more than were."""
    kind = type(value)
    if kind is Shared:
        return value
    if kind is str:
        return _text(value)
    if kind not in _CONTAINERS or kind is torch.Size:
        return _number(value)
    if id(value) in made:
        return made[id(value)]
    if kind is tuple:
        new: Any = tuple(_canonical(item, made) for item in value)
    elif kind is set:
        ordered = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        new = _Items([_canonical(item, made) for item in ordered])
    elif kind is list:
        new = made[id(value)] = []
        new.extend(_canonical(item, made) for item in value)
    else:
        new = made[id(value)] = kind()
        for name, item in value.items():
            new[_canonical(name, made)] = _canonical(item, made)
        for name, item in getattr(value, "__dict__", {}).items():
            setattr(new, name, _canonical(item, made))
    made[id(value)] = new
    return new


class _Storage(NamedTuple):
    key: str
    tensor: Stored


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Stored]) -> None:
        super().__init__(file, protocol=2)
        # One key object per storage: the pickle then writes it once.
        keys = map(_text, map(str, range(len(tensors))))
        self._storages = list(map(_Storage, keys, tensors))

    def persistent_id(self, obj: object) -> object:
        if type(obj) is not _Storage:
            return None
        name, nbytes = _STORAGES.get(obj.tensor.dtype), obj.tensor.nbytes
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        numel = nbytes if name is None else nbytes // ITEMSIZE[obj.tensor.dtype]
        # The location is where whoever wrote it had it: of a mesh, that means nothing elsewhere.
        return "storage", kind, obj.key, "cpu", numel

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is not Shared:
            if type(obj) is _Items:
                return set, (obj.items,)
            return (obj.function, obj.arguments) if type(obj) is Rebuilt else NotImplemented
        storage = self._storages[obj.number]
        _, dtype, shape = storage.tensor
        stride = row_major(shape) if obj.shape is None else obj.stride
        # New tuples: the pickle would refer back to one that it has seen, as torch's never does.
        shape, stride = (*(shape if obj.shape is None else obj.shape),), (*stride,)
        arguments: tuple[Any, ...] = (storage, obj.first, shape, stride, False, OrderedDict())
        if dtype in _STORAGES:
            return REBUILD_V2, arguments
        return REBUILD_V3, (*arguments, getattr(torch, dtype))


#: What values that are not tensors may consist of: what ``weights_only=True`` and torchlift read.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, OrderedDict, Counter, set, torch.Size)
#: The way out for an array.
AS_TENSOR = "torch.from_numpy makes a tensor of an array of numbers, which can be saved."
_MAX_BITS = 8 * (MAX_INT - 1)
MAX_DEPTH = 90  # torchlift reads 100 levels, and a state dict and its templates are some of them


def require_plain(key: str, value: object) -> None:
    """Refuse a value that torch, with ``weights_only=True``, and torchlift could not read back."""
    seen: set[tuple[int, int]] = set()  # what many containers share is looked at once a level

    def refuse(expected: str, found: str, hint: str = "") -> NoReturn:
        raise PlacementError(
            "cannot be stored so that it can be read back without running code",
            entry=key,
            expected=expected,
            found=found,
            hint=hint or "Take it out of what is saved, or flatten what holds it.",
        )

    def check(item: Any, depth: int) -> None:
        item = _number(item)
        if isinstance(item, str) and not is_unicode(item):
            refuse("text", "a lone surrogate, which UTF-8 cannot write")
        if isinstance(item, int) and item.bit_length() >= _MAX_BITS:
            refuse(f"integers of less than {_MAX_BITS} bits", f"{item.bit_length()} bits")
        if type(item) in _LEAVES or (id(item), depth) in seen:
            return
        if type(item) not in _CONTAINERS:
            found = f"a {type(item).__module__}.{type(item).__qualname__}"
            hint = AS_TENSOR if found.startswith("a numpy.") else ""
            refuse("tensors as values of the state dict, or plain data", found, hint)
        if depth == MAX_DEPTH:
            refuse(f"at most {MAX_DEPTH} levels of containers, none inside itself", "more")
        seen.add((id(item), depth))
        for part in [*item, *item.values()] if isinstance(item, dict) else item:
            check(part, depth + 1)
        for name in item if isinstance(item, dict) else ():
            try:
                check_key(name)
            except FormatError as error:
                refuse("short keys of dictionaries", error.reason)

    check(value, 0)


def _require_readable(pickled: bytes) -> None:
    """Refuse what torchlift would not read back, such as two values that would get one name."""
    try:
        world = TorchWorld(Budget(len(pickled)))
        flat = flatten(read_torch_pickle(pickled, world), world.budget)
        for error in (lacking("", key, why) for key, why in flat.blocked.items()):
            if error is not None:
                raise error
    except FormatError as error:
        raise PlacementError(
            f"cannot be stored in a torch file so that it can be read back: {error.reason}",
            entry=error.entry,
            expected=error.expected,
            found=error.found,
        ) from error

"""Torch files as ``torch.save`` makes them, of names, dtypes and shapes: no tensor is at hand.

Under ``torch.serialization.skip_data`` torch writes the pickle and the archive, and leaves holes
for the storages. What it writes is kept in memory as a `Layout`: the holes are its payloads.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch

from torchlift._model.torch_private import REBUILD_V2, REBUILD_V3, hollow_storage, typed_storage
from torchlift.errors import FormatError, PlacementError
from torchlift.formats.boxes import row_major
from torchlift.formats.flattening import flatten
from torchlift.formats.index import Leaf, lacking
from torchlift.formats.layout import Layout, Stored, is_unicode
from torchlift.formats.torch_pickle import STORAGE_DTYPES, TorchWorld, read_torch_pickle
from torchlift.formats.torch_zip import archive_layout, pickle_in
from torchlift.formats.unpickle import MAX_INT, Budget, check_key

#: Of these dtypes torch has storages of a class of their own.
_TYPED = frozenset(getattr(torch, name) for name in STORAGE_DTYPES.values())


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
    """In place of a tensor that torch makes of others: the call that it pickles it as.

    Attributes:
        function: one of torch's, which makes it.
        arguments: what it takes, with a `Leaf` for each tensor inside.
        numbers: the tensor whose storage, offset, sizes and strides the function takes before all
            that; None: it takes no such.
        dtype: of that storage, as it is pickled.
    """

    function: Any
    arguments: tuple[Any, ...]
    numbers: Leaf | None = None
    dtype: torch.dtype | None = None


class TorchFile(NamedTuple):
    """A torch file that is yet to be written.

    Attributes:
        layout: of the file.
        order: the numbers of its storages, in the order of the payloads.
    """

    layout: Layout
    order: list[int]


def lay_out_torch_file(
    saved: object,
    tensors: Sequence[Stored],
    values: Mapping[str, object] = MappingProxyType({}),
    *,
    checked: bool = True,
    read_back: bool = True,
) -> TorchFile:
    """Let ``torch.save`` write a file without the values of tensors.

    Args:
        saved: containers of plain data, with a `Shared` or `Rebuilt` for each tensor, and a `Leaf`
            for what is in `values`.
        tensors: one for each storage.
        values: key of a `Leaf` -> what is saved there.
        checked: whether to record the CRC-32 of every storage.
        read_back: whether to make sure that torchlift reads the pickle.

    Raises:
        PlacementError: If torchlift would not read it.

    Example:
        >>> layout, order = lay_out_torch_file({"w": Shared(0)}, [Stored("w", "float32", (3,))])
        >>> layout.payloads[0].offset % 64, layout.payloads[0].tensor.nbytes, order
        (0, 12, [0])
    """
    file, filling = _Holes(), _Filling(tensors, values)
    with torch.serialization.skip_data():
        torch.save(filling.copy(saved), file)  # type: ignore[arg-type]
    order = [*filling.order]
    layout = archive_layout(file.gaps, [tensors[number] for number in order], checked=checked)
    if read_back:
        _require_readable(pickle_in(file.gaps))
    return TorchFile(layout, order)


class _Filling:
    """The copying of containers for a pickle, with calls in the places of tensors.

    Attributes:
        order: the numbers of storages, as torch meets them, which need not be in our order.
    """

    def __init__(self, tensors: Sequence[Stored], values: Mapping[str, object]) -> None:
        self.order: dict[int, None] = {}
        self._tensors, self._values = tensors, values
        self._storages = [hollow_storage(tensor.nbytes) for tensor in tensors]
        self._made: dict[int, Any] = {}  # container -> its copy: one in two places stays one

    def copy(self, item: Any) -> Any:
        """Return what is pickled: of plain data always the same, as an offset depends on it."""
        kind = type(item)
        if kind is Leaf:
            return self.copy(self._values[item.key])
        if kind is Shared:
            return self._tensor(item)
        if kind is Rebuilt:
            rest = tuple(map(self.copy, item.arguments))
            if item.numbers is None:
                return _Call(item.function, rest)
            return self._call(item.function, self._values[item.numbers.key], item.dtype, *rest)
        if kind is str:
            # A pickle refers back to a string that is the same object, and which equal ones are
            # differs from process to process. Of one character, C code takes those of `chr`.
            return chr(ord(item)) if len(item) == 1 else sys.intern(item)
        if kind not in _CONTAINERS or kind is torch.Size:
            return _number(item)
        made = self._made.get(id(item))
        if made is None and kind is set:  # in an order that hashes do not decide
            ordered = sorted(item, key=lambda each: (type(each).__name__, repr(each)))
            made = _Call(set, ([*map(self.copy, ordered)],))
        elif made is None and kind in (list, tuple):
            made = kind(map(self.copy, item))
        elif made is None:
            made = kind({self.copy(name): self.copy(each) for name, each in item.items()})
            for name, each in getattr(item, "__dict__", {}).items():
                setattr(made, name, self.copy(each))
        self._made[id(item)] = made
        return made

    def _tensor(self, shared: Shared) -> _Call:
        dtype = getattr(torch, self._tensors[shared.number].dtype)
        hooks: OrderedDict[str, object] = OrderedDict()
        if dtype in _TYPED:
            return self._call(REBUILD_V2, shared, dtype, False, hooks)
        return self._call(REBUILD_V3, shared, None, False, hooks, dtype)

    def _call(self, function: Any, shared: Any, kind: torch.dtype | None, *more: Any) -> _Call:
        number, first, shape, stride = shared
        storage, whole = self._storages[number], self._tensors[number].shape
        if kind is not None:
            storage = typed_storage(storage, kind)
        if shape is None:
            shape, stride = whole, row_major(whole)
        # New tuples: the pickle would refer back to one that it has seen, as torch's never does.
        arguments = storage, first, (*shape,), (*stride,), *more
        return _Call(function, arguments, lambda: self.order.setdefault(number))


class _Holes:
    """A file in memory, in which torch skips what it leaves out.

    Attributes:
        gaps: (first byte, bytes) of what it writes; a hole is between two of them.
    """

    def __init__(self) -> None:
        self.gaps: list[tuple[int, bytearray]] = [(0, bytearray())]

    def write(self, data: bytes) -> None:
        """Keep some bytes."""
        self.gaps[-1][1].extend(data)

    def seek(self, nbytes: int, whence: int) -> None:
        """Leave a hole."""
        assert whence == os.SEEK_CUR
        start, data = self.gaps[-1]
        self.gaps.append((start + len(data) + nbytes, bytearray()))

    def flush(self) -> None:
        """Do nothing: the bytes are where they stay."""


class _Call:
    """An object that is pickled as a call, of which it is told then."""

    __slots__ = ("arguments", "function", "noted")

    def __init__(
        self, function: Any, arguments: tuple[Any, ...], noted: Callable[[], object] = lambda: None
    ) -> None:
        self.function, self.arguments, self.noted = function, arguments, noted

    def __reduce_ex__(self, protocol: object) -> tuple[Any, tuple[Any, ...]]:
        self.noted()
        return self.function, self.arguments


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

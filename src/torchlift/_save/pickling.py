"""Lay out torch files from names, dtypes and shapes, with ``torch.save`` and without tensors.

Under ``torch.serialization.skip_data`` torch writes the pickle and the archive, and leaves holes
for the storages. The result stays in memory as a `Layout`, whose payloads are the holes.
"""

from __future__ import annotations

import operator
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
from torchlift.formats.index import Leaf, lacking
from torchlift.formats.layout import Layout, Stored
from torchlift.formats.pickled import flatten
from torchlift.formats.torch_pickle import STORAGE_DTYPES, TorchWorld, read_torch_pickle
from torchlift.formats.torch_zip import archive_layout, pickle_in
from torchlift.formats.unpickle import Budget

#: Dtypes whose storages have a class of their own.
_TYPED = frozenset(getattr(torch, name) for name in STORAGE_DTYPES.values())


class Shared(NamedTuple):
    """In place of a tensor: its storage, and its place in the storage.

    Attributes:
        number: of the storage.
        first: its first element there.
        shape: its sizes; None if the storage is one dense tensor, and this is all of it.
        stride: in elements.
    """

    number: int
    first: int = 0
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()


class Rebuilt(NamedTuple):
    """In place of a tensor that torch makes of other tensors: the call that is pickled.

    Attributes:
        function: one of torch's, which makes the tensor.
        arguments: of the function, with a `Leaf` for each tensor inside.
        numbers: the tensor whose storage, offset, sizes and strides are the first arguments, or
            None.
        dtype: of that storage, as it is pickled.
    """

    function: Any
    arguments: tuple[Any, ...]
    numbers: Leaf | None = None
    dtype: torch.dtype | None = None


class TorchFile(NamedTuple):
    """A torch file before it is written.

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
    """Lay out a torch file with ``torch.save``, without the values of tensors.

    Args:
        saved: containers of plain data, with a `Shared` or `Rebuilt` for each tensor, and a `Leaf`
            for each item of `values`.
        tensors: one for each storage.
        values: key of a `Leaf` -> what is saved in its place.
        checked: whether to record the CRC-32 of every storage.
        read_back: whether to make sure that torchlift reads the pickle.

    Raises:
        PlacementError: If torchlift would not read it.

    Example:
        >>> layout, order = lay_out_torch_file({"w": Shared(0)}, [Stored("w", "float32", (3,))])
        >>> layout.payloads[0].offset % 64, layout.payloads[0].tensor.nbytes, order
        (0, 12, [0])
    """
    gaps, order = _write(saved, tensors, values)
    layout = archive_layout(gaps, [tensors[number] for number in order], checked=checked)
    if read_back:
        brief = _shorten(values)
        is_shorter = any(brief[key] is not value for key, value in values.items())
        _require_readable(_write(saved, tensors, brief)[0] if is_shorter else gaps)
    return TorchFile(layout, order)


def require_readable(saved: object, values: Mapping[str, object]) -> None:
    """Refuse what torchlift could not read back from a torch file.

    Raises:
        PlacementError: If there is such a value.
    """
    _require_readable(_write(saved, (), _shorten(values))[0])


def _write(
    saved: object, tensors: Sequence[Stored], values: Mapping[str, object]
) -> tuple[list[tuple[int, bytearray]], list[int]]:
    """Return the parts of a torch file between the storages, and the numbers of the storages."""
    file, filling, outer = _Holes(), _Filling(tensors, values), sys.exception()
    with torch.serialization.skip_data():
        try:
            torch.save(filling.copy(saved), file)  # type: ignore[arg-type]
        except RuntimeError as error:
            # torch completes the archive after any exception. If `file` has raised it, such as for
            # Ctrl-C, that fails, too, and the new error hides the cause.
            if error.__context__ is None or error.__context__ is outer:
                raise
            raise error.__context__ from None
    return file.gaps, [*filling.order]


class _Filling:
    """A copy of containers for a pickle, with calls in place of tensors.

    Attributes:
        order: the numbers of storages, in the order in which torch pickles them.
    """

    def __init__(self, tensors: Sequence[Stored], values: Mapping[str, object]) -> None:
        self.order: dict[int, None] = {}
        self._tensors, self._values = tensors, values
        self._storages = [hollow_storage(tensor.nbytes) for tensor in tensors]
        self._made: dict[int, Any] = {}  # container -> its copy: one container stays one object

    def copy(self, item: Any) -> Any:
        """Return what is pickled. Equal plain data gives equal bytes in every process."""
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
            # A pickle refers back to a string that is the same object. Which equal strings are one
            # object differs between processes. C code makes those of one character by `chr`.
            return chr(ord(item)) if len(item) == 1 else sys.intern(item)
        if kind not in _CONTAINERS or kind is torch.Size:
            return _number(item)
        made = self._made.get(id(item))
        if made is None and holds_numbers(item):
            made = item
        elif made is None and kind is set:  # in an order that hashes do not decide
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
        # New tuples: the pickle would refer back to a tuple that it has seen. Torch's never does.
        arguments = storage, first, (*shape,), (*stride,), *more
        return _Call(function, arguments, lambda: self.order.setdefault(number))


class _Holes:
    """A file in memory, in which torch leaves holes.

    Attributes:
        gaps: (first byte, bytes) of each part that it writes. A hole lies between two parts.
    """

    def __init__(self) -> None:
        self.gaps: list[tuple[int, bytearray]] = [(0, bytearray())]

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.gaps[-1][1].extend(data)

    def seek(self, nbytes: int, whence: int) -> None:
        """Leave a hole."""
        assert whence == os.SEEK_CUR
        start, data = self.gaps[-1]
        self.gaps.append((start + len(data) + nbytes, bytearray()))

    def flush(self) -> None:
        """Do nothing: the bytes are in memory."""


class _Call:
    """An object that is pickled as a call. It calls `noted` when that happens."""

    __slots__ = ("arguments", "function", "noted")

    def __init__(
        self, function: Any, arguments: tuple[Any, ...], noted: Callable[[], object] = lambda: None
    ) -> None:
        self.function, self.arguments, self.noted = function, arguments, noted

    def __reduce_ex__(self, protocol: object) -> tuple[Any, tuple[Any, ...]]:
        self.noted()
        return self.function, self.arguments


def _number(value: Any) -> Any:
    """Return a scalar of numpy, such as a best loss, as a number of Python.

    ``torch.load`` with ``weights_only=True`` refuses its class.
    """
    numpy: Any = sys.modules.get("numpy")
    is_numpys = numpy is not None and isinstance(value, (numpy.number, numpy.bool_))
    return value.item() if is_numpys else value


#: Types of numbers, which a pickle never refers back to.
_NUMBERS = frozenset({bool, int, float, type(None)})


def holds_numbers(value: Any) -> bool:
    """Return whether it is a list or a tuple of numbers, as a million losses are.

    C code looks at all of them in 20 ms. A walk over them takes a second.
    """
    return type(value) in (list, tuple) and _NUMBERS.issuperset(map(type, value))


def _shorten(values: Mapping[str, object]) -> dict[str, object]:
    """Return plain data with one number in place of each list of numbers: the longest.

    It may be too long to be read. A list that occurs again stays: a file may not repeat it often.
    """
    seen: set[int] = set()

    def shorten(value: Any) -> Any:
        if type(value) not in (list, tuple, dict) or id(value) in seen:
            return value
        seen.add(id(value))
        if holds_numbers(value):
            whole = [number for number in value if type(number) is int]
            return max(whole, key=int.bit_length, default=None)
        items = value.values() if isinstance(value, dict) else value
        made = [shorten(item) for item in items]
        if all(map(operator.is_, made, items)):
            return value
        return dict(zip(value, made, strict=True)) if type(value) is dict else type(value)(made)

    return {key: shorten(value) for key, value in values.items()}


def is_array(value: Any) -> bool:
    """Return whether it is an array of numpy that a list can replace, except for its dtype.

    Arrays of objects, fields or times and subclasses are not: a list does not have a mask.
    """
    numpy: Any = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.ndarray, numpy.memmap)
    return type(value) in kinds and value.dtype.kind in "biufcSU"


#: Types of plain data, which ``weights_only=True`` and torchlift load.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, OrderedDict, Counter, set, torch.Size)
#: The hint for an array.
AS_TENSOR = "torch.from_numpy makes a tensor of an array of numbers, which can be saved."
#: Class of a random number generator -> an expression for its state, which is plain data.
_STATES = {
    "numpy.random._generator.Generator": "generator.bit_generator.state",
    "numpy.random.mtrand.RandomState": "generator.get_state(legacy=False)",
    "torch._C.Generator": "generator.get_state()",
    "random.Random": "generator.getstate()",
}
MAX_DEPTH = 90  # torchlift reads 100 levels, some of which a state dict and templates need


def require_plain(key: str, value: object) -> None:
    """Refuse a value that torchlift, or torch with ``weights_only=True``, could not load."""
    seen: set[tuple[int, int]] = set()  # a value of many containers is checked once a level

    def refuse(expected: str, found: str, hint: str = "") -> NoReturn:
        raise PlacementError(
            "cannot be stored so that it can be read back without running code",
            entry=key,
            expected=expected,
            found=found,
            hint=hint or "Remove it from the state, or flatten its containers.",
        )

    def check(item: Any, depth: int) -> None:
        item = _number(item)
        if type(item) in _LEAVES or (id(item), depth) in seen:
            return
        if type(item) not in _CONTAINERS:
            found = f"{type(item).__module__}.{type(item).__qualname__}"
            hint = AS_TENSOR if found.startswith("numpy.") else ""
            if found in _STATES:
                hint = f"Save its state, which is plain data: {_STATES[found]}."
            refuse("tensors as values of the state dict, or plain data", f"a {found}", hint)
        if depth == MAX_DEPTH:
            refuse(f"at most {MAX_DEPTH} levels of containers, none inside itself", "more")
        seen.add((id(item), depth))
        if holds_numbers(item):
            return
        for part in [*item, *item.values()] if isinstance(item, dict) else item:
            check(part, depth + 1)

    check(value, 0)


def _require_readable(gaps: list[tuple[int, bytearray]]) -> None:
    """Refuse a pickle that torchlift would not load, for example with two values of one key."""
    pickled = pickle_in(gaps)
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

"""The content of a torch pickle: records that stand for tensors, storages and names.

Nothing here imports a name or calls it. A name of the allow-list becomes a record. Any other name
becomes a `Blocked` record, so that the rest of the file can still be read.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchlift._system.text import clipped_list
from torchlift.errors import FormatError
from torchlift.formats.index import ITEMSIZE, QUANTIZED, SLICE, SUBCLASS, Array
from torchlift.formats.unpickle import (
    ENTRY,
    MAX_TEXT,
    STEP,
    Budget,
    read_pickle,
)

STORAGE_DTYPES: dict[str, str] = {
    "torch.FloatStorage": "float32", "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64", "torch.IntStorage": "int32", "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8", "torch.ByteStorage": "uint8", "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
}  # fmt: skip

#: Storages without a dtype. Their length is in bytes.
_UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
#: Every storage type -> the dtype of its elements, or None.
STORAGES: dict[str, str | None] = {
    **STORAGE_DTYPES, **dict.fromkeys(_UNTYPED),
    "torch.QInt8Storage": "qint8", "torch.QUInt8Storage": "quint8", "torch.QInt32Storage": "qint32",
}  # fmt: skip
#: dtype of a storage's elements -> bytes of each.
STORED_SIZE = {dtype: ITEMSIZE[QUANTIZED.get(dtype or "uint8", dtype or "uint8")]
               for dtype in (None, *ITEMSIZE, *QUANTIZED)}  # fmt: skip

#: Views that show other numbers than they store: torch's name -> name in ``TensorEntry.encoding``.
LAZY = {"conj": "conjugate", "neg": "negative"}

#: Beginnings of the names of dtypes that can have gradients.
_GRADED = ("float", "bfloat", "complex")

#: Attributes that change the values or the class of a tensor when they are set.
ACTING = ("__class__", "__dict__", "data", "imag", "names", "real", "requires_grad")

#: Types whose instances are plain tensors, whatever attributes were set on them.
_PARAMETER = "torch.nn.parameter.Parameter"
_PLAIN_TYPES = ("torch.Tensor", _PARAMETER, "torch.nn.parameter.Buffer")


#: Python 2 names of modules, which pickle protocols up to 2 write to this day.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}

#: Names that describe a DTensor in pickles: its class, layout, placements and mesh. They are
#: blocked like others, but listed only if a value cannot be rebuilt without them.
_OF_DTENSORS = re.compile(
    r"torch\.distributed\.(?:_?tensor(?:\.\w+)*|device_mesh|_mesh_layout)\.(\w+)", re.ASCII
)

#: Names that mean something in every OrderedDict.
_OF_DICTS = frozenset(dir(OrderedDict))

#: Most levels of containers in the state of a subclass.
_MAX_INSIDE = 50


class Global:
    """A name from the allow-list."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name  # an address would change a key from run to run


class Blocked:
    """A global that only an unpickler could use, or the result of calling it.

    Attributes:
        name: Dotted name.
        called: Whether this is the result of a call.
        made: Whether that call makes an object without its ``__init__``.
        inside: The arguments, states and items that it received.
        state: The last state that is a dict, or None.
    """

    __slots__ = ("called", "inside", "made", "name", "state")

    def __init__(self, name: str, called: bool = False, *inside: object) -> None:
        self.name = name
        self.called = called
        self.made = False
        self.inside = list(inside)
        self.state: dict[Any, Any] | None = None

    __repr__ = Global.__repr__


def attributes_of(record: object) -> dict[Any, Any]:
    """Return the attributes of an object, or an empty dict for a class or another value."""
    return (record.state or {}) if isinstance(record, Blocked) and record.called else {}


class _Named(str):
    """A value of torch or Python, by its name. It differs from a text with the same content."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class DeviceName(_Named):
    """A ``torch.device``, by its name."""

    __slots__ = ()


class LayoutName(_Named):
    """A ``torch.layout``, by its name."""

    __slots__ = ()


class SliceText(_Named):
    """A slice, as its text. `arguments` has its numbers."""

    arguments: tuple[int | None, ...]


class OrderedRecord(dict[Any, Any]):
    """An ``OrderedDict``, with the ``_metadata`` that torch attaches to state dicts."""

    __slots__ = ("_metadata",)

    def __init__(self) -> None:
        super().__init__()
        self._metadata: object = None

    def copy(self) -> OrderedRecord:
        """Return a copy with the same items."""
        made = OrderedRecord()
        made.update(self)
        made._metadata = self._metadata
        return made


class CountRecord(dict[Any, Any]):
    """A ``Counter``, as learning rate schedulers keep their milestones."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class StorageRef:
    """A persistent id: the storage that holds a tensor's bytes.

    torch makes a storage when it first reads its key. Later ids with that key give the same
    storage, even if they differ (torch/serialization.py, persistent_load).
    """

    dtype: str | None
    key: str
    location: str
    numel: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """The arguments of a rebuilder. They are checked later, when the tensor's key is known.

    Attributes:
        lazy: Steps from the stored numbers to the values, as in ``TensorEntry.encoding``.
    """

    storage: StorageRef
    dtype: str
    offset: object
    size: object
    stride: object
    requires_grad: object = False
    is_parameter: bool = False
    lazy: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class KindRef(TensorRef):
    """The arguments of a rebuilder that makes a tensor of others, as in `Kind`.

    A subclass (`SUBCLASS`) is only made if a caller allows it. Its facts are four: the name,
    whether it is a view of the first tensor, the state, and the tensors.

    Attributes:
        cost: Price of each key of this tensor, with the tensors that it is made of.
    """

    kind: str = ""
    tensors: tuple[TensorRef, ...] = ()
    facts: tuple[Any, ...] = ()
    cost: int = ENTRY


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype: its code, such as ``"f8"``, byte order, and whether an array is of it."""

    code: str
    order: str = "<"
    is_used: bool = False
    name = "numpy.dtype"


@dataclass(slots=True, eq=False)
class ArrayRef:
    """A NumPy array. `array` is None before its state is read, or without plain numbers."""

    array: Array | None = None


class TorchWorld:
    """The `World` of pickles written by ``torch.save``.

    Attributes:
        budget: Budget for reading.
        blocked: Names that are not in the allow-list, in order of appearance.
        storages: Key -> storage of the persistent ids so far.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.storages: dict[str, StorageRef] = {}
        self.blocked: dict[str, None] = {}
        self._globals: dict[str, Global | Blocked] = {}

    def find(self, module: str, name: str) -> Global | Blocked:
        """Return the stand-in of the global ``module.name``, the same object every time."""
        dotted = f"{_RENAMED.get(module, module)}.{name}"
        found = self._globals.get(dotted)
        if found is None:
            if dotted in _CALLS or dotted in _VALUES:
                found = Global(dotted)
            else:
                found = Blocked(dotted) if self.is_record(dotted) else self.block(dotted)
            self._globals[dotted] = found
        return found

    def is_record(self, name: str) -> bool:
        """Return whether the reader understands a class that only holds attributes."""
        return _OF_DTENSORS.fullmatch(name) is not None

    def block(self, name: str, called: bool = False, *inside: object) -> Blocked:
        """Note a name as blocked."""
        self.blocked[name] = None
        return Blocked(name, called, *inside)

    def call(self, function: object, arguments: object, keywords: object = None) -> object:
        """Return a record of a call, as `World` describes it."""
        if not isinstance(arguments, tuple):
            raise FormatError("the pickle calls something with arguments that are not a tuple")
        if isinstance(function, Blocked):
            made = Blocked(function.name, True, arguments)
            made.made = keywords == {}
            return made
        if not isinstance(function, Global):
            raise FormatError("the pickle calls something that is not a global")
        if keywords or (keywords is not None and arguments):
            # set.__new__(set, [1]) is an empty set, and torch would show that one.
            what = "a global is created by __new__ with arguments, instead of a call"
            raise FormatError(what, entry=function.name)
        handler = _CALLS.get(function.name)
        if handler is None:
            return self.block(function.name, True, arguments)
        try:
            return handler(self, *self.taken(arguments))
        except _IsBlocked as found:
            return found.record
        except (TypeError, ValueError, UnicodeError, OverflowError) as error:
            raise FormatError(
                "a global is called with arguments that it does not accept", entry=function.name
            ) from error

    def taken(self, arguments: tuple[object, ...], inside: bool = False) -> tuple[object, ...]:
        """Pay for a call, and return copies of its arguments.

        The result lacks items that the pickle adds to a list or dict after the call, as in torch.
        Items of these containers are not copied: torch copies only one level, too.
        """
        self.budget.spend(STEP * (1 + len(arguments)))
        now = []
        for argument in arguments:
            if isinstance(argument, (list, dict, set)):
                self.budget.spend(STEP * len(argument))
                argument = argument.copy()
            elif type(argument) is tuple and not inside:
                argument = self.taken(argument, True)
            elif isinstance(argument, (tuple, frozenset)):
                self.budget.spend(STEP * len(argument))
            elif isinstance(argument, (str, bytes, bytearray)):
                self.budget.spend(len(argument))
            now.append(argument)
        return tuple(now)

    def persistent(self, identity: object) -> object:
        """Return the storage that a persistent id describes."""
        fits = type(identity) is tuple and len(identity) == 5
        given: Any = identity if fits else (None,) * 5
        kind, storage_type, key, location, numel = given
        is_named = (
            type(key) is str and type(location) is str and len(key) + len(location) <= MAX_TEXT
        )
        name = storage_type.name if isinstance(storage_type, (Global, Blocked)) else ""
        is_blocked = isinstance(storage_type, Blocked)
        if (
            kind != "storage"
            or not is_named
            or not (is_blocked or name in STORAGES)
            or key.endswith("/")  # torch takes it for a folder and leaves the memory unset
            or type(numel) is not int
            or not 0 <= numel < 1 << 62
        ):
            raise FormatError(
                "a persistent id is not a storage",
                entry=key if is_named else None,
                expected="('storage', type, key, location, number of elements)",
                found=f"{name}, {numel if type(numel) is int else type(numel).__name__}",
            )
        if is_blocked:
            numbers = TensorRef(StorageRef(None, key, location, 0), "uint8", 0, (0,), (1,))
            return Blocked(name, True, numbers)
        return self.stored(STORAGES[name], key, location, numel)

    def stored(self, dtype: str | None, key: str, location: str, numel: int) -> StorageRef:
        """Return the storage of a key, as the first id described it."""
        made = StorageRef(dtype, key, location, numel)
        known = self.storages.setdefault(key, made)
        if known is made or not (known.numel or numel):  # torch makes empty storages each time
            return made
        # torch reads a storage without a dtype as uint8: of float8 and its view as uint8, for one.
        if (known.dtype or "uint8", known.numel) != (dtype or "uint8", numel):
            raise FormatError(
                "one storage is described in two ways",
                entry=key,
                expected=f"{known.numel} elements of {known.dtype or 'bytes'}, as at first",
                found=f"{numel} of {dtype or 'bytes'}",
                hint="torch would read all of it as the first one. Write the file again.",
            )
        return made if known.dtype != dtype else known

    def build(self, target: object, state: object) -> None:
        """Keep the state of a record, or refuse a state that torch would read differently."""
        if isinstance(target, OrderedRecord):
            if not isinstance(state, dict):
                raise FormatError("the state of an OrderedDict is not a dict")
            if hidden := state.keys() & _OF_DICTS:  # calls such as keys() would reach these
                what = "the state of an OrderedDict replaces its methods"
                raise FormatError(what, found=clipped_list(sorted(hidden)))
            target._metadata = state.get("_metadata", target._metadata)
        elif isinstance(target, Blocked):
            if self.is_record(target.name):
                if target.inside[1:]:  # torch would apply both
                    raise FormatError("an object has two states", entry=target.name)
                (state,) = self.taken((state,))
            target.inside.append(state)
            # Dataclasses with slots, and old pickles, wrap the dict: (None, attributes).
            if isinstance(state, tuple) and len(state) == 2:
                state = state[1]
            if isinstance(state, dict):
                target.state = state
        elif isinstance(target, ArrayRef):
            target.array = _array(state)
            if target.array is not None:  # many arrays may share the same bytes
                self.budget.spend(len(target.array.data))
        elif isinstance(target, NumpyDtype):
            if target.is_used:  # numpy would reinterpret the arrays that use it
                raise FormatError("the state of a numpy dtype comes after its use")
            if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
                target.order = state[1][:1]
        else:
            # Includes tensors: torch.Tensor.set_ would take the state, and show other numbers.
            what, found = "gives a state to an object without one", type(target).__name__
            raise FormatError(f"the pickle {what}", found=f"a {found}")

    def extend(self, target: object, items: list[Any]) -> None:
        """Keep the items that are added to a blocked container, or refuse them."""
        if not isinstance(target, Blocked) or self.is_record(target.name):
            what, found = "adds items to an object that is not a container", type(target).__name__
            raise FormatError(f"the pickle {what}", found=f"a {found}")
        target.inside.append(items)


class _IsBlocked(Exception):
    """A call has a blocked argument, so its result is blocked, too."""

    def __init__(self, record: Blocked) -> None:
        self.record = record


# The allow-list: a function for each global that a checkpoint may call. It returns a record. It
# checks the types of its arguments and raises TypeError or ValueError. `TorchWorld.call` turns that
# into an error that names the global. Numbers are checked later, when the key is known.


def _checked(value: object, *kinds: type) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"a {type(value).__name__}")
    return value


def _made(value: object, kind: type) -> Any:
    if isinstance(value, Blocked):
        raise _IsBlocked(value)
    return _checked(value, kind)


def _short(value: object) -> str:
    if len(_checked(value, str)) > MAX_TEXT:
        raise ValueError("a long text")
    return str(value)


def _tensor(
    world: TorchWorld, storage: object, offset: object, size: object, stride: object,
    requires_grad: object, hooks: object, metadata: object = None, *, dtype: str | None = None,
) -> TensorRef | Blocked:  # fmt: skip
    stored: StorageRef = _made(storage, StorageRef)
    dtype = _strided(dtype or stored.dtype or "uint8")
    made = TensorRef(stored, dtype, offset, size, stride, _graded(requires_grad, dtype))
    if metadata:
        metadata = _checked(metadata, dict)
        assert isinstance(metadata, dict)
        if not metadata.keys() <= LAZY.keys():  # metadata of another backend
            return world.block("torch._utils._rebuild_tensor_v2 with metadata", True, made)
        # torch looks for the name and ignores its value: {"neg": False} negates.
        made.lazy = tuple(LAZY[name] for name in LAZY if name in metadata)
    return made


def _tensor_v1(
    world: TorchWorld, storage: object, offset: object, size: object, stride: object
) -> TensorRef | Blocked:
    return _tensor(world, storage, offset, size, stride, False, None)


def _tensor_v3(
    world: TorchWorld, storage: object, offset: object, size: object, stride: object,
    requires_grad: object, hooks: object, dtype: object, metadata: object = None,
) -> TensorRef | Blocked:  # fmt: skip
    if isinstance(dtype, Blocked):
        return Blocked(dtype.name, True, _tensor(world, storage, offset, size, stride, False, None))
    name = _checked(dtype, Global).name.removeprefix("torch.")
    return _tensor(world, storage, offset, size, stride, requires_grad, hooks, metadata, dtype=name)


def _graded(requires_grad: object, dtype: str) -> object:
    """Return whether a tensor requires gradients, if its dtype can have them."""
    if _checked(requires_grad, bool) and not dtype.startswith(_GRADED):
        raise TypeError("gradients of whole numbers")
    return requires_grad


def _strided(dtype: str) -> str:
    """Return a dtype, if a plain strided tensor can have it."""
    if dtype not in ITEMSIZE:
        raise TypeError("not a dtype of plain tensors")
    return dtype


def _sparse(world: TorchWorld, layout: object, data: object) -> object:
    """Return a record of a sparse tensor: of (indices, values, size), or with two index tensors."""
    name = _checked(layout, str).removeprefix("torch.sparse_")
    if name not in ("coo", "csr", "csc", "bsr", "bsc"):
        raise ValueError("not a layout that torch rebuilds")
    inner: list[Any]
    *inner, size = _checked(data, tuple)
    is_coalesced = None
    if name == "coo" and len(inner) == 3:  # since torch 2.0
        *inner, size, is_coalesced = *inner, size
    found = _inner(inner, 2 if name == "coo" else 3)
    facts = (_checked(is_coalesced, bool, type(None)),) if name == "coo" else ()
    return _kind(f"sparse_{name}", replace(found[-1], size=size, stride=()), found, *facts)


def _meta(
    world: TorchWorld, dtype: object, size: object, stride: object, requires_grad: object = False
) -> KindRef:
    name = _strided(_checked(dtype, Global).name.removeprefix("torch."))
    nowhere = StorageRef(name, "", "meta", 0)
    return _kind("meta", TensorRef(nowhere, name, 0, size, stride, requires_grad))


def _quantized(
    world: TorchWorld, storage: object, offset: object, size: object, stride: object,
    params: object, requires_grad: object = False, hooks: object = None,
) -> object:  # fmt: skip
    kept: StorageRef = _made(storage, StorageRef)
    if kept.dtype not in QUANTIZED:
        raise TypeError("not a storage of quantised numbers")
    scheme, first, second, *axis = _checked(params, tuple)
    kind = _checked(scheme, Global).name.removeprefix("torch.")
    tensors = [TensorRef(kept, QUANTIZED[kept.dtype], offset, size, stride)]
    facts: tuple[object, ...] = tuple(axis)
    if kind == "per_tensor_affine" and not axis:
        facts = _checked(first, float), _checked(second, int)
    elif kind.startswith("per_channel_affine") and len(axis) == 1:
        if not 0 <= _checked(*axis, int) < len(_checked(size, tuple)):
            raise ValueError("no such dimension")
        if type(first) is TensorRef and type(second) is TensorRef:
            tensors += [first, second]
        else:  # old files have lists instead of tensors
            for values in (first, second):
                world.budget.spend(STEP * len(_checked(values, list)))
                facts += (tuple([_checked(value, float, int) for value in values]),)
    else:
        raise ValueError("not a scheme that torch reads")
    like = TensorRef(kept, kept.dtype, 0, size, stride, requires_grad)
    return _kind(kind, like, tensors, *facts)


def _inner(found: Sequence[object], count: int) -> list[TensorRef]:
    """Return the plain tensors that another tensor is made of."""
    tensors = [_made(item, TensorRef) for item in found]
    if len(found) != count or any(type(tensor) is not TensorRef for tensor in tensors):
        raise TypeError("not the tensors that it takes")
    return tensors


def _kind(name: str, like: TensorRef, tensors: Sequence[TensorRef] = (), *facts: object) -> KindRef:
    """Return a record of a tensor that is made of others, with the shape and dtype of `like`."""
    numbers = sum(len(fact) for fact in facts if isinstance(fact, tuple))
    inner = sum(ENTRY + (tensor.cost if isinstance(tensor, KindRef) else 0) for tensor in tensors)
    return KindRef(
        like.storage, like.dtype, 0, like.size, like.stride, like.requires_grad,
        kind=name, tensors=tuple(tensors), facts=facts, cost=ENTRY + STEP * numbers + inner,
    )  # fmt: skip


def _on_device(
    world: TorchWorld, data: object, dtype: object, device: object, requires_grad: object
) -> object:
    """Return a tensor that was saved as a CPU copy, because its device lacks storages."""
    name = _checked(dtype, Global, Blocked).name.removeprefix("torch.")
    if isinstance(data, Blocked) or _checked(data, TensorRef).dtype != name:
        return world.block("torch._utils._rebuild_device_tensor_from_cpu_tensor", True, data)
    assert isinstance(data, TensorRef)
    storage = replace(data.storage, location=_short(device))
    return replace(data, storage=storage, requires_grad=requires_grad)


def _parameter(
    world: TorchWorld, data: object, requires_grad: object, hooks: object, state: object = None
) -> object:
    made: TensorRef = _made(data, TensorRef)
    if _acts(state):
        return world.block("torch._utils._rebuild_parameter_with_state", True, made)
    return replace(made, requires_grad=_graded(requires_grad, made.dtype), is_parameter=True)


def _from_type(
    world: TorchWorld, function: object, new_type: object, arguments: object, state: object
) -> object:
    made_by = _CALLS.get(_checked(function, Global, Blocked).name)
    if made_by not in _TENSOR_CALLS and isinstance(function, Global):
        # Nested calls could recurse without end, and torch fails without as_subclass.
        raise TypeError("not a function that makes a tensor")
    made: Any = world.call(function, arguments)
    wrapper = isinstance(made, KindRef) and made.kind == SUBCLASS
    if isinstance(new_type, Blocked):
        if wrapper and made.facts[0] == new_type.name and (parts := _parts(new_type.name, state)):
            made = _kind(SLICE, made, [parts["_local_tensor"]], parts)
            world.budget.spend(made.cost)
            return made
        if type(made) is TensorRef or (wrapper and made.facts[0] == new_type.name):
            inner = _tensors_inside(world, state, *([] if wrapper else [made]))
            made = _kind(SUBCLASS, made, inner, new_type.name, not wrapper, state, inner)
            world.budget.spend(made.cost)
            return made
        return Blocked(new_type.name, True, made, state)
    if wrapper:
        raise TypeError("a class that torch would not make it of")
    if _acts(state):
        return world.block("torch._tensor._rebuild_from_type_v2", True, made, state)
    if isinstance(made, TensorRef) and isinstance(new_type, Global):
        made = replace(made, is_parameter=new_type.name == _PARAMETER)
    return made


def _wrapper(
    world: TorchWorld, kind: object, dtype: object, size: object, stride: object, offset: object,
    layout: object, device: object, requires_grad: object,
) -> object:  # fmt: skip
    """Return a record of a wrapper subclass, whose class computes it from the tensors it holds."""
    shown = _checked(dtype, Global, Blocked).name.removeprefix("torch.")
    name = _checked(kind, Blocked).name
    if shown not in ITEMSIZE or str(layout) != "torch.strided":
        return world.block(name, True, dtype, size)
    nowhere = StorageRef(shown, "", _short(device), 0)
    like = TensorRef(nowhere, shown, 0, size, stride, requires_grad)
    return _kind(SUBCLASS, like, (), name, False, None, ())


def _parts(name: str, state: object) -> dict[Any, Any]:
    """Return the attributes of a DTensor over a plain local tensor, or an empty dict."""
    found = _OF_DTENSORS.fullmatch(name)
    parts: dict[Any, Any] = {}
    for some in state if isinstance(state, tuple) else (state,):
        parts |= some if isinstance(some, dict) else {}
    is_dtensor = found is not None and found[1] == "DTensor"
    return parts if is_dtensor and type(parts.get("_local_tensor")) is TensorRef else {}


_HOLDING = (dict, list, tuple, set, frozenset, Blocked)


def _tensors_inside(world: TorchWorld, state: object, *known: TensorRef) -> tuple[TensorRef, ...]:
    """Return the tensors that a subclass is made of, each once: known ones, then its state's."""
    found = {id(tensor): tensor for tensor in known}
    left = [(state, 0)]
    while left:
        item, depth = left.pop()
        if isinstance(item, TensorRef):
            found[id(item)] = item
        elif isinstance(item, _HOLDING):  # paid for each visit: rebuilding visits it as often
            inner = item.inside if isinstance(item, Blocked) else item
            world.budget.spend(STEP * (1 + len(inner)))
            if depth > _MAX_INSIDE:
                raise ValueError("containers nest too deep")
            children = inner.values() if isinstance(inner, dict) else inner
            left += [(child, depth + 1) for child in children]
    return tuple(found.values())


def _acts(state: object) -> bool:
    """Return whether setting the attributes of a tensor would change more than attributes."""
    states = state if isinstance(state, tuple) else (state,)
    return any(
        some
        and (
            not isinstance(some, dict)
            or any(name in some for name in ACTING)
            or not all(type(name) is str for name in some)
        )
        for some in states
    )


def _ordered_dict(world: TorchWorld, items: object = ()) -> OrderedRecord:
    record = OrderedRecord()
    for pair in _checked(items, list, tuple):
        key, value = _checked(pair, list, tuple)
        world.budget.hash(key)
        record[key] = value
    return record


def _set(world: TorchWorld, items: object = ()) -> set[Any]:
    for item in _checked(items, list, tuple, set, frozenset):
        world.budget.hash(item)
    return set(_checked(items, list, tuple, set, frozenset))


def _copied(world: TorchWorld, items: object = None) -> dict[Any, Any]:
    """Return a copy of a dict, so that later changes of the argument do not show."""
    copied: dict[Any, Any] = {} if items is None else dict(_checked(items, dict))
    for key in copied:
        world.budget.hash(key)
    return copied


def _default_dict(
    world: TorchWorld, factory: object = None, items: object = None
) -> dict[Any, Any]:
    _checked(factory, Global, Blocked, type(None))
    return _copied(world, items)


def _device(world: TorchWorld, kind: object, index: object = None) -> DeviceName:
    name = _short(kind)
    return DeviceName(name if index is None else f"{name}:{_checked(index, int)}")


def _slice(world: TorchWorld, *arguments: Any) -> SliceText:
    if not 1 <= len(arguments) <= 3:
        raise TypeError("not the numbers of a slice")
    texts = [str(_checked(a, int, type(None))) for a in arguments]
    made = SliceText(f"slice({', '.join(texts)})")
    made.arguments = arguments
    return made


def _encode(world: TorchWorld, text: object, encoding: object = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError("not a text encoding that pickles use")
    return bytes(_checked(text, str).encode(encoding))


def _bytes(world: TorchWorld, data: object = b"", encoding: object = None) -> bytes:
    # A number as the argument would allocate that many bytes.
    data = data if encoding is None else _encode(world, data, encoding)
    return bytes(_checked(data, bytes, bytearray))


def _numpy_scalar(world: TorchWorld, dtype: object, data: object = b"") -> object:
    letter = (
        _NUMPY_LETTERS.get(dtype.code.lstrip("<>|=")) if isinstance(dtype, NumpyDtype) else None
    )
    if letter is None or not isinstance(dtype, NumpyDtype) or type(data) is not bytes:
        return world.block("numpy.core.multiarray.scalar", called=True)
    order = ">" if ">" in (dtype.order, dtype.code[:1]) else "<"
    try:
        return struct.unpack(order + letter, data)[0]
    except struct.error as error:
        raise ValueError("not a scalar of that dtype") from error


def _reconstructed(
    world: TorchWorld, kind: object, shape: object = (), code: object = b"b"
) -> object:
    if isinstance(kind, Blocked):
        return Blocked(kind.name, True, shape, code)
    if _checked(kind, Global).name != "numpy.ndarray":
        raise TypeError("not an array of numpy")
    return ArrayRef()


def _array(state: object) -> Array | None:
    """Return an array as it was pickled, or None if its elements are not plain numbers.

    Raises:
        FormatError: If its bytes do not match its shape.
    """
    shape: Any
    _, shape, dtype, columns, data = (
        state if isinstance(state, tuple) and len(state) == 5 else (None,) * 5
    )
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, bytes):
        return None
    dtype.is_used = True
    code = dtype.code.lstrip("<>|=")
    if code not in _NUMPY_NUMBERS and not re.fullmatch("[SU][1-9][0-9]{0,8}", code):
        return None
    sizes = (int(code[1:]), 4 if code[0] == "U" else 1)
    fits = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    # Empty arrays are checked, too: numpy multiplies the other sizes, which may overflow.
    span = math.prod(max(size, 1) for size in (*shape, *sizes)) if fits and len(shape) <= 64 else -1
    if not 0 < span < 1 << 63 or math.prod((*shape, *sizes)) != len(data):
        raise FormatError(
            "the size of an array does not match its shape", found=f"{len(data)} bytes"
        )
    order = ">" if ">" in (dtype.order, dtype.code[:1]) else "<"
    return Array(f"{order}{code}", shape, columns is True, data)


_NUMPY_LETTERS = {
    "b1": "?", "?": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H",
    "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip

#: NumPy's names of dtypes whose elements are numbers.
_NUMPY_NUMBERS = _NUMPY_LETTERS.keys() - {"?"} | {"f16", "c8", "c16", "c32"}

_CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_device,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": lambda world, items=(): tuple(
        [_checked(size, int) for size in _checked(items, list, tuple)]
    ),
    "torch.device": _device,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch.serialization._get_layout": lambda world, name: LayoutName(_short(name)),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": lambda world, items=None: CountRecord(_copied(world, items)),
    "builtins.set": _set,
    "builtins.frozenset": lambda world, items=(): frozenset(_set(world, items)),
    "builtins.complex": lambda world, *numbers: complex(
        *(_checked(n, int, float) for n in numbers)
    ),
    "builtins.slice": _slice,
    "builtins.bytearray": lambda world, *arguments: bytearray(_bytes(world, *arguments)),
    "builtins.bytes": _bytes,
    "_codecs.encode": _encode,
    "numpy.dtype": lambda world, code, *options: NumpyDtype(_short(code)),
    "numpy.core.multiarray._reconstruct": _reconstructed,
    "numpy._core.multiarray._reconstruct": _reconstructed,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}

_TENSOR_CALLS = (
    _tensor_v1, _tensor, _tensor_v3, _sparse, _meta, _quantized, _on_device, _parameter, _wrapper,
)  # fmt: skip

#: Names of torch's constants. A file that stores one gives its name as text.
CONSTANTS = {
    *(f"torch.{dtype}" for dtype in STORED_SIZE if dtype),
    *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *(
        f"torch.per_{of}"
        for of in (
            "tensor_affine",
            "tensor_symmetric",
            "channel_affine",
            "channel_symmetric",
            "channel_affine_float_qparams",
        )
    ),
}
#: Constants and names of classes that calls take. `torch.load` refuses a class as a value, too.
_VALUES = {
    *CONSTANTS,
    *STORAGES,
    *_PLAIN_TYPES,
    "numpy.ndarray",
    *(f"builtins.{name}" for name in ("int", "float", "list", "dict", "str", "bool", "tuple")),
}


def read_torch_pickle(data: bytes, world: TorchWorld) -> object:
    """Interpret the pickle of a torch file.

    Args:
        data: The whole pickle.
        world: Collects the names that are blocked.

    Raises:
        FormatError: If it is not a complete, well-formed pickle.
    """
    root, end = read_pickle(data, world)
    if end != len(data):
        raise FormatError("the pickle is followed by other bytes", expected=end, found=len(data))
    return root

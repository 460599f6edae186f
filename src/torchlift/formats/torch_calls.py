"""The allow-list: for each global that a checkpoint may call, a function that makes a record of it.

The functions check the kinds of their arguments and raise TypeError or ValueError, which the caller
turns into an error that names the global. Numbers are checked later, where the key is known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

from torchlift.formats.index import ITEMSIZE
from torchlift.formats.pickle_machine import check_key
from torchlift.formats.stand_ins import (
    PLAIN_TYPES,
    STORAGE_DTYPES,
    UNTYPED,
    Blocked,
    Global,
    NumpyDtype,
    OrderedRecord,
    StorageRef,
    TensorRef,
)


class Caller(Protocol):
    """What a function needs from the world that calls it."""

    def call(self, function: object, arguments: object) -> object:
        """A record of another call."""

    def refuse(self, name: str) -> Blocked:
        """A record of something that is not supported."""


def _tensor_v1(
    world: Caller, storage: object, offset: object, size: object, stride: object
) -> object:
    return _tensor_v2(world, storage, offset, size, stride, False, None)


def _tensor_v2(
    world: Caller,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> object:
    if isinstance(storage, Blocked):
        return storage
    if not isinstance(storage, StorageRef):
        raise TypeError("not a storage")
    # Conjugate and negative views store other numbers than they show.
    if isinstance(metadata, dict) and any(metadata.values()):
        return world.refuse("torch._utils._rebuild_tensor_v2 of a conjugate or negative view")
    dtype = storage.dtype or "uint8"
    return TensorRef(storage, dtype, offset, size, stride, requires_grad)


def _tensor_v3(
    world: Caller,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    if isinstance(dtype, Blocked):
        return Blocked(dtype.name, called=True)
    if not isinstance(dtype, Global) or dtype.name.removeprefix("torch.") not in ITEMSIZE:
        raise TypeError("not a dtype")
    made = _tensor_v2(world, storage, offset, size, stride, requires_grad, hooks, metadata)
    if isinstance(made, TensorRef):
        made.dtype = dtype.name.removeprefix("torch.")
    return made


def _parameter(
    world: Caller, data: object, requires_grad: object, hooks: object, state: object = None
) -> object:
    if isinstance(data, Blocked):
        return data
    if not isinstance(data, TensorRef):
        raise TypeError("not a tensor")
    return TensorRef(
        data.storage, data.dtype, data.offset, data.size, data.stride, requires_grad, True
    )


def _from_type(
    world: Caller, function: object, new_type: object, arguments: object, state: object
) -> object:
    made = world.call(function, arguments)
    if isinstance(new_type, Global) and new_type.name in PLAIN_TYPES:
        return made
    return Blocked(new_type.name, called=True) if isinstance(new_type, Blocked) else made


def _ordered_dict(world: Caller, items: object = ()) -> OrderedRecord:
    record = OrderedRecord()
    for pair in _plain(items, (list, tuple)):
        key, value = _plain(pair, (list, tuple))
        check_key(key)
        record[key] = value
    return record


def _counter(world: Caller, items: object = None) -> object:
    return {} if items is None else _plain(items, (dict,))


def _defaultdict(world: Caller, factory: object = None, items: object = None) -> object:
    return _counter(world, items)


def _set(world: Caller, items: object = ()) -> set[Any]:
    values = list(_plain(items, (list, tuple, set, frozenset)))
    for value in values:
        check_key(value)
    return set(values)


def _frozenset(world: Caller, items: object = ()) -> frozenset[Any]:
    return frozenset(_set(world, items))


def _size(world: Caller, items: object = ()) -> tuple[Any, ...]:
    return tuple(_plain(items, (list, tuple)))


def _device(world: Caller, kind: object, index: object = None) -> str:
    name = str(_plain(kind, (str,)))
    return name if index is None else f"{name}:{int(_plain(index, (int,)))}"


def _layout(world: Caller, name: object) -> str:
    return str(_plain(name, (str,)))


def _complex(world: Caller, real: object = 0, imaginary: object = 0) -> complex:
    return complex(_plain(real, (int, float)), _plain(imaginary, (int, float)))


def _slice(world: Caller, *arguments: object) -> str:
    return f"slice({', '.join(str(_plain(a, (int, type(None)))) for a in arguments)})"


def _encode(world: Caller, text: object, encoding: object = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError("not a text encoding that pickles use")
    return bytes(_plain(text, (str,)).encode(encoding))


def _bytearray(world: Caller, data: object = b"", encoding: object = None) -> bytearray:
    # A number here would ask for that many bytes of memory.
    if encoding is not None:
        data = _encode(world, data, encoding)
    return bytearray(_plain(data, (bytes, bytearray)))


def _bytes(world: Caller, data: object = b"", encoding: object = None) -> bytes:
    return bytes(_bytearray(world, data, encoding))


def _numpy_dtype(world: Caller, code: object, *options: object) -> NumpyDtype:
    return NumpyDtype(str(_plain(code, (str,))))


def _numpy_scalar(world: Caller, dtype: object, data: object = b"") -> object:
    code = dtype.code.lstrip("<>|=") if isinstance(dtype, NumpyDtype) else ""
    letter = _NUMPY_LETTERS.get(code)
    if letter is None or not isinstance(dtype, NumpyDtype) or type(data) is not bytes:
        return world.refuse("numpy.core.multiarray.scalar")
    order = ">" if ">" in (dtype.order, dtype.code[:1]) else "<"
    try:
        return struct.unpack(order + letter, data)[0]
    except struct.error as error:
        raise ValueError("not a scalar of that dtype") from error


_NUMPY_LETTERS = {
    "b1": "?", "?": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H",
    "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip


def _plain(value: object, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"a {type(value).__name__}")
    return value


CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _defaultdict,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.complex": _complex,
    "builtins.slice": _slice,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes,
    "_codecs.encode": _encode,
    "numpy.dtype": _numpy_dtype,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}

#: Names that are values, not functions: kept as text where a file stores the name itself.
VALUES = {
    *STORAGE_DTYPES,
    *UNTYPED,
    *PLAIN_TYPES,
    *(f"torch.{dtype}" for dtype in ITEMSIZE),
    *(f"builtins.{name}" for name in ("int", "float", "list", "dict", "str", "bool", "tuple")),
}

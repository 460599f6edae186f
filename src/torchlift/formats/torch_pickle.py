"""Records that stand for what a torch pickle names or makes; none of them can do anything."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchlift.errors import FormatError
from torchlift.formats.index import ITEMSIZE
from torchlift.formats.unpickle import HANDLERS, Machine, check_key, read_pickle

STORAGE_DTYPES: dict[str, str] = {
    "torch.FloatStorage": "float32", "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64", "torch.IntStorage": "int32", "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8", "torch.ByteStorage": "uint8", "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
}  # fmt: skip

#: Storages that say nothing about their elements; their length is in bytes.
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")

#: Types whose instances are plain tensors, whatever attributes were set on them.
PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class Global:
    """A name from the allow-list."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Blocked:
    """A name that only an unpickler could use, or what it would have made of it.

    Attributes:
        name: dotted name.
        called: whether this is the result of a call rather than the name itself.
        state: what ``__setstate__`` would have received, if it was a dict.
    """

    __slots__ = ("called", "name", "state")

    def __init__(self, name: str, called: bool = False) -> None:
        self.name = name
        self.called = called
        self.state: dict[Any, Any] | None = None


class OrderedRecord(dict[Any, Any]):
    """An ``OrderedDict``, with the ``_metadata`` that torch attaches to state dicts."""

    __slots__ = ("metadata",)

    def __init__(self) -> None:
        super().__init__()
        self.metadata: object = None


@dataclass(slots=True, eq=False)
class StorageRef:
    """A persistent id: the storage that holds a tensor's bytes."""

    dtype: str | None
    key: str
    location: str
    numel: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """The arguments of a rebuilder, unchecked: whoever knows the tensor's key checks them."""

    storage: StorageRef
    dtype: str
    offset: object
    size: object
    stride: object
    requires_grad: object = False
    is_parameter: bool = False


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype: its code, such as ``"f8"``, and byte order."""

    code: str
    order: str = field(default="<")


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


#: Python 2 names of modules, which pickle protocols up to 2 write to this day.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_MAX_BLOCKED = 10_000


class TorchWorld:
    """The `World` of pickles written by ``torch.save``.

    Attributes:
        blocked: names that are not in the allow-list, in order of appearance.
    """

    def __init__(self) -> None:
        self.blocked: dict[str, None] = {}
        self._globals: dict[str, Global | Blocked] = {}

    def find(self, module: str, name: str) -> Global | Blocked:
        """A stand-in for the global ``module.name``; the same object every time."""
        dotted = f"{_RENAMED.get(module, module)}.{name}"
        found = self._globals.get(dotted)
        if found is None:
            known = dotted in CALLS or dotted in VALUES
            found = Global(dotted) if known else self.block(dotted)
            self._globals[dotted] = found
        return found

    def block(self, name: str) -> Blocked:
        """Note a name as blocked."""
        if len(self.blocked) >= _MAX_BLOCKED:
            raise FormatError("the pickle names too many globals", found=f"{_MAX_BLOCKED} or more")
        self.blocked[name] = None
        return Blocked(name)

    def call(self, function: object, arguments: object) -> object:
        """A record of a call."""
        if not isinstance(arguments, tuple):
            raise FormatError("the pickle calls something with arguments that are not a tuple")
        if isinstance(function, Blocked):
            return Blocked(function.name, called=True)
        if not isinstance(function, Global):
            raise FormatError("the pickle calls something that is not a global")
        handler = CALLS.get(function.name)
        if handler is None:
            return self.refuse(function.name)
        try:
            return handler(self, *arguments)
        except (TypeError, ValueError, UnicodeError, OverflowError) as error:
            raise FormatError(
                "a global is called with arguments it does not take", entry=function.name
            ) from error

    def refuse(self, name: str) -> Blocked:
        """Note a name as blocked, and stand for what calling it would have made."""
        self.block(name)
        return Blocked(name, called=True)

    def persistent(self, identity: object) -> StorageRef | Blocked:
        """The storage that a persistent id describes."""
        if type(identity) is not tuple or len(identity) != 5:
            raise FormatError(
                "a persistent id is not a storage",
                expected="('storage', type, key, location, numel)",
                found=f"a {type(identity).__name__}",
            )
        kind, storage_type, key, location, numel = identity
        if kind != "storage" or type(key) is not str or type(location) is not str:
            raise FormatError(
                "a persistent id is not a storage",
                expected="('storage', type, key, location, numel)",
            )
        if isinstance(storage_type, Blocked):
            return Blocked(storage_type.name, called=True)
        name = storage_type.name if isinstance(storage_type, Global) else ""
        if name not in STORAGE_DTYPES and name not in UNTYPED:
            raise FormatError("a persistent id names no storage type", entry=key, found=name)
        if type(numel) is not int or not 0 <= numel < 1 << 62:
            raise FormatError(
                "a storage has an impossible number of elements",
                entry=key,
                expected="a whole number from 0 to 2**62",
                found=numel if isinstance(numel, (int, float)) else type(numel).__name__,
            )
        return StorageRef(STORAGE_DTYPES.get(name), key, location, numel)

    def build(self, target: object, state: object) -> None:
        """Keep the state that means something: torch's metadata and what a module holds."""
        if isinstance(target, OrderedRecord):
            if isinstance(state, dict):
                target.metadata = state.get("_metadata")
        elif isinstance(target, Blocked):
            if isinstance(state, dict):
                target.state = state
        elif isinstance(target, NumpyDtype):
            if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
                target.order = state[1]
        elif not isinstance(target, TensorRef):
            raise FormatError(
                "the pickle gives a state to something that has none",
                found=f"a {type(target).__name__}",
            )

    def extend(self, target: object, items: list[Any]) -> None:
        """Ignore what is put into a blocked container; nothing else takes items."""
        if not isinstance(target, Blocked):
            raise FormatError(
                "the pickle puts items into something that takes none",
                found=f"a {type(target).__name__}",
            )


_GET = rb"(h.|j.{4})"
_PUT = rb"r(.{4})"
_INT = rb"(?:K.|M..|J...[\x00-\x7f])"
_DIMS = rb"(?:(\(?" + _INT + rb"+[\x85\x86\x87t])" + _PUT + rb"|\))"

#: ((get 'storage', get type, key put, get location, numel) put persid offset size stride grad
#: (get OrderedDict)() put) put call put: everything after the rebuilder itself.
_TENSOR = re.compile(
    rb"\(\(" + _GET + _GET + rb"X(.)\x00\x00\x00([0-9]{1,9})" + _PUT + _GET
    + rb"(" + _INT + rb")t" + _PUT + rb"Q(" + _INT + rb")" + _DIMS + _DIMS
    + rb"([\x88\x89])" + _GET + rb"\)R" + _PUT + rb"t" + _PUT + rb"R" + _PUT,
    re.DOTALL,
)  # fmt: skip


def read_torch_pickle(data: bytes, world: TorchWorld) -> object:
    """Interpret the pickle of a torch file.

    Args:
        data: the whole pickle.
        world: collects the names that are blocked.

    Raises:
        FormatError: not a complete, well-formed pickle.
    """
    step = _TensorStep()
    handlers = list(HANDLERS)
    handlers[ord("(")] = step.mark
    handlers[ord(b"\x94")] = step.memoize
    try:
        root, end = read_pickle(data, world, handlers=handlers)
    except FormatError as error:
        if not step.used or not isinstance(error.__cause__, KeyError):
            raise
        root, end = read_pickle(data, world)
    if end != len(data):
        raise FormatError("bytes after the end of the pickle", expected=end, found=len(data))
    return root


class _TensorStep:
    """The MARK opcode, which takes a whole tensor where one follows.

    Attributes:
        used: whether it has, so that the memo lacks the intermediate objects.
    """

    def __init__(self) -> None:
        self.used = False
        self._rewritten = 0
        self._known: dict[tuple[bytes, ...], tuple[str | None, str] | None] = {}
        self._dims: dict[bytes, tuple[int, ...] | None] = {b"": ()}

    def mark(self, m: Machine) -> None:
        """Interpret one MARK, and the tensor after it if there is one."""
        match = _TENSOR.match(m.data, m.pos - 1) if m.stack else None
        if match is None or not self._take(m, match):
            m.mark()

    def _take(self, m: Machine, match: re.Match[bytes]) -> bool:
        """Interpret a tensor; False, and nothing changed, if the opcodes mean something else."""
        (get_word, get_type, length, key, put_key, get_location, numel, put_id, offset, size,
         put_size, stride, put_stride, grad, get_hooks, put_hooks, put_args, put_made,
        ) = match.groups(b"")  # fmt: skip
        function = m.stack[-1]
        if m.rewritten != self._rewritten:
            self._known.clear()
            self._rewritten = m.rewritten
        gets = (get_word, get_type, get_location, get_hooks)
        known = self._known.get(gets)
        if known is None:
            known = self._known[gets] = self._look_up(m, gets)
        puts = put_key + put_id + put_size + put_stride + put_hooks + put_args + put_made
        count = len(puts) // 4
        (first,) = _U4(put_key)
        shape, steps = self._dims.get(size), self._dims.get(stride)
        if shape is None:
            shape = self._dims[size] = _dims(size)
        if steps is None:
            steps = self._dims[stride] = _dims(stride)
        if (
            known is None
            or shape is None
            or steps is None
            or type(function) is not Global
            or function.name != "torch._utils._rebuild_tensor_v2"
            or length[0] != len(key)
            or not m.highest < first < 1 << 31
            or puts != _CONSECUTIVE[count](*range(first, first + count))
        ):
            return False
        dtype, location = known
        storage = StorageRef(dtype, key.decode("ascii"), location, _int(numel))
        made = TensorRef(storage, dtype or "uint8", _int(offset), shape, steps, grad == b"\x88")
        m.stack[-1] = made
        m.highest = first + count - 1
        m.memo[m.highest] = made
        m.pos = match.end()
        self.used = True
        return True

    def memoize(self, m: Machine) -> None:
        """Interpret one MEMOIZE, whose index is the number of objects remembered so far."""
        if self.used:
            raise KeyError("the number is unknown")
        m.put(len(m.memo))

    def _look_up(self, m: Machine, gets: tuple[bytes, ...]) -> tuple[str | None, str] | None:
        """(dtype, location) if the objects referred to are those of a tensor, else None."""
        word, kind, location, hooks = (
            m.memo.get(int.from_bytes(get[1:], "little")) for get in gets
        )
        if type(word) is not str or word != "storage" or type(location) is not str:
            return None
        if type(hooks) is not Global or hooks.name != "collections.OrderedDict":
            return None
        if type(kind) is not Global or kind.name not in (*STORAGE_DTYPES, *UNTYPED):
            return None
        return STORAGE_DTYPES.get(kind.name), location


_U4 = struct.Struct("<I").unpack
_CONSECUTIVE = {count: struct.Struct(f"<{count}I").pack for count in range(5, 8)}


def _int(code: bytes) -> int:
    return int.from_bytes(code[1:], "little")


def _dims(code: bytes) -> tuple[int, ...] | None:
    """The numbers in the opcodes of a tuple, or None if they make something else."""
    wanted = {0x85: 1, 0x86: 2, 0x87: 3}.get(code[-1])
    at, numbers = int(code[:1] == b"("), []
    if (wanted is None) != (at == 1):
        return None
    while at < len(code) - 1:
        width = {ord("K"): 1, ord("M"): 2, ord("J"): 4}[code[at]]
        numbers.append(int.from_bytes(code[at + 1 : at + 1 + width], "little"))
        at += 1 + width
    return tuple(numbers) if wanted in (None, len(numbers)) else None

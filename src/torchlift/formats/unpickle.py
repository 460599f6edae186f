"""A pickle interpreter that cannot run anything: globals become names, calls become records.

The C unpickler of the standard library with a restricted ``find_class`` is not enough. It imports
nothing, but a few hundred bytes can crash it: it hashes a tuple nested 100,000 deep. They can hang
it with a tuple that shares its items 60 levels down, or fill gigabytes by one large memo index.
Here each such case is an error with a byte position.

The opcodes are those of ``pickletools`` for protocols 2 to 5, without the extension registry and
buffers outside of the pickle. ``I`` is the only text opcode that is read, because Python 2 writes
integers of more than 32 bits with it in protocol 2. ``pickletools.genops`` could split a pickle
into its opcodes. It alone takes 7 ms for 300 tensors, where this interpreter takes 9, and it
decodes escapes in names, as no unpickler does.

A `World` decides the meaning of a global, a call, a persistent id and a ``__setstate__``. Every
format that embeds pickles shares this interpreter.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Protocol

from torchlift.errors import FormatError

#: Most marks open at once, and most bytes of a text argument and of an integer. Python's own
#: pickler stops near a thousand levels, and Python cannot print longer integers.
MAX_MARKS, MAX_TEXT, MAX_INT = 1_000, 400, 128

_STOP = ord(".")
#: An integer as text, as Python 2 writes it.
_WHOLE = re.compile(rb"-?(?:0|[1-9][0-9]*)")

#: Budget in bytes of memory: a fixed part, and a part for each byte that is read from files. A step
#: of work costs ``STEP`` bytes, and a tensor of the index costs `ENTRY`.
_ALLOWANCE, _PER_BYTE, STEP, ENTRY = 1 << 23, 48, 32, 512

#: Bytes of empty containers.
_LIST, _SET = 64, 216


class Budget:
    """The work and memory that a file may still cost, in proportion to its size.

    A few bytes of a pickle can refer to one large object many times, and have it copied, hashed,
    joined or printed each time. Examples are a call with a remembered argument, a key, a list in a
    list and an empty container. All of them pay from one budget, so none needs a limit of its own,
    and no combination exceeds the sum.

    Attributes:
        left: Bytes that may still be spent. A step of work costs ``STEP`` bytes.
    """

    __slots__ = ("_keys", "left")

    def __init__(self, nbytes: int = 0) -> None:
        self.left = _ALLOWANCE
        self._keys: dict[int, tuple[object, int]] = {}
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Add the allowance for bytes that were read."""
        self.left += _PER_BYTE * nbytes

    def spend(self, amount: int, entry: str | None = None) -> None:
        """Pay for work or memory.

        Raises:
            FormatError: If the budget is exceeded.
        """
        self.left -= amount
        if self.left < 0:
            raise FormatError(
                "the file expands to far more data than it stores",
                entry=entry,
                expected="work and memory in proportion to its size",
                found="a few bytes that repeat a large object many times",
            )

    def hash(self, key: object) -> None:
        """Pay for a dictionary key.

        Raises:
            FormatError: If `check_key` refuses it, or the budget is exceeded.
        """
        cost = STEP * check_key(key)
        self.spend(cost)
        if isinstance(key, (tuple, frozenset, complex)):
            # Anybody can compute keys with equal hashes. Each new one is then compared with all
            # before it. Hashes of texts are random.
            first, met = self._keys.setdefault(hash(key), (key, 0))
            if first != key:
                self._keys[hash(key)] = (first, met + 1)
                self.spend(cost * met)


class World(Protocol):
    """The meaning of everything in a pickle that is not plain data.

    Attributes:
        budget: Budget of the pickle.
    """

    budget: Budget

    def find(self, module: str, name: str) -> object:
        """Return the stand-in of a global."""

    def call(self, function: object, arguments: object, keywords: object = None) -> object:
        """Return the result of calling a stand-in: a record, never the real call's effect.

        Args:
            function: The stand-in.
            arguments: Arguments of the call.
            keywords: None for a call. For ``__new__`` without ``__init__``, its arguments by name.
        """

    def persistent(self, identity: object) -> object:
        """Return the stand-in of an object that is stored outside the pickle."""

    def build(self, target: object, state: object) -> None:
        """Give a stand-in its state."""

    def extend(self, target: object, items: list[Any]) -> None:
        """Append items, or set (key, value, key, value, ...), on a stand-in."""


class Machine:
    """One pickle being read.

    Attributes:
        data: The bytes.
        world: The meaning of globals and calls.
        budget: The budget of the world.
        pos: Index of the next byte.
        memo: Objects that the pickle refers back to, by index. It is a dict, because a table would
            take gigabytes for an index of 2**31.
        stack: The objects since the last mark.
        outer: The stacks below the open marks.
    """

    __slots__ = ("budget", "data", "memo", "outer", "pos", "stack", "world")

    def __init__(self, data: bytes, world: World) -> None:
        self.data = data
        self.world = world
        self.budget = world.budget
        self.pos = 0
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []

    def take(self, nbytes: int) -> bytes:
        """Read the next `nbytes` bytes."""
        start = self.pos
        end = start + nbytes
        if not start <= end <= len(self.data):
            # Before slicing: a length of 2**63 must not become an allocation.
            self.pos = len(self.data)
            raise IndexError
        self.pos = end
        return self.data[start:end]

    def line(self, limit: int = MAX_TEXT) -> bytes:
        """Read the next bytes up to a newline."""
        end = self.data.find(b"\n", self.pos, self.pos + limit + 1)
        if end < 0:
            raise ValueError("no end of line")
        line = self.data[self.pos : end]
        self.pos = end + 1
        return line

    def mark(self) -> None:
        """Start a group of objects."""
        if len(self.outer) >= MAX_MARKS:
            raise FormatError("the pickle nests too deep", expected=f"at most {MAX_MARKS} levels")
        self.outer.append(self.stack)
        self.stack = []

    def group(self) -> list[Any]:
        """End a group and take its objects."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def drop(self) -> None:
        """Discard the top object, or an empty group."""
        if self.stack:
            self.stack.pop()
        else:
            self.group()

    def last(self, count: int) -> list[Any]:
        """Take the top `count` objects, in the order in which they were pushed."""
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def fill(self, kind: type, items: list[Any]) -> None:
        """Add items to the container on top. Those of a dict are keys and values in turn."""
        target = self.stack[-1]
        fits = isinstance(target, kind)
        if kind is dict and len(items) % 2:
            raise ValueError("a key without a value")
        if not fits:
            self.world.extend(target, items)
        elif kind is list:
            target.extend(items)
        elif kind is set:
            target.update(self.hashed(items))
        else:
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) is not str:
                    self.budget.hash(key)
                target[key] = value

    def hashed(self, items: list[Any]) -> list[Any]:
        """Pay for hashing items, and return them."""
        for item in items:
            self.budget.hash(item)
        return items

    def put(self, index: int) -> None:
        """Remember the top object."""
        self.memo[index] = self.stack[-1]


def check_key(key: object, depth: int = 0) -> int:
    """Refuse keys that are costly to hash: deep tuples, and integers chosen to collide.

    Returns:
        The number of steps that hashing, comparing or printing the key takes.

    Raises:
        FormatError: If the key is not a scalar, a small tuple of scalars, or a stand-in.
    """
    if isinstance(key, (str, bytes)):
        return 1 + len(key) // STEP
    if isinstance(key, int):
        # Hashes of Python integers repeat every 2**61 - 1, so wide integers can be made to collide.
        if not -(1 << 63) <= key < 1 << 64:
            raise FormatError("a dictionary key is an integer of more than 64 bits")
    elif isinstance(key, (tuple, frozenset)):
        if depth > 2 or len(key) > 64:
            raise FormatError("a dictionary key is a large or deeply nested tuple")
        return 1 + sum(check_key(item, depth + 1) for item in key)
    elif isinstance(key, (list, dict, set, bytearray)):
        raise FormatError("a dictionary key is a container", found=f"a {type(key).__name__}")
    return 1


Handler = Callable[[Machine], None]
#: Reads the argument of an opcode, or takes it from the stack.
_Read = Callable[[Machine], Any]


def read_pickle(data: bytes, world: World) -> tuple[object, int]:
    """Interpret one pickle without running anything.

    Args:
        data: Bytes that begin with the pickle.
        world: The meaning of globals and calls.

    Returns:
        The object, made of plain containers and of stand-ins, and the position of the first byte
        after the pickle.

    Raises:
        FormatError: If it is not a complete, well-formed pickle of bounded depth.
    """
    machine, start = Machine(data, world), 0
    try:
        while (opcode := data[start]) != _STOP:
            machine.pos = start + 1
            HANDLERS[opcode](machine)
            start = machine.pos
    except IndexError as error:
        what = "ends early" if machine.pos >= len(data) else "takes more than its stack holds"
        raise FormatError(f"the pickle {what}", found=_at(data, start)) from error
    except KeyError as error:
        what = "the pickle refers to an object that it has not made"
        raise FormatError(what, found=_at(data, start)) from error
    except UnicodeDecodeError as error:
        # Python can pickle half of a surrogate pair, but no terminal or file can store it.
        raise FormatError("a text is not valid UTF-8", found=repr(error.object[:40])) from error
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise FormatError("the pickle is damaged", found=_at(data, start)) from error
    if len(machine.stack) != 1 or machine.outer:
        raise FormatError("the pickle stops with the wrong number of objects on its stack")
    return machine.stack[0], start + 1


def _at(data: bytes, pos: int) -> str:
    opcode = f"opcode {data[pos]:#04x} at " if pos < len(data) else ""
    return f"{opcode}byte {pos} of {len(data)}"


def _unread(m: Machine) -> None:
    raise FormatError(
        "the pickle uses an opcode that torch.save does not write in protocols 2 to 5",
        found=_at(m.data, m.pos - 1),
        hint="If you trust the file, load it with torch.load(path, weights_only=False), and save "
        "the result with torch.save.",
    )


def _protocol(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise FormatError("the pickle protocol is unknown", expected="at most 5", found=version)


def _push(read: _Read) -> Handler:
    def handler(m: Machine) -> None:
        value = read(m)  # first: it may change which stack is current
        m.stack.append(value)

    return handler


def _constant(value: object) -> Handler:
    return lambda m: m.stack.append(value)


def _fixed(layout: str) -> _Read:
    """Make a reader of one number of fixed size."""
    form = struct.Struct(layout)

    def read(m: Machine) -> Any:
        (value,) = form.unpack_from(m.data, m.pos)
        m.pos += form.size
        return value

    return read


def _sized(length: _Read, convert: Callable[[bytes], object]) -> Handler:
    """Push the value of bytes that follow their length."""
    return lambda m: m.stack.append(convert(m.take(length(m))))


def _long_binary(length: _Read) -> Handler:
    def read(m: Machine) -> int:
        nbytes = length(m)
        if not 0 <= nbytes <= MAX_INT:
            raise FormatError("an integer is too long", found=f"{nbytes} bytes")
        return int.from_bytes(m.take(nbytes), "little", signed=True)

    return _push(read)


def _int_text(m: Machine) -> int:
    line = m.line()
    # Readers disagree: C takes 010 for octal, Python's int accepts 1_0, and " 1" may be True.
    if line not in (b"00", b"01") and not _WHOLE.fullmatch(line):
        raise ValueError("not a number as pickles write it")
    return line == b"01" if line in (b"00", b"01") else int(line)


def _string2(data: bytes) -> str | bytes:
    """Decode a Python 2 string: as text if it is UTF-8, like ``torch.load``, else as bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _global(m: Machine) -> object:
    module, name = m.line().decode(), m.line().decode()
    return m.world.find(module, name)


def _stack_global(m: Machine) -> object:
    module, name = m.last(2)
    if type(name) is not str or type(module) is not str or len(name) + len(module) > MAX_TEXT:
        raise ValueError("a global whose name is not a short text")
    return m.world.find(module, name)


def _obj(m: Machine) -> object:
    function, *arguments = m.group() or [None]
    return m.world.call(function, tuple(arguments))


def _newobj(m: Machine) -> object:
    function, arguments = m.last(2)
    return m.world.call(function, arguments, {})


def _empty(kind: Callable[[], object], nbytes: int) -> Handler:
    """Make an empty container, which takes one byte in the pickle and far more in memory."""

    def handler(m: Machine) -> None:
        m.budget.spend(nbytes)
        m.stack.append(kind())

    return handler


def _build(m: Machine) -> None:
    state = m.stack.pop()
    m.world.build(m.stack[-1], state)


def _dict(m: Machine) -> None:
    items = m.group()
    m.stack.append({})
    m.fill(dict, items)


# Most opcodes of a DCP folder's metadata are the next four, so they call little.


def _memoize(m: Machine) -> None:
    m.budget.spend(_LIST)
    m.memo[len(m.memo)] = m.stack[-1]


def _get_short(m: Machine) -> None:
    m.stack.append(m.memo[m.data[m.pos]])
    m.pos += 1


def _get_long(m: Machine) -> None:
    (index,) = _U4.unpack_from(m.data, m.pos)
    m.stack.append(m.memo[index])
    m.pos += _U4.size


def _tuple1(m: Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


def _put(index: _Read) -> Handler:
    return lambda m: m.put(index(m))


_u1, _u2, _i4, _u4, _u8 = map(_fixed, ("<B", "<H", "<i", "<I", "<Q"))
_U4 = struct.Struct("<I")

_OPCODES: dict[bytes, Handler] = {
    b"(": Machine.mark, b"0": Machine.drop, b"1": lambda m: (m.group(), None)[1],
    b"2": _push(lambda m: m.stack[-1]), b"\x80": _protocol, b"\x95": lambda m: (m.take(8), None)[1],
    b"I": _push(_int_text),
    b"J": _push(_i4), b"K": _push(_u1), b"M": _push(_u2), b"G": _push(_fixed(">d")),
    b"\x8a": _long_binary(_u1), b"\x8b": _long_binary(_i4),
    b"N": _constant(None), b"\x88": _constant(True), b"\x89": _constant(False),
    b"T": _sized(_i4, _string2), b"U": _sized(_u1, _string2),
    b"X": _sized(_u4, bytes.decode), b"\x8c": _sized(_u1, bytes.decode),
    b"\x8d": _sized(_u8, bytes.decode),
    b"B": _sized(_u4, bytes), b"C": _sized(_u1, bytes), b"\x8e": _sized(_u8, bytes),
    b"\x96": _sized(_u8, bytearray),
    b"}": _empty(dict, _LIST), b"]": _empty(list, _LIST), b"\x8f": _empty(set, _SET),
    b")": _constant(()), b"d": _dict, b"l": _push(Machine.group),
    b"t": _push(lambda m: tuple(m.group())),
    b"\x91": _push(lambda m: frozenset(m.hashed(m.group()))),
    b"\x85": _tuple1, b"\x86": _push(lambda m: tuple(m.last(2))),
    b"\x87": _push(lambda m: tuple(m.last(3))),
    b"a": lambda m: m.fill(list, [m.stack.pop()]), b"e": lambda m: m.fill(list, m.group()),
    b"s": lambda m: m.fill(dict, m.last(2)), b"u": lambda m: m.fill(dict, m.group()),
    b"\x90": lambda m: m.fill(set, m.group()),
    b"c": _push(_global), b"\x93": _push(_stack_global), b"o": _push(_obj),
    b"R": _push(lambda m: m.world.call(*m.last(2))), b"b": _build,
    b"\x81": _push(_newobj),
    b"\x92": _push(lambda m: m.world.call(*m.last(3))),
    b"Q": _push(lambda m: m.world.persistent(m.stack.pop())),
    b"q": _put(_u1), b"r": _put(_u4), b"\x94": _memoize,
    b"h": _get_short, b"j": _get_long,
}  # fmt: skip

HANDLERS: list[Handler] = [_OPCODES.get(bytes((code,)), _unread) for code in range(256)]

"""A pickle interpreter that cannot run anything: globals become names, calls become records.

Why not the standard library's C unpickler with a restricted ``find_class``: it imports nothing
then, but a few hundred bytes can still make it hash a tuple nested a hundred thousand deep (a crash
of the process), hash one that shares its parts sixty levels down (a hang), or fill gigabytes of
memo table from one index. Here every opcode is ours, so every such case is an error with a byte
position. Opcodes are those of ``pickletools`` for protocols 0 to 5.

What a global, a call, a persistent id or a ``__setstate__`` means is decided by a `World`, so that
every format that embeds pickles shares this interpreter.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any, Protocol

from torchlift.errors import FormatError

#: Most marks open at once, and most bytes of a text argument or of an integer. Python's own pickler
#: stops near a thousand levels; integers of more digits cannot even be printed.
MAX_MARKS, MAX_TEXT, MAX_INT = 1_000, 400, 128


class World(Protocol):
    """What the interpreter asks about everything that is not plain data."""

    def find(self, module: str, name: str) -> object:
        """The stand-in of a global."""

    def call(self, function: object, arguments: object) -> object:
        """The result of calling a stand-in: a record, never the effect of the real call."""

    def persistent(self, identity: object) -> object:
        """The stand-in of an object that is stored outside the pickle."""

    def build(self, target: object, state: object) -> None:
        """Give a stand-in its state."""

    def extend(self, target: object, items: list[Any]) -> None:
        """Append items, or set (key, value, key, value, ...), on a stand-in."""


class Machine:
    """One pickle being read.

    Attributes:
        data: the bytes.
        pos: index of the next byte to read; at the end, of the first byte behind the pickle.
        memo: objects the pickle refers back to, by index. A dict, so that an index of 2**31 costs
            one entry and not a table.
        highest: the largest index in the memo so far.
        rewritten: how often an index up to `highest` was written.
    """

    __slots__ = ("_outer", "data", "highest", "memo", "pos", "rewritten", "stack", "world")

    def __init__(self, data: bytes, world: World, pos: int = 0) -> None:
        self.data = data
        self.world = world
        self.pos = pos
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.highest = -1
        self.rewritten = 0
        self._outer: list[list[Any]] = []

    @property
    def depth(self) -> int:
        """Number of open marks."""
        return len(self._outer)

    # -- reading -------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes."""
        start = self.pos
        end = start + nbytes
        if end > len(self.data):
            # Before slicing: a length of 2**63 must not become an allocation.
            self.pos = len(self.data)
            raise IndexError
        self.pos = end
        return self.data[start:end]

    def line(self, limit: int = MAX_TEXT) -> bytes:
        """The next bytes up to a newline."""
        end = self.data.find(b"\n", self.pos, self.pos + limit + 1)
        if end < 0:
            raise ValueError("no end of line")
        line = self.data[self.pos : end]
        self.pos = end + 1
        return line

    def number(self, unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Any:
        """A fixed-size number."""
        (value,) = unpack(self.data, self.pos)
        self.pos += nbytes
        return value

    # -- the stack -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Start a group of objects."""
        if len(self._outer) >= MAX_MARKS:
            raise FormatError("the pickle nests too deep", expected=f"at most {MAX_MARKS} levels")
        self._outer.append(self.stack)
        self.stack = []

    def group(self) -> list[Any]:
        """End a group and take its objects."""
        items = self.stack
        self.stack = self._outer.pop()
        return items

    def drop(self) -> None:
        """Discard the top object, or an empty group."""
        if self.stack:
            self.stack.pop()
        else:
            self.group()

    def fold(self, count: int) -> None:
        """Replace the top `count` objects by their tuple."""
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def set_items(self, items: list[Any]) -> None:
        """Set alternating keys and values on the object on top."""
        target = self.stack[-1]
        if len(items) % 2:
            raise ValueError("a key without a value")
        if not isinstance(target, dict):
            self.world.extend(target, items)
            return
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                check_key(key)
            target[key] = items[i + 1]

    def append(self, items: list[Any]) -> None:
        """Append to the object on top."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        else:
            self.world.extend(target, items)

    def add_items(self) -> None:
        """Add a group to the set on top."""
        items = self.group()
        for item in items:
            check_key(item)
        target = self.stack[-1]
        if type(target) is set:
            target.update(items)
        else:
            self.world.extend(target, items)

    def call(self, function: object, arguments: object) -> None:
        """Push the result of a call."""
        self.stack.append(self.world.call(function, arguments))

    def put(self, index: int) -> None:
        """Remember the top object."""
        if index > self.highest:
            self.highest = index
        else:
            self.rewritten += 1
        self.memo[index] = self.stack[-1]


def check_key(key: object, depth: int = 0) -> None:
    """Refuse what must not be hashed: deep or shared tuples, and integers chosen to collide.

    Raises:
        FormatError: the object is not a scalar, a small tuple of scalars, or a stand-in.
    """
    if isinstance(key, int):
        # Hashes of Python integers repeat every 2**61 - 1: wide ones can be made to collide.
        if not -(1 << 63) <= key < 1 << 64:
            raise FormatError("a dictionary key is an integer of more than 64 bits")
    elif isinstance(key, (tuple, frozenset)):
        if depth > 2 or len(key) > 64:
            raise FormatError("a dictionary key is a large or deeply nested tuple")
        for item in key:
            check_key(item, depth + 1)
    elif isinstance(key, (list, dict, set, bytearray)):
        raise FormatError("a dictionary key is a container", found=f"a {type(key).__name__}")


_I1 = struct.Struct("<b").unpack_from
_U1 = struct.Struct("<B").unpack_from
_U2 = struct.Struct("<H").unpack_from
_I4 = struct.Struct("<i").unpack_from
_U4 = struct.Struct("<I").unpack_from
_U8 = struct.Struct("<Q").unpack_from
_F8 = struct.Struct(">d").unpack_from


Handler = Callable[[Machine], None]


class _Stop(Exception):
    """The STOP opcode was reached."""


def read_pickle(
    data: bytes, world: World, pos: int = 0, handlers: list[Handler] | None = None
) -> tuple[object, int]:
    """Interpret one pickle without running anything.

    Args:
        data: bytes that hold it.
        world: what globals and calls stand for.
        pos: where it starts.
        handlers: a function per opcode instead of `HANDLERS`.

    Returns:
        The object, made of plain containers and of the world's stand-ins, and the position of the
        first byte behind the pickle.

    Raises:
        FormatError: anything that is not a complete, well-formed pickle of bounded depth.
    """
    machine = Machine(data, world, pos)
    start = pos
    handlers = handlers or HANDLERS
    try:
        while True:
            start = machine.pos
            opcode = data[start]
            machine.pos = start + 1
            handlers[opcode](machine)
    except _Stop:
        pass
    except IndexError as error:
        what = "ends early" if machine.pos >= len(data) else "takes more than its stack holds"
        raise FormatError(f"the pickle {what}", found=_at(data, start)) from error
    except KeyError as error:
        raise FormatError(
            "the pickle refers to something it has not made", found=_at(data, start)
        ) from error
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise FormatError("the pickle is damaged", found=_at(data, start)) from error
    if len(machine.stack) != 1 or machine.depth:
        raise FormatError("the pickle stops with the wrong number of objects on its stack")
    return machine.stack[0], machine.pos


def _at(data: bytes, pos: int) -> str:
    opcode = f"opcode {data[pos]:#04x} at " if pos < len(data) else ""
    return f"{opcode}byte {pos} of {len(data)}"


def _unknown(m: Machine) -> None:
    raise FormatError("not a pickle opcode", found=_at(m.data, m.pos - 1))


def _refused(what: str) -> Handler:
    def handler(m: Machine) -> None:
        raise FormatError(f"the pickle uses {what}, which no checkpoint needs")

    return handler


def _stop(m: Machine) -> None:
    raise _Stop


def _protocol(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise FormatError("an unknown pickle protocol", expected="at most 5", found=version)


def _constant(value: object) -> Handler:
    def handler(m: Machine) -> None:
        m.stack.append(value)

    return handler


def _new(factory: Callable[[], object]) -> Handler:
    def handler(m: Machine) -> None:
        m.stack.append(factory())

    return handler


def _fixed(unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Handler:
    def handler(m: Machine) -> None:
        m.stack.append(m.number(unpack, nbytes))

    return handler


def _int1(m: Machine) -> None:
    m.stack.append(m.data[m.pos])
    m.pos += 1


def _int_text(m: Machine) -> None:
    line = m.line()
    m.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line))


def _long_text(m: Machine) -> None:
    m.stack.append(int(m.line().removesuffix(b"L")))


def _long_binary(unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Handler:
    def handler(m: Machine) -> None:
        length = m.number(unpack, nbytes)
        if not 0 <= length <= MAX_INT:
            raise FormatError("an integer of absurd length", found=f"{length} bytes")
        m.stack.append(int.from_bytes(m.take(length), "little", signed=True))

    return handler


def _sized(
    unpack: Callable[[bytes, int], tuple[Any, ...]],
    nbytes: int,
    convert: Callable[[bytes], object],
) -> Handler:
    def handler(m: Machine) -> None:
        length = m.number(unpack, nbytes)
        if length < 0:
            raise ValueError("negative length")
        m.stack.append(convert(m.take(length)))

    return handler


def _utf8(data: bytes) -> str:
    return data.decode("utf-8")


def _string2(data: bytes) -> str | bytes:
    """A Python 2 string: text where it can be, as ``torch.load`` reads it, else bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _string_text(m: Machine) -> None:
    line = m.line(1 << 20)
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
        raise ValueError("an unquoted string")
    m.stack.append(_string2(codecs.escape_decode(line[1:-1])[0]))


def _unicode_text(m: Machine) -> None:
    m.stack.append(m.line(1 << 20).decode("raw-unicode-escape"))


def _global(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    m.stack.append(m.world.find(module, name))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str or len(name) + len(module) > MAX_TEXT:
        raise ValueError("a global whose name is not a short text")
    m.stack.append(m.world.find(module, name))


def _inst(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    arguments = tuple(m.group())
    m.call(m.world.find(module, name), arguments)


def _obj(m: Machine) -> None:
    function, *arguments = m.group() or [None]
    m.call(function, tuple(arguments))


def _reduce(m: Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    m.call(function, arguments)


def _newobj_ex(m: Machine) -> None:
    _, arguments, function = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.call(function, arguments)


def _persistent(m: Machine) -> None:
    m.stack.append(m.world.persistent(m.stack.pop()))


def _build(m: Machine) -> None:
    state = m.stack.pop()
    m.world.build(m.stack[-1], state)


def _append(m: Machine) -> None:
    m.append([m.stack.pop()])


def _appends(m: Machine) -> None:
    m.append(m.group())


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


def _set_items(m: Machine) -> None:
    m.set_items(m.group())


def _dict(m: Machine) -> None:
    items = m.group()
    m.stack.append({})
    m.set_items(items)


def _list(m: Machine) -> None:
    items = m.group()  # first: it also changes which stack is current
    m.stack.append(items)


def _tuple(m: Machine) -> None:
    items = m.group()
    m.stack.append(tuple(items))


def _frozenset(m: Machine) -> None:
    items = m.group()
    for item in items:
        check_key(item)
    m.stack.append(frozenset(items))


def _put(index: Callable[[Machine], int]) -> Handler:
    def handler(m: Machine) -> None:
        m.put(index(m))

    return handler


def _get(index: Callable[[Machine], int]) -> Handler:
    def handler(m: Machine) -> None:
        m.stack.append(m.memo[index(m)])

    return handler


def _index1(m: Machine) -> int:
    index = m.data[m.pos]
    m.pos += 1
    return index


def _index4(m: Machine) -> int:
    (index,) = _U4(m.data, m.pos)
    m.pos += 4
    return int(index)


def _index_text(m: Machine) -> int:
    return int(m.line())


def _skip_frame(m: Machine) -> None:
    m.take(8)


_OPCODES: dict[bytes, Handler] = {
    b"(": Machine.mark, b".": _stop, b"0": Machine.drop, b"1": lambda m: (m.group(), None)[1],
    b"2": lambda m: m.stack.append(m.stack[-1]), b"\x80": _protocol, b"\x95": _skip_frame,
    b"F": lambda m: m.stack.append(float(m.line())), b"I": _int_text, b"L": _long_text,
    b"J": _fixed(_I4, 4), b"K": _int1, b"M": _fixed(_U2, 2), b"G": _fixed(_F8, 8),
    b"\x8a": _long_binary(_I1, 1), b"\x8b": _long_binary(_I4, 4),
    b"N": _constant(None), b"\x88": _constant(True), b"\x89": _constant(False),
    b"S": _string_text, b"T": _sized(_I4, 4, _string2), b"U": _sized(_U1, 1, _string2),
    b"V": _unicode_text, b"X": _sized(_U4, 4, _utf8), b"\x8c": _sized(_U1, 1, _utf8),
    b"\x8d": _sized(_U8, 8, _utf8), b"B": _sized(_U4, 4, bytes), b"C": _sized(_U1, 1, bytes),
    b"\x8e": _sized(_U8, 8, bytes), b"\x96": _sized(_U8, 8, bytearray),
    b"}": _new(dict), b"]": _new(list), b"\x8f": _new(set), b")": _constant(()),
    b"d": _dict, b"l": _list, b"t": _tuple, b"\x91": _frozenset,
    b"\x85": lambda m: m.fold(1), b"\x86": lambda m: m.fold(2), b"\x87": lambda m: m.fold(3),
    b"a": _append, b"e": _appends, b"s": _set_item, b"u": _set_items, b"\x90": Machine.add_items,
    b"c": _global, b"\x93": _stack_global, b"i": _inst, b"o": _obj, b"R": _reduce,
    b"\x81": _reduce, b"\x92": _newobj_ex, b"b": _build, b"Q": _persistent,
    b"p": _put(_index_text), b"q": _put(_index1), b"r": _put(_index4),
    b"\x94": _put(lambda m: len(m.memo)),
    b"g": _get(_index_text), b"h": _get(_index1), b"j": _get(_index4),
    b"P": _refused("persistent ids in text form"),
    b"\x82": _refused("the extension registry"), b"\x83": _refused("the extension registry"),
    b"\x84": _refused("the extension registry"),
    b"\x97": _refused("out-of-band buffers"), b"\x98": _refused("out-of-band buffers"),
}  # fmt: skip

HANDLERS: list[Handler] = [_OPCODES.get(bytes((code,)), _unknown) for code in range(256)]

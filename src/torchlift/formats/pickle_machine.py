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

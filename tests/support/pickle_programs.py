"""Pickles as programs: random ones that are valid, with what torch calls in them.

Every expression leaves one value on the stack. What was made is remembered, named again and
changed after it was given to a call: lists are appended to, dicts set, states given.
"""

from __future__ import annotations

import random
import struct

#: key -> type, elements and bytes of the storages that a program may name.
STORAGES: dict[str, tuple[str, int, bytes]] = {
    "0": ("FloatStorage", 8, struct.pack("<8f", *range(1, 9))),
    "1": ("LongStorage", 4, struct.pack("<4q", 0, 1, 1, 0)),
    "2": ("ComplexFloatStorage", 4, struct.pack("<8f", *range(1, 9))),
    "3": ("ByteStorage", 8, bytes(range(8))),
}
_LAYOUTS = [((2,), (1,)), ((4,), (1,)), ((2, 2), (2, 1)), ((2, 2), (1, 2)), ((), ()), ((0,), (1,)),
            ((3,), (0,)), ((1, 3), (3, 1))]  # fmt: skip
_TEXTS = ["a", "b", "a.b", "w", "", "cpu", "_metadata", "data", "keys", "neg", "conj", "0", "1"]
_REBUILD = "torch._utils\n_rebuild_"


class Program:
    """A pickle that is being written.

    Args:
        draw: decides.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.code = bytearray(b"\x80\2")
        self.memo: dict[int, str] = {}
        self.left = draw.choice((20, 60, 120))

    def data(self) -> bytes:
        """The whole pickle, of a dict more often than not."""
        (self.dict if self.draw.random() < 0.9 else self.value)(0)
        return bytes(self.code + b".")

    def emit(self, *codes: bytes | str) -> None:
        for code in codes:
            self.code += code.encode() if isinstance(code, str) else code

    def put(self, kind: str, chance: float = 0.4) -> str:
        """Remember what is on top, perhaps in the place of something else."""
        if self.draw.random() < chance:
            at = self.draw.randrange(len(self.memo) + 2)
            self.memo[at] = kind
            self.emit(b"q" + bytes((at,)) if at < 256 else b"r" + struct.pack("<I", at))
        return kind

    def get(self, *kinds: str) -> bool:
        """Name again what is of one of the kinds, if there is anything."""
        known = [at for at, kind in self.memo.items() if kind in kinds]
        if not known:
            return False
        at = self.draw.choice(known)
        self.emit(b"h" + bytes((at,)) if at < 256 else b"j" + struct.pack("<I", at))
        return True

    def text(self, value: str) -> str:
        code = value.encode()
        self.emit(b"X" + struct.pack("<I", len(code)) + code)
        return "text"

    def int(self, value: int) -> str:
        written = [b"J" + struct.pack("<i", value), b"\x8a\x02" + struct.pack("<h", value)]
        if 0 <= value < 256:
            written += [b"K" + bytes((value,))] * 3
        if value >= 0:
            written.append(b"M" + struct.pack("<H", value))
        self.emit(self.draw.choice(written))
        return "int"

    def scalar(self) -> str:
        kind = self.draw.randrange(6)
        if kind == 0:
            return self.int(self.draw.choice((0, 1, 2, 7, 10, 300, -1)))
        if kind == 1:
            self.emit(self.draw.choice((b"N", b"\x88", b"\x89", b"N")))
            return "other"
        if kind == 2:
            self.emit(b"G" + struct.pack(">d", self.draw.choice((0.5, 1.0, -0.0, 1e300))))
            return "other"
        if kind == 3 and self.get("text", "int"):
            return "other"
        return self.put(self.text(self.draw.choice(_TEXTS)), 0.2)

    def key(self) -> None:
        kind = self.draw.randrange(12)
        if kind == 0 and self.get("device", "dtype"):
            return
        if kind < 2:
            self.scalar()
        elif kind == 2:
            self.emit(b"K\1", self.draw.choice((b"\x85", b"\x88\x86", b"K\0K\1\x87"))[:1] + b"")
        else:
            self.text(self.draw.choice(_TEXTS))

    def items(self, depth: int, many: bytes, one: bytes, is_pairs: bool) -> None:
        """Put something into the container on top, which may be named in it."""
        for _ in range(self.draw.choice((0, 1, 1, 2))):
            if self.draw.random() < 0.3:
                if is_pairs:
                    self.key()
                self.value(depth + 1)
                self.emit(one)
                continue
            self.emit(b"(")
            for _ in range(self.draw.choice((0, 1, 2, 3))):
                if is_pairs:
                    self.key()
                self.value(depth + 1)
            self.emit(many)

    def list(self, depth: int) -> str:
        self.emit(b"]")
        self.put("list")
        self.items(depth, b"e", b"a", False)
        return "list"

    def dict(self, depth: int) -> str:
        self.emit(b"}")
        self.put("dict")
        self.items(depth, b"u", b"s", True)
        if not depth:
            self.items(depth, b"u", b"s", True)
            self.items(depth, b"u", b"s", True)
        return "dict"

    def changed(self, depth: int) -> str:
        """Something remembered, with more in it."""
        kind = self.draw.choice(("list", "dict", "odict", "counter", "tensor", "size"))
        if not self.get(kind):
            return self.scalar()
        if kind == "list" or (kind == "size" and self.draw.random() < 0.1):
            self.items(depth, b"e", b"a", False)
        elif kind == "odict" and self.draw.random() < 0.5:
            self.dict(depth + 1)
            self.emit(b"b")
        elif kind == "tensor" and self.draw.random() < 0.1:
            self.emit(b")b")
        elif kind not in ("tensor", "size"):
            self.items(depth, b"u", b"s", True)
        return kind

    def storage(self) -> None:
        key = self.draw.choice(("0", "0", "0", *STORAGES))
        kind, numel, _ = STORAGES[key]
        if self.draw.random() < 0.02:
            kind, numel = self.draw.choice((("IntStorage", numel), (kind, numel - 1)))
        self.emit(b"(")
        self.text("storage")
        self.emit(f"ctorch\n{kind}\n")
        self.text(key)
        self.text(self.draw.choice(("cpu", "cpu", "cpu", "meta")[:3]))
        self.emit(b"K" + bytes((numel,)), b"tQ")
        self.put("storage", 0.2)

    def numbers(self, values: tuple[int, ...]) -> None:
        """Sizes or strides: in a tuple, or in a list that may be changed later."""
        if self.draw.random() < 0.1 and self.get("size", "list"):
            return
        is_list = self.draw.random() < 0.3
        if is_list:
            self.emit(b"]")
            self.put("list", 0.7)
        self.emit(b"(")
        for value in values:
            self.emit(b"K" + bytes((value,)))
        self.emit(b"e" if is_list else b"t")
        if not is_list and self.draw.random() < 0.2:
            self.put("size", 1.0)

    def hooks(self) -> None:
        if not (self.draw.random() < 0.5 and self.get("odict")):
            self.emit(b"ccollections\nOrderedDict\n)R")
            self.put("odict", 0.2)

    def metadata(self, depth: int) -> None:
        """What says whether a view is conjugate or negative, by what is in it at the call."""
        if self.get("dict") and self.draw.random() < 0.3:
            return
        self.emit(b"}")
        self.put("dict", 0.5)
        for _ in range(self.draw.randrange(3)):
            self.text(self.draw.choice(("neg", "neg", "conj", "x")))
            self.emit(self.draw.choice((b"\x88", b"\x89")), b"s")

    def tensor(self, depth: int) -> str:
        if self.draw.random() < 0.3 and self.get("tensor"):
            return "tensor"
        which = self.draw.choice(("tensor_v2",) * 6 + ("tensor", "tensor_v3"))
        shape, stride = self.draw.choice(_LAYOUTS)
        self.emit(f"c{_REBUILD}{which}\n(")
        if not (self.draw.random() < 0.2 and self.get("storage")):
            self.storage()
        self.int(self.draw.choice((0, 0, 1, 2)))
        self.numbers(shape)
        self.numbers(stride)
        if which != "tensor":
            self.emit(self.draw.choice((b"\x89",) * 8 + (b"\x88", b"K\1")))
            self.hooks()
            if which == "tensor_v3":
                self.emit(f"ctorch\n{self.draw.choice(('float32', 'int16', 'complex64'))}\n")
            if self.draw.random() < 0.15:
                self.metadata(depth)
        self.emit(b"tR")
        return self.put("tensor")

    def wrapped(self, depth: int) -> str:
        """A tensor that a call makes of another one."""
        kind = self.draw.choice(("parameter", "parameter_with_state", "type", "sparse"))
        if kind == "type":
            self.emit(f"ctorch._tensor\n_rebuild_from_type_v2\n(c{_REBUILD}tensor_v2\n")
            self.emit(self.draw.choice((b"ctorch\nTensor\n", b"ctorch.nn.parameter\nParameter\n")))
            shape, stride = self.draw.choice(_LAYOUTS)
            self.emit(b"(")
            self.storage()
            self.emit(b"K\0")
            self.numbers(shape)
            self.numbers(stride)
            self.emit(b"\x89")
            self.hooks()
            self.emit(b"t")
            self.dict(depth + 2)
        elif kind == "sparse":
            self.emit(f"c{_REBUILD}sparse_tensor\n(")
            self.emit(b"ctorch.serialization\n_get_layout\n")
            self.text("torch.sparse_coo")
            self.emit(b"\x85R(")
            self.tensor(depth + 1)
            self.tensor(depth + 1)
            self.numbers((3, 3))
            self.emit(self.draw.choice((b"\x88", b"\x89", b"")), b"t")
        else:
            self.emit(f"c{_REBUILD}{kind}\n(")
            self.tensor(depth + 1)
            self.emit(self.draw.choice((b"\x88", b"\x89")))
            self.hooks()
            if kind != "parameter":
                self.dict(depth + 2)
        self.emit(b"tR")
        return self.put("tensor")

    def call(self, depth: int) -> str:
        """Something else that a call makes."""
        kind = self.draw.randrange(10)
        if kind < 3:
            self.emit(b"ccollections\nOrderedDict\n")
            if self.draw.random() < 0.3:
                self.emit(b"](")
                for _ in range(self.draw.randrange(3)):
                    self.key()
                    self.value(depth + 2)
                    self.emit(b"\x86")
                self.emit(b"e\x85R")
            else:
                self.emit(self.draw.choice((b")R", b")\x81", b"]\x85R")))
            self.put("odict", 0.6)
            self.items(depth, b"u", b"s", True)
            return "odict"
        if kind == 3:
            self.emit(b"ccollections\nCounter\n")
            self.dict(depth + 1)
            self.emit(b"\x85R")
            return self.put("counter", 0.6)
        if kind == 4:
            self.emit(b"cbuiltins\nset\n", b"](")
            for _ in range(self.draw.randrange(3)):
                self.scalar()
            self.emit(b"e\x85R")
            return "other"
        if kind == 5:
            self.emit(b"ctorch\nSize\n")
            self.numbers((2, 3))
            self.emit(b"\x85R")
            return self.put("size")
        if kind == 6:
            self.emit(b"ctorch\ndevice\n")
            self.text(self.draw.choice(("cpu", "cuda")))
            self.emit(self.draw.choice((b"\x85R", b"K\1\x86R")))
            return self.put("device")
        if kind == 7:
            self.emit(b"cbuiltins\nbytearray\nc_codecs\nencode\n")
            self.text(self.draw.choice(_TEXTS))
            self.text(self.draw.choice(("latin1", "utf-8")))
            self.emit(b"\x86R\x85R")
            return "other"
        if kind == 8:
            self.emit(b"cbuiltins\ncomplex\nG" + struct.pack(">d", 1.5) + b"K\2\x86R")
            return "other"
        self.emit(f"ctorch\n{self.draw.choice(('float16', 'bool', 'qint8', 'int4'))}\n")
        return self.put("dtype")

    def value(self, depth: int) -> str:
        self.left -= 1
        if depth > 5 or self.left < 0:
            return self.scalar()
        kind = self.draw.random()
        if kind < 0.3:
            return self.tensor(depth)
        if kind < 0.4:
            return self.wrapped(depth)
        if kind < 0.6:
            return self.changed(depth)
        if kind < 0.7:
            return self.call(depth)
        if kind < 0.78:
            return self.list(depth)
        if kind < 0.86:
            return self.dict(depth)
        if kind < 0.9:
            self.value(depth + 1)
            self.emit(b"\x85")
            return self.put("other")
        return self.scalar()


def program(seed: int) -> bytes:
    """A pickle."""
    return Program(random.Random(seed)).data()


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of integers whose tuples have one hash (xxHash without a key, as CPython has it)."""
    prime_1, prime_2, prime_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse, mask = pow(prime_2, -1, 1 << 64), (1 << 64) - 1
    found: list[tuple[int, int]] = []
    for first in range(1, 40 * count):
        state = (prime_5 + first * prime_2) & mask
        state = ((state << 31 | state >> 33) & mask) * prime_1 & mask
        second = (12345 - state) * inverse & mask
        if second < (1 << 61) - 1:
            found.append((first, second))
        if len(found) == count:
            break
    assert len({hash(pair) for pair in found}) == 1
    return found

"""Pickles as programs: random ones that are valid, with what torch calls in them.

Every rule leaves one value on the stack, or changes the one on top. What was made is remembered,
named again and changed after it was given to a call: lists are appended to, dicts set, states
given.
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


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(b"K" + bytes([value]) for value in values) + b"t"


def _list(values: tuple[int, ...]) -> bytes:
    return b"]" + _tuple(values)[:-1] + b"e"


def _stored(key: str, kind: str = "", fewer: int = 0) -> bytes:
    """The storage of a key, perhaps of another type or with fewer elements."""
    own, numel, _ = STORAGES[key]
    name = f"ctorch\n{kind or own}\n".encode()
    return (
        b"(" + _text("storage") + name + _text(key) + _text("cpu") + b"K" + bytes([numel - fewer])
        + b"tQ"
    )  # fmt: skip


def _rebuild(name: str, *arguments: bytes | str) -> list[bytes | str]:
    """A call of torch that makes a tensor."""
    return [f"c{name}\n(".encode(), *arguments, b"tR", "=tensor"]


def _plain(key: str, *layout: tuple[int, ...]) -> bytes:
    """A tensor that torch takes. With other indices torch itself may crash."""
    view = b"K\0" + b"".join(map(_tuple, layout)) + b"\x89" + _ODICT + b")R"
    return f"c{_V2}\n(".encode() + _stored(key) + view + b"tR"


_ODICT = b"ccollections\nOrderedDict\n"
_V2 = "torch._utils\n_rebuild_tensor_v2"
_VIEW = "storage", "offset", "layout"
#: Rule -> what it may stand for, as often as it is listed. Bytes are opcodes, and names are rules.
#: "=kind" perhaps remembers what is on top. "@kind" names what is remembered, or makes it.
_RULES: dict[str, list[list[bytes | str]]] = {
    "program": [[b"}", "=dict", "sets", "sets", "sets"]] * 9 + [["value"]],
    "value": [
        *[["tensor"]] * 6, *[["wrapped"]] * 2, *[["more"]] * 4, *[["call"]] * 2, *[["list"]] * 2,
        *[["dict"]] * 2, *[["scalar"]] * 3, ["value", b"\x85"],
    ],
    "more": [
        *[["@list", "appends"], ["@dict", "sets"], ["@odict", "sets"], ["@odict", "dict", b"b"],
          ["@counter", "sets"], ["@tensor"], ["@size"]] * 4,
        ["@tensor", b")b"], ["@size", "appends"],
    ],
    "list": [[b"]", "=list", "appends"]],
    "appends": [[], ["append"], ["append"], ["append", "append"]],
    "append": [["value", b"a"], *[[b"(", *["value"] * count, b"e"] for count in range(4)]],
    "dict": [[b"}", "=dict", "sets"]],
    "sets": [[], ["set"], ["set"], ["set", "set"]],
    "set": [["key", "value", b"s"], *[[b"(", *["key", "value"] * n, b"u"] for n in range(4)]],
    "key": [*[["word"]] * 9, ["scalar"], ["@device"], ["@dtype"], [b"K\1\x85"], [b"K\1\x88\x86"]],
    "word": [[_text(value)] for value in _TEXTS],
    "text": [["word", "=text"]],
    "scalar": [["int"], ["int"], ["text"], ["text"], ["@text"], [b"N"], [b"N"], ["bool"],
               *[[b"G" + struct.pack(">d", value)] for value in (0.5, -0.0, 1e300)]],
    "bool": [[b"\x88"], [b"\x89"]],
    "int": [[b"K\0"], [b"K\1"], [b"K\7"], [b"M\x2c\1"], [b"J\xff\xff\xff\xff"], [b"\x8a\1\2"]],
    "storage": [
        *[[_stored(key), "=storage"] for key in "000000123"] * 8, *[["@storage"]] * 12,
        [_stored("0", "IntStorage")], [_stored("0", fewer=1)],
    ],
    "offset": [[b"K\0"]] * 6 + [[b"K\1"], [b"K\2"]],
    "layout": [
        way for shape, stride in _LAYOUTS for way in (
            *[[_tuple(shape), "=size", _tuple(stride)]] * 16,
            *[[_list(shape), "=list", _list(stride), "=list"]] * 4, ["@size", _tuple(stride)],
            [_tuple(shape), "@list"],
        )
    ],
    "hooks": [["@odict"], [_ODICT + b")R", "=odict"]],
    "flag": [*[[b"\x89"]] * 20, [b"\x88"], [b"K\1"]],
    "noted": [*[[]] * 15, [b"}", "=dict", "note"], [b"}", "=dict", "note", "note"], ["@dict"]],
    "note": [[_text(value), "bool", b"s"] for value in ("neg", "neg", "conj", "x")],
    "tensor": [
        *[_rebuild(_V2, *_VIEW, "flag", "hooks", "noted")] * 6, *[["@tensor"]] * 3,
        _rebuild("torch._utils\n_rebuild_tensor", *_VIEW),
        _rebuild("torch._utils\n_rebuild_tensor_v3", *_VIEW, "flag", "hooks", "dtype", "noted"),
    ],
    "wrapped": [
        _rebuild("torch._utils\n_rebuild_parameter", "tensor", "bool", "hooks"),
        _rebuild("torch._utils\n_rebuild_parameter_with_state", "tensor", "bool", "hooks", "dict"),
        *[_rebuild("torch._tensor\n_rebuild_from_type_v2", f"c{_V2}\nctorch{kind}\n(".encode(),
                   *_VIEW, b"\x89", "hooks", b"t", "dict")
          for kind in ("\nTensor", ".nn.parameter\nParameter")],
        _rebuild("torch._utils\n_rebuild_sparse_tensor", b"ctorch.serialization\n_get_layout\n"
                 + _text("torch.sparse_coo") + b"\x85R(" + _plain("1", (2, 2), (2, 1))
                 + _plain("0", (2,), (1,)) + _tuple((3, 3)), "bool", b"t"),
    ],
    "call": [*[["odict"]] * 3, ["counter"], ["size"], ["device"], ["dtype"],
             [b"cbuiltins\nset\n](", "scalar", "scalar", b"e\x85R"],
             [b"cbuiltins\nbytearray\nc_codecs\nencode\n", "word", _text("latin1"), b"\x86R\x85R"],
             [b"cbuiltins\ncomplex\nG" + struct.pack(">d", 1.5) + b"K\2\x86R"]],
    "odict": [*[[_ODICT + made, "=odict", "sets"] for made in (b")R", b")\x81", b"]\x85R")],
              [_ODICT + b"](", "key", "value", b"\x86e\x85R", "=odict", "sets"]],
    "counter": [[b"ccollections\nCounter\n", "dict", b"\x85R", "=counter"]],
    "size": [[b"ctorch\nSize\n" + _tuple((2, 3)) + b"\x85R", "=size"]],
    "device": [[b"ctorch\ndevice\n" + _text("cuda") + end, "=device"] for end in
               (b"\x85R", b"K\1\x86R")],
    "dtype": [[f"ctorch\n{name}\n".encode(), "=dtype"] for name in ("float16", "qint8", "int4")],
}  # fmt: skip


def program(seed: int) -> bytes:
    """A pickle, of a dict more often than not."""
    draw, memo, code = random.Random(seed), dict[int, str](), bytearray(b"\x80\2")
    left = draw.choice((20, 60, 120))

    def write(rule: str, depth: int = 0) -> None:
        nonlocal left
        if rule == "value":
            left -= 1
            depth += 1
            if depth > 6 or left < 0:
                rule = "scalar"
        for token in draw.choice(_RULES[rule]):
            if isinstance(token, bytes):
                code.extend(token)
            elif token[0] == "=":
                if draw.random() < 0.5:
                    at = draw.randrange(len(memo) + 2)  # perhaps in the place of something else
                    memo[at] = token[1:]
                    code.extend(b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at))
            elif token[0] == "@" and (known := [a for a, k in memo.items() if k == token[1:]]):
                at = draw.choice(known)
                code.extend(b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at))
            else:
                write(token.lstrip("@"), depth)

    write("program")
    return bytes(code + b".")


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

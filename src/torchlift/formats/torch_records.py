"""Torch's pickles at speed: the forty opcodes that describe one tensor, taken in one step.

``torch.save`` writes the same opcodes for every tensor. Interpreting them one by one takes 8 us per
tensor; matching them with one regular expression takes 3 us (0.8 s against 0.3 s for 100,000
tensors). Whatever deviates from the pattern, in any way, goes through the ordinary opcodes.

The intermediate objects (the sizes, the persistent id, ...) are not remembered. A pickle that
refers back to one of them is interpreted again from the start, without this step.
"""

from __future__ import annotations

import re
import struct

from torchlift.errors import FormatError
from torchlift.formats.pickle_machine import Machine
from torchlift.formats.pickle_opcodes import HANDLERS, read_pickle
from torchlift.formats.stand_ins import (
    STORAGE_DTYPES,
    UNTYPED,
    Global,
    StorageRef,
    TensorRef,
)
from torchlift.formats.torch_globals import TorchWorld

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

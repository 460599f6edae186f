"""The object of a pickle -> tensors and plain data by dotted key, by the rule of `flattening`."""

from __future__ import annotations

from typing import Any, TypeGuard

from torchlift.errors import FormatError
from torchlift.formats.flattening import (
    Containers,
    Flat,
    Flattener,
    NotPlain,
    check_depth,
    name_text,
)
from torchlift.formats.index import QUANTIZED, SLICE, SUBCLASS, Lack, Leaf
from torchlift.formats.slices import located
from torchlift.formats.torch_pickle import (
    CONSTANTS,
    ArrayRef,
    Blocked,
    Global,
    KindRef,
    NumpyDtype,
    StorageRef,
    TensorRef,
)
from torchlift.formats.unpickle import ENTRY, STEP, Budget, check_key

_CONTAINERS = (dict, list, tuple, set, frozenset)
_TENSORS = (TensorRef, StorageRef)
_HOLDING = (TensorRef, Blocked)
_TEXTS = (str, bytes, bytearray)
_SCALARS = (bool, int, float, complex, *_TEXTS)


def flatten(root: object, budget: Budget) -> Flat[TensorRef]:
    """Flatten the object of a pickle.

    Args:
        root: The result of a `Machine`.
        budget: Budget of the file. Containers that share their items can have far more
            paths than a file has bytes.

    Raises:
        FormatError: If the containers nest too deep, contain themselves, or expand to far more
            data than the file stores.
    """
    return _RecordFlattener(Containers((*_TENSORS, Leaf)), budget).run(root)


class _RecordFlattener(Flattener):
    """The walk through the records of a pickle. It keeps plain copies of them."""

    def __init__(self, containers: Containers, budget: Budget) -> None:
        super().__init__(containers, budget)
        self._counted: dict[int, object] = {}

    def _file(self, key: str, value: Any, depth: int) -> None:
        if isinstance(value, Leaf):
            self.flat.tensors[key] = value
            return
        if isinstance(value, StorageRef) and value.dtype not in QUANTIZED:
            value = TensorRef(value, value.dtype or "uint8", 0, (value.numel,), (1,))
        needs: str | None = None
        if isinstance(value, TensorRef):
            self.budget.spend(value.cost if isinstance(value, KindRef) else ENTRY, key)
            if isinstance(value, KindRef) and value.kind == SLICE:
                value = located(value, self.budget)
                needs = Lack.SLICED if isinstance(value, KindRef) else None
            self.flat.tensors[key] = value
            needs = value.facts[0] if _is_subclass(value) else needs
        else:
            try:
                self.flat.objects[key] = self._plain(value, key, depth)
            except NotPlain as error:
                needs = str(error)
        if needs is not None:
            self.flat.blocked[key] = needs
            if count := self._count(value):
                self.flat.inside[key] = count

    def _count(self, value: object) -> int:
        """Return the number of tensors in a blocked value. Each object counts once."""
        count, left = 0, [value]
        while left:
            item = left.pop()
            if id(item) in self._counted or not isinstance(item, (*_CONTAINERS, *_HOLDING)):
                continue
            self._counted[id(item)] = item
            inner = item.tensors if _is_subclass(item) else ()
            count += isinstance(item, TensorRef) and not inner
            left += inner
            if isinstance(item, dict):
                left += item.values()
            elif not isinstance(item, TensorRef):
                left += item.inside if isinstance(item, Blocked) else item
        return count

    def _plain(self, value: object, key: str, depth: int) -> object:
        """Return a copy of a value made of plain Python objects only."""
        # A summary prints a text each time that a pickle refers to it.
        self.budget.spend(STEP + (len(value) if isinstance(value, _TEXTS) else 0), key)
        if value is None or type(value) in _SCALARS:
            return value
        if isinstance(value, str):  # of a device or a slice
            return str(value)
        if isinstance(value, Global) and value.name in CONSTANTS:
            return value.name
        if isinstance(value, ArrayRef) and value.array is not None:
            return value.array
        if isinstance(value, ArrayRef):
            raise NotPlain("numpy.ndarray")
        if isinstance(value, (Global, NumpyDtype, Blocked)):
            raise NotPlain(value.name)
        if not isinstance(value, _CONTAINERS):
            what = "torch.Tensor" if isinstance(value, TensorRef) else "torch.UntypedStorage"
            raise NotPlain(what)
        check_depth(depth, key)
        self.budget.spend(STEP, key)
        if isinstance(value, dict):
            return {
                self._plain(k, key, depth + 1): self._plain(v, key, depth + 1)
                for k, v in value.items()
            }
        kind = next(kind for kind in _CONTAINERS[1:] if isinstance(value, kind))
        return kind([self._plain(item, key, depth + 1) for item in value])

    def _text(self, name: object, prefix: str) -> str:
        """Return the text of a dictionary key that is not a string."""
        if isinstance(name, (bytes, tuple)):
            self.budget.spend(STEP * check_key(name), prefix)
        return key_text(name, prefix)


def _is_subclass(value: object) -> TypeGuard[KindRef]:
    return isinstance(value, KindRef) and value.kind == SUBCLASS


def key_text(name: object, prefix: str) -> str:
    """Return the text of a dictionary key that is not a string."""
    if _is_name(name):
        return name_text(name)
    raise FormatError(
        "a dictionary key cannot be part of a tensor's name",
        entry=prefix.removesuffix("."),
        expected="a string or a number",
        found=f"a {'storage' if isinstance(name, StorageRef) else type(name).__name__}",
    )


def _is_name(name: object) -> bool:
    if isinstance(name, tuple):
        return all(map(_is_name, name))
    plain = (int, float, str, Global, Blocked)
    return name is None or isinstance(name, plain) or (type(name) is bytes and len(name) < 1000)

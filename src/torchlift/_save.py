"""The ``data.pkl`` of a torch file, made from names, dtypes and shapes: no tensor is at hand.

Records that hold no values are pickled as what ``torch.save`` makes of tensors, so the opcodes are
the same, and everything that reads those of torch reads these.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from torchlift.errors import FormatError, PlacementError
from torchlift.formats import ITEMSIZE
from torchlift.formats.boxes import row_major
from torchlift.formats.flatten import flatten
from torchlift.formats.layout import Stored, is_unicode
from torchlift.formats.torch_pickle import STORAGE_DTYPES, TorchWorld, read_torch_pickle
from torchlift.formats.unpickle import MAX_INT, check_key

_STORAGES = {dtype: name.removeprefix("torch.") for name, dtype in STORAGE_DTYPES.items()}


class Shared:
    """In place of a tensor: the number of the storage that holds it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def torch_pickle(
    values: Mapping[str, object],
    tensors: Sequence[Stored],
    *,
    metadata: Mapping[str, Any] | None = None,
    ordered: bool = False,
) -> bytes:
    """Pickle a state dict whose tensors are only described.

    Args:
        values: key -> `Shared`, with the number of a tensor; or plain data. Keys with one number
            share a storage when they are loaded.
        tensors: one for each storage.
        metadata: the ``_metadata`` that a module's state dict has; makes it an ordered one.
        ordered: whether to make an ``OrderedDict`` rather than a dict.

    Raises:
        PlacementError: a value cannot be read back, or only by running code.

    Example:
        >>> import torch, pickletools
        >>> data = torch_pickle({"w": Shared(0)}, [Stored("w", "float32", (2, 3))])
        >>> [arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"]
        ['torch._utils _rebuild_tensor_v2', 'torch FloatStorage', 'collections OrderedDict']
    """
    state: dict[str, object] = OrderedDict() if ordered or metadata is not None else {}
    storages = [_Storage(str(number), tensor) for number, tensor in enumerate(tensors)]
    for key, value in values.items():
        if isinstance(value, Shared):
            state[key] = _Tensor(storages[value.number])
        else:
            require_plain(key, value)
            state[key] = value
    if metadata is not None:
        require_plain("_metadata", metadata)
        state._metadata = metadata  # type: ignore[attr-defined]
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(state)
    data = file.getvalue()
    if not all(isinstance(value, Shared) for value in values.values()):
        require_readable(data)
    return data


class _Storage:
    __slots__ = ("key", "tensor")

    def __init__(self, key: str, tensor: Stored) -> None:
        self.key = key  # one object per storage: the pickle then writes it once
        self.tensor = tensor

    def identity(self) -> tuple[object, ...]:
        """What torch calls the persistent id."""
        name, nbytes = _STORAGES.get(self.tensor.dtype), self.tensor.nbytes
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        # The location is where whoever wrote it had it: of a mesh, that means nothing elsewhere.
        numel = nbytes if name is None else nbytes // ITEMSIZE[self.tensor.dtype]
        return "storage", kind, self.key, "cpu", numel


class _Tensor:
    __slots__ = ("storage",)

    def __init__(self, storage: _Storage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.storage.tensor
        # New tuples: the pickle would refer back to one that it has seen, as torch's never does.
        shape, stride = (*tensor.shape,), row_major(tensor.shape)
        arguments: tuple[Any, ...] = (self.storage, 0, shape, stride, False, OrderedDict())
        if tensor.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, getattr(torch, tensor.dtype))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.identity() if type(obj) is _Storage else None


#: What values that are not tensors may consist of: what ``weights_only=True`` and torchlift read.
_LEAVES = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, dict, OrderedDict)
_MAX_BITS = 8 * (MAX_INT - 1)
_MAX_DEPTH = 90  # torchlift reads 100 levels, and a state dict and its templates are some of them


def require_plain(key: str, value: object) -> None:
    """Return when torch, with ``weights_only=True``, and torchlift can read the value back.

    Raises:
        PlacementError: they cannot.

    Example:
        >>> require_plain("extra", {"steps": [1, 2], "name": None})
        >>> require_plain("extra", {1, 2})
        Traceback (most recent call last):
        torchlift.errors.PlacementError: 'extra': cannot be stored in a torch file so that ...
    """
    _Walk(key).height(value, 0)


def require_readable(pickled: bytes) -> None:
    """Return when torchlift reads the pickle of a torch file back.

    Raises:
        PlacementError: it does not: two of its values would get one name, say.
    """
    try:
        flatten(read_torch_pickle(pickled, TorchWorld()), len(pickled))
    except FormatError as error:
        raise PlacementError(
            f"cannot be stored in a torch file so that it can be read back: {error.reason}",
            entry=error.entry,
            expected=error.expected,
            found=error.found,
        ) from error


class _Walk:
    """One look at everything inside a value."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._open: set[int] = set()
        self._heights: dict[int, int] = {}  # many may hold one container: look inside it once

    def height(self, item: Any, depth: int) -> int:
        """Levels of containers in a value that is itself `depth` levels deep."""
        if type(item) in _LEAVES:
            self._leaf(item)
            return 0
        if type(item) not in _CONTAINERS:
            found = f"a {type(item).__module__}.{type(item).__qualname__}"
            self._refuse("tensors as values of the state dict, or plain data", found)
        if id(item) in self._open:
            self._refuse("containers that do not contain themselves", f"a {type(item).__name__}")
        known = self._heights.get(id(item), 0)
        if depth + max(known, 1) > _MAX_DEPTH:
            self._refuse(f"at most {_MAX_DEPTH} levels of containers", "more")
        if not known:
            self._open.add(id(item))
            known = 1 + max((self.height(part, depth + 1) for part in self._parts(item)), default=0)
            self._open.remove(id(item))
            self._heights[id(item)] = known
        return known

    def _parts(self, item: Any) -> list[Any]:
        if not isinstance(item, dict):
            return list(item)
        for key in item:
            try:
                check_key(key)
            except FormatError as error:
                self._refuse("short keys of dictionaries", error.reason)
        return [*item, *item.values()]

    def _leaf(self, item: object) -> None:
        if isinstance(item, str) and not is_unicode(item):
            self._refuse("text", "a lone surrogate, which UTF-8 cannot write")
        if isinstance(item, int) and item.bit_length() >= _MAX_BITS:
            self._refuse(f"integers of less than {_MAX_BITS} bits", f"{item.bit_length()} bits")

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise PlacementError(
            "cannot be stored in a torch file so that it can be read back without running code",
            entry=self._key,
            expected=expected,
            found=found,
            hint="Take it out of what is saved, or flatten what holds it.",
        )

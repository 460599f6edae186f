"""The ``data.pkl`` of a torch file, made from names, dtypes and shapes: no tensor is at hand.

Records that hold no values are pickled as what ``torch.save`` makes of tensors, so the opcodes are
the same, and everything that reads those of torch reads these.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchlift.boxes import row_major
from torchlift.formats import ITEMSIZE
from torchlift.formats.stand_ins import STORAGE_DTYPES
from torchlift.layouts import Stored
from torchlift.layouts.plain import require_plain, require_readable

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

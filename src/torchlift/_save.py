"""Check and lay out what one file will hold, and make the ``data.pkl`` of a torch file.

The pickle is made from names, dtypes and shapes: no tensor is at hand. Records that hold no values
are pickled as what ``torch.save`` makes of tensors, so the opcodes are the same, and everything
that reads those of torch reads these.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchlift._model.dtensor import first_rank, held
from torchlift._model.torch_private import REBUILD_V2, REBUILD_V3
from torchlift.errors import FormatError, PlacementError
from torchlift.formats import AMBIGUOUS, ITEMSIZE
from torchlift.formats.boxes import row_major
from torchlift.formats.flatten import flatten
from torchlift.formats.layout import Layout, Stored, format_for, is_unicode
from torchlift.formats.safetensors import safetensors_layout
from torchlift.formats.torch_pickle import STORAGE_DTYPES, TorchWorld, read_torch_pickle
from torchlift.formats.torch_zip import torch_zip_layout
from torchlift.formats.unpickle import MAX_INT, Budget, check_key

_STORAGES = {dtype: name.removeprefix("torch.") for name, dtype in STORAGE_DTYPES.items()}


class Described(NamedTuple):
    """What one process has to save, without the values of its tensors.

    Attributes:
        tensors: name -> what is stored of it, and the first rank of its mesh; None if it has none.
        plain: name -> value that is no tensor.
        notes: ``_metadata`` of the state dict, where it has one.
        order: all names.
    """

    tensors: dict[str, tuple[Stored, int | None]]
    plain: dict[str, object]
    notes: Mapping[str, Any] | None
    order: list[str]


class Contents:
    """A state dict and how one file is going to hold it.

    Attributes:
        state: name -> tensor, or plain data.
        format: of the file.
        tensors: name -> the tensor as it is stored, in the order of `state`.

    Example:
        >>> contents = Contents({"a": torch.zeros(2), "b": torch.ones(2)}, "x.pt", None, {})
        >>> [place.tensor.key for place in contents.lay_out({})[0].payloads]
        ['a', 'b']
    """

    def __init__(
        self,
        obj: nn.Module | Mapping[str, torch.Tensor],
        path: str,
        format: str | None,
        metadata: Mapping[str, str],
    ) -> None:
        """Check all that this process can check alone.

        Raises:
            TypeError: it is neither a module nor a mapping; or the metadata is not text.
            ValueError: see `format_for`; or a torch file is to hold metadata.
            PlacementError: the format cannot hold a name or a value.
        """
        if not isinstance(obj, (nn.Module, Mapping)):
            raise TypeError(
                f"expected a module, or a mapping from name to tensor; found a {type(obj).__name__}"
            )
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata: expected a mapping, found a {type(metadata).__name__}")
        self.format = format_for(path, format)
        if metadata and self.format != "safetensors":
            raise ValueError(
                "a torch file has no place for metadata: save as safetensors, or put the text into "
                "the state dict"
            )
        self._metadata = dict(metadata)
        self.state: Mapping[str, Any] = obj.state_dict() if isinstance(obj, nn.Module) else obj
        for key in self.state:
            _require_name(key)
        self.tensors = {
            key: _stored(key, value, self.format)
            for key, value in self.state.items()
            if isinstance(value, torch.Tensor) or self.format == "safetensors"
        }
        if self.format == "safetensors":
            safetensors_layout(self.tensors.values(), self._metadata)

    def describe(self) -> Described:
        """Return what another process needs to know to save with this one.

        Raises:
            PlacementError: a value cannot be read back, or only by running code.
        """
        plain = {key: value for key, value in self.state.items() if key not in self.tensors}
        for key, value in plain.items():
            _require_plain(key, value)
        notes = getattr(self.state, "_metadata", None)
        if notes is not None:
            _require_plain("_metadata", notes)
        tensors = {k: (stored, first_rank(self.state[k])) for k, stored in self.tensors.items()}
        return Described(tensors, plain, notes, list(self.state))

    def merge(self, everything: Sequence[Described]) -> None:
        """Take in what all processes have, in the same order on each of them.

        Of plain values the first process that has the name counts; a tensor that is none of this
        process's is None in `state`.
        """
        state: OrderedDict[str, Any] = OrderedDict()
        tensors: dict[str, Stored] = {}
        notes: OrderedDict[str, Any] = OrderedDict()
        for told in everything:
            for key in told.order:
                if key in told.tensors:
                    tensors.setdefault(key, told.tensors[key][0])
                state.setdefault(key, told.plain.get(key, self.state.get(key)))
            notes = OrderedDict({**(told.notes or {}), **notes})
        if any(told.notes is not None for told in everything):
            state._metadata = notes  # type: ignore[attr-defined]
        self.state, self.tensors = state, tensors

    def lay_out(self, owners: Mapping[str, str], length: int | None = None) -> tuple[Layout, int]:
        """Lay the file out.

        Args:
            owners: name -> the name whose storage it shares, which a torch file keeps.
            length: what another process got, which writes the frame; only the offsets of the
                tensors are needed here.

        Returns:
            The layout, and the length in bytes of what processes may see differently and of which
            the offsets depend: a header with metadata, a pickle with plain values.

        Raises:
            PlacementError: a value cannot be read back, or only by running code.
        """
        if self.format == "safetensors":
            source = self._metadata if length is None else length
            layout = safetensors_layout(self.tensors.values(), source)
            return layout, min((start for _, start in layout.payloads), default=layout.nbytes)
        own = [key for key in self.tensors if key not in owners]
        tensors = [self.tensors[key] for key in own]
        if length is not None:
            return torch_zip_layout(tensors, length), length
        number = {key: at for at, key in enumerate(own)}
        values = {
            key: Shared(number[owners.get(key, key)]) if key in self.tensors else value
            for key, value in self.state.items()
        }
        notes = getattr(self.state, "_metadata", None)
        ordered = isinstance(self.state, OrderedDict)
        data = torch_pickle(values, tensors, metadata=notes, ordered=ordered)
        return torch_zip_layout(tensors, data), len(data)


def _require_name(key: object) -> None:
    """Refuse a name that readers cannot read, such as a member of an Enum."""
    if type(key) is str and is_unicode(key):
        return
    raise PlacementError(
        "cannot be the name of a tensor in a file",
        entry=str(key),
        expected="a str that UTF-8 can write",
        found="a lone surrogate in it" if type(key) is str else f"a {type(key).__name__}",
        hint="Rename it in what is saved.",
    )


def _stored(key: str, value: object, format: str) -> Stored:
    """Describe a tensor as it is going to be stored; refuse what has no values to store."""
    found = type(value).__name__
    if isinstance(value, torch.Tensor) and is_lazy(value):
        found += ", which gets its shape when the module is first called"
    elif isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        is_dense = value.layout == torch.strided and not value.is_nested and not value.is_meta
        if is_dense and name in ITEMSIZE and not is_traceable_wrapper_subclass(held(value)):
            return Stored(key, name, tuple(value.shape))
        found += f", {name}, {value.layout}, on {value.device}"
    raise PlacementError(
        f"cannot be stored in a {'safetensors' if format == 'safetensors' else 'torch'} file",
        entry=key,
        expected="a dense tensor with values",
        found=found,
    )


class Shared(NamedTuple):
    """In place of a tensor: the number of the storage that holds it."""

    number: int


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
    plain = {key: value for key, value in values.items() if not isinstance(value, Shared)}
    for key, value in plain.items():
        _require_plain(key, value)
    state = OrderedDict(values) if ordered or metadata is not None else dict(values)
    if metadata is not None:
        _require_plain("_metadata", metadata)
        state._metadata = metadata  # type: ignore[attr-defined]
    file = io.BytesIO()
    _Pickler(file, tensors).dump(state)
    data = file.getvalue()
    if plain:
        _require_readable(data)
    return data


class _Storage(NamedTuple):
    key: str
    tensor: Stored


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Stored]) -> None:
        super().__init__(file, protocol=2)
        # One key object per storage: the pickle then writes it once.
        self._storages = [_Storage(str(at), tensor) for at, tensor in enumerate(tensors)]

    def persistent_id(self, obj: object) -> object:
        if type(obj) is not _Storage:
            return None
        name, nbytes = _STORAGES.get(obj.tensor.dtype), obj.tensor.nbytes
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        numel = nbytes if name is None else nbytes // ITEMSIZE[obj.tensor.dtype]
        # The location is where whoever wrote it had it: of a mesh, that means nothing elsewhere.
        return "storage", kind, obj.key, "cpu", numel

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is not Shared:
            return NotImplemented
        storage = self._storages[obj.number]
        _, dtype, shape = storage.tensor
        # New tuples: the pickle would refer back to one that it has seen, as torch's never does.
        arguments: tuple[Any, ...] = (storage, 0, (*shape,), row_major(shape), False, OrderedDict())
        if dtype in _STORAGES:
            return REBUILD_V2, arguments
        return REBUILD_V3, (*arguments, getattr(torch, dtype))


#: What values that are not tensors may consist of: what ``weights_only=True`` and torchlift read.
_LEAVES = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, dict, OrderedDict)
_MAX_BITS = 8 * (MAX_INT - 1)
_MAX_DEPTH = 90  # torchlift reads 100 levels, and a state dict and its templates are some of them


def _require_plain(key: str, value: object) -> None:
    """Refuse a value that torch, with ``weights_only=True``, and torchlift could not read back."""
    seen: set[tuple[int, int]] = set()  # what many containers share is looked at once a level

    def refuse(expected: str, found: str) -> NoReturn:
        raise PlacementError(
            "cannot be stored in a torch file so that it can be read back without running code",
            entry=key,
            expected=expected,
            found=found,
            hint="Take it out of what is saved, or flatten what holds it.",
        )

    def check(item: Any, depth: int) -> None:
        if isinstance(item, str) and not is_unicode(item):
            refuse("text", "a lone surrogate, which UTF-8 cannot write")
        if isinstance(item, int) and item.bit_length() >= _MAX_BITS:
            refuse(f"integers of less than {_MAX_BITS} bits", f"{item.bit_length()} bits")
        if type(item) in _LEAVES or (id(item), depth) in seen:
            return
        if type(item) not in _CONTAINERS:
            found = f"a {type(item).__module__}.{type(item).__qualname__}"
            refuse("tensors as values of the state dict, or plain data", found)
        if depth == _MAX_DEPTH:
            refuse(f"at most {_MAX_DEPTH} levels of containers, none inside itself", "more")
        seen.add((id(item), depth))
        for part in [*item, *item.values()] if isinstance(item, dict) else item:
            check(part, depth + 1)
        for name in item if isinstance(item, dict) else ():
            try:
                check_key(name)
            except FormatError as error:
                refuse("short keys of dictionaries", error.reason)

    check(value, 0)


def _require_readable(pickled: bytes) -> None:
    """Refuse what torchlift would not read back, such as two values that would get one name."""
    try:
        world = TorchWorld(Budget(len(pickled)))
        flat = flatten(read_torch_pickle(pickled, world), world.budget)
        for key in (key for key, name in flat.blocked.items() if name == AMBIGUOUS):
            what = "two tensors or objects have this key once containers are joined by dots"
            raise FormatError(what, entry=key)
    except FormatError as error:
        raise PlacementError(
            f"cannot be stored in a torch file so that it can be read back: {error.reason}",
            entry=error.entry,
            expected=error.expected,
            found=error.found,
        ) from error

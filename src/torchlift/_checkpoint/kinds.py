"""Make the values of a file that are not strided numbers, when they are first used."""

from __future__ import annotations

import enum
import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchlift._model.dtensor import is_dtensor
from torchlift._model.handlers import has_memory
from torchlift._model.slots import is_lazy
from torchlift._model.torch_private import (
    REBUILD_QUANTIZED,
    REBUILD_SPARSE,
    make_wrapper,
    without_subclasses,
)
from torchlift._system.text import clipped_list
from torchlift.errors import (
    Argument,
    CheckpointError,
    FormatError,
    Hint,
    PlacementError,
    UnsafeError,
)
from torchlift.formats.boxes import steps_in_file
from torchlift.formats.flattening import Containers, name_text
from torchlift.formats.index import QUANTIZED, SUBCLASS, Array, Chunk, Kind, Leaf, TensorEntry
from torchlift.formats.torch_pickle import (
    CONSTANTS,
    ArrayRef,
    Blocked,
    CountRecord,
    DeviceName,
    Global,
    LayoutName,
    NumpyDtype,
    OrderedRecord,
    SliceText,
    StorageRef,
    TensorRef,
)

#: Classes that may be rebuilt, or pairs of a class and its name in files.
Allow = Iterable["type | tuple[type, str]"]

#: Stands for a value that is left out.
DROPPED = object()
#: Values of quantised blocks to compute at a time. The temporaries take about 16 MiB.
COMPUTED = 1 << 20
#: Name in an encoding -> the function of the values, for renames that compute something.
_ARITHMETIC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "minus one": lambda values: values - 1,
    "log of negative": lambda values: torch.log(-values),
}
#: GGUF types that are plain numbers.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: Sparse layout -> the methods that return the places of its values.
_INDICES = {
    torch.sparse_coo: ("indices",),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}


def made_of(
    entry: TensorEntry, dtype: torch.dtype, inner: Sequence[torch.Tensor], path: str
) -> torch.Tensor:
    """Make the tensor of an entry of a kind, over the memory of the tensors that it is made of.

    torch's own reader is not used. It runs the ``__setstate__`` of every class that the process
    allows, and accepts indices outside of the tensor.

    Args:
        entry: Entry of the tensor.
        dtype: Dtype of the tensor.
        inner: The tensors that it is made of.
        path: Path of the file, for errors.

    Raises:
        UnsafeError: If it contains a class that is not allowed.
        FormatError: If its values are invalid, or its class rejects them.
    """
    kind = entry.kind
    assert kind is not None
    # torch warns once that sparse CSR is in beta and quantised tensors are deprecated. A warning
    # filter would hide the warnings of other threads, too.
    try:
        if kind.name == SUBCLASS:
            return _subclass(entry, inner, path)
        if kind.name == "meta":
            return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="meta")
        if kind.name == "sparse_coo":
            indices, values = inner
            # Checked, unlike in torch.load: a dense copy would write outside of its memory.
            return torch.sparse_coo_tensor(
                indices, values, entry.shape,
                device="cpu", check_invariants=True, is_coalesced=kind.facts[0],
            )  # fmt: skip
        if kind.name.startswith("sparse"):
            compressed, plain, values = inner
            return torch.sparse_compressed_tensor(
                compressed, plain, values, entry.shape,
                layout=getattr(torch, kind.name), device="cpu", check_invariants=True,
            )  # fmt: skip
        return _quantized(entry, dtype, *inner)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        what, hint = f"the stored values do not make a valid {kind} tensor", None
        if kind.name == SUBCLASS:
            what = f"{kind.facts[0].rpartition('.')[2]} rejects the stored values"
            hint = "Install the version of the library that saved it, and save its "
            hint += "dequantised values."
        raise FormatError(
            what,
            file=path,
            entry=entry.key,
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            hint=hint,
        ) from error


def _quantized(
    entry: TensorEntry, dtype: torch.dtype, numbers: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Return a quantised tensor over the stored numbers."""
    # Made from one element, or one per channel: only its scales and zero points are kept. Each
    # dtype is named, because a caller may have set another default.
    one, kind = torch.zeros([1] * numbers.dim(), dtype=torch.float32, device="cpu"), entry.kind
    assert kind is not None
    if kind.name == "per_tensor_affine":
        scale, zero = kind.facts
        made = torch.quantize_per_tensor(one, scale, zero, dtype)
    else:
        axis, *listed = kind.facts
        types = torch.float64, torch.int64 if kind.name == "per_channel_affine" else torch.float32
        scales, zeros = rest or [
            torch.tensor(values, dtype=each, device="cpu")
            for values, each in zip(listed, types, strict=True)
        ]
        if scales.numel() != entry.shape[axis]:
            raise ValueError(f"{scales.numel()} scales for {entry.shape[axis]} channels")
        some = one.repeat_interleave(scales.numel(), axis)
        made = torch.quantize_per_channel(some, scales, zeros, axis, dtype)
    whole = numbers.untyped_storage()
    return made.set_(whole, numbers.storage_offset(), numbers.shape, numbers.stride())


class TensorCall(NamedTuple):
    """The call that torch pickles for a tensor that it makes of others.

    Attributes:
        function: A rebuilder of torch.
        arguments: Its arguments, with tensors or entries of a file. The numbers of a quantised
            tensor are one argument instead of storage, offset, sizes and strides.
        dtype: Dtype of a quantised tensor.
    """

    function: Any
    arguments: tuple[Any, ...]
    dtype: torch.dtype | None = None


def call_of(value: torch.Tensor | TensorEntry) -> TensorCall | None:
    """Return the call that makes a sparse or quantised tensor or a wrapper, or None.

    Example:
        >>> call_of(torch.eye(2).to_sparse()).arguments[1][1]
        tensor([1., 1.])
        >>> call_of(torch.eye(2)) is None
        True
    """
    if isinstance(value, TensorEntry):
        return None if value.kind is None else _call_of_entry(value, value.kind)
    if value.is_meta:  # torch pickles it as a tensor without parts
        return None
    is_wrapper = hasattr(value, "__tensor_flatten__") and not is_dtensor(value)
    if value.is_nested or not (value.is_quantized or value.layout in _INDICES or is_wrapper):
        return None
    plain = value.detach()
    reduce: Callable[[int], tuple[Any, ...]] = plain.__reduce_ex__
    if not value.is_quantized:
        call = reduce(2)  # a subclass may add a third item, which cannot be saved
        return TensorCall(*call) if len(call) == 2 else None
    name = str(value.dtype).removeprefix("torch.")
    if name not in QUANTIZED:
        return None
    function, (_, first, size, stride, *rest) = reduce(2)
    numbers = torch.empty(0, dtype=getattr(torch, QUANTIZED[name]), device=value.device)
    numbers = numbers.set_(plain.untyped_storage(), first, size, stride)
    return TensorCall(function, (numbers, *rest), value.dtype)


def _call_of_entry(entry: TensorEntry, kind: Kind) -> TensorCall | None:
    inner, size = kind.tensors, torch.Size(entry.shape)
    if kind.name.startswith("sparse"):
        return TensorCall(REBUILD_SPARSE, (getattr(torch, kind.name), (*inner, size, *kind.facts)))
    if not kind.name.startswith("per_"):
        return None
    numbers, *more = inner
    params: tuple[Any, ...] = kind.facts
    if kind.name != "per_tensor_affine":
        axis, *listed = kind.facts
        params = (*(more or map(list, listed)), axis)
    hooks: OrderedDict[str, object] = OrderedDict()
    arguments = numbers, (getattr(torch, kind.name), *params), False, hooks
    return TensorCall(REBUILD_QUANTIZED, arguments, getattr(torch, entry.dtype))


def compute(
    target: torch.Tensor, entry: TensorEntry, chunk: Chunk, raw: torch.Tensor, path: str
) -> None:
    """Compute the values of a box from its blocks, and copy them with a cast.

    Args:
        target: Memory of the shape of the box.
        entry: Entry of the tensor. Its encoding names the blocks and the functions of the values.
        chunk: The box.
        raw: The bytes of the box.
        path: Path of the file, for errors.

    Raises:
        FormatError: If the package gguf is not installed, or does not support this type.
    """
    (values, size), steps = entry.block, steps_in_file(entry, chunk)
    dims = range(len(chunk.shape))
    # The dimension along which the blocks lie becomes the last one.
    along = next((d for d in dims if steps[d] == 1 and chunk.shape[d] >= values), None)
    order = [d for d in dims if d != along]
    shape, strides = ([row[d] for d in order] for row in (chunk.shape, steps))
    if along is not None:
        order.append(along)
        shape, strides = [*shape, chunk.shape[along] // values], [*strides, values]
    places = [step // values * size for step in strides]
    blocks = raw.as_strided([*shape, size], [*places, 1], raw.storage_offset())
    target = target.permute(order)
    target = (
        target.view(*target.shape[:-1], -1, values) if along is not None else target.unsqueeze(-1)
    )
    for into, some in _some_at_a_time(target, blocks):
        made = _values_of_blocks(entry, some.contiguous(), path).view(into.shape)
        into.copy_(calculated(entry, made))


def calculated(entry: TensorEntry, values: torch.Tensor) -> torch.Tensor:
    """Return the values after the functions of an entry's encoding, if it has any."""
    for name in entry.encoding[1:]:
        values = _ARITHMETIC[name](values)
    return values


def _some_at_a_time(
    target: torch.Tensor, blocks: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield slices of blocks, with the memory for their values."""
    if target.numel() <= COMPUTED:
        yield target, blocks
        return
    dim = next(d for d, size in enumerate(target.shape) if size > 1)
    for pair in zip(target.chunk(2, dim), blocks.chunk(2, dim), strict=True):
        yield from _some_at_a_time(*pair)


def _values_of_blocks(entry: TensorEntry, blocks: torch.Tensor, path: str) -> torch.Tensor:
    """Return the values of blocks as float32.

    Args:
        entry: Entry of the tensor.
        blocks: The bytes of the blocks. The last dimension is a block.
        path: Path of the file, for errors.
    """
    name = entry.encoding[0]
    if name in _PLAIN:
        return blocks.clone().view(_PLAIN[name]).float()  # cloned: the bytes may not be aligned
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        raise FormatError(
            f"the values are quantised to {name}, and the package gguf is not installed",
            file=path,
            entry=entry.key,
            hint="pip install gguf",
        ) from error
    try:
        flat = blocks.numpy().reshape(-1, blocks.shape[-1])
        return torch.from_numpy(dequantize(flat, GGMLQuantizationType[name]))
    except NotImplementedError as error:
        raise FormatError(
            f"the values are quantised to {name}, which the installed gguf cannot compute",
            file=path,
            entry=entry.key,
        ) from error


def dense_of(tensor: torch.Tensor, *, indices: bool = True) -> list[torch.Tensor]:
    """Return the dense tensors with the content of a tensor: indices and values, or slices.

    Args:
        tensor: A tensor of any kind.
        indices: Whether to include the indices of a sparse tensor.
    """
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return list(tensor.unbind())
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in dense_of(getattr(tensor, name))]
    if tensor.layout not in _INDICES:
        return [tensor.dequantize() if tensor.is_quantized else tensor]
    tensor = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    found = [getattr(tensor, name)() for name in _INDICES[tensor.layout]]
    return [*(found if indices else ()), tensor.values()]


def readable_parts(tensor: torch.Tensor, path: str, key: str) -> list[torch.Tensor]:
    """Return the result of `dense_of`, if the values can be read.

    Raises:
        PlacementError: If torch cannot show its values: on meta, of a lazy module, a FakeTensor, or
            a layout of oneDNN.
    """
    if is_lazy(tensor):
        raise PlacementError(
            "a parameter of a lazy module does not have a shape yet",
            file=path,
            entry=key,
            hint="Run the module once before you take its state dict.",
        )
    if tensor.is_meta:
        raise meta_error(key, path)
    parts = dense_of(tensor)
    for each in parts:
        if each.is_meta:
            raise meta_error(key, path)
        if not has_memory(each):
            raise PlacementError(
                "the values of a tensor cannot be read",
                file=path,
                entry=key,
                expected="a tensor whose values are in memory",
                found=f"{type(each).__name__}, {each.dtype}, {each.layout}",
                hint="Build the model outside of FakeTensorMode, or call to_dense() on a tensor "
                "of a layout of its own.",
            )
    return parts


def meta_error(key: str, path: str | None = None) -> PlacementError:
    """Return the error for a tensor on meta whose values are needed."""
    return PlacementError(
        "the tensor does not have values",
        file=path,
        entry=key,
        found="a tensor on meta",
        hint="Load its values with torchlift.load, or make them with torchlift.materialize. Or "
        "leave the tensor out: pass {k: v for k, v in state.items() if not v.is_meta}.",
    )


def values_of(entry: TensorEntry, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
    """Return the dense tensors with the values of a tensor of a kind.

    Raises:
        FormatError: If its class cannot compute them.
    """
    assert entry.kind is not None
    if entry.kind.name != SUBCLASS:
        return dense_of(tensor, indices=False)
    try:
        made = tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor
        with without_subclasses():
            made = made.as_subclass(torch.Tensor)
            made.view(-1)[:0].tolist()  # fails if it is still a wrapper
    except Exception as error:  # code of the class
        raise FormatError(
            f"the values cannot be computed: {type(tensor).__name__} does not dequantise itself",
            file=path,
            entry=entry.key,
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        ) from error
    return [made]


# ---- records of a pickle


class Values:
    """The conversion of records of a pickle to the values that they stand for.

    Args:
        path: Path of the file, for errors.
        dropped: Keys that are left out. Containers that become empty are left out, too.
    """

    def __init__(self, path: str, dropped: Collection[str] = ()) -> None:
        self.path, self.dropped = path, dropped
        self._arrays: dict[int, object] = {}
        self._containers = Containers((TensorRef, StorageRef, Leaf))
        # Keeps the record alive: another object could get its identity otherwise.
        self._made: dict[int, tuple[object, Any]] = {}

    def tensor(self, record: object, key: str | None) -> object:
        """Return a tensor."""
        raise NotImplementedError

    def blocked(self, record: Blocked, key: str | None) -> object:
        """Return the replacement of a value that only running code could rebuild."""
        raise NotImplementedError

    def beside(self, value: Any) -> Any:
        """Return a value without a key: a name, an item of a set, metadata of a state dict.

        Each is made once, as by unpickling. The budget of an index covers values with keys only: a
        few bytes could expand to gigabytes here.
        """
        if id(value) not in self._made:
            try:
                self._made[id(value)] = value, self._make(value, None)
            except RecursionError as error:
                what = "containers nest too deep, or contain themselves"
                raise FormatError(what, file=self.path) from error
        return self._made[id(value)][1]

    def made(self, value: Any, key: str | None) -> Any:
        """Return the value of a record, with the values of the records inside.

        Args:
            value: The record.
            key: Its key. None for the whole object.
        """
        return self._make(value, key, is_root=key is None)

    def _item(self, value: Any, name: str, key: str | None, is_root: bool) -> Any:
        """Return the value of an item of a container with this key."""
        if key is None and not is_root:
            return self.beside(value)
        return self._make(value, name if key is None else f"{key}.{name}")

    def _make(self, value: Any, key: str | None, is_root: bool = False) -> Any:
        # Not a container of that name: its items have other keys, which stay.
        if key in self.dropped and self._containers.items(value) is None:
            return DROPPED
        if isinstance(value, dict):
            every = [
                (self.beside(name), self._item(item, name_text(name), key, is_root))
                for name, item in value.items()
            ]
            pairs = [pair for pair in every if pair[1] is not DROPPED]
            # A container that loses all of its items goes with them. An empty one stays.
            if every and not pairs:
                return DROPPED
            if not isinstance(value, OrderedRecord):
                return Counter(dict(pairs)) if isinstance(value, CountRecord) else dict(pairs)
            made = OrderedDict(pairs)
            if value._metadata is not None:
                made._metadata = self.beside(value._metadata)  # type: ignore[attr-defined]
            return made
        if isinstance(value, (list, tuple)):
            items = [self._item(item, str(at), key, is_root) for at, item in enumerate(value)]
            kept = [item for item in items if item is not DROPPED]
            if kept and len(kept) < len(items):
                raise PlacementError(
                    "one item of a list cannot be left out: the items after it would move",
                    file=self.path,
                    entry=key,
                    hint="Leave out the whole list, or nothing.",
                )
            return DROPPED if items and not kept else type(value)(kept)
        if isinstance(value, (set, frozenset)):
            return type(value)(map(self.beside, value))
        if isinstance(value, Blocked):
            return self.blocked(value, key)
        if isinstance(value, SliceText):
            return slice(*value.arguments)
        if isinstance(value, DeviceName):
            try:
                return torch.device(value)
            except RuntimeError as error:  # a device of another torch version, or a damaged name
                raise FormatError(
                    "the installed torch does not support this device",
                    file=self.path,
                    entry=key,
                    found=str(value),
                    hint="Take the tensors from ckpt.state_dict().",
                ) from error
        if isinstance(value, (Global, NumpyDtype, LayoutName)):
            name = str(value) if isinstance(value, LayoutName) else value.name
            found = getattr(torch, name.removeprefix("torch."), None)
            if isinstance(found, (torch.dtype, torch.layout, torch.qscheme)):
                return found
            # A constant of another torch version stays as text: the file is readable without it.
            if isinstance(value, LayoutName) or name in CONSTANTS:
                return name
            return self.blocked(Blocked(name), key)
        if isinstance(value, ArrayRef) and value.array is not None:
            return with_arrays(value.array, self._arrays)
        is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        if is_plain or isinstance(value, bytearray):
            return value
        return self.tensor(value, key)


def array_of(array: Array) -> Any:
    """Return a new NumPy array.

    Raises:
        FormatError: If numpy is not installed, or does not support this array.
    """
    try:
        import numpy
    except ImportError as error:
        raise FormatError("the value is a NumPy array, and numpy is not installed") from error
    try:
        empty = numpy.empty(0, array.code)
        made = numpy.frombuffer(array.data, empty.dtype) if array.data else empty
        return made.reshape(array.shape, order="F" if array.columns else "C").copy(order="K")
    except (TypeError, ValueError) as error:  # long double; more dimensions than numpy 1 has
        what = "the installed numpy does not support this array"
        raise FormatError(what, found=f"{array!r}: {error}") from error


def with_arrays(value: Any, made: dict[int, object]) -> Any:
    """Return a value with NumPy arrays in place of their records.

    Args:
        value: A plain value, or a container of plain values.
        made: Identity of a record -> its array. A file may refer to one record many times.
    """
    if isinstance(value, Array):
        if id(value) not in made:
            made[id(value)] = array_of(value)
        return made[id(value)]
    if isinstance(value, dict):
        return {key: with_arrays(item, made) for key, item in value.items()}
    is_list = isinstance(value, (list, tuple))
    return type(value)([with_arrays(item, made) for item in value]) if is_list else value


# ---- classes that a caller allows by name


def classes(allow_classes: Iterable[Any]) -> dict[str, type]:
    """Return name in files -> class, for the argument ``allow_classes``.

    Raises:
        TypeError: If an item is not a class.
    """
    items = [None] if isinstance(allow_classes, type) else list(allow_classes)
    for item in items:
        kind, name = item if isinstance(item, tuple) and len(item) == 2 else (item, "")
        if not isinstance(kind, type) or not isinstance(name, str):
            raise TypeError(
                f"allow_classes={allow_classes!r}: expected a list of classes of tensors, such as "
                "[Int8Tensor]"
            )
    return _by_name(items)


def _by_name(items: Iterable[Any]) -> dict[str, type]:
    pairs = (item if isinstance(item, tuple) else (item, "") for item in items)
    return {name or f"{kind.__module__}.{kind.__qualname__}": kind for kind, name in pairs}


def _subclass(entry: TensorEntry, inner: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    """Return the tensor of a subclass, made like in ``torch.load``, but of allowed classes only.

    Raises:
        UnsafeError: If it contains a class that is not allowed.
    """
    assert entry.kind is not None
    (name, is_view, state, refs), allowed = entry.kind.facts, entry.kind.classes
    values = _Inside(path, allowed, dict(zip(map(id, refs), inner, strict=True)))
    if name not in allowed:
        values.lacking[name] = None
    attributes = values.beside(state)
    if values.lacking:
        raise UnsafeError(
            "the tensor is made of a class that allow_classes does not list",
            file=path,
            entry=entry.key,
            found=clipped_list(list(values.lacking)),
            hint=Hint(
                "If you know that class, add it to ", Argument("allow_classes", "[...]"), "."
            ),
        )
    kind = allowed[name]
    if is_view:
        made: torch.Tensor = inner[0].as_subclass(kind)
    else:
        dtype = getattr(torch, entry.dtype)
        made = make_wrapper(kind, entry.shape, entry.stride, dtype, entry.requires_grad)
    _give(made, attributes)
    _check(made, kind, entry)
    return made


class _Inside(Values):
    """The attributes of a tensor of a subclass.

    Attributes:
        lacking: Names of classes that are not allowed. After the first one, nothing is called.
    """

    def __init__(
        self, path: str, classes: Mapping[str, type], tensors: Mapping[int, torch.Tensor]
    ) -> None:
        super().__init__(path)
        self.classes, self.tensors = classes, tensors
        self.lacking: dict[str, None] = {}

    def tensor(self, record: object, key: str | None) -> object:
        if id(record) not in self.tensors:
            raise TypeError(f"an attribute is a {type(record).__name__}")
        return self.tensors[id(record)]

    def blocked(self, record: Blocked, key: str | None) -> object:
        kind: Any = self.classes.get(record.name)
        if kind is None:
            return self._member(record)
        if not record.called:
            return kind
        arguments, *states = map(self.beside, record.inside)
        if self.lacking:
            return None
        made = kind.__new__(kind, *arguments) if record.made else kind(*arguments)
        for state in states:
            _give(made, state)
        return made

    def _member(self, record: Blocked) -> object:
        """Return a member of an enum that a library registered in torch. No code runs."""
        kind = _by_name(torch.serialization.get_safe_globals()).get(record.name)
        if not isinstance(kind, enum.EnumMeta) or not record.called:
            self.lacking[record.name] = None
            return self.beside(record.inside)  # collects more names for the error
        ((value,),) = self.beside(record.inside)  # fails with more arguments, or with a state
        return kind._value2member_map_[value]


def _give(made: Any, state: Any) -> None:
    """Set the attributes of an object as unpickling does, or call its own ``__setstate__``."""
    if isinstance(made, enum.Enum):  # the process has one such object, which must not change
        raise TypeError("an enum member has a state")
    own = getattr(type(made), "__setstate__", None)
    if own is not None and own is not torch.Tensor.__setstate__:
        made.__setstate__(state)
        return
    states = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    attributes = {name: value for some in states for name, value in (some or {}).items()}
    late = {name: value for name, value in attributes.items() if _is_taken(made, name, value)}
    for name, value in attributes.items():
        # Not setattr: a frozen dataclass refuses it.
        if name not in late:
            (setattr if isinstance(made, torch.Tensor) else object.__setattr__)(made, name, value)
    # A class may keep a tensor under the name of a method, such as `values`, if it declares it.
    declared = made.__tensor_flatten__()[0] if late and hasattr(made, "__tensor_flatten__") else ()
    for name, value in late.items():
        if name not in declared or not isinstance(value, torch.Tensor) or callable(value):
            raise TypeError(f"the state replaces {name!r} of the class")
        made.__dict__[name] = value


def _is_taken(made: object, name: str, value: object) -> bool:
    """Return whether an attribute would change the behaviour of an object, not only its data."""
    if name[:2] == name[-2:] == "__":
        return True
    own = inspect.getattr_static(type(made), name, None)
    if inspect.isroutine(own) and callable(value):
        return True
    # Setting `data` would replace the checked values by others of any shape.
    of_torch = isinstance(made, torch.Tensor) and hasattr(torch.Tensor, name)
    return of_torch and name != "requires_grad"


def _check(made: Any, kind: type, entry: TensorEntry) -> None:
    """Refuse a tensor that differs from its entry, or lacks a part that its class needs.

    Raises:
        TypeError: If it has another class, or a number in place of a tensor.
        ValueError: If it has another shape or dtype.
    """

    def compare(tensor: torch.Tensor) -> None:
        with without_subclasses():
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if type(tensor) is not kind:
            raise TypeError(f"it became a {type(tensor).__name__}")
        if (shape, dtype) != (entry.shape, entry.dtype):
            has = f"{entry.dtype} {list(entry.shape)}"
            raise ValueError(f"it became {dtype} {list(shape)}, and the file says {has}")

    compare(made)
    if not hasattr(kind, "__tensor_flatten__"):
        return
    names, context = made.__tensor_flatten__()
    inner = {name: getattr(made, name) for name in names}
    for name, value in inner.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(value).__name__} instead of a tensor")
    # Loading unflattens the tensor later, so this must work.
    compare(kind.__tensor_unflatten__(inner, context, made.size(), made.stride()))  # type: ignore[attr-defined]

"""Take the containers of a state apart, and find tensors that share memory."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchlift._checkpoint.checkpoint import MappedViews, dtype_of
from torchlift._checkpoint.kinds import TensorCall, call_of, meta_error
from torchlift._model.dtensor import is_dtensor, local_tensor, reshard
from torchlift._model.handlers import has_memory
from torchlift._model.names import Names
from torchlift._model.slots import ModuleTree
from torchlift._model.state import read_model
from torchlift._model.torch_private import REBUILD_SPARSE, key_of
from torchlift._save.blocks import Block, Workspace, entry_blocks, tensor_blocks
from torchlift._save.pickling import (
    MAX_DEPTH,
    Rebuilt,
    Shared,
    holds_numbers,
    is_array,
    require_plain,
)
from torchlift._system.text import clipped_list, printable
from torchlift._transfer.casting import Checked
from torchlift.errors import Argument, FormatError, Hint, PlacementError
from torchlift.formats.flattening import (
    ROOT_OBJECT,
    ROOT_TENSOR,
    Containers,
    items_of,
    name_text,
)
from torchlift.formats.index import ITEMSIZE, Chunk, Leaf, TensorEntry, is_row_major
from torchlift.formats.layout import Stored, is_unicode
from torchlift.formats.pickled import key_text
from torchlift.formats.torch_zip import repeats_too_often
from torchlift.formats.unpickle import check_key

#: Callable from a tensor of a checkpoint to the dtype that it is saved with.
Becomes = Callable[[TensorEntry], torch.dtype]
Replaced = Callable[[str, TensorEntry], torch.Tensor | None]
#: Callable from a key and an array of numpy to what is saved of the array.
Arrays = Callable[[str, Any], Any]
#: What keys joined by dots do not keep of a container.
TEXT_KEYS = "names that are not text become text"
LIST = "a list, whose positions become names"
TUPLE = "a tuple, which becomes a list"
_PAIR = (dict, OrderedDict, Counter)


@cache
def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True, eq=False)  # frozen, one takes 1.8 us to make, not 0.24
class Value:
    """A tensor to save.

    Attributes:
        key: its key.
        source: the tensor, or its place in a file.
        dtype: in the new file.
        shape: sizes in elements.
        stride: of the source, in elements.
        memory: identifies its memory as numbers of one dtype.
        first: its first element in that memory.
        plain: whether its elements are those of the memory, in any order.
        views: the file that it is in, or None.
        stored: its place in a file of its own.
        numel: its number of elements.
        checked: Counts values that are not finite as they are written, unless it is None.
    """

    key: str
    source: torch.Tensor | TensorEntry
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: Hashable
    first: int
    plain: bool
    views: MappedViews | None = None
    checked: Checked | None = None
    stored: Stored = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.stored = Stored(self.key, _name(self.dtype), self.shape)
        self.numel = math.prod(self.shape)

    @classmethod
    def of_tensor(cls, key: str, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor.

        Raises:
            PlacementError: If it is not stored as a dense tensor.
        """
        shape = stored_as(key, tensor).shape
        tensor = tensor.detach()
        flags = tensor.is_conj(), tensor.is_neg()
        found: Hashable = object()
        if tensor.numel():
            found = key_of(tensor.untyped_storage()), tensor.dtype, *flags
        place = found, int(tensor.storage_offset()), True not in flags
        return cls(key, tensor, tensor.dtype, shape, tensor.stride(), *place)

    @classmethod
    def of_entry(cls, key: str, entry: TensorEntry, views: MappedViews, becomes: Becomes) -> Value:
        """Return the value of a tensor of a file.

        Raises:
            PlacementError: If torch makes it of other tensors.
            FormatError: If the installed torch does not have its dtype.
        """
        index = views.index
        if entry.kind is not None:
            raise kind_error(key, _kind_of(entry), index.path)
        dtype_of(entry, index.path)
        found: Hashable = object()
        first, plain = 0, False
        if entry.chunks:
            found = entry.storage, entry.chunks, entry.dtype, entry.encoding
        storage = index.storage_of(entry)
        if storage is not None and len(entry.chunks) == 1:
            first, rest = divmod(entry.chunks[0].offset - storage.offset, entry.itemsize)
            plain = set(entry.encoding) <= {"big-endian"} and not rest
            if plain:
                found = entry.storage, entry.dtype, entry.encoding
        dtype = becomes(entry)
        return cls(key, entry, dtype, entry.shape, entry.stride, found, first, plain, views)

    @property
    def storage(self) -> Hashable:
        """Return what identifies the bytes that contain it, whatever their dtype."""
        # A box that a rename has cut out of a tensor has no storage of its own: its chunks count.
        return (isinstance(self.memory, tuple) and self.memory[0]) or self.memory

    @property
    def source_dtype(self) -> str:
        """Return the dtype of the source."""
        return _name(self.source.dtype)

    @property
    def is_cast(self) -> bool:
        """Return whether the new file has another dtype."""
        return self.source_dtype != self.stored.dtype

    @property
    def span(self) -> int:
        """Return the number of elements of its memory from its first to its last."""
        if not self.numel:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def place(self) -> Hashable:
        """Return what is equal for two keys of one tensor that are saved alike."""
        return self.memory, self.first, self.shape, self.stride, self.dtype

    def flat(self, start: int, stop: int) -> Value:
        """Return a range of its memory as a flat tensor."""
        numel = stop - start
        source: torch.Tensor | TensorEntry
        if isinstance(self.source, torch.Tensor):
            source = self.source.as_strided((numel,), (1,), start)
        else:
            assert self.views is not None
            storage, size = self.views.index.storages[self.source.storage], self.source.itemsize
            offset, nbytes = storage.offset + start * size, numel * size
            chunk = Chunk(storage.file, offset, nbytes, (0,), (numel,), packed=storage.packed)
            source = self.source._replace(
                shape=(numel,), stride=(1,), nbytes=nbytes, chunks=(chunk,)
            )
        return replace(self, source=source, shape=(numel,), stride=(1,), first=start)

    @property
    def crc32(self) -> int | None:
        """Return the checksum that its file has of exactly the bytes that are saved, or None."""
        if isinstance(self.source, torch.Tensor) or self.views is None or self.source.encoding:
            return None
        entry, storage = self.source, self.views.index.storage_of(self.source)
        if storage is None or len(entry.chunks) != 1 or self.is_cast or not entry.is_contiguous:
            return None
        is_all = (entry.chunks[0].offset, entry.nbytes) == (storage.offset, storage.nbytes)
        return storage.crc32 if is_all else None

    def blocks(self, work: Workspace) -> Iterator[Block]:
        """Yield its bytes as they are saved, in row-major order, in blocks."""
        if isinstance(self.source, torch.Tensor):
            return tensor_blocks(self.source, self.dtype, work, self.checked)
        assert self.views is not None
        return entry_blocks(self.source, self.dtype, work, self.views, self.checked)

    @property
    def is_dense(self) -> bool:
        """Return whether its elements lie in row-major order without gaps."""
        return is_row_major(self.shape, self.stride)


class Part(NamedTuple):
    """The role of a tensor inside of another tensor.

    Attributes:
        name: key of the other tensor.
        has_values: whether its numbers are values of the other tensor, which may be cast.
    """

    name: str
    has_values: bool = False


@dataclass(slots=True)
class State:
    """A state that was taken apart.

    Attributes:
        template: the containers, with a `Leaf` for every value.
        tensors: key -> value that is a tensor.
        objects: key -> value that is not a tensor.
        paths: key -> the names of the containers that lead to it.
        containers: key of a container -> what keys joined by dots do not keep of it.
        lost: key -> what no file keeps of it.
        made_of_others: key of a tensor that torch makes of those inside of it -> its kind.
        parts: key of a tensor inside of another tensor -> its role there.
        versions: path of a module -> the version that its state dict has.
        metadata: text for the headers of safetensors.
        values: of the tensors, in the order of the keys.
    """

    template: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    made_of_others: dict[str, TensorKind] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    values: Sequence[Value] = ()

    def name_of(self, key: str) -> str:
        """Return the key of the tensor that a tensor is a part of, or its own key."""
        return self.parts[key].name if key in self.parts else key

    def tied_names(self, tied: Mapping[str, str]) -> dict[str, str]:
        """Return key -> the tensor that has all of its parts."""
        kept: dict[str, set[str]] = {}
        for key in self.tensors:
            kept.setdefault(self.name_of(key), set()).add(self.name_of(tied.get(key, key)))
        return {name: min(own) for name, own in kept.items() if len(own) == 1 and name not in own}


def take_apart(
    saved: object,
    *,
    plain: bool = True,
    replaced: Replaced | None = None,
    arrays: Arrays | None = None,
) -> State:
    """Take containers apart without changing them.

    An object with a ``state_dict`` is replaced by its state dict. A list without tensors is one
    value, as in a checkpoint that is opened.

    Args:
        saved: the state.
        plain: whether values that are not tensors are saved. They must be plain data, and arrays
            of numpy become lists.
        replaced: returns the tensor to save for a key and its entry in a file; None: the entry.
        arrays: returns the containers to save for an array of numpy. Default: a list.

    Raises:
        PlacementError: If a key cannot be stored, two values have one key, or containers contain
            themselves.
    """
    return _Walk(plain, replaced, arrays).run(saved)


class _Walk:
    """The walk through containers.

    It goes over them twice. Whether a list contains a tensor is only known when the objects inside
    have returned their states.
    """

    def __init__(self, plain: bool, replaced: Replaced | None, arrays: Arrays | None) -> None:
        self.state = State()
        self._plain, self._replaced, self._arrays = plain, replaced, arrays
        self._rule = Containers((torch.Tensor, TensorEntry))
        # Object -> what is saved of it. By identity, with the object: while it lives, no other one
        # has its identity.
        self._states: dict[int, tuple[object, Any]] = {}

    def run(self, saved: object) -> State:
        self.state.template = self._flatten(self._resolve(saved, "", 0), "", ())
        return self.state

    def _flatten(self, value: Any, key: str, path: tuple[str | int, ...]) -> Any:
        state = self.state
        _check_depth(len(path), key)
        if self._replaced is not None and isinstance(value, TensorEntry):
            tensor = self._replaced(key if path else ROOT_TENSOR, value)
            value = value if tensor is None else tensor
        if path and _is_bare(value):  # most are
            return self._record(value, key, path, state.tensors)
        notes = getattr(value, "_metadata", None)
        items = self._rule.items(value)
        if isinstance(value, dict) and (items is not None or not path):
            if any(type(name) is not str for name in value):
                state.containers[key] = TEXT_KEYS
            made: Any = type(value)()
            for name, item in items or ():
                text = _text(name)
                made[name] = self._flatten(item, _join(key, text, path), (*path, text))
            if notes is not None:
                require_plain(_join(key, "_metadata", path), notes)
                made._metadata = notes
                for name, own in items_of(notes):
                    if isinstance(own, Mapping) and (version := own.get("version")):
                        state.versions[f"{key}.{name}".strip(".")] = version
            return made
        if items is not None and type(value) in (list, tuple):
            state.containers[key] = TUPLE if type(value) is tuple else LIST
            return type(value)(
                self._flatten(item, _join(key, str(at), path), (*path, at)) for at, item in items
            )
        is_tensor = isinstance(value, (torch.Tensor, TensorEntry))
        if isinstance(value, torch.Tensor) and (attributes := _attributes_of(value)):
            state.lost[key or "(all)"] = attributes
        call = call_of(value) if self._plain and is_tensor else None
        if call is not None and isinstance(value, torch.Tensor) and value.is_meta:
            raise kind_error(key, _kind_of(value))
        if call is not None:
            return self._rebuild(value, call, key if path else ROOT_TENSOR, path or (ROOT_TENSOR,))
        if not path:
            key = ROOT_TENSOR if is_tensor else ROOT_OBJECT
        if self._plain and not is_tensor:
            require_plain(key, value)
        return self._record(
            value, key, path or (key,), state.tensors if is_tensor else state.objects
        )

    def _record(
        self, value: object, key: str, path: tuple[str | int, ...], to: dict[str, Any]
    ) -> Leaf:
        """Record a value under its key.

        Raises:
            PlacementError: If another value has this key.
        """
        if key in self.state.paths:
            raise PlacementError(
                "two tensors or objects have this key once containers are joined by dots",
                entry=key,
                hint="Rename one of them.",
            )
        self.state.paths[key] = path
        to[key] = value
        return Leaf(key)

    def _rebuild(
        self,
        value: torch.Tensor | TensorEntry,
        call: TensorCall,
        key: str,
        path: tuple[str | int, ...],
    ) -> Rebuilt:
        """Return the call that makes a tensor of other tensors, with a `Leaf` for each of them."""
        state, arguments, numbers = self.state, call.arguments, None
        state.made_of_others[key] = _kind_of(value)
        if call.dtype is not None:
            state.parts[key] = Part(key)
            numbers = self._record(arguments[0], key, path, state.tensors)
            arguments = arguments[1:]
        made = tuple(self._inside(each, key, path, key) for each in arguments)
        if call.function is REBUILD_SPARSE:  # the values are its last tensor
            state.parts[next(reversed(state.tensors))] = Part(key, has_values=True)
        return Rebuilt(call.function, made, numbers, call.dtype)

    def _inside(self, value: Any, key: str, path: tuple[str | int, ...], of: str) -> Any:
        """Return an argument of such a call, with a `Leaf` for each tensor."""
        if isinstance(value, (torch.Tensor, TensorEntry)):
            self.state.parts[key] = Part(of)
            return self._flatten(value, key, path)
        if type(value) in (dict, list, tuple):
            made = {
                name: self._inside(item, f"{key}[{name}]", (*path, str(name)), of)
                for name, item in items_of(value)
            }
            return made if type(value) is dict else type(value)(made.values())
        return value

    def _resolve(self, value: Any, key: str, depth: int) -> Any:
        """Return containers in which every object is replaced by its state.

        The ``state_dict`` of an object is called once, wherever the object occurs.
        """
        _check_depth(depth, key)
        if isinstance(value, (torch.Tensor, TensorEntry, str, bool, int, float, type(None))):
            return value
        if id(value) in self._states:
            return self._states[id(value)][1]
        given, value = value, _state_of(value, key)
        found, lost, is_kind = value, "", _is_kind(value)
        if self._arrays is not None and is_array(value):
            found = self._arrays(key, value)
        elif is_array(value) and self._plain:  # `weights_only=True` refuses the class of arrays
            found, lost = value.tolist(), f"a numpy array of {value.dtype} {list(value.shape)}"
        elif is_kind or (type(value) in (*_PAIR, list, tuple) and not holds_numbers(value)):
            is_dict = isinstance(value, Mapping)
            for name in value if is_dict and self._plain else ():
                if type(name) is not str:
                    _require_readable_key(name, key)
            items = {
                name: self._resolve(item, _join(key, name_text(name), depth), depth + 1)
                for name, item in items_of(value)
            }
            kind: Any = type(value) if not is_kind else dict if is_dict else tuple
            found = kind(items if is_dict else items.values())
            if is_kind:
                lost = f"a {type(value).__name__}"
            elif hasattr(value, "_metadata"):
                found._metadata = value._metadata
        if lost:
            self.state.lost[key or "(all)"] = f"{lost}, which becomes a {type(found).__name__}"
        self._states[id(given)] = given, found
        return found


def _check_depth(depth: int, key: str) -> None:
    if depth > MAX_DEPTH:
        raise PlacementError(
            "containers nest too deep, or contain themselves",
            entry=key,
            expected=f"at most {MAX_DEPTH} levels",
        )


def _state_of(value: Any, key: str) -> Any:
    """Return the state of a module, an optimizer or another object that has one.

    Raises:
        PlacementError: If ``state_dict`` never returns a value without a ``state_dict``.
    """
    if isinstance(value, nn.Module):
        tree = ModuleTree(value)
        reshard(tree.modules)
        return read_model(value, Names(tree))
    is_state = isinstance(value, (torch.Tensor, TensorEntry, type))
    for _ in range(MAX_DEPTH):
        if is_state or not callable(getattr(value, "state_dict", None)):
            return value
        given, value = value, value.state_dict()
        if value is given and isinstance(value, Mapping):
            return value
    raise PlacementError(
        "the state of an object is an object with a state of its own, without end",
        entry=key or None,
        expected="a state_dict() that returns a dict",
        found=f"a {type(value).__name__}",
        hint="Leave the object out, or pass the values to save as a dict.",
    )


def _is_bare(value: Any) -> bool:
    """Return whether it is a tensor of strided numbers without attributes."""
    if type(value) is TensorEntry:
        return value.kind is None
    is_tensor = type(value) in (torch.Tensor, nn.Parameter) and not value.__dict__
    return is_tensor and value.layout is torch.strided and not value.is_quantized


def _attributes_of(value: Any) -> str:
    """Return what is lost of a tensor besides its values. Marks that torch sets do not count."""
    if is_dtensor(value) or isinstance(value, nn.Parameter) or hasattr(value, "_is_buffer"):
        return ""
    kind = type(value)
    if kind is not torch.Tensor and not hasattr(kind, "__tensor_flatten__"):
        return f"a {kind.__name__}, which becomes a Tensor"
    names = sorted(vars(value).keys() - vars(value.detach()).keys())
    return f"attributes, which are left out: {clipped_list(names)}" if names else ""


def _is_kind(value: object) -> bool:
    """Return whether it is a mapping or a named tuple whose class no file keeps."""
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    return isinstance(value, Mapping) and type(value) not in _PAIR


def _join(key: str, name: str, above: object) -> str:
    """Return the key of an item. `above` is empty only for items of the outermost container."""
    return f"{key}.{name}" if above else name


def _require_readable_key(name: object, key: str) -> None:
    """Refuse a dictionary key that the reader refuses, because it is costly to hash or to print.

    Raises:
        PlacementError: If it is such a key. Its container has the key `key`.
    """
    try:
        check_key(name)
    except FormatError as error:
        raise PlacementError(
            f"{error.reason}, which would not be read back",
            entry=key or None,
            found=name_text(name),
            hint="Rename it in the state.",
        ) from error


def _text(name: object) -> str:
    if type(name) in (int, float, bool, type(None)):
        return key_text(name, "")
    require_name(name)
    return str(name)


def ties_of(values: Iterable[Value]) -> dict[str, str]:
    """Return key -> the first key of the same tensor."""
    first: dict[Hashable, str] = {}
    found = {value.key: first.setdefault(value.place, value.key) for value in values}
    return {key: kept for key, kept in found.items() if key != kept}


def storages_of(values: Iterable[Value]) -> tuple[list[Value], dict[str, Shared]]:
    """Return the storages of a torch file, and the place of each key in them.

    Tensors that overlap in memory share a storage, unless separate storages take fewer bytes. A
    small view of a large memory gets its own storage. A transposed matrix stays a view.
    """
    storages: list[Value] = []
    found: dict[str, Shared] = {}
    for overlapping in _group_overlapping(values):
        value = overlapping[0]
        # As nearly all. 20,000 tensors take 0.8 s so, and 1.0 s below.
        if len(overlapping) == 1 and value.numel and value.is_dense and value.plain:
            found[value.key] = Shared(len(storages), 0, value.shape, value.stride)
            storages.append(value)
            continue
        start = overlapping[0].first
        stop = max(value.first + value.span for value in overlapping)
        places = {value.place: value for value in overlapping}
        alone = sum(value.numel for value in places.values())
        if overlapping[0].plain and 0 < stop - start <= alone:
            for value in overlapping:
                require_stored(value, stop - start)
                first = value.first - start
                found[value.key] = Shared(len(storages), first, value.shape, value.stride)
            storages.append(overlapping[0].flat(start, stop))
            continue
        numbers = {}
        for place, value in places.items():
            numbers[place] = len(storages)
            storages.append(value)
        for value in overlapping:
            found[value.key] = Shared(numbers[value.place])
    return storages, found


def require_stored(value: Value, numel: int) -> None:
    """Refuse what the reader refuses: a view that repeats few numbers very often."""
    nbytes = value.stored.nbytes
    if repeats_too_often(nbytes, numel * value.dtype.itemsize):
        raise PlacementError(
            "a broadcast view is absurdly larger than its storage, and would not be read back",
            entry=value.key,
            found=f"shape {value.shape}, {nbytes} bytes over {numel * value.dtype.itemsize}",
            hint="Save the tensor before it is expanded, and expand it after the load.",
        )


def _group_overlapping(values: Iterable[Value], *, alike: bool = True) -> list[list[Value]]:
    """Return groups of values that share bytes, each by the first element, in the order of keys.

    Args:
        values: all.
        alike: whether a group has values of one dtype only.
    """

    def unit(value: Value) -> int:
        return 1 if alike else value.source.itemsize

    values = list(values)
    groups: dict[Hashable, list[Value]] = {}
    for value in values:
        place = (value.memory, value.dtype) if alike else value.storage
        groups.setdefault(place, []).append(value)
    if all(len(group) == 1 for group in groups.values()):
        return [*groups.values()]
    order = {value.key: number for number, value in enumerate(values)}
    found: list[list[Value]] = []
    for group in groups.values():
        stop = -1
        ranges = [(v.first * unit(v), (v.first + v.span) * unit(v), v) for v in group]
        for start, end, value in sorted(ranges, key=lambda item: item[0]):
            if start < stop:
                found[-1].append(value)
            else:
                found.append([value])
            stop = max(stop, end)
    return sorted(found, key=lambda group: min(order[value.key] for value in group))


def find_untied_keys(
    values: Iterable[Value], shared: Mapping[str, Shared] | None
) -> dict[str, str]:
    """Return key -> the first key that it shares memory with now, but not in the file.

    Args:
        values: all.
        shared: the storages of a torch file, or None for a format in which each key has its own.
    """

    def place(value: Value) -> Hashable:
        return value.place if shared is None else shared[value.key].number

    return {
        value.key: overlapping[0].key
        for overlapping in _group_overlapping(values, alike=False)
        for value in overlapping
        if place(value) != place(overlapping[0])
    }


def explain_untied(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return key -> the reason, for keys that do not share memory with another key any more."""
    return {
        key: f"shares no memory with {printable(other, 80)} any more"
        for key, other in pairs.items()
    }


def require_name(key: object) -> None:
    """Refuse a key that readers cannot read, such as a member of an Enum."""
    if type(key) is str and is_unicode(key):
        return
    raise PlacementError(
        "cannot be the name of a tensor in a file",
        entry=str(key),
        expected="a str that UTF-8 can write",
        found="a lone surrogate in it" if type(key) is str else f"a {type(key).__name__}",
        hint="Rename it in the state.",
    )


class TensorKind(NamedTuple):
    """The kind of a value that is not stored as strided numbers.

    Attributes:
        name: for messages.
        dense: the call that makes dense tensors of it, or an empty text.
        is_kept: whether a torch file keeps it.
        fix: How to give values to a tensor without any.
    """

    name: str
    dense: str = ""
    is_kept: bool = False
    fix: str = ""


def _kind_of(value: object) -> TensorKind:
    """Return what a value is."""
    name = type(value).__name__
    if isinstance(value, TensorEntry):
        kind, dtype = str(value.kind), value.dtype
        is_quantised, is_sparse = kind.startswith("per "), "sparse" in kind
        name = f"a {kind} tensor of {dtype}"
    elif not isinstance(value, torch.Tensor):
        return TensorKind(name)
    elif is_lazy(value):
        name = f"a {name}, which gets its shape when the module is first called"
        return TensorKind(name, fix="Call the module once.")
    elif value.is_meta:
        return TensorKind(
            f"a {_name(value.layout)} tensor on meta, without values",
            fix="Load its values with torchlift.load, or make them with torchlift.materialize.",
        )
    else:
        kind, dtype = _name(value.layout).replace("_", " "), _name(value.dtype)
        is_quantised, is_sparse = value.is_quantized, value.layout is not torch.strided
        if value.is_nested:
            rows = "its rows, [*tensor.unbind()], which torch.nested.as_nested_tensor joins"
            return TensorKind(f"a nested tensor of {dtype}", rows)
        name += f", {dtype}, {value.layout}, on {value.device}"
    is_kept = call_of(value) is not None
    if is_quantised:
        return TensorKind(f"a quantised tensor of {dtype}", "tensor.dequantize()", is_kept)
    if is_sparse:
        return TensorKind(f"a {kind} tensor of {dtype}", "tensor.to_dense()", is_kept)
    return TensorKind(name, is_kept=is_kept)


def kind_error(key: str, kind: TensorKind, path: str | None = None) -> PlacementError:
    """Return the error for a tensor that the new file does not store.

    Args:
        key: of the tensor.
        kind: of the tensor.
        path: of the file that it is in; None: it is in memory.
    """
    ways = ["save as a torch file, which keeps it"] if kind.is_kept else []
    ways += [f"save {kind.dense}"] if kind.dense else []
    hint = Hint(", or ".join(ways).capitalize(), ".") if ways else Hint(kind.fix or "") or None
    if path is not None:
        leave = Argument("exclude", f"[{key!r}]", (key,))
        before = (hint, " ") if hint else ()
        made = (f", or return {kind.dense} from ", Argument("transform")) if kind.dense else ()
        hint = Hint(*before, "Leave it out with ", leave, *made, ".")
    return PlacementError(
        "cannot be stored in a file of this format",
        file=path,
        entry=key,
        expected="a dense tensor with values",
        found=kind.name,
        hint=hint,
    )


def stored_as(key: str, value: object) -> Stored:
    """Describe a dense tensor as a file stores it. Refuse a tensor without values.

    Raises:
        PlacementError: If it is not a dense tensor with values.
    """
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        if value.is_meta:
            raise meta_error(key)
        name = _name(value.dtype)
        # A wrapper has no memory of its own: its bytes would be read from nowhere.
        if has_memory(local_tensor(value)) and name in ITEMSIZE:
            return Stored(key, name, tuple(value.shape))
    raise kind_error(key, _kind_of(value))

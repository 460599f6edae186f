"""`diff`: compare two checkpoints of any formats, key by key."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch

from torchlift._checkpoint.checkpoint import Checkpoint, TensorEntry, blocks_of, open
from torchlift._checkpoint.kinds import dense_of, meta_error, readable_parts
from torchlift._model.dtensor import is_dtensor
from torchlift._model.handlers import has_memory, shape_of
from torchlift._system.memory import collection_paused
from torchlift._system.text import Facts, Summary, count_of, human, printable
from torchlift._transfer.reading import BUDGET
from torchlift.errors import PlacementError, explain_calls
from torchlift.formats.boxes import row_major
from torchlift.formats.flattening import Containers, flatten_state, items_of, name_text
from torchlift.formats.index import ITEMSIZE
from torchlift.formats.source import errors_name

#: What errors call a state dict.
_IN_MEMORY = "the state dict"

Comparable = Checkpoint | Mapping[str, Any] | str | os.PathLike[str] | BinaryIO


@dataclass(frozen=True, slots=True)
class ValueChange:
    """How far two tensors of one shape are from each other.

    Attributes:
        differing: Number of elements that differ by more than the tolerances.
        numel: Number of elements of the tensor.
        largest: The largest absolute difference. NaN if only one of two elements is NaN.
    """

    differing: int
    numel: int
    largest: float

    def __str__(self) -> str:
        far = "some are NaN" if math.isnan(self.largest) else f"by at most {self.largest:.3g}"
        return f"{self.differing:,} of {self.numel:,} values, {far}"


@dataclass(frozen=True, slots=True)
class Change:
    """The differences of a key that both checkpoints have. A field is None if it is equal.

    Attributes:
        kind: ``("tensor", "object")`` or the reverse, if only one value is a tensor.
        shape: Both shapes.
        dtype: Both dtypes, such as ``("float32", "bfloat16")``.
        value: The difference of the values, if the shapes are equal.
        object: Both values, if neither is a tensor.
    """

    kind: tuple[str, str] | None = None
    shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtype: tuple[str, str] | None = None
    value: ValueChange | None = None
    object: tuple[Any, Any] | None = None

    def __str__(self) -> str:
        facts = [("", self.kind), ("shape ", self.shape), ("", self.dtype), ("", self.object)]
        texts = [
            f"{name}{_short(str(pair[0]))} -> {_short(str(pair[1]))}"
            for name, pair in facts
            if pair is not None
        ]
        return "; ".join([*texts, *([] if self.value is None else [str(self.value)])])


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointDiff(Summary):
    """The result of `diff`, from the first checkpoint to the second.

    Attributes:
        added: Keys that only the second checkpoint has.
        removed: Keys that only the first checkpoint has.
        changed: Key -> `Change`.
        renamed: Key of `removed` -> key of `added` that has the same tensor.
        relocated: Key -> both location tags, if they differ. Locations are not content.
        blocked: Keys in both that were not compared, because a value cannot be rebuilt.
        compared: Number of tensors that both have.
        nbytes: Size of these tensors in the first checkpoint, in bytes. A tie counts once.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: Mapping[str, Change] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    relocated: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    compared: int = 0
    nbytes: int = 0

    @property
    def equal(self) -> bool:
        """Return whether keys, shapes, dtypes and values are equal. `blocked` does not count."""
        return not (self.added or self.removed or self.changed)

    def __str__(self) -> str:
        return "\n".join(self._lines(20))

    def _summary(self) -> tuple[str, Facts]:
        headline, *lines = self._lines(20)
        return headline, [("", line) for line in lines]

    def _lines(self, rows: int) -> Iterator[str]:
        alike = self.compared - sum(
            change.object is None and change.kind is None for change in self.changed.values()
        )
        verdict = "different"
        if self.equal:
            verdict = "equal as far as compared" if self.blocked else "equal"
        total = count_of(self.compared, "tensor")
        yield f"{verdict}: {alike:,} of {total} alike, {human(self.nbytes)}"
        new = set(self.renamed.values())
        pairs = [(key, f": {change}") for key, change in self.changed.items()]
        groups: dict[str, list[tuple[str, str]]] = {
            "changed": pairs,
            "renamed": [(a, f" -> {_short(b)}") for a, b in self.renamed.items()],
            "removed": [(key, "") for key in self.removed if key not in self.renamed],
            "added": [(key, "") for key in self.added if key not in new],
            "on another device": [
                (key, f": {_short(a)} -> {_short(b)}") for key, (a, b) in self.relocated.items()
            ],
            "not compared, since it cannot be rebuilt": [(key, "") for key in self.blocked],
        }
        for title, lines in groups.items():
            if lines:
                yield f"{title} ({len(lines):,})"
                yield from (f"  {_short(key)}{rest}" for key, rest in lines[:rows])
                if len(lines) > rows:
                    yield f"  and {len(lines) - rows:,} more"
        if self.compared:
            return
        for which, option, longer, shorter in (
            ("first", "--root-a", self.removed, self.added),
            ("second", "--root-b", self.added, self.removed),
        ):
            if root := _container_of(longer, shorter):
                yield f"In the {which} one, the other names are below {root!r}."
                yield f"To compare only these, open it with root={root!r}, or pass {option} {root}."


def _container_of(longer: Sequence[str], shorter: Sequence[str]) -> str:
    """Return the only container of some names in which all of the others are, or an empty text."""
    if not shorter:
        return ""
    end, known = f".{shorter[0]}", {*longer}
    roots = [name.removesuffix(end) for name in longer if name.endswith(end)]
    found = [root for root in roots if all(f"{root}.{name}" in known for name in shorter)]
    return found[0] if len(found) == 1 else ""


_short = partial(printable, limit=80)


@explain_calls
def diff(
    a: Comparable,
    b: Comparable,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints of any formats, key by key.

    Only one pair of tensors is in memory at a time. NaN equals NaN, and 0.0 equals -0.0. Tensors
    of different dtypes are compared as float64, so a cast differs from other weights. Plain data
    and NumPy arrays are compared by value, and 1 differs from 1.0. Tensors behind a URL are
    fetched one after the other: download large files first.

    Args:
        a: A path or file that `torchlift.open` reads, a `Checkpoint`, or a state dict in memory.
            To compare one container of a file, pass ``torchlift.open(path, root=...)``.
        b: The checkpoint to compare with, as for `a`.
        rtol: Relative tolerance, as a fraction of the values of `b`.
        atol: Absolute tolerance.
        storage_options: Options for URLs. See :ref:`arg-storage-options`.

    Returns:
        The differences. Print it for a summary.

    Raises:
        FormatError, UnsafeError: If one of the files is not a checkpoint.
        PlacementError: If a state dict in memory has DTensors, or a tensor is on meta.
        IntegrityError: If a file cannot be read, or changes during the comparison.
        ValueError: If a tolerance is negative or not finite.

    Example:
        >>> import torch, torchlift
        >>> one = {"weight": torch.zeros(2), "bias": torch.zeros(3)}
        >>> print(torchlift.diff(one, {"weight": torch.tensor([0.0, 0.5]), "b": torch.ones(3)}))
        different: 0 of 1 tensor alike, 8 B
        changed (1)
          weight: 1 of 2 values, by at most 0.5
        removed (1)
          bias
        added (1)
          b
    """
    for name, given in (("rtol", rtol), ("atol", atol)):
        if not 0 <= given < math.inf:
            raise ValueError(f"{name}={given!r}: expected a number that is finite, and 0 or more")
    with ExitStack() as stack:
        with collection_paused():
            one, two = (_Side.of(side, stack, storage_options) for side in (a, b))
            one, two = one.unfolded(two), two.unfolded(one)
            keys, others = one.keys(), two.keys()
        unknown = {*one.blocked, *two.blocked}
        blocked = tuple(key for key in keys if key in others and key in unknown)
        changed: dict[str, Change] = {}
        relocated, sizes, compared = {}, dict[object, int](), 0
        both = [key for key in keys if key in others and key not in unknown]
        opened = [each.tensors for each in (one, two) if isinstance(each.tensors, Checkpoint)]

        def is_needed(key: str) -> bool:
            first, second = one.specs.get(key), two.specs.get(key)
            return first is not None and second is not None and first.shape == second.shape

        for key in in_transfers(both, opened, is_needed):
            if key in one.specs and key in two.specs:
                compared += 1
                sizes[one.specs[key].place or key] = one.specs[key].nbytes
                tags = one.specs[key].location, two.specs[key].location
                if tags[0] != tags[1]:
                    relocated[key] = tags
            change = _change(key, one, two, rtol, atol)
            if change is not None:
                changed[key] = change
        for ckpt in opened:
            ckpt._mapped().files.check()
        removed = tuple(key for key in keys if key not in others)
        added = tuple(key for key in others if key not in keys)
        return CheckpointDiff(
            added=added,
            removed=removed,
            changed=changed,
            renamed=_renamed(removed, one, added, two),
            relocated=relocated,
            blocked=blocked,
            compared=compared,
            nbytes=sum(sizes.values()),
        )


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    location: str
    nbytes: int
    place: object  # equal for the tensors of a tie; None if no other tensor can have it

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Spec:
        """Return the spec of a tensor in memory."""
        shape = shape_of(tensor)
        nbytes = math.prod(shape) * tensor.itemsize
        place = (tensor.data_ptr(), nbytes) if has_memory(tensor) else None
        return cls(shape, _name(tensor.dtype), str(tensor.device), nbytes, place)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints.

    Attributes:
        tensors: Key -> tensor.
        specs: Key -> shape, dtype, location, size and place of that tensor.
        objects: Key -> value that is not a tensor.
        blocked: Keys whose values cannot be rebuilt.
    """

    tensors: Mapping[str, torch.Tensor]
    specs: Mapping[str, _Spec]
    objects: Mapping[str, object]
    blocked: Collection[str]

    @classmethod
    def of(
        cls, side: Comparable, stack: ExitStack, storage_options: Mapping[str, Any] | None = None
    ) -> _Side:
        """Return the side for a caller's argument. The stack closes a file that is opened."""
        if not isinstance(side, Mapping):
            side = stack.enter_context(open(side, storage_options=storage_options))
        if isinstance(side, Checkpoint):
            side = stack.enter_context(side._anew())
            specs = {
                key: _Spec(entry.shape, entry.dtype, entry.location, entry.nbytes, entry.chunks)
                for key, entry in side.entries.items()
            }
            for key, entry in side.entries.items():
                if _is_on_meta(entry):
                    raise meta_error(key, side.path)
            return cls(side, specs, side.objects, side.blocked_keys)
        with errors_name(_IN_MEMORY):
            flat = flatten_state(side, Containers((torch.Tensor,), Mapping))
        tensors = flat.tensors
        for key, value in tensors.items():
            if is_dtensor(value):
                raise PlacementError(
                    "this rank holds only its own slice of a DTensor",
                    file=_IN_MEMORY,
                    entry=key,
                    hint="Save the state with torchlift.save, and compare the file.",
                )
            readable_parts(value, _IN_MEMORY, key)
        specs = {key: _Spec.of(value) for key, value in tensors.items()}
        return cls(tensors, specs, flat.objects, flat.blocked)

    def unfolded(self, other: _Side) -> _Side:
        """Return the side with its plain containers split into the keys of the other side.

        DCP gives each leaf of an optimizer's groups a key, but a torch file has one list of them.
        """
        theirs = other.keys()
        todo = [(key, value) for key, value in self.objects.items() if items_of(value)]
        if all(key in theirs for key, _ in todo):
            return self
        parents = {key[:at] for key in theirs for at, sign in enumerate(key) if sign == "."}
        objects: dict[str, object] = {}
        todo = list(self.objects.items())[::-1]
        while todo:
            key, value = todo.pop()
            items = items_of(value) if key in parents and key not in theirs else []
            if not items:
                objects[key] = value
            todo += [(f"{key}.{name_text(name)}", item) for name, item in reversed(items)]
        return replace(self, objects=objects)

    def keys(self) -> dict[str, None]:
        """Return all keys, in order."""
        return dict.fromkeys((*self.specs, *self.objects, *self.blocked))


def _is_on_meta(entry: TensorEntry) -> bool:
    """Return whether a tensor was saved from meta, or is made of one that was."""
    kind = entry.kind
    return kind is not None and (kind.name == "meta" or any(map(_is_on_meta, kind.tensors)))


def in_transfers(
    keys: Iterable[str],
    checkpoints: Iterable[Checkpoint],
    is_needed: Callable[[str], bool] = lambda key: True,
) -> Iterator[str]:
    """Yield keys. Behind URLs, the values of several keys are read first, in one transfer."""
    away = [ckpt for ckpt in checkpoints if ckpt._mapped().is_away]
    if not away:
        yield from keys
        return
    some, needed, nbytes = list[str](), list[str](), 0

    def read() -> list[str]:
        for ckpt in away:
            ckpt._mapped().ahead(ckpt.entries[key] for key in needed)
        return some

    for key in keys:
        if is_needed(key):
            size = sum(ckpt.entries[key].nbytes for ckpt in away)
            if needed and nbytes + size > BUDGET:
                yield from read()
                some, needed, nbytes = [], [], 0
            needed.append(key)
            nbytes += size
        some.append(key)
    yield from read()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _change(key: str, one: _Side, two: _Side, rtol: float, atol: float) -> Change | None:
    first, second = one.specs.get(key), two.specs.get(key)
    if first is None and second is None:
        pair = one.objects[key], two.objects[key]
        return None if same_value(*pair, rtol, atol) else Change(object=pair)
    if first is None or second is None:
        return Change(kind=("object", "tensor") if first is None else ("tensor", "object"))
    dtypes = first.dtype, second.dtype
    dtype = dtypes if dtypes[0] != dtypes[1] else None
    if first.shape != second.shape:
        return Change(shape=(first.shape, second.shape), dtype=dtype)
    value = _values(one.tensors[key], two.tensors[key], rtol, atol)
    return None if dtype is None and value is None else Change(dtype=dtype, value=value)


def same_value(a: Any, b: Any, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Return whether two values that are not tensors are equal.

    Containers are compared by their items, in any order of names. Numbers and NumPy arrays are
    compared within the tolerances. NaN equals NaN, but 1 differs from 1.0 and from True.

    Example:
        >>> same_value({"a": [1, math.nan]}, {"a": [1, math.nan]}), same_value([0.1], [0.1 + 1e-12])
        (True, False)
    """
    a, b = _plain(a), _plain(b)
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        one, two = (
            {(type(plain := _plain(name)), plain): item for name, item in each.items()}
            for each in (a, b)
        )
        return one.keys() == two.keys() and all(
            same_value(item, two[name], rtol, atol) for name, item in one.items()
        )
    for kind in (list, tuple):
        if isinstance(a, kind) and isinstance(b, kind):
            pairs = zip(a, b, strict=False)
            return len(a) == len(b) and all(same_value(*pair, rtol, atol) for pair in pairs)
    if type(a) is not type(b):
        return False
    if type(a) in (int, float, complex):
        return _near(a, b, rtol, atol)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, numpy.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.dtype.kind in "biufc" and a.dtype.itemsize <= (16 if a.dtype.kind == "c" else 8):
            native = a.dtype.newbyteorder("=")
            x, y = (torch.from_numpy(each.astype(native, order="C")) for each in (a, b))
            return _values(x, y, rtol, atol) is None
        return same_value(a.tolist(), b.tolist(), rtol, atol)
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # of tensors or arrays in it
        return False


def _near(a: Any, b: Any, rtol: float, atol: float) -> bool:
    """Return whether two numbers of one class are equal within the tolerances."""
    if a == b or (a != a and b != b):
        return True
    if type(a) is int:  # of any length, where a float would overflow
        return bool(abs(a - b) <= Fraction(atol) + Fraction(rtol) * abs(b))
    return bool(abs(b) < math.inf and abs(a - b) <= atol + rtol * abs(b))


def _plain(value: Any) -> Any:
    """Return a value in memory as a file would show it."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.qscheme, slice)):
        return str(value)
    if numpy is not None and isinstance(value, (numpy.number, numpy.bool_)):
        return value.item()
    return value


def _values(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> ValueChange | None:
    """Return how far two tensors of one shape are from each other, or None if they are equal."""
    differing, largest, numel = 0, 0.0, math.prod(shape_of(a))
    if _is_sparse(a) or _is_sparse(b):
        a, b = _where_either_is(a, b)
    shapes = ([part.shape for part in dense_of(x)] for x in (a, b))
    if next(shapes) != next(shapes) or not same_value(_form(a), _form(b)):
        count = max(sum(part.numel() for part in dense_of(x)) for x in (a, b))
        return ValueChange(count, count, math.nan)
    for one, two in zip(_blocks(a), _blocks(b), strict=True):
        # Most blocks are equal, and `equal` takes a tenth of the time of the comparison below.
        # torch has no `equal` for float8 and complex32.
        quick = one.dtype == two.dtype and (one.itemsize > 1 or not one.is_floating_point())
        if quick and one.dtype != torch.complex32 and torch.equal(one, two):
            continue
        x, y = _numbers(one), _numbers(two)
        if x.is_floating_point() or x.is_complex() or y.is_floating_point() or y.is_complex():
            wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
            x, y = x.to(wide), y.to(wide)
            far, gap = ~torch.isclose(x, y, rtol, atol, equal_nan=True), (x - y).abs()
        else:
            gap, size = _integer_gap(x, y)
            far = gap > atol + rtol * size
        if far.any():
            differing += int(far.sum())
            furthest = gap[far].max().item()
            largest = furthest if math.isnan(furthest) or furthest > largest else largest
    return ValueChange(differing, numel, largest) if differing else None


def _form(tensor: Any) -> list[Any] | None:
    """Return the class and context of a tensor that is made of others, or None of a plain one."""
    if tensor.is_nested:
        return ["nested"]  # else a nested tensor of one part would equal that part
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    return [type(tensor), context, *((name, _form(getattr(tensor, name))) for name in names)]


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided and not tensor.is_nested


def _where_either_is(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of two sparse tensors at all places that at least one of them stores."""
    found = [_places(tensor.detach()) for tensor in (a, b)]
    either = torch.cat([places for places, _ in found]).unique()  # type: ignore[no-untyped-call]
    one, two = (
        values.new_zeros(len(either)).index_copy(0, torch.searchsorted(either, places), values)
        for places, values in found
    )
    return one, two


def _places(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat indices at which a sparse tensor stores values, and these values."""
    tensor = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    dims, inner = tensor.sparse_dim(), math.prod(tensor.shape[tensor.sparse_dim() :])
    # The device is named, because a caller may have set another default.
    steps = torch.tensor(row_major(tuple(tensor.shape[:dims])), device="cpu")
    first = (tensor.indices().cpu() * steps[:, None]).sum(0) * inner
    within = torch.arange(inner, device="cpu")
    return (first[:, None] + within).flatten(), tensor.values().cpu().flatten()


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order, in blocks on the CPU."""
    for part in dense_of(tensor):
        for block in blocks_of(_stored_numbers(part.detach())):
            yield block.resolve_conj().resolve_neg().cpu()


def _stored_numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values of a dtype that torch only stores, such as uint4, as whole numbers."""
    if _name(values.dtype) in ITEMSIZE and values.dtype != torch.float4_e2m1fn_x2:
        return values
    return values.view(torch.uint8 if values.itemsize == 1 else torch.uint16)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values in a dtype that holds them exactly and that torch can compare."""
    if values.is_complex():
        return values.to(torch.complex128)
    if values.dtype == torch.uint64:  # int64 does not hold all of them
        return values
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)


def _integer_gap(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far integers are from each other, and the size of the second ones, as float64.

    A difference of two 64-bit integers can overflow, and uint64 does not fit in int64. Halves of
    32 bits are exact in float64, and so is each difference below 2**53.
    """

    def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = values.view(torch.int64)
        high = bits >> 32
        if values.dtype == torch.uint64:
            high = high & 0xFFFFFFFF
        return high.double(), (bits & 0xFFFFFFFF).double()

    (high, low), (other_high, other_low) = halves(one), halves(two)
    gap = (high - other_high) * 2.0**32 + (low - other_low)
    return gap.abs(), (other_high * 2.0**32 + other_low).abs()


def _renamed(
    removed: Iterable[str], one: _Side, added: Iterable[str], two: _Side
) -> dict[str, str]:
    """Return removed key -> added key that has the same tensor."""
    found: dict[str, str] = {}
    gone, new = _by_spec(removed, one), _by_spec(added, two)
    for spec in gone.keys() & new.keys():
        digests: dict[bytes, list[str]] = {}
        for key in new[spec]:
            digests.setdefault(hash_content([two.tensors[key]]), []).append(key)
        for key in gone[spec]:
            if same := digests.get(hash_content([one.tensors[key]])):
                found[key] = same.pop(0)
    return {key: found[key] for key in removed if key in found}


def _by_spec(keys: Iterable[str], side: _Side) -> dict[object, list[str]]:
    groups: dict[object, list[str]] = {}
    for key in keys:
        spec = side.specs.get(key)
        if spec is not None and spec.nbytes:
            groups.setdefault((spec.shape, spec.dtype), []).append(key)
    return groups


def hash_content(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a hash of the bytes of tensors in row-major order. One block is copied at a time."""
    made = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        for block in _blocks(tensor):
            block = block.contiguous()
            made.update((ctypes.c_char * block.nbytes).from_address(block.data_ptr()))
    return made.digest()

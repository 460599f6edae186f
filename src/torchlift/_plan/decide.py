"""Decide how each tensor gets from its source to its slot. Three questions, each asked once.

1. Which device, which dtype and which slice does it get? The rules of the caller answer.
2. Which memory receives the values: that of the live tensor, or a new one?
3. Can the map of the file be that memory?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from torchlift._model.commit import check_mode, check_writable, repeats
from torchlift._model.devices import DISK
from torchlift._model.dtensor import (
    Spans,
    is_dtensor,
    layout_of,
    local_tensor,
    shard_of_entry,
    spans_of,
)
from torchlift._model.handlers import handles, is_handled, is_plain, oddity
from torchlift._model.holders import (
    Blocker,
    Hold,
    blocked_by,
    find_unswappable,
    has_holders,
    refusal,
)
from torchlift._model.slots import Group, ModuleTree, is_blank, is_lazy
from torchlift._model.torch_private import memory_of
from torchlift._plan import rules
from torchlift._plan.match import Match, Pair
from torchlift._plan.rules import Mode, Route, Source
from torchlift._skeleton.construction import (
    changed_on_meta,
    constructions_of,
    emptied,
    made_with,
)
from torchlift._sources.tensors import FileTensor, JoinedTensor, MemoryTensor, SourceTensor
from torchlift._store.url import Url
from torchlift._transfer.files import is_network
from torchlift.errors import PlacementError
from torchlift.formats.boxes import row_major
from torchlift.formats.index import ITEMSIZE, TensorEntry

_RELEASE = (
    'Release the holders, which swap.preflight lists. Or pass mode="auto", which copies in place '
    "where it must."
)
_SCALE = "the scale of a quantised tensor keeps its dtype"
_SHARES = "shares bytes with another key of the file, which the model does not tie"


# Not frozen: 90,000 frozen records take 0.3 s more. This file alone sets the fields.
@dataclass(slots=True, eq=False)
class Step:
    """One tensor of the model, and how it gets its values.

    Attributes:
        group: The tensor.
        key: The name in the model under which the source has the values, as it is reported.
        one: The values: of a sharded tensor, this rank's slice of an entry.
        others: Values under the other names of a tie. They must be equal.
        device, dtype: The device and the dtype of the tensor after the load.
        spans: The slice of `one` that this rank takes. None: all of it.
        stride: Strides of the tensor in elements, if they differ from those of the source.
        is_changed: Whether its values differ in memory from those in the file.
        is_fixed: Whether a transform cannot change the dtype: it was passed, or is that of a live
            tensor.
        is_handled: Whether the class of the model's tensor converts the values.
        is_raw: Whether the values are fetched without a cast, for a class or a transform.
        needs_scale: Whether its values are codes, which only a transform can make values of.
        asked: The allowed source of its bytes.
        kind: All that the decision depends on, or None. See `_kind_of`.
        mode: How the tensor is placed.
        note: Why the tensor is loaded in another way than the caller wants.
        source: The source of its bytes.
        route: How the values get into memory. See `Route`.
        plain: Whether a dense tensor of a file becomes, without a copy, a plain tensor on meta.
            Such a step needs no further check.
        last: See `_share_memory`.
    """

    group: Group
    key: str
    one: SourceTensor
    others: tuple[SourceTensor, ...]
    device: torch.device
    dtype: torch.dtype
    spans: Spans | None
    stride: tuple[int, ...] | None
    is_changed: bool
    is_fixed: bool
    is_handled: bool
    is_raw: bool
    needs_scale: bool
    asked: rules.AnySource
    kind: object | None
    mode: Mode
    note: str | None = None
    source: Source = "memory"
    route: Route = "view"
    plain: bool = False
    last: Step | Making | None = None

    @property
    def entry(self) -> TensorEntry | None:
        """The entry to read. None for a value in memory."""
        return self.one.entry if isinstance(self.one, FileTensor) else None

    @property
    def owned(self) -> bool:
        """Whether the step fills new memory."""
        return self.is_handled or self.route != "view"

    @property
    def in_place(self) -> bool:
        """Whether the step writes to the memory of a live tensor."""
        return self.mode == "copy"

    @property
    def span(self) -> int:
        """Bytes that are read from the file, with the gaps between its elements."""
        if self.entry is None:
            made_of = self.one.entry
            return made_of.nbytes if made_of is not None and made_of.kind is not None else 0
        if self.entry.needs_assembly:
            return self.entry.nbytes
        return sum(chunk.nbytes for chunk in self.entry.chunks)

    @property
    def memory(self) -> torch.device:
        """Where new memory is allocated. Values for a copy in place wait on the host."""
        return torch.device("cpu") if self.in_place else self.device

    @property
    def fetched_as(self) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype with which its values are fetched."""
        if self.is_raw:
            return torch.device("cpu"), self.one.dtype
        return self.memory, self.dtype


@dataclass(slots=True, eq=False)
class Making:
    """A tensor without values in the source: it is constructed, or moved if it is live.

    Attributes:
        group: The tensor.
        device, dtype: The device and the dtype of the tensor after the load.
        is_constructed: Whether it is constructed.
        mode: How the tensor is placed.
        last: See `_share_memory`.
    """

    group: Group
    device: torch.device
    dtype: torch.dtype
    is_constructed: bool
    mode: Mode
    last: Step | Making | None = None


class Decided(NamedTuple):
    """All decisions of a load.

    Attributes:
        matched: The names.
        steps: The tensors that the source has, but for those that are left for a later load.
        makings: The tensors that are made or moved without the source.
    """

    matched: Match
    steps: Sequence[Step]
    makings: Sequence[Making]

    @property
    def bytes_to_read(self) -> int:
        """Bytes that will be copied out of the files."""
        moved = (step for step in self.steps if not step.plain)
        return sum(step.span for step in moved if step.owned or step.in_place)


def decide(matched: Match, tree: ModuleTree, options: rules.Options) -> Decided:
    """Decide how each tensor is loaded.

    Raises:
        PlacementError: If a tensor cannot be placed as the options want, or cannot be made.
    """
    steps = decide_steps(matched, options)
    try:
        makings = decide_makings(matched.unmatched, tree, options, steps)
    except PlacementError as error:
        if matched.outcome is not None and error.entry not in matched.on_meta:
            error.hint = (
                "The model's own loading code made it from tensors on meta. Build the model with "
                "torchlift.skeleton, and call torchlift.materialize(model) before you load."
            )
        raise
    _share_memory([*makings, *steps])
    return Decided(matched, steps, makings)


def _share_memory(every: Iterable[Step | Making]) -> None:
    """Give tensors over one memory the memory of the last one, if they are to be swapped.

    ``one.data = other.data`` gives two parameters one memory. The values of the last one count, as
    in torch, which copies into both. torch's ``assign=True`` parts them.
    """
    swapped = [one for one in every if one.mode == "swap"]
    keys = [memory_of(one.group.tensor) for one in swapped]
    if len({*keys}) == len(keys):  # as in nearly all models
        return
    found: dict[object, Step | Making] = {}
    for one, key in zip(reversed(swapped), reversed(keys), strict=True):
        tensor = one.group.tensor
        if key is None or not is_plain(tensor) or not tensor.numel():
            continue
        view = key, tensor.storage_offset(), tensor.shape, tensor.stride(), one.device
        last = found.setdefault(view, one)
        if last is not one and isinstance(one, Making):
            one.last, one.dtype = last, last.dtype
            one.is_constructed = isinstance(last, Making) and last.is_constructed
        elif last is not one and one.dtype == last.dtype:
            one.last = last


def decide_steps(matched: Match, options: rules.Options) -> list[Step]:
    """Decide every pair of a match, except for pairs that are left for a later load.

    Args:
        matched: The pairs.
        options: The caller's options.

    Raises:
        PlacementError: If a tensor cannot go where the caller wants it, or not in the given mode.
    """
    steps = list[Step]()
    known: dict[object, Step] = {}
    for pair in matched.pairs:
        kind = None if _is_quantised(pair, matched) else _kind_of(pair, options)
        like = known.get(kind) if kind is not None else None
        if like is not None:
            step: Step | None = Step(
                pair.group, pair.key, pair.candidates[0], (), like.device, like.dtype, like.spans,
                like.stride, like.is_changed, like.is_fixed, like.is_handled, like.is_raw,
                like.needs_scale, like.asked, kind, like.mode,
            )  # fmt: skip
        else:
            step = _aim(pair, kind, matched, options)
        if step is not None:
            steps.append(step)
            if kind is not None and like is None:
                known[kind] = step
    _settle_modes(steps, options.mode)
    sharing, ways = _find_sharing(steps), dict[object, _Way]()
    for number, step in enumerate(steps):
        way = ways.get(step.kind) if number not in sharing else None
        if way is None:
            way = _route(step, matched.path, is_shared=number in sharing)
            if step.kind is not None and number not in sharing:
                ways[step.kind] = way
        step.source, step.route, step.plain = way.source, way.route, way.plain
        if way.note:
            step.note = f"{way.note}; {step.note}" if step.note else way.note
    return steps


# ---- 1. device, dtype and slice


def _kind_of(pair: Pair, options: rules.Options) -> object | None:
    """Return all that the decision on a pair depends on. None: it depends on the pair itself.

    With this, 100,000 plain tensors on meta, dense in one file, take 0.3 s. One by one they
    take 0.6 s.
    """
    tensor, one = pair.group.tensor, pair.candidates[0]
    if type(one) is not FileTensor or not is_plain(tensor) or not tensor.is_meta:
        return None
    if len(pair.candidates) > 1 or callable(options.device) or callable(options.dtype):
        return None
    entry = one.entry
    shape, chunks = entry.shape, entry.chunks
    if len(chunks) != 1 or entry.encoding or entry.kind is not None or shape != tensor.shape:
        return None
    if chunks[0].stride is not None or not entry.stride == row_major(shape) == tensor.stride():
        return None
    aligned = chunks[0].offset % ITEMSIZE.get(entry.dtype, 1) == 0
    kinds = type(tensor), tensor.dtype, entry.dtype
    return changed_on_meta(pair.group), *kinds, aligned, chunks[0].file


def _is_quantised(pair: Pair, matched: Match) -> bool:
    """Return whether a pair is a quantised tensor, or a scale."""
    found = matched.quantised
    return bool(found.scales) and any(
        key in found.scales or key in found.of_scales
        for one in pair.candidates
        for key in one.keys or (one.key,)
    )


def _aim(pair: Pair, kind: object | None, matched: Match, options: rules.Options) -> Step | None:
    """Return the step to device, dtype and slice of a tensor. None: it is left for a later load.

    Args:
        pair: The tensor, and what the source has for it.
        kind: All that the decision depends on, or None.
        matched: The match that the pair is of.
        options: The caller's options.

    Raises:
        PlacementError: If the caller's dtype would cast codes without their scales.
    """
    group, key, tensor = pair.group, pair.key, pair.group.tensor
    candidates = [_without_kind(one) for one in pair.candidates]
    one = candidates[0]
    seen, file_dtype = one.entry, one.dtype
    if seen is None:  # a lazy tensor gets the shape of its value
        like = one.value if is_lazy(tensor) and isinstance(one, MemoryTensor) else tensor
        seen = rules.entry_like(key, Group(like, group.slots))
    if seen.key != key:
        seen = seen._replace(key=key)
    where = rules.apply_device_rule(options.device, seen, group.names)
    if where is not None and rules.is_deferred(where):
        return None
    if isinstance(one, MemoryTensor) and options.transform is None:
        _require_values(group, one.value, matched.path)
    is_cast, changed = changed_on_meta(group)
    mode, asked = options.mode, options.source
    stride = None
    if changed is not None or (mode != "assign" and asked != "mmap"):
        stride = _own_stride(tensor, one)
    if changed is not None and one.shape != tensor.shape:  # before a transform
        stride = changed
    if where == DISK:
        rules.check_on_disk(options, group, seen, file_dtype, is_cast=is_cast)
        # Mapped as it is, on any file system.
        dtype, stride, asked = file_dtype, None, "mmap"
        mode = "swap" if mode == "auto" else mode
    else:
        dtype = rules.target_dtype(options.dtype, seen, tensor, file_dtype, is_cast=is_cast)
    needs_scale, note = matched.unscaled.needs_scale(one.key, file_dtype), None
    if where != DISK and matched.quantised.scales and options.dtype is not None:
        own = rules.target_dtype(None, seen, tensor, file_dtype, is_cast=is_cast)
        if dtype != own and one.key in matched.quantised.of_scales:
            dtype, note = own, _SCALE
        elif dtype != own and matched.quantised.needs_scale(one.key, file_dtype):
            needs_scale = True
            if options.transform is None:
                raise matched.quantised.cast_error(one.key, file_dtype, matched.path)
    device = rules.target_device(where, seen.key, tensor, present=options.present)
    spans: Spans | None = None
    if is_dtensor(tensor):
        # The rules above get the complete tensor. All below is about this rank's slice.
        candidates, spans = _shard(group, candidates)
        one, stride = candidates[0], None
    elif isinstance(one, MemoryTensor):
        _require_layout(group, one.value)
    entry = one.entry
    is_split = entry is not None and entry.needs_assembly and entry.kind is None
    is_moved = device.type != "cpu" or dtype != file_dtype
    mode = _mode(mode, tensor, device, dtype)
    by_class = mode != "copy" and is_handled(tensor)
    return Step(
        group=group,
        key=key,
        one=one,
        others=tuple(candidates[1:]),
        device=device,
        dtype=dtype,
        spans=spans,
        stride=stride,
        is_changed=is_moved or is_split or spans is not None or stride is not None,
        is_fixed=options.dtype is not None or is_cast or not tensor.is_meta,
        is_handled=by_class,
        is_raw=by_class or options.transform is not None,
        needs_scale=needs_scale,
        asked=asked,
        kind=kind,
        mode=mode,
        note=note,
    )


def _own_stride(tensor: torch.Tensor, one: SourceTensor) -> tuple[int, ...] | None:
    """Return the strides of a model's tensor, if those of the source differ, else None.

    As in torch, a load without ``assign`` keeps the strides of the model. With those of a
    transposed matrix in the file, each row would be read from many places.
    """
    if isinstance(one, JoinedTensor) or not (is_lazy(tensor) or one.shape == tensor.shape):
        return None
    values = [] if is_lazy(tensor) else [tensor]
    values += [one.value] if isinstance(one, MemoryTensor) else []
    # A tensor that is not strided has no strides.
    is_odd = any(not is_plain(v) or v.layout is not torch.strided or v.is_nested for v in values)
    if is_odd or math.prod(one.shape) < 2:
        return None
    own = row_major(one.shape) if is_lazy(tensor) else tensor.stride()
    found = one.entry.stride if isinstance(one, FileTensor) else one.value.stride()
    differ = (a != b for size, a, b in zip(one.shape, own, found, strict=True) if size > 1)
    return own if own != found and any(differ) and not repeats(one.shape, own) else None


def _without_kind(one: SourceTensor) -> SourceTensor:
    """Return a sparse or quantised tensor of a file as what it is, over the map of the file."""
    if not isinstance(one, FileTensor) or one.entry.kind is None:
        return one
    return MemoryTensor(one.key, one.tensor(), one.keys, one.entry)


def _shard(group: Group, candidates: list[SourceTensor]) -> tuple[list[SourceTensor], Spans | None]:
    """Restrict candidates to this rank's slice of a distributed tensor.

    Returns:
        The candidates, with entries of the bytes of the slice. And the slice, if the first
        candidate is a complete tensor in memory.

    Raises:
        PlacementError: If elements share their bytes in the file, or the tensor lacks shards.
    """
    tensor = group.tensor
    found: list[SourceTensor] = []
    spans: Spans | None = None
    for one in candidates:
        if not isinstance(one, FileTensor):
            value = one.value if isinstance(one, MemoryTensor) else None
            _require_layout(group, value)
            if not is_dtensor(value) and len(one.shape) == tensor.dim() and not found:
                spans = spans_of(tensor, group.fqn)
            found.append(
                one
                if not isinstance(one, MemoryTensor)
                else replace(one, value=local_tensor(one.value))
            )
            continue
        entry = one.entry
        if repeats(entry.shape, entry.stride):
            raise PlacementError(
                "several elements share one place in the file, so no rank can read its shard alone",
                entry=group.fqn,
                found=f"strides {list(entry.stride)}",
                hint="Save a contiguous() tensor.",
            )
        found.append(replace(one, entry=shard_of_entry(entry, tensor, group.fqn)))
    return found, spans


def _require_layout(group: Group, value: object) -> None:
    """Refuse a DTensor with another layout than the model's tensor."""
    if is_dtensor(value) and layout_of(value) != layout_of(group.tensor):
        raise PlacementError(
            "the state dict has another layout than the model",
            entry=group.fqn,
            expected=layout_of(group.tensor) or "a plain tensor",
            found=layout_of(value),
            hint="Pass whole tensors, such as those of get_state_dict with "
            "full_state_dict=True: each rank takes its own slice.",
        )


def _require_values(group: Group, value: torch.Tensor, path: str) -> None:
    """Refuse a tensor in memory that cannot be copied into the model's tensor."""
    tensor = group.tensor
    odd = oddity(local_tensor(value))
    if odd and (value.is_meta or (not tensor.is_meta and odd != oddity(local_tensor(tensor)))):
        raise PlacementError(
            "the value cannot be copied",
            file=path,
            entry=group.fqn,
            expected="a dense tensor with values",
            found=f"a tensor that is {odd}",
            hint="Make it dense, on a device that has its values: pass "
            "transform=lambda key, tensor: tensor.to_dense(), or tensor.dequantize().",
        )


# ---- 2. the memory that receives the values


def _mode(
    asked: rules.AnyMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Mode:
    """Return how a tensor is placed if nothing blocks it."""
    if is_blank(tensor):  # nothing can be copied into it
        return "assign" if asked == "assign" else "swap"
    if asked != "auto":
        return asked
    stays = (device, dtype) == (tensor.device, tensor.dtype)
    # A sparse tensor can be copied in place only if it keeps its number of values.
    stays = stays and tensor.layout is torch.strided
    return "copy" if stays and not handles(type(tensor), torch.Tensor) else "swap"


def _settle_modes(steps: Iterable[Step], asked: rules.AnyMode) -> None:
    """Give another mode to tensors that cannot be swapped.

    Raises:
        PlacementError: If there is one with ``mode="swap"``, or no mode keeps what holds a tensor.
    """
    # Nothing can block a plain tensor on meta that nobody else holds.
    others = [step for step in steps if step.kind is None or has_holders(step.group.tensor)]
    groups = [step.group for step in others if step.mode == "swap"]
    blockers = blocked_by(groups) if groups else []
    if blockers and asked == "swap":
        raise refusal(blockers, hint=_RELEASE)
    found = {blocker.key: blocker for blocker in blockers}
    for step in others:
        _settle_mode(step, found.get(step.group.fqn))
        tensor = step.group.tensor
        if step.mode == "copy":
            _check_in_place(step)
        elif step.mode == "swap" and is_plain(tensor) and not tensor.is_meta:
            check_mode(step.group)


def _settle_mode(step: Step, blocker: Blocker | None) -> None:
    """Give a tensor that cannot be swapped another mode, and note what is lost.

    Raises:
        PlacementError: If no mode keeps what holds the tensor.
    """
    tensor = step.group.tensor
    if step.mode != "swap" or is_lazy(tensor) or (tensor.is_meta and blocker is None):
        return
    stays, notes = (step.device, step.dtype) == (tensor.device, tensor.dtype), list[str]()
    if blocker is not None:
        if tensor.is_meta or (step.is_handled and not stays):
            step.mode, what = "assign", "assigned, not swapped"
        elif step.is_handled or stays:
            step.mode, what = "copy", "copied in place, not swapped"
        elif Hold.REDUCER in blocker.kinds:
            raise PlacementError(
                "cannot change its dtype or device inside DistributedDataParallel, whose hooks "
                "would no longer see its gradient",
                entry=step.group.fqn,
                expected=f"{tensor.dtype} on {tensor.device}",
                found=f"{step.dtype} on {step.device}",
                hint="Load before you wrap the module, or keep its dtype and device.",
            )
        else:
            what = "content set through .data, not exchanged"
        holders = f" (held by {'; '.join(blocker.holders)})" if blocker.holders else ""
        lost = step.mode == "swap" and blocker.kinds & {Hold.VIEW, Hold.MEMORY}
        tail = "; what shares its memory keeps the old values" if lost else ""
        notes.append(f"{what}: {blocker.reason}{holders}{tail}")
    if step.mode == "swap" and not step.is_handled and not stays and not tensor.is_meta:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and (grad.dtype, grad.device) != (step.dtype, step.device):
            name = str(grad.dtype).removeprefix("torch.")
            notes.append(f"its .grad is dropped: it is {name} on {grad.device}")
    step.note = "; ".join(filter(None, [*notes, step.note])) or None


def _check_in_place(step: Step) -> None:
    """Refuse a copy in place that would change the tensor, or that torch would refuse.

    Raises:
        PlacementError: If the dtype or the device would change, or the tensor is not writable.
    """
    tensor = step.group.tensor
    check_writable(step.group)
    if (step.device, step.dtype) != (tensor.device, tensor.dtype):
        raise PlacementError(
            "cannot be copied in place, because its dtype or device would change",
            entry=step.group.fqn,
            expected=f"{tensor.dtype} on {tensor.device}",
            found=f"{step.dtype} on {step.device}",
            hint='Load with mode="swap" or mode="auto".',
        )


# ---- 3. whether the map of the file can be that memory


class _Way(NamedTuple):
    """How the values of a tensor get into memory. See `Step`."""

    source: Source
    route: Route
    plain: bool
    note: str | None


def _find_sharing(steps: Iterable[Step]) -> set[int]:
    """Return the places of steps that need memory of their own, because their bytes overlap.

    The first of several tensors over the same bytes may stay mapped. A class or a transform may
    write to the tensor that it gets, so such a tensor shares memory with none before or after it.
    """
    runs: list[tuple[str, int, int, int, bool]] = []
    for number, step in enumerate(steps):
        entry = step.one.entry
        is_mapped = step.is_raw or not (step.is_changed or step.mode == "copy")
        if is_mapped and entry is not None and entry.chunks:
            chunk = entry.chunks[0]
            runs.append((chunk.file, chunk.offset, number, chunk.nbytes, step.is_raw))
    found: set[int] = set()
    file, end, last, is_last_raw = "", 0, 0, False
    for name, start, number, nbytes, is_raw in sorted(runs):
        if name == file and start < end:
            found |= {number, last} if is_last_raw else {number}
        if name != file or start + nbytes > end:
            file, end, last, is_last_raw = name, start + nbytes, number, is_raw
    return found


def _route(step: Step, path: str, *, is_shared: bool) -> _Way:
    """Return how the values of a tensor get into memory.

    Args:
        step: The tensor.
        path: The path of the source.
        is_shared: Whether a tensor that is mapped, too, has bytes of this one.
    """
    one, in_place = step.one, step.mode == "copy"
    entry, note = one.entry, None
    source: Source = "memory"
    is_filled = step.is_changed and not in_place
    if entry is None:
        # A tensor of the caller is never placed: training the model would write to it. A tensor
        # that the model's own code has seen may be placed if it is the file's map: it is private.
        is_placed = False
        if isinstance(one, MemoryTensor) and one.is_new and step.spans is None:
            is_placed = (one.value.device, one.dtype) == (step.device, step.dtype)
        is_view = not step.is_raw and (in_place or is_placed)
    else:
        is_live = not step.group.tensor.is_meta
        kept = not in_place and rules.owns_all(step.asked, live=is_live)
        anew = kept or (is_filled and not step.is_handled)
        copied = in_place or step.is_changed
        source, note = _source_of(entry, path, step.asked, anew=anew, copied=copied)
        if not isinstance(one, FileTensor):
            is_read = is_filled or (source == "read" and not in_place)
            is_view = step.spans is None if step.is_raw else not is_read
        else:
            # A raw value is converted, so nobody else sees it. It may be a view of the map. A view
            # has one chunk: several chunks are joined in new memory.
            is_apart = entry.needs_assembly and (
                step.is_raw or len(entry.chunks) > 1 or not _is_aligned(entry)
            )
            is_view = source == "mmap" and not is_apart and (step.is_raw or not is_filled)
    if is_shared and is_view and (step.is_raw or not in_place):
        # Over the same memory, two parameters would train each other.
        source, note, is_view = "read", _SHARES, False
    route: Route = "view"
    if not is_view:
        route = "read" if isinstance(one, FileTensor) else "compute"
    plain = is_view and step.kind is not None and not (step.stride or step.is_raw)
    return _Way(source, route, plain, note)


def _source_of(
    entry: TensorEntry, path: str, asked: rules.AnySource, *, anew: bool, copied: bool
) -> tuple[Source, str | None]:
    """Return whether a file is mapped or read, and a note if it cannot be mapped.

    Args:
        entry: The tensor in the file.
        path: The path of the file, for a tensor without bytes.
        asked: The caller's `source`.
        anew: Whether the values get new memory in any case.
        copied: Whether the values are copied out of the map.
    """
    if "deflated" in entry.encoding:
        return "read", "deflated in the file, so that it is inflated into memory"
    # The file counts, not its folder: it may be a link to another file system.
    file = entry.chunks[0].file if entry.chunks else path
    if asked == "mmap" and isinstance(file, Url):
        raise PlacementError(
            "a file behind a URL cannot be mapped",
            file=file,
            entry=entry.key,
            hint='Pass source="read", or download the file first.',
        )
    if asked == "read" or (asked == "auto" and (anew or isinstance(file, Url) or is_network(file))):
        return "read", None
    if entry.needs_assembly:
        return "mmap", None
    # The map of a misaligned storage is copied anyway. Reading saves that copy.
    if not _is_aligned(entry):
        return "read", "not aligned in the file, so it is read instead of mapped"
    if not copied and repeats(entry.shape, entry.stride):
        return "read", "its layout in the file cannot be mapped, so it is read"
    return "mmap", None


def _is_aligned(entry: TensorEntry) -> bool:
    return all(chunk.offset % entry.itemsize == 0 for chunk in entry.chunks)


# ---- tensors without values in the source


def decide_makings(
    groups: Iterable[Group], tree: ModuleTree, options: rules.Options, steps: Iterable[Step]
) -> list[Making]:
    """Decide how tensors without values in the source are made or moved.

    A new head gets the dtype of all other parameters of the load, as in transformers.

    Args:
        groups: The tensors.
        tree: The model.
        options: The caller's options.
        steps: The steps of the tensors with values.

    Raises:
        PlacementError: If a tensor is on meta and no skeleton made it.
    """
    blank = (group for group in groups if group.tensor.is_meta)
    remade = {id(group.tensor) for group in [*made_with(blank, tree), *emptied(tree)]}
    asked = [
        (group, seen, rules.apply_device_rule(options.device, seen, group.names))
        for group in groups
        if not is_lazy(group.tensor)  # they stay as they are
        for seen in [rules.entry_like(group.fqn, group)]
    ]
    asked = [one for one in asked if not rules.is_deferred(one[-1])]
    constructions_of(group for group, *_ in asked if group.tensor.is_meta)
    unswappable = find_unswappable([group for group, *_ in asked]) if asked else set[str]()
    around = {
        step.dtype
        for step in steps
        if step.group.tensor.is_meta and isinstance(step.group.tensor, nn.Parameter)
        if step.dtype.is_floating_point
    }
    found = list[Making]()
    for group, seen, where in asked:
        tensor = group.tensor
        device = rules.target_device(where, seen.key, tensor, present=options.present)
        dtype = tensor.dtype
        if tensor.is_meta and group.persistent:
            alike = (
                isinstance(tensor, nn.Parameter)
                and len(around) == 1
                and not changed_on_meta(group)[0]
            )
            like = next(iter(around)) if alike and dtype.is_floating_point else dtype
            dtype = rules.target_dtype(options.dtype, seen, tensor, like)
        is_constructed = tensor.is_meta or id(tensor) in remade
        if is_constructed or (device, dtype) != (tensor.device, tensor.dtype):
            mode: Mode = "assign" if group.fqn in unswappable else "swap"
            found.append(Making(group, device, dtype, is_constructed, mode))
    return found

"""How each tensor gets from its source to its slot: mode, route, device, dtype, decided once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from torchlift._model.commit import check_mode, check_writable, repeats
from torchlift._model.devices import DISK
from torchlift._model.dtensor import (
    Spans,
    everything,
    is_dtensor,
    layout_of,
    local_tensor,
    shard_of_entry,
    spans_of,
)
from torchlift._model.handlers import (
    apply,
    clone_of,
    handles,
    is_handled,
    is_plain,
    is_wrapper,
    oddity,
)
from torchlift._model.holders import Blocker, Hold, blocked_by, has_holders, refusal
from torchlift._model.slots import Group, is_blank, is_lazy
from torchlift._plan import rules
from torchlift._plan.report import Mode, Route, Source
from torchlift._plan.steps import Making, Match, Step
from torchlift._skeleton.construction import changed_on_meta, constructions_of
from torchlift._sources.tensors import (
    Copy,
    FileTensor,
    MemoryTensor,
    SourceTensor,
    Values,
    copy_values,
)
from torchlift._store.url import Url
from torchlift._transfer.files import is_network
from torchlift._transfer.reading import is_readable
from torchlift.errors import PlacementError
from torchlift.formats.boxes import row_major
from torchlift.formats.index import ITEMSIZE, TensorEntry

_RELEASE = (
    'Release what holds it (swap.preflight lists all of it), or load with mode="auto", which '
    "takes for each tensor a way that keeps the references."
)


def steps_for(matched: Match, path: str, options: rules.Options) -> list[Step]:
    """Decide every pair of a match, except for what is left for a later load.

    Args:
        matched: the pairs.
        path: of the source, for errors.
        options: what was asked for.

    Raises:
        PlacementError: a tensor cannot go where it was asked to go, or not in the mode asked for.
    """
    steps: list[Step] = []
    alike: dict[object, tuple[Any, ...]] = {}
    for group, key, candidates in matched.pairs:
        kind = _kind_of(group, candidates[0], options) if len(candidates) == 1 else None
        if kind is not None and kind in alike:
            steps.append(Step(group, key, candidates[0], None, (), *alike[kind]))
        elif (step := _decide(group, key, candidates, options, path)) is not None:
            steps.append(step)
            if kind is not None:
                step.plain = (step.route, step.stride, step.raw) == ("view", None, False)
                alike[kind] = _DECIDED(step)
    _unshare(steps)
    _choose_modes(steps, options.mode)
    return steps


def owns_all(source: rules.AnySource, *, live: bool) -> bool:
    """Return whether what a model keeps after the load is the process's own, and no file's map.

    A file that is overwritten in place ends the process that has mapped it. What is live had memory
    of its own, and has it afterwards unless the caller asks for the map.
    """
    return source == "read" or (source == "auto" and live)


def makings_for(
    groups: Iterable[Group], options: rules.Options, steps: Iterable[Step]
) -> Iterator[Making]:
    """Decide what happens to the tensors that no source has.

    A new head gets the dtype that everything around it has been given, as in transformers.

    Raises:
        PlacementError: a tensor is on meta and no skeleton recorded how it is made.
    """
    asked = [
        (group, rules.asked_device(options.device, rules.entry_like(group.fqn, group), group)[0])
        for group in groups
        if not is_lazy(group.tensor)  # they stay as they are
    ]
    asked = [(group, device) for group, device in asked if not rules.is_deferred(device)]
    constructions_of(group for group, _ in asked if group.tensor.is_meta)
    around = {
        step.dtype
        for step in steps
        if step.group.tensor.is_meta and isinstance(step.group.tensor, nn.Parameter)
        if step.dtype.is_floating_point
    }
    for group, where in asked:
        tensor, seen = group.tensor, rules.entry_like(group.fqn, group)
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
        if (device, dtype) != (tensor.device, tensor.dtype):
            yield Making(group, device, dtype)


#: All of a step that `_kind_of` decides on.
_DECIDED = attrgetter(*[each.name for each in fields(Step)][5:])


def _kind_of(group: Group, one: SourceTensor, options: rules.Options) -> object | None:
    """Return what alone the decision on a pair depends on; None where it is the pair itself.

    100,000 plain tensors on meta, for which a file has dense ones, take 0.3 s like this, and one
    by one 0.6.
    """
    tensor = group.tensor
    if type(one) is not FileTensor or not is_plain(tensor) or not tensor.is_meta:
        return None
    if callable(options.device) or callable(options.dtype):
        return None
    entry = one.entry
    shape, chunks = entry.shape, entry.chunks
    if len(chunks) != 1 or entry.encoding or entry.kind is not None or shape != tensor.shape:
        return None
    if chunks[0].stride is not None or entry.stride != row_major(shape):
        return None
    aligned = chunks[0].offset % ITEMSIZE.get(entry.dtype, 1) == 0
    kinds = type(tensor), tensor.dtype, entry.dtype
    return changed_on_meta(group), *kinds, aligned, chunks[0].file


def _decide(
    group: Group, key: str, candidates: list[SourceTensor], options: rules.Options, path: str
) -> Step | None:
    """Decide everything about one pair; None where a tensor is left for a later load."""
    one, tensor = candidates[0], group.tensor
    seen, file_dtype = one.entry, one.dtype
    if seen is None:  # a lazy tensor has the shape of what it is given
        like = one.value if is_lazy(tensor) and isinstance(one, MemoryTensor) else tensor
        seen = rules.entry_like(key, Group(like, group.slots))
    if seen.key != key:
        seen = seen._replace(key=key)
    asked, note = rules.asked_device(options.device, seen, group)
    if asked is not None and rules.is_deferred(asked):
        return None
    if isinstance(one, MemoryTensor) and options.transform is None:
        _require_values(group, one.value, path)
    is_cast, stride = changed_on_meta(group)
    if asked == DISK:
        options = rules.kept_on_disk(options, group, seen, file_dtype, is_cast=is_cast)
        dtype, stride = file_dtype, None
    else:
        dtype = rules.target_dtype(options.dtype, seen, tensor, file_dtype, is_cast=is_cast)
    device = rules.target_device(asked, seen.key, tensor, present=options.present)
    spans: Spans | None = None
    sharded = is_dtensor(tensor)
    if sharded:
        # Rules have seen the whole tensor; from here on there is only this rank's slice of it.
        candidates, spans = _shard(group, candidates)
        one = candidates[0]
    elif isinstance(one, MemoryTensor):
        _require_layout(group, one.value)
    mode = _mode(options.mode, tensor, device, dtype)
    in_place = mode == "copy" and not is_blank(tensor)
    handled = not in_place and is_handled(tensor)
    if mode == "swap" and is_plain(tensor) and not tensor.is_meta:
        check_mode(group)
    if in_place:
        _check_in_place(group, device, dtype)
    raw = handled or options.transform is not None
    entry, stride = one.entry, None if sharded else stride
    changes = device.type != "cpu" or dtype != file_dtype or spans is not None or stride is not None
    source: Source = "memory"
    # A caller's tensor is never placed: what trains the model would write to it. One that the
    # model's own code has seen may be, as long as it is the file's map, which is private.
    owned = raw or not in_place
    if entry is not None:
        of_file = isinstance(one, FileTensor)
        changes = changes or (entry.needs_assembly and entry.kind is None)
        filled = changes and not in_place and not handled
        kept = not in_place and owns_all(options.source, live=not tensor.is_meta)
        source, why = _source_of(
            entry, path, options.source, anew=filled or kept, copied=in_place or changes
        )
        note = why or note
        if raw:  # nobody else sees it, but for who looks into the same bytes
            owned = (source == "read" or entry.needs_assembly) if of_file else spans is not None
        else:
            owned = not in_place and (changes or mode == "copy" or source == "read")
            owned = owned or (of_file and source == "read")
    return Step(
        group=group,
        key=key,
        candidate=one,
        spans=spans,
        alternatives=tuple(candidates[1:]),
        mode=mode,
        source=source,
        route=_route(one, source, owned=owned),
        device=device,
        dtype=dtype,
        dtype_is_fixed=options.dtype is not None or is_cast or not tensor.is_meta,
        handled=handled,
        raw=raw,
        note=note,
        stride=stride,
    )


def _source_of(
    entry: TensorEntry, path: str, asked: rules.AnySource, *, anew: bool, copied: bool
) -> tuple[Source, str | None]:
    """Decide whether a file is mapped or read, and say why it is not mapped where it could be.

    Args:
        entry: the tensor in the file.
        path: of the file, of a tensor without bytes.
        asked: what the caller asked for.
        anew: whether the values get memory of their own in any case.
        copied: whether the map only serves to copy them from.
    """
    if "deflated" in entry.encoding:
        return "read", "deflated in the file, so that it is inflated into memory"
    # Of the file, not of its folder: it may be a link to elsewhere.
    file = entry.chunks[0].file if entry.chunks else path
    if asked == "mmap" and isinstance(file, Url):
        raise PlacementError(
            "what is behind a URL cannot be mapped, only read",
            file=file,
            entry=entry.key,
            hint='Load it with source="read", or copy the file to this machine first.',
        )
    if asked == "read" or (asked == "auto" and (anew or isinstance(file, Url) or is_network(file))):
        return "read", None
    if entry.needs_assembly:
        return "mmap", None
    # The map of a misaligned storage is a copy of it: reading does without that copy.
    if not _is_aligned(entry):
        return "read", "not aligned in the file, so it is read instead of mapped"
    if not copied and repeats(entry.shape, entry.stride):
        return "read", "its layout in the file cannot be mapped, so it is read"
    return "mmap", None


def _route(one: SourceTensor, source: Source, *, owned: bool) -> Route:
    """Decide how the values get into memory.

    Args:
        one: what there is.
        source: where its bytes come from.
        owned: whether new memory is needed.
    """
    if not isinstance(one, FileTensor):
        return "compute" if owned else "view"
    entry, assembled = one.entry, one.entry.needs_assembly
    # Several chunks are no view of the map: they are put together in memory, or not at all.
    if not owned and not (assembled and (len(entry.chunks) > 1 or not _is_aligned(entry))):
        return "view"
    readable = is_readable(entry) if assembled else is_dense(entry)
    if source == "read" and entry.chunks and readable:
        return "read"
    return "fill" if assembled else "copy"


def _shard(group: Group, candidates: list[SourceTensor]) -> tuple[list[SourceTensor], Spans | None]:
    """Restrict candidates to this rank's slice of a distributed tensor.

    Returns:
        The candidates, entries restricted to the slice's bytes; and the slice, where the first is a
        whole tensor in memory.

    Raises:
        PlacementError: elements share their bytes in the file, or the tensor has no shards.
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
                one if value is None else MemoryTensor(one.key, local_tensor(value), one.keys)
            )
            continue
        entry = one.entry
        if repeats(entry.shape, entry.stride):
            raise PlacementError(
                "elements share their bytes in the file, so that no rank's shard is a range of "
                "them",
                entry=group.fqn,
                found=f"strides {list(entry.stride)}",
                hint="Save a contiguous() tensor.",
            )
        found.append(replace(one, entry=shard_of_entry(entry, tensor, group.fqn)))
    return found, spans


def _require_layout(group: Group, value: object) -> None:
    """Refuse a DTensor that is not laid out as the model's tensor."""
    if is_dtensor(value) and layout_of(value) != layout_of(group.tensor):
        raise PlacementError(
            "the state dict has another layout than the model",
            entry=group.fqn,
            expected=layout_of(group.tensor) or "a plain tensor",
            found=layout_of(value),
            hint="Pass whole tensors and full_state_dict=True: each rank takes its own slice.",
        )


def _require_values(group: Group, value: torch.Tensor, path: str) -> None:
    """Refuse a tensor in memory that cannot be copied to where it goes."""
    tensor = group.tensor
    odd = oddity(local_tensor(value))
    if odd and (value.is_meta or (not tensor.is_meta and odd != oddity(local_tensor(tensor)))):
        raise PlacementError(
            "its value cannot be copied",
            file=path,
            entry=group.fqn,
            expected="a dense tensor with values",
            found=f"a tensor that is {odd}",
            hint="Make it dense, on a device that has its values: load with "
            "transform=lambda key, tensor: ..., which calls to_dense() or dequantize().",
        )


def _check_in_place(group: Group, device: torch.device, dtype: torch.dtype) -> None:
    tensor = group.tensor
    check_writable(group)
    if (device, dtype) != (tensor.device, tensor.dtype):
        raise PlacementError(
            "cannot be copied in place, because its dtype or device would change",
            entry=group.fqn,
            expected=f"{tensor.dtype} on {tensor.device}",
            found=f"{dtype} on {device} asked for",
            hint='Load with mode="swap" or mode="auto".',
        )


def _mode(
    asked: rules.AnyMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Mode:
    if asked != "auto":
        return asked
    stays = not is_blank(tensor) and (device, dtype) == (tensor.device, tensor.dtype)
    # In place, a sparse tensor takes exactly as many numbers as it has now.
    stays = stays and tensor.layout is torch.strided
    if stays and not handles(type(tensor), torch.Tensor):
        return "copy"
    return "swap"  # unless somebody is in the way


def is_dense(entry: TensorEntry) -> bool:
    """Return whether it is one run of the file, without gaps or repetitions."""
    if not entry.chunks or entry.needs_assembly:
        return not entry.chunks
    return entry.chunks[0].nbytes == entry.nbytes and not repeats(entry.shape, entry.stride)


def _is_aligned(entry: TensorEntry) -> bool:
    return all(chunk.offset % entry.itemsize == 0 for chunk in entry.chunks)


# ---- tensors that share memory


def _unshare(steps: Iterable[Step]) -> None:
    """Give mapped tensors that overlap in the file memory of their own, all but the first.

    Over the same memory, two parameters would train each other. A class or a transform may write
    to the tensor that it gets, so such a tensor shares memory with none before or after it.
    """
    mapped: list[tuple[str, int, int, int, Step]] = []
    for step in steps:
        viewed = step.plain or (step.route == "view" and (step.raw or not step.in_place))
        if viewed and (entry := step.candidate.entry) and entry.chunks:
            chunk = entry.chunks[0]
            mapped.append((chunk.file, chunk.offset, len(mapped), chunk.nbytes, step))
    for first, second in _overlapping(mapped):
        for step in (first, second) if first.raw else (second,):
            step.source, step.plain = "read", False
            step.route = _route(step.candidate, "read", owned=True)
            step.note = "shares bytes with another key of the file, which the model does not tie"


def _overlapping(
    runs: Iterable[tuple[str, int, int, int, Step]],
) -> Iterator[tuple[Step, Step]]:
    """Yield pairs of tensors whose bytes in the file overlap: each one with one before it.

    Args:
        runs: file, first byte, a number of its own, bytes, and whose they are.
    """
    file, end, last = "", 0, None
    for name, start, _, nbytes, step in sorted(runs):
        if last is not None and name == file and start < end:
            yield last, step
        if name != file or start + nbytes > end:
            file, end, last = name, start + nbytes, step


# ---- where the plan meets live modules: who is in the way, and what a class has to say


def _choose_modes(steps: list[Step], asked: rules.AnyMode) -> None:
    """Check everything that is to be swapped; refuse, or find another mode for each tensor.

    Raises:
        PlacementError: with ``mode="swap"``, a tensor that cannot be swapped; in any mode, one
            for which no way keeps what holds it.
    """
    # On meta nobody can keep old values, and who holds nothing of a plain one is in no way.
    swapped = [step for step in steps if step.mode == "swap"]
    swapped = [step for step in swapped if not step.plain or has_holders(step.group.tensor)]
    found = blocked_by([step.group for step in swapped]) if swapped else []
    if found and asked == "swap":
        raise refusal(found, hint=_RELEASE)
    blockers = {item.key: item for item in found}
    for step in swapped:
        _fall_back(step, blockers.get(step.group.fqn))


def swapped(step: Step) -> Step:
    """Return the step with a swap in place of a copy: a transform made a subclass of its own.

    Raises:
        PlacementError: the tensor cannot be swapped.
    """
    found = blocked_by([step.group])
    if found:
        raise refusal(found, hint=_RELEASE)
    return replace(step, mode="swap")


def taken(step: Step, value: torch.Tensor, path: str) -> torch.Tensor:
    """Return what a handler, or the class itself, makes of a value for a tensor of the model.

    Raises:
        PlacementError: nothing that can be placed.
    """
    like = step.group.tensor
    try:
        return apply(like, value, assign=step.mode == "assign" or like.is_meta)
    except PlacementError as error:
        raise PlacementError(error.reason, file=path, entry=step.key) from error
    except Exception as error:
        if handles(type(like), type(value)):
            raise
        raise _not_taken(step, value, path, error) from error


def check_class(step: Step, value: Values, path: str) -> None:
    """Refuse values that a class does not take, tried on a copy: a live tensor would be half set.

    This runs before anything is placed, so that all ranks of a mesh end the same way.

    Raises:
        PlacementError: it does not, or a plain tensor would take the place of one of the class.
    """
    live = local_tensor(step.group.tensor)
    if is_lazy(live):  # it has no shape yet
        return
    if not step.in_place:
        is_other = isinstance(value, torch.Tensor) and not is_wrapper(local_tensor(value))
        if is_other and is_wrapper(live):
            kind = type(live).__name__
            raise PlacementError(
                f"its class {kind} holds its values in tensors of its own and does not say how a "
                "plain tensor becomes one",
                file=path,
                entry=step.key,
                hint="Load into the plain model, and convert that; or say how each tensor is "
                f"converted: transform=..., or swap.module_load({kind}, handler).",
            )
        return
    spans = everything(live.shape) if step.spans is None else step.spans
    if not isinstance(value, torch.Tensor):
        spans = everything(live.shape)
        value = torch.ones(live.shape if is_wrapper(live) else (), dtype=value.dtype)
    if is_wrapper(live) or is_wrapper(value) or oddity(live):
        try:
            copy_values([Copy(value, clone_of(live), spans)])
        except Exception as error:
            raise _not_taken(step, value, path, error) from error


def _not_taken(step: Step, value: torch.Tensor, path: str, error: Exception) -> PlacementError:
    return PlacementError(
        "its class does not take such values",
        file=path,
        entry=step.key,
        expected=type(local_tensor(step.group.tensor)).__name__,
        found=f"{type(value).__name__} ({str(error).partition(chr(10))[0][:200]})",
        hint="Save it from a model of the same classes; load into a plain model, and convert that; "
        "or say how each tensor is converted: transform=..., or swap.module_load(...).",
    )


def _fall_back(step: Step, blocker: Blocker | None) -> None:
    """Choose another mode than a swap where one is needed, and note what is lost."""
    tensor = step.group.tensor
    if is_lazy(tensor):
        return
    stays = (step.device, step.dtype) == (tensor.device, tensor.dtype)
    notes = [] if step.note is None else [step.note]
    if blocker is not None:
        if tensor.is_meta or (step.handled and not stays):
            step.mode, what = "assign", "assigned, not swapped"
        elif step.handled or stays:
            step.mode, what = "copy", "copied in place, not swapped"
        elif Hold.REDUCER in blocker.kinds:
            raise PlacementError(
                "cannot change its dtype or device inside DistributedDataParallel, whose hooks "
                "would no longer see its gradient",
                entry=step.group.fqn,
                expected=f"{tensor.dtype} on {tensor.device}",
                found=f"{step.dtype} on {step.device} asked for",
                hint="Load before wrapping the module, or keep its dtype and device.",
            )
        else:
            what = "content set through .data, not exchanged"
        holders = f" (held by {'; '.join(blocker.holders)})" if blocker.holders else ""
        lost = step.mode == "swap" and blocker.kinds & {Hold.VIEW, Hold.MEMORY}
        tail = "; what shares its memory keeps the old values" if lost else ""
        notes.append(f"{what}: {blocker.reason}{holders}{tail}")
    if step.mode == "swap" and not step.handled and not stays and not tensor.is_meta:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and (grad.dtype, grad.device) != (step.dtype, step.device):
            name = str(grad.dtype).removeprefix("torch.")
            notes.append(f"its .grad is dropped: it is {name} on {grad.device}")
    step.note = "; ".join(notes) or None

"""How each tensor gets from its source to its slot: mode, route, device, dtype, decided once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from torchlift._checkpoint import dtype_of
from torchlift._model.commit import check_mode, check_writable, repeats
from torchlift._model.devices import DISK
from torchlift._model.dtensor import (
    Spans,
    held,
    home,
    is_sharded,
    layout_of,
    shard_of_entry,
    spans_of,
)
from torchlift._model.handlers import handles, is_handled, is_plain, is_wrapper
from torchlift._model.holders import Blocker, Hold, blocked_by, refusal
from torchlift._model.slots import Group, is_blank, is_lazy
from torchlift._model.torch_private import storage_key
from torchlift._plan.report import Mode, Route, Source
from torchlift._plan.rules import (
    AnyMode,
    Options,
    asked_device,
    entry_like,
    kept_on_disk,
    target_device,
    target_dtype,
)
from torchlift._plan.steps import Base, Candidate, Making, Match, Step
from torchlift._skeleton.skeleton import construction_of, constructions_of
from torchlift._transfer import is_network, is_readable
from torchlift.errors import PlacementError
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import is_pieced

_RELEASE = (
    'Release what holds it (swap.preflight lists all of it), or load with mode="auto", which '
    "takes for each tensor a way that keeps the references."
)


def steps_for(matched: Match, path: str, options: Options) -> list[Step]:
    """Decide every pair of a match.

    Raises:
        PlacementError: a tensor cannot go where it was asked to go, or not in the mode asked for.
    """
    network: dict[str, bool] = {}
    steps = []
    for group, key, candidates in matched.pairs:
        entry = candidates[0].entry
        file = entry.chunks[0].file if entry and entry.chunks else path
        if file not in network:
            # Not its folder: it may be a link to elsewhere.
            network[file] = options.source == "auto" and is_network(file)
        steps.append(_decide(group, key, candidates, options, path, network[file]))
    return _settle_modes(_unshare(_share(steps)), options.mode)


def makings_for(groups: Iterable[Group], options: Options) -> Iterator[Making]:
    """Decide what happens to the tensors that no source has.

    Raises:
        PlacementError: a tensor is on meta and no skeleton recorded how it is made.
    """
    groups = [group for group in groups if not is_lazy(group.tensor)]  # they stay as they are
    if options.may_stay:
        groups = [
            g for g in groups if g.persistent or g.is_parameter or construction_of(g) is not None
        ]
    constructions_of(group for group in groups if group.tensor.is_meta)
    for group in groups:
        tensor = group.tensor
        seen = entry_like(group.fqn, group)
        device = target_device(options.device, seen, tensor, present=options.present)
        if is_sharded(tensor) and options.device is None:
            device = home(tensor)
        dtype = tensor.dtype
        if tensor.is_meta and group.persistent:
            dtype = target_dtype(options.dtype, seen, tensor, tensor.dtype)
        if (device, dtype) != (tensor.device, tensor.dtype):
            yield Making(group, device, dtype)


def _decide(
    group: Group,
    key: str,
    candidates: list[Candidate],
    options: Options,
    path: str,
    network: bool,
) -> Step:
    candidate, tensor = candidates[0], group.tensor
    seen, file_dtype = _as_entry(group, key, candidate), candidate_dtype(candidate, path)
    asked, note = asked_device(options.device, seen, group)
    if asked == DISK:
        options, dtype = kept_on_disk(options, group, seen, file_dtype), file_dtype
    else:
        dtype = target_dtype(options.dtype, seen, tensor, file_dtype)
    device = target_device(asked, seen, tensor, present=options.present)
    part: Spans | None = None
    if is_sharded(candidate.value) and not is_sharded(tensor):
        _require_layout(group, candidate.value)
    if is_sharded(tensor):
        # Rules have seen the whole tensor; from here on there is only this rank's slice of it.
        device = home(tensor) if asked is None else device
        candidates, part = _shard(group, candidates)
        candidate = candidates[0]
    mode = _mode(options.mode, tensor, device, dtype)
    in_place = mode == "copy" and not is_blank(tensor)
    handled = not in_place and is_handled(tensor)
    if mode == "swap" and is_plain(tensor) and not tensor.is_meta:
        check_mode(group)
    if in_place:
        _check_in_place(group, device, dtype)
    pieced = candidate.entry is not None and is_pieced(candidate.entry)
    changes = device.type != "cpu" or dtype != file_dtype or part is not None or pieced
    fills = mode == "copy" and is_blank(tensor)
    source, bad_layout = _source(candidate, options, network, changes, in_place, handled)
    wants_memory = source == "read" or (not in_place and (changes or fills or handled))
    step = Step(
        group,
        key,
        candidate,
        part,
        tuple(candidates[1:]),
        mode,
        source,
        "view",
        device,
        dtype,
        dtype_is_fixed=options.dtype is not None or not tensor.is_meta,
        handled=handled,
        note="its layout in the file cannot be used in place" if bad_layout else note,
    )
    return replace(step, route=_route(step, owned=wants_memory))


def _route(step: Step, *, owned: bool) -> Route:
    """Decide how the values get into memory, where `owned` says that they need new memory."""
    entry = step.candidate.entry
    if step.candidate.value is not None:
        # A caller's tensor is never placed: what trains the model would write to it. One that the
        # model's own code has seen may be, as long as it is the file's map, which is private.
        mapped = entry is not None and not owned
        return "view" if mapped or step.in_place else "compute"
    assert entry is not None
    pieced = is_pieced(entry)
    dense, aligned = layout(entry)
    # Several chunks are no view of the map: they are put together in memory, or not at all.
    if not owned and not (pieced and (not aligned or len(entry.chunks) > 1)):
        return "view"
    if step.base is not None or (step.source == "read" and dense and entry.chunks):
        return "read"
    if pieced:
        return "read" if step.source == "read" and is_readable(entry) else "fill"
    return "copy"


def untransformed(step: Step, path: str, *, own: bool) -> Step:
    """Return the step as far as fetching the tensor as the source has it, on the host.

    Args:
        step: any step.
        path: of the source, for errors.
        own: whether it needs memory that no other tensor shares.
    """
    entry, value = step.entry, step.candidate.value
    raw = replace(
        step, dtype=candidate_dtype(step.candidate, path), device=torch.device("cpu"), base=None
    )
    if value is not None:
        as_it_is = isinstance(value, torch.Tensor) and step.spans is None and not own
        return replace(raw, route="view" if as_it_is else "compute")
    owned = own or step.source == "read" or (entry is not None and is_pieced(entry))
    return replace(raw, route=_route(raw, owned=owned))


def _source(
    candidate: Candidate,
    options: Options,
    network: bool,
    changes: bool,
    in_place: bool,
    handled: bool,
) -> tuple[Source, bool]:
    """Decide where the bytes come from, and say whether it is their layout that decided."""
    entry = candidate.entry
    if entry is None:
        return "memory", False
    pieced = is_pieced(entry)
    _, aligned = layout(entry)
    if options.source != "auto":
        source = options.source
    else:
        source = "read" if network or (changes and not in_place and not handled) else "mmap"
    # The map of a misaligned storage is a copy of it: reading does without that copy.
    repeated = repeats(entry.shape, entry.stride) and not pieced
    unusable = not (aligned or pieced) or (repeated and not in_place and not changes)
    return ("read", True) if source == "mmap" and unusable else (source, False)


def _shard(group: Group, candidates: list[Candidate]) -> tuple[list[Candidate], Spans | None]:
    """Restrict candidates to this rank's slice of a distributed tensor.

    Returns:
        The candidates, entries restricted to the slice's bytes; and the slice, where the first is a
        whole tensor in memory.

    Raises:
        PlacementError: elements share their bytes in the file, or the tensor has no shards.
    """
    tensor = group.tensor
    found: list[Candidate] = []
    part: Spans | None = None
    for candidate in candidates:
        entry, value = candidate.entry, candidate.value
        if value is not None:
            if is_sharded(value):
                _require_layout(group, value)
                value = held(value)
            elif len(value.shape) == tensor.dim() and not found:
                part = spans_of(tensor, group.fqn)
            found.append(Candidate(candidate.key, None, value))
            continue
        assert entry is not None
        if repeats(entry.shape, entry.stride):
            raise PlacementError(
                "elements share their bytes in the file, so that no rank's shard is a range of "
                "them",
                entry=group.fqn,
                found=f"strides {list(entry.stride)}",
                hint="Save a contiguous() tensor.",
            )
        found.append(Candidate(candidate.key, shard_of_entry(entry, tensor, group.fqn)))
    return found, part


def _require_layout(group: Group, value: torch.Tensor) -> None:
    """Refuse a DTensor that is not laid out as the model's tensor."""
    if layout_of(value) != layout_of(group.tensor):
        raise PlacementError(
            "the state dict has another layout than the model",
            entry=group.fqn,
            expected=layout_of(group.tensor) or "a plain tensor",
            found=layout_of(value),
            hint="Pass whole tensors and full_state_dict=True: each rank takes its own slice.",
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


def _mode(asked: AnyMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Mode:
    if asked != "auto":
        return asked
    stays = not is_blank(tensor) and (device, dtype) == (tensor.device, tensor.dtype)
    if stays and not handles(type(tensor), torch.Tensor):
        return "copy"
    return "swap"  # unless somebody is in the way


def _as_entry(group: Group, key: str, candidate: Candidate) -> TensorEntry:
    """Return what a device or dtype rule gets to see: the entry, under the model's name."""
    if candidate.entry is not None:
        return replace(candidate.entry, key=key) if candidate.entry.key != key else candidate.entry
    return entry_like(key, group)


def candidate_dtype(candidate: Candidate, path: str) -> torch.dtype:
    """Return the dtype in which the source has the values."""
    if candidate.value is not None:
        return candidate.value.dtype
    assert candidate.entry is not None
    return dtype_of(candidate.entry, path)


def layout(entry: TensorEntry) -> tuple[bool, bool]:
    """Say how an entry lies in its file: (dense, aligned).

    Dense is one run without gaps or repetitions; aligned, offsets that are multiples of the item
    size.
    """
    aligned = all(chunk.offset % entry.itemsize == 0 for chunk in entry.chunks)
    if not entry.chunks or is_pieced(entry):
        return not entry.chunks, aligned
    span = sum(chunk.nbytes for chunk in entry.chunks)
    return span == entry.nbytes and not repeats(entry.shape, entry.stride), aligned


# ---- tensors that share memory


def _share(steps: Sequence[Step]) -> list[Step]:
    """Let tensors that share memory in the model and in the file do so after the load.

    Two parameters that only the file stores together are not among them: the model keeps them
    apart, and over one memory they would train each other. Those that a rule sends to another
    device or dtype than the first are copies; a note says so.
    """
    aliased = Counter(step.entry.storage for step in steps if step.entry and step.entry.chunks)
    sets: dict[object, list[Step]] = {}
    for step in steps:
        if step.entry and aliased[step.entry.storage] > 1:
            sets.setdefault(_memory(step) or id(step), []).append(step)
    changed: dict[int, Step] = {}
    for together in sets.values():
        if len(together) > 1:
            changed.update(_together(together))
    return [changed.get(id(step), step) for step in steps]


def _memory(step: Step) -> object:
    """Return what steps have in common that look into one memory alike in model and file."""
    entry, tensor = step.entry, step.group.tensor
    if entry is None or len(entry.chunks) != 1 or step.in_place or step.handled:
        return None
    if type(tensor) not in (torch.Tensor, nn.Parameter) or is_lazy(tensor):
        return None
    chunk = entry.chunks[0]
    if chunk.offset % entry.itemsize or chunk.shape != entry.shape or any(chunk.start):
        return None
    if tuple(tensor.shape) != entry.shape or tuple(tensor.stride()) != entry.stride:
        return None
    distance = chunk.offset // entry.itemsize - tensor.storage_offset()
    memory = storage_key(tensor)
    return memory, entry.storage, chunk.file, entry.dtype, tensor.dtype, distance


def _together(steps: Sequence[Step]) -> Iterator[tuple[int, Step]]:
    alike: dict[object, list[Step]] = {}
    for step in steps:
        alike.setdefault((step.device, step.dtype), []).append(step)
    first = steps[0]
    for members in alike.values():
        entry = _span(members)
        owned = any(step.owned for step in members)
        for step in members:
            note = step.note
            if step.device != first.device:
                note = f"a copy: {first.key!r}, whose memory it shared, goes to {first.device}"
            elif step.dtype != first.dtype:
                note = f"a copy: {first.key!r}, whose memory it shared, becomes {first.dtype}"
            base = Base(entry, step is members[0]) if len(members) > 1 else None
            changed = replace(step, base=base, note=note)
            yield id(step), replace(changed, route=_route(changed, owned=owned))


def _span(steps: Sequence[Step]) -> TensorEntry:
    entries = [step.entry for step in steps if step.entry is not None]
    chunks = [entry.chunks[0] for entry in entries]
    start = min(chunk.offset for chunk in chunks)
    nbytes = max(chunk.offset + chunk.nbytes for chunk in chunks) - start
    shape = (nbytes // entries[0].itemsize,)
    chunk = Chunk(chunks[0].file, start, nbytes, (0,), shape)
    return replace(entries[0], shape=shape, stride=(1,), nbytes=nbytes, chunks=(chunk,))


def _unshare(steps: Sequence[Step]) -> list[Step]:
    """Give mapped tensors that overlap in the file memory of their own, all but the first.

    Not those that share memory in the model too.
    """
    end: dict[str, int] = {}
    changed: dict[int, Step] = {}
    mapped = [
        (step.candidate.entry.chunks[0], step)
        for step in steps
        if step.candidate.entry
        and step.candidate.entry.chunks
        and not step.owned
        and not step.in_place
        and (step.base is None or step.base.first)
    ]
    for chunk, step in sorted(mapped, key=lambda item: (item[0].file, item[0].offset)):
        if chunk.offset < end.get(chunk.file, 0) and step.base is None:
            note = "shares bytes with another key of the file, which the model does not tie"
            own = replace(step, source="read", note=note)
            changed[id(step)] = replace(own, route=_route(own, owned=True))
        else:
            reach = step.base.entry.chunks[0] if step.base else chunk
            end[chunk.file] = max(end.get(chunk.file, 0), reach.offset + reach.nbytes)
    return [changed.get(id(step), step) for step in steps]


# ---- where the plan meets live modules: who is in the way, and what a class has to say


def _settle_modes(steps: list[Step], asked: AnyMode) -> list[Step]:
    """Check everything that is to be swapped; refuse, or find another mode for each tensor.

    Raises:
        PlacementError: with ``mode="swap"``, a tensor that cannot be swapped; in any mode, one
            for which no way keeps what holds it.
    """
    swapped = [step for step in steps if step.mode == "swap"]
    for step in steps:
        if step.mode == "swap" or (step.mode == "copy" and not step.in_place):
            _require_handler(step)
    found = blocked_by([step.group for step in swapped])
    if found and asked == "swap":
        raise refusal(found, hint=_RELEASE)
    blocked = {item.key: item for item in found}
    return [
        _fallback(step, blocked.get(step.group.fqn)) if step.mode == "swap" else step
        for step in steps
    ]


def swapped(step: Step) -> Step:
    """Return the step with a swap in place of a copy: a transform made a subclass of its own.

    Raises:
        PlacementError: the tensor cannot be swapped.
    """
    found = blocked_by([step.group])
    if found:
        raise refusal(found, hint=_RELEASE)
    return replace(step, mode="swap")


def _require_handler(step: Step) -> None:
    tensor = step.group.tensor
    kind = type(tensor)
    if not is_wrapper(tensor) or step.handled or kind.__module__.startswith("torch.distributed"):
        return
    raise PlacementError(
        f"its class {kind.__name__} holds its values in tensors of its own and does not say how a "
        "plain tensor becomes one",
        entry=step.group.fqn,
        hint=f"Register a handler: swap.module_load({kind.__name__}, handler).",
    )


def _fallback(step: Step, blocker: Blocker | None) -> Step:
    """Return the step as it will be done, with a note about what is lost."""
    tensor = step.group.tensor
    if is_lazy(tensor):
        return step
    stays = (step.device, step.dtype) == (tensor.device, tensor.dtype)
    notes = [] if step.note is None else [step.note]
    if blocker is not None:
        holders = f" (held by {'; '.join(blocker.holders)})" if blocker.holders else ""
        why = f"{blocker.reason}{holders}"
        if tensor.is_meta or (step.handled and not stays):
            step, way = replace(step, mode="assign"), f"assigned, not swapped: {why}"
        elif step.handled or stays:
            step, way = replace(step, mode="copy"), f"copied in place, not swapped: {why}"
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
            way = f"content set through .data, not exchanged: {why}"
            if blocker.kinds & {Hold.VIEW, Hold.MEMORY}:
                way += "; what shares its memory keeps the old values"
        notes.append(way)
    if step.mode == "swap" and not step.handled and not stays and not tensor.is_meta:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and (grad.dtype, grad.device) != (step.dtype, step.device):
            name = str(grad.dtype).removeprefix("torch.")
            notes.append(f"its .grad is dropped: it is {name} on {grad.device}")
    return replace(step, note="; ".join(notes) or None) if notes else step

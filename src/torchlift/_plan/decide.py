"""How each tensor gets from the file to its slot: mode, source, device, dtype, memory."""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchlift._checkpoint import dtype_of
from torchlift._model import handlers
from torchlift._model.commit import (
    check_mode,
    check_writable,
    content_bytes,
    is_plain,
    is_wrapper,
    repeats,
)
from torchlift._model.devices import DISK
from torchlift._model.dtensor import home, is_sharded, shard_of_entry, shard_of_value
from torchlift._model.handlers import handles, is_handled
from torchlift._model.holders import REDUCER, Blocker, find, refusal
from torchlift._model.slots import Group, is_blank, is_lazy
from torchlift._plan.match import Candidate, Match
from torchlift._plan.report import Mode, Source
from torchlift._plan.rules import (
    AnyMode,
    Options,
    asked_device,
    entry_like,
    kept_on_disk,
    target_device,
    target_dtype,
)
from torchlift._skeleton.skeleton import constructions_of
from torchlift._transfer import is_network
from torchlift.errors import PlacementError
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import is_pieced


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor of the model and the bytes that become it.

    Attributes:
        group: where it goes.
        key: the name under which the checkpoint matched.
        candidate: what the checkpoint offers.
        rivals: offers under the group's other names, which must hold the same values.
        mode: how it is placed.
        source: where its bytes come from.
        device, dtype: what it becomes.
        dtype_is_fixed: whether that dtype was asked for, or is a live tensor's.
        owned: whether new memory is filled for it.
        dense: whether its bytes are one run without gaps or repetitions.
        note: why it is done this way, where that is not what was asked for.
        handled: whether the class of the model's tensor says how it is loaded.
        base: what it is a view of, together with other tensors of the model.
    """

    group: Group
    key: str
    candidate: Candidate
    rivals: tuple[Candidate, ...]
    mode: Mode
    source: Source
    device: torch.device
    dtype: torch.dtype
    dtype_is_fixed: bool
    owned: bool
    dense: bool
    note: str | None = None
    handled: bool = False
    base: Base | None = None

    @property
    def entry(self) -> TensorEntry | None:
        """The entry to read; None for a value that a hook computed."""
        return self.candidate.entry

    @property
    def span(self) -> int:
        """Bytes in the file from the first to the last; of a pieced tensor, those of its pieces."""
        if self.entry is None:
            return 0
        if self.base is not None:
            return self.base.entry.nbytes if self.base.first else 0
        if is_pieced(self.entry):
            return self.entry.nbytes
        return sum(chunk.nbytes for chunk in self.entry.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the checkpoint, or of the value that a hook computed."""
        if self.entry is not None:
            return self.entry.nbytes
        return self.candidate.value.nbytes if self.candidate.value is not None else 0

    @property
    def in_place(self) -> bool:
        """Whether a live tensor's memory is written to."""
        return self.mode == "copy" and not is_blank(self.group.tensor)

    @property
    def is_changed(self) -> bool:
        """Whether the file's bytes are cast or moved on their way."""
        cast = self.entry is not None and str(self.dtype) != f"torch.{self.entry.dtype}"
        return cast or self.host_or_device.type != "cpu"

    @property
    def host_or_device(self) -> torch.device:
        """Where new memory for it is taken: values for a copy in place wait on the host."""
        return torch.device("cpu") if self.in_place else self.device

    def untransformed(self, path: str) -> Step:
        """This step as far as fetching the tensor as the checkpoint holds it, on the host."""
        if self.entry is None:
            return self
        owned = self.source == "read" or is_pieced(self.entry)
        return replace(
            self,
            dtype=dtype_of(self.entry, path),
            device=torch.device("cpu"),
            owned=owned,
            base=None,
        )

    @property
    def owned_bytes(self) -> int:
        """Anonymous memory, in bytes, that the new tensor takes on the host."""
        on_host = self.device.type == "cpu" or self.in_place
        if self.handled and on_host:
            return content_bytes(self.group.tensor)
        numel = self.candidate.numel
        if self.base is not None:
            numel = self.base.entry.numel if self.base.first else 0
        return numel * self.dtype.itemsize if self.owned and on_host else 0


@dataclass(frozen=True, slots=True)
class Making:
    """A tensor that no file provides: replayed from its construction, or live and to be moved."""

    group: Group
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Work:
    """All that a load is to do.

    Attributes:
        steps: tensors that the checkpoint provides.
        makings: tensors that it does not provide and that are made or moved.
        attributes: (module, name, value) that a module's own loading code sets besides tensors.
        extra: (module, state) for ``set_extra_state``.
    """

    steps: tuple[Step, ...] = ()
    makings: tuple[Making, ...] = ()
    attributes: tuple[tuple[nn.Module, str, object], ...] = ()
    extra: tuple[tuple[nn.Module, object], ...] = ()

    @property
    def replayed(self) -> list[Group]:
        """What is made by replaying its construction."""
        return [item.group for item in self.makings if item.group.tensor.is_meta]


def steps_for(matched: Match, path: str, options: Options) -> Iterator[Step]:
    """Decide every pair of a match."""
    network: dict[str, bool] = {}
    steps = []
    for group, key, offers in matched.pairs:
        entry = offers[0].entry
        file = entry.chunks[0].file if entry and entry.chunks else path
        if file not in network:
            # Not its folder: it may be a link to elsewhere.
            network[file] = options.source == "auto" and is_network(file)
        steps.append(_decide(group, key, offers, options, path, network[file]))
    return settle(unshare(share(steps)), options.mode)


def makings_for(groups: Iterable[Group], options: Options) -> Iterator[Making]:
    """Decide what happens to the tensors that the checkpoint does not provide.

    Raises:
        PlacementError: a tensor is on meta and no skeleton recorded how it is made.
    """
    groups = [group for group in groups if not is_lazy(group.tensor)]  # they stay as they are
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
    offers: list[Candidate],
    options: Options,
    path: str,
    network: bool,
) -> Step:
    candidate, tensor = offers[0], group.tensor
    seen = _as_entry(group, key, candidate)
    if candidate.entry is not None:
        file_dtype = dtype_of(candidate.entry, path)
    else:
        assert candidate.value is not None
        file_dtype = candidate.value.dtype
    asked, note = asked_device(options.device, seen, group)
    if asked == DISK:
        options, dtype = kept_on_disk(options, group, seen, file_dtype), file_dtype
    else:
        dtype = target_dtype(options.dtype, seen, tensor, file_dtype)
    device = target_device(asked, seen, tensor, present=options.present)
    if is_sharded(tensor):
        # Rules have seen the whole tensor; from here on there is only this rank's part of it.
        device = home(tensor) if asked is None else device
        offers = [shard_of_offer(group, offer) for offer in offers]
        candidate = offers[0]
    mode = _mode(options.mode, tensor, device, dtype)
    in_place = mode == "copy" and not is_blank(tensor)
    handled = not in_place and is_handled(tensor)
    if mode == "swap" and is_plain(tensor) and not tensor.is_meta:
        check_mode(group)
    if in_place:
        check_writable(group)
        if (device, dtype) != (tensor.device, tensor.dtype):
            raise PlacementError(
                "cannot be copied in place, because its dtype or device would change",
                entry=group.fqn,
                expected=f"{tensor.dtype} on {tensor.device}",
                found=f"{dtype} on {device} asked for",
                hint='Load with mode="swap" or mode="auto".',
            )
    dense, repeated, aligned = layout(candidate.entry)
    pieced = candidate.entry is not None and is_pieced(candidate.entry)
    changes = device.type != "cpu" or dtype != file_dtype or pieced
    if options.source == "auto":
        read = network or (changes and not in_place and not handled)
        source: Source = "read" if read else "mmap"
    else:
        source = options.source
    # The map of a misaligned storage is a copy of it: reading does without that copy.
    if source == "mmap" and (
        not (aligned or pieced) or (repeated and not in_place and not changes)
    ):
        source, note = "read", "its layout in the file cannot be used in place"
    fills = mode == "copy" and is_blank(tensor)
    computed = candidate.entry is None
    owned = source == "read" or (not in_place and (changes or fills or computed or handled))
    # Several chunks are no view of the map: they are put together in memory, or not at all.
    owned = owned or (pieced and (not aligned or len(candidate.entry.chunks) > 1))  # type: ignore[union-attr]
    fixed = options.dtype is not None or not tensor.is_meta
    rivals = tuple(offers[1:])
    return Step(
        group,
        key,
        candidate,
        rivals,
        mode,
        source,
        device,
        dtype,
        fixed,
        owned,
        dense,
        note,
        handled,
    )


def _mode(asked: AnyMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Mode:
    if asked != "auto":
        return asked
    stays = not is_blank(tensor) and (device, dtype) == (tensor.device, tensor.dtype)
    if stays and not handles(type(tensor), torch.Tensor):
        return "copy"
    return "swap"  # unless `settle` finds somebody in the way


def _as_entry(group: Group, key: str, candidate: Candidate) -> TensorEntry:
    """What a device or dtype rule gets to see: the entry, under the model's name."""
    if candidate.entry is not None:
        return replace(candidate.entry, key=key) if candidate.entry.key != key else candidate.entry
    return entry_like(key, group)


def layout(entry: TensorEntry | None) -> tuple[bool, bool, bool]:
    """How an entry lies in its file: (dense, repeated, aligned).

    Dense is one run without gaps or repetitions; repeated, elements that share their bytes;
    aligned, an offset that is a multiple of the item size.
    """
    if entry is None or not entry.chunks:
        return True, False, True
    if is_pieced(entry):
        return False, False, all(c.offset % entry.itemsize == 0 for c in entry.chunks)
    span = sum(chunk.nbytes for chunk in entry.chunks)
    repeated = repeats(entry.shape, entry.stride)
    aligned = entry.chunks[0].offset % entry.itemsize == 0
    return span == entry.nbytes and not repeated, repeated, aligned


@dataclass(frozen=True, slots=True)
class Base:
    """The run of a file that several tensors look into, as one vector.

    Attributes:
        entry: that vector.
        first: whether it is counted with this tensor.
    """

    entry: TensorEntry
    first: bool

    def view(self, vector: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        """The tensor of `entry` as a view of the vector."""
        offset = entry.chunks[0].offset - self.entry.chunks[0].offset
        return vector.as_strided(entry.shape, entry.stride, offset // entry.itemsize)


def share(steps: Sequence[Step]) -> list[Step]:
    """Let tensors that share memory in the model and in the file do so after the load.

    Those that a rule sends to another device or dtype than the first are copies; a note says so.
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
    """What steps have in common that look into one memory in the same way in model and file."""
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
    memory = tensor.untyped_storage()._cdata
    return memory, entry.storage, chunk.file, entry.dtype, tensor.dtype, distance


def _together(steps: Sequence[Step]) -> Iterator[tuple[int, Step]]:
    parts: dict[object, list[Step]] = {}
    for step in steps:
        parts.setdefault((step.device, step.dtype), []).append(step)
    first = steps[0]
    for part in parts.values():
        entry = _span(part)
        owned = any(step.owned for step in part)
        for step in part:
            note = step.note
            if step.device != first.device:
                note = f"a copy: {first.key!r}, whose memory it shared, goes to {first.device}"
            elif step.dtype != first.dtype:
                note = f"a copy: {first.key!r}, whose memory it shared, becomes {first.dtype}"
            base = Base(entry, step is part[0]) if len(part) > 1 else None
            yield id(step), replace(step, base=base, owned=owned, note=note)


def _span(steps: Sequence[Step]) -> TensorEntry:
    entries = [step.entry for step in steps if step.entry is not None]
    chunks = [entry.chunks[0] for entry in entries]
    start = min(chunk.offset for chunk in chunks)
    nbytes = max(chunk.offset + chunk.nbytes for chunk in chunks) - start
    shape = (nbytes // entries[0].itemsize,)
    chunk = Chunk(chunks[0].file, start, nbytes, (0,), shape)
    return replace(entries[0], shape=shape, stride=(1,), nbytes=nbytes, chunks=(chunk,))


def unshare(steps: Sequence[Step]) -> Iterator[Step]:
    """Give mapped tensors that overlap in the file memory of their own, all but the first.

    Not those that share memory in the model too.
    """
    end: dict[str, int] = {}
    changed: dict[int, Step] = {}
    mapped = [
        (step.entry.chunks[0], step)
        for step in steps
        if step.entry
        and step.entry.chunks
        and not step.owned
        and not step.in_place
        and (step.base is None or step.base.first)
    ]
    for chunk, step in sorted(mapped, key=lambda item: (item[0].file, item[0].offset)):
        if chunk.offset < end.get(chunk.file, 0) and step.base is None:
            note = "shares bytes with another key of the file, which the model does not tie"
            changed[id(step)] = replace(step, source="read", owned=True, note=note)
        else:
            reach = step.base.entry.chunks[0] if step.base else chunk
            end[chunk.file] = max(end.get(chunk.file, 0), reach.offset + reach.nbytes)
    return (changed.get(id(step), step) for step in steps)


_RELEASE = (
    'Release what holds it (swap.preflight lists all of it), or load with mode="auto", which '
    "takes for each tensor a way that keeps the references."
)


def settle(steps: Iterable[Step], asked: AnyMode) -> Iterator[Step]:
    """Check everything that is to be swapped; say no, or find another way for each tensor.

    Raises:
        PlacementError: with ``mode="swap"``, a tensor that cannot be swapped; in any mode, one
            for which no way keeps what holds it.
    """
    steps = list(steps)
    swapped = [step for step in steps if step.mode == "swap"]
    for step in steps:
        if step.mode == "swap" or (step.mode == "copy" and not step.in_place):
            _require_handler(step)
    found = find([step.group for step in swapped])
    if found and asked == "swap":
        raise refusal(found, hint=_RELEASE)
    blocked = {item.key: item for item in found}
    for step in steps:
        if step.mode == "swap":
            step = _fallback(step, blocked.get(step.group.fqn))
        yield step


def apply(step: Step, source: torch.Tensor, path: str) -> tuple[Step, torch.Tensor]:
    """Ask the handler, or the class itself, what is to be placed.

    Raises:
        PlacementError: what it made cannot be placed.
    """
    destination = step.group.tensor
    assign = step.mode == "assign" or destination.is_meta
    try:
        made = handlers.apply(destination, source, assign=assign)
    except PlacementError as error:
        raise PlacementError(error.reason, file=path, entry=step.key) from error
    if step.in_place and not is_plain(made) and not step.handled:
        # Found out only now: a transform returned a subclass for a plain, live tensor.
        found = find([step.group])
        if found:
            raise refusal(found, hint=_RELEASE)
        step = replace(step, mode="swap")
    slots = _slots(made), _slots(destination)
    if step.mode == "swap" and not is_plain(made) and slots[0] != slots[1]:
        raise PlacementError(
            "a handler returned a class whose slots differ from those of the model's tensor, "
            "so that the two cannot be exchanged",
            file=path,
            entry=step.key,
            expected=f"{type(destination).__name__} with slots {sorted(slots[1])}",
            found=f"{type(made).__name__} with slots {sorted(slots[0])}",
            hint='Load with mode="assign".',
        )
    return step, made


def _slots(tensor: torch.Tensor) -> set[str]:
    return set(copyreg._slotnames(type(tensor)))  # type: ignore[attr-defined]


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
    """The step as it will be done, with a word about what is lost."""
    tensor = step.group.tensor
    if is_lazy(tensor):
        return step
    stays = (step.device, step.dtype) == (tensor.device, tensor.dtype)
    notes = [] if step.note is None else [step.note]
    if blocker is not None:
        held = f" (held by {'; '.join(blocker.holders)})" if blocker.holders else ""
        why = f"{blocker.reason}{held}"
        if tensor.is_meta or (step.handled and not stays):
            step, way = replace(step, mode="assign"), f"assigned, not swapped: {why}"
        elif step.handled or stays:
            step, way = replace(step, mode="copy"), f"copied in place, not swapped: {why}"
        else:
            if REDUCER in blocker.holders:
                raise PlacementError(
                    "cannot change its dtype or device inside DistributedDataParallel, whose hooks "
                    "would no longer see its gradient",
                    entry=step.group.fqn,
                    expected=f"{tensor.dtype} on {tensor.device}",
                    found=f"{step.dtype} on {step.device} asked for",
                    hint="Load before wrapping the module, or keep its dtype and device.",
                )
            way = f"content set through .data, not exchanged: {why}"
            if "memory" in blocker.reason or "view" in blocker.reason:
                way += "; what shares its memory keeps the old values"
        notes.append(way)
    if step.mode == "swap" and not step.handled and not stays and not tensor.is_meta:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and (grad.dtype, grad.device) != (step.dtype, step.device):
            name = str(grad.dtype).removeprefix("torch.")
            notes.append(f"its .grad is dropped: it is {name} on {grad.device}")
    return replace(step, note="; ".join(notes) or None) if notes else step


def shard_of_offer(group: Group, offer: Candidate) -> Candidate:
    """The part of an offer that belongs to this rank's shard of a distributed tensor.

    Raises:
        PlacementError: elements share their bytes in the file, or the tensor has no shards.
    """
    if offer.entry is None:
        assert offer.value is not None
        return Candidate(offer.key, None, shard_of_value(offer.value, group.tensor, group.fqn))
    if repeats(offer.entry.shape, offer.entry.stride):
        raise PlacementError(
            "elements share their bytes in the file, so that no rank's part is a range of them",
            entry=group.fqn,
            found=f"strides {list(offer.entry.stride)}",
            hint="Save a contiguous() tensor.",
        )
    return Candidate(offer.key, shard_of_entry(offer.entry, group.tensor, group.fqn))

"""How each tensor gets from the file to its slot: mode, source, device, dtype, memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchlift.boxes import is_pieced
from torchlift.checkpoint import dtype_of
from torchlift.content import content_bytes
from torchlift.distributed.offers import shard_of_offer
from torchlift.distributed.shards import home, is_sharded
from torchlift.errors import PlacementError
from torchlift.filesystem import is_network
from torchlift.formats import TensorEntry
from torchlift.match import Candidate, Match
from torchlift.place import check_mode, check_writable, is_plain, repeats
from torchlift.recipes import require_recipes
from torchlift.report import Mode, Source
from torchlift.rules import (
    DISK,
    AnyMode,
    Options,
    asked_device,
    entry_like,
    kept_on_disk,
    target_device,
    target_dtype,
)
from torchlift.sharing import Base, share, unshare
from torchlift.slots import Group, is_blank, is_lazy
from torchlift.swap.handlers import handles, is_handled
from torchlift.swap.settle import settle


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
    require_recipes(group for group in groups if group.tensor.is_meta)
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

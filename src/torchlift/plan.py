"""`plan`: which bytes go to which tensor, how, and at what cost, before anything happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from torchlift import transfer
from torchlift.checkpoint import Checkpoint, dtype_of
from torchlift.checkpoint import open as open_checkpoint
from torchlift.errors import MismatchError, PlacementError
from torchlift.filesystem import is_network
from torchlift.formats import TensorEntry
from torchlift.match import Candidate, Match, Rename, match, renamed, suggestion
from torchlift.place import check_writable, obstacle
from torchlift.report import KeyReport, LoadReport, Mode, Source, human, summarise
from torchlift.skeleton import require_recipes, strays
from torchlift.slots import Group, collect

DeviceRule = torch.device | str | int | Callable[[TensorEntry], "torch.device | str | int"] | None
DtypeRule = torch.dtype | Callable[[TensorEntry], "torch.dtype | None"] | None
AnyMode = Literal["auto", "assign", "copy", "swap"]
AnySource = Literal["auto", "mmap", "read"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that `plan` and `load` share; see there."""

    rename: Rename | None = None
    device: DeviceRule = None
    dtype: DtypeRule = None
    strict: bool = True
    ignore_mismatched: bool = False
    mode: AnyMode = "auto"
    source: AnySource = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, ("auto", "assign", "copy", "swap")),
            ("source", self.source, ("auto", "mmap", "read")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


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

    @property
    def entry(self) -> TensorEntry | None:
        """The entry to read; None for a value that a hook computed."""
        return self.candidate.entry

    @property
    def in_place(self) -> bool:
        """Whether a live tensor's memory is written to."""
        return self.mode == "copy" and not self.group.tensor.is_meta

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
        owned = self.source == "read"
        return replace(
            self, dtype=dtype_of(self.entry, path), device=torch.device("cpu"), owned=owned
        )

    @property
    def owned_bytes(self) -> int:
        """Anonymous memory, in bytes, that the new tensor takes on the host."""
        on_host = self.device.type == "cpu" or self.in_place
        return self.group.tensor.numel() * self.dtype.itemsize if self.owned and on_host else 0


@dataclass(frozen=True, slots=True)
class Making:
    """A tensor that no file provides: replayed from its construction, or live and to be moved."""

    group: Group
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class LoadPlan(LoadReport):
    """What a load would do; made by `plan`, without reading weights or changing the model.

    Attributes:
        peak_bytes: estimate of the anonymous memory the load adds at its peak, in bytes.
        bytes_to_read: bytes that will be copied out of the files.
        steps: the work itself, for the transfer and placement rooms.
        makings: tensors of the model that the checkpoint does not provide and that are made.
    """

    peak_bytes: int = 0
    bytes_to_read: int = 0
    steps: tuple[Step, ...] = field(default=(), repr=False)
    makings: tuple[Making, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"plan: {len(self.loaded)} tensors, {human(self.nbytes)}, from {self.path}",
                f"  to read {human(self.bytes_to_read)}, "
                f"anonymous memory at the peak {human(self.peak_bytes)}",
                *summarise(self),
            ]
        )


def plan(
    model: nn.Module,
    ckpt: Checkpoint | str | os.PathLike[str],
    *,
    root: str | None = None,
    rename: Rename | None = None,
    device: DeviceRule = None,
    dtype: DtypeRule = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
    mode: AnyMode = "auto",
    source: AnySource = "auto",
) -> LoadPlan:
    """Say what `load` with the same arguments would do, without doing it.

    Args:
        model: a module, live or on meta. It is not changed.
        ckpt: a checkpoint, or a path that `torchlift.open` reads.
        root: keep only what is under this container of the checkpoint.
        rename: callable from a name in the checkpoint to a name in the model, or to None to drop it.
        device: None, a device, or a callable from `TensorEntry` (its ``key`` is the model's name)
            to a device. None leaves a live tensor where it is and puts a meta one on the CPU.
        dtype: None, a floating-point dtype, or a callable from `TensorEntry` to a dtype or None. It
            casts floating-point parameters and persistent buffers, nothing else.
        strict: raise when keys are missing or unexpected.
        ignore_mismatched: treat a key whose shape differs as missing instead of raising.
        mode: ``"assign"``, ``"copy"``, ``"swap"`` or ``"auto"``.
        source: ``"mmap"``, ``"read"`` or ``"auto"``.

    Returns:
        The plan; printing it gives a summary.

    Raises:
        MismatchError: the names or shapes do not fit; one error that lists all of them.
        UnsafeError: a value could only be had by running code.
        PlacementError: a tensor cannot go where it was asked to go.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save(torch.nn.Linear(3, 2).state_dict(), path)
        >>> p = torchlift.plan(torchlift.skeleton(torch.nn.Linear, 3, 2), path)
        >>> list(p.loaded), p.bytes_to_read
        (['weight', 'bias'], 0)
    """
    options = Options(rename, device, dtype, strict, ignore_mismatched, mode, source)
    opened, owned = resolve(ckpt, root)
    try:
        return make_plan(model, opened, options, check_shapes=True)
    finally:
        if owned:
            opened.close()


def resolve(
    ckpt: Checkpoint | str | os.PathLike[str], root: str | None
) -> tuple[Checkpoint, bool]:
    """The checkpoint that the argument means, and whether it was opened for this call."""
    if not isinstance(ckpt, Checkpoint):
        return open_checkpoint(ckpt, root=root), True
    if root is None:
        return ckpt, False
    return Checkpoint(ckpt.index, root=root), True


def make_plan(
    model: nn.Module, ckpt: Checkpoint, options: Options, *, check_shapes: bool
) -> LoadPlan:
    """`plan` on an open checkpoint; `check_shapes` is False when a transform may change them."""
    groups = collect(model)
    names = renamed([*ckpt.entries, *ckpt.blocked_keys], options.rename, ckpt.path)
    for key in ckpt.blocked_keys:
        if key in names:
            raise ckpt.refusal(key)
    candidates = {
        names[key]: Candidate(key, entry) for key, entry in ckpt.entries.items() if key in names
    }
    matched = match(groups, candidates, check_shapes=check_shapes)
    objects = renamed(ckpt.objects, options.rename, ckpt.path)
    matched.unexpected += objects.values()
    _check(matched, ckpt.path, options)
    steps = tuple(_steps(matched, ckpt.path, options))
    makings = tuple(_makings([*matched.unmatched, *strays(model)], options))
    return _assemble(ckpt, groups, matched, steps, makings, names)


def _makings(groups: list[Group], options: Options) -> Iterator[Making]:
    require_recipes(group for group in groups if group.tensor.is_meta)
    for group in groups:
        tensor = group.tensor
        seen = entry_like(group.fqn, group)
        device = target_device(options.device, seen, tensor)
        dtype = tensor.dtype
        if tensor.is_meta and group.persistent:
            dtype = _dtype(options.dtype, seen, tensor, tensor.dtype)
        if (device, dtype) != (tensor.device, tensor.dtype):
            yield Making(group, device, dtype)


def _assemble(
    ckpt: Checkpoint,
    groups: list[Group],
    matched: Match,
    steps: tuple[Step, ...],
    makings: tuple[Making, ...],
    names: Mapping[str, str],
) -> LoadPlan:
    loaded: dict[str, KeyReport] = {}
    for step in steps:
        loaded.update(dict.fromkeys(step.group.names, _describe(step)))
    order = {slot.fqn: at for at, slot in enumerate(s for g in groups for s in g.slots)}
    return LoadPlan(
        path=ckpt.path,
        loaded=dict(sorted(loaded.items(), key=lambda item: order[item[0]])),
        missing_keys=matched.missing,
        unexpected_keys=matched.unexpected,
        mismatched=matched.mismatched,
        tied=tuple(group.names for group in groups if len(group.slots) > 1),
        replayed=[n for item in makings if item.group.tensor.is_meta for n in item.group.names],
        renamed={old: new for old, new in names.items() if old != new},
        peak_bytes=_peak(steps, makings),
        bytes_to_read=sum(_span(step) for step in steps if step.owned or step.in_place),
        steps=steps,
        makings=makings,
    )


def _describe(step: Step) -> KeyReport:
    file_dtype = step.entry.dtype if step.entry else _name(step.candidate.value)
    dtype = str(step.dtype).removeprefix("torch.")
    return KeyReport(
        key=step.key,
        entry=step.candidate.key,
        nbytes=step.entry.nbytes if step.entry else 0,
        mode=step.mode,
        source=step.source,
        device=str(step.device),
        dtype=dtype,
        cast_from=file_dtype if file_dtype != dtype else None,
        note=step.note,
    )


def _name(value: torch.Tensor | None) -> str:
    assert value is not None
    return str(value.dtype).removeprefix("torch.")


def _span(step: Step) -> int:
    return sum(chunk.nbytes for chunk in step.entry.chunks) if step.entry else 0


def _peak(steps: tuple[Step, ...], makings: tuple[Making, ...]) -> int:
    staged = sum(
        step.owned and step.source == "read" and step.dense and step.is_changed for step in steps
    )
    made = sum(
        item.group.tensor.numel() * item.dtype.itemsize
        for item in makings
        if item.device.type == "cpu"
    )
    return sum(step.owned_bytes for step in steps) + made + transfer.stage_bytes(staged)


def _check(matched: Match, path: str, options: Options) -> None:
    missing, unexpected = matched.missing, matched.unexpected
    wrong = {} if options.ignore_mismatched else matched.mismatched
    bad_names = options.strict and (missing or unexpected)
    if wrong or bad_names:
        parts = []
        if missing and options.strict:
            parts.append(f"missing ({len(missing)}): {', '.join(missing)}")
        if unexpected and options.strict:
            parts.append(f"unexpected ({len(unexpected)}): {', '.join(unexpected)}")
        if wrong:
            parts.append(f"mismatched ({len(wrong)}): " + "; ".join(map(str, wrong.values())))
        raise MismatchError(
            "the checkpoint does not fit the model: " + "; ".join(parts),
            file=path,
            hint=suggestion(missing, unexpected) or _way_out(bool(bad_names), bool(wrong)),
            missing_keys=missing,
            unexpected_keys=unexpected,
            mismatched={key: (item.expected, item.found) for key, item in wrong.items()},
        )
    # What ignore_mismatched lets pass counts as missing from here on.
    matched.missing = missing + list(matched.mismatched)


def _way_out(names: bool, shapes: bool) -> str:
    ways = []
    if names:
        ways.append("strict=False to load what fits")
    if shapes:
        ways.append("ignore_mismatched=True to skip what has another shape")
    return f"Pass {' and '.join(ways)}."


def _steps(matched: Match, path: str, options: Options) -> Iterator[Step]:
    network: dict[str, bool] = {}
    steps = []
    for group, key, offers in matched.pairs:
        entry = offers[0].entry
        file = entry.chunks[0].file if entry and entry.chunks else path
        folder = os.path.dirname(file)
        if folder not in network:
            network[folder] = is_network(folder)
        steps.append(_decide(group, key, offers, options, path, network[folder]))
    return _unshare(steps)


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
    dtype = _dtype(options.dtype, seen, tensor, file_dtype)
    device = target_device(options.device, seen, tensor)
    mode, note = _mode(options.mode, group, device, dtype)
    in_place = mode == "copy" and not tensor.is_meta
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
    dense, mappable = layout(candidate.entry)
    changes = device.type != "cpu" or dtype != file_dtype
    if options.source == "auto":
        read = network or (changes and not in_place)
        source: Source = "read" if read else "mmap"
    else:
        source = options.source
    if source == "mmap" and not in_place and not changes and not mappable:
        source, note = "read", "its layout in the file cannot be used in place"
    fills = mode == "copy" and tensor.is_meta
    owned = source == "read" or (not in_place and (changes or fills))
    fixed = options.dtype is not None or not tensor.is_meta
    rivals = tuple(offers[1:])
    return Step(
        group, key, candidate, rivals, mode, source, device, dtype, fixed, owned, dense, note
    )


def _mode(
    asked: AnyMode, group: Group, device: torch.device, dtype: torch.dtype
) -> tuple[Mode, str | None]:
    tensor = group.tensor
    if asked != "auto":
        return asked, None
    if not tensor.is_meta and (device, dtype) == (tensor.device, tensor.dtype):
        return "copy", None
    reason = obstacle(tensor)
    return ("swap", None) if reason is None else ("assign", f"not swapped: {reason}")


def _dtype(
    rule: DtypeRule, entry: TensorEntry, tensor: torch.Tensor, file_dtype: torch.dtype
) -> torch.dtype:
    default = file_dtype if tensor.is_meta else tensor.dtype
    floating = file_dtype.is_floating_point and tensor.dtype.is_floating_point
    if rule is None or not floating:
        return default
    asked = rule if isinstance(rule, torch.dtype) else rule(entry)
    if asked is None:
        return default
    if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
        raise PlacementError(
            "dtype= must give a floating-point dtype", entry=entry.key, found=repr(asked)
        )
    return asked


def target_device(rule: DeviceRule, entry: TensorEntry, tensor: torch.Tensor) -> torch.device:
    """The device that `rule` gives a tensor.

    Raises:
        PlacementError: it is no device, or not one of this machine.
    """
    if rule is None:
        return torch.device("cpu") if tensor.is_meta else tensor.device
    asked = rule(entry) if callable(rule) else rule
    if isinstance(asked, torch.device) and asked == tensor.device:
        return asked
    return usable_device(asked, entry.key)


def usable_device(asked: object, entry: str) -> torch.device:
    """`asked` as a device with an index, once a tensor could be made on it.

    Raises:
        PlacementError: it is no device, or not one of this machine.
    """
    try:
        device = torch.device(asked)  # type: ignore[call-overload]
        if device.type == "meta":
            raise RuntimeError("a meta tensor holds no values")
        if device.type == "cpu":
            return torch.device("cpu")
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise PlacementError(
            "cannot go to the device that was asked for",
            entry=entry,
            found=f"{asked!r} ({str(error).splitlines()[0]})",
            hint='Choose a device of this machine, such as device="cpu".',
        ) from error


def _as_entry(group: Group, key: str, candidate: Candidate) -> TensorEntry:
    """What a device or dtype rule gets to see: the entry, under the model's name."""
    if candidate.entry is not None:
        return replace(candidate.entry, key=key) if candidate.entry.key != key else candidate.entry
    return entry_like(key, group)


def entry_like(key: str, group: Group) -> TensorEntry:
    """A description, for a device rule, of a tensor that no file holds."""
    tensor = group.tensor
    return TensorEntry(
        key=key,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        nbytes=tensor.numel() * tensor.itemsize,
        location=str(tensor.device),
        storage="",
        chunks=(),
    )


def layout(entry: TensorEntry | None) -> tuple[bool, bool]:
    """(dense, mappable): one run without gaps or repetitions; usable where it lies in the file."""
    if entry is None or not entry.chunks:
        return True, True
    span = sum(chunk.nbytes for chunk in entry.chunks)
    repeats = any(
        size > 1 and stride == 0 for size, stride in zip(entry.shape, entry.stride, strict=True)
    )
    aligned = entry.chunks[0].offset % entry.itemsize == 0
    return span == entry.nbytes and not repeats, aligned and not repeats


def _unshare(steps: list[Step]) -> Iterator[Step]:
    """Give mapped tensors that overlap in the file memory of their own, all but the first.

    The model does not tie them, or they would be one step; two parameters over one memory would
    train each other.
    """
    end: dict[str, int] = {}
    changed: dict[int, Step] = {}
    mapped = [
        (step.entry.chunks[0], step)
        for step in steps
        if step.entry and step.entry.chunks and not step.owned and not step.in_place
    ]
    for chunk, step in sorted(mapped, key=lambda item: (item[0].file, item[0].offset)):
        if chunk.offset < end.get(chunk.file, 0):
            note = "shares bytes with another key of the file, which the model does not tie"
            changed[id(step)] = replace(step, source="read", owned=True, note=note)
        else:
            end[chunk.file] = chunk.offset + chunk.nbytes
    return (changed.get(id(step), step) for step in steps)

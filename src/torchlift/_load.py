"""`load`: plan, transfer, placement; all of it or nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint, MappedViews
from torchlift._model.commit import Commit, is_plain, restored
from torchlift._model.devices import ordinary_tensors
from torchlift._model.dtensor import held, is_sharded
from torchlift._model.fsdp import reshard, take_note
from torchlift._model.ranks import Agree, tensors_of, together
from torchlift._model.slots import Group, is_lazy
from torchlift._plan.decide import Making, Step
from torchlift._plan.fetch import Transform, prepare
from torchlift._plan.hooks import has_post_hooks, run_post_hooks
from torchlift._plan.match import Rename
from torchlift._plan.plan import LoadPlan, make_plan, resolve
from torchlift._plan.report import LoadReport
from torchlift._plan.rules import AnyMode, AnySource, DeviceRule, DtypeRule, Options
from torchlift._skeleton.skeleton import forget, make
from torchlift._system import collection_paused, uninterrupted
from torchlift.errors import IntegrityError, MismatchError
from torchlift.formats.verify import verify_index


def load(
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
    transform: Transform | None = None,
    verify: bool = False,
    progress: bool = False,
    collective: bool | None = None,
) -> LoadReport:
    """Load a checkpoint into a module, live or on meta, in the memory of one copy.

    Every tensor is prepared before the first one is placed, so an error leaves the module exactly
    as it was. An interrupt that arrives while values are being copied in place is delivered when
    all of them are there. Location tags in the file are ignored: see ``device``.

    Mapped weights belong to the file until they are written to. Never write the file in place while
    they are in use: ``torch.save(model.state_dict(), path)`` onto the path they came from truncates
    what it is about to read, and the process dies with a bus error. Save beside it and rename
    (`os.replace`), or load with ``source="read"``.

    Args:
        model: the module to load into.
        ckpt: a checkpoint, or a path that `torchlift.open` reads.
        root: keep only what is under this container of the checkpoint.
        rename: callable from a name in the checkpoint to a name in the model, or to None to drop.
        device: None, a device, a rule of `torchlift.remap`, or any callable from `TensorEntry` (its
            ``key`` is the model's name) to a device or None. None leaves a live tensor where it is
            and puts a meta one on the CPU; ``"disk"`` leaves the tensor mapped from the file.
        dtype: None, a floating-point dtype, or a callable from `TensorEntry` to a dtype or None. It
            casts floating-point parameters and persistent buffers, nothing else. None keeps a live
            tensor's dtype and gives a meta one the checkpoint's.
        strict: raise when keys are missing or unexpected. With False, a missing key keeps its live
            value, or is replayed from the skeleton's construction.
        ignore_mismatched: treat a key whose shape differs as missing instead of raising.
        mode: ``"assign"`` puts a new tensor in the slot; ``"copy"`` writes in place; ``"swap"``
            gives the same Python object new content, so that an optimizer keeps seeing it, and
            refuses before anything changes where somebody would keep the old content (see
            `torchlift.swap.preflight`); ``"auto"`` takes, per tensor, what preserves references and
            needs the least memory.
        source: ``"mmap"`` leaves the weights file-backed; ``"read"`` reads them into memory the
            process owns; ``"auto"`` maps on a local file system and reads on a network one, and
            wherever new memory must be filled anyway because of a cast or a move.
        transform: callable from (name in the model, tensor as the checkpoint holds it) to a tensor.
            It gets one tensor at a time, and its result is cast, moved and placed. For a DTensor
            parameter it gets a DTensor of that layout, of which only the local shard was read, and
            returns one: so that what it computes means the same on any mesh.
        verify: recompute the checksums that the file has, before anything else.
        progress: show a bar of bytes on stderr.
        collective: whether the ranks of a process group load together: before anything changes
            they exchange whether all are ready, and an error of one is raised by every one. None
            means when the model has DTensors; True also when it has none (a replica on each rank);
            False never.

    Returns:
        What was done, key by key; on a mesh, what this rank did.

    Raises:
        MismatchError: the names or shapes do not fit; one error that lists all of them.
        UnsafeError: a value could only be had by running code.
        PlacementError: a tensor cannot go where it was asked to go, or cannot be made.
        IntegrityError: a checksum is wrong, or the file changed or could not be read.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save(torch.nn.Linear(3, 2).state_dict(), path)
        >>> model = torchlift.skeleton(torch.nn.Linear, 3, 2)
        >>> report = torchlift.load(model, path)
        >>> model.weight.is_meta, report.source["weight"], report.bytes_read
        (False, 'mmap', 0)
    """
    start = time.perf_counter()
    options = Options(rename, device, dtype, strict, ignore_mismatched, mode, source)
    # A transform is the caller's code and may make garbage; without one, nothing here does.
    reshard(model)
    pause = collection_paused() if transform is None else nullcontext()
    with together(tensors_of(model), collective) as agree, pause:
        opened, owned = resolve(ckpt, root)
        try:
            if verify:
                _verify(opened)
            with restored(model, always=False):
                made = make_plan(model, opened, options, check_shapes=transform is None)
                run = _Run(made, transform, progress, strict, agree)
                missing, unexpected = _execute(model, opened, run)
        finally:
            if owned:
                opened.close()
        forget(model)
    report = _report(made, time.perf_counter() - start)
    return replace(report, missing_keys=missing, unexpected_keys=unexpected)


class _Run(NamedTuple):
    """What is to be done, and how."""

    plan: LoadPlan
    transform: Transform | None
    progress: bool
    strict: bool
    agree: Agree


def _execute(model: nn.Module, ckpt: Checkpoint, run: _Run) -> tuple[list[str], list[str]]:
    """Prepare every tensor, then place them all."""
    views, plan = MappedViews(ckpt.index), run.plan
    try:
        with _bar(run.progress, plan.bytes_to_read) as advance:
            with ordinary_tensors():
                tensors = list(prepare(plan.work.steps, views, run.transform, advance))
                made = _make(plan.work.makings)
            return _commit(model, run, tensors, made, advance)
    finally:
        views.close()


def _commit(
    model: nn.Module,
    run: _Run,
    tensors: list[tuple[Step, torch.Tensor]],
    made: list[tuple[Group, torch.Tensor]],
    advance: Callable[[int], object],
) -> tuple[list[str], list[str]]:
    """Place everything; return what is missing and unexpected after the modules had their say."""
    work = run.plan.work
    # Told apart while what is on meta still is: it is live as soon as it has its content.
    in_place = [item for item in tensors if item[0].in_place]
    fresh = [item for item in tensors if not item[0].in_place]
    hooked = has_post_hooks(model)
    # Code of the model's own may still refuse, on one rank of many: ask again after each.
    more = run.agree(hooked or bool(work.extra))
    with uninterrupted() as deliver, Commit() as commit:
        commit.when_undone(lambda: take_note(model))
        for module, state in work.extra:
            commit.extra_state(module, state)
        for module, name, value in work.attributes:
            commit.attribute(module, name, value)
        for group, tensor in made:
            commit.put(group, tensor)
        ways = {"assign": commit.assign, "copy": commit.put, "swap": commit.swap}
        for step, tensor in fresh:
            ways[step.mode](step.group, _shaped(step, tensor))
        # Last, because what was written over cannot be taken back: everything that can refuse,
        # here and in the checks of the plan, has had its chance, and so has an interrupt.
        # Subclasses come before plain tensors: they run code of their own, and are backed up.
        deliver()
        more = more and run.agree(hooked)
        for step, tensor in sorted(in_place, key=lambda item: is_plain(item[0].group.tensor)):
            commit.copy(step.group, _shaped(step, tensor), backup=hooked or more)
            advance(0 if step.owned else step.span)
        missing, unexpected = _after_hooks(model, run)
        if more:
            run.agree(False)
    return missing, unexpected


def _after_hooks(model: nn.Module, run: _Run) -> tuple[list[str], list[str]]:
    """What is missing and unexpected once the model's post-hooks have excused or added names."""
    plan = run.plan
    missing, unexpected = list(plan.missing_keys), list(plan.unexpected_keys)
    run_post_hooks(model, missing, unexpected)
    lacking = [name for name in missing if name not in plan.missing_keys]
    extra = [name for name in unexpected if name not in plan.unexpected_keys]
    if run.strict and (lacking or extra):
        raise MismatchError(
            "a hook of the model reports keys: "
            f"missing {', '.join(lacking) or 'none'}; unexpected {', '.join(extra) or 'none'}",
            file=plan.path,
            missing_keys=lacking,
            unexpected_keys=extra,
        )
    return missing, unexpected


def _shaped(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    slot = step.group.tensor
    slot = slot if is_sharded(tensor) else held(slot)
    return tensor if is_lazy(slot) or tensor.shape == slot.shape else tensor.view(slot.shape)


def _make(makings: tuple[Making, ...]) -> list[tuple[Group, torch.Tensor]]:
    """Replay what is on meta; move what is live and belongs elsewhere."""
    replayed = [item for item in makings if item.group.tensor.is_meta]
    tensors = make([item.group for item in replayed], [item.device for item in replayed])
    result = [
        (item.group, tensor.to(item.dtype)) for item, tensor in zip(replayed, tensors, strict=True)
    ]
    moved = [item for item in makings if not item.group.tensor.is_meta]
    return result + [
        (item.group, item.group.tensor.detach().to(item.device, item.dtype)) for item in moved
    ]


def _verify(ckpt: Checkpoint) -> None:
    report = verify_index(ckpt.index)
    if not report.ok:
        first = report.failed[0]
        raise IntegrityError(
            f"checksums are wrong in {len(report.failed)} of {len(report.checked)} storages",
            file=ckpt.path,
            entry=first.name,
            expected=f"crc32 {first.expected:08x}",
            found=f"crc32 {first.found:08x}",
            hint="The file is damaged: fetch it again, or restore it from a copy.",
        )


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[int], object]]:
    if not wanted:
        yield lambda _: None
        return
    from tqdm import tqdm

    bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="load")

    def update(nbytes: int) -> None:
        # A stderr that went away must not interrupt a load that is half placed.
        with suppress(OSError, ValueError):
            bar.update(nbytes)

    try:
        yield update
    finally:
        with suppress(OSError, ValueError):
            bar.close()


def _report(made: LoadPlan, seconds: float) -> LoadReport:
    shared = {item.name: getattr(made, item.name) for item in fields(LoadReport)}
    shared.update(seconds=seconds, bytes_read=made.bytes_to_read)
    return LoadReport(**shared)

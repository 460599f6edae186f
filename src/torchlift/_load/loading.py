"""`load`: plan, fetch, commit; all of it or nothing."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.kinds import Allow, dense_of
from torchlift._load.fetch import Fetched, Prepared, fetch_all
from torchlift._model.commit import Commit
from torchlift._model.dtensor import blocks, everything, is_dtensor, local_tensor, refresh_shards
from torchlift._model.handlers import is_plain
from torchlift._model.hooks import run_post_hooks
from torchlift._model.names import wrapped_names
from torchlift._model.ranks import Agree, RankGroup, has_group, rank
from torchlift._model.slots import ModuleTree, is_lazy, read_tree
from torchlift._plan.planner import LoadPlan, check_names, check_order, make_plan
from torchlift._plan.report import LoadReport
from torchlift._plan.rules import (
    AnyMode,
    AnySource,
    DeviceRule,
    DtypeRule,
    Options,
    Patterns,
    allowed,
)
from torchlift._plan.steps import Advance, Match, Rename, Transform
from torchlift._skeleton.construction import forget
from torchlift._sources.opening import Given, Origin, sources
from torchlift._sources.tensors import Copy, JoinedTensor, apart
from torchlift._store.url import Url
from torchlift._system.interrupts import Interruptible, uninterrupted
from torchlift._system.memory import collection_paused
from torchlift._system.text import clipped_list, count_of, printable, progress_bar
from torchlift.errors import IntegrityError, MismatchError, explain_calls
from torchlift.formats.integrity import (
    Checksums,
    VerifyReport,
    checksums,
    compared,
    hashes_of,
    hub_checksums,
    sums_of,
)

#: Values that are looked at at a time, and how many tensors an error lists.
_VALUES, _SHOWN = 1 << 20, 20
#: File -> the algorithm and the checksum of all of it that a hub records.
_Recorded = Mapping[str, tuple[str, str]]


@explain_calls
def load(
    model: nn.Module,
    ckpt: Given | Sequence[Given],
    *,
    root: str | None = None,
    include: Patterns = ("*",),
    exclude: Patterns = (),
    rename: Rename | None = None,
    device: DeviceRule = None,
    dtype: DtypeRule = None,
    strict: bool = True,
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    ignore_mismatched: bool = False,
    mode: AnyMode = "auto",
    source: AnySource = "auto",
    allow_classes: Allow = (),
    transform: Transform | None = None,
    verify: bool = False,
    check: Literal["finite"] | None = None,
    progress: bool = False,
    collective: bool | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load a checkpoint into a module, live or on meta, in the memory of one copy.

    Every tensor is prepared before the first one is placed, so an error leaves the module exactly
    as it was. Mapped weights belong to the file until they are written to: never write such a file
    in place. Of both, and of threads, the guide says more: "How loading works".

    Args:
        model: the module to load into.
        ckpt: a checkpoint, a path or file that `torchlift.open` reads, a state dict in memory, or
            a list of these, of which a later one wins; ``KeyReport.path`` says which gave what.
        root: keep only what is under this container of the checkpoint, of each where it is a list.
        include: patterns of names in the checkpoint, below `root` and before `rename`, of which one
            must fit; ``*`` stands for any text, dots included. One that fits nothing is an error.
        exclude: patterns of those to leave out. What the model has for a key that is left out may
            be missing: it stays as it is, or is replayed where it is on meta, with a warning of
            parameters.
        rename: a dict of names in the checkpoint to names in the model, or a callable from one to
            the other, and None to drop; or a rule of `torchlift.remap`, which may also merge
            tensors and split them.
        device: None, a device, a rule of `torchlift.remap`, or any callable from `TensorEntry` (its
            ``key`` is the model's name) to a device or None. None leaves a live tensor where it is
            and puts a meta one on the CPU; ``"disk"`` leaves the tensor mapped from the file,
            ``"meta"`` as it is, for a later load.
        dtype: None, a floating-point dtype or its name, ``"model"`` for what the model has, or a
            callable from `TensorEntry` to any of these. It casts floating-point parameters and
            persistent buffers, nothing else. None keeps a live tensor's dtype and gives a meta one
            the checkpoint's.
        strict: raise when keys are missing or unexpected. With False, a missing key keeps its live
            value, or is replayed from the skeleton's construction; parameters of which that is true
            give one warning, and where nothing at all fits it is an error.
        allow_missing: patterns of names that may be missing, such as ``["head.*"]``, also where
            `strict` is True; ``*`` stands for any text, dots included.
        allow_unexpected: patterns of names that may be unexpected.
        ignore_mismatched: treat a key whose shape differs as missing instead of raising.
        mode: ``"assign"`` puts a new tensor in the slot; ``"copy"`` writes in place; ``"swap"``
            gives the same Python object new content, so that an optimizer keeps seeing it, and
            refuses before anything changes where somebody would keep the old content (see
            `torchlift.swap.preflight`); ``"auto"`` takes, per tensor, what preserves references and
            needs the least memory.
        source: ``"mmap"`` leaves the weights file-backed (what is copied over a live tensor, as
            ``"auto"`` does it, is in the tensor's own memory all the same); ``"read"`` reads them
            into memory the process owns; ``"auto"`` maps what is on meta on a local file system,
            and reads on a network one, wherever new memory must be filled anyway because of a cast
            or a move, and for a live tensor, which is never left mapped without being asked for.
        allow_classes: tensor subclasses that a torch file names and that may be rebuilt, such as
            torchao's ``[Int8Tensor]``, for this call, and what they have in their attributes;
            nothing else that the file names is ever called.
        transform: callable from (name in the model, tensor as the checkpoint holds it) to a tensor.
            It gets one tensor at a time, and its result is cast, moved and placed. For a DTensor
            parameter it gets a DTensor of that layout, of which only the local shard was read, and
            returns one: so that what it computes means the same on any mesh.
        verify: Verify the file's checksums first, as `torchlift.verify` does, then load. This reads
            the file twice. Ranks that load together verify a part of it each. The report says
            for how many bytes there is no checksum.
        check: ``"finite"``: refuse a NaN or an infinity in what is loaded, as it is after a
            transform and a cast, in which a number may become too large; before anything changes.
            All values are read for it, some of them in memory at a time. None: none is looked at.
        progress: show a bar of bytes on stderr.
        collective: whether the ranks of a process group load together: before anything changes
            they exchange whether all are ready, and an error of one is raised by every one. None
            means when the model has DTensors; True also when it has none (a replica on each rank);
            False never.
        process_group: the ranks that load together instead of those; over gloo, what they agree
            on travels beside NCCL, whose watchdog ends ranks that wait for long.
        storage_options: Options of a URL's store, as for `torchlift.open`. A live model gets its
            values when all of them have arrived, so that they take memory twice until then.

    Returns:
        What was done, key by key; on a mesh, what this rank did.

    Raises:
        MismatchError: the names or shapes do not fit; one error that lists all of them.
        UnsafeError: a value could only be had by running code.
        PlacementError: a tensor cannot go where it was asked to go, or cannot be made.
        IntegrityError: a checksum is wrong, or the file changed or could not be read; or values are
            not finite, and `check` asks for that: one error that lists the tensors.
        ValueError: `check` is something else.

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
    options = Options(
        rename, device, dtype, strict, allow_missing, allow_unexpected, ignore_mismatched, mode,
        source, include, exclude, transform,
    )  # fmt: skip
    if check not in (None, "finite"):
        raise ValueError(f'check={check!r}: expected "finite" or None')
    check_order(model, ckpt)
    # A transform is the caller's code and may make garbage; without one, nothing here does.
    with collection_paused() if transform is None else nullcontext():
        report = _load(
            model, ckpt, options, root, allow_classes, verify, check, progress, collective,
            process_group, storage_options,
        )  # fmt: skip
    return replace(report, seconds=time.perf_counter() - start)


def _load(
    model: nn.Module,
    ckpt: Given | Sequence[Given],
    options: Options,
    root: str | None,
    allow_classes: Allow,
    verify: bool,
    check: str | None,
    progress: bool,
    collective: bool | None,
    process_group: torch.distributed.ProcessGroup | None,
    storage_options: Mapping[str, Any] | None,
) -> LoadReport:
    """Load, and be done with all records but the report: the collector looks at what is left."""
    transform = options.transform
    tree = read_tree(model)
    ranks = RankGroup.of_model(
        [group.tensor for group in tree.groups],
        collective=collective,
        process_group=process_group,
    )
    with ranks.together() as agree:
        with sources(ckpt, root, allow_classes, storage_options) as origin:
            before = origin.requests
            # First, so that no code of the model or the caller sees damaged values. All ranks that
            # load together take part: one of them may have asked for it.
            unchecked = 0
            if verify or ranks.groups:
                unchecked = require_intact(origin.checkpoints if verify else (), ranks)
            # What the model's own code changes is taken back whole, and so is what is placed.
            with uninterrupted() as deliver, Commit() as commit:
                plan = make_plan(tree, origin, options, commit)
                with progress_bar(progress, plan.bytes_to_read, "load") as advance:
                    with Interruptible():
                        fetched = fetch_all(plan, origin, transform, advance)
                        if check is not None:
                            _require_finite(fetched, origin.path)
                    agreed = Agreed(agree, deliver)
                    judge = partial(check_names, path=origin.path, options=options)
                    missing, unexpected, more = place(
                        tree, plan, fetched, origin, commit, agreed, judge, advance
                    )
                    if more:
                        agree(False)
                    # An interrupt that waited comes now, and half of the values has no backup.
                    commit.finish()
        forget(tree)
        _warn_of_missing(tree, plan, missing, options)
        shared = {item.name: getattr(plan, item.name) for item in fields(LoadReport)}
        changed = {"missing_keys": missing, "unexpected_keys": unexpected}
        asked = origin.requests - before
        costs = {
            "bytes_read": plan.bytes_to_read, "unchecked_nbytes": unchecked, "requests": asked
        }  # fmt: skip
        report = LoadReport(**{**shared, **changed, **costs})
        # The next thread could not swap what these still share the memory of.
        del plan, fetched
    return report


class Agreed(NamedTuple):
    """How the ranks of a load go on together.

    Attributes:
        agree: called with whether this rank wants to be asked again; says whether any does.
        deliver: delivers an interrupt that was held back.
        again: whether something that may fail comes after the model.
    """

    agree: Agree
    deliver: Callable[[], None]
    again: bool = False


def place(
    tree: ModuleTree,
    plan: LoadPlan,
    fetched: Fetched,
    origin: Origin,
    commit: Commit,
    agreed: Agreed,
    judge: Callable[[Match], None],
    advance: Advance,
) -> tuple[list[str], list[str], bool]:
    """Place everything; let the post-hooks of the model see it, and judge what they leave.

    Args:
        tree: the model.
        plan: what is to be done.
        fetched: the values.
        origin: where they come from.
        commit: takes everything back that is done here.
        agreed: how the ranks go on together.
        judge: raises where the names, of which hooks may have excused some, do not fit.
        advance: called with a number of bytes as they are copied.

    Returns:
        What is missing and unexpected after the post-hooks, and whether the ranks are to agree once
        more when the rest is done.

    Raises:
        MismatchError: a post-hook of the model reports keys, or excuses too few.
    """
    work, agree = plan._work, agreed.agree
    # Code of the model's own may still refuse, on one rank of many: ask again after each.
    later = work.hooked or origin.collective or agreed.again
    # Before the ranks agree, after which this one would stop alone.
    agreed.deliver()
    more = agree(later or bool(work.extra))
    commit.when_undone(lambda: refresh_shards(tree.modules))
    before = list[tuple[str, torch.Tensor]]()
    if work.extra or work.hooked:
        commit.keep_attributes(tree.modules)
        before = [(group.fqn, group.tensor) for group in tree.groups]  # others may hold them
    in_place = put_new(fetched, commit)
    if work.extra:
        # As in torch, `set_extra_state` sees the new values of its module's own tensors. Those that
        # rank 0 sends come in its order: the code sees the old ones.
        takers = set() if origin.collective else {id(module) for module, _ in work.extra}
        seen = [i for i in in_place if any(id(s.module) in takers for s in i[0].group.slots)]
        in_place = [item for item in in_place if not any(item is each for each in seen)]
        if seen:
            copy_in_place(seen, origin, commit, backup=True, advance=advance)
        tree.walk()
        with commit.watch(tree, before):
            for module, state in work.extra:
                commit.extra_state(module, state)
    # Last, because what was written over cannot be taken back without a copy: everything that can
    # refuse, here and in the checks of the plan, has had its chance, and so has an interrupt.
    if more or not has_group():
        agreed.deliver()
    more = more and agree(later)
    copy_in_place(in_place, origin, commit, backup=work.hooked or more, advance=advance)
    lists = plan.missing_keys, plan.unexpected_keys
    key_of, name_of = (
        (str, str) if work.naming is None else (work.naming.key, work.naming.canonical)
    )
    missing, unexpected = (list(map(key_of, names)) for names in lists)
    watch = None
    if work.hooked:
        tree.walk()
        watch = commit.watch(tree, before)
    # FSDP's own, which is no code of the model's, has the next forward pass use what was loaded.
    run_post_hooks(tree, missing, unexpected, work.given, watch)
    for call in work.own_calls:
        call.finish(missing, unexpected)
    missing, unexpected = (list(map(name_of, names)) for names in (missing, unexpected))
    if work.match.open:
        _judge(plan, missing, unexpected, judge)
    return missing, unexpected, more


def put_new(fetched: Fetched, commit: Commit) -> list[Prepared]:
    """Put new tensors into their slots; return the values that are to be copied in place."""
    # Before anything is placed: what is on meta is live as soon as it has its content.
    in_place, new = list[Prepared](), list[Prepared]()
    for item in fetched.steps:
        (in_place if item[0].in_place else new).append(item)
    for group, tensor in fetched.made:
        commit.put(group, tensor)
    ways = {"assign": commit.assign, "copy": commit.put, "swap": commit.swap}
    commit.fill([(step.group, value) for step, value in fetched.plain if step.mode == "swap"])
    new += [one for one in fetched.plain if one[0].mode != "swap"]
    for step, value in new:
        assert isinstance(value, torch.Tensor)
        ways[step.mode](step.group, _shaped(step.group.tensor, value))
    return in_place


def copy_in_place(
    steps: Sequence[Prepared],
    origin: Origin,
    commit: Commit,
    *,
    backup: bool,
    advance: Advance,
) -> None:
    """Write over live values; subclasses first, which run code of their own and are backed up."""
    copies: list[Copy] = []
    for step, value in steps:
        local = local_tensor(step.group.tensor)
        if backup or not is_plain(local):
            commit.keep_values(step.group.tensor, step.key)
        spans = everything(local.shape) if step.spans is None else step.spans
        copies.append(Copy(value, local, spans))
    if not origin.collective:  # which copies in the order of rank 0, and looks itself
        copies = apart(copies)
    origin.fill([copy for copy in copies if not is_plain(copy.target)])
    origin.fill([copy for copy in copies if is_plain(copy.target)])
    for step, _ in steps:
        advance(0 if step.owned else step.span)


def _judge(
    plan: LoadPlan, missing: list[str], unexpected: list[str], judge: Callable[[Match], None]
) -> None:
    """Refuse names that the post-hooks have added, and those that they have not excused."""
    known = set(plan.missing_keys), set(plan.unexpected_keys)
    lacking = [name for name in missing if name not in known[0]]
    extra = [name for name in unexpected if name not in known[1]]
    if lacking or extra:
        raise MismatchError(
            "a hook of the model reports keys: "
            f"missing {clipped_list(map(repr, lacking)) or 'none'}; "
            f"unexpected {clipped_list(map(repr, extra)) or 'none'}",
            file=plan.path,
            missing_keys=lacking,
            unexpected_keys=extra,
        )
    match = plan._work.match
    match.open = False
    match.missing = [name for name in missing if name not in match.mismatched]
    match.unexpected = unexpected
    judge(match)


def _warn_of_missing(
    tree: ModuleTree, plan: LoadPlan, missing: Sequence[str], options: Options
) -> None:
    """Name the parameters that train on although nothing was loaded into them."""
    if not missing:
        return
    parameters = {
        name for g in tree.groups if isinstance(g.tensor, nn.Parameter) for name in g.names
    }
    if (naming := wrapped_names(tree)) is not None:
        parameters = set(map(naming.canonical, parameters))
    # Of a live one the caller knows; of a replayed one the values are new.
    left_out = plan._work.match.left_out.difference(plan.replayed)
    by_name = allowed(missing, options.allow_missing)
    excused = {*plan.mismatched, *plan.deferred, *by_name, *left_out}
    lacking = [name for name in missing if name in parameters and name not in excused]
    if lacking:
        warnings.warn(
            f"{count_of(len(lacking), 'parameter')} got no value from {printable(plan.path)}: "
            f"{clipped_list(lacking)}. Allow what is meant to be so by name: allow_missing=[...].",
            stacklevel=5,
        )


def _shaped(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the model's shape: a shard of nothing may have another."""
    slot = like if is_dtensor(tensor) else local_tensor(like)
    return tensor if is_lazy(slot) or tensor.shape == slot.shape else tensor.view(slot.shape)


def _require_finite(fetched: Fetched, path: str) -> None:
    """Refuse values that are NaN or infinite, as they will be once they are placed.

    Raises:
        IntegrityError: there are some.
    """
    found: dict[str, tuple[int, int]] = {}
    for step, value in (*fetched.plain, *fetched.steps):
        slices = [one for one, _ in value.slices] if isinstance(value, JoinedTensor) else [value]
        dtype = local_tensor(step.group.tensor).dtype if step.in_place else None
        nan = inf = 0
        for each in slices:
            assert isinstance(each, torch.Tensor)  # others come from rank 0, which `load` does not
            for dense in dense_of(local_tensor(each).detach(), indices=False):
                for block in blocks(dense.shape, _VALUES):
                    some = _not_finite(dense[tuple(slice(*span) for span in block)], dtype)
                    nan, inf = nan + some[0], inf + some[1]
        if nan or inf:
            found[step.key] = nan, inf
    if not found:
        return
    lines = [f"{key}: {nan:,} NaN, {inf:,} infinite" for key, (nan, inf) in found.items()]
    more = len(lines) - _SHOWN
    error = IntegrityError(
        f"{count_of(len(found), 'tensor')} to load with values that are not finite",
        file=path,
        hint="Where the file has finite ones (torchlift.open(path).stats(key)), dtype= is too "
        "small for them; else take an older checkpoint. check=None loads them.",
        lists=lines if more <= 0 else [*lines[:_SHOWN], f"and {more:,} more"],
    )
    error.not_finite = found
    raise error


def _not_finite(values: torch.Tensor, dtype: torch.dtype | None) -> tuple[int, int]:
    """Return how many values of a block are NaN, and how many infinite, in a dtype."""
    # First, as integers become infinite, too, and so do complex numbers.
    values = values.to(dtype or values.dtype)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or values.dtype == torch.float4_e2m1fn_x2:
        return 0, 0
    if values.itemsize == 1:  # of which torch knows no smallest one
        values = values.float()
    # In one pass, without memory: a NaN is the smallest and the largest.
    low, high = values.aminmax()
    if bool(low.isfinite()) and bool(high.isfinite()):
        return 0, 0
    return int(values.isnan().sum()), int(values.isinf().sum())


def require_intact(
    ckpts: Sequence[Checkpoint],
    group: RankGroup | None = None,
    *,
    only: Collection[str] | None = None,
) -> int:
    """Return for how many bytes there is no checksum; all checksums that there are match.

    Args:
        ckpts: the checkpoints.
        group: ranks that all call this; those with the same checkpoints read a part of them each.
        only: the storages that count; None: all.

    Raises:
        IntegrityError: one of them is wrong.
    """
    ranks = group or RankGroup([])

    def list_checksums() -> tuple[list[tuple[Checksums, _Recorded]], str]:
        found = [_recorded(ckpt, only) for ckpt in ckpts]
        return found, hashlib.sha256(repr(found).encode()).hexdigest() if ckpts else ""

    known, digests = ranks.run(list_checksums)
    if not any(digests.values()):
        return 0
    peers = [who for who, digest in digests.items() if digest == digests[rank()]]
    part = peers.index(rank()), len(peers)

    def compute() -> tuple[None, list[tuple[dict[int, int | None], dict[str, int]]]]:
        return None, [
            (sums_of(ckpt._index, of_parts, part=part), hashes_of(ckpt._index, of_files, part=part))
            for ckpt, (of_parts, of_files) in zip(ckpts, known, strict=True)
        ]

    by_rank, unchecked = ranks.run(compute)[1], 0
    for number, (ckpt, (of_parts, of_files)) in enumerate(zip(ckpts, known, strict=True)):
        sums, hashes = zip(*(by_rank[who][number] for who in peers), strict=True)
        report = compared(
            ckpt._index, of_parts, dict(ChainMap(*sums)), of_files, dict(ChainMap(*hashes))
        )
        if not report.ok:
            raise _damaged(ckpt, report)
        unchecked += report.unchecked_nbytes
    return unchecked


def _recorded(ckpt: Checkpoint, only: Collection[str] | None) -> tuple[Checksums, _Recorded]:
    """Return the checksums that a checkpoint has, and those that a hub has of whole files.

    The latter where something has no other, as such a file is read once more for it; and of none
    behind a URL, which would be downloaded twice.
    """
    index = ckpt._index
    storages, records = checksums(index)
    names = index.storages if only is None else only
    files = {index.storages[name].file for name in names if name not in storages} | {*index.guides}
    counted = {name: storage for name, storage in storages.items() if name in names}
    by_hub = {
        file: each
        for file, each in hub_checksums(index).items()
        if file in files and not isinstance(file, Url)
    }
    return (counted, records), by_hub


def _damaged(ckpt: Checkpoint, report: VerifyReport) -> IntegrityError:
    first, total = report.failed[0], len(report.checked) + len(report.records)
    storage = ckpt._index.storages.get(first.name)
    where = storage.file if storage is not None else ckpt.path
    stamp = ckpt._index.files.get(where)
    of_file = first.name in report.files
    wrong = f"checksums are wrong in {len(report.failed)} of {total} records"
    return IntegrityError(
        "the checksum of the whole file, as the hub records it, is wrong" if of_file else wrong,
        file=first.name if of_file else (stamp and stamp.shown) or where,
        entry=None if of_file else first.name,
        expected=first.right,
        found=first.what,
        hint="The file is damaged: fetch it again, or restore it from a copy.",
    )

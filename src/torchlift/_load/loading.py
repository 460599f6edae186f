"""`load`: match names, decide, fetch, place. It loads all or nothing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.kinds import Allow
from torchlift._load.checks import require_finite, require_intact
from torchlift._load.fetch import Fetched, Prepared, fetch_all
from torchlift._model.commit import Commit
from torchlift._model.dtensor import everything, is_dtensor, local_tensor, refresh_shards
from torchlift._model.handlers import is_plain
from torchlift._model.names import wrapped_names
from torchlift._model.ranks import Agree, RankGroup, has_group
from torchlift._model.slots import ModuleTree, is_lazy, read_tree
from torchlift._plan.planner import LoadPlan, decide, match_names, require_model
from torchlift._plan.report import LoadReport
from torchlift._plan.rules import (
    Advance,
    AnyMode,
    AnySource,
    DeviceRule,
    DtypeRule,
    Options,
    Patterns,
    Rename,
    Transform,
    allowed,
)
from torchlift._skeleton.construction import forget
from torchlift._sources.opening import Given, open_source
from torchlift._sources.tensors import (
    Copy,
    FileTensor,
    copy_overlapping_sources,
    copy_values,
    count_cast,
)
from torchlift._system.interrupts import Interruptible, uninterrupted
from torchlift._system.memory import collection_paused
from torchlift._system.text import clipped_list, count_of, printable, progress_bar
from torchlift.errors import explain_calls


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
    """Load a checkpoint into a model, live or on meta, in the memory of one copy.

    torchlift prepares every tensor before it changes the model. If a load fails, the model is
    exactly as it was.

    Do not overwrite a file in place while a model uses weights that are mapped from it: the weights
    change, or the process dies. Pass ``source="read"`` to copy them. See "How loading works" in the
    guide, for threads and meshes also.

    Args:
        model: The module to load into.
        ckpt: A path, a URL, a file object, a `Checkpoint`, a state dict, or a list of these. In a
            list, a later checkpoint wins.
        root: The container to load, such as ``"model"``. See :ref:`arg-root`.
        include: Glob patterns of checkpoint keys to load. See :ref:`arg-include`.
        exclude: Glob patterns of checkpoint keys to skip. Skipped keys may be missing.
        rename: A dict, a callable or a rule of `torchlift.remap` that maps checkpoint keys to names
            of the model. See :ref:`arg-rename`.
        device: A device, a rule of `torchlift.remap`, or a callable from `TensorEntry`. Default:
            live tensors stay where they are, meta tensors go to the CPU. See :ref:`arg-device`.
        dtype: A dtype, its name, ``"model"``, or a callable from `TensorEntry`. It casts parameters
            and persistent buffers that are floating-point. See :ref:`arg-dtype`.
        strict: Whether missing and unexpected keys are an error. See :ref:`arg-strict`.
        allow_missing: Glob patterns of model names that may be missing, such as ``["head.*"]``.
        allow_unexpected: Glob patterns of checkpoint keys that may be unexpected.
        ignore_mismatched: Whether a key with another shape counts as missing. If `allow_missing`
            names some, it must name this key. Default: another shape is an error.
        mode: ``"assign"``, ``"copy"``, ``"swap"`` or ``"auto"``: whether a tensor is replaced, is
            written in place, or stays the same object with new content. See :ref:`arg-mode`.
        source: ``"mmap"``, ``"read"`` or ``"auto"``: whether weights stay in the file, or are read
            into allocated memory. See :ref:`arg-source`.
        allow_classes: Tensor subclasses that may be rebuilt. See :ref:`arg-allow-classes`.
        transform: A callable from (name in the model, tensor of the checkpoint) to a tensor. For a
            sharded parameter, the tensor is a DTensor of this rank's shard.
        verify: Whether to verify all checksums first. The file is then read twice.
        check: ``"finite"`` refuses NaN and infinite values after the cast. Default: no check.
        progress: Whether to show a progress bar on stderr.
        collective: Whether all ranks succeed or fail together. Default: if the model has DTensors.
            See :ref:`arg-collective`.
        process_group: The ranks that load together. Default: the ranks of the meshes.
        storage_options: Options for the store of a URL. See :ref:`arg-storage-options`.

    Returns:
        A report of each key. On a mesh, it reports what this rank loaded.

    Raises:
        MismatchError: If names or shapes do not match. One error lists all of them.
        PlacementError: If a tensor cannot go to its device, or cannot be made.
        UnsafeError: If a value would need code from the file.
        IntegrityError: If a checksum is wrong, the file changes, or `check` finds a value.

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
        source, include, exclude, transform, root, allow_classes, storage_options, True,
        verify, check, progress, collective, process_group,
    )  # fmt: skip
    require_model(model, "load")
    # Without a transform, which is code of the caller, a load makes no cyclic garbage.
    with collection_paused() if transform is None else nullcontext():
        report = _load(model, ckpt, options)
    return replace(report, seconds=time.perf_counter() - start)


def _load(model: nn.Module, ckpt: Given | Sequence[Given], options: Options) -> LoadReport:
    """Match names, decide, fetch, agree, place, report. No record but the report is kept."""
    tree = read_tree(model)
    ranks = RankGroup.of_model(
        [group.tensor for group in tree.groups],
        collective=options.collective,
        process_group=options.process_group,
    )
    with (
        ranks.together() as agree,
        open_source(ckpt, options.root, options.allow_classes, options.storage_options) as source,
        uninterrupted() as deliver,
        Commit() as commit,
    ):
        with Interruptible():
            # First, so that no code of the model or the caller sees damaged values. All ranks that
            # load together take part, because one of them may have passed verify=True.
            unchecked = 0
            if options.verify or ranks.groups:
                unchecked = require_intact(source.checkpoints if options.verify else (), ranks)
        matched = match_names(tree, source, options, commit)
        plan = decide(matched, tree, source, options)
        with progress_bar(options.progress, plan.bytes_to_read, "load") as advance:
            with Interruptible():
                values = fetch_all(plan, source, options.transform, advance)
                if options.check is not None:
                    require_finite(values, source.path)
            placed = place(tree, values, Turn(commit, agree, deliver, advance))
            if placed.asks_again:
                agree(False)
            # A Ctrl-C that waited comes after this line. It must not undo anything: values that
            # were copied in place have no backup.
            commit.finish()
        requests = source.requests
    forget(tree)
    _warn_of_missing(tree, plan, options)
    return _report(plan, placed, unchecked, requests)


class Turn(NamedTuple):
    """The tools of `place`, besides a model and its values.

    Attributes:
        commit: Takes back everything that `place` does.
        agree: Called with whether this rank must agree once more. Returns whether any rank must.
        deliver: Delivers an interrupt that was held back.
        advance: Called with a number of bytes as they are copied.
        again: Whether something that may fail comes after the model.
    """

    commit: Commit
    agree: Agree
    deliver: Callable[[], None]
    advance: Advance
    again: bool = False


class Placed(NamedTuple):
    """The result of `place`.

    Attributes:
        asks_again: Whether the ranks agree once more when the rest is done.
        overflowed: Key of a step -> the number of values that overflowed in a cast.
    """

    asks_again: bool
    overflowed: dict[str, int]


def place(tree: ModuleTree, values: Fetched, turn: Turn) -> Placed:
    """Place everything. Nothing of the model runs."""
    commit = turn.commit
    # A Ctrl-C after the ranks agree would stop this rank alone.
    turn.deliver()
    again = turn.agree(turn.again)
    commit.when_undone(lambda: refresh_shards(tree.modules))
    in_place, overflowed = put_new(values, commit), dict(values.overflowed)
    # Copies in place come last, because they cannot be undone without a backup. Everything that can
    # raise has run by now, and a Ctrl-C is delivered before.
    if again or not has_group():
        turn.deliver()
    overflowed |= copy_in_place(in_place, commit, backup=again, advance=turn.advance)
    refresh_shards(tree.modules)
    return Placed(again, overflowed)


def put_new(fetched: Fetched, commit: Commit) -> list[Prepared]:
    """Put new tensors into their slots. Return the values to copy in place."""
    # Sorted before anything is placed: a tensor on meta is live as soon as it has its content.
    in_place, new = list[Prepared](), list[Prepared]()
    for item in fetched.steps:
        (in_place if item[0].in_place else new).append(item)
    for group, tensor in fetched.made:
        commit.put(group, tensor)
    ways = {"assign": commit.assign, "swap": commit.swap}
    commit.fill([(step.group, value) for step, value in fetched.plain if step.mode == "swap"])
    new += [one for one in fetched.plain if one[0].mode != "swap"]
    for step, value in new:
        assert isinstance(value, torch.Tensor)
        ways[step.mode](step.group, _reshape_like(step.group.tensor, value))
    return in_place


def copy_in_place(
    steps: Sequence[Prepared], commit: Commit, *, backup: bool, advance: Advance
) -> dict[str, int]:
    """Copy values in place. Return key -> the number of values that overflowed in the cast.

    Subclasses come first: they run their own code and are backed up.

    Raises:
        IntegrityError: If a file was overwritten meanwhile. The tensors then have mixed values.
    """
    copies: list[Copy] = []
    for step, value in steps:
        local = local_tensor(step.group.tensor)
        if backup or not is_plain(local):
            commit.keep_values(step.group.tensor, step.key)
        spans = everything(local.shape) if step.target.spans is None else step.target.spans
        copies.append(Copy(value, local, spans))
    needed = copy_overlapping_sources(copies)
    copy_values([copy for copy in needed if not is_plain(copy.target)])
    copy_values([copy for copy in needed if is_plain(copy.target)])
    found = {step.candidate.views for step, _ in steps if isinstance(step.candidate, FileTensor)}
    for views in found:
        views.files.check()
    for step, _ in steps:
        advance(0 if step.owned else step.span)
    pairs = ((step.key, copy) for (step, _), copy in zip(steps, copies, strict=True))
    counts = {key: count_cast(copy) for key, copy in pairs if is_plain(copy.target)}
    return {key: count for key, count in counts.items() if count}


def _report(plan: LoadPlan, placed: Placed, unchecked: int, requests: int) -> LoadReport:
    """Return the report of a load: what its plan has in common with a report, and its costs."""
    shared = {item.name: getattr(plan, item.name) for item in fields(LoadReport)}
    changed: dict[str, Any] = {
        "bytes_read": plan.bytes_to_read,
        "unchecked_nbytes": unchecked,
        "overflowed": {plan._match.canonical(k): n for k, n in placed.overflowed.items()},
        "requests": requests,
    }
    return LoadReport(**{**shared, **changed})


def _warn_of_missing(tree: ModuleTree, plan: LoadPlan, options: Options) -> None:
    """Warn of parameters without a value from the checkpoint."""
    missing = plan.missing_keys
    if not missing:
        return
    parameters = {
        name for g in tree.groups if isinstance(g.tensor, nn.Parameter) for name in g.names
    }
    if (naming := wrapped_names(tree)) is not None:
        parameters = set(map(naming.canonical, parameters))
    # The caller left these out on purpose. But a replayed parameter has new values.
    left_out = plan._match.left_out.difference(plan.replayed)
    by_name = allowed(missing, options.allow_missing)
    excused = {*plan.mismatched, *plan.deferred, *by_name, *left_out}
    lacking = [name for name in missing if name in parameters and name not in excused]
    if lacking:
        warnings.warn(
            f"{count_of(len(lacking), 'parameter')} got no value from {printable(plan.path)}: "
            f"{clipped_list(lacking)}. If you intend this, pass allow_missing=[...] with these "
            "names.",
            stacklevel=5,
        )


def _reshape_like(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the model's shape: an empty shard may have another shape."""
    slot = like if is_dtensor(tensor) else local_tensor(like)
    return tensor if is_lazy(slot) or tensor.shape == slot.shape else tensor.view(slot.shape)

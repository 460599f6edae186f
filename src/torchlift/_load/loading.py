"""`load`: name, match, decide, fetch, place. It loads all or nothing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from torchlift._checkpoint.kinds import Allow
from torchlift._load.checks import require_finite, require_intact
from torchlift._load.fetch import fetch_all
from torchlift._load.place import copy_in_place, put_new
from torchlift._model.commit import Commit
from torchlift._model.dtensor import refresh_shards
from torchlift._model.ranks import RankGroup
from torchlift._model.slots import read_tree
from torchlift._plan.canonical import canonical
from torchlift._plan.decide import decide
from torchlift._plan.loading_code import through_loading_code
from torchlift._plan.match import Match, match
from torchlift._plan.report import LoadReport, describe
from torchlift._plan.rules import (
    AnyMode,
    AnySource,
    DeviceRule,
    DtypeRule,
    Options,
    Patterns,
    Rename,
    Transform,
    allowed,
    require_model,
)
from torchlift._skeleton.construction import forget
from torchlift._sources.opening import Given, open_source
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
        root=root, include=include, exclude=exclude, rename=rename, device=device, dtype=dtype,
        strict=strict, allow_missing=allow_missing, allow_unexpected=allow_unexpected,
        ignore_mismatched=ignore_mismatched, mode=mode, source=source, allow_classes=allow_classes,
        transform=transform, verify=verify, check=check, progress=progress, collective=collective,
        process_group=process_group, storage_options=storage_options,
    )  # fmt: skip
    require_model(model, "load")
    # Without a transform, which is code of the caller, a load makes no cyclic garbage.
    with collection_paused() if transform is None else nullcontext():
        report = _load(model, ckpt, options)
    return replace(report, seconds=time.perf_counter() - start)


def _load(model: nn.Module, ckpt: Given | Sequence[Given], options: Options) -> LoadReport:
    """Name, match, decide, fetch, agree, place, report. No record but the report is kept."""
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
        named = canonical(tree, source, options)
        if named.code is not None:
            named = through_loading_code(named, source, options, commit)
        # From here on, no code of the model runs.
        matched = match(named, source, options)
        decided = decide(matched, tree, options)
        shared = describe(decided, source)
        with progress_bar(options.progress, decided.bytes_to_read, "load") as advance:
            with Interruptible():
                values = fetch_all(decided, source, options.transform, advance)
                if options.check is not None:
                    require_finite(values, source.path)
            commit.when_undone(partial(refresh_shards, tree.modules))
            in_place = put_new(values, commit)
            # A Ctrl-C after the ranks agree would stop this rank alone.
            deliver()
            agree(False)
            overflowed = copy_in_place(in_place, commit, advance=advance)
            refresh_shards(tree.modules)
            # A Ctrl-C that waited comes after this line. It must not undo anything: values that
            # were copied in place have no backup.
            commit.finish()
        requests = source.requests
    forget(tree)
    report = LoadReport(
        **shared,
        bytes_read=decided.bytes_to_read,
        unchecked_nbytes=unchecked,
        overflowed=values.overflowed | overflowed,
        requests=requests,
    )
    _warn_of_missing(report, matched, options)
    return report


def _warn_of_missing(report: LoadReport, matched: Match, options: Options) -> None:
    """Warn of parameters without a value from the checkpoint."""
    missing = report.missing_keys
    if not missing:
        return
    parameters = {name for group in matched.groups if group.is_parameter for name in group.names}
    # The caller left these out on purpose. But a replayed parameter has new values.
    left_out = matched.left_out.difference(report.replayed)
    by_name = allowed(missing, options.allow_missing)
    excused = {*report.mismatched, *report.deferred, *by_name, *left_out}
    lacking = [name for name in missing if name in parameters and name not in excused]
    if lacking:
        warnings.warn(
            f"{count_of(len(lacking), 'parameter')} got no value from {printable(report.path)}: "
            f"{clipped_list(lacking)}. If you intend this, pass allow_missing=[...] with these "
            "names.",
            stacklevel=5,
        )

"""`plan`: match names, decide how each tensor is loaded, and count what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchlift._checkpoint.kinds import Allow
from torchlift._model.commit import Commit, content_bytes
from torchlift._model.dtensor import local_shape, local_tensor
from torchlift._model.handlers import is_plain
from torchlift._model.slots import ModuleTree, is_lazy, read_tree
from torchlift._plan.canonical import canonical
from torchlift._plan.decide import Decided, Step, decide
from torchlift._plan.loading_code import through_loading_code
from torchlift._plan.match import CheckNames, match
from torchlift._plan.report import LoadReport, describe, summarise
from torchlift._plan.rules import (
    AnyMode,
    AnySource,
    DeviceRule,
    DtypeRule,
    Options,
    Patterns,
    Rename,
    Transform,
    require_model,
)
from torchlift._sources.opening import Given, Origin, open_source
from torchlift._store.url import Url
from torchlift._system.interrupts import uninterrupted
from torchlift._system.memory import free_memory
from torchlift._system.text import Facts, count_of, human
from torchlift._transfer.reading import BUDGET, RING, STAGING, count_ranges
from torchlift.errors import explain_calls
from torchlift.formats.index import TensorEntry

#: The way out if a load needs more memory than is free.
_LEAVE_IN_FILE = (
    'source="mmap" without dtype= leaves the weights in the file. torchlift.convert casts a file '
    "in blocks of about 32 MiB."
)


@dataclass(frozen=True, repr=False)
class LoadPlan(LoadReport):
    """The plan of a load. `plan` returns it.

    Attributes:
        peak_bytes: Estimate of the anonymous memory that the load adds at its peak, in bytes.
        bytes_to_read: Bytes that will be copied out of the files.
        free_bytes: Free memory when the plan was made, in bytes. A limit of a container or a batch
            job counts. None: the system does not report it.
    """

    peak_bytes: int = 0
    bytes_to_read: int = 0
    free_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the lists of names and the costs, as ``torchlift plan --json`` prints them."""
        costs = {
            "bytes_to_read": self.bytes_to_read,
            "peak_bytes": self.peak_bytes,
            "free_bytes": self.free_bytes,
        }
        if self.requests:
            costs["requests"] = self.requests
        return {**super().to_dict(), **costs}

    def _summary(self) -> tuple[str, Facts]:
        peak = human(self.peak_bytes)
        asked = f" in {count_of(self.requests, 'request')}" if self.requests else ""
        costs = f"to read {human(self.bytes_to_read)}{asked}, anonymous memory at the peak {peak}"
        facts: Facts = [("", costs)]
        if self.free_bytes is not None and self.peak_bytes > self.free_bytes:
            free = f"only {human(self.free_bytes)} of memory are free here"
            facts.append(("does not fit", f"{free}. {_LEAVE_IN_FILE}"))
        elif self.free_bytes is not None:
            facts = [("", f"{costs}: it fits into the free memory")]
        return f"plan: {self._size}", [*facts, *summarise(self)]


@explain_calls
def plan(
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
    present: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadPlan:
    """Plan a load without changing the model.

    The plan lists what a `load` with the same arguments would load, how, and at what cost. Tensors
    of `allow_classes` are made to see whether they match, and so are sparse and quantised ones.
    Hooks and overrides of the model run, because they may change the names. They see the values of
    the file, and what they change is undone. No other weights are read.

    Args:
        model: A module, live or on meta.
        ckpt: A path, a URL, a file object, a `Checkpoint`, a state dict, or a list of these.
        root: The container to load, such as ``"model"``. See :ref:`arg-root`.
        include: Glob patterns of checkpoint keys to load. See :ref:`arg-include`.
        exclude: Glob patterns of checkpoint keys to skip.
        rename: A dict, a callable or a rule of `torchlift.remap`. See :ref:`arg-rename`.
        device: A device, a rule of `torchlift.remap`, or a callable. See :ref:`arg-device`.
        dtype: A dtype, its name, ``"model"``, or a callable. See :ref:`arg-dtype`.
        strict: Whether missing and unexpected keys are an error. See :ref:`arg-strict`.
        allow_missing: Glob patterns of model names that may be missing, such as ``["head.*"]``.
        allow_unexpected: Glob patterns of checkpoint keys that may be unexpected.
        ignore_mismatched: Whether a key with another shape counts as missing. If `allow_missing`
            names some, it must name this key.
        mode: ``"assign"``, ``"copy"``, ``"swap"`` or ``"auto"``. See :ref:`arg-mode`.
        source: ``"mmap"``, ``"read"`` or ``"auto"``. See :ref:`arg-source`.
        allow_classes: Tensor subclasses that may be rebuilt. See :ref:`arg-allow-classes`.
        transform: The transform of the load. It is not called: shapes are not compared, and the
            estimate contains new memory for each result.
        present: Whether the devices must exist here. False plans for another machine.
        storage_options: Options for the store of a URL. See :ref:`arg-storage-options`.

    Returns:
        The plan. Print it to get a summary.

    Raises:
        MismatchError: If names or shapes do not match. One error lists all of them.
        UnsafeError: If a value would need code from the file.
        PlacementError: If a tensor cannot go to its device.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save(torch.nn.Linear(3, 2).state_dict(), path)
        >>> p = torchlift.plan(torchlift.skeleton(torch.nn.Linear, 3, 2), path)
        >>> list(p.loaded), p.bytes_to_read
        (['weight', 'bias'], 0)
    """
    options = Options(
        root=root, include=include, exclude=exclude, rename=rename, device=device, dtype=dtype,
        strict=strict, allow_missing=allow_missing, allow_unexpected=allow_unexpected,
        ignore_mismatched=ignore_mismatched, mode=mode, source=source, allow_classes=allow_classes,
        transform=transform, present=present, storage_options=storage_options,
    )  # fmt: skip
    require_model(model, "plan")
    with (
        open_source(ckpt, root, allow_classes, storage_options) as opened,
        uninterrupted(),
        Commit() as commit,
    ):
        try:
            decided = make_plan(read_tree(model), opened, options, commit)
            return LoadPlan(
                **describe(decided, opened),
                requests=opened.requests + _count_requests(decided.steps),
                peak_bytes=_peak(decided, opened, options),
                bytes_to_read=decided.bytes_to_read,
                free_bytes=free_memory(),
            )
        finally:
            commit.undo()


def make_plan(
    tree: ModuleTree,
    source: Origin,
    options: Options,
    commit: Commit,
    *,
    check: CheckNames | None = None,
) -> Decided:
    """Plan a load from an open source. FSDP2's shards must be in their slots.

    Args:
        tree: The model. Its own loading code runs here.
        source: The source of the values.
        options: The caller's options.
        commit: Takes back what the loading code changes in its modules.
        check: Raises an error if the names do not match, in place of `check_names`. The names of
            the source are then keys of the model's state dict.

    Raises:
        MismatchError: If names or shapes do not match.
        UnsafeError: If a value that the model needs is blocked.
        PlacementError: If a tensor cannot be placed as the options want, or cannot be made.
    """
    named = canonical(tree, source, options, has_keys=check is not None)
    if named.code is not None:
        named = through_loading_code(named, source, options, commit)
    return decide(match(named, source, options, check=check), tree, options)


def _peak(decided: Decided, source: Origin, options: Options) -> int:
    """Estimate the anonymous memory, in bytes, that a load takes at its peak."""
    matched = decided.matched
    steps = [step for step in decided.steps if not step.plain]
    staged = sum(
        step.span
        for step in steps
        if step.route == "read" and (step.memory.type != "cpu" or step.one.dtype != step.dtype)
    )
    made = sum(
        item.group.tensor.numel() * item.dtype.itemsize
        for item in decided.makings
        if item.device.type == "cpu" and item.last is None
    )
    # A backup exists while a subclass may fail to copy.
    kept = (matched.outcome.nbytes if matched.outcome else 0) + sum(
        content_bytes(local_tensor(step.group.tensor))
        for step in steps
        if step.in_place and not is_plain(local_tensor(step.group.tensor))
        if step.group.tensor.device.type == "cpu"
    )
    new = sum(_count_new_bytes(step) for step in steps if step.owned)
    is_sent = any(step.route == "read" and step.memory.type != "cpu" for step in steps)
    staged = min(staged, RING if is_sent or source.is_away else STAGING)
    # Compressed arrays are inflated one at a time.
    chunks = (chunk for step in steps if step.entry for chunk in step.entry.chunks)
    inflated = max((chunk.packed.size for chunk in chunks if chunk.packed), default=0)
    kept += sum(one.nbytes for one in matched.kept.values())
    if options.transform is not None:
        kept += _count_transformed_bytes(decided.steps)
    return new + made + kept + staged + inflated


def _count_requests(steps: Sequence[Step]) -> int:
    """Return how many range requests to URLs the steps will make."""
    found = list[tuple[TensorEntry, bool]]()
    for step in steps:
        entry = step.entry
        if entry is None or not entry.chunks or not isinstance(entry.chunks[0].file, Url):
            continue
        device, dtype = step.fetched_as
        found.append((entry, device.type == "cpu" and dtype == step.one.dtype))
    return count_ranges(found)


def _count_transformed_bytes(steps: Sequence[Step]) -> int:
    """Return the bytes that a transform takes on the host, for its arguments and its results.

    Each result may be new memory, and a result for a copy in place waits until all are made.
    """
    most = max((step.one.nbytes for step in steps), default=0)
    total = sum(step.one.nbytes for step in steps)
    stay = [step for step in steps if step.memory.type == "cpu" and _count_new_bytes(step) == 0]
    return min(total, max(most, BUDGET // 4)) + sum(
        step.group.tensor.numel() * step.dtype.itemsize
        for step in stay
        if not is_lazy(step.group.tensor)
    )


def _count_new_bytes(step: Step) -> int:
    """Return the anonymous memory, in bytes, that the new tensor of a step takes on the host."""
    if step.memory.type != "cpu" or not step.owned:
        return 0
    if step.is_handled:
        return content_bytes(step.group.tensor)
    entry = step.one.entry
    if entry is not None and entry.kind is not None:
        return entry.nbytes
    shape = step.one.shape if step.spans is None else local_shape(step.spans)
    return math.prod(shape) * step.dtype.itemsize

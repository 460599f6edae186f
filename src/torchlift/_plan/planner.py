"""`plan`: match names, decide how each tensor is loaded, and count what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint.kinds import Allow
from torchlift._model.commit import Commit, content_bytes
from torchlift._model.dtensor import is_dtensor, local_shape, local_tensor, spans_of
from torchlift._model.handlers import is_plain
from torchlift._model.loading_code import find_loading_code
from torchlift._model.names import wrapped_names
from torchlift._model.slots import Group, ModuleTree, is_lazy, read_tree
from torchlift._plan.decide import Making, Step, decide_makings, decide_steps, owns_all
from torchlift._plan.loading_code import Changed, through_loading_code
from torchlift._plan.names import (
    Match,
    Named,
    Pair,
    Rewriting,
    assemble_tensors,
    names_of_left_out,
    rename_objects,
)
from torchlift._plan.report import (
    KeyReport,
    LoadReport,
    Mismatch,
    Route,
    summarise,
)
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
    apply_rename,
    check_rename,
    check_rule,
    rename_keys,
)
from torchlift._plan.suggest import (
    empty_hint,
    find_patterns,
    hint_of_computed,
    suggest_rename,
)
from torchlift._skeleton.construction import emptied, is_of_constructor, made_with
from torchlift._sources.opening import Given, Origin, open_source, state_hint
from torchlift._sources.tensors import FileTensor, MemoryTensor, SourceTensor
from torchlift._store.url import Url
from torchlift._system.interrupts import uninterrupted
from torchlift._system.memory import free_memory
from torchlift._system.text import Facts, clipped_list, count_of, human
from torchlift._transfer.reading import BUDGET, RING, STAGING, count_ranges
from torchlift.errors import (
    Argument,
    CheckpointError,
    Hint,
    MismatchError,
    PlacementError,
    did_you_mean,
    explain_calls,
    wrong_call,
)
from torchlift.formats.boxes import as_blocks
from torchlift.formats.index import TensorEntry
from torchlift.formats.scales import Quantised

#: The way out if a load needs more memory than is free.
_LEAVE_IN_FILE = (
    'source="mmap" without dtype= leaves the weights in the file. torchlift.convert casts a file '
    "in blocks of about 32 MiB."
)

#: ``ignore_mismatched=True`` would leave nearly all of the model as it was made.
_OTHER_SIZES = (
    "These are the shapes of another configuration. Build the model with the sizes of the "
    "checkpoint, or load the checkpoint of a model of these sizes."
)


#: A longer list of patterns is not an answer that somebody reads.
_SHOWN = 5

#: The way out for a quantised checkpoint that does not fit.
_QUANTISED = "Build the model as the library that quantised it does."

#: Called with a match, the path of the source and the options. Raises an error if names differ.
CheckNames = Callable[[Match, str, Options], None]


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
    #: The tensors that the source has, and those that are made or moved without it.
    _steps: Sequence[Step] = ()
    _makings: Sequence[Making] = ()
    #: The names.
    _match: Match = field(default_factory=Match)

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
        rename, device, dtype, strict, allow_missing, allow_unexpected, ignore_mismatched, mode,
        source, include, exclude, transform, root, allow_classes, storage_options, present,
    )  # fmt: skip
    require_model(model, "plan")
    with (
        open_source(ckpt, root, allow_classes, storage_options) as opened,
        uninterrupted(),
        Commit() as commit,
    ):
        try:
            made = make_plan(read_tree(model), opened, options, commit)
        finally:
            commit.undo()
    # Without its steps, which would keep the model and the files alive.
    return replace(made, _steps=(), _makings=(), _match=Match(), free_bytes=free_memory())


def require_model(model: object, function: str) -> None:
    """Refuse a model that is not a module, as if the arguments are swapped.

    Raises:
        TypeError: If it is not a module.
    """
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        if isinstance(model, type):
            found = f"a class: call torchlift.skeleton({model.__name__}, ...)"
        raise wrong_call(function, f"expected a module first, then a checkpoint, not {found}")


def make_plan(
    tree: ModuleTree,
    source: Origin,
    options: Options,
    commit: Commit,
    *,
    check: CheckNames | None = None,
) -> LoadPlan:
    """Plan a load from an open source. FSDP2's shards must be in their slots."""
    return decide(match_names(tree, source, options, commit, check=check), tree, source, options)


def match_names(
    tree: ModuleTree,
    source: Origin,
    options: Options,
    commit: Commit,
    *,
    check: CheckNames | None = None,
) -> Match:
    """Match the names of a model with those of a source. The model's own loading code runs here.

    Args:
        tree: The model.
        source: The source of the values.
        options: The caller's options.
        commit: Takes back what the model's own loading code changes in its modules.
        check: Raises an error if the names do not match, in place of `check_names`.

    Raises:
        MismatchError: If names or shapes do not match.
        UnsafeError: If a value that the model needs is blocked.
    """
    named, changed = _name_tensors(tree, source, options, wrapped=check is None), None
    if named.code is not None:
        live = not any(group.tensor.is_meta for group in tree.groups)
        owns = owns_all(options.source, live=live)
        changed = through_loading_code(tree, source, named, options, commit, owns=owns)
    return _match_named(tree, source, options, named, check, changed)


def decide(matched: Match, tree: ModuleTree, source: Origin, options: Options) -> LoadPlan:
    """Decide how each tensor is loaded, and count what that takes.

    Raises:
        PlacementError: If a tensor cannot be placed as the options want, or cannot be made.
    """
    canonical, steps = matched.canonical, None
    try:
        steps = decide_steps(matched, source.path, options)
        lacking = [*matched.unmatched, *tree.meta_attributes]
        again = made_with((group for group in lacking if group.tensor.is_meta), tree)
        again += emptied(tree)
        makings = tuple(decide_makings(lacking, options, steps, canonical, again))
    except PlacementError as error:
        names = {name: canonical(name) for group in tree.groups for name in group.names}
        error.entry = names.get(error.entry or "", error.entry)
        made_by_code = matched.on_meta is not None and steps is not None
        if made_by_code and error.entry not in {*map(canonical, matched.on_meta or ())}:
            error.hint = (
                "The model's own loading code made it from tensors on meta. Build the model with "
                "torchlift.skeleton, and call torchlift.materialize(model) before you load."
            )
        raise
    made = {id(item.group.tensor) for item in makings if item.is_constructed}
    replayed = [g for g in lacking if id(g.tensor) in made or is_of_constructor(g)]
    moved = [step for step in steps if not step.plain]
    kept = {
        canonical(name): _describe_kept(canonical(name), one, source)
        for name, one in matched.kept.items()
    }
    extra = sum(item.nbytes for item in kept.values())
    if options.transform is not None:
        extra += _count_transformed_bytes(steps)
    left = _left_on_meta(tree.groups, matched, [*steps, *makings])
    return LoadPlan(
        path=source.path,
        loaded={**_describe_steps(steps, matched, source), **kept},
        missing_keys=matched.missing,
        unexpected_keys=matched.unexpected,
        dropped=matched.dropped,
        mismatched=matched.mismatched,
        hint=matched.hint,
        tied=tuple(tuple(map(canonical, g.names)) for g in tree.groups if len(g.slots) > 1),
        replayed=[canonical(name) for group in replayed for name in group.names],
        renamed=matched.renamed,
        deferred=[canonical(name) for group in left for name in group.names],
        peak_bytes=_peak(matched, moved, makings, source) + extra,
        bytes_to_read=sum(step.span for step in moved if step.owned or step.in_place),
        requests=source.requests + _count_requests(steps),
        _steps=steps,
        _makings=makings,
        _match=matched,
    )


def _name_tensors(tree: ModuleTree, origin: Origin, options: Options, *, wrapped: bool) -> Named:
    """Name the content of a source as the model does.

    Args:
        tree: The model.
        origin: The source.
        options: The caller's options.
        wrapped: Whether keys may have the names of a wrapped model, too. torch's own functions pass
            a source that has these names already.

    Raises:
        MismatchError: If a rule or a pattern matches nothing.
        UnsafeError: If a value that the model needs is blocked.
    """
    keys = {*origin.candidates, *origin.objects, *origin.blocked} if options.rename else ()
    check_rename(options.rename, keys, origin.path)
    quantised = origin.find_quantised()  # before a scale is left out
    gone = origin.leave_out(options.include, options.exclude)
    left_out = names_of_left_out(gone, options.rename, origin.path) if gone else set()
    made: dict[str, SourceTensor] = {}
    if isinstance(options.rename, Rewriting):
        origin.resolve(dict.fromkeys(origin.candidates))
        names, made = assemble_tensors(origin, options.rename)
        objects = rename_objects(
            origin.objects, options.rename, origin.path, {*names.values(), *made}
        )
    else:
        tensors = [key for key in origin.candidates if key not in origin.blocked]
        names = rename_keys(tensors, options.rename, origin.path)
        objects = rename_keys(origin.objects, options.rename, origin.path)
    blocked = apply_rename(origin.blocked, options.rename)
    naming = wrapped_names(tree) if wrapped else None
    canonical = naming.canonical if naming is not None else str
    for rule in filter(callable, (options.device, options.dtype)):
        reported = [canonical(name) for g in tree.groups for name in g.names]
        check_rule(rule, reported, present=options.present)
    inside = False
    if naming is not None:
        given = [*names.values(), *made, *objects.values()]
        to_key = dict(zip(given, naming.keys(given), strict=True))
        # torch calls the method of the root alone. A file with the names of the wrapped model is
        # for the method of that model, and a file with the names of the wrapper for the wrapper's.
        inside = given != [*to_key.values()]
        names = {key: to_key[name] for key, name in names.items()}
        objects = {key: to_key[name] for key, name in objects.items()}
        made = {to_key[name]: one for name, one in made.items()}
        left_out = set(map(canonical, naming.keys(left_out)))
    ignored = list(dict.fromkeys(blocked.values()))
    excused = ignored if not options.strict else allowed(ignored, options.allow_unexpected)
    known = [name for g in tree.groups for name in g.names] if ignored else []
    model_names = {*known, *map(canonical, known)}
    if refused := [k for k, name in blocked.items() if name in model_names or name not in excused]:
        there = dict.fromkeys([*names.values(), *made, *objects.values(), *ignored])
        here = [name for name in dict.fromkeys(map(canonical, known)) if name not in there]
        rest = [name for name in there if name not in model_names]
        raise _blocked_error(origin, refused, suggest_rename(here, rest, options.root))
    code = find_loading_code(tree, [*names.values(), *made], inside=inside)
    # This rank needs its own slices of DTensors alone.
    like = {slot.fqn: group.tensor for group in tree.groups for slot in group.slots}
    needed = {key: like[name] for key, name in names.items() if name in like}
    origin.resolve({k: spans_of(t, k) if is_dtensor(t) else None for k, t in needed.items()})
    if code is not None:  # it sees values, so they are fetched now
        origin.receive([key for key, name in names.items() if code.covers(name)])
    candidates = {name: origin.candidates[key] for key, name in names.items()} | made
    ties = apply_rename(
        {name: key for name, key in origin.noted.items() if key in names}, options.rename
    )
    tied_names = list(ties.values()) if naming is None else naming.keys(ties.values())
    tied = [origin.candidates[origin.noted[name]] for name in ties]
    noted = dict(zip(tied_names, tied, strict=True))
    return Named(
        candidates,
        objects,
        origin.objects,
        origin.templates,
        noted,
        left_out,
        ignored,
        naming,
        code,
        quantised,
        {name for key, name in (*names.items(), *objects.items()) if key in origin.of_program}
        if origin.of_program is not None
        else None,
    )


def _match_named(
    tree: ModuleTree,
    source: Origin,
    options: Options,
    given: Named,
    check: CheckNames | None,
    changed: Changed | None,
) -> Match:
    """Match a source with names of the model, which its loading code may have changed."""
    named = given if changed is None else changed.named
    found = {
        **named.candidates,
        **_fill_noted_ties(tree.groups, named.candidates, named.noted),
    }
    # A transform may still change shapes, or make a tensor dense.
    matched = match(tree.groups, found, check_shapes=options.transform is None)
    matched.quantised, matched.unscaled = named.quantised, _find_unscaled(matched, named)
    matched.unexpected += named.objects.values()
    if changed is not None:
        _add_changes(matched, given, changed)
    if check is None:  # for torch's own functions, such a name is unexpected
        computed = {s.fqn for group in tree.groups for s in group.slots if not s.persistent}
        matched.dropped = [name for name in matched.unexpected if name in computed]
        matched.unexpected = [name for name in matched.unexpected if name not in computed]
    matched.unexpected += named.ignored
    if named.of_program is not None:
        extra = {*named.of_program, *_attributes_among(matched.unexpected, tree)}
        matched.dropped += [name for name in matched.unexpected if name in extra]
        matched.unexpected = [name for name in matched.unexpected if name not in extra]
    is_override = given.code is not None and given.code.is_override
    keys = {one.key for one in given.candidates.values()} if changed is not None else set()
    # A hook may add values, as BatchNorm adds its counter. They do not show that a name matches.
    if changed is None or is_override or _has_any(matched.pairs, keys):
        matched.fits = len(matched.pairs)
    matched.fits += len(matched.kept)
    if named.naming is not None:
        matched.report_canonical(named.naming)
    if options.rename is not None or named.naming is not None or is_override:
        called = {name: one for name, one in named.candidates.items() if not one.keys}
        reported = {one.key: matched.canonical(name) for name, one in called.items()}
        matched.renamed = {key: name for key, name in reported.items() if key != name}
    matched.hint = _hint(matched, tree.modules[0], options, named)
    matched.left_out = named.left_out
    if check is None and options.allow_missing:
        paths = [name for group in tree.groups for name in group.names]
        paths += [f"{prefix}_extra_state" for prefix, _ in tree.paths]
        names = {*map(matched.canonical, [*paths, *found]), *matched.missing, *matched.left_out}
        _require_names(options.allow_missing, names, source.path)
    if changed is not None and changed.outcome.is_lenient:
        options = replace(options, strict=False)
    (check or check_names)(matched, source.path, options)
    if changed is not None and (error := changed.outcome.error) is not None:
        changed.outcome.error = None
        try:
            raise error
        finally:
            del error
    if options.transform is None:
        _require_scales(matched, source.path)
    # From here on, a mismatch that ignore_mismatched allows counts as missing.
    matched.missing += matched.mismatched
    return matched


def _require_names(patterns: Patterns, names: Collection[str], path: str) -> None:
    """Refuse a pattern of names that may be missing if nothing has such a name.

    Raises:
        MismatchError: If there is one.
    """
    for pattern in patterns:
        if pattern != "*" and not allowed(names, [pattern]):
            raise MismatchError(
                "no name of the model matches this pattern of allow_missing",
                file=path,
                entry=pattern,
                hint=did_you_mean(pattern, names) or "Correct it, or leave it out.",
            )


def _attributes_among(names: Iterable[str], tree: ModuleTree) -> Iterator[str]:
    """Yield names of plain tensor attributes of the model, which a program saves with its state."""
    modules = dict(tree.modules[0].named_modules())
    for name in names:
        path, _, attribute = name.rpartition(".")
        if path in modules and isinstance(vars(modules[path]).get(attribute), torch.Tensor):
            yield name


def _find_unscaled(matched: Match, named: Named) -> Quantised:
    """Return the quantised tensors whose scales the model does not take."""
    scales = named.quantised.scales
    if not scales:
        return named.quantised
    left = {*matched.unexpected}
    taken = {
        key
        for name, one in named.candidates.items()
        if name not in left
        for key in one.keys or (one.key,)
    }
    return Quantised({key: some for key, some in scales.items() if not taken.issuperset(some)})


def _require_scales(matched: Match, path: str) -> None:
    """Refuse codes that would become values of the model without their scales.

    Raises:
        MismatchError: If there are some.
    """
    for pair in matched.pairs if matched.unscaled.scales else ():
        for one in pair.candidates:
            for key in one.keys or (one.key,):
                if key in matched.unscaled.scales:
                    raise MismatchError(
                        "it is quantised with scales that the model does not take",
                        file=path,
                        entry=key,
                        expected="a model with tensors for its scales",
                        found=str(one.dtype).removeprefix("torch."),
                        hint=matched.unscaled.hint(_QUANTISED),
                        lists=[matched.unscaled.line],
                        missing_keys=matched.missing,
                        unexpected_keys=matched.unexpected,
                    )


def _has_any(pairs: Iterable[Pair], keys: Collection[str]) -> bool:
    """Return whether some candidate of the pairs has one of these keys."""
    return any(one.key in keys for pair in pairs for one in pair.candidates)


def _fill_noted_ties(
    groups: Iterable[Group], found: Mapping[str, SourceTensor], noted: Mapping[str, SourceTensor]
) -> dict[str, SourceTensor]:
    """Return name in the model -> the tensor that a file notes as tied to it.

    A note counts only for a name without a value, and if the shapes are equal: it may be any text,
    and a tie of a view has another shape (keras-hub#3075).
    """
    lacking = {
        slot.fqn: tuple(group.tensor.shape)
        for group in (groups if noted else ())
        if not any(slot.fqn in found for slot in group.slots)
        for slot in group.slots
        if slot.persistent
    }
    return {name: one for name, one in noted.items() if lacking.get(name) == tuple(one.shape)}


def _describe_kept(name: str, one: SourceTensor, source: Origin) -> KeyReport:
    """Report a tensor that a module's own code keeps, such as a packed weight."""
    device = one.value.device if isinstance(one, MemoryTensor) else torch.device("cpu")
    return KeyReport(
        name, one.key, _path_of(one, source), one.nbytes, "assign",
        "mmap" if isinstance(one, FileTensor) else "memory", "compute", str(device),
        str(one.dtype).removeprefix("torch."), None, "kept by its module's own loading code",
        one.keys or (one.key,), bool(one.keys),
    )  # fmt: skip


def _describe_steps(steps: Iterable[Step], matched: Match, source: Origin) -> dict[str, KeyReport]:
    """Return name in the model -> how its tensor is loaded."""
    loaded: dict[str, KeyReport] = {}
    canonical = matched.canonical
    text = cache(lambda kind: str(kind).removeprefix("torch."))  # few kinds, many steps
    for step in steps:
        one, target = step.candidate, step.target
        # An entry has the name of its dtype.
        seen = one.entry if isinstance(one, FileTensor) else one
        route: Route = "compute" if target.handled and step.route == "view" else step.route
        becomes, stored = text(target.dtype), text(seen.dtype)
        report = KeyReport(
            step.key, one.key, _path_of(one, source), seen.nbytes, step.mode,
            step.source, route, text(target.device), becomes, None if stored == becomes else stored,
            step.note, one.keys or (one.key,), bool(one.keys),
        )  # fmt: skip
        for slot in step.group.slots:
            loaded[canonical(slot.fqn)] = report
    return loaded


def _left_on_meta(
    groups: Iterable[Group], matched: Match, decided: Iterable[Step | Making]
) -> list[Group]:
    """Return the tensors that are left for a later load."""
    done = {id(item.group.tensor) for item in decided}
    left = [g for g in groups if id(g.tensor) not in done and not is_lazy(g.tensor)]
    paired = {id(pair.group.tensor) for pair in matched.pairs} if left else set()
    # A live tensor with a value in the source is left, too, if the device rule returns "meta".
    return [group for group in left if group.tensor.is_meta or id(group.tensor) in paired]


def _path_of(one: SourceTensor, origin: Origin) -> str:
    """Return the path of the checkpoint that a tensor comes from, or the paths of several."""
    if not origin.paths:
        return origin.path
    paths = (origin.paths.get(key, origin.path) for key in one.keys or (one.key,))
    return ", ".join(dict.fromkeys(paths))


def _add_changes(matched: Match, given: Named, changed: Changed) -> None:
    """Add what the loading code of the model did to a match."""
    outcome = changed.outcome
    silent = outcome.excused.difference(outcome.own)
    matched.missing = [name for name in matched.missing if name not in silent]
    matched.missing = list(dict.fromkeys([*matched.missing, *outcome.missing]))
    matched.unexpected += outcome.unexpected
    matched.kept = {name: given.candidates[name] for name in outcome.kept}
    matched.on_meta, matched.copied = changed.on_meta, outcome.nbytes


def _peak(matched: Match, steps: Sequence[Step], makings: Iterable[Making], origin: Origin) -> int:
    """Estimate the anonymous memory, in bytes, that a load takes at its peak.

    Args:
        matched: The names.
        steps: The steps that are not only mapped.
        makings: The tensors that the source does not have.
        origin: The source of the values.
    """
    staged = sum(
        step.span
        for step in steps
        if step.route == "read"
        and (step.memory.type != "cpu" or step.candidate.dtype != step.target.dtype)
    )
    made = sum(
        item.group.tensor.numel() * item.dtype.itemsize
        for item in makings
        if item.device.type == "cpu"
    )
    # A backup exists while a subclass may fail to copy.
    kept = matched.copied + sum(
        content_bytes(local_tensor(step.group.tensor))
        for step in steps
        if step.in_place and not is_plain(local_tensor(step.group.tensor))
        if step.group.tensor.device.type == "cpu"
    )
    new = sum(_count_new_bytes(step) for step in steps if step.owned)
    is_sent = any(step.route == "read" and step.memory.type != "cpu" for step in steps)
    staged = min(staged, RING if is_sent or origin.is_away else STAGING)
    # Compressed arrays are inflated one at a time.
    chunks = (chunk for step in steps if step.entry for chunk in step.entry.chunks)
    inflated = max((chunk.packed.size for chunk in chunks if chunk.packed), default=0)
    return new + made + kept + staged + inflated


def _count_requests(steps: Sequence[Step]) -> int:
    """Return how many range requests to URLs the steps will make."""
    found = list[tuple[TensorEntry, bool]]()
    for step in steps:
        entry = step.entry
        if entry is None or not entry.chunks or not isinstance(entry.chunks[0].file, Url):
            continue
        device, dtype = step.fetched_as
        found.append((entry, device.type == "cpu" and dtype == step.candidate.dtype))
    return count_ranges(found)


def _count_transformed_bytes(steps: Sequence[Step]) -> int:
    """Return the bytes that a transform takes on the host, for its arguments and its results.

    Each result may be new memory, and a result for a copy in place waits until all are made.
    """
    most = max((step.candidate.nbytes for step in steps), default=0)
    total = sum(step.candidate.nbytes for step in steps)
    stay = [step for step in steps if step.memory.type == "cpu" and _count_new_bytes(step) == 0]
    return min(total, max(most, BUDGET // 4)) + sum(
        step.group.tensor.numel() * step.target.dtype.itemsize
        for step in stay
        if not is_lazy(step.group.tensor)
    )


def _count_new_bytes(step: Step) -> int:
    """Return the anonymous memory, in bytes, that the new tensor of a step takes on the host."""
    if step.memory.type != "cpu" or not step.owned:
        return 0
    if step.target.handled:
        return content_bytes(step.group.tensor)
    entry = step.candidate.entry
    if entry is not None and entry.kind is not None:
        return entry.nbytes
    shape = step.candidate.shape if step.target.spans is None else local_shape(step.target.spans)
    return math.prod(shape) * step.target.dtype.itemsize


def _blocked_error(origin: Origin, keys: Sequence[str], found: Hint | None) -> CheckpointError:
    """Return the error for blocked values. Its hint begins with a root without them, if any."""
    error = origin.refusal(keys[0], several=len(keys) > 1)
    if len(keys) > 1:
        error.lists.append(f"blocked ({len(keys)}): {clipped_list(keys)}")
    for root in found.fragments if found else ():
        if isinstance(root, Argument) and root.name == "root":
            fits = Hint("The model's names are in a container: pass ", root, " for that alone. ")
            error.hint = Hint(fits, error.hint or "")
    return error


def _hint(
    matched: Match,
    model: nn.Module,
    options: Options,
    named: Named,
) -> str | None:
    """Return the change that would match the names, or None.

    Args:
        matched: The names that match, and those that do not.
        model: The model.
        options: The caller's options.
        named: The content of the source.
    """
    missing, unexpected = matched.missing, matched.unexpected
    if matched.fits:  # allowed names are intended, unless nothing matches
        missing, unexpected = _find_disallowed(matched, options)
    if not _is_of(model, "peft.peft_model", "PeftModel") and (
        computed := hint_of_computed(missing, unexpected)
    ):
        return computed
    if not missing or not unexpected:
        return None
    names = {*unexpected}
    values = {key: named.values[key] for key, name in named.objects.items() if name in names}
    if hint := state_hint(values):
        return hint
    suggested = suggest_rename(missing, unexpected, options.root)
    if suggested is None and matched.unscaled.scales:
        return None  # no rename makes values of codes
    return suggested if options.rename else _library_hint(model, unexpected, suggested)


def check_names(matched: Match, path: str, options: Options) -> None:
    """Refuse names and shapes that do not match, in one error that lists all of them.

    Raises:
        MismatchError: If names are missing or unexpected under ``strict=True``, or shapes differ.
    """
    missing, unexpected = _find_disallowed(matched, options)
    # A key that the caller left out is not a match, nor is one of another shape that is to be
    # ignored: otherwise a load of nothing would succeed.
    misshapen = matched.mismatched.keys() - allowed(matched.mismatched, options.allow_missing)
    left_out = [name for name in matched.missing if name in matched.left_out]
    nothing = bool(missing or misshapen or left_out) and not matched.fits
    wrong = matched.mismatched
    if options.ignore_mismatched and not nothing:
        # As soon as a name is given, others are not skipped: a body of another width is a mistake.
        wrong = {k: wrong[k] for k in wrong if options.allow_missing and k in misshapen}
    # The checkpoint has a value under such a name, and it is not a tensor.
    there = {*matched.unexpected}
    odd = [name for name in missing if name in there]
    if not (wrong or nothing or odd or (options.strict and (missing or unexpected))):
        return
    shapes = {key: (item.expected, item.found) for key, item in wrong.items()}
    names = {
        "not a tensor in the checkpoint": odd,
        "missing": [name for name in missing if name not in there],
        "left out": left_out if nothing and not missing else [],
        "unexpected": [name for name in unexpected if name not in odd],
    }
    misnamed = len(left_out) + min(len(names["missing"]), len(names["unexpected"]))
    hint = empty_hint(shapes) or matched.hint
    unscaled = matched.unscaled
    is_quantised = hint is None and (
        not unscaled.of_scales.isdisjoint(unexpected)
        or (bool(unscaled.scales) and options.transform is None)
    )
    differing = sum(item.note is None for item in wrong.values())
    if hint is None and not is_quantised and differing > 3 * matched.fits + misnamed:
        # To skip nearly all shapes would leave the model as it was made.
        hint = _OTHER_SIZES
    lists = [
        f"{title} ({len(some)}): {clipped_list(some)}" for title, some in names.items() if some
    ]
    if wrong:
        lists.append(f"mismatched ({len(wrong)}): {clipped_list(map(str, wrong.values()), '; ')}")
    fits = "nothing in the checkpoint fits" if nothing else "the checkpoint does not fit"
    reason = f"{fits} the model"
    if is_quantised:
        reason += ", because its weights are quantised with scales that the model does not take"
        hint = unscaled.hint(_QUANTISED)
        lists.append(unscaled.line)
    raise MismatchError(
        reason,
        file=path,
        hint=hint or _way_out(names, options, matched if wrong else None),
        lists=lists,
        missing_keys=matched.missing,
        unexpected_keys=matched.unexpected,
        mismatched=shapes,
    )


def _way_out(
    names: Mapping[str, list[str]], options: Options, matched: Match | None
) -> Hint | None:
    """Return the arguments with which the load succeeds.

    Args:
        names: The names that do not match.
        options: The caller's options.
        matched: The match, if a shape is wrong.
    """
    may_be = "[...] with the names that may be"
    ways: dict[str, str | Argument] = {
        "not a tensor in the checkpoint": (
            "tensors under these names (torch.from_numpy converts an array)"
        ),
        "missing": Argument("allow_missing", may_be),
        "left out": Argument("include", "[...] with keys that the model has"),
        "unexpected": Argument("allow_unexpected", may_be),
    }
    found = [way for title, way in ways.items() if names[title]]
    if names["missing"] and names["unexpected"]:
        # Less would be loaded than anybody means: the names have to be brought together first.
        found = [Hint(Argument("rename"), " with the rule that brings the names together")]
    if matched is not None:
        loaded = (name for pair in matched.pairs for name in pair.group.names)
        patterns = find_patterns(matched.mismatched, map(matched.canonical, loaded))
        is_short, by_name = len(patterns) < _SHOWN, ways["missing"]
        if not options.ignore_mismatched:
            found.append(Argument("ignore_mismatched", "True"))
        if by_name not in found and (is_short or options.allow_missing):
            listed = dict.fromkeys([*options.allow_missing, *patterns])
            found.append(Argument("allow_missing", repr([*listed])) if is_short else by_name)
        found[-1] = Hint(found[-1], " to skip what has another shape")
    if not found:
        return None
    return Hint("Pass ", found[0], *(f for way in found[1:] for f in (" and ", way)), ".")


def _find_disallowed(matched: Match, options: Options) -> tuple[list[str], list[str]]:
    """Return the missing names and the unexpected names that are not allowed."""
    excused = allowed(matched.missing, options.allow_missing) | matched.left_out
    extra = allowed(matched.unexpected, options.allow_unexpected)
    missing = [name for name in matched.missing if name not in excused]
    return missing, [name for name in matched.unexpected if name not in extra]


# ---- names


def match(
    groups: Iterable[Group], candidates: Mapping[str, SourceTensor], *, check_shapes: bool
) -> Match:
    """Pair tensors of a model with candidates by name. One name of a tie is enough.

    Args:
        groups: The tensors of the model.
        candidates: Name in the model -> what the source has for it.
        check_shapes: Whether shapes must be equal. False if a transform may change them.

    Raises:
        PlacementError: If a candidate does not have a shape.
    """
    result = Match()
    known: set[str] = set()
    for group in groups:
        if len(group.slots) == 1 and is_plain(group.tensor):  # as nearly all tensors
            (slot,) = group.slots
            one = candidates.get(slot.fqn) if slot.persistent else None
            if type(one) is FileTensor and one.entry.shape == group.tensor.shape:
                known.add(slot.fqn)
                result.pairs.append(Pair(group, slot.fqn, [one]))
                continue
        names = [slot.fqn for slot in group.slots if slot.persistent]
        known.update(names)
        found = [
            (name, _blocks_for(candidates[name], group.tensor))
            for name in names
            if name in candidates
        ]
        for name, one in found:
            if isinstance(one, MemoryTensor) and is_lazy(one.value):
                raise PlacementError(
                    "the value has no shape: its lazy module never ran",
                    entry=name,
                    hint="Run the module once before you take its state dict.",
                )
            if isinstance(one, MemoryTensor) and one.value.is_nested:
                leave_out = Argument("exclude", f"[{name!r}]", (name,))
                raise PlacementError(
                    "a nested tensor cannot be loaded",
                    entry=name,
                    expected="a tensor with one shape",
                    found="a nested tensor",
                    hint=Hint("Leave it out with ", leave_out, ", and set it yourself."),
                )
        wrong = [
            Mismatch(name, tuple(group.tensor.shape), candidate.shape)
            for name, candidate in found
            if check_shapes and not _fits(group.tensor, candidate.shape)
        ]
        result.mismatched.update({item.key: item for item in wrong})
        found = [(name, one) for name, one in found if name not in result.mismatched]
        if found:  # even if another name of the tie has another shape
            result.pairs.append(Pair(group, found[0][0], [one for _, one in found]))
            continue
        if not wrong:
            result.missing += names
        result.unmatched.append(group)
    result.unexpected = [name for name in candidates if name not in known]
    return result


def _blocks_for(one: SourceTensor, tensor: torch.Tensor) -> SourceTensor:
    """Return the raw blocks of quantised values if the model's tensor has their size and dtype."""
    if tensor.dtype != torch.uint8 or not isinstance(one, FileTensor) or not one.entry.encoding:
        return one
    raw = as_blocks(one.entry)
    if raw is None or raw.shape != tuple(tensor.shape):
        return one
    return replace(one, entry=raw)


def _fits(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    if is_lazy(tensor):
        return True
    # torch < 0.4 saved a scalar with shape [1]. load_state_dict still accepts that.
    return tuple(tensor.shape) == shape or (tensor.dim() == 0 and shape == (1,))


def _is_of(model: nn.Module, module: str, name: str) -> bool:
    """Return whether a class of this name is a base of the model's, without an import of it."""
    return any((base.__module__, base.__name__) == (module, name) for base in type(model).__mro__)


def _library_hint(
    model: nn.Module, unexpected: Sequence[str], suggested: Hint | None
) -> Hint | None:
    """Return the rename that knows the files of a model's library, or the suggested rename.

    A simple prefix may be the reason for names that transformers would convert, but not for others.
    """
    if _is_of(model, "peft.peft_model", "PeftModel"):
        rename = Argument("rename", "torchlift.integrations.peft.peft_names(model)")
        return Hint("PEFT renames the modules that it adapts: pass ", rename, ".")
    if not _is_of(model, "transformers.modeling_utils", "PreTrainedModel"):
        return suggested
    if "token_embd.weight" in unexpected:
        rename = Argument("rename", 'remap.from_to("gguf->transformers", model)')
        return Hint("The names are those of a GGUF file: pass ", rename, ".")
    rename = Argument("rename", "remap.transformers(model)")
    return suggested or Hint("transformers converts its files while it loads: pass ", rename, ".")

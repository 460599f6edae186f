"""Optimizer state dicts under canonical names: checked as a whole, then put into optimizers."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from torchlift._model import (
    Names,
    clone_of,
    everything,
    is_dtensor,
    is_wrapper,
    layout_of,
    local_shape,
    local_tensor,
    overlaps,
    own,
    slice_of,
    spans_of,
    spread_of,
    wrap,
)
from torchlift._plan import allowed, is_empty, listed
from torchlift._sources import Copy, FileTensor, Sent, whole_copy
from torchlift._system.containers import leaves, map_leaves
from torchlift._system.text import Facts, Summary, clipped_list
from torchlift.distributed.optimizer_state import (
    PLACE,
    Saved,
    first_name,
    initial_state,
    once,
    require_known,
)
from torchlift.distributed.options import StateDictMismatch, StateDictOptions, check_value, misfit

#: A saved tensor: here, in several places of files, or with rank 0.
Stored = torch.Tensor | FileTensor | Sent


@dataclass(frozen=True, repr=False)
class OptimizerReport(Summary):
    """What a load did to the optimizers; every list holds canonical names.

    Attributes:
        loaded: parameters that received a saved state.
        missing_keys: parameters the state dict has nothing for; they keep the state they had.
        unexpected_keys: parameters that no optimizer here holds; several optimizers, or the
            stages of a pipeline, may share one state dict, so these are never an error.
        kept_hyperparameters: parameters whose group kept its hyperparameters.
        left_out: parameters the state dict has nothing for, of optimizers that make their state in
            ``step`` only: nobody can say whether anything is missing, so these are never an error.
            They start without a state.

    Example:
        >>> from torchlift.distributed import OptimizerReport
        >>> print(OptimizerReport(loaded=["a", "b"], missing_keys=["c"]))
        loaded the state of 2 parameters
          missing (1): c
    """

    loaded: list[str] = field(default_factory=list)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    kept_hyperparameters: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def _summary(self) -> tuple[str, Facts]:
        return f"loaded the state of {len(self.loaded)} parameters", [
            *listed("missing", self.missing_keys),
            *listed("unexpected", self.unexpected_keys),
            *listed("hyperparameters kept", self.kept_hyperparameters),
            *listed("without a state, which the first step makes", self.left_out),
        ]


@dataclass
class OptimizerPlan:
    """What loading one optimizer will do; nothing has changed while there is only a plan.

    Attributes:
        optimizer: the one to load.
        report: what it will say.
        state: what replaces the state of a parameter.
        other: state under keys that are no parameter.
        hyper: for each group the hyperparameters that change.
        reads: tensors of files to read into memory that the optimizer does not have yet.
        copies: saved tensors to copy into the new state.
        left_alone: names of parameters whose state the caller has left out: it stays.
    """

    optimizer: torch.optim.Optimizer
    report: OptimizerReport = field(default_factory=OptimizerReport)
    state: dict[torch.Tensor, dict[Any, Any]] = field(default_factory=dict)
    other: dict[Any, Any] = field(default_factory=dict)
    hyper: list[dict[str, Any]] = field(default_factory=list)
    reads: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    left_alone: set[str] = field(default_factory=set)


def plan_optimizers(
    names: Names,
    optimizers: Sequence[torch.optim.Optimizer],
    saved: Saved,
    options: StateDictOptions,
) -> list[OptimizerPlan]:
    """Match saved state with optimizers, parameter by parameter and by canonical name.

    Raises:
        StateDictMismatch: a shape does not fit; with ``strict`` also where a trainable parameter
            has no saved state or is of another model, or the parameters of one group come from
            groups that differ.
    """
    plans = [_plan(names, each, saved, options) for each in optimizers]
    for plan in plans:
        _dry_run(plan)
    report = merged(plans)
    problems = {
        "missing the optimizer state of": report.missing_keys,
        "missing in param_groups:": report.kept_hyperparameters,
    }
    missing = list(dict.fromkeys(report.missing_keys + report.kept_hyperparameters))
    excused = allowed(missing, saved.allow_missing)
    for plan in plans:
        excused |= plan.left_alone
    problems = {
        what: [name for name in found if name not in excused] for what, found in problems.items()
    }
    missing = [name for name in missing if name not in excused]
    if options.strict and missing:
        if any(map(PLACE.fullmatch, missing)):
            require_known(names, optimizers, {*saved.state, *saved.hyper})
        raise misfit("optimizer", problems, missing_keys=missing)
    return plans


def _plan(
    names: Names, optimizer: torch.optim.Optimizer, saved: Saved, options: StateDictOptions
) -> OptimizerPlan:
    plan = OptimizerPlan(optimizer, other=copy.deepcopy(present(saved.other)))
    stateless = []
    for group in optimizer.param_groups:
        plan.hyper.append(_hyper(group, names, saved, plan.report))
        if options.strict and plan.hyper[-1] and group["params"]:
            _require_kind(optimizer, group, plan.hyper[-1])
        for param in once(group["params"]):
            name = _saved_name(param, names, saved.state)
            if name is None and not saved.gone.isdisjoint(names.fqns(param)):
                name = first_name(param, names)
                plan.left_alone.add(name)
                plan.report.missing_keys.append(name)
                continue
            if name is None:
                stateless.append((group, param))
                continue
            target = _Target(name, param, group, plan, options, saved.by_order)
            plan.state[param] = _new_state(target, saved.state[name])
            plan.report.loaded.append(name)
    stepped = bool(plan.state)
    for group, param in stateless:
        name, live = first_name(param, names), optimizer.state.get(param)
        initial = initial_state(optimizer, group, param)
        if initial is None and not (live and stepped):
            plan.report.left_out.append(name)
            if options.strict:
                # Nothing was saved of the whole optimizer: this is how it was before a first step.
                plan.state[param] = {}
        elif param.requires_grad and (live or initial):
            # A frozen parameter that was never trained has no state to miss.
            plan.report.missing_keys.append(name)
    known = {fqn for g in optimizer.param_groups for p in g["params"] for fqn in names.fqns(p)}
    plan.report.unexpected_keys.extend(name for name in saved.state if name not in known)
    return plan


def _saved_name(param: torch.Tensor, names: Names, saved: Mapping[str, Any]) -> str | None:
    return next((name for name in names.fqns(param) if name in saved), None)


def _hyper(
    group: dict[str, Any], names: Names, saved: Saved, report: OptimizerReport
) -> dict[str, Any]:
    """Return the saved hyperparameters of a group, found by its parameters in whatever order.

    They are copies, so that the optimizer and the caller's dict share nothing that can change.
    """
    found: dict[str, dict[str, Any]] = {}
    for param in group["params"]:
        name = _saved_name(param, names, saved.hyper)
        if name is None:
            report.kept_hyperparameters.append(first_name(param, names))
        else:
            found[name] = saved.hyper[name]
    source = next(iter(found), "")
    for name, other in found.items():
        if other is not found[source]:
            _require_same(found[source], other, source, name)
    chosen = found.get(source, {})
    if saved.empty and not group["params"]:
        chosen = saved.empty.pop(0)  # each belongs to one group
    hyper = {}
    for key, value in chosen.items():
        if key == "param_names":  # what this optimizer calls its own parameters
            continue
        hyper[key] = copy.deepcopy(value)
        if isinstance(value, torch.Tensor) and isinstance(live := group.get(key), torch.Tensor):
            hyper[key] = hyper[key].to(live.device)
    return hyper


def _require_kind(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Refuse the group of an optimizer of another kind, whose state would be nobody's.

    New versions of an optimizer add switches, and schedulers and callers keep numbers of their own
    in groups: so only one that lacks a number of this kind, and has one that is none of it, is not.

    Raises:
        StateDictMismatch: it is.
    """
    lacks = [
        key
        for key, default in optimizer.defaults.items()
        if key not in saved and not isinstance(default, (bool, type(None)))
    ]
    more = [key for key in saved if key not in group]
    if lacks and more:
        kind = type(optimizer).__name__
        raise StateDictMismatch(
            f"saved by another kind of optimizer than {kind}",
            entry="param_groups",
            expected=f"{clipped_list(lacks)} in each group",
            found=clipped_list(more),
            hint="Make an optimizer of the kind that was saved, or pass strict=False.",
        )


def _require_same(a: dict[str, Any], b: dict[str, Any], first: str, second: str) -> None:
    for key in sorted((a.keys() & b.keys()) - {"param_names"}):
        same = a[key] is b[key] or bool(torch.as_tensor(a[key] == b[key]).all())
        if not same:
            raise StateDictMismatch(
                f"parameters of one group were saved with different values of {key!r}",
                entry=second,
                expected=f"{a[key]!r}, as for {first!r}",
                found=repr(b[key]),
                hint="Give the optimizer the parameter groups it was saved with.",
            )


#: The way out where numbers were all that told parameters apart.
_NO_VALUES = (
    "A state of shape [0] holds no values: it is one rank's part of a sharded optimizer. Save what "
    "torchlift.distributed.get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True)) returns when all ranks call it."
)
_ORDER = (
    "Only numbers tell its parameters apart: give the optimizer them in the order of the one that "
    "was saved. To save them by name, make it of model.named_parameters(), or use torchlift.Keeper."
)


@dataclass(frozen=True)
class _Target:
    """The parameter whose state is being loaded, by its name, in a group of a plan's optimizer."""

    name: str
    param: torch.Tensor
    group: dict[str, Any]
    plan: OptimizerPlan
    options: StateDictOptions
    by_order: bool = False

    @cached_property
    def initial(self) -> dict[tuple[Any, ...], torch.Tensor]:
        """The tensors that the optimizer itself would start from."""
        return _tensors(initial_state(self.plan.optimizer, self.group, self.param))

    def entry(self, path: tuple[Any, ...]) -> str:
        """Return what an error calls the state at a path."""
        return ".".join(map(str, (self.name, *path)))


def _new_state(target: _Target, saved: Any) -> dict[Any, Any]:
    """Return the new state of one parameter, and add the copies that will fill it to the plan.

    Where the optimizer already has a tensor like a new one, that is filled, so that whoever holds
    it (a captured graph, say) keeps seeing it. Nothing that can change is shared with `saved`.
    """
    if not isinstance(saved, dict):
        raise StateDictMismatch(
            "the state of a parameter is not a dict", entry=target.name, found=type(saved).__name__
        )
    state = target.plan.optimizer.state.get(target.param, {})
    tensors = _tensors(state)

    def place(value: Any, path: tuple[Any, ...]) -> Any:
        live = tensors.get(path)
        for inside in range(1, len(path)):  # a list of numbers in place of a tensor
            _require_no_tensor(target, [], tensors.get(path[:inside]), path[:inside])
        if not isinstance(value, Stored):
            _require_no_tensor(target, value, live, path)
            return copy.deepcopy(value)
        like = _layout_for(target, value, live, path)
        device, dtype = _device(target, value, live, path)
        if isinstance(value, torch.Tensor) and is_wrapper(local_tensor(value)):
            return value if value is live else _wrapper_like(target, value, like, device, path)
        needed = (value.shape, device, dtype, torch.strided, spread_of(like))
        made = live if live is not None and needed == _form(live) else None
        if made is None:
            made = _empty(value, like, device, dtype)
        if isinstance(value, FileTensor):
            local = local_tensor(made).detach()
            # A read that fails would leave half of a tensor in what the optimizer has.
            new = local if made is not live else torch.empty_like(local, device="cpu")
            target.plan.reads.append(Copy(value, new, spans_of(made)))
            if new is not local:
                target.plan.copies.append(whole_copy(new, local))
        elif made is not value:
            target.plan.copies.append(_copy(value, made))
        return made

    new: dict[Any, Any] = map_leaves(saved, place)
    return new if target.options.strict else {**state, **new}


def _form(live: torch.Tensor) -> tuple[Any, ...]:
    return live.shape, live.device, live.dtype, live.layout, spread_of(live)


def _tensors(state: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    return {path: leaf for path, leaf in leaves(state).items() if torch.is_tensor(leaf)}


def _layout_for(
    target: _Target, value: Stored, live: torch.Tensor | None, path: tuple[Any, ...]
) -> torch.Tensor | None:
    """Return the tensor that a saved one is to be laid out like; None, or a plain one, for whole.

    Raises:
        StateDictMismatch: it has another shape than the saved one, or is sharded and that is not.
    """
    if not value.shape:
        check_value(target.entry(path), None, value, target.options)
        return value if is_dtensor(value) else None
    expected = layout_for(value, live, target.param)
    if expected is None:
        # Factored moments (Adafactor) have a shape of their own, so only the optimizer knows.
        expected = target.initial.get(path)
    where = target.entry(path)
    if expected is not None and expected.shape != value.shape:
        both = tuple(expected.shape), tuple(value.shape)
        raise StateDictMismatch(
            "a saved state has another shape than the optimizer's",
            entry=where,
            expected=list(expected.shape),
            found=list(value.shape),
            mismatched={where: both},
            hint=_NO_VALUES if is_empty(*both) else _ORDER if target.by_order else None,
        )
    check_value(where, expected, value, target.options)
    if is_dtensor(value):
        # One that has a shape of its own may be sharded as it likes, on the mesh of its parameter.
        other = (
            spread_of(value) != spread_of(expected)
            if expected is not None
            else (not is_dtensor(target.param) or value.device_mesh != target.param.device_mesh)
        )
        if other:
            raise StateDictMismatch(
                "a saved state is laid out in another way than its parameter",
                entry=where,
                expected=layout_of(target.param if expected is None else expected)
                or "a plain tensor",
                found=layout_of(value),
                hint="Pass whole tensors and full_state_dict=True: each rank takes its own slice.",
            )
    return value if is_dtensor(value) else expected


def layout_for(value: Any, live: Any, param: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of an optimizer that tells how a saved one is laid out, where any does."""
    if torch.is_tensor(live):
        return live
    return param if getattr(value, "shape", None) == param.shape else None


def _require_no_tensor(
    target: _Target, value: object, live: torch.Tensor | None, path: tuple[Any, ...]
) -> None:
    """Refuse a number, say, where the optimizer has a tensor with dimensions.

    Raises:
        StateDictMismatch: it has, and would only find out in its next step.
    """
    if value is None and isinstance(target.plan.optimizer, torch.optim.SGD):
        return  # older ones saved no momentum as None, and make it then
    expected = target.initial.get(path) if live is None else live
    if expected is not None and expected.dim():
        raise StateDictMismatch(
            "a saved state is no tensor",
            entry=target.entry(path),
            expected=f"a tensor of shape {list(expected.shape)}",
            found=type(value).__name__,
        )


def _wrapper_like(
    target: _Target,
    value: torch.Tensor,
    like: torch.Tensor | None,
    device: torch.device,
    path: tuple[Any, ...],
) -> torch.Tensor:
    """Copy a tensor whose class keeps its values in others (low-bit state), or this rank's slice.

    A live one is replaced, not written to: what its class takes only it knows.

    Raises:
        StateDictMismatch: its class cannot be sliced as the parameter is sharded.
    """
    if is_dtensor(value):
        return wrap(value, clone_of(local_tensor(value), device))
    if not is_dtensor(like):
        return clone_of(value, device)
    whole = [(0, size) for size in value.shape]
    try:
        ((_, out_of),) = overlaps(spans_of(like), whole)
        return wrap(like, clone_of(slice_of(value, out_of), device))
    except Exception as error:
        raise StateDictMismatch(
            f"a whole {type(value).__name__} cannot be sliced as its parameter is sharded",
            entry=target.entry(path),
            found=f"{type(error).__name__}: {error}",
            hint="Save it without full_state_dict, on the same mesh.",
        ) from error


def _device(
    target: _Target, value: Stored, live: torch.Tensor | None, path: tuple[Any, ...]
) -> tuple[torch.device, torch.dtype]:
    """Decide as `torch.optim.Optimizer.load_state_dict` does, except that no dtype is changed.

    It leaves ``step`` where it was saved, except in groups that need it beside the parameter.
    """
    if path[-1] == "step":
        if target.group.get("capturable") or target.group.get("fused"):
            return target.param.device, torch.float32
        here = value if isinstance(value, torch.Tensor) else live
        return torch.device("cpu") if here is None else here.device, value.dtype
    near = live if live is not None and not value.shape else target.param
    return near.device, value.dtype


def _empty(
    value: Stored, like: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    if is_dtensor(like):
        return wrap(like, torch.empty(local_shape(spans_of(like)), device=device, dtype=dtype))
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device=device, dtype=dtype, requires_grad=False)
    return torch.empty(value.shape, device=device, dtype=dtype)


def _copy(value: torch.Tensor | Sent, into: torch.Tensor) -> Copy:
    local = local_tensor(into).detach()
    source = value if isinstance(value, Sent) else local_tensor(value).detach()
    return Copy(source, local, everything(local.shape) if is_dtensor(value) else spans_of(into))


def is_left_to_us(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether loading an optimizer runs no hooks and no method of its own.

    Example:
        >>> is_left_to_us(torch.optim.SGD([torch.ones(1)]))
        True
    """
    return _is_plain(optimizer) and not (
        optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    )


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict


def _loaded(plan: OptimizerPlan) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Return the state and the groups that the optimizer is to have."""
    state = {**plan.optimizer.state, **plan.state, **plan.other}
    # What was never stepped has no entry: some optimizers look into whichever comes first.
    return {key: value for key, value in state.items() if not isinstance(value, dict) or value}, [
        {**group, **hyper, "params": group["params"]}
        for group, hyper in zip(plan.optimizer.param_groups, plan.hyper, strict=True)
    ]


def _dry_run(plan: OptimizerPlan) -> None:
    """Let a copy take the new state, because optimizers look at it last, in ``__setstate__``.

    Raises:
        StateDictMismatch: it cannot use it.
    """
    optimizer = plan.optimizer
    if not is_left_to_us(optimizer):
        return
    state, groups = _loaded(plan)
    copies = {key: dict(v) if isinstance(v, dict) else v for key, v in state.items()}
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    try:
        shadow.__setstate__({"state": defaultdict(dict, copies), "param_groups": groups})
    except Exception as error:
        raise StateDictMismatch(
            f"{type(optimizer).__name__} cannot use this state: {type(error).__name__}: {error}",
            hint="Was it saved by an optimizer of another kind?",
        ) from error


def apply_optimizer(plan: OptimizerPlan) -> None:
    """Give an optimizer its new state, after its tensors are filled."""
    optimizer = plan.optimizer
    state, groups = _loaded(plan)
    if is_left_to_us(optimizer):
        # Optimizer.load_state_dict would cast every moment to its parameter's dtype, which loses
        # what float32 moments of bfloat16 weights hold (pytorch/pytorch#43706).
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            group.update(new)
        kept = defaultdict(dict, state)
        optimizer.__setstate__({"state": kept, "param_groups": optimizer.param_groups})
        return
    ids: dict[int, int] = {}
    for group in groups:
        group["params"] = [ids.setdefault(id(param), len(ids)) for param in group["params"]]
    numbered = {ids.get(id(key), key): value for key, value in state.items()}
    own(optimizer, "load_state_dict")({"state": numbered, "param_groups": groups})
    if not _is_plain(optimizer):
        return
    for param, given in plan.state.items():
        # Put back what the base class cast to the dtype of the parameter, and nothing a hook did.
        live = optimizer.state[param]
        for key, value in given.items():
            now = live.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if both and now.dtype == param.dtype != value.dtype:
                live[key] = value


def present(tree: Any) -> Any:
    """Return nested containers with whole tensors in memory for those of files."""
    return map_leaves(tree, lambda leaf, _: leaf.tensor() if isinstance(leaf, FileTensor) else leaf)


def merged(plans: Sequence[OptimizerPlan]) -> OptimizerReport:
    """Make one report of several optimizers: unexpected is what none of them holds."""
    names = [each.name for each in fields(OptimizerReport)]
    every = {n: [key for plan in plans for key in getattr(plan.report, n)] for n in names}
    counts = Counter(every["unexpected_keys"])
    every["unexpected_keys"] = [key for key, count in counts.items() if count == len(plans)]
    return OptimizerReport(**every)

"""Optimizer state dicts under canonical names: checked as a whole, then put into optimizers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchlift._model.names import Names
from torchlift._plan.steps import Copy
from torchlift.distributed.fresh import FreshStates
from torchlift.distributed.model_state import own
from torchlift.distributed.optimizer_state import Saved, first_name
from torchlift.distributed.options import StateDictMismatch, StateDictOptions
from torchlift.distributed.targets import Target, place


@dataclass(frozen=True)
class OptimizerReport:
    """What a load did to the optimizers; every list holds canonical names.

    Attributes:
        loaded: parameters that received a saved state.
        missing_keys: parameters the state dict has nothing for; they keep the state they had.
        unexpected_keys: parameters that no optimizer here holds; several optimizers, or the
            stages of a pipeline, may share one state dict, so these are never an error.
        kept_hyperparameters: parameters whose group kept its hyperparameters.

    Example:
        >>> print(OptimizerReport(loaded=["a", "b"], missing_keys=["c"]))
        loaded the state of 2 parameters
          missing (1): c
    """

    loaded: list[str] = field(default_factory=list)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    kept_hyperparameters: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"loaded the state of {len(self.loaded)} parameters"]
        for title, found in (
            ("missing", self.missing_keys),
            ("unexpected", self.unexpected_keys),
            ("hyperparameters kept", self.kept_hyperparameters),
        ):
            if found:
                lines.append(f"  {title} ({len(found)}): {', '.join(found)}")
        return "\n".join(lines)


@dataclass
class OptimizerPlan:
    """What loading one optimizer will do; nothing has changed while there is only a plan.

    Attributes:
        optimizer: the one to load.
        state: what replaces the state of a parameter.
        other: state under keys that are no parameter.
        hyper: for each group the hyperparameters that change.
        moves: saved tensors on their way into the new state.
    """

    optimizer: torch.optim.Optimizer
    report: OptimizerReport = field(default_factory=OptimizerReport)
    state: dict[torch.Tensor, dict[Any, Any]] = field(default_factory=dict)
    other: dict[Any, Any] = field(default_factory=dict)
    hyper: list[dict[str, Any]] = field(default_factory=list)
    moves: list[Copy] = field(default_factory=list)


def plan_optimizers(
    names: Names,
    optimizers: Sequence[torch.optim.Optimizer],
    saved: Saved,
    options: StateDictOptions,
) -> list[OptimizerPlan]:
    """Match saved state with optimizers, parameter by parameter and by canonical name.

    Raises:
        StateDictMismatch: a shape does not fit; with ``strict`` also where a trainable parameter
            has no saved state, or the parameters of one group come from groups that differ.
    """
    empty = iter(saved.empty)
    plans = [_plan(names, each, saved, options, empty) for each in optimizers]
    for plan in plans:
        _rehearse(plan)
    if options.strict:
        _require_all([plan.report for plan in plans])
    return plans


def _require_all(reports: Sequence[OptimizerReport]) -> None:
    """Refuse what lacks the state of a parameter, or its place in a group."""
    stateless = [name for report in reports for name in report.missing_keys]
    ungrouped = [name for report in reports for name in report.kept_hyperparameters]
    parts = []
    if stateless:
        parts.append(f"missing the optimizer state of {some(stateless)}")
    if ungrouped:
        parts.append(f"missing in param_groups: {some(ungrouped)}")
    if parts:
        raise StateDictMismatch(
            f"the state dict does not fit the optimizer: {'; '.join(parts)}",
            missing_keys=list(dict.fromkeys(stateless + ungrouped)),
            hint="Pass strict=False to load what fits.",
        )


def _plan(
    names: Names,
    optimizer: torch.optim.Optimizer,
    saved: Saved,
    options: StateDictOptions,
    empty: Iterator[dict[str, Any]],
) -> OptimizerPlan:
    plan = OptimizerPlan(optimizer)
    fresh = FreshStates(optimizer)
    for group in optimizer.param_groups:
        plan.hyper.append(_hyper(group, names, saved, options, plan, empty))
        for param in group["params"]:
            name = _saved_name(param, names, saved.state)
            if name is None:
                # A frozen parameter that was never trained has no state to miss.
                if param.requires_grad and (optimizer.state.get(param) or fresh.of(param)):
                    plan.report.missing_keys.append(first_name(param, names))
                continue
            target = Target(name, param, group, optimizer.state.get(param, {}), fresh, options)
            plan.state[param] = place(target, saved.state[name], plan.moves)
            plan.report.loaded.append(name)
    held = {fqn for g in optimizer.param_groups for p in g["params"] for fqn in names.fqns(p)}
    plan.report.unexpected_keys.extend(name for name in saved.state if name not in held)
    plan.other = copy.deepcopy(saved.other)
    return plan


def _saved_name(param: torch.Tensor, names: Names, saved: Mapping[str, Any]) -> str | None:
    first_name(param, names)
    return next((name for name in names.fqns(param) if name in saved), None)


def _hyper(
    group: dict[str, Any],
    names: Names,
    saved: Saved,
    options: StateDictOptions,
    plan: OptimizerPlan,
    empty: Iterator[dict[str, Any]],
) -> dict[str, Any]:
    """The saved hyperparameters for a group, found through its parameters, in whatever order."""
    if not group["params"]:
        return _settled(next(empty, {}), group)
    chosen: dict[str, Any] | None = None
    source = ""
    for param in group["params"]:
        name = _saved_name(param, names, saved.hyper)
        if name is None:
            plan.report.kept_hyperparameters.append(first_name(param, names))
            continue
        if chosen is None:
            chosen, source = saved.hyper[name], name
        elif chosen is not saved.hyper[name]:
            _check_same(chosen, saved.hyper[name], source, name)
    return _settled(chosen or {}, group)


def _check_same(a: dict[str, Any], b: dict[str, Any], first: str, second: str) -> None:
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


def _settled(hyper: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Copies, so that the optimizer and the caller's dict share nothing that can change."""
    found = {}
    for key, value in hyper.items():
        if key == "param_names":  # what this optimizer calls its own parameters
            continue
        value = copy.deepcopy(value)
        live = group.get(key)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(live.device)
        found[key] = value
    return found


def is_left_to_us(optimizer: torch.optim.Optimizer) -> bool:
    """Whether loading an optimizer runs no hooks and no method of its own.

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
    """The state and the groups that the optimizer is to have."""
    state = {**plan.optimizer.state, **plan.state, **plan.other}
    # What was never stepped has no entry: some optimizers look into whichever comes first.
    return {key: value for key, value in state.items() if not isinstance(value, dict) or value}, [
        {**group, **hyper, "params": group["params"]}
        for group, hyper in zip(plan.optimizer.param_groups, plan.hyper, strict=True)
    ]


def _rehearse(plan: OptimizerPlan) -> None:
    """Let a stand-in take the new state, because optimizers look at it last, in ``__setstate__``.

    Raises:
        StateDictMismatch: it cannot use it.
    """
    optimizer = plan.optimizer
    if not is_left_to_us(optimizer):
        return
    state, groups = _loaded(plan)
    parts = {key: dict(v) if isinstance(v, dict) else v for key, v in state.items()}
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(vars(optimizer))
    try:
        stand_in.__setstate__({"state": defaultdict(dict, parts), "param_groups": groups})
    except Exception as error:
        raise StateDictMismatch(
            f"{type(optimizer).__name__} cannot use this state: {type(error).__name__}: {error}",
            hint="Was it saved by an optimizer of another kind?",
        ) from error


def apply_optimizer(plan: OptimizerPlan) -> None:
    """Give an optimizer its new state, after the moves are done."""
    optimizer = plan.optimizer
    state, groups = _loaded(plan)
    load = own(optimizer, "load_state_dict")
    if is_left_to_us(optimizer):
        # Optimizer.load_state_dict would cast every moment to its parameter's dtype, which loses
        # what float32 moments of bfloat16 weights hold (pytorch/pytorch#43706).
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            group.update(new)
        kept = defaultdict(dict, state)
        optimizer.__setstate__({"state": kept, "param_groups": optimizer.param_groups})
        return
    ids = {id(p): n for n, p in enumerate(_unique(groups))}
    load(
        {
            "state": {ids.get(id(key), key): value for key, value in state.items()},
            "param_groups": [{**g, "params": [ids[id(p)] for p in g["params"]]} for g in groups],
        }
    )
    if _is_plain(optimizer):
        _uncast(optimizer, plan.state)


def _unique(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return list({id(param): param for group in groups for param in group["params"]}.values())


def _uncast(optimizer: torch.optim.Optimizer, given: Mapping[torch.Tensor, dict[Any, Any]]) -> None:
    """Put back what the base class cast to the dtype of the parameter, and nothing a hook did."""
    for param, state in given.items():
        live = optimizer.state[param]
        for key, value in state.items():
            now = live.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if both and now.dtype == param.dtype != value.dtype:
                live[key] = value


def merged(plans: Sequence[OptimizerPlan]) -> OptimizerReport:
    """One report for several optimizers: unexpected is what none of them holds."""
    report = OptimizerReport()
    for plan in plans:
        report.loaded.extend(plan.report.loaded)
        report.missing_keys.extend(plan.report.missing_keys)
        report.kept_hyperparameters.extend(plan.report.kept_hyperparameters)
    if plans:
        report.unexpected_keys.extend(
            name
            for name in plans[0].report.unexpected_keys
            if all(name in plan.report.unexpected_keys for plan in plans)
        )
    return report


def some(items: list[str], limit: int = 8) -> str:
    """Return the first of many names, in quotes.

    Example:
        >>> some(["a", "b", "c"], limit=2)
        "'a', 'b' and 1 more"
    """
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(repr, items[:limit])) + more

"""A load of model and optimizers together: checked as a whole, on every rank, then done.

The model's part is `torchlift.load` with a state dict as its source. What is special here: names,
what travels between ranks, and results as torch's functions have them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from operator import and_
from typing import Any

import torch

from torchlift._load import Agreed, fetch_all, place
from torchlift._model import (
    Commit,
    ModuleTree,
    Names,
    RankGroup,
    by_name,
    is_dtensor,
    layout_of,
    portable,
    rank,
    ranks_of,
    reshard,
    spread_of,
    versions_of,
)
from torchlift._plan import LoadPlan, Match, Options, allowed, make_plan
from torchlift._sources import MemoryTensor, Sent, StateSource, copy_values
from torchlift._system import Interruptible, leaves, map_leaves, uninterrupted
from torchlift.distributed.broadcast import BroadcastSource, sendable
from torchlift.distributed.gather import (
    Sequence,
    digests,
    map_tensors,
    relaid,
    require_alike,
    sequence,
)
from torchlift.distributed.optimizer_load import (
    OptimizerPlan,
    OptimizerReport,
    apply_optimizer,
    is_left_to_us,
    layout_for,
    merged,
    plan_optimizers,
)
from torchlift.distributed.optimizer_state import Saved, name_by_place, normalised
from torchlift.distributed.options import (
    UNEXPECTED,
    LoadCall,
    StateDictMismatch,
    StateDictOptions,
    bad_value,
    check_value,
    checked,
    misfit,
    model_misfit,
    several,
)
from torchlift.errors import CheckpointError


@dataclass
class State:
    """What there is to load.

    Attributes:
        model: canonical name -> value; None when the model is not to be loaded.
        optimizer: the optimizers' state; None when they are not to be loaded.
        versions: module versions (``_metadata``) of the model's state dict.
        tensors: with ``broadcast_from_rank0`` what rank 0 sends, elsewhere its descriptions.
        kind: device type of the model that has the state dict.
    """

    model: dict[str, Any] | None = None
    optimizer: Saved | None = None
    versions: Any = None
    tensors: list[torch.Tensor | Sent] = field(default_factory=list)
    kind: str = "cpu"


@dataclass
class _Job:
    """What this rank was asked for, once it is known to make sense."""

    names: Names
    tree: ModuleTree
    optimizers: tuple[torch.optim.Optimizer, ...]
    options: StateDictOptions
    state: State
    process_group: Any = None
    allow_missing: Collection[str] = ()


def load(call: LoadCall) -> tuple[list[str], list[str], OptimizerReport]:
    """Load a model and optimizers, or nothing at all, on every rank.

    Whatever is wrong with the arguments is found out inside what precedes an agreement: the other
    ranks would wait for one that had left before.

    Returns:
        Missing and unexpected keys by canonical name, and what happened to the optimizers.

    Raises:
        StateDictMismatch: something does not fit, on this rank or on another.
    """
    tree = ModuleTree(call.model)
    reshard(tree.modules)
    tensors = [group.tensor for group in tree.groups]
    among: dict[str, Any] = {
        "collective": call.collective, "process_group": call.process_group
    }  # fmt: skip
    group = RankGroup.of_model(tensors, tree.modules, StateDictMismatch, **among)
    # Where one rank of a model sends to all processes, the others take part, and then refuse.
    sends = bool(getattr(call.options, "broadcast_from_rank0", False))
    asked = set(group.run(lambda: (None, sends))[1].values())
    begin = partial(_begin, call, tree)

    def begin_alike() -> tuple[tuple[_Job, Sequence], dict[str, str]]:
        job = begin()
        loaded = {"model": job.state.model, "optimizers": job.state.optimizer}
        loading = [f"to load {name}" for name, state in loaded.items() if state is not None]
        other: dict[str, torch.Tensor] = {}
        _each_other_layout(job, lambda name, value, _: other.setdefault(name, value))
        steps = {"call": loading, **sequence(other, tensors)}
        return (job, steps), digests(steps)

    try:
        with torch.no_grad():
            if True in asked:
                if call.collective is False:
                    raise ValueError("broadcast_from_rank0=True is not for a rank that loads alone")
                group = RankGroup.of_all(StateDictMismatch, call.process_group)
                return _load(_received(group, begin, alike=len(asked) == 1), group)
            (job, steps), told = group.run(begin_alike)
            require_alike(group, steps, told.values())

            # This communicates: now, when no rank can be stopped by its modules' code.
            def laid_out(name: str, value: Any, live: Any) -> Any:
                if call.collective is False:
                    raise StateDictMismatch(
                        "a value has another layout than the model, which ranks change together",
                        entry=name,
                        expected=layout_of(live),
                        found=layout_of(value),
                        hint="Leave collective=False out.",
                    )
                return relaid(value, live)

            _each_other_layout(job, laid_out)
            return _load(job, group)
    except CheckpointError as error:
        if isinstance(error, StateDictMismatch):
            raise
        raise portable(error, StateDictMismatch) from error


def _begin(call: LoadCall, tree: ModuleTree) -> _Job:
    chosen, found = checked(call.options), several(call.optimizers, call.part)
    names = Names(tree, chosen.dsd_fqn_modifiers)
    name_by_place(names, found)
    job = _Job(
        names, tree, found, chosen, State(kind=_kind(tree)), call.process_group, call.allow_missing
    )
    if chosen.broadcast_from_rank0 and rank() != 0:
        return job
    model_state = call.model_dict(chosen.strict)
    if model_state is not None:
        job.state.model = by_name(model_state, names)
        job.state.versions = versions_of(job.state.model, names.key)
    if found:
        saved = normalised(call.optim_dict(chosen.strict), found, names)
        saved.leave_out(call.include, call.exclude, call.allow_missing)
        job.state.optimizer = saved
    moments = leaves(job.state.optimizer.state) if job.state.optimizer else {}
    values = {(name,): value for name, value in (job.state.model or {}).items()}
    for path, value in [*values.items(), *moments.items()]:
        if isinstance(value, torch.Tensor) and value.is_nested:
            # It has no shape to be compared, and torch fails where it is asked for one.
            check_value(".".join(map(str, path)), None, value, chosen)
    return job


def _load(job: _Job, group: RankGroup) -> tuple[list[str], list[str], OptimizerReport]:
    options, names, tree, state = job.options, job.names, job.tree, job.state
    broadcasts = options.broadcast_from_rank0
    missing: list[str] = []
    unexpected: list[str] = []
    numbers = {names.key(name): number for number, name in enumerate(state.model or ())}
    # The commit is the inner one: an interrupt while it takes things back would end that half-way.
    with uninterrupted() as deliver, Commit() as commit:
        asked = _engine_options(job)

        def prepare() -> tuple[tuple[LoadPlan | None, list[OptimizerPlan]], Any]:
            plan, plans = None, []
            if state.model is not None:
                check = partial(_check, job)
                plan = make_plan(tree, source, asked, commit, check=check)
            if state.optimizer is not None:
                plans = plan_optimizers(names, job.optimizers, state.optimizer, options)
                with Interruptible():
                    copy_values([item for each in plans for item in each.reads])
            extra = 0  # a bit for each name of rank 0's, which all ranks know in one order
            if broadcasts and plan is not None:
                extra = sum(1 << numbers[name] for name in plan.unexpected_keys)
            refuses = any(not is_left_to_us(each.optimizer) for each in plans)
            source.reserve()  # before the ranks go on: one without memory stops all
            deliver()  # an interrupt: here the others are told of it
            return (plan, plans), (refuses, options.strict, extra)

        source = _source(job)
        (plan, plans), told = group.run(prepare)
        # An optimizer's own code may still end the load; one strict rank is enough.
        refuses, strict = (any(each[at] for each in told.values()) for at in (0, 1))
        if broadcasts:
            # Unexpected is what no rank takes: the stages of a pipeline share one state dict.
            nobodys = reduce(and_, (extra for *_, extra in told.values()))
            unexpected = sorted(n for at, n in enumerate(state.model or ()) if nobodys >> at & 1)
            if unexpected and strict:
                raise misfit("model", {UNEXPECTED: unexpected}, unexpected_keys=unexpected)
        again = refuses or broadcasts
        with group.together() as agree:
            more = True
            if plan is not None:
                fetched = fetch_all(plan, source, None, _ignore)
                agreed = Agreed(agree, deliver, again)
                judge = partial(_check, job, path=source.path, options=asked)
                missing, extra, more = place(
                    tree, plan, fetched, source, commit, agreed, judge, _ignore
                )
                missing = [names.canonical(name) for name in missing]
                if not broadcasts:
                    unexpected = [names.canonical(name) for name in extra]
            for each in plans if refuses else ():
                commit.keep_optimizer(each.optimizer)
            more = more and agree(again and state.optimizer is not None)
            if state.optimizer is not None:
                source.fill([item for each in plans for item in each.copies])
                for each in plans:
                    apply_optimizer(each)
                if more:
                    agree(False)
            commit.finish()
    return missing, unexpected, merged(plans)


def _ignore(_: int) -> None:
    return None


# ---- the model


def _source(job: _Job) -> StateSource:
    """Return the state as the source of a load, the model's under the wrapped model's keys."""
    state, options = job.state, job.options
    values = {job.names.key(name): value for name, value in (state.model or {}).items()}
    if options.broadcast_from_rank0:
        device = _device(job)
        return BroadcastSource(
            values, state.versions, state.tensors, device, state.kind, job.process_group
        )
    return StateSource(values, state.versions, whole=options.full_state_dict)


def _device(job: _Job) -> torch.device:
    return torch.device("cpu" if job.options.cpu_offload else job.state.kind)


def _engine_options(job: _Job) -> Options:
    """Return what `torchlift.load` is asked for: live tensors stay where they are."""
    offload, where = job.options.cpu_offload, _device(job)
    device = {
        name: where
        for group in job.tree.groups
        if group.tensor.is_meta and (offload or not is_dtensor(group.tensor))
        for name in group.names
    }
    return Options(
        device=lambda entry: device.get(entry.key),
        strict=job.options.strict,
        allow_missing=job.allow_missing,
    )


def _check(job: _Job, matched: Match, path: str, options: Options) -> None:
    """Refuse names and shapes that do not fit, and values that are laid out in another way."""
    names, chosen, values = job.names, job.options, job.state.model or {}
    extra = set(matched.unexpected)
    for name in map(names.canonical, filter(extra.__contains__, matched.missing)):
        # As in torch, not strict means that names may be missing, not that values may be wrong.
        raise bad_value(name, f"a {type(values.get(name)).__name__}")
    if options.strict and chosen.ignore_frozen_params:
        # What was read with the same options lacks them; on meta there is no value to keep.
        left_out = {name for name in names.frozen if not names.tensors[name].is_meta}
        matched.missing = [n for n in matched.missing if names.canonical(n) not in left_out]
    for group, name, (candidate, *_) in matched.pairs:
        value = candidate.value if isinstance(candidate, MemoryTensor) else candidate
        check_value(names.canonical(name), group.tensor, value, chosen)
    missing = [names.canonical(name) for name in matched.missing] if options.strict else []
    excused = allowed(missing, job.allow_missing)
    missing = [name for name in missing if name not in excused]
    alone = options.strict and not chosen.broadcast_from_rank0
    unexpected = [names.canonical(name) for name in matched.unexpected] if alone else []
    shapes = {
        names.canonical(key): (item.expected, item.found)
        for key, item in matched.mismatched.items()
    }
    if missing or unexpected or shapes:
        raise model_misfit(missing, unexpected, shapes)


# ---- what the ranks do together


def _kind(tree: ModuleTree) -> str:
    """Return the device type of a model: where rank 0's values are received."""
    for group in tree.groups:
        if is_dtensor(group.tensor):
            return group.tensor.device_mesh.device_type
        if not group.tensor.is_meta:
            return group.tensor.device.type
    return "cpu"


def _each_other_layout(job: _Job, change: Callable[[str, Any, Any], Any]) -> None:
    """Replace values that are laid out otherwise on the mesh than the tensor they are for.

    Args:
        job: its state, not the caller's, is changed.
        change: called with a name, the value and the model's or optimizer's tensor.
    """

    def changed(name: str, value: Any, live: Any) -> Any:
        if not (is_dtensor(value) and is_dtensor(live)) or value.device_mesh != live.device_mesh:
            return value
        return value if spread_of(value) == spread_of(live) else change(name, value, live)

    model, saved = job.state.model or {}, job.state.optimizer or Saved()
    for name, tensor in job.names.tensors.items():  # on every rank in the same order
        if name in model:
            model[name] = changed(name, model[name], tensor)
    for optimizer in job.optimizers:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            live = leaves(optimizer.state.get(param, {})) if is_dtensor(param) else {}

            def of_state(
                value: Any, path: Any, live: Any = live, param: torch.Tensor = param
            ) -> Any:
                like = layout_for(value, live.get(path[1:]), param)
                return changed(".".join(map(str, path)), value, like)

            for name in job.names.fqns(param) if is_dtensor(param) else ():
                if name in saved.state:
                    saved.state[name] = map_leaves(saved.state[name], of_state, (name,))


def _received(group: RankGroup, begin: Callable[[], _Job], alike: bool) -> _Job:
    """Return this rank's job with rank 0's state."""

    def pack() -> tuple[tuple[_Job, bytes | None], bool]:
        job = begin()  # first, for what is wrong with the options themselves
        if 0 not in ranks_of(job.process_group):
            raise ValueError("broadcast_from_rank0=True needs rank 0 in process_group=")
        if not torch.distributed.is_initialized():
            raise StateDictMismatch(
                "broadcast_from_rank0=True needs a process group",
                hint="Call torch.distributed.init_process_group first, or leave the option out.",
            )
        return (job, _packed(job.state) if rank() == 0 else None), alike

    def unpack() -> tuple[State, None]:
        return pickle.loads(box[0] or b""), None  # an object in it may be unknown to this process

    (job, message), told = group.run(pack)
    if not all(told.values()):
        raise StateDictMismatch("broadcast_from_rank0 must be the same on every rank")
    box = [message]
    torch.distributed.broadcast_object_list(box, src=0, group=group.groups[0])
    state, _ = group.run(unpack)
    if rank() == 0:
        state.tensors = job.state.tensors
    return replace(job, state=state)


def _packed(state: State) -> bytes:
    """Return the state as it travels, and keep its tensors in order in its attribute `tensors`."""
    tensors: list[torch.Tensor | Sent] = []
    sent: dict[int, Sent] = {}

    def describe(tensor: torch.Tensor, name: str = "a tensor of the state dict") -> Sent:
        if id(tensor) not in sent:
            sent[id(tensor)] = Sent(len(tensors), tensor.shape, tensor.dtype)
            tensors.append(sendable(tensor, name))
        return sent[id(tensor)]

    model, optimizer = state.model, state.optimizer
    if model is not None:
        model = {
            name: describe(value, name) if isinstance(value, torch.Tensor) else value
            for name, value in model.items()
        }
    if optimizer is not None:
        optimizer = Saved(
            **{
                item.name: map_tensors(
                    getattr(optimizer, item.name),
                    describe if item.name == "state" else lambda tensor: tensor.detach().cpu(),
                )
                for item in fields(Saved)
            }
        )
    state.tensors = tensors
    described = replace(state, model=model, optimizer=optimizer, tensors=list(sent.values()))
    # Not left to the broadcast, where what cannot be packed stops rank 0 alone.
    try:
        return pickle.dumps(described)
    except Exception as error:
        raise StateDictMismatch(
            "an object in the state dict cannot be sent to other processes",
            found=f"{type(error).__name__}: {error}",
        ) from error

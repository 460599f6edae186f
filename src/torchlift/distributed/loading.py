"""A load of model and optimizers together: checked as a whole, on every rank, then done.

The model's part is `torchlift.load` with a state dict as its source. What is special here: names,
what travels between ranks, and results as torch's functions have them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from torchlift._load import Agreed, place
from torchlift._model.commit import Commit
from torchlift._model.dtensor import is_dtensor
from torchlift._model.fsdp import reshard
from torchlift._model.names import Names
from torchlift._model.ranks import Circle, portable, rank
from torchlift._model.slots import ModuleTree
from torchlift._plan import (
    LoadPlan,
    Match,
    Mismatch,
    Options,
    Sent,
    StateSource,
    fetch_all,
    make_plan,
)
from torchlift._system import uninterrupted
from torchlift.distributed.broadcast import BroadcastSource, sendable
from torchlift.distributed.gather import map_tensors
from torchlift.distributed.model_state import by_name, metadata_of
from torchlift.distributed.optimizer_load import (
    OptimizerPlan,
    OptimizerReport,
    apply_optimizer,
    is_left_to_us,
    merged,
    plan_optimizers,
    some,
)
from torchlift.distributed.optimizer_state import Saved, normalised
from torchlift.distributed.options import (
    Optimizers,
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    checked_model,
    require,
    several,
)
from torchlift.distributed.sequence import digests, require_same, sequence
from torchlift.errors import CheckpointError

T = TypeVar("T")
S = TypeVar("S")


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


class Keys(NamedTuple):
    """Canonical names that the state dict lacks, and those that the model has no use for."""

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class _Summary:
    """What the ranks tell each other when each has a plan.

    Attributes:
        refuses: whether an optimizer's own code runs there, and may end the load.
        strict: as in the options; one strict rank is enough.
        unexpected: names that this rank has no use for, where rank 0's are for all.
    """

    refuses: bool
    strict: bool
    unexpected: list[str]


def load(
    part: Part,
    model: nn.Module,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: Any,
) -> tuple[Keys, OptimizerReport]:
    """Load a model and optimizers, or nothing at all, on every rank.

    Whatever is wrong with the arguments is found out inside what precedes an agreement: the other
    ranks would wait for one that had left before.

    Args:
        part: what to load; with both there need be no optimizer.
        model: the model, wrapped or not.
        optimizers: its optimizers, perhaps none.
        model_state: by canonical name or by module.
        optim_state: in any form `normalised` knows.
        options: how to load, as the caller passed it.

    Returns:
        The names that did not fit, and what happened to the optimizers.

    Raises:
        StateDictMismatch: something does not fit, on this rank or on another.
    """
    tree = ModuleTree(checked_model(model))
    reshard(tree.modules)
    sends = bool(getattr(options, "broadcast_from_rank0", False))
    circle, sends, alike = _circle(tree, sends)

    def begin() -> _Job:
        job = _begin(part, tree, optimizers, model_state, optim_state, options)
        if not alike:
            raise StateDictMismatch(_DIFFERENT)
        return job

    def begin_alike() -> tuple[_Job, dict[str, Any]]:
        job = begin()
        given = (job.state.model is not None, job.state.optimizer is not None)
        return job, {"given": given, "layouts": digests(_layouts(job))}

    try:
        with torch.no_grad():
            if sends:
                job = _received(*_sent(circle, begin), circle)
            else:
                job, told = _agreed(circle, begin_alike)
                _require_alike(circle, job, told)
                _redistribute(job)
            return _load(job, circle)
    except CheckpointError as error:
        if isinstance(error, StateDictMismatch):
            raise
        raise portable(error, StateDictMismatch) from error


def _load(job: _Job, circle: Circle) -> tuple[Keys, OptimizerReport]:
    options, names, tree = job.options, job.names, job.tree
    missing: list[str] = []
    unexpected: list[str] = []
    with Commit() as commit:

        def prepare() -> tuple[tuple[LoadPlan | None, list[OptimizerPlan]], _Summary]:
            plan = None
            if origin is not None:
                asked, check = _engine_options(job), partial(_check, job)
                plan = make_plan(tree, origin, asked, commit, check=check)
            plans = []
            if job.state.optimizer is not None:
                plans = plan_optimizers(names, job.optimizers, job.state.optimizer, options)
            extra = [] if plan is None else [names.canonical(n) for n in plan.unexpected_keys]
            refuses = any(not is_left_to_us(plan.optimizer) for plan in plans)
            return (plan, plans), _Summary(refuses, options.strict, extra)

        origin = _origin(job)
        (plan, plans), told = _agreed(circle, prepare)
        summaries = list(told.values())
        if options.broadcast_from_rank0:
            # Unexpected is what no rank takes: the stages of a pipeline share one state dict.
            unexpected = sorted(set.intersection(*(set(s.unexpected) for s in summaries)))
            if unexpected and any(summary.strict for summary in summaries):
                raise mismatch([], unexpected, {})
        refuses = any(summary.refuses for summary in summaries)
        again = refuses or options.broadcast_from_rank0
        with uninterrupted() as deliver, circle.together() as agree:
            more = True
            if plan is not None and origin is not None:
                fetched = fetch_all(plan, origin, None, _ignore)
                agreed = Agreed(agree, deliver, again)
                strict = options.strict
                missing, extra, more = place(
                    tree, plan, fetched, origin, commit, agreed, strict, _ignore
                )
                missing = [names.canonical(name) for name in missing]
                if not options.broadcast_from_rank0:
                    unexpected = [names.canonical(name) for name in extra]
            if plans and refuses:
                for each in plans:
                    commit.keep_optimizer(each.optimizer)
            more = more and agree(again and job.state.optimizer is not None)
            if job.state.optimizer is not None:
                _load_optimizers(job, plans)
                if more:
                    agree(False)
            commit.finish()
    return Keys(missing, unexpected), merged(plans)


def _ignore(_: int) -> None:
    return None


def _load_optimizers(job: _Job, plans: list[OptimizerPlan]) -> None:
    copies = [item for plan in plans for item in plan.moves]
    if job.options.broadcast_from_rank0:
        device = torch.device("cpu")
        BroadcastSource({}, None, job.state.tensors, device, job.state.kind).fill(copies)
    else:
        StateSource({}).fill(copies)
    for plan in plans:
        apply_optimizer(plan)


# ---- the model


def _origin(job: _Job) -> StateSource | None:
    """Return the model's state dict as the source of a load, under the wrapped model's keys."""
    state, options = job.state, job.options
    if state.model is None:
        return None
    values = {job.names.key(name): value for name, value in state.model.items()}
    if options.broadcast_from_rank0:
        device = _device(job)
        return BroadcastSource(values, state.versions, state.tensors, device, state.kind)
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
    strict = job.options.strict
    return Options(device=lambda entry: device.get(entry.key), strict=strict, may_stay=True)


def _check(job: _Job, matched: Match, path: str, options: Options) -> None:
    """Refuse names and shapes that do not fit, and values that are laid out in another way."""
    names, chosen = job.names, job.options
    if chosen.strict and chosen.ignore_frozen_params:
        # What was read with the same options lacks them; on meta there is no value to keep.
        left_out = {
            slot.fqn
            for slot in names.slots
            if slot.is_frozen and slot.tensor is not None and not slot.tensor.is_meta
        }
        matched.missing = [n for n in matched.missing if names.canonical(n) not in left_out]
    for group, name, (candidate, *_) in matched.pairs:
        whole = isinstance(candidate.value, torch.Tensor) and not is_dtensor(candidate.value)
        if is_dtensor(group.tensor) and whole and not chosen.full_state_dict:
            raise StateDictMismatch(
                "the state dict has another layout than the model",
                entry=names.canonical(name),
                expected=f"{group.tensor.placements} on {group.tensor.device_mesh}",
                found="a plain tensor",
                hint="Pass full_state_dict=True: each rank takes its own slice.",
            )
    missing = [names.canonical(name) for name in matched.missing] if chosen.strict else []
    alone = chosen.strict and not chosen.broadcast_from_rank0
    unexpected = [names.canonical(name) for name in matched.unexpected] if alone else []
    if missing or unexpected or matched.mismatched:
        shapes = {names.canonical(key): item for key, item in matched.mismatched.items()}
        raise mismatch(missing, unexpected, shapes)


def mismatch(
    missing: list[str], unexpected: list[str], shapes: Mapping[str, Mismatch]
) -> StateDictMismatch:
    """Return the one error that lists everything that does not fit.

    Example:
        >>> print(mismatch(["a"], [], {}))
        the state dict does not fit the model: missing 'a'. Pass strict=False to load what fits.
    """
    parts = []
    if missing:
        parts.append(f"missing {some(missing)}")
    if unexpected:
        parts.append(f"unexpected {some(unexpected)}")
    if shapes:
        listed = [
            f"{key}: model {list(item.expected)}, state dict {list(item.found)}"
            for key, item in shapes.items()
        ]
        parts.append(f"size mismatch for {some(listed)}")
    return StateDictMismatch(
        f"the state dict does not fit the model: {'; '.join(parts)}",
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched={key: (item.expected, item.found) for key, item in shapes.items()},
        hint=None if shapes else "Pass strict=False to load what fits.",
    )


# ---- what the ranks do together

_DIFFERENT = "broadcast_from_rank0 must be the same on every rank"
_GIVEN = {
    (True, True): "a model and its optimizers",
    (True, False): "a model",
    (False, True): "optimizers",
    (False, False): "nothing",
}


def _circle(tree: ModuleTree, sends: bool) -> tuple[Circle, bool, bool]:
    """Return who loads together, whether rank 0 sends to all, and whether a model's ranks agree."""
    tensors = [group.tensor for group in tree.groups]
    circle, alike = Circle.of_model(tensors, tree.modules, StateDictMismatch), True
    if circle.groups and not circle.is_everybody:
        # Ranks of this model that send would wait for this one among all processes.
        answers = set(circle.exchange(None, sends)[1].values())
        sends, alike = True in answers, len(answers) == 1
    return Circle.of_all(StateDictMismatch) if sends else circle, sends, alike


def _agreed(circle: Circle, step: Callable[[], tuple[T, S]]) -> tuple[T, dict[int, S]]:
    """Return what this rank's step made, and what those of all ranks tell.

    Raises:
        StateDictMismatch: a rank's step raised an error, or ranks take different steps.
    """
    problem: BaseException | None = None
    done: tuple[T, S] | None = None
    try:
        done = step()
    except CheckpointError as error:
        problem = portable(error, StateDictMismatch)
        problem.__cause__ = error
    except BaseException as error:
        problem = error
    told = circle.agree(problem, done and done[1])
    assert done is not None
    if len({type(each) for each in told.values()}) > 1:
        raise StateDictMismatch(_DIFFERENT)
    return done[0], told


def _begin(
    part: Part,
    tree: ModuleTree,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: Any,
) -> _Job:
    chosen, found = checked(options), several(optimizers)
    if part is Part.OPTIMIZERS:
        require(found)
    names = Names(tree.model, chosen.dsd_fqn_modifiers)
    job = _Job(names, tree, found, chosen, State(kind=_kind(tree)))
    if chosen.broadcast_from_rank0 and rank() != 0:
        return job
    # With optimizers torch takes no model state, or an empty one, for a model to leave alone.
    if part is Part.MODEL or (part is Part.BOTH and not is_nothing(model_state)):
        given = state_dict(model_state, "model_state_dict", chosen.strict)
        job.state.model = by_name(given, names)
        job.state.versions = metadata_of(given, names)
    if found:
        given = state_dict(optim_state, "optim_state_dict", chosen.strict)
        job.state.optimizer = normalised(given, found, names)
    return job


def is_nothing(state: Any) -> bool:
    """Say whether an argument is no state dict, or an empty one.

    Example:
        >>> is_nothing({}), is_nothing([])
        (True, False)
    """
    return state is None or (isinstance(state, Mapping) and not state)


def state_dict(state: Any, argument: str, strict: bool) -> Mapping[Any, Any]:
    """Return a state dict as it was passed; nothing at all only where that is allowed.

    torch takes None for an empty dict, which is an error for it too unless ``strict`` is False
    (``_verify_state_dict`` in ``torch/distributed/checkpoint/state_dict.py``).

    Raises:
        TypeError: it is something else.
        StateDictMismatch: it is None, and the load is strict.

    Example:
        >>> state_dict(None, "model_state_dict", strict=False)
        {}
    """
    if state is None and strict:
        raise StateDictMismatch(
            f"{argument} is None: there is nothing to load",
            hint="Only ranks that rank 0 sends to (broadcast_from_rank0=True) need none.",
        )
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{argument} must be a dict, not {type(state).__name__}")
    return {} if state is None else state


def _kind(tree: ModuleTree) -> str:
    for group in tree.groups:
        if is_dtensor(group.tensor):
            return group.tensor.device_mesh.device_type
        if not group.tensor.is_meta:
            return group.tensor.device.type
    return "cpu"


def _require_alike(circle: Circle, job: _Job, told: Mapping[int, dict[str, Any]]) -> None:
    """Check that no rank leaves alone what another one loads, or loads it in another way.

    Raises:
        StateDictMismatch: one does; then on every rank.
    """
    (one, first), *others = sorted(told.items())
    for other, each in others:
        if each["given"] != first["given"]:
            raise StateDictMismatch(
                "the ranks do not load the same",
                expected=f"{_GIVEN[first['given']]} as on rank {one}",
                found=f"{_GIVEN[each['given']]} on rank {other}",
            )
    require_same(circle, _layouts(job), {rank: each["layouts"] for rank, each in told.items()})


def _other_layouts(job: _Job) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, live tensor) of values with other placements than the model's tensor."""
    for slot in job.names.slots:
        value, live = (job.state.model or {}).get(slot.fqn), slot.tensor
        if not (is_dtensor(value) and is_dtensor(live)) or live.is_meta:
            continue
        if value.device_mesh == live.device_mesh and value.placements != live.placements:
            yield slot.fqn, value, live


def _layouts(job: _Job) -> dict[str, list[str]]:
    found = {name: value for name, value, _ in _other_layouts(job)}
    return sequence(found, [group.tensor for group in job.tree.groups])


def _redistribute(job: _Job) -> None:
    """Do what has to communicate while no rank can be stopped by its modules' code."""
    assert job.state.model is not None or not list(_other_layouts(job))
    for name, value, live in list(_other_layouts(job)):
        job.state.model[name] = value.redistribute(placements=live.placements)  # type: ignore[index]


def _sent(circle: Circle, begin: Callable[[], _Job]) -> tuple[_Job, bytes]:
    """Return this rank's job, and rank 0's state as it travels: each tensor is a description."""

    def pack() -> tuple[tuple[_Job, bytes | None], None]:
        job = begin()  # first, for what is wrong with the options themselves
        if not torch.distributed.is_initialized():
            raise StateDictMismatch(
                "broadcast_from_rank0=True needs a process group",
                hint="Call torch.distributed.init_process_group first, or leave the option out.",
            )
        if rank() != 0:
            return (job, None), None
        tensors: list[torch.Tensor | Sent] = []
        message = _packed(_described(job.state, tensors))
        job.state.tensors = tensors
        return (job, message), None

    (job, message), _ = _agreed(circle, pack)
    box = [message]
    torch.distributed.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return job, box[0]


def _received(job: _Job, message: bytes, circle: Circle) -> _Job:
    """Return the job with rank 0's state."""

    def unpack() -> tuple[State, None]:
        return pickle.loads(message), None  # an object in it may be one this process cannot have

    state, _ = _agreed(circle, unpack)
    if rank() == 0:
        state.tensors = job.state.tensors
    return replace(job, state=state)


def _packed(state: State) -> bytes:
    # Not left to the broadcast, where what cannot be packed stops rank 0 alone.
    try:
        return pickle.dumps(state)
    except Exception as error:
        raise StateDictMismatch(
            "an object in the state dict cannot be sent to other processes",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _described(state: State, tensors: list[torch.Tensor | Sent]) -> State:
    """Return the state with its tensors moved to a list and their descriptions in their place."""
    places: dict[int, int] = {}

    def describe(tensor: torch.Tensor, name: str = "a tensor of the state dict") -> Sent:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(sendable(tensor, name))
        return Sent(places[id(tensor)], tensor.shape, tensor.dtype)

    if state.model is not None:
        state.model = {
            name: describe(value, name) if isinstance(value, torch.Tensor) else value
            for name, value in state.model.items()
        }
    if state.optimizer is not None:
        changed: dict[str, Any] = {
            item.name: getattr(state.optimizer, item.name) for item in fields(state.optimizer)
        }
        changed["state"] = map_tensors(state.optimizer.state, describe)
        for name in ("hyper", "empty", "other"):
            changed[name] = map_tensors(changed[name], lambda tensor: tensor.detach().cpu())
        state.optimizer = Saved(**changed)
    state.tensors = [Sent(at, tensor.shape, tensor.dtype) for at, tensor in enumerate(tensors)]
    return state

"""A load of model and optimizers together: checked as a whole, on every rank, then done."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from torchlift.distributed.model_load import ModelPlan, mismatch, plan_model
from torchlift.distributed.moves import Move, Sent, broadcast, copy
from torchlift.distributed.names import Names, reshard
from torchlift.distributed.offered import Offer, described, make_offer, packed
from torchlift.distributed.optimizer_load import (
    OptimizerPlan,
    OptimizerReport,
    merged,
    plan_optimizers,
)
from torchlift.distributed.options import (
    Optimizers,
    StateDictMismatch,
    StateDictOptions,
    checked,
    require,
    several,
)
from torchlift.distributed.perform import Work, carry_out
from torchlift.distributed.status import Circle, rank, tensors_of
from torchlift.distributed.undo import may_refuse, optimizer_may_refuse

T = TypeVar("T")
S = TypeVar("S")


@dataclass
class _Job:
    """What this rank was asked for, once it is known to make sense."""

    names: Names
    optimizers: tuple[torch.optim.Optimizer, ...]
    options: StateDictOptions
    offer: Offer


def load(
    model: nn.Module,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: Any,
    both: bool = False,
) -> tuple[ModelPlan, OptimizerReport]:
    """Load a model and optimizers, or nothing at all, on every rank.

    Whatever is wrong with the arguments is found out inside what precedes an agreement: the other
    ranks would wait for one that had left before.

    Args:
        model: the model, wrapped or not.
        optimizers: its optimizers, perhaps none.
        model_state: by canonical name or by module; None leaves the model alone.
        optim_state: in any form `normalised` knows; None leaves the optimizers alone.
        options: how to load, as the caller passed it.
        both: whether there need be no optimizer.

    Raises:
        StateDictMismatch: something does not fit, on this rank or on another.
    """
    sends = bool(getattr(options, "broadcast_from_rank0", False))
    circle = _circle(model, sends)
    begin = partial(_begin, model, optimizers, model_state, optim_state, options, both)
    if sends:
        begin = partial(_receive, *_send(circle, begin))

    def prepare() -> tuple[tuple[_Job, tuple[ModelPlan, list[OptimizerPlan]]], Said]:
        job = begin()
        plans = _plan(job)
        return (job, plans), _said(model, plans, job.offer, job.options)

    (job, plans), said = _agreed(circle, prepare)
    fill: Callable[[list[Move]], None] = copy
    if sends:
        _settle_unexpected(plans[0], said)
        fill = partial(broadcast, offered=job.offer.tensors, kind=job.offer.kind)
    work = Work(model, job.names, *job.offer.parts, *plans, job.options.strict, fill)
    _carry_out(work, circle, said)
    return plans[0], merged(plans[1])


def _circle(model: nn.Module, sends: bool) -> Circle:
    if sends:
        return Circle.of_all(StateDictMismatch)
    return Circle.of_model(tensors_of(model), model.modules(), StateDictMismatch)


def _agreed(circle: Circle, step: Callable[[], tuple[T, S]]) -> tuple[T, Collection[S]]:
    """What this rank's step made, and what those of all ranks have to say.

    Raises:
        StateDictMismatch: a rank's step raised an error, or ranks take different steps.
    """
    problem: BaseException | None = None
    done: tuple[T, S] | None = None
    try:
        done = step()
    except BaseException as error:
        problem = error
    said = circle.agree(problem, done and done[1]).values()
    assert done is not None
    if len({type(each) for each in said}) > 1:
        raise StateDictMismatch("broadcast_from_rank0 must be the same on every rank")
    return done[0], said


def _begin(
    model: nn.Module,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: Any,
    both: bool,
) -> _Job:
    chosen, found = checked(options), several(optimizers)
    if optim_state is not None and not both:
        require(found)
    reshard(model)
    names = Names(model, chosen.dsd_fqn_modifiers)
    if chosen.broadcast_from_rank0 and rank() != 0:
        return _Job(names, found, chosen, Offer())
    optim_state = optim_state if found else None
    return _Job(names, found, chosen, make_offer(model_state, optim_state, found, names))


def _carry_out(work: Work, circle: Circle, said: Collection[Said]) -> None:
    keeps = any(each.optimizer_refuses for each in said)
    careful = keeps or any(each.model_refuses for each in said)
    with torch.no_grad():
        carry_out(work, circle if careful else None, keeps)


@dataclass(frozen=True)
class Said:
    """What the ranks tell each other when all have a plan.

    Attributes:
        model_refuses, optimizer_refuses: whether code that is not torch's runs there, and may end
            the load.
        strict: as in the options; one strict rank is enough.
        unexpected: names that this rank has no use for, where rank 0's are for all.
    """

    model_refuses: bool
    optimizer_refuses: bool
    strict: bool
    unexpected: list[str]


def _said(
    model: nn.Module,
    plans: tuple[ModelPlan, list[OptimizerPlan]],
    offer: Offer,
    options: StateDictOptions,
) -> Said:
    return Said(
        offer.model is not None and may_refuse(model),
        any(optimizer_may_refuse(plan.optimizer) for plan in plans[1]),
        options.strict,
        plans[0].unexpected if options.broadcast_from_rank0 else [],
    )


def _settle_unexpected(plan: ModelPlan, said: Collection[Said]) -> None:
    """Unexpected is what no rank wants: the stages of a pipeline share one state dict.

    Raises:
        StateDictMismatch: there is such a name, and a rank is strict; then on every rank.
    """
    nobody = set.intersection(*(set(each.unexpected) for each in said))
    plan.unexpected = [name for name in plan.unexpected if name in nobody]
    if plan.unexpected and any(each.strict for each in said):
        raise mismatch([], plan.unexpected, {})


def _plan(job: _Job) -> tuple[ModelPlan, list[OptimizerPlan]]:
    model_plan, plans = ModelPlan(), []
    offer, options = job.offer, job.options
    if offer.model is not None:
        device = torch.device("cpu" if options.cpu_offload else offer.kind)
        alone = not options.broadcast_from_rank0
        model_plan = plan_model(job.names, offer.model, options, device, alone)
        model_plan.metadata = offer.metadata
    if offer.optimizer is not None:
        plans = plan_optimizers(job.names, job.optimizers, offer.optimizer, options)
    return model_plan, plans


def _send(circle: Circle, begin: Callable[[], _Job]) -> tuple[_Job, bytes]:
    """This rank's job, and rank 0's offer as it travels: each tensor is a description."""

    def pack() -> tuple[tuple[_Job, bytes | None], None]:
        job = begin()  # first, for what is wrong with the options themselves
        if not torch.distributed.is_initialized():
            raise StateDictMismatch(
                "broadcast_from_rank0=True needs a process group",
                hint="Call torch.distributed.init_process_group first, or leave the option out.",
            )
        if rank() != 0:
            return (job, None), None
        offered: list[torch.Tensor | Sent] = []
        message = packed(described(job.offer, offered))
        job.offer.tensors = offered
        return (job, message), None

    (job, message), _ = _agreed(circle, pack)
    box = [message]
    torch.distributed.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return job, box[0]


def _receive(job: _Job, message: bytes) -> _Job:
    """The job with rank 0's offer; an object in it may be one that this process cannot have."""
    offer: Offer = pickle.loads(message)
    if rank() == 0:
        offer.tensors = job.offer.tensors
    return replace(job, offer=offer)

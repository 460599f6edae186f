"""A load of model and optimizers together: checked as a whole, on every rank, then done."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from torchlift._model.names import Names, reshard
from torchlift._model.ranks import Circle, rank, tensors_of
from torchlift.distributed.model_load import ModelPlan, plan_model
from torchlift.distributed.moves import Move, Sent, broadcast, copy
from torchlift.distributed.offered import Offer, described, make_offer, packed
from torchlift.distributed.optimizer_load import (
    OptimizerPlan,
    OptimizerReport,
    merged,
    plan_optimizers,
)
from torchlift.distributed.options import (
    Optimizers,
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    checked_model,
    require,
    says,
    several,
)
from torchlift.distributed.perform import Work, carry_out
from torchlift.distributed.said import Said, require_alike, said_of, settle_unexpected

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
    part: Part,
    model: nn.Module,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: Any,
) -> tuple[ModelPlan, OptimizerReport]:
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

    Raises:
        StateDictMismatch: something does not fit, on this rank or on another.
    """
    circle, sends, alike = _circle(model, says(options, "broadcast_from_rank0"))

    def begin() -> _Job:
        job = _begin(part, model, optimizers, model_state, optim_state, options)
        if not alike:
            raise StateDictMismatch(_DIFFERENT)
        return job

    if sends:
        begin = partial(_receive, *_send(circle, begin))

    def prepare() -> tuple[tuple[_Job, tuple[ModelPlan, list[OptimizerPlan]]], Said]:
        job = begin()
        plans = _plan(job)
        return (job, plans), said_of(model, job.names, plans, job.offer, job.options)

    (job, plans), told = _agreed(circle, prepare)
    require_alike(circle, job.names, plans[0], told)
    said = told.values()
    fill: Callable[[list[Move]], None] = copy
    if sends:
        settle_unexpected(plans[0], said)
        fill = partial(broadcast, offered=job.offer.tensors, kind=job.offer.kind)
    work = Work(model, job.names, *job.offer.parts, *plans, job.options.strict, fill)
    _carry_out(work, circle, said)
    return plans[0], merged(plans[1])


_DIFFERENT = "broadcast_from_rank0 must be the same on every rank"


def _circle(model: nn.Module, sends: bool | None) -> tuple[Circle, bool, bool]:
    """Who loads together, whether rank 0 sends to all, and whether the ranks of a model say so.

    Args:
        model: the model; one that is none has no circle of its own.
        sends: what this rank's options say, None when nothing: they are an error then.
    """
    circle = Circle([])
    if isinstance(model, nn.Module):
        circle = Circle.of_model(tensors_of(model), model.modules(), StateDictMismatch)
    alike = True
    if circle.groups and not circle.is_everybody:
        # Ranks of this model that send would wait for this one among all processes.
        said = set(circle.exchange(None, sends)[1].values())
        sends, alike = True in said, True not in said or False not in said
    if sends is None:
        sends = not circle.groups  # then only those to whom rank 0 sends would wait
    return Circle.of_all(StateDictMismatch) if sends else circle, sends, alike


def _agreed(circle: Circle, step: Callable[[], tuple[T, S]]) -> tuple[T, dict[int, S]]:
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
    said = circle.agree(problem, done and done[1])
    assert done is not None
    if len({type(each) for each in said.values()}) > 1:
        raise StateDictMismatch(_DIFFERENT)
    return done[0], said


def _begin(
    part: Part,
    model: nn.Module,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: Any,
) -> _Job:
    chosen, found = checked(options), several(optimizers)
    if part is Part.OPTIMIZERS:
        require(found)
    reshard(checked_model(model))
    names = Names(model, chosen.dsd_fqn_modifiers)
    if chosen.broadcast_from_rank0 and rank() != 0:
        return _Job(names, found, chosen, Offer())
    offer = make_offer(part, model_state, optim_state, found, names, chosen.strict)
    return _Job(names, found, chosen, offer)


def _carry_out(work: Work, circle: Circle, said: Collection[Said]) -> None:
    keeps = any(each.optimizer_refuses for each in said)
    careful = keeps or any(each.model_refuses for each in said)
    with torch.no_grad():
        carry_out(work, circle if careful else None, keeps)


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

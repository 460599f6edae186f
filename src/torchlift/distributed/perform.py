"""A planned load carried out: the model, then its optimizers, or nothing on any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchlift._model.commit import Commit, restored
from torchlift._model.dtensor import is_dtensor
from torchlift._model.names import Names
from torchlift._model.ranks import Circle
from torchlift.distributed.model_load import ModelPlan, apply_model
from torchlift.distributed.model_state import tensors
from torchlift.distributed.moves import Move, apart
from torchlift.distributed.optimizer_load import OptimizerPlan, apply_optimizer
from torchlift.distributed.undo import keep_model, keep_optimizer


@dataclass(frozen=True)
class Work:
    """A load on which all ranks have agreed.

    Attributes:
        has_model, has_optimizers: what there is to load, the same on all ranks.
        fill: carries out moves; with ``broadcast_from_rank0`` all ranks call it together.
    """

    model: nn.Module
    names: Names
    has_model: bool
    has_optimizers: bool
    plan: ModelPlan
    plans: list[OptimizerPlan]
    strict: bool
    fill: Callable[[list[Move]], None]


def carry_out(work: Work, circle: Circle | None, keeps_optimizers: bool) -> None:
    """Load the model and then the optimizers.

    Args:
        work: what to do.
        circle: where somebody's own code may refuse the load: the processes that take everything
            back together. None where nobody's can.
        keeps_optimizers: whether an optimizer of any rank may refuse; where only a model may, the
            optimizers are not begun before all ranks have the model, and need not be kept.
    """
    moves = [*work.plan.moves, *(move for plan in work.plans for move in plan.moves)]
    moves = apart(moves, tensors(work.names) if work.has_model else ())
    count = len(work.plan.moves)
    into, others = moves[:count], moves[count:]
    if circle is None:
        _load_model(work, into)
        _load_optimizers(work, others)
        return
    with restored(work.model, always=False, every=True), Commit() as commit:
        _together(circle, lambda: _keep(work, commit, keeps_optimizers))
        _together(circle, lambda: _redistribute(work))
        _together(circle, lambda: _load_model(work, into))
        _together(circle, lambda: _load_optimizers(work, others))


def _together(circle: Circle, step: Callable[[], None]) -> None:
    problem: BaseException | None = None
    try:
        step()
    except BaseException as error:
        problem = error
    circle.agree(problem)


def _keep(work: Work, commit: Commit, optimizers: bool) -> None:
    if work.has_model:
        keep_model(work.model, commit)
    for plan in work.plans if optimizers else ():
        keep_optimizer(plan.optimizer, commit)


def _redistribute(work: Work) -> None:
    """Do what has to communicate while no rank can be stopped by its modules' code."""
    live: dict[str, Any] = {slot.fqn: slot.tensor for slot in work.names.slots}
    for name, value in other_layouts(work.names, work.plan).items():
        work.plan.handed[name] = value.redistribute(placements=live[name].placements)


def other_layouts(names: Names, plan: ModelPlan) -> dict[str, Any]:
    """What ``load_state_dict`` gets in another layout than the model's: it has to communicate."""
    found = {}
    for slot in names.slots:
        value, live = plan.handed.get(slot.fqn), slot.tensor
        if not (is_dtensor(value) and is_dtensor(live)) or value.device_mesh != live.device_mesh:
            continue
        if value.placements != live.placements:
            found[slot.fqn] = value
    return found


def _load_model(work: Work, moves: list[Move]) -> None:
    if work.has_model:
        work.fill(moves)
        apply_model(work.model, work.plan, work.names, work.strict)


def _load_optimizers(work: Work, moves: list[Move]) -> None:
    if work.has_optimizers:
        work.fill(moves)
    for plan in work.plans:
        apply_optimizer(plan)

"""A load of model and optimizers together: checked as a whole, on every rank, then done."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from torchlift.distributed.gather import map_tensors
from torchlift.distributed.layout import is_dtensor
from torchlift.distributed.model_load import ModelPlan, mismatch, plan_model
from torchlift.distributed.model_state import by_name, metadata_of, tensors
from torchlift.distributed.moves import Move, Sent, broadcast, copy, sendable
from torchlift.distributed.names import Names, reshard
from torchlift.distributed.optimizer_load import (
    OptimizerPlan,
    OptimizerReport,
    merged,
    plan_optimizers,
)
from torchlift.distributed.optimizer_state import Saved, normalised
from torchlift.distributed.options import StateDictMismatch, StateDictOptions
from torchlift.distributed.perform import Work, carry_out
from torchlift.distributed.status import Circle, portable, rank
from torchlift.distributed.undo import may_refuse, optimizer_may_refuse


@dataclass
class Offer:
    """What there is to load.

    Attributes:
        model: canonical name -> value; None when the model is not to be loaded.
        optimizer: the optimizers' part; None when they are not to be loaded.
        metadata: module versions of the model's part.
        tensors: with ``broadcast_from_rank0`` what rank 0 sends, elsewhere its descriptions.
        kind: device type of rank 0's model.
    """

    model: dict[str, Any] | None = None
    optimizer: Saved | None = None
    metadata: Any = None
    tensors: list[torch.Tensor | Sent] = field(default_factory=list)
    kind: str = "cpu"

    @property
    def parts(self) -> tuple[bool, bool]:
        """Whether there is a model's part, and an optimizer's."""
        return self.model is not None, self.optimizer is not None


def load(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    model_state: Any,
    optim_state: Any,
    options: StateDictOptions,
) -> tuple[ModelPlan, OptimizerReport]:
    """Load a model and optimizers, or nothing at all, on every rank.

    Args:
        model: the model, wrapped or not.
        optimizers: its optimizers, perhaps none.
        model_state: by canonical name or by module; None leaves the model alone.
        optim_state: in any form `normalised` knows; None leaves the optimizers alone.
        options: how to load.

    Raises:
        StateDictMismatch: something does not fit, on this rank or on another.
    """
    reshard(model)
    names = Names(model, options.dsd_fqn_modifiers)
    make = partial(_offer, model_state, optim_state, optimizers, names)
    offer = _receive_offer(make) if options.broadcast_from_rank0 else None
    circle = _circle(model, names, options)
    problem: BaseException | None = None
    say: Said | None = None
    try:
        offer = offer or make()
        plans = _plan(names, optimizers, offer, options)
        say = _said(model, plans, offer, options)
    except BaseException as error:
        problem = error
    said = circle.agree(problem, say).values()
    assert offer is not None
    fill: Callable[[list[Move]], None] = copy
    if options.broadcast_from_rank0:
        _settle_unexpected(plans[0], said)
        fill = partial(broadcast, offered=offer.tensors, kind=offer.kind)
    _carry_out(Work(model, names, *offer.parts, *plans, options.strict, fill), circle, said)
    return plans[0], merged(plans[1])


def _circle(model: nn.Module, names: Names, options: StateDictOptions) -> Circle:
    if options.broadcast_from_rank0:
        return Circle.of_all(StateDictMismatch)
    return Circle.of_model(tensors(names), model.modules(), StateDictMismatch)


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


def _offer(
    model_state: Any,
    optim_state: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Names,
) -> Offer:
    offer = Offer(kind=_kind(names))
    if model_state is not None:
        offer.model = by_name(model_state, names)
        offer.metadata = metadata_of(model_state, names)
    if optim_state is not None:
        offer.optimizer = normalised(optim_state, optimizers, names)
    return offer


def _kind(names: Names) -> str:
    for tensor in tensors(names):
        if is_dtensor(tensor):
            return tensor.device_mesh.device_type
        if not tensor.is_meta:
            return tensor.device.type
    return "cpu"


def _plan(
    names: Names,
    optimizers: Sequence[torch.optim.Optimizer],
    offer: Offer,
    options: StateDictOptions,
) -> tuple[ModelPlan, list[OptimizerPlan]]:
    model_plan, plans = ModelPlan(), []
    if offer.model is not None:
        device = torch.device("cpu" if options.cpu_offload else offer.kind)
        alone = not options.broadcast_from_rank0
        model_plan = plan_model(names, offer.model, options, device, alone)
        model_plan.metadata = offer.metadata
    if offer.optimizer is not None:
        plans = plan_optimizers(names, optimizers, offer.optimizer, options)
    return model_plan, plans


def _receive_offer(make: Callable[[], Offer]) -> Offer:
    """Rank 0's offer on every rank, each tensor replaced by its description."""
    box: list[Any] = [None]
    problem: Exception | None = None
    offered: list[torch.Tensor | Sent] = []
    if rank() == 0:
        try:
            box[0] = _packed(_described(make(), offered))
        except Exception as error:
            box[0] = portable(error, StateDictMismatch)
            problem = error
    if not torch.distributed.is_initialized():
        raise StateDictMismatch(
            "broadcast_from_rank0=True needs a process group",
            hint="Call torch.distributed.init_process_group first, or leave the option out.",
        )
    torch.distributed.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise problem or box[0]
    offer: Offer = pickle.loads(box[0])
    offer.tensors = offered if rank() == 0 else offer.tensors
    return offer


def _packed(offer: Offer) -> bytes:
    # Not left to the broadcast, where what cannot be packed stops rank 0 alone.
    try:
        return pickle.dumps(offer)
    except Exception as error:
        raise StateDictMismatch(
            "an object in the state dict cannot be sent to other processes",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _described(offer: Offer, offered: list[torch.Tensor | Sent]) -> Offer:
    def describe(tensor: torch.Tensor, name: str = "a tensor of the state dict") -> Sent:
        offered.append(sendable(tensor, name))
        return Sent(len(offered) - 1, tensor.shape, tensor.dtype)

    if offer.model is not None:
        offer.model = {
            name: describe(value, name) if isinstance(value, torch.Tensor) else value
            for name, value in offer.model.items()
        }
    if offer.optimizer is not None:
        saved = offer.optimizer
        changed: dict[str, Any] = {f.name: getattr(saved, f.name) for f in fields(saved)}
        changed["state"] = map_tensors(saved.state, describe)
        for part in ("hyper", "empty", "other"):
            changed[part] = map_tensors(changed[part], lambda tensor: tensor.detach().cpu())
        offer.optimizer = Saved(**changed)
    offer.tensors = [Sent(n, tensor.shape, tensor.dtype) for n, tensor in enumerate(offered)]
    return offer

"""A load of model and optimizers together: checked as a whole, on every rank, then done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from torchlift.distributed.gather import map_tensors
from torchlift.distributed.layout import is_dtensor
from torchlift.distributed.model_load import ModelPlan, apply_model, mismatch, plan_model
from torchlift.distributed.model_state import by_name, metadata_of, tensors
from torchlift.distributed.moves import Sent, broadcast, copy, sendable
from torchlift.distributed.names import Names, reshard
from torchlift.distributed.optimizer_load import (
    OptimizerPlan,
    OptimizerReport,
    apply_optimizer,
    merged,
    plan_optimizers,
)
from torchlift.distributed.optimizer_state import Saved, normalised
from torchlift.distributed.options import StateDictMismatch, StateDictOptions
from torchlift.distributed.status import Circle, rank


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
    if options.broadcast_from_rank0:
        offer = _receive_offer(make)
        circle = Circle.of_all(StateDictMismatch)
    else:
        offer = None
        circle = Circle.of_model(tensors(names), model.modules(), StateDictMismatch)
    problem: BaseException | None = None
    try:
        offer = offer or make()
        model_plan, plans = _plan(names, optimizers, offer, options)
    except BaseException as error:
        problem = error
    circle.agree(problem)
    assert offer is not None
    with torch.no_grad():
        _transfer(model_plan, plans, offer, options)
        if offer.model is not None:
            apply_model(model, model_plan, names, options.strict)
        for plan in plans:
            apply_optimizer(plan, names)
    return model_plan, merged(plans)


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


def _transfer(
    model_plan: ModelPlan, plans: list[OptimizerPlan], offer: Offer, options: StateDictOptions
) -> None:
    moves = [*model_plan.moves, *(move for plan in plans for move in plan.moves)]
    if not options.broadcast_from_rank0:
        copy(moves)
        return
    broadcast(moves, offer.tensors, offer.kind, _checker(model_plan, offer, options))


def _checker(
    plan: ModelPlan, offer: Offer, options: StateDictOptions
) -> Callable[[Sequence[int]], None]:
    """Unexpected is what no rank wants: the stages of a pipeline share one state dict."""

    def check(wanted: Sequence[int]) -> None:
        chosen = set(wanted)
        indices = {name: value.index for name, value in _sent(offer).items()}
        plan.unexpected = [n for n in plan.unexpected if indices.get(n, -1) not in chosen]
        if options.strict and plan.unexpected:
            raise mismatch([], plan.unexpected, {})

    return check


def _sent(offer: Offer) -> dict[str, Sent]:
    return {name: v for name, v in (offer.model or {}).items() if isinstance(v, Sent)}


def _receive_offer(make: Callable[[], Offer]) -> Offer:
    """Rank 0's offer on every rank, each tensor replaced by its description."""
    box: list[Any] = [None]
    offered: list[torch.Tensor | Sent] = []
    if rank() == 0:
        try:
            box[0] = _described(make(), offered)
        except Exception as error:
            box[0] = error
    if not torch.distributed.is_initialized():
        raise StateDictMismatch(
            "broadcast_from_rank0=True needs a process group",
            hint="Call torch.distributed.init_process_group first, or leave the option out.",
        )
    torch.distributed.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    offer: Offer = box[0]
    offer.tensors = offered if rank() == 0 else offer.tensors
    return offer


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

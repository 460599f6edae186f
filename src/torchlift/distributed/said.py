"""What ranks tell each other when each has planned a load, and whether it makes sense together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from torchlift._model.names import Names
from torchlift._model.ranks import Circle
from torchlift.distributed.model_load import ModelPlan, mismatch
from torchlift.distributed.model_state import tensors
from torchlift.distributed.offered import Offer
from torchlift.distributed.optimizer_load import OptimizerPlan
from torchlift.distributed.options import StateDictMismatch, StateDictOptions
from torchlift.distributed.perform import other_layouts
from torchlift.distributed.sequence import Sequence, digests, require_same, sequence
from torchlift.distributed.undo import may_refuse, optimizer_may_refuse

_PARTS = {
    (True, True): "a model and its optimizers",
    (True, False): "a model",
    (False, True): "optimizers",
    (False, False): "nothing",
}


@dataclass(frozen=True)
class Said:
    """What the ranks tell each other when all have a plan.

    Attributes:
        model_refuses, optimizer_refuses: whether code that is not torch's runs there, and may end
            the load.
        strict: as in the options; one strict rank is enough.
        unexpected: names that this rank has no use for, where rank 0's are for all.
        parts: whether there is a model's part to load, and an optimizer's.
        layouts: what `load_state_dict` will redistribute, as `digests` tells it.
    """

    model_refuses: bool
    optimizer_refuses: bool
    strict: bool
    unexpected: list[str]
    parts: tuple[bool, bool]
    layouts: dict[str, str]


def said_of(
    model: nn.Module,
    names: Names,
    plans: tuple[ModelPlan, list[OptimizerPlan]],
    offer: Offer,
    options: StateDictOptions,
) -> Said:
    """What this rank tells the others."""
    return Said(
        offer.model is not None and may_refuse(model),
        any(optimizer_may_refuse(plan.optimizer) for plan in plans[1]),
        options.strict,
        plans[0].unexpected if options.broadcast_from_rank0 else [],
        offer.parts,
        digests(_layouts(names, plans[0])),
    )


def _layouts(names: Names, plan: ModelPlan) -> Sequence:
    """The values that have another layout than the model's tensors."""
    return sequence(other_layouts(names, plan), tensors(names))


def require_alike(circle: Circle, names: Names, plan: ModelPlan, told: dict[int, Said]) -> None:
    """Check that no rank leaves alone what another one loads, or loads it in another way.

    Args:
        circle: the processes that load together.
        names: of this rank's model.
        plan: what it is about to load.
        told: rank -> what it said.

    Raises:
        StateDictMismatch: one does; then on every rank.
    """
    (one, first), *others = sorted(told.items())
    for other, each in others:
        if each.parts != first.parts:
            raise StateDictMismatch(
                "the ranks do not load the same",
                expected=f"{_PARTS[first.parts]} as on rank {one}",
                found=f"{_PARTS[each.parts]} on rank {other}",
            )
    mine = _layouts(names, plan)
    require_same(circle, mine, {rank: each.layouts for rank, each in told.items()})


def settle_unexpected(plan: ModelPlan, said: Collection[Said]) -> None:
    """Unexpected is what no rank wants: the stages of a pipeline share one state dict.

    Raises:
        StateDictMismatch: there is such a name, and a rank is strict; then on every rank.
    """
    nobody = set.intersection(*(set(each.unexpected) for each in said))
    plan.unexpected = [name for name in plan.unexpected if name in nobody]
    if plan.unexpected and any(each.strict for each in said):
        raise mismatch([], plan.unexpected, {})

"""State dicts that are asked for on every rank: what is wrong on one of them, all learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchlift._model.fsdp import reshard
from torchlift._model.names import Names
from torchlift._model.ranks import Circle, tensors_of
from torchlift.distributed.gather import finish
from torchlift.distributed.model_state import read_model
from torchlift.distributed.optimizer_state import read_optimizers
from torchlift.distributed.options import (
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    checked_model,
    require,
    says,
    several,
)
from torchlift.distributed.sequence import Sequence, digests, require_same, sequence


def read(
    part: Part, model: nn.Module, optimizers: Any, submodules: Any, options: Any
) -> list[dict[str, Any]]:
    """The state dicts of a model and its optimizers; empty where they are not asked for.

    Ranks that gather do so when all have read theirs and are about to gather the same. Those that
    do not gather do not talk: then every rank may ask for what it likes, or not ask at all.

    Args:
        part: what is asked for.
        model: the model, wrapped or not.
        optimizers: as the caller passed them, and so is the rest.
        submodules: the only ones of which the model's state is wanted.
        options: whether to gather, what to leave out.
    """
    # Options that do not say are an error here; other ranks may have right ones, and gather.
    gathers = says(options, "full_state_dict") is not False
    problem: BaseException | None = None
    asked = _Asked(part, model)
    state: list[dict[str, Any]] = [{}, {}]
    mine: Sequence = {}
    try:
        asked = _asked(part, model, optimizers, submodules, options)
    except BaseException as error:
        problem = error
    shared = list(_shared(asked)) if gathers else []
    circle = Circle.of_model(shared, kind=StateDictMismatch)
    try:
        if problem is None:
            state = _read(asked)
            named = dict(zip(("model", "optimizer"), state, strict=True))
            mine = sequence(named, shared) if circle.groups else {}
    except BaseException as error:
        problem = error
    told = circle.agree(problem, (asked.options.cpu_offload, digests(mine)))
    require_same(circle, mine, {rank: each for rank, (_, each) in told.items()})
    all_offload = all(offloads for offloads, _ in told.values())
    return [finish(each, asked.options, all_offload) for each in state]


@dataclass(frozen=True)
class _Asked:
    """What this rank was asked for, once it is known to make sense."""

    part: Part
    model: Any
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    submodules: set[nn.Module] = field(default_factory=set)
    options: StateDictOptions = field(default_factory=StateDictOptions)


def _asked(part: Part, model: Any, optimizers: Any, submodules: Any, options: Any) -> _Asked:
    chosen, found = checked(options), several(optimizers)
    if Part.MODEL not in part:
        require(found)
    return _Asked(part, model, found, inside(checked_model(model), submodules), chosen)


def _read(asked: _Asked) -> list[dict[str, Any]]:
    model, options = asked.model, asked.options
    state: list[dict[str, Any]] = [{}, {}]
    if Part.MODEL in asked.part:
        names = Names(model, options.dsd_fqn_modifiers)
        state[0] = read_model(model, names, asked.submodules, options)
    if asked.optimizers:
        reshard(model.modules())
        names = Names(model, options.dsd_fqn_modifiers)
        state[1] = read_optimizers(names, asked.optimizers, options)
    return state


def _shared(asked: _Asked) -> Iterator[torch.Tensor]:
    """The tensors whose ranks gather together: those of submodules only, where that is enough.

    Submodules may have nothing to gather, and then not every rank need ask for them.
    """
    if not isinstance(asked.model, nn.Module):
        return  # it does not say with whom it is shared
    only = asked.submodules if not asked.optimizers else ()
    for module in only or (asked.model,):
        yield from tensors_of(module)


def inside(model: nn.Module, submodules: Any) -> set[nn.Module]:
    """The submodules that the model has; none stands for all of it.

    Raises:
        TypeError: they are no modules.
        StateDictMismatch: it has none of them.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1))
        >>> inside(model, [model[0]]) == {model[0]}
        True
    """
    if not submodules:
        return set()
    chosen = list(submodules) if isinstance(submodules, Iterable) else [submodules]
    wrong = [each for each in chosen if not isinstance(each, nn.Module)]
    if wrong:
        raise TypeError(f"submodules must be modules, not {wrong[0]!r}")
    found = set(chosen) & set(model.modules())
    if not found:
        raise StateDictMismatch("none of the submodules is part of the model")
    return found

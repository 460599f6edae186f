"""``FullyShardedDataParallel`` models: torch's own functions know their flat parameters best.

They communicate whatever the options, and look at their arguments only in between: so the ranks
compare theirs first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as own
from torch.nn.modules.module import _IncompatibleKeys

from torchlift._model.ranks import Circle, rank
from torchlift.distributed.loading import is_nothing, state_dict
from torchlift.distributed.optimizer_load import OptimizerReport
from torchlift.distributed.options import (
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    require,
    several,
)
from torchlift.distributed.reading import inside

Optimizers = tuple[torch.optim.Optimizer, ...]
#: What a call does -> a description of it, which must be the same on every rank.
Told = dict[str, str]
#: Except this: whether rank 0 sends a model.
_OF_RANK_0 = "what rank 0 sends"


def read(
    part: Part, model: nn.Module, optimizers: Any, submodules: Any, options: Any
) -> list[dict[str, Any]]:
    """What torch has: `get_model_state_dict` and `get_optimizer_state_dict`."""

    def prepare() -> tuple[Any, Told]:
        chosen, found = checked(options), several(optimizers)
        if Part.MODEL not in part:
            require(found)
        return (found, inside(model, submodules), _torch(chosen)), _told(chosen, found)

    (found, only, chosen), _ = _agreed(model, prepare)
    state: list[dict[str, Any]] = [{}, {}]
    if Part.MODEL in part:
        state[0] = own.get_model_state_dict(model, submodules=only, options=chosen)
    if found:
        state[1] = own.get_optimizer_state_dict(model, found, options=chosen)
    return state


def set_model(model: nn.Module, state: Any, options: Any) -> _IncompatibleKeys:
    """What torch has: `set_model_state_dict`, on a copy of the dict."""
    _, given, _, chosen = _checked(Part.MODEL, model, (), state, None, options)
    return own.set_model_state_dict(model, given, options=chosen)


def set_optimizer(model: nn.Module, optimizers: Any, state: Any, options: Any) -> OptimizerReport:
    """What torch has: `set_optimizer_state_dict`, on a copy."""
    found, _, given, chosen = _checked(Part.OPTIMIZERS, model, optimizers, None, state, options)
    loaded = sorted(map(str, given.get("state", ())))
    own.set_optimizer_state_dict(model, found, given, options=chosen)
    return OptimizerReport(loaded=loaded)


def set_both(
    model: nn.Module, optimizers: Any, model_state: Any, optim_state: Any, options: Any
) -> _IncompatibleKeys:
    """What torch has: `set_state_dict`, on copies."""
    found, first, second, chosen = _checked(
        Part.BOTH, model, optimizers, model_state, optim_state, options
    )
    # One by one, in torch's order: its set_state_dict leaves the model alone on ranks that have
    # nothing, and those that rank 0 sends to need nothing.
    if found:
        own.set_optimizer_state_dict(model, found, second, options=chosen)
    if first is None:
        return _IncompatibleKeys([], [])
    return own.set_model_state_dict(model, first, options=chosen)


def _checked(
    part: Part, model: nn.Module, optimizers: Any, first: Any, second: Any, options: Any
) -> Any:
    """The optimizers, copies of both state dicts (None: not to be loaded), and torch's options."""

    def prepare() -> tuple[Any, Told]:
        chosen, found = checked(options), several(optimizers)
        if part is Part.OPTIMIZERS:
            require(found)
        sends, told = chosen.broadcast_from_rank0, _told(chosen, found)
        strict = chosen.strict and not (sends and rank() != 0)
        model_state, optim_state = None, None
        if part is Part.MODEL or (part is Part.BOTH and not is_nothing(first)):
            model_state = _copied(state_dict(first, "model_state_dict", strict))
        if found:
            strict = strict and (rank() == 0 or not _is_rank_0_s(chosen))
            optim_state = _copied(state_dict(second, "optim_state_dict", strict))
        if not sends:
            _tell_of_states(told, model_state, optim_state, chosen)
        elif rank() == 0:
            told[_OF_RANK_0] = "nothing" if model_state is None else "a model"
        return (found, model_state, optim_state, _torch(chosen)), told

    (found, model_state, optim_state, chosen), told = _agreed(model, prepare)
    if chosen.broadcast_from_rank0 and rank() != 0:
        # What else a dict here holds, torch would call unexpected on this rank only.
        model_state = None if told.get(0, {}).get(_OF_RANK_0) == "nothing" else {}
    return found, model_state, optim_state, chosen


def _tell_of_states(
    told: Told, model_state: Any, optim_state: Any, options: StateDictOptions
) -> None:
    """Add what every rank has to have the same of when each has its own."""
    told["model_state_dict"] = _outline(model_state)
    if optim_state is not None:
        told["cpu_offload"] = str(_is_rank_0_s(options))
        told["optim_state_dict"] = "" if _is_rank_0_s(options) else _outline(optim_state)


def _is_rank_0_s(options: StateDictOptions) -> bool:
    """Whether torch looks at the optimizer state that rank 0 has and at no other."""
    return options.full_state_dict and options.cpu_offload


def _torch(options: StateDictOptions) -> own.StateDictOptions:
    return own.StateDictOptions(**vars(options))


def _told(options: StateDictOptions, optimizers: Optimizers) -> Told:
    """What decides how torch communicates; where it reads, ``cpu_offload`` may differ."""
    told = {"the number of optimizers": str(len(optimizers))}
    for name in ("full_state_dict", "broadcast_from_rank0"):
        told[name] = str(getattr(options, name))
    return told


def _agreed(
    model: nn.Module, prepare: Callable[[], tuple[Any, Told]]
) -> tuple[Any, dict[int, Told]]:
    """What this rank has prepared and what all told, when all have, and all the same.

    Raises:
        StateDictMismatch: a rank could not, or its call differs; then on every rank.
    """
    problem: BaseException | None = None
    made: Any = None
    mine: Told = {}
    try:
        made, mine = prepare()
    except BaseException as error:
        problem = error
    circle = Circle.of_model((), model.modules(), StateDictMismatch)
    known = circle.agree(problem, mine)
    (one, first), *others = sorted(known.items())
    for other, told in others:
        different = [n for n in first if told.get(n) != first[n] and n != _OF_RANK_0]
        if different:
            raise StateDictMismatch(
                "the ranks of a FullyShardedDataParallel do not ask for the same",
                entry=different[0],
                found=f"a difference between rank {one} and rank {other}",
                hint="Make the same call with the same arguments on every rank.",
            )
    return made, known


def _outline(tree: Any) -> str:
    """Keys, shapes and layouts of tensors, in few bytes: ranks read them together, one by one."""
    digest = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(f"{key}:".encode())
                visit(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif hasattr(value, "shape"):
            kind = "" if isinstance(value, nn.Parameter) else type(value).__name__
            digest.update(f"{kind.removesuffix('Tensor')}{list(value.shape)}".encode())
        digest.update(b";")

    visit(tree)
    return digest.hexdigest()[:16]


def _copied(tree: Any) -> Any:
    """New containers around the same tensors: torch pops keys from what it is given."""
    if isinstance(tree, Mapping):
        copy: dict[Any, Any] = OrderedDict() if isinstance(tree, OrderedDict) else {}
        copy.update({key: _copied(value) for key, value in tree.items()})
        if isinstance(tree, OrderedDict):
            # Modules migrate what has no version, or an old one: the versions come along.
            vars(copy).update(_copied(vars(tree)))
        return copy
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree

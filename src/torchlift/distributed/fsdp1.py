"""``FullyShardedDataParallel`` models: torch's own functions know their flat parameters best.

They communicate whatever the options, and look at their arguments only in between: so the ranks
compare theirs first.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as own

from torchlift._model.ranks import Circle, rank
from torchlift.distributed.gather import map_leaves
from torchlift.distributed.offered import is_nothing, state_dict
from torchlift.distributed.optimizer_load import OptimizerReport
from torchlift.distributed.options import (
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    require,
    several,
)

Optimizers = tuple[torch.optim.Optimizer, ...]


def read(
    part: Part,
    model: nn.Module,
    optimizers: Optimizers,
    submodules: set[nn.Module],
    options: StateDictOptions,
    problem: BaseException | None,
) -> list[dict[str, Any]]:
    """Return what torch's `get_model_state_dict` and `get_optimizer_state_dict` do.

    Raises:
        StateDictMismatch: a rank has a problem with its arguments, or other ones.
    """
    _agree(model, problem, _terms(optimizers, options))
    chosen = own.StateDictOptions(**vars(options))
    state: list[dict[str, Any]] = [{}, {}]
    if Part.MODEL in part:
        state[0] = own.get_model_state_dict(model, submodules=submodules, options=chosen)
    if optimizers:
        state[1] = own.get_optimizer_state_dict(model, optimizers, options=chosen)
    return state


def write(
    part: Part, model: nn.Module, optimizers: Any, model_state: Any, optim_state: Any, options: Any
) -> tuple[tuple[list[str], list[str]], OptimizerReport]:
    """Call torch's `set_model_state_dict` and `set_optimizer_state_dict` on copies of the dicts.

    Returns:
        Missing and unexpected keys, and what was loaded into the optimizers.
    """
    chosen, found = checked(options), several(optimizers)
    sends, is_sender = chosen.broadcast_from_rank0, rank() == 0
    # Where torch looks at the optimizer state of rank 0 only.
    one_for_all = sends or (chosen.full_state_dict and chosen.cpu_offload)
    terms, problem = _terms(found, chosen), None
    try:
        if part is Part.OPTIMIZERS:
            require(found)
        if part is Part.OPTIMIZERS or (part is Part.BOTH and is_nothing(model_state)):
            model_state = None
        else:
            strict = chosen.strict and (is_sender or not sends)
            model_state = _copied(state_dict(model_state, "model_state_dict", strict))
        if is_sender or not sends:
            terms["model_state_dict"] = "" if model_state is None else _digest(model_state)
        if found:
            strict = chosen.strict and (is_sender or not one_for_all)
            optim_state = _copied(state_dict(optim_state, "optim_state_dict", strict))
            terms["optim_state_dict"] = "" if one_for_all else _digest(optim_state)
    except BaseException as error:
        problem = error
    told = _agree(model, problem, terms)
    if sends and not is_sender:
        # What else a dict here holds, torch would call unexpected on this rank only.
        model_state = {} if told.get("model_state_dict", True) else None
    # One by one, in torch's order: its set_state_dict leaves the model alone on ranks that have
    # nothing, and those that rank 0 sends to need nothing.
    theirs = own.StateDictOptions(**vars(chosen))
    report = OptimizerReport()
    if found:
        report.loaded.extend(sorted(map(str, optim_state.get("state", ()))))
        own.set_optimizer_state_dict(model, found, optim_state, options=theirs)
    if model_state is None:
        return ([], []), report
    return own.set_model_state_dict(model, model_state, options=theirs), report


def _terms(optimizers: Optimizers, options: StateDictOptions) -> dict[str, str]:
    """Return what decides how torch communicates; where it reads, ``cpu_offload`` may differ."""
    return {
        "the number of optimizers": str(len(optimizers)),
        "full_state_dict": str(options.full_state_dict),
        "broadcast_from_rank0": str(options.broadcast_from_rank0),
    }


def _agree(
    model: nn.Module, problem: BaseException | None, terms: dict[str, str]
) -> dict[str, str]:
    """Return the terms of all ranks, which are those of each that has them.

    Raises:
        StateDictMismatch: a rank has a problem, or other terms; then on every rank.
    """
    known = Circle.of_model((), model.modules(), StateDictMismatch).agree(problem, terms)
    agreed: dict[str, str] = {}
    for other, told in sorted(known.items()):
        different = [n for n, text in told.items() if agreed.setdefault(n, text) != text]
        if different:
            raise StateDictMismatch(
                "the ranks of a FullyShardedDataParallel do not ask for the same",
                entry=different[0],
                found=f"a difference between rank {min(known)} and rank {other}",
                hint="Make the same call with the same arguments on every rank.",
            )
    return agreed


def _digest(tree: Any) -> str:
    """Describe keys, shapes and layouts of tensors in few bytes: ranks read them one by one."""
    lines: list[str] = []

    def note(leaf: Any, path: tuple[Any, ...]) -> None:
        kind = type(leaf).__name__.replace("Parameter", "Tensor")
        lines.append(f"{path} {kind}{list(leaf.shape)}" if hasattr(leaf, "shape") else f"{path}")

    map_leaves(tree, note)
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _copied(state: Any) -> dict[Any, Any]:
    """Make new containers around the same tensors: torch pops keys from what it is given."""
    copied: dict[Any, Any] = OrderedDict(map_leaves(dict(state), lambda leaf, _: leaf))
    if hasattr(state, "_metadata"):
        # Modules migrate what has no version, or an old one: the versions come along.
        copied._metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    return copied

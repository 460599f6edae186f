"""``FullyShardedDataParallel`` models: torch's own functions know their flat parameters best.

They communicate whatever the options, and look at their arguments only in between: so the ranks
compare theirs first.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as own

from torchlift._model.names import Names
from torchlift._model.ranks import RankGroup, rank, ranks_of
from torchlift._model.slots import ModuleTree
from torchlift._model.state import unpatched, versioned, versions_of
from torchlift._model.torch_private import require_fsdp1_state
from torchlift._system.containers import leaves
from torchlift.distributed.gather import Sequence, digests, require_alike
from torchlift.distributed.optimizer_slots import OptimizerReport, present
from torchlift.distributed.optimizer_state import first_name, initial_state
from torchlift.distributed.options import (
    LoadCall,
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    several,
)

Optimizers = tuple[torch.optim.Optimizer, ...]


def read(
    part: Part,
    model: nn.Module,
    optimizers: Optimizers,
    submodules: set[nn.Module],
    options: StateDictOptions,
    check: Callable[[], None],
    process_group: Any,
) -> list[dict[str, Any]]:
    """Return what torch's `get_model_state_dict` and `get_optimizer_state_dict` do.

    Raises:
        StateDictMismatch: the check fails on a rank, or a rank has other arguments.
    """

    def begin() -> tuple[Sequence, dict[str, str]]:
        check()
        steps = {"call": _call(model, optimizers, options)}
        return steps, digests(steps)

    group = _group(model, process_group)
    steps, by_rank = group.run(begin)
    require_alike(group, steps, by_rank.values())
    chosen = own.StateDictOptions(**vars(options))
    state: list[dict[str, Any]] = [{}, {}]
    with unpatched(model, *optimizers):
        if Part.MODEL in part:
            found = own.get_model_state_dict(model, submodules=submodules, options=chosen)
            state[0] = versioned(found, _versions(model, found))
        if optimizers:
            with _without_step(optimizers):
                state[1] = own.get_optimizer_state_dict(model, optimizers, options=chosen)
    return state


def write(call: LoadCall) -> tuple[list[str], list[str], OptimizerReport]:
    """Call torch's `set_model_state_dict` and `set_optimizer_state_dict` on copies of the dicts.

    Returns:
        Missing and unexpected keys, and what was loaded into the optimizers.
    """
    if call.collective is False:
        raise ValueError(
            "collective=False is for a rank that loads alone, and the ranks of a "
            "FullyShardedDataParallel load together: leave it out"
        )
    if "*" not in call.include or call.exclude or call.allow_missing:
        raise ValueError(
            "include=, exclude= and allow_missing= are not for a FullyShardedDataParallel, which "
            "takes the state of all its parameters: shard the model with fully_shard"
        )
    group = _group(call.model, call.process_group)
    chosen, found = checked(call.options), several(call.optimizers)
    theirs = own.StateDictOptions(**vars(chosen))
    receives = chosen.broadcast_from_rank0 and rank() != 0
    # Where torch looks at the optimizer state of rank 0 only.
    offloads = chosen.full_state_dict and chosen.cpu_offload

    def begin() -> tuple[tuple[Any, Any, Sequence], tuple[dict[str, str], bool]]:
        several(found, call.part)
        strict = chosen.strict and not receives
        model = _add_paths(call.model, _copied(call.model_dict(strict)))
        strict = strict and (rank() == 0 or not offloads)
        optim = _copied(call.optim_dict(strict)) if found else None
        steps = {"call": _call(call.model, found, chosen)}
        try:
            if optim:
                require_fsdp1_state(call.model, found, optim, theirs)
        except (KeyError, RuntimeError, ValueError) as error:
            raise StateDictMismatch(
                "torch does not find in the state dict what the optimizer needs",
                found=f"{type(error).__name__}: {error}",
                hint="Pass strict=False to load what fits.",
            ) from error
        if not chosen.broadcast_from_rank0:
            steps["model_state_dict"] = _described(model)
            steps["optim_state_dict"] = ["on rank 0"] if offloads else _described(optim)
        return (model, optim, steps), (digests(steps), model is not None)

    (model_state, optim_state, steps), by_rank = group.run(begin)
    require_alike(group, steps, (each for each, _ in by_rank.values()))
    if receives:
        # What else a dict here holds, torch would call unexpected on this rank only.
        model_state = {} if 0 not in by_rank or by_rank[0][1] else None
    # One by one, in torch's order: its set_state_dict leaves the model alone on ranks that have
    # nothing, and those that rank 0 sends to need nothing.
    report = OptimizerReport()
    with unpatched(call.model, *found):
        if optim_state is not None:
            report.loaded.extend(sorted(map(str, optim_state.get("state", ()))))
            with _without_step(found, keep=True):
                own.set_optimizer_state_dict(call.model, found, optim_state, options=theirs)
        if model_state is None:
            return [], [], report
        return *own.set_model_state_dict(call.model, model_state, options=theirs), report


def _versions(model: nn.Module, state: Any) -> Any:
    """Return the module versions of a state dict by canonical path, which torch's have not.

    Where it gathers, it leaves them out.
    """
    tree = ModuleTree(model)
    raw: Any = OrderedDict()
    raw._metadata = {path[:-1]: {"version": module._version} for path, module in tree.paths}
    raw._metadata.update(getattr(state, "_metadata", None) or {})
    return versions_of(raw, Names(tree).canonical)


def _add_paths(model: nn.Module, state: Any) -> Any:
    """Add to a copy of a state dict the versions under the paths at which torch looks for them."""
    known = getattr(state, "_metadata", None)
    if known:
        tree = ModuleTree(model)
        names = Names(tree)
        for path, _ in tree.paths:
            canonical = names.canonical(f"{path}x")[:-1].removesuffix(".")
            if canonical in known:
                known.setdefault(path[:-1], known[canonical])
    return state


def _group(model: nn.Module, process_group: Any) -> RankGroup:
    """Return the ranks that agree: those of the model, over another group where one is named.

    Raises:
        ValueError: some ranks of the model are not in it, and torch would wait for them.
    """
    own = RankGroup.of_model((), model.modules(), StateDictMismatch)
    if process_group is None:
        return own
    absent = {who for each in own.groups for who in ranks_of(each)} - {*ranks_of(process_group)}
    if absent:
        raise ValueError(
            f"process_group= lacks ranks of the FullyShardedDataParallel: {sorted(absent)}"
        )
    return RankGroup([process_group], StateDictMismatch)


@contextmanager
def _without_step(optimizers: Optimizers, keep: bool = False) -> Iterator[None]:
    """Let torch find the initial state where it would step an optimizer that has none.

    Args:
        optimizers: they are as before when the block ends.
        keep: their state may have changed, unless there was an error.
    """
    patched = [vars(each).get("step") for each in optimizers]  # by a scheduler
    seeded = [each for each in optimizers if not each.state]
    try:
        for each in seeded:
            made = {p: initial_state(each, g, p) for g in each.param_groups for p in g["params"]}
            each.state.update({param: state for param, state in made.items() if state})
        for each in optimizers:
            vars(each)["step"] = lambda closure=None: None
        yield
        seeded = [] if keep else seeded
    finally:
        for each in seeded:
            each.state.clear()
        for each, step in zip(optimizers, patched, strict=True):
            vars(each).pop("step", None)
            if step is not None:
                vars(each)["step"] = step


def _call(model: nn.Module, optimizers: Optimizers, options: StateDictOptions) -> list[str]:
    """Describe what decides how torch communicates; where it reads, ``cpu_offload`` may differ.

    Raises:
        StateDictMismatch: an optimizer holds a parameter that the model does not.
    """
    names = Names(ModuleTree(model))
    lines = [f"{n}={getattr(options, n)}" for n in ("full_state_dict", "broadcast_from_rank0")]
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            what = f"group {number} of {type(optimizer).__name__}"
            lines += [what, *(f"{first_name(param, names)} in {what}" for param in group["params"])]
    return lines


def _described(tree: Any) -> list[str]:
    """Describe keys, shapes and layouts of tensors: torch reads them one by one, on all ranks."""
    lines = []
    for path, leaf in leaves(tree).items():
        kind = type(leaf).__name__.replace("Parameter", "Tensor")
        lines.append(f"{path} {kind}{list(leaf.shape)}" if hasattr(leaf, "shape") else f"{path}")
    return sorted(lines)


def _copied(state: Any) -> dict[Any, Any] | None:
    """Make new containers around the same tensors: torch pops keys from what it is given."""
    if state is None:
        return None
    copied: dict[Any, Any] = OrderedDict(present(dict(state)))
    if hasattr(state, "_metadata"):
        # Modules migrate what has no version, or an old one: the versions come along.
        copied._metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    return copied

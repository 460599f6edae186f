"""Read and load ``FullyShardedDataParallel`` models with torch's own functions.

Those communicate with any options, and check their arguments only in between. So the ranks compare
their arguments first.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as own

from torchlift._model.names import Names
from torchlift._model.ranks import RankGroup, StepResult, rank
from torchlift._model.slots import ModuleTree
from torchlift._model.state import unpatched, versioned, versions_of
from torchlift._model.torch_private import require_fsdp1_state
from torchlift._system.containers import leaves
from torchlift.distributed.gather import digests, require_same_steps
from torchlift.distributed.optimizer_slots import LoadedKeys, OptimizerReport, present
from torchlift.distributed.optimizer_state import Held, initial_state, name_parameters
from torchlift.distributed.options import (
    LoadCall,
    Part,
    StateDictMismatch,
    StateDictOptions,
    States,
    require_optimizers,
    to_tuple,
    validate_options,
)

Optimizers = tuple[torch.optim.Optimizer, ...]


def read(
    part: Part,
    model: nn.Module,
    optimizers: Optimizers,
    submodules: set[nn.Module],
    options: StateDictOptions,
    validate_arguments: Callable[[], None],
) -> States:
    """Return what torch's `get_model_state_dict` and `get_optimizer_state_dict` return.

    Raises:
        StateDictMismatch: If arguments are not valid on a rank, or differ between ranks.
    """

    def describe() -> StepResult[None, dict[str, str]]:
        validate_arguments()
        return StepResult(None, digests({"call": _describe_call(model, optimizers, options)}))

    require_same_steps(_group(model).run(describe).by_rank)
    chosen = own.StateDictOptions(**vars(options))
    model_state, moments = dict[str, Any](), dict[str, Any]()
    with unpatched(model, *optimizers):
        if Part.MODEL in part:
            found = own.get_model_state_dict(model, submodules=submodules, options=chosen)
            model_state = versioned(found, _versions(model, found))
        if optimizers:
            with _without_step(optimizers):
                moments = own.get_optimizer_state_dict(model, optimizers, options=chosen)
    return States(model_state, moments)


class _Copies(NamedTuple):
    """Copies of the state dicts of a load."""

    model: dict[Any, Any] | None
    optimizer: dict[Any, Any] | None


#: Key in the message of rank 0 if it sends a state dict of the model.
_SENDS = "rank 0 sends the model"


def write(call: LoadCall) -> LoadedKeys:
    """Call torch's `set_model_state_dict` and `set_optimizer_state_dict` with copies."""
    if call.collective is False or "*" not in call.include or call.exclude or call.allow_missing:
        raise ValueError(
            "the ranks of a FullyShardedDataParallel load together, and all parameters: leave "
            "collective=, include=, exclude= and allow_missing= out, or shard the model with "
            "fully_shard"
        )
    chosen, found = validate_options(call.options), to_tuple(call.optimizers)
    theirs = own.StateDictOptions(**vars(chosen))
    receives = chosen.broadcast_from_rank0 and rank() != 0
    # Then torch reads the optimizer state of rank 0 only.
    offloads = chosen.full_state_dict and chosen.cpu_offload

    def copy_states() -> StepResult[_Copies, dict[str, str]]:
        require_optimizers(found, call.part)
        model = _add_paths(call.model, _copy(call.model_dict()))
        optim = _copy(call.optim_dict()) if found else None
        # torch raises an error of its own, or loads nothing and reports success.
        for name, state in {"model": model, "optim": optim}.items():
            is_read = not receives and not (name == "optim" and offloads and rank() != 0)
            if state == {} and chosen.strict and is_read:
                raise StateDictMismatch(
                    f"{name}_state_dict is empty: there is nothing to load",
                    hint="Pass a state dict. Only ranks that receive from rank 0 "
                    "(broadcast_from_rank0=True) need none.",
                )
        steps = {"call": _describe_call(call.model, found, chosen)}
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
            steps["model_state_dict"] = _describe(model)
            steps["optim_state_dict"] = ["on rank 0"] if offloads else _describe(optim)
        elif rank() == 0 and model is not None:
            steps[_SENDS] = []
        return StepResult(_Copies(model, optim), digests(steps))

    (model_state, optim_state), by_rank = _group(call.model).run(copy_states)
    require_same_steps(by_rank)
    if receives:
        # torch would call other keys of a dict here unexpected, on this rank only.
        model_state = {} if any(_SENDS in each for each in by_rank.values()) else None
    # One by one, in torch's order: its set_state_dict leaves the model alone on ranks without a
    # state dict, and ranks that receive from rank 0 need none.
    report = OptimizerReport()
    missing: list[str] = []
    unexpected: list[str] = []
    with unpatched(call.model, *found):
        if optim_state is not None:
            report.loaded.extend(sorted(map(str, optim_state.get("state", ()))))
            with _without_step(found, keep=True):
                own.set_optimizer_state_dict(call.model, found, optim_state, options=theirs)
        if model_state is not None:
            missing, unexpected = own.set_model_state_dict(call.model, model_state, options=theirs)
    return LoadedKeys(missing, unexpected, report)


def _versions(model: nn.Module, state: Any) -> Any:
    """Return the module versions of a state dict by canonical path.

    torch has them by another path, and leaves them out if it gathers.
    """
    tree = ModuleTree(model)
    raw: Any = OrderedDict()
    raw._metadata = {path[:-1]: {"version": module._version} for path, module in tree.paths}
    raw._metadata.update(getattr(state, "_metadata", None) or {})
    return versions_of(raw, Names(tree).canonical)


def _add_paths(model: nn.Module, state: Any) -> Any:
    """Add the versions to a copy of a state dict, under the paths that torch looks up."""
    known = getattr(state, "_metadata", None)
    if known:
        tree = ModuleTree(model)
        names = Names(tree)
        for path, _ in tree.paths:
            canonical = names.canonical(f"{path}x")[:-1].removesuffix(".")
            if canonical in known:
                known.setdefault(path[:-1], known[canonical])
    return state


def _group(model: nn.Module) -> RankGroup:
    """Return the ranks that agree: torch waits for each rank of the model."""
    return RankGroup.of_model((), model.modules(), StateDictMismatch)


@contextmanager
def _without_step(optimizers: Optimizers, keep: bool = False) -> Iterator[None]:
    """Give optimizers their initial state, and no step: torch would step one without a state.

    Args:
        optimizers: They are as before when the block ends.
        keep: Whether the state that the block sets stays, unless it raises.
    """
    patched = [vars(each).get("step") for each in optimizers]  # a scheduler patches it
    seeded = [each for each in optimizers if not each.state]
    try:
        for each in seeded:
            made = {
                p: initial_state(Held([], p, g, each))
                for g in each.param_groups
                for p in g["params"]
            }
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


def _describe_call(
    model: nn.Module, optimizers: Optimizers, options: StateDictOptions
) -> list[str]:
    """Describe the arguments that decide how torch communicates. ``cpu_offload`` may differ.

    Raises:
        StateDictMismatch: If an optimizer holds a parameter that the model lacks.
    """
    lines = [f"{n}={getattr(options, n)}" for n in ("full_state_dict", "broadcast_from_rank0")]
    for holder in name_parameters(Names(ModuleTree(model)), optimizers):
        for number, group in enumerate(holder.groups):
            what = f"group {number} of {type(holder.optimizer).__name__}"
            lines += [what, *(f"{held.name} in {what}" for held in group)]
    return lines


def _describe(tree: Any) -> list[str]:
    """Describe keys and shapes of tensors. torch reads them one by one, on all ranks."""
    return sorted(f"{path} {getattr(leaf, 'shape', '')}" for path, leaf in leaves(tree).items())


def _copy(state: Any) -> dict[Any, Any] | None:
    """Copy the containers, not the tensors: torch pops keys from a state dict."""
    if state is None:
        return None
    copied: dict[Any, Any] = OrderedDict(present(dict(state)))
    if hasattr(state, "_metadata"):
        # Without its versions, modules would migrate a state dict as an old one.
        copied._metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    return copied

"""Results of the state dict functions and of torch's, compared on every rank of a process group."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as theirs
from wrapped_models import (
    MESHES,
    NOT_SHARDED,
    OPTIMIZERS,
    WRAPPERS,
    built,
    cloned,
    containers,
    lists,
    same,
)

import torchlift.distributed as ours

#: World size -> name of a check, with a comma in it, -> the check.
CHECKS: dict[int, dict[str, Callable[[], None]]] = {1: {}, 2: {}, 4: {}}

READ = (
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"flatten_optimizer_state_dict": True, "full_state_dict": True},
)
LOAD = (
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
)


def reads_as_torch_does(wrap: str, optimizer: str) -> None:
    model, optim = built(wrap, optimizer)
    for options in READ:
        mine = ours.get_state_dict(model, optim, options=ours.StateDictOptions(**options))
        other = theirs.get_state_dict(model, optim, options=theirs.StateDictOptions(**options))
        same(containers(mine[0]), containers(other[0]), f"{options} model")
        same(mine[1], other[1], f"{options} optimizer")


def loads_as_torch_does(wrap: str, optimizer: str) -> None:
    source = built(wrap, optimizer)
    for options in LOAD:
        read = {k: v for k, v in options.items() if k != "broadcast_from_rank0"}
        states = theirs.get_state_dict(*source, options=theirs.StateDictOptions(**read))
        states = cloned(states)
        if options.get("broadcast_from_rank0") and dist.get_rank():
            states = ({}, {})
        results = []
        for api in (ours, theirs):
            model, optim = built(wrap, optimizer, seed=3, steps=1)
            given = containers(states)
            chosen = api.StateDictOptions(**options)
            # One by one: torch's set_state_dict takes an empty model state dict for "no model",
            # on the ranks that are to receive it as well.
            api.set_model_state_dict(model, given[0], options=chosen)
            api.set_optimizer_state_dict(model, optim, given[1], options=chosen)
            if api is ours:
                same(given, containers(states), "the caller's dict")
            results.append((containers(model.state_dict()), optim.state_dict()))
        same(results[0][0], results[1][0], f"{options} model")
        same(results[0][1]["state"], results[1][1]["state"], f"{options} optimizer")
        # torch makes lists of tuples (Adam's betas) when it loads with full_state_dict.
        groups = [lists(result[1]["param_groups"]) for result in results]
        same(*groups, f"{options} groups")


def _compare(wrap: str, optimizer: str) -> Callable[[], None]:
    def both() -> None:
        reads_as_torch_does(wrap, optimizer)
        loads_as_torch_does(wrap, optimizer)

    return both


def _register_comparisons() -> None:
    for wrap in WRAPPERS:
        CHECKS[1][f"{wrap}, adam"] = _compare(wrap, "adam")
        CHECKS[2][f"{wrap}, adamw"] = _compare(wrap, "adamw")
    # A wrapping decides on names and layouts, an optimizer on the states of a parameter. What one
    # makes of the other, one wrapping of each kind shows.
    for wrap in ("ddp", "fsdp blocks", "tensor parallel"):
        for optimizer in sorted(OPTIMIZERS.keys() - (() if wrap == "ddp" else NOT_SHARDED)):
            CHECKS[2][f"{wrap}, {optimizer}"] = _compare(wrap, optimizer)
    for wrap in (*MESHES, "fsdp blocks", "tensor parallel"):
        CHECKS[4][f"{wrap}, adamw"] = _compare(wrap, "adamw")


_register_comparisons()

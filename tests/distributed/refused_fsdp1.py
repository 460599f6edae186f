"""One rank calls with other arguments, and the model is a ``FullyShardedDataParallel``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from refusals import (
    FROM_0,
    WHOLE,
    all_differ,
    check,
    getters,
    one_of,
    setters,
    whole,
)
from wrapped_models import cloned, containers, fsdp1, same

import torchlift.distributed as ours


@check
def arguments_for_fully_sharded_data_parallel() -> None:
    """torch's own functions communicate before they look at all of them."""
    model, optimizer = fsdp1()
    good = cloned(containers(ours.get_state_dict(model, optimizer, options=WHOLE)))
    before = cloned(dict(model.named_parameters()))
    for wrong in (None, {}, dict(list(good[0].items())[1:])):
        for part in ("model", "both"):
            with pytest.raises(ours.StateDictMismatch):
                setters(model, optimizer, one_of((wrong, good[1]), good))[part](options=WHOLE)
            dist.barrier()
    for wrong in (None, {}, {**good[1], "state": {}}):
        for part in ("optimizer", "both"):
            with pytest.raises(ours.StateDictMismatch):
                setters(model, optimizer, one_of((good[0], wrong), good))[part](options=WHOLE)
            dist.barrier()
    for load in setters(model, optimizer, good).values():
        with all_differ("do not select the same"):
            load(options=one_of(WHOLE, FROM_0))
    with all_differ("do not select the same"):
        ours.get_state_dict(model, one_of([], optimizer), options=WHOLE)
    mine = one_of({torch.nn.Linear(1, 1)}, {model})
    with pytest.raises(ours.StateDictMismatch, match="none of the submodules"):
        ours.get_model_state_dict(model, submodules=mine, options=WHOLE)
    dist.barrier()
    same(cloned(dict(model.named_parameters())), before)


@check
def fully_sharded_data_parallel_gets_all_from_rank_0() -> None:
    """Whatever the others pass, and whether or not there is a model to load."""
    model, optimizer = fsdp1()
    good = cloned(containers(ours.get_state_dict(model, optimizer, options=WHOLE)))
    for mine in ({}, None, good[0], {**good[0], "nobody": torch.ones(1)}):
        for value in good[0].values():
            value.add_(1)
        given = good[0] if dist.get_rank() == 0 else mine
        setters(model, optimizer, (given, good[1]))["both"](options=FROM_0)
        same(cloned(containers(whole(model))), good[0])
    setters(model, optimizer, ({}, good[1]))["both"](options=FROM_0)
    same(cloned(containers(whole(model))), good[0])


@check
def a_fully_sharded_data_parallel_needs_something_to_load() -> None:
    """torch raised an error of its own, or loaded nothing with success."""
    model, optimizer = fsdp1()
    offload = ours.StateDictOptions(full_state_dict=True, cpu_offload=True)
    for options in (WHOLE, FROM_0, offload):
        for nothing in (None, {}):
            with pytest.raises(ours.StateDictMismatch, match="model_state_dict is empty"):
                # None is not of the type that is declared, and torch takes it.
                ours.set_model_state_dict(model, nothing, options=options)  # type: ignore[arg-type]
            with pytest.raises(ours.StateDictMismatch, match="optim_state_dict is empty"):
                # As above.
                ours.set_optimizer_state_dict(model, optimizer, nothing, options=options)  # type: ignore[arg-type]


@check
def fully_sharded_data_parallel_loads_all_parameters_on_all_ranks() -> None:
    """torch waits for each of them, so none of them loads alone, and each loads everything."""
    model, optimizer = fsdp1()
    good = cloned(containers(ours.get_state_dict(model, optimizer, options=WHOLE)))
    for load in setters(model, optimizer, good).values():
        with pytest.raises(ValueError, match="the ranks of a FullyShardedDataParallel load togeth"):
            load(options=WHOLE, collective=False)
    with pytest.raises(ValueError, match="exclude= and allow_missing= out"):
        ours.load_optimizer(model, optimizer, good[1], exclude=["0.*"])
    same(cloned(containers(whole(model))), good[0])


@check
def an_optimizer_that_fits_on_one_rank_only() -> None:
    """torch raises there, and the other ranks would wait for it in what comes next."""
    model, optimizer = fsdp1()
    good = cloned(containers(ours.get_state_dict(model, optimizer, options=WHOLE)))
    stale = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    some = torch.optim.Adam(model.parameters())
    some.param_groups[0]["params"] = some.param_groups[0]["params"][:0]
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    for wrong in (stale, some, other):
        mine = one_of(wrong, optimizer)
        before = cloned(mine.state_dict())
        for call in (*getters(model, mine)[1:], setters(model, mine, good)["both"]):
            with pytest.raises(ours.StateDictMismatch):
                call(options=WHOLE)
            dist.barrier()
        same(cloned(mine.state_dict()), before)
    lacking = {**good[1], "state": dict(list(good[1]["state"].items())[1:])}
    given = lacking if dist.get_rank() == 0 else {}  # the others receive it, or need none
    for options in (FROM_0, ours.StateDictOptions(full_state_dict=True, cpu_offload=True)):
        with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight'"):
            ours.set_optimizer_state_dict(model, optimizer, given, options=options)
        dist.barrier()

"""Arguments that are wrong on one rank, or not the same on all: every rank raises, none waits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from refusals import (
    FROM_0,
    SHARDED,
    WHOLE,
    WRAPS,
    Options,
    all_differ,
    check,
    everybody_raises,
    getters,
    is_last,
    one_of,
    setters,
    unchanged,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from wrapped_models import built, cloned, containers, fsdp, net, same, train

import torchlift.distributed as ours

OFFLOADED = Options(full_state_dict=True, cpu_offload=True)


@check
def a_rank_that_asks_alone_waits_for_nobody() -> None:
    """Nothing is gathered, so nobody else need ask, and wrong options are an error at once."""
    model, optimizer = built("fsdp blocks")
    if is_last():
        states = ours.get_state_dict(model, optimizer)
        assert isinstance(states[0]["inp.weight"], DTensor)
        for get in getters(model, optimizer):
            with pytest.raises(TypeError, match="must be a StateDictOptions"):
                get(options={"cpu_offload": True})
    dist.barrier()


@check
def no_optimizers_on_one_rank() -> None:
    for wrap in SHARDED:
        model, optimizer = built(wrap)
        states = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
        call = partial(ours.get_optimizer_state_dict, model, one_of([], optimizer))
        everybody_raises(partial(call, options=WHOLE), RuntimeError, "no optimizer was passed")
        with all_differ("not select the same tensors"):
            ours.get_state_dict(model, one_of([], optimizer), options=WHOLE)
        with all_differ("do not select the same", model, optimizer):
            setters(model, one_of([], optimizer), states)["both"](options=WHOLE)


@check
def no_state_dict_on_one_rank() -> None:
    """torch takes None for an empty one, and either is an error unless others send theirs."""
    for wrap in WRAPS:
        model, optimizer = built(wrap)
        good = cloned(ours.get_state_dict(*built(wrap, seed=5), options=WHOLE))
        for wrong in (None, {}):
            model_only = setters(model, optimizer, (one_of(wrong, good[0]), good[1]))
            optimizer_only = setters(model, optimizer, (good[0], one_of(wrong, good[1])))
            for load in (model_only["model"], *optimizer_only.values()):
                if load is not optimizer_only["model"]:
                    with unchanged(model, optimizer):
                        load(options=WHOLE)
            with all_differ("do not select the same", model, optimizer):
                model_only["both"](options=WHOLE)
        receives = one_of((None, None), good)
        for load in setters(model, optimizer, receives).values():
            load(options=FROM_0)
        same(ours.get_state_dict(model, optimizer, options=WHOLE), good)
        with unchanged(model, optimizer) as caught:
            ours.set_model_state_dict(model, None, options=FROM_0)  # type: ignore[arg-type]
        assert "Missing key(s)" in str(caught.value)


@check
def state_dicts_of_another_kind_on_one_rank() -> None:
    model, optimizer = built("fsdp blocks")
    good = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
    for wrong in (5, "text", [("a", 1)]):
        for states, name in (((wrong, good[1]), "model"), ((good[0], wrong), "optimizer")):
            load = setters(model, optimizer, one_of(states, good))
            for part in (name, "both"):
                everybody_raises(partial(load[part], options=WHOLE), TypeError, "must be a dict")
    odd = ({5: 1}, {nn.Linear(1, 1): good[0]}, {model: 5}, dict.fromkeys(good[0], "text"))
    for wrong in odd:
        with unchanged(model, optimizer):
            ours.set_model_state_dict(model, one_of(wrong, good[0]), options=WHOLE)
    for changes in (
        {"state": 5},
        {"param_groups": 5},
        {"param_groups": [5]},
        {"param_groups": [{"lr": 1.0}]},
        {"state": dict.fromkeys(good[1]["state"], 5)},
    ):
        mine = one_of({**good[1], **changes}, good[1])
        with unchanged(model, optimizer):
            ours.set_optimizer_state_dict(model, optimizer, mine, options=WHOLE)


@check
def ranks_that_ask_for_different_tensors() -> None:
    """Some would gather what others do not, or shards of two tensors as one."""
    for wrap in SHARDED:
        model, optimizer = built(wrap)
        model.blocks[0].up.weight.requires_grad_(False)
        for options in (WHOLE, OFFLOADED):
            unfrozen = Options(**{**vars(options), "ignore_frozen_params": True})
            with all_differ("do not select the same"):
                ours.get_model_state_dict(model, options=one_of(unfrozen, options))
            for mine in ({model.blocks[1]}, None):
                with all_differ("do not select the same"):
                    ours.get_model_state_dict(
                        model, submodules=one_of(mine, {model.blocks[0]}), options=options
                    )
            backwards = torch.optim.Adam(list(model.parameters())[::-1])
            train(backwards)
            with all_differ("the same order"):
                ours.get_optimizer_state_dict(model, one_of(backwards, optimizer), options=options)


@check
def submodules_that_the_model_lacks_on_one_rank() -> None:
    model, _ = built("fsdp blocks")
    mine = one_of({nn.Linear(1, 1)}, {model.blocks[0]})
    with pytest.raises(ours.StateDictMismatch, match="none of the submodules"):
        ours.get_model_state_dict(model, submodules=mine, options=WHOLE)
    dist.barrier()


@check
def options_that_may_differ() -> None:
    """Each rank gets what it asked for, as with torch."""
    for wrap in SHARDED:
        model, optimizer = built(wrap)
        expected = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
        for mine in ((OFFLOADED, WHOLE), (WHOLE, OFFLOADED)):
            found = ours.get_state_dict(model, optimizer, options=mine[is_last()])
            gives = mine[is_last()] is WHOLE or dist.get_rank() == 0
            same(found, expected if gives else ({}, {}))
        flat = Options(full_state_dict=True, flatten_optimizer_state_dict=True)
        found = ours.get_state_dict(model, optimizer, options=one_of(flat, WHOLE))
        same(found[0], expected[0])
        assert ("state" in found[1]) is not is_last()


@check
def layouts_that_differ_on_one_rank() -> None:
    """``load_state_dict`` would redistribute there, and wait for the others."""
    model, optimizer = built("fsdp blocks")
    state = cloned(ours.get_model_state_dict(fsdp(net(5))))
    columns = {
        name: value.redistribute(placements=[Shard(1)])
        if isinstance(value, DTensor) and value.ndim > 1
        else value
        for name, value in state.items()
    }
    with all_differ("do not select the same", model, optimizer):
        ours.set_model_state_dict(model, one_of(columns, state))
    saved = ours.get_optimizer_state_dict(model, optimizer)
    moments = containers(saved)
    for moment in moments["state"].values():
        if isinstance(moment["exp_avg"], DTensor):
            moment["exp_avg"] = moment["exp_avg"].redistribute(placements=[Replicate()])
    with all_differ("do not select the same", model, optimizer):
        ours.set_optimizer_state_dict(model, optimizer, one_of(moments, saved))
    other = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    state["inp.weight"] = DTensor.from_local(
        state["inp.weight"].to_local(), one_of(other, model.inp.weight.device_mesh), [Shard(0)],
        shape=state["inp.weight"].shape, stride=state["inp.weight"].stride(),
    )  # fmt: skip
    with unchanged(model, optimizer) as caught:
        ours.set_model_state_dict(model, state)
    assert "another layout" in str(caught.value)
    plain = net()
    with unchanged(plain) as caught:
        ours.set_model_state_dict(plain, state)
    assert "another layout" in str(caught.value)


@check
def a_broadcast_that_half_of_the_ranks_know_nothing_of() -> None:
    """Their model lies on a mesh of their own, and so its ranks would wait for each other only."""
    half = dist.get_world_size() // 2
    if half < 2:
        return  # a mesh of one rank is shared with nobody
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "dp"))["dp"]
    model = fsdp(net(), mesh)
    state = cloned(net(5).state_dict())
    load = partial(ours.set_model_state_dict, model, state)
    with all_differ("the same on every rank", model):
        load(options=one_of(WHOLE, FROM_0))
    ours.set_model_state_dict(model, one_of({}, state), options=FROM_0)
    same(whole(model), state)

"""One rank cannot or will not load: every rank raises, none waits, and nothing changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hooked_models import TROUBLES, layers, refuses, state_for
from ranks import on
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import WRAPPERS, built, cloned, containers, fsdp, fsdp1, net, same, train

import torchlift
import torchlift.distributed as ours
from torchlift.errors import CheckpointError

Options = ours.StateDictOptions
WHOLE = Options(full_state_dict=True)
OFFLOADED = Options(full_state_dict=True, cpu_offload=True)
FROM_0 = Options(full_state_dict=True, broadcast_from_rank0=True)
Call = Callable[..., object]
#: Four ranks show those that neither refuse nor are rank 0: which does not depend on the wrapping.
TWO = os.environ.get("WORLD_SIZE") == "2"
SHARDED = ("fsdp blocks", "tensor parallel") if TWO else ("fsdp blocks",)
WRAPS = ("ddp", *SHARDED) if TWO else SHARDED


def last() -> int:
    return dist.get_world_size() - 1


def is_last() -> bool:
    return dist.get_rank() == last()


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Any]:
    """Every rank raises in the block, and everything is as it was."""

    def now() -> Any:
        state = optimizer.state_dict() if optimizer else None
        return cloned((containers(model.state_dict()), state))

    before = now()
    with pytest.raises((CheckpointError, RuntimeError, ValueError, CheckpointException)) as caught:
        yield caught
    same(now(), before)
    dist.barrier()


def everybody_raises(call: Callable[[], object], own: type[Exception], says: str) -> None:
    """The last rank its own error, and all others that one, at once."""
    with pytest.raises((own, ours.StateDictMismatch)) as caught:
        call()
    assert says in str(caught.value), str(caught.value)
    if is_last():
        assert isinstance(caught.value, own), repr(caught.value)
    else:
        assert f"on rank {last()}: {own.__name__}: " in str(caught.value), str(caught.value)
    dist.barrier()


def one_of(wrong: Any, right: Any) -> Any:
    return wrong if is_last() else right


def setters(model: nn.Module, optimizer: Any, states: Any) -> dict[str, Call]:
    """Every function that loads, called with options only."""
    both = {"model_state_dict": states[0], "optim_state_dict": states[1]}
    return {
        "model": partial(ours.set_model_state_dict, model, states[0]),
        "optimizer": partial(ours.set_optimizer_state_dict, model, optimizer, states[1]),
        "both": partial(ours.set_state_dict, model, optimizer, **both),
    }


def getters(model: nn.Module, optimizer: Any) -> list[Call]:
    return [
        partial(ours.get_model_state_dict, model),
        partial(ours.get_optimizer_state_dict, model, optimizer),
        partial(ours.get_state_dict, model, optimizer),
    ]


@contextmanager
def all_differ(says: str, *kept: Any) -> Iterator[None]:
    """Every rank raises the same; a model and an optimizer are as they were."""
    with unchanged(*kept) if kept else pytest.raises(ours.StateDictMismatch) as caught:
        yield
    assert isinstance(caught.value, ours.StateDictMismatch)
    assert says in str(caught.value), str(caught.value)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts


def load(model: nn.Module, optimizer: Any, states: Any, options: Any) -> None:
    ours.set_state_dict(
        model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
    )


@on(2, 4)
def test_a_module_that_refuses_on_one_rank() -> None:
    """The others have loaded when it does, and take it back."""
    for name, (make, says) in TROUBLES.items():
        inner = make() if is_last() else layers(type(make()[2]))  # type: ignore[index]
        good = layers(type(inner[2])) if name != "an_override_that_raises_half_way" else layers()
        if not is_last():
            inner = good
        state = state_for(inner)
        if not is_last() and name == "extra_state_that_is_refused":
            state["2._extra_state"] = ["good"]
        model = DistributedDataParallel(inner)
        optimizer = torch.optim.Adam(model.parameters())
        train(optimizer)
        saved = cloned(ours.get_optimizer_state_dict(model, optimizer))
        for moments in saved["state"].values():
            moments["exp_avg"].add_(1)
        with unchanged(model, optimizer) as caught:
            load(model, optimizer, (state, saved), WHOLE)
        assert says in str(caught.value), str(caught.value)
        assert is_last() or f"on rank {last()}: " in str(caught.value), str(caught.value)
        assert is_last() or isinstance(caught.value, ours.StateDictMismatch)


@on(2, 4)
def test_a_post_hook_that_refuses_on_one_rank_of_a_mesh() -> None:
    for wrap in WRAPS:
        for options in (WHOLE, FROM_0, ours.StateDictOptions()):
            model, optimizer = built(wrap)
            source = built(wrap, seed=5)
            if is_last():
                refuses(model)
            given = cloned(ours.get_state_dict(*source, options=options_for_get(options)))
            if options is FROM_0 and dist.get_rank() != 0:
                given = ({}, {})
            with unchanged(model, optimizer) as caught:
                load(model, optimizer, given, options)
            assert is_last() or f"on rank {last()}: ValueError: no" in str(caught.value)
            if "fsdp" in wrap:
                model.hidden = torch.zeros(3)
                x = torch.ones(4, 5)
                expected = WRAPPERS[wrap](net())
                train(torch.optim.Adam(expected.parameters(), lr=0.1), 2, 0)
                expected.hidden = torch.zeros(3)
                same(model(x).detach(), expected(x).detach(), "the next pass")


def options_for_get(options: Any) -> Any:
    return ours.StateDictOptions(full_state_dict=options.full_state_dict)


@on(2, 4)
def test_an_optimizer_that_refuses_on_one_rank() -> None:
    def refuse(optimizer: Any) -> None:
        raise ValueError("no")

    for wrap in WRAPS:
        model, optimizer = built(wrap)
        given = cloned(ours.get_state_dict(*built(wrap, seed=5)))
        if is_last():
            optimizer.register_load_state_dict_post_hook(refuse)
        with unchanged(model, optimizer):
            load(model, optimizer, given, ours.StateDictOptions())


@on(2, 4)
def test_one_bad_value_on_one_rank() -> None:
    """In the model, whose other values fit, or in the optimizer."""
    name = "blocks.1.up.weight"
    for wrap in WRAPS:
        states = cloned(ours.get_state_dict(*built(wrap, seed=5), options=WHOLE))
        for kind in BAD:
            for part in ("model", "optimizer"):
                model, optimizer = built(wrap)
                given = containers(states[0]), containers(states[1])
                values, key = given[0], name
                if part == "optimizer":
                    values, key = given[1]["state"][name], "exp_avg_sq"
                if is_last():
                    values[key] = BAD[kind](values[key])
                with unchanged(model, optimizer) as caught:
                    load(model, optimizer, given, WHOLE)
                assert isinstance(caught.value, ours.StateDictMismatch), (kind, wrap, part)
                assert is_last() or f"on rank {last()}" in str(caught.value), str(caught.value)


#: What becomes of a good value.
BAD = {
    "meta": lambda value: value.to("meta"),
    "sparse": lambda value: value.to_sparse(),
    "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "nested": lambda value: torch.nested.nested_tensor([value]),
    "shape": lambda value: torch.zeros(value.shape[0] + 1, *value.shape[1:]),
    "text": lambda value: "a text",
}


@on(2, 4)
def test_a_strict_rank_among_others() -> None:
    """It counts for all, whoever has the state dict."""
    for wrap in WRAPS:
        for options in (WHOLE, FROM_0):
            for odd in (True, False):
                model, optimizer = built(wrap)
                given = ours.get_state_dict(*built(wrap, seed=5), options=WHOLE)
                if odd:
                    given[0]["nobody.weight"] = torch.ones(3)
                else:
                    del given[0]["inp.weight"]
                mine = ours.StateDictOptions(**{**vars(options), "strict": is_last()})
                with unchanged(model, optimizer) as caught:
                    load(model, optimizer, given, mine)
                assert ("nobody.weight" if odd else "inp.weight") in str(caught.value)


@on(2, 4)
def test_arguments_that_make_no_sense_on_one_rank() -> None:
    """No optimizer, options of another kind, and half of what a broadcast needs."""
    for wrap in WRAPS:
        model, optimizer = built(wrap)
        state = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
        for options in (WHOLE, FROM_0):
            halves = ours.StateDictOptions(broadcast_from_rank0=options is FROM_0)
            halves.full_state_dict = options is not FROM_0
            for wrong, own, says in (
                (([], options), RuntimeError, "no optimizer was passed"),
                ((None, options), TypeError, "must be an optimizer"),
                ((optimizer, "text"), TypeError, "must be a StateDictOptions"),
                ((optimizer, halves), ValueError, "needs full_state_dict=True"),
            ):
                if wrong[1] is halves and options is WHOLE:
                    continue  # nothing is wrong with it
                mine = wrong if is_last() else (optimizer, options)
                call = partial(ours.set_optimizer_state_dict, model, mine[0], state[1])
                everybody_raises(partial(call, options=mine[1]), own, says)


@on(2, 4)
def test_a_broadcast_that_one_rank_knows_nothing_of() -> None:
    for wrap in WRAPS:
        model, optimizer = built(wrap)
        state = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
        for mine in ((WHOLE, FROM_0), (FROM_0, WHOLE)):
            with unchanged(model, optimizer) as caught:
                load(model, optimizer, state, mine[is_last()])
            assert "the same on every rank" in str(caught.value)


@on(2, 4)
def test_what_cannot_be_sent_is_an_error_everywhere() -> None:
    """Rank 0 has an object that no other process can have."""

    model = fsdp(net())
    with unchanged(model):
        ours.set_model_state_dict(model, {"extra": lambda: 0}, options=FROM_0)


@on(2, 4)
def test_a_state_that_one_rank_cannot_give() -> None:
    """The others do not wait for it to gather theirs; where nothing is gathered, nobody waits."""

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    for wrap in SHARDED:
        for offload in (False, True):
            options = Options(full_state_dict=True, cpu_offload=offload)
            model, optimizer = built(wrap)
            odd = torch.optim.Adam(net().parameters())
            with unchanged(model, optimizer) as caught:
                ours.get_optimizer_state_dict(
                    model, odd if is_last() else optimizer, options=options
                )
            assert is_last() or f"on rank {last()}: " in str(caught.value)
            if is_last():
                handle = model.register_state_dict_post_hook(refuse)
            with pytest.raises((ValueError, ours.StateDictMismatch)):
                ours.get_model_state_dict(model, options=options)
            if is_last():
                handle.remove()
            dist.barrier()
    replica = DistributedDataParallel(net())
    if is_last():
        ours.get_state_dict(replica, torch.optim.Adam(replica.parameters()), options=WHOLE)


# ---- arguments that are wrong on one rank, or not the same on all


@on(2, 4)
def test_a_rank_that_asks_alone_waits_for_nobody() -> None:
    """Nothing is gathered, so nobody else need ask, and wrong options are an error at once."""
    model, optimizer = built("fsdp blocks")
    if is_last():
        states = ours.get_state_dict(model, optimizer)
        assert isinstance(states[0]["inp.weight"], DTensor)
        for get in getters(model, optimizer):
            with pytest.raises(TypeError, match="must be a StateDictOptions"):
                get(options={"cpu_offload": True})
    dist.barrier()


@on(2, 4)
def test_no_optimizers_on_one_rank() -> None:
    for wrap in SHARDED:
        model, optimizer = built(wrap)
        states = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
        call = partial(ours.get_optimizer_state_dict, model, one_of([], optimizer))
        everybody_raises(partial(call, options=WHOLE), RuntimeError, "no optimizer was passed")
        with all_differ("not select the same tensors"):
            ours.get_state_dict(model, one_of([], optimizer), options=WHOLE)
        with all_differ("do not select the same", model, optimizer):
            setters(model, one_of([], optimizer), states)["both"](options=WHOLE)


@on(2, 4)
def test_no_state_dict_on_one_rank() -> None:
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


@on(2, 4)
def test_state_dicts_of_another_kind_on_one_rank() -> None:
    model, optimizer = built("fsdp blocks")
    good = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
    for wrong in (5, "text", [("a", 1)]):
        for states, name in (((wrong, good[1]), "model"), ((good[0], wrong), "optimizer")):
            load = setters(model, optimizer, one_of(states, good))
            for part in (name, "both"):
                everybody_raises(partial(load[part], options=WHOLE), TypeError, "must be a dict")
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


@on(2, 4)
def test_ranks_that_ask_for_different_tensors() -> None:
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


@on(2, 4)
def test_options_that_may_differ() -> None:
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


@on(2, 4)
def test_layouts_that_differ_on_one_rank() -> None:
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


# ---- files that one rank cannot read, or refuses


def saved_net(folder: Path) -> Path:
    """A file that rank 0 wrote."""
    if dist.get_rank() == 0:
        torch.save(net(5).state_dict(), folder / "net.pt")
    dist.barrier()
    return folder / "net.pt"


@on(2, 4)
def test_a_transform_that_raises_on_one_rank(folder: Path) -> None:
    """Half-way through the tensors; what it raises stays what it is where it was raised."""
    path, calls = saved_net(folder), [0]

    def transform(key: str, tensor: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if is_last() and calls[0] % 4 == 0:
            raise ValueError("no")
        return tensor * 2

    for wrap in SHARDED:
        for mode in ("copy", "assign", "swap"):
            model = WRAPPERS[wrap](net())
            with unchanged(model) as caught:
                torchlift.load(model, path, transform=transform, mode=mode)
            assert is_last() == isinstance(caught.value, ValueError)
            assert is_last() or f"on rank {last()}: ValueError: no" in str(caught.value)


@on(2, 4)
def test_a_reader_that_one_rank_cannot_open(folder: Path) -> None:
    """It says so when all ranks listen, and not while the others wait in a collective."""
    path = saved_net(folder)
    if is_last():
        path = path.with_name("nowhere.pt")
    model = fsdp(net())
    state = model.state_dict()
    with unchanged(model) as caught:
        dcp.load(state, storage_reader=ours.CheckpointReader(path))
    # Before pytorch#177739 torch drops what the reader has said.
    assert "nowhere.pt" in str(caught.value) or str(caught.value).endswith("metadata is None\n")


# ---- FullyShardedDataParallel


@on(2, 4)
def test_arguments_for_fully_sharded_data_parallel() -> None:
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


@on(2, 4)
def test_a_fully_sharded_data_parallel_needs_something_to_load() -> None:
    """torch raised an error of its own, or loaded nothing with success."""
    model, optimizer = fsdp1()
    for options in (WHOLE, FROM_0, OFFLOADED):
        for nothing in (None, {}):
            with pytest.raises(ours.StateDictMismatch, match="model_state_dict is empty"):
                # None is not of the type that is declared, and torch takes it.
                ours.set_model_state_dict(model, nothing, options=options)  # type: ignore[arg-type]
            with pytest.raises(ours.StateDictMismatch, match="optim_state_dict is empty"):
                # As above.
                ours.set_optimizer_state_dict(model, optimizer, nothing, options=options)  # type: ignore[arg-type]


@on(2, 4)
def test_an_optimizer_that_fits_on_one_rank_only() -> None:
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
    for options in (FROM_0, OFFLOADED):
        with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight'"):
            ours.set_optimizer_state_dict(model, optimizer, given, options=options)
        dist.barrier()

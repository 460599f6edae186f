"""One rank cannot or will not load, in every way."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import refused_arguments  # noqa: F401
import refused_files  # noqa: F401
import refused_fsdp1  # noqa: F401
import torch
import torch.distributed as dist
from hooked_models import TROUBLES, layers, refuses, state_for
from ranks import main
from refusals import (
    CHECKS,
    FROM_0,
    SHARDED,
    WHOLE,
    WRAPS,
    check,
    everybody_raises,
    is_last,
    last,
    unchanged,
)  # fmt: skip
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import WRAPPERS, built, cloned, containers, fsdp, net, same, train

import torchlift.distributed as ours


def load(model: nn.Module, optimizer: Any, states: Any, options: Any) -> None:
    ours.set_state_dict(
        model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
    )


@check
def a_module_that_refuses_on_one_rank() -> None:
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


@check
def a_post_hook_that_refuses_on_one_rank_of_a_mesh() -> None:
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


@check
def an_optimizer_that_refuses_on_one_rank() -> None:
    def refuse(optimizer: Any) -> None:
        raise ValueError("no")

    for wrap in WRAPS:
        model, optimizer = built(wrap)
        given = cloned(ours.get_state_dict(*built(wrap, seed=5)))
        if is_last():
            optimizer.register_load_state_dict_post_hook(refuse)
        with unchanged(model, optimizer):
            load(model, optimizer, given, ours.StateDictOptions())


@check
def one_bad_value_on_one_rank() -> None:
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


@check
def values_of_another_layout_behind_a_hook() -> None:
    """What has to communicate does so before anybody's code can stop it."""
    from torch.distributed.tensor import Replicate, Shard

    model = fsdp(net())
    if is_last():
        model.register_load_state_dict_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("no")))
    state = ours.get_model_state_dict(fsdp(net(5)))
    for key, value in state.items():
        if hasattr(value, "placements"):
            state[key] = value.redistribute(placements=[Replicate()])
    assert any(hasattr(value, "placements") for value in state.values())
    with unchanged(model):
        ours.set_model_state_dict(model, state)
    other = fsdp(net())
    other.register_load_state_dict_pre_hook(lambda *_: None)
    ours.set_model_state_dict(other, state)
    same(other.state_dict()["inp.bias"].placements, (Shard(0),))
    same(other.state_dict()["inp.bias"].full_tensor(), state["inp.bias"].to_local())


@check
def a_strict_rank_among_others() -> None:
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


@check
def other_keys_on_one_rank() -> None:
    for wrap in WRAPS:
        model, optimizer = built(wrap)
        given = ours.get_state_dict(*built(wrap, seed=5), options=WHOLE)
        if is_last():
            given = ({f"x.{key}": value for key, value in given[0].items()}, given[1])
        with unchanged(model, optimizer) as caught:
            load(model, optimizer, given, WHOLE)
        assert isinstance(caught.value, ours.StateDictMismatch)


@check
def arguments_that_make_no_sense_on_one_rank() -> None:
    """No optimizer, options of another kind, a model whose names cannot be told."""

    def fails() -> None:
        raise LookupError("no names")

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
            if is_last():
                model._fqn_modifiers = fails
            for call in (
                partial(ours.set_model_state_dict, model, state[0]),
                partial(ours.set_optimizer_state_dict, model, optimizer, state[1]),
            ):
                everybody_raises(partial(call, options=options), LookupError, "no names")
            vars(model).pop("_fqn_modifiers", None)


@check
def a_state_that_one_rank_asks_for_wrongly() -> None:
    for wrap in SHARDED:
        model, optimizer = built(wrap)
        mine = [] if is_last() else optimizer
        call = partial(ours.get_optimizer_state_dict, model, mine, options=WHOLE)
        everybody_raises(call, RuntimeError, "no optimizer was passed")


@check
def a_broadcast_that_one_rank_knows_nothing_of() -> None:
    for wrap in WRAPS:
        model, optimizer = built(wrap)
        state = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
        for mine in ((WHOLE, FROM_0), (FROM_0, WHOLE)):
            with unchanged(model, optimizer) as caught:
                load(model, optimizer, state, mine[is_last()])
            assert "the same on every rank" in str(caught.value)


class OnlyOnRank0:
    def __reduce__(self) -> Any:
        return found_only_on_rank_0, ()


def found_only_on_rank_0() -> int:
    if is_last():
        raise ImportError("only on rank 0")
    return 5


class WithExtra(nn.Linear):
    def get_extra_state(self) -> object:
        return 1

    def set_extra_state(self, state: object) -> None:
        pass


@check
def an_object_that_one_rank_cannot_receive() -> None:
    model = WithExtra(2, 2)
    state = {**WithExtra(2, 2).state_dict(), "_extra_state": OnlyOnRank0()}
    before = cloned(dict(model.named_parameters()))
    given = state if dist.get_rank() == 0 else {}
    everybody_raises(
        lambda: ours.set_model_state_dict(model, given, options=FROM_0),
        ImportError,
        "only on rank 0",
    )
    same(cloned(dict(model.named_parameters())), before)


@check
def what_cannot_be_sent_is_an_error_everywhere() -> None:
    """An object that no other process can have, and an error that none can."""

    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("stays here")

    class Odd(dict[str, Any]):
        def items(self) -> Any:
            raise Local("odd")

    for given in ({"extra": lambda: 0}, Odd(a=nn.Linear)):
        model = fsdp(net())
        with unchanged(model):
            ours.set_model_state_dict(model, given, options=FROM_0)


@check
def a_stage_whose_extra_state_only_one_rank_knows() -> None:
    """Rank 0 has the extra state of all stages, and no rank calls the others' unexpected."""

    class Stage(nn.Linear):
        def get_extra_state(self) -> object:
            return getattr(self, "seen", None)

        def set_extra_state(self, state: object) -> None:
            self.seen = state

    mine = nn.ModuleDict({str(dist.get_rank()): Stage(2, 2)})
    whole = nn.ModuleDict({str(rank): Stage(2, 2) for rank in range(last() + 1)})
    state = whole.state_dict() | {f"{rank}._extra_state": rank for rank in range(last() + 1)}
    given = state if dist.get_rank() == 0 else {}
    assert ours.set_model_state_dict(mine, given, options=FROM_0) == ([], [])
    assert mine[str(dist.get_rank())].seen == dist.get_rank()


@check
def a_state_that_one_rank_cannot_give() -> None:
    """The others do not wait for it to gather theirs; where nothing is gathered, nobody waits."""

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    for wrap in SHARDED:
        for offload in (False, True):
            options = ours.StateDictOptions(full_state_dict=True, cpu_offload=offload)
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


if __name__ == "__main__":
    only = os.environ.get("ONLY")
    main({name: run for name, run in CHECKS.items() if not only or name in only.split(",")})

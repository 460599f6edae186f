"""One rank cannot or will not load: every rank raises, none waits, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hooked_models import BAD_VALUES, TROUBLES, layers, refuses, state_for
from ranks import on
from state_models import FROM_0, ON_0, WHOLE, set_both
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import WRAPPERS, built, cloned, containers, fsdp, fsdp1, net, same, train

import torchlift
import torchlift.distributed as ours
from torchlift.errors import CheckpointError

Options = ours.StateDictOptions
SHARDED = ("fsdp blocks", "tensor parallel")


def last() -> int:
    return dist.get_world_size() - 1


def is_last() -> bool:
    return dist.get_rank() == last()


def one_of(wrong: Any, right: Any) -> Any:
    return wrong if is_last() else right


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Any]:
    """Every rank raises in the block, and everything is as it was.

    All raise the same, or the last rank raises its own error, and the others name that rank.
    """

    def now() -> Any:
        state = optimizer.state_dict() if optimizer else None
        return cloned((containers(model.state_dict()), state))

    before, errors = now(), (CheckpointError, RuntimeError, ValueError, TypeError)
    with pytest.raises((*errors, CheckpointException)) as caught:
        yield caught
    same(now(), before)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    named = [f"on rank {last()}: " in text for text in texts[:-1]]
    assert len({*texts}) == 1 or all(named), texts


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
            set_both(model, optimizer, (state, saved), options=WHOLE)
        assert says in str(caught.value), str(caught.value)
        assert is_last() or isinstance(caught.value, ours.StateDictMismatch)


# ---- what is wrong on one rank, or not the same on all

#: The arguments of a call, by name. A row changes them.
Given = dict[str, Any]
Change = Callable[[Given], object]


def refuse(*_: Any) -> None:
    raise ValueError("no")


def on_last(change: Change) -> Change:
    return lambda given: change(given) if is_last() else None


def gives(**words: Any) -> Change:
    return on_last(lambda given: given.update(words))


def in_state(kind: str, value: Callable[[Any], Any]) -> Change:
    """Put another value into the state of one parameter, or into the model's."""

    def change(given: Given) -> None:
        values, key = given["model_state_dict"], "blocks.1.up.weight"
        if kind == "optimizer":
            values, key = given["optim_state_dict"]["state"][key], "exp_avg_sq"
        values[key] = value(values[key])

    return on_last(change)


def in_optimizer(make: Callable[[Any], Given]) -> Change:
    return on_last(lambda given: given["optim_state_dict"].update(make(given["optim_state_dict"])))


def broadcast(change: Change) -> Change:
    """Let rank 0 send its state dict."""

    def both(given: Given) -> None:
        given["options"] = FROM_0
        change(given)

    return both


def strict_on_one(given: Given) -> None:
    """Let one rank alone mind the keys, which fit on none."""
    given["options"] = Options(**{**vars(given["options"]), "strict": is_last()})
    given["model_state_dict"]["nobody.weight"] = given["model_state_dict"].pop("inp.weight")


HOOK = on_last(lambda given: refuses(given["model"]))
LATE = on_last(lambda given: given["optimizers"].register_load_state_dict_post_hook(refuse))
NOT_SAME = "do not select the same"
#: What is wrong -> how the arguments of a good load become it, and what the error says.
WRONG: dict[str, tuple[Change, str]] = {
    "a hook of the model": (HOOK, "no"),
    "a hook of the model in a broadcast": (broadcast(HOOK), "no"),
    "a hook of the optimizer": (LATE, "no"),
    **{
        f"{name} in the {kind}": (in_state(kind, value), "blocks.1.up.weight")
        for name, value in BAD_VALUES.items()
        for kind in ("model", "optimizer")
    },
    "a strict rank": (strict_on_one, "'inp.weight'; Unexpected key(s) 'nobody.weight'"),
    "a strict rank in a broadcast": (broadcast(strict_on_one), "'nobody.weight'"),
    "no optimizer": (gives(optimizers=[]), NOT_SAME),
    "None for an optimizer": (gives(optimizers=None), "must be an optimizer"),
    "a text for options": (gives(options="text"), "must be a StateDictOptions"),
    "half of a broadcast": (
        broadcast(gives(options=Options(broadcast_from_rank0=True))), "needs full_state_dict=True",
    ),
    "a broadcast": (gives(options=FROM_0), "the same on every rank"),
    "no broadcast": (broadcast(gives(options=WHOLE)), "the same on every rank"),
    # torch takes None for an empty one, and either is an error unless others send theirs.
    "None for the model's state": (gives(model_state_dict=None), NOT_SAME),
    "an empty model's state": (gives(model_state_dict={}), NOT_SAME),
    "None for the optimizer's state": (gives(optim_state_dict=None), "'"),
    "an empty optimizer's state": (gives(optim_state_dict={}), "'"),
    "a list for the model's state": (gives(model_state_dict=[("a", 1)]), "must be a dict"),
    "a number for the optimizer's state": (gives(optim_state_dict=5), "must be a dict"),
    "state=5": (in_optimizer(lambda _: {"state": 5}), ""),
    "param_groups=5": (in_optimizer(lambda _: {"param_groups": 5}), ""),
    "param_groups=[5]": (in_optimizer(lambda _: {"param_groups": [5]}), ""),
    "a group without params": (in_optimizer(lambda _: {"param_groups": [{"lr": 1.0}]}), ""),
    "numbers for states": (
        in_optimizer(lambda saved: {"state": dict.fromkeys(saved["state"], 5)}), "",
    ),
}  # fmt: skip


@on(2, wrap=("ddp", *SHARDED), kind=WRONG)
@on(4, wrap=("fsdp blocks",), kind=WRONG)
def test_what_one_rank_cannot_load_ends_it_on_all(wrap: str, kind: str) -> None:
    """Its code refuses, a value cannot be copied, or an argument is wrong or differs."""
    change, says = WRONG[kind]
    model, optimizer = built(wrap)
    states = cloned(containers(ours.get_state_dict(*built(wrap, seed=5), options=WHOLE)))
    given = {"model": model, "optimizers": optimizer, "model_state_dict": states[0],
             "optim_state_dict": states[1], "options": WHOLE}  # fmt: skip
    change(given)
    with unchanged(model, optimizer) as caught:
        ours.set_state_dict(**given)
    assert says in str(caught.value), str(caught.value)
    # What it raises stays what it is where it was raised.
    assert is_last() or isinstance(caught.value, ours.StateDictMismatch)
    assert not says.startswith("must") or is_last() == isinstance(caught.value, TypeError)
    x = torch.ones(4, 5)
    same(model(x).detach(), built(wrap)[0](x).detach(), "the next pass")


@on(2, 4)
def test_layouts_that_differ_on_one_rank() -> None:
    """``load_state_dict`` would redistribute there, and wait for the others."""
    model, optimizer = built("fsdp blocks")
    saved, moments = cloned(ours.get_state_dict(*built("fsdp blocks", seed=5)))
    calls: list[tuple[dict[str, Any], Callable[[], object]]] = [
        (saved, partial(ours.set_model_state_dict, model, saved)),
        (
            moments["state"]["inp.weight"],
            partial(ours.set_optimizer_state_dict, model, optimizer, moments),
        ),
    ]
    for values, call in calls:
        for key, value in values.items():
            if isinstance(value, DTensor) and value.ndim > 1:
                values[key] = one_of(value.redistribute(placements=[Shard(1)]), value)
        with unchanged(model, optimizer) as caught:
            call()
        assert NOT_SAME in str(caught.value)


def asks_for(**words: Callable[[nn.Module], Any]) -> Change:
    return on_last(lambda given: given.update({k: v(given["model"]) for k, v in words.items()}))


def backwards(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([*model.parameters()][::-1])
    train(optimizer)
    return optimizer


#: What one rank asks for -> how its arguments become that, and what the error says.
ASKED: dict[str, tuple[Change, str]] = {
    "no optimizer": (gives(optimizers=[]), NOT_SAME),
    "no frozen ones": (gives(options=Options(full_state_dict=True, ignore_frozen_params=True)),
                       NOT_SAME),
    "another submodule": (asks_for(submodules=lambda model: {model.blocks[1]}), NOT_SAME),
    "another order": (asks_for(optimizers=backwards), "the same order"),
    "another optimizer": (asks_for(optimizers=lambda _: torch.optim.Adam(net().parameters())), ""),
    "a hook": (on_last(lambda given: given["model"].register_state_dict_post_hook(refuse)), "no"),
}  # fmt: skip


@on(2, wrap=SHARDED, kind=ASKED)
@on(4, wrap=("fsdp blocks",), kind=ASKED)
def test_a_state_that_one_rank_cannot_give_ends_it_on_all(wrap: str, kind: str) -> None:
    """Some would gather what others do not, or shards of two tensors as one."""
    change, says = ASKED[kind]
    for options in (WHOLE, ON_0):
        model, optimizer = built(wrap)
        model.blocks[0].up.weight.requires_grad_(False)
        given = {"model": model, "optimizers": optimizer, "options": options}
        change(given)
        with pytest.raises((ValueError, ours.StateDictMismatch), match=says):
            ours.get_state_dict(**given)
        dist.barrier()


@on(2, 4)
def test_ranks_of_which_nothing_is_asked_do_not_wait() -> None:
    """A rank may ask alone where nothing is gathered, and wrong options are an error at once."""
    if is_last():
        model, optimizer = built("fsdp blocks")
        states = ours.get_state_dict(model, optimizer)
        assert isinstance(states[0]["inp.weight"], DTensor)
        with pytest.raises(TypeError, match="must be a StateDictOptions"):
            ours.get_state_dict(model, optimizer, options={"cpu_offload": True})
    dist.barrier()


@on(2, 4)
def test_options_that_may_differ() -> None:
    """Each rank gets what it asked for, as with torch. Without a state it receives rank 0's."""
    model, optimizer = built("fsdp blocks")
    expected = cloned(ours.get_state_dict(model, optimizer, options=WHOLE))
    for mine in ((ON_0, WHOLE), (WHOLE, ON_0)):
        found = ours.get_state_dict(model, optimizer, options=mine[is_last()])
        whole = mine[is_last()] is WHOLE or dist.get_rank() == 0
        same(found, expected if whole else ({}, {}))
    flat = Options(full_state_dict=True, flatten_optimizer_state_dict=True)
    found = ours.get_state_dict(model, optimizer, options=one_of(flat, WHOLE))
    same(found[0], expected[0])
    assert ("state" in found[1]) is not is_last()
    good = cloned(ours.get_state_dict(*built("fsdp blocks", seed=5), options=WHOLE))
    set_both(model, optimizer, one_of((None, None), good), options=FROM_0)
    same(ours.get_state_dict(model, optimizer, options=WHOLE), good)
    with unchanged(model, optimizer) as caught:
        ours.set_model_state_dict(model, None, options=FROM_0)  # type: ignore[arg-type]
    assert "Missing key(s)" in str(caught.value)
    with unchanged(model):  # an object that no other process can have
        ours.set_model_state_dict(model, {"extra": lambda: 0}, options=FROM_0)


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
            assert "no" in str(caught.value)


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
    """torch's own functions communicate before they look at all of them, or load nothing."""
    model, optimizer = fsdp1()
    good = cloned(containers(ours.get_state_dict(model, optimizer, options=WHOLE)))
    before = cloned(dict(model.named_parameters()))
    stale = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    some = torch.optim.Adam(model.parameters())
    some.param_groups[0]["params"] = some.param_groups[0]["params"][:0]
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    lacks = {**good[1], "state": dict([*good[1]["state"].items()][1:])}
    rows: list[Given] = [
        *({"model_state_dict": wrong} for wrong in (None, {}, dict([*good[0].items()][1:]))),
        *({"optim_state_dict": wrong} for wrong in (None, {}, {**good[1], "state": {}}, lacks)),
        *({"optimizers": wrong} for wrong in ([], stale, some, other)),
        {"options": FROM_0},
    ]
    for row in rows:
        given = {"model": model, "optimizers": optimizer, "model_state_dict": good[0],
                 "optim_state_dict": good[1], "options": WHOLE, **one_of(row, {})}  # fmt: skip
        with pytest.raises(ours.StateDictMismatch):
            ours.set_state_dict(**given)
        dist.barrier()
        if "optimizers" in row:
            with pytest.raises(ours.StateDictMismatch):
                ours.get_state_dict(model, given["optimizers"], options=WHOLE)
            dist.barrier()
    with pytest.raises(ours.StateDictMismatch, match="none of the submodules"):
        ours.get_model_state_dict(
            model, submodules=one_of({torch.nn.Linear(1, 1)}, {model}), options=WHOLE
        )
    dist.barrier()
    for options in (WHOLE, FROM_0, ON_0):
        for nothing in (None, {}):
            with pytest.raises(ours.StateDictMismatch, match="model_state_dict is empty"):
                # None is not of the type that is declared, and torch takes it.
                ours.set_model_state_dict(model, nothing, options=options)  # type: ignore[arg-type]
    given = lacks if dist.get_rank() == 0 else {}  # the others receive it, or need none
    for options in (FROM_0, ON_0):
        with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight'"):
            ours.set_optimizer_state_dict(model, optimizer, given, options=options)
        dist.barrier()
    same(cloned(dict(model.named_parameters())), before)

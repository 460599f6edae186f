"""What a Keeper saves it resumes: all objects or none, or it refuses one by name at the save."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchlift
from torchlift.distributed import Generators
from torchlift.errors import CheckpointError, FormatError, PlacementError


class Stateful:
    """An object with a state, which may refuse another one."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        self.value, self.refuses = value, refuses
        self.values = torch.full((3,), float(value))
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "values": self.values, "seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.seen = state["value"], state["seen"]
        self.values.copy_(state["values"])
        if self.refuses:
            self.added = True
            self.refuses = False
            raise OSError("no such luck")


def gan(seed: int) -> dict[str, Any]:
    """A generator and a discriminator, each with an optimizer and a scheduler, an EMA, a scaler."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    judge = nn.Linear(3, 1)
    one = torch.optim.Adam(maker.parameters(), lr=0.01)
    two = torch.optim.RMSprop(judge.parameters(), lr=0.02, momentum=0.5)
    return {
        "maker": maker,
        "judge": judge,
        "one": one,
        "two": two,
        "decay": torch.optim.lr_scheduler.StepLR(one, 2),
        "cycle": torch.optim.lr_scheduler.CyclicLR(two, 0.01, 0.1, cycle_momentum=False),
        "ema": AveragedModel(maker),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 4)),
        "loader": Stateful(seed),
    }


def step(run: dict[str, Any]) -> float:
    """One step of both; the loss."""
    loss = run["judge"](run["maker"](torch.randn(8, 4))).square().mean()
    run["scaler"].scale(loss).backward()
    for name in ("one", "two"):
        run["scaler"].step(run[name])
        run[name].zero_grad()
    run["scaler"].update()
    run["decay"].step()
    run["cycle"].step()
    run["ema"].update_parameters(run["maker"])
    run["loader"].value += 1
    run["loader"].values += 1
    run["loader"].seen.append(run["loader"].value)
    return float(loss.detach())


def everything(run: dict[str, Any]) -> dict[str, Any]:
    """A copy of all states, and of the generators."""
    states = {name: copy.deepcopy(obj.state_dict()) for name, obj in run.items()}
    return {**states, "rng": torch.get_rng_state()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(torchlift.diff(left, right).equal)


def test_a_gan_with_all_around_it_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Two models and optimizers, schedulers, an average, a scaler and a loader: the next losses."""
    run = gan(0)
    for _ in range(3):
        step(run)
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(3, run)
        expected = [step(run) for _ in range(5)]
        again = gan(1)
        step(again)
        assert keeper.resume(again) == 3
    assert [step(again) for _ in range(5)] == expected
    assert again["loader"].seen == [1, 2, 3, 4, 5, 6, 7, 8]


def other_class(run: dict[str, Any]) -> str:
    run["two"] = torch.optim.Adagrad(run["judge"].parameters())
    run["cycle"] = torch.optim.lr_scheduler.ConstantLR(run["two"])
    return "another kind of optimizer than Adagrad"


def fewer_schedulers(run: dict[str, Any]) -> str:
    chain = torch.optim.lr_scheduler
    run["decay"] = chain.SequentialLR(
        run["one"], [chain.ConstantLR(run["one"]), chain.StepLR(run["one"], 2)], [2]
    )
    return "_schedulers"


def refusing(run: dict[str, Any]) -> str:
    run["loader"].refuses = True
    return "no such luck"


def another_shape(run: dict[str, Any]) -> str:
    run["judge"] = nn.Linear(3, 2)
    run["two"] = torch.optim.RMSprop(run["judge"].parameters(), momentum=0.5)
    run["cycle"] = torch.optim.lr_scheduler.CyclicLR(run["two"], 0.01, 0.1, cycle_momentum=False)
    return "size mismatch"


@pytest.mark.parametrize("change", [other_class, fewer_schedulers, refusing, another_shape])
@pytest.mark.parametrize("steps", [0, 2])  # a program that has just started, and one that goes back
def test_a_resume_that_fails_changes_no_object(
    tmp_path: Path, change: Callable[[dict[str, Any]], str], steps: int
) -> None:
    """Neither the models before the one that refuses, nor what comes after it."""
    run = gan(0)
    for _ in range(3):
        step(run)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(3, run)
        again = gan(1)
        for _ in range(steps):
            step(again)
        text = change(again)
        before, attributes = everything(again), {*vars(again["decay"])}
        with pytest.raises((CheckpointError, OSError, KeyError), match=text):
            keeper.resume(again)
        assert same(everything(again), before)
        assert {*vars(again["decay"])} == attributes
        assert not hasattr(again["loader"], "added")
        step(again) if change is not another_shape else None


def test_a_scaler_that_refuses_its_state_changes_nothing(tmp_path: Path) -> None:
    """One that was disabled gives an empty state, which one that is enabled does not take."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    before = copy.deepcopy(other.state_dict())
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, scaler=torch.amp.GradScaler("cpu", enabled=False), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            keeper.resume(model=other, scaler=scaler)
        assert same(before, other.state_dict())
        assert scaler.get_scale() == 8.0
        assert keeper.resume(model=other) == 1
        assert same(model.state_dict(), other.state_dict())


class Lazy(Stateful):
    """It has no state before it has started, as some loaders."""

    def state_dict(self) -> dict[str, Any]:
        if not self.seen:
            raise RuntimeError("not started")
        return super().state_dict()


def test_an_object_without_a_state_before_is_loaded_last_and_named(tmp_path: Path) -> None:
    """Nobody could give it back: all others are loaded, the error says so, its way out works."""
    model, lazy = nn.Linear(2, 1), Lazy(1)
    lazy.seen = [1]
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, model=model, lazy=lazy)
        fresh = Lazy(0)
        assert keeper.resume(model=nn.Linear(2, 1), lazy=fresh) == 1
        assert fresh.seen == [1]
        other, refuses = nn.Linear(2, 1), Lazy(0, refuses=True)
        with pytest.raises(
            PlacementError, match=r"'lazy': .*All other objects are loaded.*unknown"
        ) as it:
            keeper.resume(model=other, lazy=refuses)
        assert it.value.hint == "Resume without lazy."
        assert same(model.state_dict(), other.state_dict())


def test_generators_are_given_back_by_a_resume_that_fails(tmp_path: Path) -> None:
    """A loader may draw numbers when it is asked for its state."""

    class Drawing(Stateful):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, model=nn.Linear(2, 1), loader=Drawing(1))
        now = torch.get_rng_state()
        with pytest.raises(OSError, match="no such luck"):
            keeper.resume(loader=Drawing(2, refuses=True))
        assert torch.equal(torch.get_rng_state(), now)


@pytest.mark.parametrize("part", ["torch", "python", "numpy"])
def test_damaged_states_of_generators_change_nothing(tmp_path: Path, part: str) -> None:
    """Some of them may be set before the damaged one is found."""
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, model=nn.Linear(2, 1), loader=Stateful(1))
        state = torchlift.open(keeper.latest()).tree()
        state["ranks"]["0"]["rng"][part] = {"numbers": "lost"}
        torchlift.save(state, tmp_path / "step-000000002.pt")
        model, loader, now = nn.Linear(2, 1), Stateful(2), Generators().state_dict()
        before = model.weight.clone()
        with pytest.raises(FormatError, match="'rng': the saved state is not one that"):
            keeper.resume(model=model, loader=loader)
        assert (loader.value, torch.equal(model.weight, before)) == (2, True)
        assert torchlift.diff(now, Generators().state_dict()).equal


def test_two_optimizers_of_one_parameter_each_have_their_state(tmp_path: Path) -> None:
    """An actor and a critic that share an encoder; if a later object refuses, all are as before."""

    def actors(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        encoder, actor, critic = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
        both = [*encoder.parameters(), *actor.parameters()]
        return {
            "encoder": encoder,
            "actor": actor,
            "critic": critic,
            "first": torch.optim.Adam(both, lr=0.1),
            "second": torch.optim.Adam([*encoder.parameters(), *critic.parameters()], lr=0.2),
            "loader": Stateful(seed),
        }

    def steps(run: dict[str, Any]) -> list[float]:
        losses = []
        for name, optimizer in [("actor", "first"), ("critic", "second")] * 3:
            loss = run[name](run["encoder"](torch.randn(4, 3))).square().mean()
            loss.backward()
            run[optimizer].step()
            run[optimizer].zero_grad()
            losses.append(loss.item())
        return losses

    run, again = actors(0), actors(1)
    steps(run)
    steps(again)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, run)
        expected, before = steps(run), everything(again)
        again["loader"].refuses = True
        with pytest.raises(OSError, match="no such luck"):
            keeper.resume(again)
        assert same(everything(again), before)
        again["loader"].refuses = False
        assert keeper.resume(again) == 1
        assert steps(again) == expected


def holding(models: list[nn.Module]) -> dict[str, Any]:
    """Containers of objects that have a state."""
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "a list": models,
        "a tuple": tuple(models),
        "a dict": {"a": models[0], "b": models[1]},
        "a deep one": {"all": [{"one": models[0]}]},
        "optimizers": [optimizer],
        "schedulers": (scheduler, scheduler),
        "a set": {models[0]},
        "a deque": deque(models),
        "values": {"a": models[0]}.values(),
        "with data": {"epoch": 1, "ema": Stateful(1)},
    }


@pytest.mark.parametrize("kind", holding([nn.Linear(1, 1), nn.Linear(1, 1)]))
def test_a_container_of_objects_with_a_state_is_refused_when_it_is_saved(
    tmp_path: Path, kind: str
) -> None:
    """It would count as plain data, and resume would load nothing, with success."""
    models: list[nn.Module] = [nn.Linear(2, 1), nn.Linear(2, 1)]
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        with pytest.raises(
            PlacementError, match="'things': resume cannot load objects inside"
        ) as caught:
            keeper.save(1, model=models[0], things=holding(models)[kind])
        assert keeper.steps() == []
        is_dict = kind in ("a dict", "a deep one", "with data")
        way = "**models." if is_dict else "each for n, each in enumerate(models)"
        assert way in (caught.value.hint or "")
        # The way out works.
        named = {f"model_{n}": each for n, each in enumerate(models)}
        assert keeper.save(1, **named)
        others = {f"model_{n}": nn.Linear(2, 1) for n in range(2)}
        assert keeper.resume(**others) == 1
        assert all(same(named[name].state_dict(), others[name].state_dict()) for name in named)
        with pytest.raises(PlacementError, match="'things': resume cannot load objects inside"):
            keeper.resume(things=holding(models)[kind])


def test_a_view_that_is_absurdly_large_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """Its thread would write all of it first, and refuse the file in the end."""
    mask = torch.zeros(1).expand(1 << 34)
    with torchlift.Keeper(tmp_path) as keeper:
        with pytest.raises(PlacementError, match=r"'state\.mask': a broadcast view"):
            keeper.save(1, state={"state": {"mask": mask}})
        assert keeper.save(1, state={"mask": mask[:1000]})


def test_containers_of_plain_data_are_saved_as_they_are(tmp_path: Path) -> None:
    """Also one that nobody could mistake, and a class in place of an object is refused."""
    plain = {"a": [1, (2, "x")], "b": {3: torch.ones(2)}, "c": (None, 1.5)}
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        assert keeper.save(1, plain=plain)
        assert torchlift.diff(torchlift.open(keeper.latest()).tree("plain"), plain).equal
        for odd in (SimpleNamespace(model=nn.Linear(1, 1)), nn.Linear, iter([])):
            with pytest.raises(CheckpointError):
                keeper.save(2, odd=odd)
        assert keeper.steps() == [1]


def test_an_object_that_cannot_take_its_state_back_is_refused_when_it_is_saved(
    tmp_path: Path,
) -> None:
    """It has state_dict alone; its state, passed as plain data, is kept."""

    class Giving:
        def state_dict(self) -> dict[str, int]:
            return {"at": 3}

    with torchlift.Keeper(tmp_path, background=False) as keeper:
        with pytest.raises(
            PlacementError, match="'giving': the object has state_dict, but not load_"
        ) as it:
            keeper.save(1, giving=Giving())
        assert "plain data" in (it.value.hint or "")
        assert keeper.save(1, giving=Giving().state_dict())
        assert keeper.resume(giving={"at": 3}) == 1


class Renaming(nn.Linear):
    """Its state has other names than its parameters, and rows in another order."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {f"x.{key}": value.flip(0) for key, value in super().state_dict().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        found = {key.removeprefix("x."): value.flip(0) for key, value in state_dict.items()}
        return super().load_state_dict(found, strict)


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_whose_class_renames_its_state_is_resumed(tmp_path: Path, count: int) -> None:
    """Its own methods are called as those of a root, also if there are several models."""

    def build() -> dict[str, Any]:
        models = {f"model{n}": Renaming(2, 3) for n in range(count)}
        optimizers = {
            f"adam{n}": torch.optim.Adam(m.parameters()) for n, m in enumerate(models.values())
        }
        for model, optimizer in zip(models.values(), optimizers.values(), strict=True):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        return {**models, **optimizers}

    objects, others = build(), build()
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        assert keeper.save(1, **objects)
        assert keeper.resume(**others) == 1
    for name, obj in objects.items():
        assert same(obj.state_dict(), others[name].state_dict())


def test_an_optimizer_that_only_holds_others_is_refused_by_name(tmp_path: Path) -> None:
    """It has no groups; the optimizers in it are saved by their own names."""

    class Both(torch.optim.Optimizer):
        def __init__(self, *inner: torch.optim.Optimizer) -> None:
            self.inner = inner

    model = nn.Linear(2, 1)
    both = Both(torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias]))
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        with pytest.raises(CheckpointError, match=r"'optimizer': .*that holds SGD, Adam"):
            keeper.save(1, model=model, optimizer=both)
        assert keeper.save(1, model=model, sgd=both.inner[0], adam=both.inner[1])


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (lambda m: Stateful(1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda m: Stateful(1)),
        (lambda m: [1, 2], lambda m: nn.Linear(1, 1)),
        (lambda m: nn.Linear(1, 1), lambda m: Stateful(1)),
    ],
)
def test_a_name_that_is_now_another_kind_of_object_changes_nothing(
    tmp_path: Path, saved: Callable[[nn.Module], Any], now: Callable[[nn.Module], Any]
) -> None:
    """A state that is not one of its object: an error, and all are as before."""
    model = nn.Linear(2, 1)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, model=model, thing=saved(model))
        other = nn.Linear(2, 1)
        run = {"model": other, "thing": now(other)}
        before = everything(run)
        with pytest.raises((CheckpointError, KeyError)):
            keeper.resume(run)
        assert same(everything(run), before)


def test_a_model_on_meta_with_optimizers_of_one_parameter_is_resumed(tmp_path: Path) -> None:
    """Their moments do not lie on meta."""

    def pair(device: str) -> dict[str, Any]:
        with torch.device(device):
            model = nn.Linear(2, 1)
        optimizers = {name: torch.optim.Adam(model.parameters()) for name in ("one", "two")}
        return {"model": model, **optimizers}

    run = pair("cpu")
    for name in ("one", "two"):
        run["model"](torch.ones(1, 2)).sum().backward()
        run[name].step()
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, run)
        again = pair("meta")
        assert keeper.resume(again) == 1
    for name in ("one", "two"):
        run["model"].weight.grad = again["model"].weight.grad = torch.ones(1, 2)
        for each in (run, again):
            each[name].step()
    assert torch.equal(run["model"].weight, again["model"].weight)
    assert os.listdir(tmp_path) == ["step-000000001.pt"]


def go_on(folder: str, saves: bool) -> list[float]:
    """Train two sharded models with two optimizers from where the folder is; the next losses."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0 if saves else 1)
    one, two = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1))
    for module in (one, two[0], two) if ranks > 1 else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    first = torch.optim.AdamW(one.parameters(), lr=0.02)
    run: dict[str, Any] = {
        "one": one,
        "two": two,
        "first": first,
        "second": torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9),
        "scheduler": torch.optim.lr_scheduler.StepLR(first, 2),
    }
    losses = []
    with torchlift.Keeper(folder, background=False) as keeper:
        step = 0 if saves else keeper.resume(run)
        assert step is not None
        for number in range(step, step + 3 + 3 * saves):
            # All ranks have one batch: the mean of their gradients is that of one process.
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            loss = run["two"](run["one"](inputs)).square().mean()
            loss.backward()
            for name in ("first", "second"):
                run[name].step()
                run[name].zero_grad()
            run["scheduler"].step()
            losses.append(loss.item())
            if saves and number == 2:
                keeper.save(3, run)
    return losses[-3:]


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_with_equal_losses_on_any_number_of_ranks(
    tmp_path: Path, before: int, now: int
) -> None:
    """To the bit, where the arithmetic is: a folder of several ranks, and a file of one."""
    on_ranks = torchlift.distributed.on_ranks
    expected = go_on(str(tmp_path), True) if before == 1 else None
    expected = expected or on_ranks(before, go_on, str(tmp_path), True)[0]
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".pt") == (before == 1)
    found = [go_on(str(tmp_path), False)] if now == 1 else None
    found = found or on_ranks(now, go_on, str(tmp_path), False)
    assert found == [expected] * now


def refusals_of_blanks(folder: str, blank: int) -> list[str]:
    """Save states that have no values on one rank, and then one with values."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    device, found = "meta" if rank == blank else "cpu", []
    model, inside = nn.Linear(2, 1), torch.ones(2, device=device)
    model.register_buffer("table", torch.ones(2, device=device))
    lazy = nn.LazyLinear(2) if rank == blank else nn.Linear(2, 2)
    with torchlift.Keeper(folder) as keeper:
        for name, value in {"model": model, "things": {"a": [inside]}, "lazy": lazy}.items():
            with pytest.raises(PlacementError) as caught:
                keeper.save(1, {name: value})
            found.append(str(caught.value))
        assert keeper.save(2, model=nn.Linear(2, 1))
    return found


@pytest.mark.distributed
def test_a_tensor_without_values_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    """torch's error for it does not say which one it is."""
    alone = refusals_of_blanks(str(tmp_path / "alone"), 0)
    by_rank = torchlift.distributed.on_ranks(2, refusals_of_blanks, str(tmp_path / "mesh"), 1)
    assert by_rank[0] == by_rank[1]
    for found, who in ((alone, ""), (by_rank[0], "on rank 1: ")):
        for text, name in zip(found, ("model.table", "things.a.0", "lazy.weight"), strict=True):
            what = "cannot be stored" if name == "lazy.weight" else "the tensor does not have"
            assert text.startswith(f"'{name}': {who}{what}"), text
    assert {*map(str, tmp_path.glob("*/*"))} == {
        str(tmp_path / "alone" / "step-000000002.pt"), str(tmp_path / "mesh" / "step-000000002"),
    }  # fmt: skip


def keep_own_codes(folder: str) -> None:
    """Save a parameter, and an optimizer's state, of which each rank has its own values."""
    import torch.distributed as dist

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
        model.bias.fill_(5)
    optimizer.state[model.bias] = {"momentum_buffer": torch.full((1,), float(dist.get_rank()))}
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, model=model, optimizer=optimizer)


@pytest.mark.distributed
def test_another_number_of_ranks_does_not_take_the_values_of_one_rank(tmp_path: Path) -> None:
    """They differed under one name: an error before anything changes, and its way out works."""
    torchlift.distributed.on_ranks(2, keep_own_codes, str(tmp_path))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = {"model": model, "optimizer": optimizer}
    before = everything(run)
    with torchlift.Keeper(tmp_path) as keeper:
        with pytest.raises(PlacementError, match=r"its own values .* 2 ranks.*; found 1") as caught:
            keeper.resume(run)
        assert same(everything(run), before)
        line = f"torchlift.load(model, {keeper.latest()!r}, root='model', allow_missing=['weight'])"
        assert caught.value.hint == f"Resume without model and optimizer, and then {line}."
        eval(line, {"torchlift": torchlift, "model": model})
        assert torch.equal(model.weight, before["model"]["weight"])
        assert model.bias.item() == 5


def test_another_number_of_groups_is_refused_with_its_scheduler(tmp_path: Path) -> None:
    """A scheduler keeps a learning rate for each group: it would fail at its next step."""

    def made(groups: int) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        params = [{"params": [p]} for p in model.parameters()] if groups > 1 else model.parameters()
        optimizer = torch.optim.AdamW(params)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, made(1))
        run = made(2)
        before = everything(run)
        with pytest.raises(CheckpointError, match="another number of parameter groups"):
            keeper.resume(run)
        assert same(everything(run), before)
        del run["scheduler"]
        assert keeper.resume(run) == 1


class Counting(torch.optim.Optimizer):
    """Has state that is not a parameter's, by a name of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # Typed as if every key were a tensor.
        own = self.state["steps"]  # type: ignore[index]
        own["count"] = own.get("count", 0) + 1
        own["sum"] = own.get("sum", torch.zeros(2)) + self.param_groups[0]["lr"]


def counted(folder: str) -> list[Any]:
    """Save and resume two such optimizers, with a scheduler that has a learning rate of each."""

    def made() -> dict[str, Any]:
        run: dict[str, Any] = {"model": nn.Linear(2, 2)}
        for at, param in enumerate(run["model"].parameters()):
            run[f"optimizer{at}"] = Counting([param])
        run["optimizer1"].param_groups[0]["lr"] = 0.5
        return run

    run, again = made(), made()
    for _ in range(3):
        run["optimizer0"].step()
    run["optimizer1"].step()
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, run)
        assert keeper.resume(again) == 1
    states = [again[name].state["steps"] for name in ("optimizer0", "optimizer1")]
    return [each for state in states for each in (state["count"], state["sum"].tolist()[1])]


@pytest.mark.distributed
def test_state_of_an_optimizer_that_no_parameter_has_is_resumed(tmp_path: Path) -> None:
    """Each optimizer gets its own, on one process and on several."""
    expected = [3, pytest.approx(0.3), 1, 0.5]
    assert counted(str(tmp_path / "alone")) == expected
    on_ranks = torchlift.distributed.on_ranks
    assert on_ranks(2, counted, str(tmp_path / "mesh")) == [expected] * 2


def test_the_first_step_with_dampening_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """It takes the gradient as it is: a buffer of zeros in its place would shrink it."""

    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        return {"model": model, "optimizer": optimizer}

    run, again = made(), made()
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(0, run)
        assert keeper.resume(again) == 0
    for each in (run, again):
        for _ in range(2):
            each["model"](torch.ones(1, 2)).sum().backward()
            each["optimizer"].step()
    assert same(everything(run), everything(again))


class Drawing(Stateful):
    """Draws random numbers when it loads, and has no state before that."""

    started = False

    def state_dict(self) -> dict[str, Any]:
        if not self.started:
            raise RuntimeError("not started")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(3)
        super().load_state_dict(state)


def test_code_that_draws_numbers_when_it_loads_does_not_change_the_next_ones(
    tmp_path: Path,
) -> None:
    """Neither that of an object that is loaded last nor that of a model."""

    class Layer(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            torch.rand(3)
            super()._load_from_state_dict(*args)

    saved = Drawing(5)
    saved.started = True
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, loader=saved, model=Layer(2, 1))
        expected = torch.get_rng_state()
        again = Drawing(0)
        assert keeper.resume(loader=again, model=Layer(2, 1)) == 1
    assert torch.equal(torch.get_rng_state(), expected)
    assert again.value == 5


def test_objects_are_loaded_in_the_order_in_which_they_are_passed(tmp_path: Path) -> None:
    """Hashes of names differ between ranks, and a state that communicates needs one order."""
    order = list[str]()

    class Noting(Stateful):
        name = ""

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.append(self.name)
            super().load_state_dict(state)

    objects = {f"object_{each}": Noting(1) for each in "zqjxkvbw"}
    for name, obj in objects.items():
        obj.name = name
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, objects)
        keeper.resume(objects)
    assert order == [*objects]


def test_parameters_in_other_groups_are_refused_with_their_scheduler(tmp_path: Path) -> None:
    """A scheduler keeps the learning rates by the place of the group, an optimizer by names."""

    def made(*order: int) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        params = [*model.parameters()]
        optimizer = torch.optim.AdamW([{"params": params[at], "lr": 1 + at} for at in order])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, made(0, 1))
        run = made(1, 0)
        before = everything(run)
        with pytest.raises(CheckpointError, match="saved with this parameter in another group"):
            keeper.resume(run)
        assert same(everything(run), before)
        del run["scheduler"]
        assert keeper.resume(run) == 1
        assert [group["lr"] for group in run["optimizer"].param_groups] == [2, 1]


def stage(folder: str, saves: bool) -> list[float]:
    """Save or resume a stage of a pipeline, with an optimizer and a scheduler of its own."""
    import torch.distributed as dist

    names = ["one", "two"] if not dist.is_initialized() else [["one", "two"][dist.get_rank()]]
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with torchlift.Keeper(folder) as keeper:
        if saves:
            optimizer.step()
            scheduler.step()
            keeper.save(1, run)
        else:
            assert keeper.resume(run) == 1
    optimizer.step()
    scheduler.step()
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.distributed
def test_the_stages_of_a_pipeline_have_schedulers(tmp_path: Path) -> None:
    """The checkpoint has the groups of all stages, and each scheduler those of its own."""
    on_ranks = torchlift.distributed.on_ranks
    assert on_ranks(2, stage, str(tmp_path), True) == [[0.25], [0.25]]
    assert on_ranks(2, stage, str(tmp_path), False) == [[0.25], [0.25]]
    assert stage(str(tmp_path), False) == [0.25]


class Owning(torch.optim.Optimizer):
    """Each rank has matrices in a list, and numbers. Only some parameters have a state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def fill(self, rank: int) -> None:
        for param in self.param_groups[0]["params"][rank:]:
            matrices = [torch.full((2 + rank,), float(rank)), torch.ones(1)]
            self.state[param] = {"matrices": matrices, "count": 5 + rank, "seen": {rank}, "same": 3}
        self.param_groups[0]["plan"] = np.where(np.arange(3000) == 1500, rank, 0)


class Scaled(nn.Linear):
    """A layer with a number beside its weights."""

    amax = 0.0

    def get_extra_state(self) -> dict[str, float]:
        return {"amax": self.amax}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.amax = state["amax"]


def own_numbers(folder: str, saves: bool) -> tuple[Any, ...]:
    """Save or resume a model and an optimizer of which each rank has numbers of its own."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = Scaled(2, 1)
    optimizer = Owning(model.parameters(), 0.1 + rank if saves else 7.0)
    groups = Stateful(rank if saves else 9)  # the Keeper has such keys of its own
    with torchlift.Keeper(folder, background=False) as keeper:
        if saves:
            model.amax = float(rank)
            optimizer.fill(rank)
            keeper.save(1, model=model, optimizer=optimizer, groups=groups, containers=[1])
        else:
            run = {"model": model, "optimizer": optimizer, "groups": groups, "containers": [1]}
            assert keeper.resume(run) == 1
    states = [
        dict(optimizer.state[param]) for param in model.parameters() if param in optimizer.state
    ]
    for state in states:
        state["matrices"] = [each.tolist() for each in state["matrices"]]
    group = optimizer.param_groups[0]
    return model.amax, group["lr"], [*group["plan"]], groups.value, states


@pytest.mark.distributed
def test_numbers_and_lists_that_differ_between_ranks_are_each_ranks_own(tmp_path: Path) -> None:
    """Not only tensors. One rank may have no state of a parameter. Other ranks are refused."""
    on_ranks = torchlift.distributed.on_ranks
    saved = on_ranks(2, own_numbers, str(tmp_path), True)
    assert saved[0] != saved[1]
    assert len(saved[1][-1]) == 1
    assert on_ranks(2, own_numbers, str(tmp_path), False) == saved
    with pytest.raises(PlacementError, match="each rank saved its own values") as caught:
        own_numbers(str(tmp_path), False)
    assert (caught.value.hint or "").startswith("Resume without model and optimizer, and then ")


def beside_shards(folder: str, kind: type) -> list[float]:
    """Save and resume a number of each rank in a container with a shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def fill(number: float) -> None:
        items = {"shard": torch.zeros_like(model.weight), "own": torch.tensor(number)}
        both = items if kind is dict else kind(items.values())
        optimizer.state[model.weight] = {"momentum_buffer": None, "both": both}

    with torchlift.Keeper(folder, background=False) as keeper:
        fill(float(dist.get_rank()))
        keeper.save(1, model=model, optimizer=optimizer)
        fill(9.0)
        keeper.resume(model=model, optimizer=optimizer)
    both = optimizer.state[model.weight]["both"]
    assert isinstance(both, kind)
    shard, own = both.values() if isinstance(both, dict) else both
    assert shard.full_tensor().tolist() == [[0.0, 0.0]] * 4
    return [own.item()]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_a_number_of_each_rank_beside_a_shard_is_kept(tmp_path: Path, kind: type) -> None:
    """In any container: the shard is in the table of all ranks, the number in each rank's item."""
    found = torchlift.distributed.on_ranks(2, beside_shards, str(tmp_path), kind)
    assert found == [[0], [1]]


def save_counts(folder: str) -> None:
    """Save equal counts, which each rank has in another order, as of a set of texts."""
    import torch.distributed as dist

    model = Scaled(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    names = ["a", "b"] if dist.get_rank() else ["b", "a"]
    # Other tests give it a number.
    model.amax = {"count": [dict.fromkeys(names, 1)]}  # type: ignore[assignment]
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, model=model)


@pytest.mark.distributed
def test_equal_dicts_in_another_order_do_not_differ(tmp_path: Path) -> None:
    """A resume on another number of ranks would be refused."""
    torchlift.distributed.on_ranks(2, save_counts, str(tmp_path))
    model = Scaled(2, 1)
    with torchlift.Keeper(tmp_path) as keeper:
        assert keeper.resume(model=model) == 1
    assert model.amax == {"count": [{"a": 1, "b": 1}]}


def drifted(folder: str) -> list[float]:
    """Save and resume replicas of a DTensor that differ."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh, rank = init_device_mesh("cpu", (2,)), float(dist.get_rank())

    def filled(value: float) -> DTensor:
        return DTensor.from_local(torch.full((1, 2), value), mesh, [Replicate()])

    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(filled(rank))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = filled(rank + 5)
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, model=model, optimizer=optimizer)
        model.weight = nn.Parameter(filled(9.0))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        keeper.resume(model=model, optimizer=optimizer)
    moment: Any = optimizer.state[model.weight]["momentum_buffer"]
    weight: Any = model.weight.data
    return [tensor.to_local()[0, 0].item() for tensor in (weight, moment)]


@pytest.mark.distributed
def test_replicas_of_a_dtensor_that_differ_are_each_ranks_own(tmp_path: Path) -> None:
    """As those of a plain tensor: a norm that tensor parallelism keeps on every rank."""
    found = torchlift.distributed.on_ranks(2, drifted, str(tmp_path))
    assert found == [[0, 5], [1, 6]]


def test_state_of_a_parameter_that_no_optimizer_holds_now_is_refused(tmp_path: Path) -> None:
    """A group that was added later is not there yet: its moments would be lost in silence."""

    def made(*groups: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW([{"params": model[at].parameters()} for at in groups])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    run, fewer, again = made(0, 1), made(0), made(1, 0)
    before = everything(fewer)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, run)
        with pytest.raises(
            CheckpointError, match=r"1.weight'.*no loaded optimizer holds"
        ) as caught:
            keeper.resume(fewer)
        assert same(everything(fewer), before)
        path = keeper.latest()
        line = f"torchlift.distributed.load_optimizer(model, optimizer, {path!r}, root='optimizer')"
        hint = f"To load the state of the others: resume without optimizer, then {line}."
        assert str(caught.value).endswith(hint)
        assert keeper.resume(model=fewer["model"]) == 1
        eval(line, {"torchlift": torchlift, **fewer})
        assert keeper.resume(again) == 1
    assert torch.equal(fewer["model"][1].weight, run["model"][1].weight)
    moments, expected = (each["optimizer"].state[each["model"][0].weight] for each in (again, run))
    assert all(map(torch.equal, moments.values(), expected.values()))


class Filled(torch.optim.Optimizer):
    """Its state and its groups have containers of all kinds."""

    def __init__(self, params: Any) -> None:
        plan = {0: 0.1, 100: 0.2}
        super().__init__(params, {"betas": (torch.ones(1), 0.9), "plan": plan, "lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "by_number": {0: torch.ones(1), 7: {True: (1, 2)}},
                "pair": (torch.ones(2), [(torch.zeros(1),)]),
                "empty": {},
            }


def containers_of(folder: str, alike: bool) -> list[Any]:
    """Save and resume such an optimizer, and a module with such a state."""
    if alike:
        torch.manual_seed(0)

    class Table(nn.Linear):
        table: Any = None

        def get_extra_state(self) -> Any:
            return self.table

        def set_extra_state(self, state: Any) -> None:
            self.table = state

    def made() -> dict[str, Any]:
        model = Table(2, 1)
        return {"model": model, "optimizer": Filled(model.parameters())}

    run, again = made(), made()
    run["model"].table = {3: "c", "t": {0: torch.ones(1), None: (torch.ones(1),)}}
    run["optimizer"].step()
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, run)
        again["optimizer"].param_groups[0].update(plan=None, betas=None)
        assert keeper.resume(again) == 1
        with torchlift.open(keeper.latest() or "") as ckpt:
            group = ckpt.tree("optimizer")["param_groups"][0]
            assert group["plan"] == {0: 0.1, 100: 0.2}
    found = []
    for each in (run, again):
        group = each["optimizer"].param_groups[0]
        states = [*each["optimizer"].state.values()]
        found.append(repr([each["model"].table, states, group["plan"], group["betas"]]))
    return found


@pytest.mark.distributed
def test_containers_in_models_and_optimizers_come_back_as_they_were(tmp_path: Path) -> None:
    """A DCP folder has text keys, and lists in the place of tuples."""
    on_ranks = torchlift.distributed.on_ranks
    for run, again in (
        containers_of(str(tmp_path / "alone"), True),
        *on_ranks(2, containers_of, str(tmp_path / "mesh"), True),
        *on_ranks(2, containers_of, str(tmp_path / "unlike"), False),
    ):
        assert again == run


# torch warns, once in a process, that it may change how these work.
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_of_an_object_come_back(tmp_path: Path, layout: torch.layout) -> None:
    """torch does not copy a compressed one deeply."""

    class Graph:
        def __init__(self, edges: torch.Tensor) -> None:
            self.edges = edges

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"edges": self.edges}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.edges = state["edges"]

    run, again = (Graph((torch.eye(3) * by).to_sparse(layout=layout)) for by in (2, 0))
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, graph=run)
        assert keeper.resume(graph=again) == 1
    assert again.edges.layout is layout
    assert torch.equal(again.edges.to_dense(), torch.eye(3) * 2)


def test_an_encoder_in_two_models_has_the_state_of_each_optimizer(tmp_path: Path) -> None:
    """An actor and a critic: it has a name in each, and one optimizer must not get both states."""

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        encoder = nn.Linear(2, 2)
        models = {name: nn.Sequential(encoder, nn.Linear(2, 1)) for name in ("actor", "critic")}
        optimizers = {f"{n}_optimizer": torch.optim.Adam(m.parameters()) for n, m in models.items()}
        return {**models, **optimizers}

    run, again = made(0), made(1)
    for power, name in enumerate(("actor", "critic"), 2):
        run[f"{name}_optimizer"].zero_grad()
        run[name](torch.ones(1, 2)).pow(power).sum().backward()
        run[f"{name}_optimizer"].step()
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, run)
        assert keeper.resume(again) == 1
    assert same(everything(run), everything(again))


def keep_experts(folder: str, names: bool) -> float:
    """Save and resume a sharded expert of each rank, on a mesh of its own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("expert", "shard"))["shard"]
    model = nn.ModuleDict({f"expert_{rank}" if names else "expert": nn.Linear(2, 1, bias=False)})
    (expert,) = model.values()
    fully_shard(expert, mesh=mesh)
    with torch.no_grad():
        expert.weight.to_local().fill_(rank + 5)
    with torchlift.Keeper(folder, background=False) as keeper:
        keeper.save(1, model=model)
        with torch.no_grad():
            expert.weight.to_local().zero_()
        keeper.resume(model=model)
    return expert.weight.to_local()[0, 0].item()


@pytest.mark.distributed
def test_shards_on_several_meshes_are_not_taken_for_replicas(tmp_path: Path) -> None:
    """The experts of one rank would become those of all. The way out is a name for each."""
    on_ranks = torchlift.distributed.on_ranks
    with pytest.raises(RuntimeError, match=r"hold different values .*expert_\{number"):
        on_ranks(2, keep_experts, str(tmp_path / "one"), False)
    assert on_ranks(2, keep_experts, str(tmp_path / "two"), True) == [5, 6]

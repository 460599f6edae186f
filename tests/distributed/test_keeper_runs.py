"""A run that a Keeper resumes goes on bit by bit, whatever it consists of, on ranks as well."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on
from stateful import Loader, Noted
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from wrapped_models import WRAPPERS, cloned, net
from zoo import same

import torchlift

Objects = dict[str, Any]


class Run(NamedTuple):
    """How a run starts and goes on.

    Attributes:
        make: The objects of a run with a seed. That of seed 0 is saved, and others are resumed.
        step: Take a step.
        before: The steps before the save.
        fresh: Whether a run may take steps before it is resumed.
    """

    make: Callable[[int], Objects]
    step: Callable[[Objects], object]
    before: int = 3
    fresh: bool = True


def step_all(run: Objects, loss: torch.Tensor) -> None:
    """Let all optimizers and schedulers take a step, and the loader another row."""
    scaler = run.get("scaler", torch.amp.GradScaler("cpu", enabled=False))
    scaler.scale(loss).backward()
    optimizers = [each for each in run.values() if isinstance(each, torch.optim.Optimizer)]
    for each in optimizers:
        scaler.step(each)
    for each in optimizers:
        each.zero_grad()
    scaler.update()
    for each in run.values():
        if isinstance(each, lr_scheduler.LRScheduler):
            each.step()
    run["loader"].at += 1
    run["loader"].seen += 1


# ---- runs


def plain(seed: int) -> Objects:
    """Random numbers of three kinds, statistics, and a scheduler of schedulers."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedulers = [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3, 4])]
    scheduler = lr_scheduler.SequentialLR(optimizer, schedulers, [2])
    random.seed(seed)
    np.random.seed(seed)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def step_plain(run: Objects) -> None:
    numbers = torch.randn(16, 4) + random.random() + np.random.rand()
    step_all(run, run["model"](numbers).square().mean())


def wrapped(kind: str) -> Run:
    """Sizes that no number of ranks divides. Each rank draws numbers of its own."""

    def make(seed: int) -> Objects:
        model = WRAPPERS[kind](net(seed)).eval()  # statistics are not the ranks' own
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        torch.manual_seed(10 * seed + dist.get_rank())
        scheduler = lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def step(run: Objects) -> None:
        step_all(run, run["model"](torch.randn(4, 5)).square().mean())

    return Run(make, step)


def several_wrapped(seed: int) -> Objects:
    """One optimizer of a sharded and a wrapped model, and of a parameter that is in none."""
    maker, judge = nn.Linear(5, 7), DistributedDataParallel(nn.Linear(7, 3))
    fully_shard(maker, mesh=cpu_mesh())
    loose = torch.full((1,), 2.0, requires_grad=True)
    params = [*maker.parameters(), *judge.parameters(), loose]
    return {"maker": maker, "judge": judge, "optimizer": torch.optim.Adam(params, lr=seed + 1.0)}


def step_several(run: Objects) -> None:
    loose = run["optimizer"].param_groups[0]["params"][-1]
    step_all(run, loose.sum() + run["judge"](run["maker"](torch.randn(4, 5))).square().mean())


def gan(seed: int) -> Objects:
    """A generator and a discriminator, each with an optimizer and a scheduler, an EMA, a scaler."""
    maker = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    judge = nn.Linear(3, 1)
    one = torch.optim.Adam(maker.parameters(), lr=0.01)
    two = torch.optim.RMSprop(judge.parameters(), lr=0.02, momentum=0.5)
    return {
        "maker": maker,
        "judge": judge,
        "one": one,
        "two": two,
        "decay": lr_scheduler.StepLR(one, 2),
        "cycle": lr_scheduler.CyclicLR(two, 0.01, 0.1, cycle_momentum=False),
        "ema": AveragedModel(maker),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 4)),
    }


def step_gan(run: Objects) -> None:
    step_all(run, run["judge"](run["maker"](torch.randn(8, 4))).square().mean())
    run["ema"].update_parameters(run["maker"])


def shared_encoder(seed: int) -> Objects:
    """An actor and a critic whose optimizers both have the parameters of an encoder."""
    encoder, actor, critic = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
    both = [*encoder.parameters(), *actor.parameters()]
    return {
        "encoder": encoder,
        "actor": actor,
        "critic": critic,
        "first": torch.optim.Adam(both, lr=0.1),
        "second": torch.optim.Adam([*encoder.parameters(), *critic.parameters()], lr=0.2),
    }


def step_in_turn(run: Objects) -> None:
    numbers = torch.randn(4, 3)
    for head, optimizer in (("actor", "first"), ("critic", "second")):
        run[head](run["encoder"](numbers)).square().mean().backward()
        run[optimizer].step()
        run[optimizer].zero_grad()


def encoder_in_two_models(seed: int) -> Objects:
    """An encoder that has a name in each of two models, which have an optimizer each."""
    encoder = nn.Linear(2, 2)
    models = {name: nn.Sequential(encoder, nn.Linear(2, 1)) for name in ("actor", "critic")}
    return {**models, **{f"{n}_adam": torch.optim.Adam(m.parameters()) for n, m in models.items()}}


def step_two_models(run: Objects) -> None:
    for power, name in enumerate(("actor", "critic"), 2):
        run[f"{name}_adam"].zero_grad()
        run[name](torch.randn(3, 2)).pow(power).sum().backward()
        run[f"{name}_adam"].step()


def several_modules(seed: int) -> Objects:
    """An optimizer of two modules, and two of one, each with a parameter that is in none."""
    actor, critic, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    alpha = torch.zeros(1, requires_grad=True)
    return {
        "own": torch.optim.SGD([other.weight, alpha], lr=0.2, momentum=0.9),
        "items": actor,  # a name that a ModuleDict has for itself
        "critic": critic,
        "other": other,
        "both": torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.1),
        "bias": torch.optim.Adam([torch.ones(1, requires_grad=True), other.bias], lr=0.3),
        "loose": torch.optim.Adam([alpha], lr=0.4),
    }


def step_several_modules(run: Objects) -> None:
    out = run["other"](run["critic"](run["items"](torch.randn(4, 2))))
    loose = [run["loose"].param_groups[0]["params"][0], run["bias"].param_groups[0]["params"][0]]
    step_all(run, out.square().mean() + sum(loose).sum())


class Renaming(nn.Linear):
    """Its state has other names than its parameters, and rows in another order."""

    def state_dict(self) -> Objects:  # type: ignore[override]
        return {f"x.{key}": value.flip(0) for key, value in super().state_dict().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        found = {key.removeprefix("x."): value.flip(0) for key, value in state_dict.items()}
        return super().load_state_dict(found, strict)


def renaming(seed: int) -> Objects:
    """Two models with methods of their own, which are called as those of a root."""
    one, two = Renaming(3, 2), Renaming(2, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (one, two)]
    return {"one": one, "two": two, "first": optimizers[0], "second": optimizers[1]}


def dampened(seed: int) -> Objects:
    """The first step takes the gradient as it is: a buffer of zeros in its place shrinks it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    return {"model": model, "optimizer": optimizer}


def step_model(run: Objects) -> None:
    step_all(run, run["model"](torch.randn(3, 2)).square().sum())


def two_optimizers_on_meta(seed: int) -> Objects:
    """One model and two optimizers of it. What is resumed has no values yet."""
    with torch.device("meta" if seed else "cpu"):
        model = nn.Linear(2, 1)
    optimizers = {name: torch.optim.Adam(model.parameters()) for name in ("one", "two")}
    return {"model": model, **optimizers}


class Filled(torch.optim.Optimizer):
    """Its state and its groups have containers of all kinds, and it counts its steps by a name."""

    def __init__(self, params: Any, seed: int) -> None:
        plan = {0: 0.1, 100: 0.2 + seed}
        betas = (torch.full((1,), seed + 1.0), 0.9)
        super().__init__(params, {"betas": betas, "plan": plan, "lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # Typed as if every key were a tensor.
        own = self.state["steps"]  # type: ignore[index]
        own["count"] = own.get("count", 0) + 1
        own["sum"] = own.get("sum", torch.zeros(2)) + self.param_groups[0]["lr"]
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "by_number": {0: param.detach() + 1, 7: {True: (1, 2)}},
                "pair": (torch.ones(2), [(torch.zeros(1),)]),
                "empty": {},
            }


def filled(seed: int) -> Objects:
    """Containers of all kinds. A DCP folder has text keys, and lists in the place of tuples."""
    model = Noted(2, 1)
    kinds = (b"\xff", 1j, {"a"})
    tensors = {0: torch.ones(1), None: (torch.full((1,), float(seed)),)}
    model.note = {3: seed, "t": tensors, "kinds": kinds}
    one, two = Filled([model.weight], seed), Filled([model.bias], seed)
    two.step()  # each must get its own count again
    return {"model": model, "one": one, "two": two}


RUNS = {
    "plain": Run(plain, step_plain),
    "gan": Run(gan, step_gan),
    "shared encoder": Run(shared_encoder, step_in_turn),
    "encoder in two models": Run(encoder_in_two_models, step_two_models),
    "renaming": Run(renaming, lambda run: step_all(run, run["two"](run["one"](torch.randn(3))))),
    "several modules": Run(several_modules, step_several_modules),
    "dampened": Run(dampened, step_model, before=0, fresh=False),
    "two optimizers on meta": Run(two_optimizers_on_meta, step_model, fresh=False),
    "filled": Run(filled, step_model),
}
ON_RANKS = {
    **RUNS,
    **{kind: wrapped(kind) for kind in ("fsdp blocks", "ddp")},
    "several wrapped": Run(several_wrapped, step_several),
}


def states_of(run: Objects) -> Objects:
    """A copy of all states, and of the numbers that are drawn next."""
    states = {name: each.state_dict() for name, each in run.items()}
    return cloned({**states, "rng": torch.get_rng_state(), "python": random.getstate()})


def is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def require_to_go_on(kind: Run, folder: Path) -> None:
    """Save a run, resume it into another one, and let both take the same steps."""

    def made(seed: int) -> Objects:
        torch.manual_seed(seed)
        return {**kind.make(seed), "loader": Loader(seed)}

    run = made(0)
    for _ in range(kind.before):
        kind.step(run)
    with torchlift.Keeper(folder) as keeper:
        assert keeper.resume(run) is None
        assert keeper.save(3, run)
        for _ in range(3):  # while it is being written
            kind.step(run)
        expected = states_of(run)
        keeper.wait()
        again = made(1)
        if kind.fresh:  # also, DDP sums in another order from its second step on
            kind.step(again)
        before = states_of(again)
        again["loader"].refuses = is_last_rank()
        with pytest.raises((OSError, torchlift.CheckpointError), match="no such luck"):
            keeper.resume(again)
        assert same(states_of(again), before), "a resume that fails on one rank changes nothing"
        assert not hasattr(again["loader"], "added")
        again["loader"].refuses = False
        assert keeper.resume(again) == 3
        for _ in range(3):
            kind.step(again)
    assert same(states_of(again), expected, kinds=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR")  # may change, which torch says once
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Weights, statistics, moments, learning rates, positions and random numbers."""
    require_to_go_on(RUNS[name], tmp_path)


def test_state_of_an_optimizer_is_saved_under_the_names_of_its_modules(tmp_path: Path) -> None:
    """A parameter that is in no module has a name by its place."""
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, several_modules(0))
    keys = torchlift.open(keeper.latest()).entries.keys()
    assert {"both.state.items.weight.exp_avg", "both.state.critic.weight.exp_avg"} < keys
    assert {
        "own.state.weight.momentum_buffer",
        "loose.state.param_groups.0.params.0.exp_avg",
    } < keys


@on(2, 4, name=ON_RANKS)
def test_a_run_on_ranks_goes_on_bit_by_bit(name: str, folder: Path) -> None:
    """The same, sharded and wrapped as well; each rank has its own random numbers."""
    require_to_go_on(ON_RANKS[name], folder)


# ---- resumes that fail


def other_class(run: Objects) -> str:
    run["two"] = torch.optim.Adagrad(run["judge"].parameters())
    run["cycle"] = lr_scheduler.ConstantLR(run["two"])
    return "another kind of optimizer than Adagrad"


def fewer_schedulers(run: Objects) -> str:
    run["decay"] = lr_scheduler.SequentialLR(
        run["one"], [lr_scheduler.ConstantLR(run["one"]), lr_scheduler.StepLR(run["one"], 2)], [2]
    )
    return "_schedulers"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("change", [other_class, fewer_schedulers])
@pytest.mark.parametrize("steps", [0, 2])  # a program that has just started, and one that goes back
def test_a_resume_that_fails_changes_no_object(
    tmp_path: Path, change: Callable[[Objects], str], steps: int
) -> None:
    """Neither the models before the one that refuses, nor what comes after it."""
    torch.manual_seed(0)
    run, again = ({**gan(seed), "loader": Loader(seed)} for seed in (0, 1))
    step_gan(run)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(3, run)
        for _ in range(steps):
            step_gan(again)
        text = change(again)
        before, attributes = states_of(again), {*vars(again["decay"])}
        with pytest.raises((torchlift.CheckpointError, KeyError), match=text):
            keeper.resume(again)
    assert same(states_of(again), before)
    assert {*vars(again["decay"])} == attributes

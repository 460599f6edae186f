"""Optimizer state in another dtype than the parameters, and groups of an older version."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_kinds import Codes, Lion
from ranks import cpu_mesh, on
from state_models import FROM_0, WHOLE, same, set_both, step, two_layers
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchlift
import torchlift.distributed as ours

Make = Callable[[Any], torch.optim.Optimizer]
Door = Callable[[nn.Module, torch.optim.Optimizer, Any, Path], object]


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params)
    optimizer.register_load_state_dict_post_hook(lambda _: None)
    return optimizer


KINDS: dict[str, Make] = {
    "Adam": torch.optim.Adam,
    "Adam, a step each": lambda params: torch.optim.Adam(params, foreach=False),
    "Adam, fused": lambda params: torch.optim.Adam(params, fused=True),
    "AMSGrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RAdam": torch.optim.RAdam,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Lion": Lion,
    "Adam, hooked": hooked,
}


def from_file(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: Any, folder: Path
) -> object:
    torchlift.save(states[1], folder / "saved.pt")
    return ours.load_optimizer(model, optimizer, folder / "saved.pt")


DOORS: dict[str, Door] = {
    "load_optimizer": from_file,
    "set_state_dict": lambda model, optimizer, states, _: set_both(model, optimizer, states),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step. Unlike `step`, a closure may be called."""
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    optimizer.step(lambda: torch.tensor(0.0))


def trained(make: Make, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = two_layers().to(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("saved", "live"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["to bfloat16", "to float32"],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_moments_follow_the_dtype_of_their_parameter_as_in_torch(
    stepped: bool, saved: torch.dtype, live: torch.dtype, name: str, tmp_path: Path
) -> None:
    """Every kind of optimizer takes its next step with them, and gets torch's values."""
    make = KINDS[name]
    model, optimizer = trained(make, saved)
    states = ours.get_state_dict(model, optimizer)
    plain, kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(states[1])
    results = []
    for load in (None, *DOORS.values()):
        other = two_layers().to(live)
        loaded = make(other.parameters())
        if stepped:
            train(other, loaded)
        other.load_state_dict(states[0])
        if load is None:
            loaded.load_state_dict(copy.deepcopy(plain))
        else:
            load(other, loaded, states, tmp_path)
        before = copy.deepcopy(loaded.state_dict())
        train(other, loaded)
        results.append((before, loaded.state_dict(), dict(other.state_dict())))
    assert all(same(results[0], result) for result in results[1:])
    assert same(states[1], kept)


class Own(torch.optim.Optimizer):
    """Keeps a copy of the weights in float32, which only ``step`` makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                own = self.state[param].setdefault("master", param.float())
                param.copy_(own.sub_(param.grad, alpha=group["lr"]))


class Loading(Own):
    """Decides itself which of its tensors are cast."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for number, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["master"] = state_dict["state"][number]["master"].clone()


class Wide(Own):
    """Makes its copy of the weights before the first step, where torch's optimizers do."""

    def _init_group(self, group: Any) -> None:
        for param in group["params"]:
            self.state[param].setdefault("master", param.detach().float())


@pytest.mark.parametrize(("make", "stepped"), [(Own, True), (Loading, False), (Wide, False)])
def test_what_an_optimizer_keeps_in_another_dtype_than_its_parameters_stays(
    make: Any, stepped: bool
) -> None:
    """Its own tensors show it, what it makes before the first step, or the method it loads with."""
    model = two_layers().bfloat16()
    optimizer = make(model.parameters())
    train(model, optimizer)
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, optimizer))
    other = make(model.parameters())
    if stepped:
        train(model, other)
    ours.set_optimizer_state_dict(model, other, saved)
    assert same(ours.get_optimizer_state_dict(model, other)["state"], saved["state"])


@pytest.mark.parametrize("make", [Own, Codes, Lion, torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("door", ["keeper", "set_state_dict"])
def test_a_state_that_was_saved_beside_weights_of_the_same_dtype_is_not_cast(
    door: str, make: Any, tmp_path: Path
) -> None:
    """The optimizer kept these dtypes for such weights, so a resumed run is the same to the bit."""
    model, optimizer = trained(make, torch.bfloat16)
    other = two_layers(seed=1).bfloat16()
    resumed = make(other.parameters())
    if door == "keeper":
        with torchlift.Keeper(tmp_path, background=False) as keeper:
            keeper.save(1, model=model, optimizer=optimizer)
            keeper.resume(model=other, optimizer=resumed)
    else:
        states = copy.deepcopy(ours.get_state_dict(model, optimizer))
        set_both(other, resumed, states)
    assert same(resumed.state_dict(), optimizer.state_dict())
    for each in ((model, optimizer), (other, resumed)):
        train(*each)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("door", ["keeper", *DOORS])
@pytest.mark.parametrize(
    ("saved", "cast", "fused"),
    [(torch.float32, True, False), (torch.bfloat16, False, True), (torch.float32, False, False)],
)
def test_moments_of_a_skeleton_get_the_dtype_that_its_weights_will_have(
    saved: torch.dtype, cast: bool, fused: bool, door: str, tmp_path: Path
) -> None:
    """That of the checkpoint, unless the skeleton was cast."""
    model, optimizer = trained(lambda params: torch.optim.Adam(params, fused=fused), saved)
    other = torchlift.skeleton(two_layers)
    other = other.bfloat16() if cast else other
    loaded = torch.optim.Adam(other.parameters(), fused=fused)
    if door == "keeper":
        with torchlift.Keeper(tmp_path / "run", background=False) as keeper:
            keeper.save(1, model=model, optimizer=optimizer)
            keeper.resume(model=other, optimizer=loaded)
    else:
        states = copy.deepcopy(ours.get_state_dict(model, optimizer))
        DOORS[door](other, loaded, states, tmp_path)
        torchlift.load(other, states[0])
    weight = other[0].weight
    assert weight.dtype is (torch.bfloat16 if cast else saved)
    assert loaded.state[weight]["exp_avg"].dtype is weight.dtype
    train(other, loaded)


class Cautious(torch.optim.Adam):
    """Gets a new option in ``__setstate__``, as timm's optimizers do: off for older files."""

    def __init__(self, params: Any, *, caution: bool = False, scale: float = 1.0) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group.update(caution=caution, scale=scale)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("caution", False)


class Calling(Cautious):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Cautious, {"caution": True}),
        (Calling, {"caution": True}),
        (torch.optim.Adam, {"maximize": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"nesterov": True, "momentum": 0.9}),
    ],
)
def test_an_option_that_the_file_lacks_is_filled_in_by_the_optimizer_as_in_torch(
    make: Any, options: Any, door: str, tmp_path: Path
) -> None:
    """The file is older than the option, and the optimizer knows what it did before."""
    needed = {name: value for name, value in options.items() if not isinstance(value, bool)}
    model = two_layers()
    old = make(model.parameters(), **needed)
    step(model, old)
    states = copy.deepcopy(ours.get_state_dict(model, old))
    plain = copy.deepcopy(old.state_dict())
    (lacks,) = options.keys() - needed.keys()
    for groups in (states[1]["param_groups"], plain["param_groups"]):
        for group in groups:
            del group[lacks]
    loaded, by_torch = (make(model.parameters(), **options) for _ in range(2))
    DOORS[door](model, loaded, states, tmp_path)
    by_torch.load_state_dict(plain)
    assert not loaded.param_groups[0][lacks]
    assert loaded.param_groups[0][lacks] == by_torch.param_groups[0][lacks]
    assert same(loaded.state_dict()["state"], by_torch.state_dict()["state"])
    step(model, loaded)


def test_an_option_that_nobody_fills_in_stays() -> None:
    """torch loses it, and the next step is a KeyError."""
    model = two_layers()
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, Cautious(model.parameters())))
    for name in ("caution", "scale"):
        del saved["param_groups"][0][name]
    optimizer = Cautious(model.parameters(), caution=True, scale=0.5)
    optimizer.param_groups[0]["initial_lr"] = 0.25  # as a scheduler adds it
    ours.set_optimizer_state_dict(model, optimizer, saved)
    found = optimizer.param_groups[0]
    assert (found["caution"], found["scale"], found["initial_lr"]) == (False, 0.5, 0.25)


@on(2, name=("Adam", "Lion"))
def test_shards_of_moments_follow_the_dtype_of_their_parameter(name: str, folder: Path) -> None:
    """From the file of one process, and from that of a mesh, with torch's values."""
    model, optimizer = trained(KINDS[name], torch.float32)
    one = folder / "one.pt"
    if dist.get_rank() == 0:
        torchlift.save(ours.get_optimizer_state_dict(model, optimizer), one)
    dist.barrier()
    mesh = cpu_mesh()
    sharded = fully_shard(two_layers(), mesh=mesh)
    saving = KINDS[name](sharded.parameters())
    train(sharded, saving)
    states = copy.deepcopy(ours.get_state_dict(sharded, saving))
    whole = ours.get_optimizer_state_dict(sharded, saving, options=WHOLE)
    given = whole if dist.get_rank() == 0 else {}
    half = two_layers().bfloat16()
    expected = KINDS[name](half.parameters())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    like = ours.get_optimizer_state_dict(half, expected)
    loads: list[Any] = [
        lambda *to: ours.load_optimizer(*to, one),
        lambda *to: ours.set_optimizer_state_dict(*to, states[1]),
        lambda *to: ours.set_optimizer_state_dict(*to, given, options=FROM_0),
        lambda *to: set_both(*to, states),
    ]
    for load in loads:
        other = fully_shard(two_layers().bfloat16(), mesh=mesh)
        loaded = KINDS[name](other.parameters())
        load(other, loaded)
        result = ours.get_optimizer_state_dict(other, loaded, options=WHOLE)
        assert same(result["state"], like["state"])
        train(other, loaded)

"""What a Keeper saves it resumes: all objects or none, or it refuses one by name at the save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on, saves
from stateful import Loader, Noted
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from wrapped_models import cloned
from zoo import same

import torchlift
from torchlift.errors import CheckpointError, PlacementError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")  # may change, which torch says once


def everything(run: dict[str, Any]) -> dict[str, Any]:
    """A copy of all states, and of the generators."""
    states = {name: obj.state_dict() for name, obj in run.items()}
    return cloned({**states, "rng": torch.get_rng_state()})


class Late(Loader):
    """It has no state before it is loaded, as some loaders, and draws random numbers then."""

    started = False

    def state_dict(self) -> dict[str, Any]:
        if not self.started:
            raise RuntimeError("not started")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(3)
        super().load_state_dict(state)


def started(value: int) -> Late:
    made = Late(value)
    made.started = True
    return made


def test_an_object_without_a_state_before_is_loaded_last_and_named(tmp_path: Path) -> None:
    """Nobody could give it back: all others are loaded, the error says so, its way out works."""
    model = nn.Linear(2, 1)
    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, model=model, late=started(5))
        fresh = Late(0)
        assert keeper.resume(model=nn.Linear(2, 1), late=fresh) == 1
        assert fresh.at == 5
        other, refuses = nn.Linear(2, 1), Late(0, refuses=True)
        with pytest.raises(
            PlacementError, match=r"'late': .*All other objects are loaded.*unknown"
        ) as it:
            keeper.resume(model=other, late=refuses)
        assert it.value.hint == "Resume without late."
        assert same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("refuses", [False, True])
def test_code_that_draws_numbers_does_not_change_the_next_ones(
    tmp_path: Path, refuses: bool
) -> None:
    """That of a model, of an object that is asked for its state, and of one that is loaded last."""

    class Layer(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            torch.rand(3)
            super()._load_from_state_dict(*args)

    class Drawing(Loader):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, late=started(5), model=Layer(2, 1), loader=Drawing(1))
        expected = torch.get_rng_state()
        model, loader, late = Layer(2, 1), Drawing(2, refuses), Late(0)
        before, weight = torch.get_rng_state(), model.weight.clone()
        if refuses:
            with pytest.raises(OSError, match="no such luck"):
                keeper.resume(late=late, model=model, loader=loader)
        else:
            assert keeper.resume(late=late, model=model, loader=loader) == 1
        assert torch.equal(torch.get_rng_state(), before if refuses else expected)
        assert torch.equal(model.weight, weight) == refuses
    assert late.at == (0 if refuses else 5)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (lambda m: Loader(1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda m: Loader(1)),
        (lambda m: [1, 2], lambda m: nn.Linear(1, 1)),
        (lambda m: nn.Linear(1, 1), lambda m: Loader(1)),
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


def test_objects_are_loaded_in_the_order_in_which_they_are_passed(tmp_path: Path) -> None:
    """Hashes of names differ between ranks, and a state that communicates needs one order."""
    order = list[str]()

    class Noting(Loader):
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


class Owning(torch.optim.Optimizer):
    """Each rank has matrices in a list, and numbers. Only some parameters have a state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def fill(self, rank: int) -> None:
        for param in self.param_groups[0]["params"][rank:]:
            shape = param.to_local().shape if isinstance(param, DTensor) else param.shape
            codes = torch.full(shape, 10 + rank, dtype=torch.uint8)  # of this rank's shard
            matrices = [torch.full((2 + rank,), float(rank)), torch.ones(1), codes]
            self.state[param] = {"matrices": matrices, "count": 5 + rank, "seen": {rank}, "same": 3}
        self.param_groups[0]["plan"] = np.where(np.arange(3000) == 1500, rank, 0)


@on(2)
def test_numbers_and_lists_that_differ_between_ranks_are_each_ranks_own(folder: Path) -> None:
    """Not only tensors. One rank may have no state of a parameter."""
    rank = dist.get_rank()

    def made(lr: float, at: int) -> dict[str, Any]:
        torch.manual_seed(at)
        model = nn.ModuleDict({"own": Noted(2, 1), "shard": fully_shard(nn.Linear(4, 4))})
        # The Keeper has such keys of its own.
        own = {"groups": Loader(at), "containers": [1]}
        return {"model": model, "optimizer": Owning(model.parameters(), lr), **own}

    run, again = made(0.1 + rank, rank), made(7.0, 9)
    run["model"]["own"].note = float(rank)
    run["optimizer"].fill(rank)
    with torchlift.Keeper(folder, background=False) as keeper:
        keeper.save(1, run)
        assert keeper.resume(again) == 1
        assert "model.own.weight" not in torchlift.open(keeper.latest()).entries
    assert same(again["model"].state_dict(), run["model"].state_dict())
    assert again["groups"].at == rank
    (one,), (two,) = (each["optimizer"].param_groups for each in (run, again))
    assert two["lr"] == one["lr"]
    assert [*two["plan"]] == [*one["plan"]]
    states = [[*each["optimizer"].state.values()] for each in (run, again)]
    assert len(states[0]) == 4 - rank
    assert same(*states)


@on(2, kind=("dict", "list", "tuple", "replica"))
def test_a_number_of_each_rank_beside_a_shard_is_kept(kind: str, folder: Path) -> None:
    """In any container: the shard is in the table of all ranks, the number in each rank's item.

    A replica of a DTensor is a number of each rank, too: tensor parallelism keeps a norm so.
    """
    model = nn.Linear(2, 4, bias=False)
    fully_shard(model, mesh=cpu_mesh())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    shard = torch.zeros_like(model.weight)

    def container(number: int) -> Any:
        own = torch.tensor(number)
        both = [shard, own]
        replica = DTensor.from_local(own.repeat(2), cpu_mesh(), [Replicate()])
        kinds = {"dict": {"shard": shard, "own": own}, "list": both, "tuple": (*both,)}
        return {**kinds, "replica": [shard, replica]}[kind]

    with torchlift.Keeper(folder, background=False) as keeper:
        for number in (dist.get_rank(), 9):
            state = {"momentum_buffer": None, "both": container(number)}
            optimizer.state[model.weight] = state
            if number < 9:
                keeper.save(1, model=model, optimizer=optimizer)
        keeper.resume(model=model, optimizer=optimizer)
    both = optimizer.state[model.weight]["both"]
    assert same(both, container(dist.get_rank()), kinds=True)


@saves(2)
def keep_stages_and_counts(saved: Path) -> None:
    """A stage for each rank, and equal counts in another order, as of a set of texts."""
    rank = dist.get_rank()
    run = stages("one" if rank == 0 else "two")
    with torchlift.Keeper(saved / "stages") as keeper:
        step_stages(run)
        keeper.save(1, run)
    model = Noted(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    model.note = {"count": [dict.fromkeys("ab" if rank else "ba", 1)]}
    with torchlift.Keeper(saved / "counts") as keeper:
        keeper.save(1, model=model)


@on(1)
def test_equal_dicts_in_another_order_do_not_differ(saved: Path) -> None:
    """A resume on another number of ranks would be refused."""
    model = Noted(2, 1)
    with torchlift.Keeper(saved / "counts") as keeper:
        assert keeper.resume(model=model) == 1
    assert model.note == {"count": [{"a": 1, "b": 1}]}


def stages(*names: str) -> dict[str, Any]:
    """Stages of a pipeline, with an optimizer and a scheduler of their own."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def step_stages(run: dict[str, Any]) -> None:
    run["optimizer"].step()
    run["scheduler"].step()


@on(1, 2)
def test_the_stages_of_a_pipeline_have_schedulers(saved: Path) -> None:
    """The checkpoint has the groups of all stages, and each scheduler those of its own."""
    names = ("one", "two")
    run = stages(*(names if dist.get_world_size() == 1 else [names[dist.get_rank()]]))
    with torchlift.Keeper(saved / "stages") as keeper:
        assert keeper.resume(run) == 1
    step_stages(run)
    assert [group["lr"] for group in run["optimizer"].param_groups] == [0.25]


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
        hint, _, line = str(caught.value).rpartition("resume without optimizer, then ")
        assert hint.endswith("To load the state of the others: ")
        assert keeper.resume(model=fewer["model"]) == 1
        eval(line.removesuffix("."), {"torchlift": torchlift, **fewer})
        assert keeper.resume(again) == 1
    assert torch.equal(fewer["model"][1].weight, run["model"][1].weight)
    moments, expected = (each["optimizer"].state[each["model"][0].weight] for each in (again, run))
    assert all(map(torch.equal, moments.values(), expected.values()))


@on(2)
def test_shards_on_several_meshes_are_not_taken_for_replicas(folder: Path) -> None:
    """The experts of one rank would become those of all. The way out is a name for each."""
    rank = dist.get_rank()
    mesh = cpu_mesh(2, 1, names=("expert", "shard"))["shard"]

    def made(name: str) -> nn.ModuleDict:
        expert = fully_shard(nn.Linear(2, 1, bias=False), mesh=mesh)
        nn.init.constant_(expert.weight, rank + 5)
        return nn.ModuleDict({name: expert})

    with torchlift.Keeper(folder, background=False) as keeper:
        with pytest.raises(CheckpointError, match=r"hold different values .*expert_\{number"):
            keeper.save(1, model=made("expert"))
        model = made(f"expert_{rank}")
        keeper.save(1, model=model)
        (expert,) = model.values()
        nn.init.zeros_(expert.weight)
        keeper.resume(model=model)
    assert (expert.weight.to_local() == rank + 5).all()


ONE_GROUP, TWO_GROUPS, TURNED = [[0, 1]], [[0], [1]], [[1], [0]]


@pytest.mark.parametrize(
    ("saved", "now", "says", "rates"),
    [
        (ONE_GROUP, TWO_GROUPS, "another number of parameter groups", [1, 1]),
        (TWO_GROUPS, TURNED, "saved with this parameter in another group", [2, 1]),
    ],
)
def test_other_groups_are_refused_with_their_scheduler(
    tmp_path: Path, saved: Any, now: Any, says: str, rates: list[float]
) -> None:
    """It keeps a learning rate for each group, by its place: it would fail at its next step."""

    def made(groups: list[list[int]]) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        params = [*model.parameters()]
        optimizer = torch.optim.AdamW(
            [{"params": [params[at] for at in group], "lr": 1 + group[0]} for group in groups]
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    with torchlift.Keeper(tmp_path, background=False) as keeper:
        keeper.save(1, made(saved))
        run = made(now)
        before = everything(run)
        with pytest.raises(CheckpointError, match=says):
            keeper.resume(run)
        if len(saved) != len(now):  # without its optimizer, too
            with pytest.raises(torchlift.MismatchError, match=r"base_lrs'.*2 groups.*found 1"):
                keeper.resume(scheduler=run["scheduler"])
        assert same(everything(run), before)
        del run["scheduler"]
        assert keeper.resume(run) == 1
        assert [group["lr"] for group in run["optimizer"].param_groups] == rates

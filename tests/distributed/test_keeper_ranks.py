"""`torchlift.Keeper` on several ranks, and on a process group of one."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_disk import file_size_limit
from limits import limits
from ranks import HANGS, bytes_read, cpu_mesh, on, saves, worlds
from stateful import Noted, Stateful
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import WRAPPERS, net
from zoo import same

import torchlift
from torchlift._model.torch_private import timeout_of
from torchlift.distributed import folder_lock, run_state, saved_run
from torchlift.distributed import keeper as keeper_module
from torchlift.errors import CheckpointError, FormatError, IntegrityError

STEPS = 3


def run_of(wrapping: str = "fsdp blocks") -> dict[str, Any]:
    """A model with sizes that no number of ranks divides, its optimizer and its scheduler."""
    model = WRAPPERS[wrapping](net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(run: dict[str, Any], steps: int = STEPS) -> None:
    """Steps on numbers that each rank draws for itself."""
    for _ in range(steps):
        run["model"](torch.randn(4, 5)).square().mean().backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["scheduler"].step()


def values_of(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole tensors of the model and of its moments."""
    found = {}
    for name, param in run["model"].named_parameters():
        name = name.removeprefix("module.")
        state = run["optimizer"].state.get(param, {})
        for kind, value in {"": param.detach(), **state}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name} {kind}"] = whole.clone()  # training goes on
    return found


WRAPPINGS = ("fsdp blocks", "ddp")


def suffix() -> str:
    """How the name of a checkpoint ends: several ranks write a folder, one writes a file."""
    return "" if dist.get_world_size() > 1 else ".pt"


def kept_in(folder: Path) -> list[str]:
    """What is in the folder of a keeper that is open, beside its lock."""
    return sorted({*os.listdir(folder)} - {folder_lock.NAME})


@on(1, 2, 4)
def test_what_is_kept_is_complete_and_no_more_than_asked_for(folder: Path) -> None:
    """The last two, every third, the best; a step that is saved again replaces the older one."""
    run = run_of()
    with torchlift.Keeper(folder, keep=2, every=3, best="loss", background=False) as keeper:
        for step, loss in enumerate([9.0, 1.0, 5.0, 4.0, 3.0, 2.0, 8.0], 1):
            keeper.save(step, run, metrics={"loss": loss})
            dist.barrier()
            assert keeper.latest() == str(folder / f"step-{step:09d}{suffix()}")
        assert keeper.steps() == [2, 3, 6, 7]
        assert keeper.best() == str(folder / f"step-000000002{suffix()}")
        train(run, 1)
        keeper.save(7, run, metrics={"loss": 0.5})
        dist.barrier()
        assert keeper.steps() == [3, 6, 7]
        # A folder stays until the new one is complete.
        last = "step-000000007" + (suffix() or "-1")
        assert keeper.latest() == keeper.best() == str(folder / last)
        names = [f"step-000000003{suffix()}", f"step-000000006{suffix()}", last]
        assert kept_in(folder) == names
        again = run_of()
        assert keeper.resume(again) == 7
        assert same(values_of(again), values_of(run))


@on(1, 2, 4)
def test_a_rank_that_cannot_write_ends_the_save_on_all(folder: Path) -> None:
    """All raise at the next call, the one before is still the last, and what was begun goes."""
    run, rank, ranks = run_of(), dist.get_rank(), dist.get_world_size()
    keeper = torchlift.Keeper(folder, background=False)
    keeper.save(1, run)
    dist.barrier()
    limit = 1000 if rank == ranks - 1 else 1 << 40
    with file_size_limit(limit), pytest.raises(CheckpointError, match="File too large"):
        keeper.save(2, run)
    dist.barrier()
    assert kept_in(folder) == [f"step-000000001{suffix()}"]
    dist.barrier()  # the other ranks have looked
    if rank == 0:  # what a save that was killed leaves
        (folder / "step-000000003").mkdir()
        for name in ("__9_0.distcp", ".rest.pt.torchlift-abcd1234.part"):
            (folder / "step-000000003" / name).touch()
    dist.barrier()
    keeper.save(3, run)
    dist.barrier()
    if ranks > 1:
        names = {f"__{each}_0.distcp" for each in range(ranks)}
        assert set(os.listdir(folder / "step-000000003")) == {".metadata", *names}
    assert keeper.steps() == [1, 3]
    assert kept_in(folder) == [f"step-00000000{n}{suffix()}" for n in (1, 3)]
    keeper.close()


@on(1, 2, 4)
def test_ranks_that_disagree_all_raise(folder: Path) -> None:
    """Another step, other objects, another method, an argument that is wrong on one."""
    run = run_of()
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    class Synchronised:
        def state_dict(self) -> dict[str, int]:
            dist.barrier()
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    with torchlift.Keeper(folder, best="loss") as keeper:
        if last:
            with pytest.raises(ValueError, match=r"the ranks differ in step="):
                keeper.save(rank, run, metrics={"loss": 1.0})
            more = {} if rank else {"critic": nn.Linear(2, 1)}
            with pytest.raises(ValueError, match=r"differ in their models and.*'critic'"):
                keeper.save(1, run, metrics={"loss": 1.0}, **more)
            with pytest.raises(ValueError, match=r"differ in their models and.*'critic'"):
                keeper.resume(run, **more)
            # One rank has left its loop, and the others have not.
            for call in (keeper.wait, lambda: keeper.resume(run)):
                with pytest.raises(ValueError, match="the ranks differ in the method"):
                    call() if rank == last else keeper.save(1, run, metrics={"loss": 1.0})
        with pytest.raises((ValueError, CheckpointError), match="cannot name an object"):
            keeper.save(1, {"rng" if rank == last else "x": 1}, metrics={"loss": 1.0})
        # No rank waits in the state dict of an object for one that has raised.
        with pytest.raises((ValueError, CheckpointError), match="step=-1"):
            keeper.save(-1 if rank == last else 1, run, metrics={"loss": 1.0}, sync=Synchronised())
        # What tells the best is rank 0's to give.
        keeper.save(1, run, metrics=None if rank else {"loss": 1.0})
        assert keeper.resume(run) == 1


@on(1, 2, 4)
def test_what_all_ranks_have_is_one_ranks(folder: Path) -> None:
    """Statistics that each took of its own data: mean and variance go together."""
    rank = dist.get_rank()
    norm = DistributedDataParallel(nn.BatchNorm1d(3))
    torch.manual_seed(rank)
    norm(torch.randn(8, 3) + rank)
    own = {key: value.clone() for key, value in norm.module.state_dict().items()}
    mixed: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(mixed, own)
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, model=norm)
        again = DistributedDataParallel(nn.BatchNorm1d(3))
        assert keeper.resume(model=again) == 1
    assert same(dict(again.module.state_dict()), mixed[0])
    assert rank == 0 or not same(own, mixed[0])


class Coded(torch.optim.Optimizer):
    """Keeps codes of this rank's shard in plain tensors, as 8-bit optimizers do."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                shape = param.to_local().shape if isinstance(param, DTensor) else param.shape
                codes = torch.full(shape, 10 + dist.get_rank(), dtype=torch.uint8)
                self.state[param] = {"codes": codes, "step": 3}


def experts(seed: int) -> dict[str, Any]:
    """A sharded layer, and one of which each rank has its own; an optimizer with own codes."""
    ranks = dist.get_world_size()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 2 * ranks), nn.Linear(2 * ranks, 2))
    fully_shard(model[0], mesh=cpu_mesh())
    optimizer = Coded(model.parameters(), lr=torch.tensor(float(seed)))
    return {"model": model, "optimizer": optimizer}


@on(1, 2, 4)
def test_values_that_differ_need_not_be_on_rank_0(folder: Path) -> None:
    """The later stage of a pipeline: its ranks have names of their own, and values of their own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def stage(seed: int, first: bool) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"first" if first else "last": nn.Linear(3, 2)})
        return {"model": model, "optimizer": Coded(model.parameters(), lr=seed + 1.0)}

    run = stage(rank, rank == 0)
    run["optimizer"].step()
    with torchlift.Keeper(folder, background=False) as keeper:
        keeper.save(1, run)
        again = stage(100, rank == 0)
        assert keeper.resume(again) == 1
        for one, two in zip(run["model"].parameters(), again["model"].parameters(), strict=True):
            assert torch.equal(one, two)
            assert again["optimizer"].state[two]["codes"].unique().tolist() == [10 + rank]
        assert again["optimizer"].param_groups[0]["lr"] == rank + 1.0
        if ranks < 3:  # the only rank with these values: they do not differ
            return
        turned = stage(100, rank == ranks - 1)  # rank 0 has another part now
        before = [each.clone() for each in turned["model"].parameters()]
        with pytest.raises(CheckpointError, match=r"last.*, and this rank saved none") as caught:
            keeper.resume(turned)
        assert all(map(torch.equal, turned["model"].parameters(), before))
        assert "Resume without model and optimizer, and then torchlift.load(" in str(caught.value)


@on(1, 2, 4)
def test_other_ranks_do_not_take_values_of_one_rank(saved: Path) -> None:
    """An error that names them, before anything changes, and its way out."""
    for ranks in worlds():
        if ranks in (1, dist.get_world_size()):
            continue
        model = nn.Sequential(nn.Linear(4, 2 * ranks), nn.Linear(2 * ranks, 2))
        run = {"model": model, "optimizer": Coded(model.parameters())}
        before = model[0].weight.detach().clone()
        with torchlift.Keeper(saved / f"experts-{ranks}") as keeper:
            with pytest.raises(CheckpointError, match=f"its own values.*{ranks} ranks") as caught:
                keeper.resume(run)
            assert torch.equal(model[0].weight, before)
            hint = caught.value.hint or ""
            assert hint.startswith("Resume without model and optimizer, and then torchlift.load(")
            eval(hint.partition("then ")[2].removesuffix("."), {"torchlift": torchlift, **run})
        assert not torch.equal(model[0].weight, before)


class Giving:
    """An object that cannot take its state back."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}


class Both(torch.optim.Optimizer):
    """An optimizer that only holds others."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner


class Mode(Enum):
    FAST = 1


def noted(note: object) -> nn.Module:
    model = Noted(2, 1)
    model.note = note
    return model


#: What a resume could not load -> how it is made, and what the error of the save says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an object": (lambda: {"inside": object()}, r"'thing\.inside'"),
    "a lock": (lambda: {"lock": threading.Lock()}, r"'thing\.lock': .*cannot be stored"),
    "an iterator": (lambda: iter([]), "'thing'"),
    "a class": (lambda: nn.Linear, "'thing'"),
    "a namespace": (lambda: SimpleNamespace(model=nn.Linear(1, 1)), "'thing'"),
    "a list of models": (lambda: [nn.Linear(1, 1)], r"'thing'.*inside.*each for n, each in enum"),
    "a dict of models": (lambda: {"ema": {"a": nn.Linear(1, 1)}}, r"'thing'.*inside.*\*\*models\."),
    "optimizers": (lambda: [torch.optim.SGD([torch.ones(1)], lr=0.1)], "'thing'.*objects inside"),
    "a deque": (lambda: deque([nn.Linear(1, 1)]), "'thing': .*cannot load objects inside"),
    "values": (lambda: {"a": nn.Linear(1, 1)}.values(), "'thing': .*cannot load objects inside"),
    "a state alone": (Giving, "'thing': .*the object has state_dict, but not load_"),
    "a wide view": (lambda: {"m": torch.zeros(1).expand(1 << 34)}, r"'thing\.m': .*broadcast view"),
    "an enum": (lambda: noted({"mode": Mode.FAST}), r"thing\._extra_state.*Mode"),
    "two equal names": (lambda: noted({"a.b": 1, "a": {"b": 2}}), r"thing\._extra_state"),
    "a lazy layer": (lambda: nn.LazyLinear(2), r"'thing\.weight': .*cannot be stored"),
    "a model on meta": (lambda: nn.Linear(2, 1, device="meta"), r"'thing\.weight': .*not have val"),
    "a tensor on meta": (lambda: [torch.ones(2, device="meta")], r"'thing\.0': .*not have values"),
    "an optimizer of others": (
        lambda: Both(torch.optim.SGD([torch.ones(1)], lr=0.1)), "'thing': .*that holds SGD",
    ),
}  # fmt: skip


@on(1, 2, kind=REFUSED)
def test_what_a_resume_could_not_load_is_refused_by_the_save(kind: str, folder: Path) -> None:
    """At once, on all ranks and by its name, if one rank has it; also if others were saved before.

    Nothing of it is written, and a good state is saved afterwards.
    """
    make, says = REFUSED[kind]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    good = nn.Linear(2, 1) if isinstance(thing := make(), nn.Module) else {"inside": 1}
    if isinstance(thing, Noted):
        good = noted(1)
    with torchlift.Keeper(folder) as keeper:
        for step in (1, 2):
            keeper.save(step, model=nn.Linear(2, 1), thing=good)
        with pytest.raises(CheckpointError, match=says) as caught:
            keeper.save(3, model=nn.Linear(2, 1), thing=thing if is_last else good)
        ranks = dist.get_world_size()
        assert ranks == 1 or kind != "a tensor on meta" or "on rank 1: " in str(caught.value)
        keeper.wait()
        assert keeper.steps() == [1, 2]
        keeper.save(3, model=nn.Linear(2, 1), thing=good)
    assert keeper.steps() == [1, 2, 3]


@on(1, 2, 4)
def test_an_argument_of_one_rank_ends_it_on_all(folder: Path) -> None:
    """What is wrong on one rank, or other than elsewhere: nobody waits for it."""
    rank, last, folder = dist.get_rank(), dist.get_world_size() - 1, folder / "never"
    with pytest.raises((ValueError, CheckpointError), match="keep=0: expected a number"):
        torchlift.Keeper(folder, keep=0 if rank == last else 3)
    if last:
        with pytest.raises(ValueError, match="the ranks differ in background="):
            torchlift.Keeper(folder, background=rank == 0)
    assert not folder.exists()


@on(1, 2, 4)
def test_close_leaves_no_thread_and_no_descriptor(folder: Path) -> None:
    """A program may make a keeper for each of many runs."""
    counts = []
    for number in range(3):
        with torchlift.Keeper(folder) as keeper:
            keeper.resume()
            keeper.save(number, model=run_of()["model"])
        path = keeper.latest()
        assert path is not None
        assert keeper.steps()[-1] == number
        with pytest.raises(ValueError, match="the keeper is closed"):
            keeper.resume(model=nn.Linear(2, 1))
        if number == 2:
            with pytest.raises(CheckpointError, match="folder of the checkpoints cannot be used"):
                torchlift.Keeper(__file__)
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    assert counts[1] == counts[2], counts


@on(1, 2, 4)
def test_ranks_wait_as_long_as_the_job_does(folder: Path) -> None:
    """And no half an hour, which is what torch gives a new group."""
    for timeout, expected in ((None, HANGS), (7, timedelta(seconds=7))):
        with torchlift.Keeper(folder, timeout=timeout) as keeper:
            for each in (keeper._ranks, keeper._writers):
                assert timeout_of(each.groups[0]) == expected


@on(1, 2, 4)
def test_a_signal_to_one_rank_stops_all(folder: Path) -> None:
    """At the same step; SIGTERM, which a scheduler sends to each process when it likes."""
    rank, last, step = dist.get_rank(), dist.get_world_size() - 1, 0
    before = signal.getsignal(signal.SIGTERM)
    with torchlift.Keeper(folder) as keeper:
        while not keeper.should_stop():
            step += 1
            if step == 3 and rank == last:
                os.kill(os.getpid(), signal.SIGTERM)
        assert step == 3
        keeper.save(step, w=torch.ones(2))
    assert signal.getsignal(signal.SIGTERM) is before


@on(1, 2, 4)
def test_whatever_fails_on_one_rank_ends_it_on_all(folder: Path) -> None:
    """At calls that may run out of memory, of a save and of a resume; the next ones are whole."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if not last:
        return
    calls = {
        "save": ("read_states", "require_savable",
                 "Generators", "take_apart"),
        "resume": ("open_checkpoint", "find_checksums", "slices_of", "read_states",
                   "prepare", "Generators"),
    }  # fmt: skip
    modules = (keeper_module, run_state, saved_run)

    def failing(function: Any, nth: int) -> Any:
        count = itertools.count(1)

        def call(*args: Any, **options: Any) -> Any:
            if next(count) == nth:
                raise MemoryError("no room")
            return function(*args, **options)

        return call

    with torchlift.Keeper(folder, timeout=20) as keeper:
        run = run_of()
        run |= loaders_of(lambda rank: rank)
        keeper.save(1, run)
        keeper.wait()
        for way, names in calls.items():
            for name, nth in itertools.product(names, (1, 2)):
                with pytest.MonkeyPatch.context() as patch:
                    if rank == last:
                        for module in (each for each in modules if hasattr(each, name)):
                            patch.setattr(module, name, failing(getattr(module, name), nth))
                    try:
                        if way == "save":
                            keeper.save(2, run)
                            keeper.wait()
                        else:
                            keeper.resume(run)
                        failed = False
                    except (CheckpointError, MemoryError) as error:
                        failed = "no room" in str(error)
                every: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(every, (failed, keeper.steps()))
                assert len({str(each) for each in every}) == 1, (way, name, nth, every)
                assert failed or nth == 2, (way, name)
        keeper.save(3, run)
        assert keeper.resume(run) == 3


def loaders_of(at: Callable[[int], int]) -> dict[str, Stateful]:
    """The place that each rank has in its data, and one that all have."""
    rest = {"seen": {3: "three"}, "none": {}}
    places = {"loader": at(dist.get_rank()), "common": at(0)}
    return {name: Stateful({"at": place, **rest}) for name, place in places.items()}


@on(1, 2, 4)
def test_each_rank_verifies_its_part(folder: Path) -> None:
    """Not the first one all of it, while others wait; of damage all raise, and nothing changes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, other = (nn.Sequential(*[nn.Linear(750, 750) for _ in range(4)]) for _ in range(2))

    with torchlift.Keeper(folder) as keeper:
        for step in (1, 2):
            keeper.save(step, model=model)
        keeper.wait()
        path = Path(keeper.latest() or "")
        with limits(verified=1 << 20):  # less than a layer's
            dist.barrier()
            before = bytes_read()
            assert keeper.resume(model=other) == 2
            part = (bytes_read() - before) / (4 * 1500 * 1500)
        assert part < (0.9 if ranks > 1 else 1.4), part
        assert torch.equal(other[3].weight, model[3].weight)
        dist.barrier()
        if rank == 0:
            with torchlift.open(path) as ckpt:
                chunk = ckpt.entries["model.3.weight"].chunks[-1]
            damaged = path if path.is_file() else path / chunk.file
            with open(damaged, "r+b") as file:
                file.seek(chunk.offset + chunk.nbytes - 8)
                file.write(b"12345678")
        dist.barrier()
        with torch.no_grad():
            other[3].weight.zero_()
        with pytest.raises(IntegrityError, match=r"damaged.*another of the steps \[1\]"):
            keeper.resume(model=other)
        assert not other[3].weight.any()
        if ranks > 1:
            with pytest.raises(ValueError, match="the ranks differ in verify="):
                keeper.resume(model=other, verify=rank > 0, step=1)
        assert keeper.resume(model=other, verify=False, step=1) == 1


@on(1, 2, 4)
def test_what_ranks_have_of_their_own_is_theirs_again(folder: Path) -> None:
    """Each has its place in its data; what is equal on all is stored once."""
    rank = dist.get_rank()
    with torchlift.Keeper(folder) as keeper:
        own = {"only": Stateful(7)} if rank == dist.get_world_size() - 1 else {}
        saved = loaders_of(lambda rank: 100 + rank)
        keeper.save(1, model=nn.Linear(2, 1), **saved, **own)
        found = loaders_of(lambda rank: 0)
        assert keeper.resume(model=nn.Linear(2, 1), **found) == 1
        for name, each in found.items():
            assert each.state == saved[name].state
        for each in own.values():
            each.state = 0
        assert keeper.resume(**own) == 1
        assert all(each.state == 7 for each in own.values())
        if dist.get_world_size() > 1:
            with pytest.raises(FormatError, match=r"'only': on rank 0.*does not have a state"):
                keeper.resume(only=Stateful(0))
        path = keeper.latest()
    with torchlift.open(path) as ckpt:
        # The plain data of the first rank, by its own names, as in a file of one process.
        assert (ckpt.objects["common.at"], ckpt.objects["loader.at"]) == (100, 100)
        assert ckpt.objects["step"] == ckpt.tree()["step"] == 1
        assert ckpt.tree("loader")["seen"] == {3: "three"}
        assert {*ckpt} == {"model.weight", "model.bias"}


@on(1, 2, 4)
def test_a_second_job_is_refused_on_all_ranks(folder: Path) -> None:
    """Rank 0 alone looks at the lock, and all raise one error; then it is free again."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    with torchlift.Keeper(folder) as keeper:
        assert keeper.save(1, model=nn.Linear(2, 1))
        with pytest.raises(CheckpointError, match=f"found process {pids[0]} on host"):
            torchlift.Keeper(folder)
    with torchlift.Keeper(folder) as keeper:
        assert keeper.resume(model=nn.Linear(2, 1)) == 1
    dist.barrier()
    assert folder_lock.NAME not in os.listdir(folder)


@on(1, 2, 4)
def test_other_ranks_are_told_of_what_each_had(saved: Path) -> None:
    """An error that names the objects, before anything changes, or a function makes one of them."""
    for ranks in worlds():
        folder = saved / f"loaders-{ranks}"
        model, found = nn.Linear(2, 1), loaders_of(lambda rank: 0)
        before = model.weight.detach().clone()
        first = {"common": lambda states: states[0]}
        together = {"loader": lambda states: {**states[0], "at": min(s["at"] for s in states)}}
        with torchlift.Keeper(folder) as keeper:
            if ranks != dist.get_world_size():
                says = "each rank saved its own" if ranks > 1 else ".*may depend on the number"
                with pytest.raises(CheckpointError, match=f"'loader': {says}"):
                    keeper.resume(model=model, **found)
                assert torch.equal(model.weight, before)
                assert found["common"].state["at"] == 0
                # Equal on all ranks, but a position means another row on another number of them.
                with pytest.raises(CheckpointError, match=r"'common': .*may depend on the number"):
                    keeper.resume(model=model, common=found["common"])
                assert keeper.resume(model=model, common=found["common"], on_other_ranks=first) == 1
                assert found["common"].state["at"] == 100
            assert keeper.resume(model=model, **found, on_other_ranks=first | together) == 1
        is_same = ranks == dist.get_world_size()
        assert found["loader"].state["at"] == 100 + (dist.get_rank() if is_same else 0)


@on(2, optimizers=(1, 2))
def test_a_save_exchanges_seven_messages_and_a_resume_six(optimizers: int, folder: Path) -> None:
    """Ranks wait for each other at each of them. A save sends no keys: it has few bytes.

    The item of a rank has another name on each. A module may have such a name, too.
    """
    send, sizes = dist.all_gather_object, list[int]()

    def made(rank: int) -> dict[str, Any]:
        model = nn.ModuleDict({"ranks": nn.ModuleList(nn.Linear(2, 2) for _ in range(50))})
        halves = [[*model.parameters()][at::optimizers] for at in range(optimizers)]
        adams = {f"adam_{at}": torch.optim.Adam(half) for at, half in enumerate(halves)}
        return {"model": model, **adams, "loader": Stateful(rank)}

    def call(every: Any, message: Any, **options: Any) -> None:
        sizes.append(len(pickle.dumps(message)))
        send(every, message, **options)

    run, again = made(dist.get_rank()), made(9)
    with torchlift.Keeper(folder) as keeper, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", call)
        keeper.save(1, run)
        keeper._await_save()
        assert len(sizes) == 7, sizes
        assert keeper.resume(again) == 1
        assert len(sizes) == 7 + 6, sizes
    assert max(sizes[:7]) < 2000, sizes
    assert again["loader"].state == dist.get_rank()
    assert same(again["model"].state_dict(), run["model"].state_dict())


@on(1, 2, 4)
def test_a_part_is_loaded_by_the_lines_of_the_error(folder: Path) -> None:
    """A layer of another size, one more and one less keep their weights and moments."""

    def made(*layers: nn.Module) -> dict[str, Any]:
        model = nn.Sequential(*layers)
        fully_shard(model[0], mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * len(layers))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
        run = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        train(run, len(layers))
        return run

    run = made(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3))
    other = made(nn.Linear(5, 7), nn.Linear(7, 4), nn.Dropout(), nn.Linear(4, 2))
    before, saved = values_of(other), values_of(run)
    with torchlift.Keeper(folder, background=False) as keeper:
        keeper.save(1, run)
        with pytest.raises(CheckpointError, match="To load a part: ") as caught:
            keeper.resume(other)
        assert same(values_of(other), before)
        assert other["optimizer"].param_groups[0]["lr"] == 0.4
        lines = (caught.value.hint or "").removeprefix("To load a part: ").removesuffix(".")
        eval(f"[{lines}]", {"torchlift": torchlift, **other})
        assert keeper.resume(scheduler=other["scheduler"]) == 1
    rates = [each["optimizer"].param_groups[0]["lr"] for each in (run, other)]
    assert rates[0] == rates[1] != 0.4
    assert other["scheduler"].state_dict() == run["scheduler"].state_dict()
    expected = {name: (saved if name[0] == "0" else before)[name] for name in before}
    assert same(values_of(other), expected)


@saves(1, 2, 4)
def keep_runs(saved: Path) -> None:
    """A run in each wrapping, experts and loaders: the number of ranks is in their names."""
    ranks = dist.get_world_size()
    for wrapping in WRAPPINGS:
        folder, run = saved / f"{wrapping}-{ranks}", run_of(wrapping)
        torch.manual_seed(dist.get_rank())
        train(run)
        with torchlift.Keeper(folder) as keeper:
            keeper.save(STEPS, run)
        if (values := values_of(run)) and dist.get_rank() == 0:
            torch.save(values, folder / "expected")
    run = experts(dist.get_rank())
    run["optimizer"].step()
    with torchlift.Keeper(saved / f"experts-{ranks}") as keeper:
        keeper.save(1, run)
    torch.manual_seed(0)
    with torchlift.Keeper(saved / f"loaders-{ranks}") as keeper:
        keeper.save(1, model=nn.Linear(2, 1), **loaders_of(lambda rank: 100 + rank))


@on(1, 2, 4)
def test_any_number_of_ranks_goes_on_with_what_another_kept(saved: Path) -> None:
    """Sharded or not; a rank that did not exist then keeps its random numbers."""
    for ranks in worlds():
        for wrapping in WRAPPINGS:
            folder = saved / f"{wrapping}-{ranks}"
            expected = torch.load(folder / "expected")
            for now in WRAPPINGS:
                run = run_of(now)
                with torchlift.Keeper(folder) as keeper:
                    assert keeper.resume(run) == STEPS
                    path = keeper.latest()
                assert same(values_of(run), expected), (ranks, wrapping, now)
                assert run["scheduler"].last_epoch == STEPS
                again = run_of(now)
                bare = getattr(again["model"], "module", again["model"])  # out of DDP
                torchlift.load(bare, path, root="model")
                torchlift.load_optimizer(bare, again["optimizer"], path, root="optimizer")
                assert same(values_of(again), expected), (ranks, wrapping, now)

"""Checks of a `torchlift.Keeper` that run on every rank of a process group.

The name of the results folder says which: ``save-N`` trains and keeps on N ranks, ``load-N``
resumes what any number of ranks kept.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, main_saves_then_loads
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchlift
from torchlift.distributed import CheckpointWriter
from torchlift.distributed import keeper as keeper_module
from torchlift.errors import CheckpointError

warnings.simplefilter("ignore")

OUT = Path(sys.argv[1])
SHARED = OUT.parent
STEPS = 3


def run_of(wrapping: str) -> dict[str, Any]:
    """A model with sizes that no number of ranks divides, its optimizer and its scheduler."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3))
    if wrapping == "fsdp2":
        fully_shard(model[0], mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
    elif wrapping == "ddp":
        model = DistributedDataParallel(model)
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


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def folder_of(wrapping: str, ranks: int) -> Path:
    return SHARED / f"kept-{wrapping}-{ranks}"


def training_goes_on_bit_by_bit() -> None:
    """Model, moments, learning rate and each rank's own random numbers."""
    for wrapping in ("fsdp2", "ddp"):
        run, folder = run_of(wrapping), folder_of(wrapping, dist.get_world_size())
        torch.manual_seed(dist.get_rank())
        with torchlift.Keeper(folder) as keeper:
            assert keeper.resume(run) is None
            train(run)
            assert keeper.save(STEPS, run)
            expected = values_of(run)
            train(run)  # while it is being written
            after = values_of(run)
            keeper.wait()
            again = run_of(wrapping)
            train(again)  # DDP sums in another order from its second step on
            assert keeper.resume(again) == STEPS
            assert same(values_of(again), expected)
            train(again)
            assert same(values_of(again), after)
            assert again["scheduler"].state_dict() == run["scheduler"].state_dict()
        bare = getattr(again["model"], "module", again["model"])  # out of DDP
        torchlift.load(bare, folder / "step-000000003", root="model")
        torchlift.load_optimizer(
            bare, again["optimizer"], folder / "step-000000003", root="optimizer"
        )
        assert same(values_of(again), expected)
        if dist.get_rank() == 0:
            torch.save(expected, folder / "expected")
        dist.barrier()


def what_is_kept_is_complete_and_no_more_than_asked_for() -> None:
    """The last two, every third, the best; a step that is saved again replaces the older one."""
    run, folder = run_of("fsdp2"), SHARED / f"policies-{dist.get_world_size()}"
    with torchlift.Keeper(folder, keep=2, every=3, best="loss", background=False) as keeper:
        for step, loss in enumerate([9.0, 1.0, 5.0, 4.0, 3.0, 2.0, 8.0], 1):
            keeper.save(step, run, metrics={"loss": loss})
            dist.barrier()
            assert keeper.latest() == str(folder / f"step-{step:09d}")
        assert keeper.steps() == [2, 3, 6, 7]
        assert keeper.best() == str(folder / "step-000000002")
        train(run, 1)
        keeper.save(7, run, metrics={"loss": 0.5})
        dist.barrier()
        assert keeper.steps() == [3, 6, 7]
        assert keeper.latest() == keeper.best() == str(folder / "step-000000007-1")
        assert sorted(os.listdir(folder)) == [
            "step-000000003", "step-000000006", "step-000000007-1",
        ]  # fmt: skip
        again = run_of("fsdp2")
        assert keeper.resume(again) == 7
        assert same(values_of(again), values_of(run))


def a_rank_that_cannot_write_ends_the_save_on_all() -> None:
    """All raise at the next call, the one before is still the last, and what was begun goes."""
    run, folder = run_of("fsdp2"), SHARED / f"full-{dist.get_world_size()}"
    keeper = torchlift.Keeper(folder, background=False)
    keeper.save(1, run)
    dist.barrier()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (7000, before[1]))
    try:
        with pytest.raises(CheckpointError):
            keeper.save(2, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    dist.barrier()
    assert os.listdir(folder) == ["step-000000001"]
    # Machines with disks of their own under one path: the folder is not there, or is another.
    away = SHARED / f"away-{dist.get_world_size()}-{dist.get_rank()}"
    away.mkdir()

    class Away(CheckpointWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            part = plan.storage_data._replace(folder=str(away))
            return super().write_data(replace(plan, storage_data=part), planner)

    for where, name, value in (
        (os.path, "isdir", lambda path: False),
        (keeper_module, "CheckpointWriter", Away),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == dist.get_world_size() - 1:
                patch.setattr(where, name, value)
            with pytest.raises(CheckpointError, match="the ranks do not save to the same folder"):
                keeper.save(2, run)
        dist.barrier()
        assert os.listdir(folder) == ["step-000000001"]
        assert not os.listdir(away)
    dist.barrier()  # the other ranks have looked
    if dist.get_rank() == 0:  # what a save that was killed leaves
        (folder / "step-000000003").mkdir()
        for name in ("rng-9.pt", ".rest.pt.torchlift-abcd1234.part"):
            (folder / "step-000000003" / name).touch()
    dist.barrier()
    keeper.save(3, run)
    dist.barrier()
    names = {f"{kind}{rank}{end}" for rank in range(dist.get_world_size())
             for kind, end in (("rng-", ".pt"), ("__", "_0.distcp"))}  # fmt: skip
    assert set(os.listdir(folder / "step-000000003")) == {".metadata", "rest.pt", *names}
    assert keeper.steps() == [1, 3]
    assert sorted(os.listdir(folder)) == ["step-000000001", "step-000000003"]
    keeper.close()


def ranks_that_disagree_all_raise() -> None:
    """Another step, an argument that is wrong on one, an object that refuses on one."""
    run, folder = run_of("fsdp2"), SHARED / f"disagree-{dist.get_world_size()}"
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    class Odd:
        def state_dict(self) -> dict[str, int]:
            return {"rank": rank}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if rank == last:
                raise OSError("no such luck")

    with torchlift.Keeper(folder, best="loss") as keeper:
        if last:
            with pytest.raises(ValueError, match="the ranks save different steps"):
                keeper.save(rank, run, metrics={"loss": 1.0})
        with pytest.raises((ValueError, CheckpointError), match="cannot name an object"):
            keeper.save(1, {"rng" if rank == last else "x": 1}, metrics={"loss": 1.0})
        # What tells the best is rank 0's to give.
        keeper.save(1, run, odd=Odd(), metrics=None if rank else {"loss": 1.0})
        with pytest.raises((OSError, CheckpointError), match="no such luck"):
            keeper.resume(run, odd=Odd())
        assert keeper.resume(run) == 1


def what_all_ranks_have_is_one_ranks() -> None:
    """Statistics that each took of its own data: mean and variance go together."""
    rank, folder = dist.get_rank(), SHARED / f"statistics-{dist.get_world_size()}"
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


def what_cannot_be_resumed_is_not_saved() -> None:
    """Extra state that only running code could read back: save says so, at once and on all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    folder = SHARED / f"odd-{dist.get_world_size()}"

    class Mode(Enum):
        FAST = 1

    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return {"mode": Mode.FAST if rank == last else "fast"}

        def set_extra_state(self, state: object) -> None:
            pass

    with torchlift.Keeper(folder) as keeper:
        with pytest.raises(CheckpointError, match=r"_extra_state.*Mode"):
            keeper.save(1, model=Odd(2, 1))
        assert keeper.latest() is None
        assert keeper.save(1, model=nn.Linear(2, 1))


def another_model_is_an_error_that_lists_all_of_it() -> None:
    """Names on both sides and shapes; a rank may have names of its own. Nothing has changed."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    run, folder = run_of("fsdp2"), SHARED / f"another-{dist.get_world_size()}"
    torch.manual_seed(0)
    other = fully_shard(
        nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Identity(), nn.Linear(7, 3))
    )
    optimizer = torch.optim.AdamW(other.parameters())
    before = [param.to_local().clone() for param in other.parameters()]
    stage = nn.ModuleDict({f"on{rank}": nn.Linear(2, 1)})
    with torchlift.Keeper(folder) as keeper:
        keeper.save(1, model=run["model"], optimizer=run["optimizer"], stage=stage)
        with pytest.raises(CheckpointError) as caught:
            keeper.resume(model=other, optimizer=optimizer)
        assert str(caught.value) == (
            f"{folder / 'step-000000001'}: the state dict does not fit the model: Missing key(s) "
            "'3.weight', '3.bias'; Unexpected key(s) '2.weight', '2.bias'; size mismatch for "
            "'0.weight: model [6, 5], state dict [7, 5]', '0.bias: model [6], state dict [7]'. To "
            "load what fits, call torchlift.load with root='model', which takes rename=, "
            "strict=False and ignore_mismatched=True, and torchlift.load_optimizer."
        )
        assert all(map(torch.equal, before, (param.to_local() for param in other.parameters())))
        momentum = torch.optim.SGD(run["model"].parameters(), momentum=0.9)
        with pytest.raises(CheckpointError, match=r"could not be loaded; found Missing.*buffer"):
            keeper.resume(model=run["model"], optimizer=momentum)
        assert keeper.resume(stage=stage) == 1
        if rank == last:
            stage = nn.ModuleDict({"nobody": nn.Linear(2, 1)})
        with pytest.raises(CheckpointError, match=f"'nobody.bias'; Unexpected.*'on{last}.weight'"):
            keeper.resume(stage=stage)


def one_process_goes_on_where_one_without_a_group_was() -> None:
    """And leaves what that one goes on with."""
    if dist.get_world_size() > 1:
        return
    model = nn.Linear(5, 3)
    run = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with torchlift.Keeper(SHARED / "plain") as keeper:
        assert keeper.resume(run) == 1
    state = run["optimizer"].state[model.weight]
    assert state["exp_avg"].any()
    with torch.no_grad():
        model.weight += 1
    with torchlift.Keeper(SHARED / "grouped", background=False) as keeper:
        assert keeper.save(2, run)


def any_number_of_ranks_goes_on_with_what_another_kept() -> None:
    """Sharded or not; a rank that did not exist then keeps its random numbers."""
    for ranks in (2, 4):
        for wrapping in ("fsdp2", "ddp"):
            folder = folder_of(wrapping, ranks)
            expected = torch.load(folder / "expected")
            for now in ("fsdp2", "ddp"):
                run = run_of(now)
                with torchlift.Keeper(folder) as keeper:
                    assert keeper.resume(run) == STEPS
                assert same(values_of(run), expected), (ranks, wrapping, now)
                assert run["scheduler"].last_epoch == STEPS


if __name__ == "__main__":
    main_saves_then_loads(
        saves={
            check.__name__: check
            for check in (
                training_goes_on_bit_by_bit,
                what_is_kept_is_complete_and_no_more_than_asked_for,
                a_rank_that_cannot_write_ends_the_save_on_all,
                ranks_that_disagree_all_raise,
                what_all_ranks_have_is_one_ranks,
                what_cannot_be_resumed_is_not_saved,
                another_model_is_an_error_that_lists_all_of_it,
                one_process_goes_on_where_one_without_a_group_was,
            )
        },
        loads={
            check.__name__: check for check in (any_number_of_ranks_goes_on_with_what_another_kept,)
        },
    )

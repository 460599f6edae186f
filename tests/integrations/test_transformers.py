"""transformers' Trainer with torchlift's callback: runs that go on to the bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on, require_same_end
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import torchlift
from torchlift.integrations.transformers import KeeperCallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Noisy(nn.Module):
    """A step needs the generators and the order of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (self.net(x)[:, 0] - labels - torch.rand(1)).square().mean()
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


def rows(count: int = 24) -> list[dict[str, Any]]:
    values = torch.linspace(-1, 1, count * 3).view(count, 3)
    return [{"x": value, "labels": value.sum()} for value in values]


def trainer_of(folder: Path, callback: Any, model: nn.Module, **options: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=4, learning_rate=0.05, logging_steps=2, **{
            "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4, **options
        },
    )  # fmt: skip
    early = [EarlyStoppingCallback(9)] if "metric_for_best_model" in options else []
    return Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(8), callbacks=[*early, callback]
    )


EVALUATED = {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "eval_loss"}


def early_stopping_of(trainer: Any) -> list[int]:
    return [
        each.early_stopping_patience_counter
        for each in trainer.callback_handler.callbacks
        if isinstance(each, EarlyStoppingCallback)
    ]


EACH_TWO = {**EVALUATED, "eval_steps": 2}
PLATEAU = {
    "save_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 4),
        ({"save_steps": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 3}, 6),
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, 6),
        (EVALUATED, 8),
        ({**EACH_TWO, **PLATEAU}, 6),
        ({**EACH_TWO, "save_strategy": "best", "greater_is_better": True}, 2),
    ],
)
def test_a_trainer_goes_on_bit_by_bit(options: Any, step: int, tmp_path: Path) -> None:
    """In the middle and at the end of an epoch, with an evaluation and without."""
    torch.manual_seed(0)
    first, model = KeeperCallback(tmp_path / "kept", keep=None), Noisy()
    trainer = trainer_of(tmp_path / "out", first, model, **options)
    assert first.resume(trainer) is None
    trainer.train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    kept = torchlift.distributed.RunFolder(tmp_path / "kept")
    later = [path for path in (tmp_path / "kept").iterdir() if path != kept.directory]
    for path in later:
        if int(path.name[5:14]) > step:
            path.unlink()
    assert kept.steps()[-1] == step
    torch.manual_seed(5)
    second, again = KeeperCallback(tmp_path / "kept", keep=None), Noisy()
    other = trainer_of(tmp_path / "out", second, again, **options)
    other.train(resume_from_checkpoint=second.resume(other))
    passed = step * options.get("gradient_accumulation_steps", 1)
    assert again.losses == model.losses[passed:]
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    for fact in ("global_step", "best_metric", "best_global_step", "total_flos"):
        assert getattr(other.state, fact) == getattr(trainer.state, fact), fact
    assert early_stopping_of(other) == early_stopping_of(trainer)
    assert other.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()
    logged = [
        [log["loss"] for log in each.state.log_history if "loss" in log and log["step"] > step]
        for each in (trainer, other)
    ]
    assert logged[0] == logged[1]


def test_a_metric_belongs_to_the_step_that_measured_it(tmp_path: Path) -> None:
    """A checkpoint of another step is saved, also before the first evaluation, and never best."""
    callback = KeeperCallback(tmp_path / "kept", keep=1, best="eval_loss")
    trainer = trainer_of(
        tmp_path / "out", callback, Noisy(), eval_strategy="steps", eval_steps=3, save_steps=2
    )
    callback.resume(trainer)
    saved, seen = trainer._save_checkpoint, list[list[int]]()
    kept = torchlift.distributed.RunFolder(tmp_path / "kept", best="eval_loss")

    def save_and_look(*arguments: Any) -> None:
        saved(*arguments)
        callback.keeper.wait()
        seen.append(kept.steps())

    trainer._save_checkpoint = save_and_look
    trainer.train()
    losses = {
        log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
    }
    assert seen[:3] == [[2], [4], [6]]
    assert {*losses} == {3, 6, 9, 12}
    measured = {one.step: one.metrics["eval_loss"] for one in kept.kept() if one.metrics}
    best = min((6, 12), key=lambda step: losses[step])
    assert measured == {step: losses[step] for step in {best, 12}}
    assert kept.best() == str(tmp_path / "kept" / f"step-{best:09d}.pt")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"load_best_model_at_end": True, **EVALUATED}, "load_best_model_at_end=True"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True"),
        ({}, "best='eval_loss'"),
    ],
)
def test_arguments_that_need_the_files_of_the_trainer_are_refused(tmp_path, options, name):
    """By their names, before the first step."""
    callback, model = KeeperCallback(tmp_path / "kept", best="eval_loss"), Noisy()
    trainer = trainer_of(tmp_path / "out", callback, model, **options)
    callback.resume(trainer)
    with pytest.raises(ValueError, match=f"{name} does not work with the KeeperCallback: "):
        trainer.train()
    assert not model.losses
    assert isinstance(callback.keeper, torchlift.Keeper)
    callback.keeper.close()


def test_the_way_out_of_load_best_model_at_end_works(tmp_path: Path) -> None:
    """The last line of the error, with the folder."""
    folder = tmp_path / "kept"
    callback = KeeperCallback(folder, best="eval_loss", best_is="highest")
    trainer = trainer_of(tmp_path / "out", callback, Noisy(), **EVALUATED)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    best = torchlift.distributed.RunFolder(folder, best="eval_loss", best_is="highest").best()
    assert best is not None
    assert best != torchlift.distributed.RunFolder(folder).latest()
    torchlift.load(trainer.model, best, root="model")
    with torchlift.open(best, root="model") as ckpt:
        assert torchlift.diff(ckpt, trainer.model.state_dict()).equal


def test_a_run_that_goes_on_is_told_from_one_that_begins_anew(tmp_path: Path) -> None:
    """A result that was not passed on is an error; the Trainer reads other folders as ever."""
    callback = KeeperCallback(tmp_path / "kept")
    trainer = trainer_of(tmp_path / "out", callback, Noisy(), max_steps=4)
    callback.resume(trainer)
    trainer.train()
    again = KeeperCallback(tmp_path / "kept")
    other = trainer_of(tmp_path / "out", again, Noisy(), max_steps=8)
    assert again.resume(other) is not None
    with pytest.raises(RuntimeError, match="does not resume"):
        other.train()
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        other.train(resume_from_checkpoint=str(tmp_path))


def run(out: Path, draws: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    callback, model = KeeperCallback(out / "kept", keep=None), Noisy()
    trainer = trainer_of(out / "out", callback, model, save_steps=2, ddp_backend="gloo")
    path = callback.resume(trainer)
    torch.rand(1 + draws)  # the seed is the Trainer's, of the order of the data too
    trainer.train(resume_from_checkpoint=path)
    return model, trainer


@pytest.mark.slow
@on(2)
def test_two_ranks_go_on_bit_by_bit(folder: Path) -> None:
    """Under DDP, each with its own random numbers, and rows of its own."""
    rank = dist.get_rank()
    # Asked for, and not used: the ranks are there already.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE="2")
    first, trainer = run(folder, rank)
    assert trainer.args.world_size == 2
    dist.barrier()
    for path in (folder / "kept").glob("step-*") if rank == 0 else ():
        if int(path.name[5:14]) > 2:
            shutil.rmtree(path)  # from two ranks it is a DCP folder
    dist.barrier()
    again, _ = run(folder, 7)
    assert len(again.losses) == 4
    require_same_end(first, again, after=2)

"""transformers' Trainer with torchlift's callback: runs that go on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_workers
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


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 4),
        ({"save_steps": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 3}, 6),
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, 6),
        ({"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "eval_loss"}, 8),
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
    assert other.state.global_step == trainer.state.global_step
    assert other.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()
    logged = [
        [log["loss"] for log in each.state.log_history if "loss" in log and log["step"] > step]
        for each in (trainer, other)
    ]
    assert logged[0] == logged[1]


def test_the_best_by_a_metric_of_the_evaluation_is_kept(tmp_path: Path) -> None:
    """By the Keeper's rules, in place of the Trainer's limit."""
    callback = KeeperCallback(tmp_path / "kept", keep=1, best="eval_loss")
    trainer = trainer_of(
        tmp_path / "out", callback, Noisy(), eval_strategy="steps", eval_steps=2, save_steps=2
    )
    callback.resume(trainer)
    trainer.train()
    losses = {
        log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
    }
    best = min(losses, key=lambda step: (losses[step], -step))
    assert torchlift.Keeper(tmp_path / "kept").steps() == sorted({best, 12})


def test_a_callback_that_cannot_keep_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    """One that was not told its trainer; a strategy that knows only after the evaluation."""
    callback, model = KeeperCallback(tmp_path / "kept"), Noisy()
    with pytest.raises(RuntimeError, match=r"callback\.resume\(trainer\)"):
        trainer_of(tmp_path / "out", callback, model).train()
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(tmp_path / "out", callback, model, save_strategy="best", **options)
    callback.resume(trainer)
    with pytest.raises(ValueError, match="pass best="):
        trainer.train()
    assert not model.losses


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


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_go_on_bit_by_bit(tmp_path: Path) -> None:
    """Under DDP, each with its own random numbers."""
    found = run_workers(Path(__file__).with_name("workers_transformers.py"), 2, tmp_path)
    assert len(found) == 1
    assert not any(found.values()), found

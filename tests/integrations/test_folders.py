"""Folders that trainers write: the weights by the folder, the optimizer's state by its file."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments
from zoo import same

import torchlift
from torchlift.errors import FormatError, UnsafeError

pytestmark = pytest.mark.filterwarnings("ignore")


class Regression(nn.Module):
    """With a parameter of each of the two groups that a Trainer makes: with and without decay."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        found = self.net(x)[:, 0]
        return {"loss": (found - (found + 1 if labels is None else labels)).square().mean()}


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step), batch(step).sum(1))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(weights, states, theirs, optimizer_of, root=None):
    """Compare with what the framework itself resumed: state, losses and weights, to the bit."""
    model, optimizer = theirs
    ours = copy.deepcopy(model)
    for param in ours.parameters():
        nn.init.zeros_(param)
    other = optimizer_of(ours)
    torchlift.load(ours, weights, root=root, source="read")
    report = torchlift.load_optimizer(ours, other, states)
    assert len(report.loaded) == len(list(ours.parameters()))
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert train(ours, other) == train(model, optimizer)
    assert all(map(torch.equal, ours.parameters(), model.parameters()))


def trainer(folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=3, save_steps=3,
        logging_strategy="no", learning_rate=0.05, weight_decay=0.1, lr_scheduler_type="constant",
        **options,
    )  # fmt: skip
    rows = [{"x": x, "labels": x.sum()} for x in batch(7)]
    return Trainer(Regression(), arguments, train_dataset=rows)


def test_a_trainers_folder_gives_both(tmp_path: Path) -> None:
    """The weights and optimizer.pt, as the Trainer itself resumes from them."""
    torch.manual_seed(0)
    trainer(tmp_path / "a").train()
    folder = tmp_path / "a" / "checkpoint-3"
    assert {"model.safetensors", "optimizer.pt", "training_args.bin"} <= {
        path.name for path in folder.iterdir()
    }
    again = trainer(tmp_path / "b")
    again.train(resume_from_checkpoint=str(folder))  # which has nothing left to do
    theirs = again.model, again.optimizer.optimizer

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        made = trainer(tmp_path / "c")
        made.model = model
        return made.create_optimizer()

    check(folder, folder / "optimizer.pt", theirs, optimizer_of)


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_accelerate_gives_both(tmp_path: Path, safe: bool) -> None:
    """The weights, as safetensors or as pytorch_model.bin, and optimizer.bin."""
    torch.manual_seed(0)

    def program() -> Any:
        accelerator = Accelerator(cpu=True)
        model = Regression()
        return accelerator, accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.05))

    accelerator, (model, optimizer) = program()
    train(model, optimizer)
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    again, (model, optimizer) = program()
    again.load_state(str(tmp_path / "state"))
    check(
        tmp_path / "state",
        tmp_path / "state" / "optimizer.bin",
        (model, optimizer.optimizer),
        lambda model: torch.optim.AdamW(model.parameters()),
    )


def test_a_folder_of_accelerate_without_a_state_in_its_weights_says_so(tmp_path: Path) -> None:
    """The weights are read, and the message says how to pass the state."""
    accelerator = Accelerator(cpu=True)
    models = [Regression(), nn.Linear(2, 2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    accelerator.prepare(*models, *optimizers)
    train(models[0], optimizers[0])
    accelerator.save_state(str(tmp_path / "state"))
    before = copy.deepcopy(optimizers[0].state_dict())
    with pytest.raises(FormatError, match=r"an optimizer state.*the path of its own file"):
        torchlift.load_optimizer(models[0], optimizers[0], tmp_path / "state")
    assert same(optimizers[0].state_dict(), before)
    torchlift.load_optimizer(models[0], optimizers[0], tmp_path / "state" / "optimizer.bin")


def test_a_sharded_folder_of_accelerate_gives_both(tmp_path: Path) -> None:
    """As its functions for FSDP call and fill them: folders, with one container in each."""
    from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train(model, optimizer)
    named = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
    weights, states = (tmp_path / f"{name}_0" for name in (FSDP_MODEL_NAME, OPTIMIZER_NAME))
    dcp.save({"model": model.state_dict()}, checkpoint_id=weights, no_dist=True)
    dcp.save({"optimizer": named}, checkpoint_id=states, no_dist=True)
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    torch.save({"args": 1}, tmp_path / "training_args.bin")
    with pytest.raises(FormatError, match="several checkpoints; found scheduler"):
        torchlift.open(tmp_path)
    (tmp_path / "training_args.bin").unlink()
    with pytest.raises(FormatError, match=f"found scheduler.pt, {OPTIMIZER_NAME}_0, pytorch_model"):
        torchlift.open(tmp_path)
    (tmp_path / "scheduler.pt").unlink()
    with pytest.raises(FormatError, match=f"in folders; found {OPTIMIZER_NAME}_0, pytorch_model"):
        torchlift.open(tmp_path)
    theirs = copy.deepcopy(model), None
    other = torch.optim.AdamW(theirs[0].parameters())
    other.load_state_dict(optimizer.state_dict())
    check(
        weights,
        states,
        (theirs[0], other),
        lambda model: torch.optim.AdamW(model.parameters()),
        root="model",
    )


def state_of(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def refused(folder: Path, kind: type[Exception] = FormatError) -> str:
    """Return what an optimizer is told that is not changed by it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(kind) as caught:
        torchlift.load_optimizer(model, optimizer, folder)
    assert not optimizer.state
    return str(caught.value)


def test_folders_without_one_state_are_refused(tmp_path: Path) -> None:
    """Two files, an empty folder, and foreign classes."""
    state = state_of(nn.Linear(2, 2))
    (tmp_path / "empty").mkdir()
    assert "the directory is empty" in refused(tmp_path / "empty")
    assert "no such file" in refused(tmp_path / "nowhere")
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("optimizer.pt", "optimizer.bin"):
        torch.save(state, folder / name)
    told = refused(folder)
    assert "optimizer.bin, optimizer.pt" in told
    assert f"{folder / 'optimizer.bin'}" in told
    folder = tmp_path / "foreign"
    folder.mkdir()
    torch.save({**state, "scale": Fraction(1, 2)}, folder / "optimizer.pt")
    assert "fractions.Fraction" in refused(folder, UnsafeError)

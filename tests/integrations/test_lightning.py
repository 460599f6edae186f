"""Lightning's Trainer and Fabric with torchlift's plugin: runs that go on to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaged_files import flip
from ranks import on, require_same_end
from torch import nn

import torchlift
from torchlift.errors import IntegrityError, PlacementError

pytest.importorskip("pytorch_lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as lightning
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy

    from torchlift.integrations.lightning import CheckpointIO, RankStates

pytestmark = pytest.mark.filterwarnings("ignore")


class Noisy(lightning.LightningModule):
    """A step needs the generators, the order of the data and the learning rate."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Dropout(), nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (self.net(batch) - torch.rand(1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Stream:
    """A loader with a state, of numbers of its own for each rank."""

    def __init__(self, start: int = 0, batches: int = 6) -> None:
        self.at, self.start, self.batches = 0, start, batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at %= self.batches
        while self.at < self.batches:
            self.at += 1
            yield torch.linspace(self.start, self.at, 12).view(4, 3)

    def __len__(self) -> int:
        return self.batches

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.start = state["at"], state["start"]


class Measured(Noisy):
    """Its validation draws random numbers, too."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", (self.net(batch) - torch.rand(1)).square().mean())

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2)


class Judged(Noisy):
    """It has its loss from outside, and as a hyperparameter."""

    def __init__(self, loss: nn.Module, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=[*ignore, "ignore"])
        self.loss = loss


def trainer_of(folder: Path, every: dict[str, int], **options: Any) -> Any:
    saves = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{
            "devices": 1, "max_epochs": 2, "plugins": [CheckpointIO()],
            "callbacks": [saves, RankStates()], **options,
        },
    )  # fmt: skip


def shuffled() -> Any:
    return torch.utils.data.DataLoader(torch.randn(24, 3), batch_size=4, shuffle=True)


@pytest.mark.parametrize(
    ("loader", "every", "step"),
    [
        (Stream, {"every_n_train_steps": 4}, 4),
        (Stream, {"every_n_train_steps": 2}, 8),
        (shuffled, {"every_n_epochs": 1}, 6),
        (shuffled, {"monitor": "loss"}, 6),
        (shuffled, {"monitor": "loss", "val_check_interval": 3}, 6),
        (shuffled, {"monitor": "loss", "val_check_interval": 2}, 12),
        (Stream, {"monitor": "loss", "val_check_interval": 3}, 3),
        (Stream, {"monitor": "loss", "val_check_interval": 3}, 12),
    ],
)
def test_a_trainer_goes_on_bit_by_bit(loader: Any, every: Any, step: int, tmp_path: Path) -> None:
    """In the middle of an epoch, where the loader has a state, and at the end of a shuffled one.

    That may be at the last of several validations.
    """
    every, options = dict(every), {"max_epochs": 3}
    module = Measured if "monitor" in every else Noisy
    if "val_check_interval" in every:
        options["val_check_interval"] = every.pop("val_check_interval")
    torch.manual_seed(1)
    data = loader()
    torch.manual_seed(0)
    first = module()
    trainer_of(tmp_path / "a", every, **options).fit(first, data)
    path = tmp_path / "a" / f"step={step}.ckpt"
    assert torchlift.verify(path).ok
    torch.load(path, weights_only=True)
    torch.manual_seed(1)
    data = loader()
    torch.manual_seed(5)
    again = module()
    trainer_of(tmp_path / "b", every, **options).fit(again, data, ckpt_path=path)
    assert again.losses == first.losses[step:]
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    for name, state in again.optimizers().optimizer.state_dict()["state"].items():
        for kind, value in first.optimizers().optimizer.state_dict()["state"][name].items():
            assert torch.equal(state[kind], value)


def test_older_checkpoints_are_removed_and_the_last_is_found(tmp_path: Path) -> None:
    """By the trainer's own rules; a folder in place of a file goes too."""
    last = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=1, save_last=True)
    trainer_of(tmp_path, {}, max_epochs=3, callbacks=[last]).fit(Noisy(), Stream())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=18.ckpt"]
    again = trainer_of(tmp_path, {}, max_epochs=4)
    again.fit(Noisy(), Stream(), ckpt_path=tmp_path / "last.ckpt")
    assert again.global_step == 24
    (tmp_path / "folder" / "in").mkdir(parents=True)
    for name in ("folder", "last.ckpt", "last.ckpt"):
        CheckpointIO().remove_checkpoint(tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.Linear(2, 1)])
def test_a_module_among_the_hyperparameters_is_refused(loss: nn.Module, tmp_path: Path) -> None:
    """Its state dict was written in its place. The way out of the error, in Lightning's words."""
    options = {"max_steps": 1, "enable_checkpointing": False, "callbacks": []}
    trainer = trainer_of(tmp_path, {}, **options)
    trainer.fit(Judged(loss), Stream())
    path = tmp_path / "x.ckpt"
    with pytest.raises(PlacementError) as caught:
        trainer.save_checkpoint(path)
    assert caught.value.entry == "hyper_parameters.loss"
    assert caught.value.found == type(loss).__name__
    assert "self.save_hyperparameters(ignore=['loss'])" in (caught.value.hint or "")
    assert not path.exists()
    trainer = trainer_of(tmp_path, {}, **options)
    trainer.fit(Judged(loss, ignore=("loss",)), Stream())
    trainer.save_checkpoint(path)
    again = Judged.load_from_checkpoint(path, loss=loss)
    assert again.loss is loss


def test_a_save_at_the_last_step_of_an_epoch_is_warned_of(tmp_path: Path) -> None:
    """Lightning does not run the validation that comes after it. Other saves are not warned of."""
    with pytest.warns(RuntimeWarning, match=r"before its validation.*every_n_epochs=1") as seen:
        trainer_of(tmp_path, {"every_n_train_steps": 3}).fit(Noisy(), Stream())
    assert sum("before its validation" in str(each.message) for each in seen) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for every in ({"every_n_train_steps": 4}, {"every_n_epochs": 1}):
            trainer_of(tmp_path, every, max_epochs=1).fit(Noisy(), Stream())
    assert not any("before its validation" in str(each.message) for each in caught)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    """A flipped byte of a weight; without the check it loads."""
    trainer = trainer_of(tmp_path, {}, max_steps=1)
    trainer.fit(Noisy(), Stream())
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    flip(path, "state_dict.net.0.weight")
    with pytest.raises(IntegrityError, match="damaged"):
        trainer_of(tmp_path, {}).fit(Noisy(), Stream(), ckpt_path=path)
    assert CheckpointIO(verify=False).load_checkpoint(path)["global_step"] == 1


def test_fabric_saves_and_loads_through_the_plugin(tmp_path: Path) -> None:
    """The weights, the optimizer and what else is in the state."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[CheckpointIO()])
    module = nn.Linear(3, 1)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    path = tmp_path / "state.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    assert torchlift.verify(path).ok
    other = nn.Linear(3, 1)
    again, second = fabric.setup(other, torch.optim.AdamW(other.parameters()))
    state = {"model": again, "optimizer": second, "step": 0}
    assert fabric.load(path, state) == {}
    assert state["step"] == 3
    assert torch.equal(again.weight, model.weight)
    moment = second.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"])


# ---- on ranks


class Group(LightningEnvironment):
    """The ranks that are there already."""

    creates_processes_externally = True  # type: ignore[assignment]

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def fit(folder: Path, start: int, path: Path | None = None) -> Any:
    environment = Group()
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=environment)
    model = Noisy()
    torch.manual_seed(start)
    trainer = trainer_of(folder, {"every_n_train_steps": 4}, strategy=strategy, devices=2)
    trainer.fit(model, Stream(start), ckpt_path=path)
    return model


@pytest.mark.slow
@on(2)
def test_two_ranks_go_on_bit_by_bit(folder: Path) -> None:
    """Under DDP, each with its own random numbers and its own place in its data."""
    torch.manual_seed(0)
    first = fit(folder / "a", 10 + dist.get_rank())
    torch.manual_seed(7)
    again = fit(folder / "b", 50 + dist.get_rank(), folder / "a" / "step=4.ckpt")
    assert len(again.losses) == 8
    require_same_end(first, again, after=4)

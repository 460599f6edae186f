"""Lightning's checkpoints: the module, its optimizer and what else the trainer saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift

pytest.importorskip("pytorch_lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.linspace(-1, 1, 24).view(8, 3)


class Regression(lightning.LightningModule):
    def __init__(self, width: int = 4, rates: tuple[float, ...] = (0.1, 0.2)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        body, head = self.net[0].parameters(), self.net[1:].parameters()
        rates = self.hparams["rates"]
        groups = [{"params": body, "lr": rates[0]}, {"params": head, "lr": rates[1]}]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    """What a trainer saves after three steps."""
    folder = tmp_path_factory.mktemp("lightning")
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, filename="last", monitor="loss")],
    )  # fmt: skip
    trainer.fit(Regression(5), torch.utils.data.DataLoader(X, batch_size=4))
    trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


def trained_on(model: Any, optimizer: Any) -> list[torch.Tensor]:
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model.net(X).pow(2).mean().backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def test_all_that_a_trainer_saves_is_read_without_running_it(path: Path) -> None:
    """Hyperparameters, loops, callbacks and the step."""
    ckpt = torchlift.open(path)
    expected = torch.load(path, weights_only=False)
    assert not ckpt.blocked
    assert ckpt.objects["global_step"] == expected["global_step"] == 3
    assert ckpt.tree("hyper_parameters") == dict(expected["hyper_parameters"])
    assert ckpt.tree("lr_schedulers") == expected["lr_schedulers"]
    assert str(ckpt.tree("optimizer_states")) == str(expected["optimizer_states"])


@pytest.mark.parametrize("make", [Regression, lambda n: torchlift.skeleton(Regression, n)])
def test_a_module_and_its_optimizer_go_on_as_lightnings_do(make: Any, path: Path) -> None:
    """As load_from_checkpoint and the optimizer's own load_state_dict, bit for bit."""
    expected = Regression.load_from_checkpoint(path, map_location="cpu")
    (reference,), _ = expected.configure_optimizers()
    saved = torch.load(path, weights_only=True)
    reference.load_state_dict(saved["optimizer_states"][0])
    model = make(torchlift.open(path).tree("hyper_parameters")["width"])
    report = torchlift.load(model, path, root="state_dict")
    assert set(report.loaded) == set(expected.state_dict())
    (optimizer,), _ = model.configure_optimizers()
    torchlift.load_optimizer(model, optimizer, path, root="optimizer_states")
    assert str(optimizer.state_dict()) == str(reference.state_dict())
    for one, two in zip(trained_on(model, optimizer), trained_on(expected, reference), strict=True):
        assert torch.equal(one, two)

"""An accelerate program with torchlift's keeper: runs that go on to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch import nn

import torchlift
from torchlift.integrations.accelerate import AcceleratorKeeper

pytestmark = pytest.mark.filterwarnings("ignore")


class Seen:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.rows = 0

    def state_dict(self) -> dict[str, int]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rows = state["rows"]


class Run:
    """A program whose steps need the generators, the order of the data and the learning rate."""

    def __init__(self, folder: Path, seed: int, *, seedable: bool = True) -> None:
        torch.manual_seed(seed)
        settings = DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=seed)
        self.accelerator = Accelerator(cpu=True, dataloader_config=settings)
        data = torch.utils.data.DataLoader(torch.linspace(-1, 1, 72).view(24, 3), 4, shuffle=True)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler, self.data = self.accelerator.prepare(
            model, optimizer, scheduler, data
        )
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)
        self.keeper = AcceleratorKeeper(self.accelerator, folder, keep=None, background=False)
        self.losses: list[float] = []

    def train(self, epochs: int, step: int = 0) -> None:
        for epoch in range(step // 6, epochs):
            self.data.set_epoch(epoch)
            for batch in self.keeper.remaining(self.data, step % 6) if step % 6 else self.data:
                loss = self.model(batch + torch.rand(1)).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.seen.rows += len(batch)
                step += 1
                if step in (4, 6, 9):
                    self.keeper.save(step, metrics={"loss": loss.item()})


@pytest.mark.parametrize("step", [4, 6, 9])
def test_a_program_goes_on_bit_by_bit(step: int, tmp_path: Path) -> None:
    """In the middle of an epoch, and at the end of one."""
    first = Run(tmp_path, 0)
    assert first.keeper.resume() is None
    first.train(3)
    first.keeper.close()
    again = Run(tmp_path, 7)
    assert again.keeper.resume(step=step) == step
    assert again.seen.rows == step * 4
    again.train(3, step)
    assert again.losses == first.losses[step:]
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert again.scheduler.state_dict() == first.scheduler.state_dict()


def test_the_checkpoint_loads_elsewhere(tmp_path: Path) -> None:
    """Without accelerate, by the name of the model; a rule would be an object's name."""
    first = Run(tmp_path, 0)
    with first.keeper as keeper:
        first.train(1)
        assert keeper.keeper.steps() == [4, 6]
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    torchlift.load(model, keeper.keeper.latest(), root="model")
    assert torch.equal(model[0].weight, first.model[0].weight)
    again = Run(tmp_path, 7)
    with pytest.raises(TypeError, match=r"resume does not take exclude=\. Call torchlift\.load"):
        again.keeper.resume(exclude=["optimizer", "scheduler", "object"])
    assert again.seen.rows == 0
    assert again.optimizer.param_groups[0]["lr"] == 0.05


def test_the_default_order_of_a_shuffled_loader_is_warned_of_and_refused(tmp_path: Path) -> None:
    """It resumed at other rows. At the end of an epoch the generators are enough."""
    first = Run(tmp_path, 0, seedable=False)
    with pytest.warns(RuntimeWarning, match="use_seedable_sampler=True"):
        first.keeper.resume()
    first.train(2)
    first.keeper.close()
    again = Run(tmp_path, 7, seedable=False)
    with pytest.warns(RuntimeWarning, match="use_seedable_sampler=True"):
        assert again.keeper.resume(step=6) == 6
    again.train(2, 6)
    assert again.losses == first.losses[6:]
    again.keeper.close()
    middle = Run(tmp_path, 7, seedable=False)
    assert middle.keeper.resume(step=4) == 4
    with pytest.raises(ValueError, match="use_seedable_sampler=True"):
        middle.train(2, 4)


@pytest.mark.parametrize("kind", ["save", "load"])
def test_hooks_that_write_files_of_their_own_are_refused(tmp_path: Path, kind: str) -> None:
    """The way out of the error: the object is registered, and resumed."""
    run, average = Run(tmp_path, 0), torch.optim.swa_utils.AveragedModel(nn.Linear(3, 1))
    hook = getattr(run.accelerator, f"register_{kind}_state_pre_hook")(lambda *_: None)
    for use in (run.keeper.resume, lambda: run.keeper.save(1)):
        with pytest.raises(ValueError, match=f"register_{kind}_state_pre_hook.*Remove the hook"):
            use()
    hook.remove()
    run.accelerator.register_for_checkpointing(average)
    with torch.no_grad():
        average.module.weight.fill_(7.0)
    assert run.keeper.resume() is None
    run.keeper.save(1)
    with torch.no_grad():
        average.module.weight.zero_()
    assert run.keeper.resume() == 1
    assert average.module.weight.tolist() == [[7.0] * 3]


def test_an_engine_that_holds_the_state_is_refused(tmp_path, monkeypatch):
    """DeepSpeed and Megatron write their own files."""
    run = Run(tmp_path, 0)
    kind = property(lambda self: DistributedType.DEEPSPEED)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match="does not support DEEPSPEED"):
        run.keeper.save(1)

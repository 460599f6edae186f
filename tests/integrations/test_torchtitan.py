"""torchtitan's manager of checkpoints with torchlift's writer and reader, on two ranks."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchlift
from torchlift.distributed import (
    CheckpointReader,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

pytest.importorskip("torchtitan", reason="torchtitan is installed for Python 3.11 and newer")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.components import checkpoint as titan

    from torchlift.integrations.torchtitan import CheckpointManager


class Optimizers:
    """As torchtitan's container: by the names of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Loader:
    """As torchtitan's: each rank's place, pickled, under a name of its own."""

    def __init__(self) -> None:
        self.at = 10 * dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": pickle.dumps({"at": self.at}), "world_size": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = pickle.loads(state[f"dp_rank_{dist.get_rank()}"])["at"]


class Run:
    """A model of two ranks, what steps it, and its manager."""

    def __init__(self, folder: Path, kind=CheckpointManager, seed=0, adapter=None, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3))
        fully_shard(self.model, mesh=cpu_mesh())
        self.optimizers, self.loader = Optimizers(self.model), Loader()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizers.optimizer, 0.9)
        torch.manual_seed(seed + dist.get_rank())
        config = kind.Config(
            enable=True, folder=folder.name, interval=2, last_save_model_only=False, **options
        )
        self.manager = config.build(
            dataloader=self.loader, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.scheduler, states={}, sd_adapter=adapter,
            base_folder=str(folder.parent),
        )  # fmt: skip

    def train(self, steps: Any, *, saves: bool = True) -> None:
        for step in steps:
            self.model(torch.randn(4, 5) + self.loader.at).square().mean().backward()
            self.optimizers.optimizer.step()
            self.optimizers.optimizer.zero_grad()
            self.scheduler.step()
            self.loader.at += 1
            if saves:
                self.manager.maybe_wait_for_staging()
                self.manager.save(step)
        self.manager.maybe_wait_for_saving()

    def values(self) -> list[Any]:
        state = self.optimizers.state_dict()["state"]
        tensors = [*self.model.state_dict().values()]
        tensors += [value for name in sorted(state) for value in state[name].values()]
        found = [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in tensors]
        return [*found, torch.tensor(self.loader.at), torch.tensor(self.scheduler.get_last_lr())]


@on(2, mode=("disabled", "async"))
def test_a_run_goes_on_bit_by_bit(mode: str, folder: Path) -> None:
    """Saved at once, and in a thread."""
    first = Run(folder, async_mode=mode)
    first.train([1, 2])
    assert torchlift.verify(folder / "step-2").ok
    first.train([3, 4], saves=False)
    again = Run(folder, seed=7, async_mode=mode)
    again.train([1], saves=False)  # FSDP sums in another order from its second step on
    assert again.manager.load()
    again.train([3, 4], saves=False)
    assert all(map(torch.equal, again.values(), first.values()))
    for run in (first, again):
        run.manager.close()


@on(2)
def test_the_last_ones_are_kept(folder: Path) -> None:
    """By torchtitan's own thread, which knows the folders by their names."""
    run = Run(folder, keep_latest_k=2)
    run.train(range(1, 9))
    run.manager.close()
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["step-6", "step-8"]


@on(2)
def test_what_torchtitan_saved_resumes(folder: Path) -> None:
    """Without generators in it: those stay; and torchtitan reads what this manager saved."""
    theirs = Run(folder / "theirs", titan.CheckpointManager)
    theirs.train([1, 2])
    again = Run(folder / "theirs", seed=7)
    again.train([1], saves=False)
    drawn = torch.get_rng_state()
    assert again.manager.load()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(map(torch.equal, again.values(), theirs.values()))
    ours = Run(folder / "ours", seed=3)
    ours.train([1, 2])
    again = Run(folder / "ours", titan.CheckpointManager, seed=9)
    again.train([1], saves=False)
    assert again.manager.load()
    assert all(map(torch.equal, again.values(), ours.values()))


class Adapter:
    """As torchtitan's: names of another project, in whatever format `torchlift.open` reads."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.layers.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {k.removeprefix("model.layers."): v for k, v in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return CheckpointReader(path)


@on(2)
def test_an_adapter_reads_any_format(folder: Path) -> None:
    """By torchtitan's own manager and by ours, of weights that its own reader does not read."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3))
    if dist.get_rank() == 0:
        (folder / "hub").mkdir()
        named = {f"model.layers.{name}": value for name, value in model.state_dict().items()}
        torch.save(named, folder / "hub" / "pytorch_model.bin")
    dist.barrier()
    for number, kind in enumerate((titan.CheckpointManager, CheckpointManager)):
        run = Run(
            folder / f"fresh-{number}", kind, seed=3, adapter=Adapter(),
            initial_load_path=str(folder / "hub"), initial_load_in_hf=True,
        )  # fmt: skip
        assert run.manager.load()
        for name, value in run.model.state_dict().items():
            assert torch.equal(value.full_tensor(), model.state_dict()[name]), name
        run.manager.close()


@on(2)
def test_a_disabled_manager_does_nothing() -> None:
    """As torchtitan's."""
    manager = CheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={},
        sd_adapter=None,
    )  # fmt: skip
    assert not manager.load()
    assert not manager.save(1)
    with pytest.raises(ValueError, match="at least 2 checkpoint replicas"):
        CheckpointManager.Config(keep_latest_k=1)

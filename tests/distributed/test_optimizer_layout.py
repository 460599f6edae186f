"""The layout of optimizer state is what was saved, not what a shape suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_kinds import Soap
from ranks import cpu_mesh, on
from state_models import WHOLE, same
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchlift.distributed as ours


def stepped(shards: bool, square_only: bool = False, times: int = 2) -> Any:
    """A square weight, and one that is not, with plain square matrices in the optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)]
    model = nn.Sequential(*layers[: 1 if square_only else 2])
    if shards:
        fully_shard(model, mesh=cpu_mesh())

    def closure() -> torch.Tensor:
        loss = model(torch.linspace(-1, 1, 4)[None]).square().sum()
        loss.backward()
        return loss

    optimizer = Soap(model.parameters())
    for _ in range(times):
        optimizer.step(closure)
    return model, optimizer


def require_same(model: Any, optimizer: Any, expected: Any) -> None:
    """Compare states of shards with those of one process, and look at their layouts."""
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor)
        assert not any(isinstance(side, DTensor) for side in state["sides"])
    found = ours.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    assert same(found["state"], ours.get_optimizer_state_dict(*expected)["state"])


@on(2)
def test_a_state_of_one_process_with_an_unknown_layout_is_refused(folder: Path) -> None:
    """Its shape alone never decides."""
    known, unknown = folder / "known.pt", folder / "unknown.pt"
    if dist.get_rank() == 0:
        for path, square_only in ((known, False), (unknown, True)):
            saved = ours.get_optimizer_state_dict(*stepped(False, square_only))
            torch.save({"optim": saved}, path)
    dist.barrier()
    model, optimizer = stepped(True, times=0)
    ours.load_optimizer(model, optimizer, known, root="optim")
    require_same(model, optimizer, stepped(False))
    model, optimizer = stepped(True, square_only=True, times=0)
    with pytest.raises(ours.StateDictMismatch, match="the layout of an optimizer state") as caught:
        ours.load_optimizer(model, optimizer, unknown, root="optim")
    assert caught.value.entry.startswith("0.weight.")
    assert not optimizer.state
    # The way out: its own tensors tell, once it has taken a step.
    model, optimizer = stepped(True, square_only=True, times=1)
    ours.load_optimizer(model, optimizer, unknown, root="optim")
    require_same(model, optimizer, stepped(False, square_only=True))

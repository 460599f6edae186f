"""The layout of optimizer state is what was saved, not what a shape suggests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_kinds import whole
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchlift.distributed as ours


class Whitening(torch.optim.Optimizer):
    """Keeps a moment, and a plain square matrix whose size is that of the last dimension."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state, size = self.state[param], param.shape[-1]
                if not state:
                    state["moment"] = torch.zeros_like(param)
                    state["whiten"] = {"right": torch.eye(size)}
                state["moment"] += param.grad
                state["whiten"]["right"] += torch.arange(float(size * size)).view(size, size)
                param.sub_(state["moment"], alpha=group["lr"])


class Weights(nn.Module):
    """A square weight, and one that is not."""

    def __init__(self, sharded: bool, square_only: bool = False) -> None:
        super().__init__()
        self.square = self._made(sharded, 4, 4)
        if not square_only:
            self.wide = self._made(sharded, 2, 4)

    def _made(self, sharded: bool, *shape: int) -> nn.Parameter:
        values = torch.arange(float(shape[0] * shape[1])).view(shape)
        if sharded:
            mesh = cpu_mesh()
            return nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
        return nn.Parameter(values)


def stepped(sharded: bool, square_only: bool = False, times: int = 2) -> Any:
    model = Weights(sharded, square_only)
    optimizer = Whitening(model.parameters())
    for _ in range(times):
        for param in model.parameters():
            param.grad = param.detach() / 10
        optimizer.step()
    return model, optimizer


def require_same(optimizer: Any, expected: Any) -> None:
    """Compare states tensor by tensor, with their layouts; of a DTensor the whole tensor."""
    states = zip(optimizer.state.values(), expected.state.values(), strict=True)
    for found, wanted in states:
        right, other = found["whiten"]["right"], wanted["whiten"]["right"]
        assert not isinstance(right, DTensor)
        assert torch.equal(right, other)
        moment, other = found["moment"], wanted["moment"]
        assert isinstance(moment, DTensor)
        assert torch.equal(moment.full_tensor(), whole(other))


@on(2)
def test_a_state_of_one_process_with_an_unknown_layout_is_refused(folder: Path) -> None:
    """Its shape alone never decides."""
    known, unknown = os.path.join(folder, "known.pt"), os.path.join(folder, "unknown.pt")
    if dist.get_rank() == 0:
        for path, square_only in ((known, False), (unknown, True)):
            saved = ours.get_optimizer_state_dict(*stepped(False, square_only))
            torch.save({"optim": saved}, path)
    dist.barrier()
    model, optimizer = stepped(True, times=0)
    ours.load_optimizer(model, optimizer, known, root="optim")
    require_same(optimizer, stepped(False)[1])
    model, optimizer = stepped(True, square_only=True, times=0)
    with pytest.raises(ours.StateDictMismatch, match="the layout of an optimizer state") as caught:
        ours.load_optimizer(model, optimizer, unknown, root="optim")
    assert caught.value.entry == "square.moment"
    assert not optimizer.state
    # The way out: its own tensors tell, once it has taken a step.
    model, optimizer = stepped(True, square_only=True, times=1)
    ours.load_optimizer(model, optimizer, unknown, root="optim")
    require_same(optimizer, stepped(False, square_only=True)[1])

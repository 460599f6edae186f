"""Two small models, steps of their optimizers, and comparison of their states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchlift.distributed import StateDictOptions

PARTIAL = StateDictOptions(strict=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def two_layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for number in range(times):
        for index, param in enumerate(model.parameters()):
            if param.requires_grad:
                param.grad = torch.full_like(param, 0.1 * (index + number + 1))
        optimizer.step()
        optimizer.zero_grad()


def trained(seed: int = 0, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = two_layers(seed)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    step(model, optimizer, 2)
    return model, optimizer


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)

"""Optimizers of many kinds, a model for them, and the losses of the next steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Net(nn.Module):
    """Tied ends, a square weight, two that are not, and a frozen layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.square = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.square(self.frozen(self.embed(words))))
        return self.head(self.narrow(torch.tanh(self.wide(inside))))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Soap(torch.optim.Optimizer):
    """Keeps a square matrix for each side of a weight, whole on every rank, as SOAP does.

    Its state is made in ``step``. A square weight has matrices of its own shape.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[param], whole(param.grad)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(param)
                    sides = param.shape if param.dim() == 2 else ()
                    state["sides"] = [torch.eye(size) for size in sides]
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 0.1)
                update = whole(state["exp_avg"])
                for at, side in enumerate(state["sides"]):
                    side.lerp_(grad @ grad.T if at == 0 else grad.T @ grad, 0.1)
                    update = side @ update if at == 0 else update @ side
                if isinstance(param, DTensor):
                    update = distribute_tensor(update, param.device_mesh, param.placements)
                param.sub_(update, alpha=group["lr"])
        return loss


class Lion(torch.optim.Optimizer):
    """Makes its one moment in ``step``: only that can tell what state it has."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(moment.lerp(param.grad, 0.1).sign(), alpha=group["lr"])
                moment.lerp_(param.grad, 0.01)
        return loss


class Codes(torch.optim.Optimizer):
    """Keeps its moment in 8 bits, of the rank's own shard, as bitsandbytes does: plain tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state, here = self.state[param], local(param)
                if not state:
                    state["codes"] = torch.zeros_like(here, dtype=torch.int8)
                    state["scale"] = torch.ones(1)
                moment = state["codes"].float() * state["scale"]
                moment = 0.9 * moment + local(param.grad)
                state["scale"] = moment.abs().amax().clamp(min=1e-8).view(1) / 127
                state["codes"] = (moment / state["scale"]).round().to(torch.int8)
                here.sub_(moment, alpha=group["lr"])
        return loss


def _two_groups(model: Net) -> torch.optim.Optimizer:
    names = dict(model.named_parameters())
    slow = [param for name, param in names.items() if "square" in name]
    rest = [param for name, param in names.items() if "square" not in name]
    return torch.optim.AdamW([{"params": slow, "lr": 0.001}, {"params": rest, "lr": 0.02}])


def _muon(model: Net) -> list[torch.optim.Optimizer]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        torch.optim.Muon([param for param in trained if param.dim() == 2], lr=0.01),
        torch.optim.AdamW([param for param in trained if param.dim() != 2], lr=0.01),
    ]


def _simple(kind: Any, **options: Any) -> Callable[[Net], Any]:
    return lambda model: kind(model.parameters(), **options)


ADAMS: dict[str, Callable[[Net], Any]] = {
    "Adam": _simple(torch.optim.Adam, lr=0.01),
    "AMSGrad": _simple(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": _simple(torch.optim.AdamW, lr=0.01),
    "AdamW, a step each": _simple(torch.optim.AdamW, lr=0.01, foreach=False),
    "AdamW, foreach": _simple(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": _simple(torch.optim.AdamW, lr=0.01, fused=True),
    "NAdam": _simple(torch.optim.NAdam, lr=0.01),
    "RAdam": _simple(torch.optim.RAdam, lr=0.01),
    "Adamax": _simple(torch.optim.Adamax, lr=0.01),
    "Adagrad": _simple(torch.optim.Adagrad, lr=0.01),
    "Adadelta": _simple(torch.optim.Adadelta),
    "RMSprop": _simple(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "ASGD": _simple(torch.optim.ASGD, lr=0.01),
    "SGD": _simple(torch.optim.SGD, lr=0.01),
    "SGD with momentum": _simple(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "Lion": _simple(Lion),
    "two groups": _two_groups,
}
#: These work with whole matrices or vectors, which a mesh multiplies in another order.
MATRICES: dict[str, Callable[[Net], Any]] = {
    "Muon and AdamW": _muon,
    "SOAP": _simple(Soap),
    "LBFGS": lambda model: torch.optim.LBFGS(
        [param for param in model.parameters() if param.requires_grad], max_iter=2, history_size=3
    ),
}
#: What one process saved of these does not say how it is laid out on a mesh: they take steps first.
STEPPED = ("SOAP", "LBFGS")
ONE_PROCESS: dict[str, Callable[[Net], Any]] = {
    **ADAMS,
    **MATRICES,
    "8 bits": _simple(Codes),
    # torch's do not step DTensors.
    "Rprop": _simple(torch.optim.Rprop, lr=0.01),
    "Adafactor": _simple(torch.optim.Adafactor, lr=0.05),
}


def losses(model: nn.Module, optimizers: Any, count: int) -> list[float]:
    """Take steps, and return the loss before each of them."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    words = torch.arange(6)
    found = []
    for _ in range(count):

        def closure() -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), words.roll(1))
            loss.backward()
            return loss

        first, *others = optimizers
        found.append(first.step(closure).item())
        for optimizer in others:
            optimizer.step(lambda: torch.tensor(0.0))
    return found

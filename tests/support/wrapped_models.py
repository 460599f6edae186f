"""Small models in every wrapping, optimizers of every kind, and exact comparison of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import zoo
from ranks import cpu_mesh
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Sizes that two and four ranks do not divide, a buffer that is saved and one that is not."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(3, 1, 2))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale.sum()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def fsdp1(
    seed: int = 0, first: type[nn.Linear] = nn.Linear, *, original: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A ``FullyShardedDataParallel`` and its optimizer after a step."""
    torch.manual_seed(seed)
    layers = nn.Sequential(first(4, 6), nn.Linear(6, 2))
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(layers, device_id=cpu, use_orig_params=original)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _line() -> DeviceMesh:
    return cpu_mesh(dist.get_world_size(), names=("dp",))


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)
    return model


def _each_block(model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        model.blocks[number] = change(block)  # type: ignore[index]
    return model


def fsdp(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or _line()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _square() -> DeviceMesh:
    rows = min(2, dist.get_world_size())
    return cpu_mesh(rows, dist.get_world_size() // rows, names=("dp", "tp"))


def _fsdp_tp(model: nn.Module) -> nn.Module:
    mesh = _square()
    return fsdp(_tensor_parallel(model, mesh["tp"]), mesh["dp"])


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "compiled": compiled,
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda m: compiled(DistributedDataParallel(m)),
    "ddp of compiled": lambda m: DistributedDataParallel(compiled(m)),
    "compiled blocks": lambda m: _each_block(m, compiled),
    "checkpointed blocks": lambda m: _each_block(m, checkpoint_wrapper),
    "compiled checkpointed": lambda m: compiled(_each_block(m, checkpoint_wrapper)),
    "checkpointed blocks in ddp": lambda m: DistributedDataParallel(
        _each_block(m, checkpoint_wrapper)
    ),
    "fsdp root": lambda m: fully_shard(m, mesh=_line()),
    "fsdp blocks": fsdp,
    "compiled fsdp": lambda m: compiled(fsdp(m)),
    "fsdp of compiled blocks": lambda m: fsdp(_each_block(m, compiled)),
    "fsdp of checkpointed blocks": lambda m: fsdp(_each_block(m, checkpoint_wrapper)),
    "tensor parallel": lambda m: _tensor_parallel(m, _line()),
    "compiled tensor parallel": lambda m: compiled(_tensor_parallel(m, _line())),
}
MESHES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp over tensor parallel": _fsdp_tp,
    "hybrid fsdp": lambda m: fsdp(m, _square()),
    "compiled fsdp over tensor parallel": lambda m: compiled(_fsdp_tp(m)),
}

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
#: What torch's DTensor cannot run a step of.
NOT_SHARDED = ("rprop", "adafactor")


def train(optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 7) -> None:
    """Steps with the same gradients on every rank; the model need not run for it."""
    for step in range(steps):
        torch.manual_seed(seed + step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = torch.randn(param.shape, dtype=param.dtype)
                if isinstance(param, DTensor):
                    param.grad = torch.ones_like(param) * float(grad.mean())
                else:
                    param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def built(
    wrap: str, optimizer: str = "adam", seed: int = 0, steps: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model and an optimizer of it that took some steps."""
    model = {**WRAPPERS, **MESHES}[wrap](net(seed))
    made = OPTIMIZERS[optimizer](model.parameters())
    train(made, steps, seed)
    return model, made


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that two trees are equal: keys, layouts, dtypes, and every bit of values."""
    assert zoo.same(a, b), where


def containers(tree: Any) -> Any:
    """New dicts and lists around the same tensors: torch changes what it is given."""
    if isinstance(tree, dict):
        return {key: containers(value) for key, value in tree.items()}
    return [containers(value) for value in tree] if isinstance(tree, list) else tree


def cloned(tree: Any) -> Any:
    """A copy that shares no tensor."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: cloned(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(cloned(value) for value in tree)
    return tree

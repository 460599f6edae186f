"""Optimizers of every kind in every wrapping go on from a state dict as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import MESHES, WRAPPERS, fsdp, same

import torchlift.distributed as ours

pytest.importorskip("torchao")

Options = ours.StateDictOptions
FROM_0 = Options(full_state_dict=True, broadcast_from_rank0=True)
WAYS = {
    "as it is": (Options(), Options()),
    "flat": 2 * (Options(flatten_optimizer_state_dict=True),),
    "whole": 2 * (Options(full_state_dict=True),),
    "on rank 0": (Options(full_state_dict=True, cpu_offload=True), FROM_0),
}


def ways() -> list[str]:
    """The ways that this number of ranks shows."""
    left_out = {1: ("flat", "whole"), 2: (), 4: ("flat",)}[dist.get_world_size()]
    return [way for way in WAYS if way not in left_out]


class Block(nn.Module):
    """Of a size from which torchao keeps moments in few bits, on four ranks as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 128)
        self.down = nn.Linear(128, 128, bias=False)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.odd = nn.Linear(5, 7)


class Slow(torch.optim.Optimizer):
    """Holds another optimizer, steps it, and keeps slow weights of its own (Lookahead)."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.detach().clone())
        self.inner.step()
        for param, state in self.state.items():
            param.copy_(state["slow"].lerp_(param, 0.5))


class Communicating(torch.optim.Optimizer):
    """Exchanges what each rank computed, in its step, as distributed Muon does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                norm = param.grad.norm()
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm.clone()
                if not HALVES:
                    dist.all_reduce(norm)
                state["norm"] = state.get("norm", torch.zeros(())) * 0.9 + norm
                param.sub_(param.grad * (group["lr"] / float(state["norm"])))


def _muon(params: Any) -> torch.optim.Optimizer:
    matrices = [param for param in params if param.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.1, ns_steps=1)


def _low_bit(params: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "muon": _muon,
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "wrapper": Slow,
    "communicating": Communicating,
    "low-bit adam": _low_bit,
}

HALVES = False  # whether the ranks have other parameters


def _stage(model: nn.Module, sharded: bool) -> nn.Module:
    """Of two stages of a pipeline the one of this rank."""
    mesh = cpu_mesh(2, dist.get_world_size() // 2, names=("pp", "dp"))
    model.blocks[1 - mesh["pp"].get_local_rank()] = nn.Identity()  # type: ignore[index,operator]
    return fsdp(model, mesh["dp"]) if sharded else model


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "stages": partial(_stage, sharded=False),
    "fsdp": WRAPPERS["fsdp blocks"],
    "tensor parallel": WRAPPERS["tensor parallel"],
    "hybrid fsdp": MESHES["hybrid fsdp"],
    "fsdp over tensor parallel": MESHES["fsdp over tensor parallel"],
    "sharded stages": partial(_stage, sharded=True),
}


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, for half a minute
        for step in range(steps):
            torch.manual_seed(seed + step)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    grad = torch.randn(param.shape)
                    if isinstance(param, DTensor):
                        grad = torch.ones_like(param.detach()) * float(grad.mean())
                    param.grad = grad
            optimizer.step()
            optimizer.zero_grad()


def inner(tree: Any) -> Any:
    """The same tree with what wrappers keep their values in, in place of them."""
    if isinstance(tree, dict):
        return {key: inner(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [inner(value) for value in tree]
    local = tree.to_local() if isinstance(tree, DTensor) else tree
    flatten = getattr(local, "__tensor_flatten__", None)
    return {n: getattr(local, n) for n in flatten()[0]} if flatten else local


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return inner(dict(model.state_dict())), inner(optimizer.state_dict())


def goes_on(kind: str, name: str, way: str, steps: int) -> None:
    global HALVES
    HALVES = kind.endswith("stages")
    read, load = WAYS[way]
    model = KINDS[kind](Net(0))
    optimizer = OPTIMIZERS[name](model.parameters())
    train(optimizer, steps, 1)
    states = ours.get_state_dict(model, optimizer, options=read)
    other = KINDS[kind](Net(5))
    target = OPTIMIZERS[name](other.parameters())
    ours.set_state_dict(
        other, target, model_state_dict=states[0], optim_state_dict=states[1], options=load
    )
    same(everything(other, target)[0], everything(model, optimizer)[0])
    for each in (optimizer, target):
        train(each, 2, 9)
    same(everything(other, target), everything(model, optimizer))


def pairs(kinds: Iterable[str], left_out: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Each kind of model with each optimizer; torch cannot step Adafactor on a mesh."""
    return [
        (kind, name)
        for kind in kinds
        for name in OPTIMIZERS
        if name not in left_out and (name != "adafactor" or kind in ("plain", "ddp", "stages"))
    ]


ONE = ("plain", "ddp", "fsdp", "tensor parallel")
MORE = ("hybrid fsdp", "fsdp over tensor parallel", "sharded stages")


@on(1, pair=pairs(ONE))
@on(2, pair=pairs((*ONE, "stages")))
@on(4, pair=pairs(MORE, left_out=("sgd", "momentum", "muon")))  # two ranks show what is theirs
def test_training_goes_on_as_if_it_had_not_been_saved(pair: tuple[str, str]) -> None:
    """Bit by bit, from a state read as it is, flat, whole or on rank 0, before a step or after."""
    kind, name = pair
    for way in ways():
        if (way, name) == ("on rank 0", "low-bit adam"):
            continue  # refused: a class alone knows how to slice what it holds
        if kind.endswith("stages") and way == "on rank 0":
            continue  # refused: the names of the ranks differ
        for steps in (0, 2) if dist.get_world_size() < 4 or way == "as it is" else (2,):
            try:
                goes_on(kind, name, way, steps)
            except Exception as error:
                by_columns = name == "low-bit adam" and "tensor parallel" in kind
                if by_columns and way == "whole" and "cannot join its shards" in str(error):
                    continue  # its codes are in blocks of rows
                raise AssertionError(f"{way}, after {steps} steps") from error

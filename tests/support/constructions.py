"""Modules whose constructors do what people do with parameters and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

Build = Callable[[nn.Module], object]


class Made(nn.Module):
    """A module whose constructor is a function."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        build(self)


def buffer(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Register a buffer that no checkpoint holds."""
    module.register_buffer(name, tensor, persistent=False)


# -- writes and views -------------------------------------------------------------------------


def writes_through_data(m: Any) -> None:
    m.linear = nn.Linear(3, 2)
    m.linear.weight.data.normal_(0, 0.02)
    m.linear.weight.data[0].zero_()
    m.linear.bias.data = torch.arange(2.0)
    m.embedding = nn.Embedding(5, 3, padding_idx=1)


def writes_after_registering(m: Any) -> None:
    m.weight = nn.Parameter(torch.empty(3, 3))
    m.register_buffer("count", torch.zeros((), dtype=torch.long))
    with torch.no_grad():
        m.weight.uniform_(-1, 1).fill_diagonal_(0)
        m.weight[1] += m.weight[0]
        m.weight /= m.weight.norm()
    m.count += 3


# -- where tensors come from ------------------------------------------------------------------


def every_sampler(m: Any) -> None:
    m.weight = nn.Parameter(torch.rand(3) + torch.randn(3))
    buffer(m, "order", torch.randperm(6))
    buffer(m, "whole", torch.randint(0, 9, (4,)))
    buffer(m, "drawn", torch.multinomial(torch.ones(4), 2))
    buffer(m, "coins", torch.bernoulli(torch.full((5,), 0.5)))
    buffer(m, "normal", torch.normal(torch.zeros(3), torch.ones(3)))
    buffer(m, "exponential", torch.empty(3).exponential_())


def deep_copies(m: Any) -> None:
    layer = nn.Linear(2, 3)
    m.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
    with torch.no_grad():
        m.layers[0].weight.add_(1)
    m.copied = copy.deepcopy(nn.Parameter(torch.arange(3.0), requires_grad=False))


# -- kinds of tensors -------------------------------------------------------------------------


def unusual_kinds(m: Any) -> None:
    m.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    m.whole = nn.Parameter(torch.arange(4), requires_grad=False)
    m.empty = nn.Parameter(torch.empty(0, 5))
    m.scalar = nn.Parameter(torch.tensor(2.0))
    m.register_buffer("flag", torch.tensor(True))
    m.register_buffer("brain", torch.ones(2, dtype=torch.bfloat16))
    m.register_buffer("nothing", None)
    m.register_parameter("absent", None)
    m.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    m.images = nn.Parameter(torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last))
    buffer(m, "expanded", torch.arange(3.0).expand(2, 3))


def plain_attributes(m: Any) -> None:
    m.table = torch.arange(4.0) * 2
    m.nested = [torch.ones(2), {"x": (torch.full((2,), 7.0), "text")}]
    m.linear = nn.Linear(2, 2)
    m.alias = m.linear.weight
    m.derived = m.linear.weight.detach() + 1


def containers(m: Any) -> None:
    m.listed = nn.ParameterList([torch.ones(2), nn.Parameter(torch.randn(1))])
    m.named = nn.ParameterDict({"a": torch.randn(2), "b": nn.Parameter(torch.zeros(3))})
    m.modules_ = nn.ModuleDict({"one": nn.Linear(1, 2), "two": nn.Conv1d(1, 2, 3)})


def changes_default_dtype(m: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        m.wide = nn.Linear(2, 3)
        buffer(m, "ramp", torch.arange(3) / 2)
    finally:
        torch.set_default_dtype(before)
    m.narrow = nn.Linear(2, 3)


def explicit_devices(m: Any) -> None:
    m.linear = nn.Linear(2, 3, device="cpu")
    m.weight = nn.Parameter(torch.randn(2, device=torch.device("cpu")))
    m.moved = nn.Linear(3, 3).cpu().to("cpu").to(torch.device("cpu"), torch.float32)
    buffer(m, "beside", torch.ones(2, device=m.weight.device))
    buffer(m, "same", torch.arange(3).to(m.weight))
    assert m.weight.device.type == "cpu"
    assert not m.weight.is_cuda
    assert not m.weight.is_meta


def freezes(m: Any) -> None:
    m.frozen = nn.Linear(2, 3).requires_grad_(False)
    m.open = nn.Linear(2, 3)
    m.open.bias.requires_grad = False


def ties(m: Any) -> None:
    m.embedding = nn.Embedding(5, 4)
    m.head = nn.Linear(4, 5, bias=False)
    m.head.weight = m.embedding.weight
    m.block = nn.Linear(4, 4)
    m.again = m.block
    m.register_buffer("mask", torch.ones(2))
    m.register_buffer("mask_again", m.mask)


def generator_of_its_own(m: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    m.weight = nn.Parameter(torch.randn(4, generator=generator))
    m.bias = nn.Parameter(torch.empty(4).normal_(generator=generator))


CONSTRUCTORS: dict[str, Build] = {
    made.__name__: made
    for made in (
        writes_through_data, writes_after_registering, 
        every_sampler, deep_copies, unusual_kinds, plain_attributes,
        containers, changes_default_dtype, explicit_devices, freezes,
        ties, generator_of_its_own,
    )
}  # fmt: skip

#: name -> a callable that makes the module.
FACTORIES: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Made, build) for name, build in CONSTRUCTORS.items()},
    "Transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "LSTM": lambda: nn.LSTM(4, 5, 2, bidirectional=True, proj_size=3),
    "BatchNorm": lambda: nn.BatchNorm1d(3),
    "Conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(2, 2, 3)),
    "AdaptiveSoftmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 20, [5, 10]),
    "weight_norm": lambda: weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(3, 4)),
    "old spectral_norm": lambda: old_spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: orthogonal(nn.Linear(3, 3)),
}

"""A weight stored as int8 with a scale per row: a wrapper subclass as libraries write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchlift


class Int8(torch.Tensor):
    """Looks like a float tensor, holds int8 values and one scale for each row."""

    @staticmethod
    def __new__(cls, values, scale, dtype=torch.float32):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device
        )

    def __init__(self, values, scale, dtype=torch.float32):
        self.values_int8 = values
        self.scale = scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def quantised(cls, tensor):
        """Round every row to 255 levels."""
        scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    @classmethod
    def blank(cls, shape, device="meta"):
        """One without values, as a skeleton of a quantised model has it."""
        values = torch.empty(shape, dtype=torch.int8, device=device)
        return cls(values, torch.empty((shape[0], 1), device=device))

    def dequantised(self):
        """The float tensor that it stands for."""
        return self.values_int8.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["values_int8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values_int8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if packet in (torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy):
            self = args[0]
            return cls(func(self.values_int8), func(self.scale))
        if packet is torch.ops.aten.copy_:
            made = args[1] if isinstance(args[1], Int8) else Int8.quantised(args[1])
            args[0].values_int8.copy_(made.values_int8)
            args[0].scale.copy_(made.scale)
            return args[0]
        plain = pytree.tree_map_only(Int8, Int8.dequantised, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def load_int8(destination, source, assign):
    """The handler: quantise, pass on, or de-quantise."""
    if isinstance(destination, Int8):
        return source.detach() if isinstance(source, Int8) else Int8.quantised(source.float())
    return source.dequantised().to(destination.dtype)


def registered():
    """The handler in force, for a ``with`` statement."""
    return torchlift.swap.module_load(Int8, load_int8)


def quantise_linear(model: nn.Module, device: str | None = "meta") -> nn.Module:
    """Give every linear layer an int8 weight: without values, or with those it has."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            old = module.weight.detach()
            new = Int8.blank(old.shape, device) if device else Int8.quantised(old)
            module.weight = nn.Parameter(new, requires_grad=False)
    return model

"""A copy of one module that its own loading code can load into, so that the real one stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchlift.slots import is_lazy


def stand_in_for(module: nn.Module) -> tuple[nn.Module, dict[str, tuple[torch.Tensor, int]]]:
    """A module that an override can load into, and its tensors with their versions before.

    It shares everything with the real one but the registries of tensors, which hold copies.
    """
    made = object.__new__(type(module))
    made.__dict__.update(vars(module))
    parameters: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        parameters[name] = None if parameter is None else _copy_of(parameter)
    buffers = {
        name: None if buffer is None else _copy_of(buffer)
        for name, buffer in module._buffers.items()
    }
    made.__dict__.update(_parameters=parameters, _buffers=buffers)
    return made, {name: (tensor, tensor._version) for name, tensor in tensors_of(made)}


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    return tensor.detach().clone()


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and persistent buffers."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer

"""A copy of one module that its own loading code can load into, so that the real one stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchlift.calls import version_of
from torchlift.content import is_plain
from torchlift.errors import PlacementError
from torchlift.slots import is_lazy
from torchlift.written import same_bits


@dataclass(frozen=True, slots=True)
class Before:
    """A stand-in's tensor as it was.

    Attributes:
        tensor: the tensor itself.
        version: how often it had been written to.
        memory: where its values were; None on meta.
        live: the tensor of the real module, which it is a copy of.
    """

    tensor: torch.Tensor
    version: int
    memory: int | None
    live: torch.Tensor

    def is_changed(self, now: torch.Tensor) -> bool:
        """Whether an override put another tensor or other values in its place."""
        if now is not self.tensor:
            return True
        if is_lazy(now):
            return False
        if version_of(now) != self.version:
            return True
        if _memory_of(now) != self.memory or now.shape != self.live.shape:
            return True
        # What is written through `.data` or NumPy is counted nowhere.
        return not now.is_meta and is_plain(self.live) and not same_bits(now, self.live)


class DataTaken(TorchFunctionMode):
    """Notes whose ``.data`` is taken: on meta, what is written there leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _DATA:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))

    def require_memory(self, before: Before, now: torch.Tensor, name: str, path: str) -> None:
        """Refuse what an override wrote into a tensor on meta: it would be lost without a word.

        Raises:
            PlacementError: the override did so.
        """
        if now is not before.tensor or not now.is_meta:
            return
        if before.is_changed(now) or any(item is now for item in self.tensors):
            raise PlacementError(
                "its module's own loading code writes into it, and on meta nothing can be written",
                file=path,
                entry=name,
                hint="Make it first, with torchlift.materialize(model, names=...).",
            )


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def stand_in_for(module: nn.Module) -> tuple[nn.Module, dict[str, Before]]:
    """A module that an override can load into, and its tensors as they are before.

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
    real = dict(tensors_of(module))
    return made, {
        name: Before(tensor, _version_of(tensor), _memory_of(tensor), real[name])
        for name, tensor in tensors_of(made)
    }


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if is_lazy(tensor) else version_of(tensor)


def _memory_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_meta or is_lazy(tensor) else tensor.data_ptr()


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

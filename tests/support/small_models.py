"""The means to say that a model of `zoo` has not changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from zoo import Holder, Mixed, Tied, Two, on_meta, same

import torchlift

__all__ = [
    "Holder", "Mixed", "Tied", "Two", "assert_holds", "dense", "entry", "on_meta",
    "randomised", "saved", "state_of", "tensors_of", "unchanged",
]  # fmt: skip


def randomised(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    """A state dict for `model` with values of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator).to(value.dtype) + 10
        for key, value in model.state_dict().items()
    }


def saved(obj: object, folder: Path, name: str = "model.pt") -> Path:
    """`obj` in a file of ``torch.save``."""
    path = folder / name
    torch.save(obj, path)
    return path


def state_of(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Everything about a model's tensors that a failed load must not change."""
    return {name: _facts(tensor) for name, tensor in tensors_of(model).items()}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, hidden buffers and second names included."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    values = None if tensor.is_meta else _bytes(tensor)
    place = None if tensor.is_meta else tensor.data_ptr()
    grad = None if tensor.grad is None else _bytes(tensor.grad)
    kind = (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    return (id(tensor), kind, place, values, grad, tensor.requires_grad)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(dense(tensor).reshape(-1).view(torch.uint8).tolist())


def assert_holds(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Every tensor of `state` is in the model bit by bit, on the CPU."""
    found = tensors_of(model)
    for key, value in state.items():
        assert found[key].device.type == "cpu", key
        assert same(dense(found[key]), dense(value)), key


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without gaps, so that single and no elements have no odd strides either."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )


def entry(key: str, *shape: int, dtype: str = "float32") -> torchlift.TensorEntry:
    """A description of a tensor that no file holds."""
    return torchlift.TensorEntry(key, dtype, shape, (), 0, "cpu", key, ())


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Whatever the block raises, these models are as they were before it."""
    before = [state_of(model) for model in models]
    try:
        yield
    finally:
        assert [state_of(model) for model in models] == before

"""One tiny model per pathology of loading, and the means to say that a model has not changed."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_files import same_bits
from torch import nn

import torchlift


class Mixed(nn.Module):
    """A parameter and a buffer of the root, submodules, an integer and a hidden buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("frequencies", torch.arange(4.0) / 3, persistent=False)
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.inner[0].bias.requires_grad_(False)


class Two(nn.Module):
    """Two parameters that are independent of each other."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(shape or (2, 3)))
        self.b = nn.Parameter(torch.zeros(shape or (2, 3)))


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.0))


class Holder(nn.Module):
    """Any tensors, by name: floating-point ones as parameters, others as buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point() or tensor.is_complex():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


def on_meta(tensors: dict[str, torch.Tensor]) -> Holder:
    """A `Holder` of such tensors that has no values yet."""
    return Holder({name: torch.empty_like(t, device="meta") for name, t in tensors.items()})


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
        assert same_bits(dense(found[key]), dense(value)), key


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without gaps, so that single and no elements have no odd strides either."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )


def entry(key: str, *shape: int, dtype: str = "float32") -> torchlift.TensorEntry:
    """A description of a tensor that no file holds."""
    return torchlift.TensorEntry(key, dtype, shape, (), 0, "cpu", key, ())

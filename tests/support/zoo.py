"""The small models and optimizers of all tests, by name, and `same`, which compares anything.

Look here before you write a class in a test: a model has one pathology, and its name says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# ---- models


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
    """One parameter under two names: a head that is the embedding, with a norm of versions."""

    def __init__(self, rows: int = 5, columns: int = 3, *, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, columns)
        if norm:
            self.norm = nn.BatchNorm1d(columns)
        self.head = nn.Linear(columns, rows, bias=False)
        self.head.weight = self.embed.weight


class Stated(nn.Module):
    """A weight, and extra state of any kind."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.zeros(2)), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Holder(nn.Module):
    """Any tensors, by name: floating-point ones as parameters, others as buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point() or tensor.is_complex():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


class Bag(nn.Module):
    """Zeros of these shapes as buffers, whose names may have dots."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_buffer(last, torch.zeros_like(tensor))


def on_meta(tensors: Mapping[str, torch.Tensor]) -> Holder:
    """A `Holder` of such tensors that has no values yet."""
    return Holder({name: torch.empty_like(t, device="meta") for name, t in tensors.items()})


def two_layers(seed: int = 0) -> nn.Sequential:
    """Two linear layers with weights of this seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


# ---- optimizers


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    """Take steps whose gradients are the same in each run."""
    for number in range(times):
        for index, param in enumerate(model.parameters()):
            if param.requires_grad:
                param.grad = torch.full_like(param, 0.1 * (index + number + 1))
        optimizer.step()
        optimizer.zero_grad()


def trained(seed: int = 0, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """`two_layers` and their Adam after two steps."""
    model = two_layers(seed)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    step(model, optimizer, 2)
    return model, optimizer


# ---- comparison


def same(a: Any, b: Any, *, kinds: bool = False) -> bool:
    """Return whether two values are equal: of tensors the dtype, the shape and every bit.

    Modules are compared by their state dicts, and containers item by item. NaN is equal to NaN.

    Args:
        a: A tensor of any layout, a module, a container or plain data.
        b: The other one.
        kinds: Whether containers must also have one type, and mappings one order of keys.
    """
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        return same(a.state_dict(), b.state_dict(), kinds=kinds)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if kinds and type(a) is not type(b):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys() or (kinds and [*map(repr, a)] != [*map(repr, b)]):
            return False
        return all(same(a[key], b[key], kinds=kinds) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(
            same(one, other, kinds=kinds) for one, other in zip(a, b, strict=True)
        )
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def parts_of(tensor: torch.Tensor) -> tuple[list[object], list[torch.Tensor]]:
    """Return what tells a tensor from others of its shape, and its dense tensors."""
    facts: list[object] = [tensor.dtype, tensor.layout, tensor.device, tensor.shape]
    if tensor.layout == torch.sparse_coo:
        return [*facts, tensor.is_coalesced()], [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return facts, [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return facts, [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if not tensor.is_quantized:
        return facts, [] if tensor.is_meta else [tensor]
    facts += [tensor.qscheme(), tensor.stride()]
    if tensor.qscheme() == torch.per_tensor_affine:
        facts += [tensor.q_scale(), tensor.q_zero_point()]
        return facts, [tensor.int_repr()]
    facts.append(tensor.q_per_channel_axis())
    scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return facts, [tensor.int_repr(), *scales]


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    mesh = [(x.placements, x.device_mesh) if hasattr(x, "placements") else None for x in (a, b)]
    if mesh[0] != mesh[1]:
        return False
    if mesh[0]:
        a, b = a.to_local(), b.to_local()  # type: ignore[attr-defined]
    (facts, dense), (others, also) = parts_of(a.detach()), parts_of(b.detach())
    if facts != others or any(x.shape != y.shape for x, y in zip(dense, also, strict=True)):
        return False
    return all(torch.equal(_bytes_of(x), _bytes_of(y)) for x, y in zip(dense, also, strict=True))


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    # Not contiguous(): of one element, or of none, any strides are.
    plain = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8)

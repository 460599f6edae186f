"""What kind of call each function of the torch API is, as far as a `Tape` must tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.utils._device import _device_constructors

# fmt: off
_LOOK_NAMES = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_inference",
    "requires_grad_", "detach", "__len__",
)
#: These overwrite their first tensor and return it; on the meta device there is nothing to write,
#: and finding that out costs 0.4 ms for one `normal_`.
_FILLS = frozenset({
    "bernoulli_", "cauchy_", "constant_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "ones_", "random_", "trunc_normal_", "uniform_", "zero_", "zeros_",
})
#: So do these, if the tensor has at least two dimensions: otherwise they raise.
_MATRIX_FILLS = frozenset({
    "kaiming_normal_", "kaiming_uniform_", "orthogonal_", "xavier_normal_", "xavier_uniform_",
})
#: Their results have as many elements as the data say.
_SHAPED_BY_DATA = frozenset({
    "__getitem__", "argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave",
    "unique", "unique_consecutive", "where",
})
#: They draw from torch's default generator, unless they are given another.
_RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "bernoulli_", "cauchy_", "dropout", "exponential_", "geometric_",
    "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "sparse_", "trunc_normal_",
    "uniform_", *_MATRIX_FILLS,
})
# fmt: on
#: These turn Python data into tensors. The data exists already and may change later, so the tensor
#: is made at once and kept.
FROM_DATA = frozenset({torch.as_tensor, torch.asarray, torch.tensor, torch.scalar_tensor})
CONSTRUCTORS = frozenset(_device_constructors())
#: Those that make one dense tensor, draw no random numbers and take none of what exists already.
ALLOCATIONS = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace}
    | {torch.ones, torch.tril_indices, torch.triu_indices, torch.zeros}
)
#: The names of calls that may do nothing but overwrite; `only_fills` decides.
OVERWRITERS = _FILLS | _MATRIX_FILLS
#: Methods that move to the kind of device they are named after.
MOVES = frozenset({torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu})
DEVICE = torch.Tensor.device.__get__
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: These ask where a tensor is, which is not where a tape keeps it.
WHERE = frozenset({DEVICE, IS_META, IS_CPU, IS_CUDA, torch.Tensor.data_ptr})
#: These only look, or make a view, which its storage tells all about.
LOOKS = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in _LOOK_NAMES),
        torch.Tensor.data_ptr,
        torch._C._set_grad_enabled,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)


def only_fills(func: Callable[..., Any], tensor: torch.Tensor) -> bool:
    """Whether the call does nothing but overwrite `tensor`, its first argument, and cannot fail."""
    name = getattr(func, "__name__", "")
    if not (name in _FILLS or (name in _MATRIX_FILLS and tensor.dim() > 1)):
        return False
    # Where autograd would object to the write, the call itself has to say so. The functions of
    # torch.nn.init, unlike the methods, turn it off themselves.
    return isinstance(func, FunctionType) or not (tensor.requires_grad and torch.is_grad_enabled())


def is_shaped_by_data(func: Callable[..., Any]) -> bool:
    """Whether other values, such as another random draw, could give results of another shape."""
    return getattr(func, "__name__", "") in _SHAPED_BY_DATA


def is_random(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from torch's default generator."""
    return getattr(func, "__name__", "") in _RANDOM and kwargs.get("generator") is None

"""Statistics of a tensor's values, with one block in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

#: The values of the 16 codes of float4_e2m1fn. A byte holds two codes, the first in its low half.
_FLOAT4 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu"
)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor's values. Complex numbers count by their absolute values.

    Attributes:
        min: The smallest finite value, or None without finite values.
        max: The largest finite value.
        mean: The mean of the finite values.
        std: The population standard deviation of the finite values.
        nan: Number of NaN elements.
        inf: Number of infinite elements.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int


def stats_of(blocks: Iterable[torch.Tensor]) -> TensorStats:
    """Return statistics of a tensor of any dtype, given its elements in blocks."""
    count, mean, variance, nan, inf = 0, 0.0, 0.0, 0, 0
    smallest: float | None = None
    largest: float | None = None
    for block in blocks:
        values = _numbers(block)
        if values.is_floating_point() and not math.isfinite(values.sum().item()):
            nan += int(values.isnan().sum())
            inf += int(values.isinf().sum())
            values = values[values.isfinite()]
        if not values.numel():
            continue
        low, high = (bound.item() for bound in values.aminmax())
        smallest = low if smallest is None else min(low, smallest)
        largest = high if largest is None else max(high, largest)
        values, added = values.double(), values.numel()
        # Chan, Golub and LeVeque (1983): blocks are joined without the difference of large sums,
        # in which the digits of a small variance would be lost.
        gap, total = values.mean().item() - mean, count + added
        variance = (
            variance * (count / total)
            + values.var(correction=0).item() * (added / total)
            + gap * gap * (count / total) * (added / total)
        )
        mean += gap * (added / total)
        count = total
    if smallest is None or largest is None:
        return TensorStats(None, None, None, None, nan, inf)
    return TensorStats(smallest, largest, mean, math.sqrt(variance), nan, inf)


def _numbers(block: torch.Tensor) -> torch.Tensor:
    """Return values as int64 or float64, which hold them exactly (uint64 is rounded)."""
    if block.dtype == torch.float4_e2m1fn_x2:
        pairs = block.view(torch.uint8).int()
        return torch.cat([_FLOAT4[pairs & 15], _FLOAT4[pairs >> 4]]).double()
    if block.is_complex():
        block = block.to(torch.complex128).abs()
    whole = not block.is_floating_point() and block.dtype != torch.uint64
    return block.to(torch.int64 if whole else torch.float64)

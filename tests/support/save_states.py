"""A state of every dtype and of the shapes that shards do not divide."""

from __future__ import annotations

import torch

TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu,
)  # fmt: skip


def expected_state() -> dict[str, torch.Tensor]:
    """Key -> values, the same on every rank: each bit pattern of a dtype may come up."""
    generator = torch.Generator().manual_seed(3)
    state = {}
    for number, dtype in enumerate(TYPES):
        shape = ((7, 5), (5, 3), (1, 6))[number % 3]
        count = shape[0] * shape[1]
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,),
                            generator=generator, dtype=torch.uint8)  # fmt: skip
        state[str(dtype).removeprefix("torch.")] = raw.view(dtype).view(shape)
    state["scalar"] = torch.tensor(2.5)
    state["nothing"] = torch.empty(0, 4)
    state["flat"] = torch.arange(11)
    return state

"""States to save: of every dtype and odd shapes, and such that say which one they are."""

from __future__ import annotations

from pathlib import Path

import torch

import torchlift

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


def state_of(number: float, count: int = 3, size: int = 20) -> dict[str, torch.Tensor]:
    """A state of which every value says which one it is."""
    return {f"t{at}": torch.full((size,), float(number)) for at in range(count)}


def number_of(path: Path) -> float:
    """Which state of `state_of` a checkpoint is, all of it."""
    assert torchlift.verify(path).ok, path
    with torchlift.open(path) as ckpt:
        (number,) = {value for tensor in ckpt.values() for value in tensor.unique().tolist()}
    return float(number)

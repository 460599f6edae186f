"""Write a checkpoint of any size in a few MiB of memory, and define its model."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from torchlift.formats.layout import Stored
from torchlift.formats.safetensors import safetensors_layout

_DTYPES = ("float64", "float32", "float16", "bfloat16")  # `Tensor.normal_` supports these
_SHIFT = 4096  # maximum bytes between the random numbers of two tensors


class Stack(nn.Module):
    """A chain of linear layers of one size without bias: ``layers.0.weight`` and so on.

    Even layers map ``width`` features to ``rows``. Odd layers map them back.

    Args:
        tensors: Number of layers, each with one parameter.
        rows: First dimension of the weights of even layers.
        width: Second dimension of the weights of even layers.

    Example:
        >>> [tuple(p.shape) for p in Stack(3, rows=4, width=2).parameters()]
        [(4, 2), (2, 4), (4, 2)]
    """

    def __init__(self, tensors: int, rows: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, rows, bias=False) if i % 2 == 0 else nn.Linear(rows, width, bias=False)
            for i in range(tensors)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers in turn. ``x`` has the shape ``(..., width)``."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def make_checkpoint(
    path: str | os.PathLike[str],
    *,
    nbytes: int = 2 << 30,
    tensors: int = 64,
    dtype: str = "float32",
    format: Literal["torch-zip", "safetensors"] = "torch-zip",
    seed: int = 0,
) -> tuple[int, int, int]:
    """Write the checkpoint of a `Stack` with reproducible random weights.

    The tensors share one block of random numbers in a mapped temporary file. Each tensor starts one
    page after the one before. So 2 GiB take only a few MiB of anonymous memory.

    Args:
        path: File to write. An existing file is replaced.
        nbytes: Size of all tensors together, in bytes. It is rounded down to complete rows.
        tensors: Number of tensors.
        dtype: ``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``.
        format: ``"torch-zip"`` (the format of `torch.save`) or ``"safetensors"``.
        seed: Seed of the random numbers.

    Returns:
        ``(tensors, rows, width)``: the arguments of the `Stack` for this file.

    Raises:
        ValueError: If the dtype or the format is not supported.
        ValueError: If a tensor would be empty.

    Example:
        >>> import os, tempfile, torch
        >>> path = os.path.join(tempfile.mkdtemp(), "small.pt")
        >>> model = Stack(*make_checkpoint(path, nbytes=1 << 16, tensors=4))
        >>> model.load_state_dict(torch.load(path))
        <All keys matched successfully>
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be a floating-point type such as float32, not {dtype!r}")
    if format not in ("torch-zip", "safetensors"):
        raise ValueError(f'format must be "torch-zip" or "safetensors", not {format!r}')
    kind: torch.dtype = getattr(torch, dtype)
    numel = nbytes // max(tensors, 1) // kind.itemsize
    if tensors < 1 or numel < 1:
        raise ValueError(f"{nbytes} bytes cannot be divided among {tensors} tensors of {dtype}")
    width = 1 << (math.isqrt(numel).bit_length() - 1)
    rows = numel // width
    size = rows * width * kind.itemsize
    shift = min(_SHIFT, size)  # small tensors start closer to each other
    with tempfile.TemporaryFile() as file:
        file.truncate(size + tensors * shift)
        block = memoryview(mmap.mmap(file.fileno(), 0))
        torch.frombuffer(block, dtype=kind).normal_(
            std=0.02, generator=torch.Generator().manual_seed(seed)
        )
        keys = [f"layers.{i}.weight" for i in range(tensors)]
        shapes = {key: (width, rows) if i % 2 else (rows, width) for i, key in enumerate(keys)}
        areas = {key: block[i * shift :][:size] for i, key in enumerate(keys)}
        try:
            if format == "safetensors":
                stored = [Stored(key, dtype, shape) for key, shape in shapes.items()]
                _write_safetensors(path, stored, areas)
            else:
                # One storage for each tensor: torch.save writes each storage once.
                flat = {key: torch.frombuffer(areas[key], dtype=kind) for key in keys}
                torch.save({key: flat[key].view(shapes[key]) for key in keys}, path)
        except BaseException:
            if os.path.isfile(path):
                os.unlink(path)
            raise
    return tensors, rows, width


def _write_safetensors(
    path: str | os.PathLike[str], tensors: list[Stored], areas: Mapping[str, memoryview]
) -> None:
    """Write a safetensors file without copying the tensors, as save_file does."""
    layout = safetensors_layout(tensors, {"format": "pt"})
    with open(path, "wb") as file:
        for offset, data in layout.frame([]):
            file.seek(offset)
            file.write(data)
        for payload in layout.payloads:
            file.seek(payload.offset)
            file.write(areas[payload.tensor.key])

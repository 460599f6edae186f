"""A checkpoint of any size, written without holding it in memory, and the model it fits."""

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

_DTYPES = ("float64", "float32", "float16", "bfloat16")  # what `Tensor.normal_` fills
_SHIFT = 4096  # bytes at most from one tensor's random numbers to the next one's


class Stack(nn.Module):
    """A chain of linear layers without bias, all of the same size: ``layers.0.weight`` and so on.

    Even layers map ``width`` features to ``rows``, odd ones back, so that the chain can run.

    Args:
        tensors: number of layers, each with one parameter.
        rows: first dimension of the even layers' weights.
        width: second dimension of the even layers' weights.

    Example:
        >>> from torchlift import bench
        >>> [tuple(p.shape) for p in bench.Stack(3, rows=4, width=2).parameters()]
        [(4, 2), (2, 4), (4, 2)]
    """

    def __init__(self, tensors: int, rows: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, rows, bias=False) if i % 2 == 0 else nn.Linear(rows, width, bias=False)
            for i in range(tensors)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers in turn; ``x`` has the shape ``(..., width)``."""
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
    """Write the checkpoint of a `Stack`, random but reproducible.

    The tensors overlap in one block of random numbers, each a page further than the one before,
    which is mapped from a temporary file: 2 GiB take no more than a few MiB of anonymous memory.

    Args:
        path: file to write; an existing one is replaced.
        nbytes: size of all tensors together, in bytes; rounded down to what the shapes allow.
        tensors: number of tensors.
        dtype: ``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``.
        format: ``"torch-zip"`` (what `torch.save` writes) or ``"safetensors"``.
        seed: of the random numbers.

    Returns:
        ``(tensors, rows, width)``, the arguments of the `Stack` that the file fits.

    Raises:
        ValueError: no such dtype or format, or a size that leaves nothing per tensor.

    Example:
        >>> import os, tempfile, torch
        >>> from torchlift import bench
        >>> path = os.path.join(tempfile.mkdtemp(), "small.pt")
        >>> model = bench.Stack(*bench.make_checkpoint(path, nbytes=1 << 16, tensors=4))
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
    shift = min(_SHIFT, size)  # of small tensors no more is made than they have
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
                # A storage for each, although they overlap: torch.save writes each storage once.
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
    """Write a file without the copies that safetensors.torch.save_file makes of its tensors."""
    layout = safetensors_layout(tensors, {"format": "pt"})
    with open(path, "wb") as file:
        for offset, data in layout.frame([]):
            file.seek(offset)
            file.write(data)
        for payload in layout.payloads:
            file.seek(payload.offset)
            file.write(areas[payload.tensor.key])

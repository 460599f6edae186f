"""A checkpoint of any size, written without holding it in memory, and the model it fits."""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn

# safetensors' names of what `Tensor.normal_` can fill.
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_PAGE = mmap.ALLOCATIONGRANULARITY


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

    Every tensor is a window into one block of random numbers, a page further than the one before,
    and is mapped from a temporary file: 2 GiB take no more than a few MiB of anonymous memory.

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
    kind = getattr(torch, dtype, None)
    if kind not in _SAFETENSORS:
        raise ValueError(f"dtype must be a floating-point type such as float32, not {dtype!r}")
    if format not in ("torch-zip", "safetensors"):
        raise ValueError(f'format must be "torch-zip" or "safetensors", not {format!r}')
    numel = nbytes // max(tensors, 1) // kind.itemsize
    if tensors < 1 or numel < 1:
        raise ValueError(f"{nbytes} bytes cannot be divided among {tensors} tensors of {dtype}")
    width = 1 << (math.isqrt(numel).bit_length() - 1)
    rows = numel // width
    with _random_maps(tensors, rows * width, kind, seed) as maps:
        flat = {f"layers.{i}.weight": area for i, area in enumerate(maps)}
        shapes = [(rows, width) if i % 2 == 0 else (width, rows) for i in range(tensors)]
        try:
            if format == "safetensors":
                _write_safetensors(path, flat, shapes, kind)
            else:
                _write_torch(path, flat, shapes, kind)
        except BaseException:
            if os.path.isfile(path):
                os.unlink(path)
            raise
    return tensors, rows, width


@contextmanager
def _random_maps(
    tensors: int, numel: int, dtype: torch.dtype, seed: int
) -> Iterator[list[mmap.mmap]]:
    """One private map per tensor of a temporary file of random numbers."""
    size = numel * dtype.itemsize
    with tempfile.TemporaryFile() as file:
        file.truncate(size + tensors * _PAGE)
        with_all = mmap.mmap(file.fileno(), 0)
        torch.frombuffer(with_all, dtype=dtype).normal_(
            std=0.02, generator=torch.Generator().manual_seed(seed)
        )
        yield [
            mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=i * _PAGE)
            for i in range(tensors)
        ]


def _write_torch(
    path: str | os.PathLike[str],
    maps: Mapping[str, mmap.mmap],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    state = OrderedDict(
        (key, torch.frombuffer(area, dtype=dtype).view(shape))
        for (key, area), shape in zip(maps.items(), shapes, strict=True)
    )
    torch.save(state, path)


def _write_safetensors(
    path: str | os.PathLike[str],
    maps: Mapping[str, mmap.mmap],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    # By hand, because safetensors.torch.save_file copies every tensor to bytes first.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for (key, area), shape in zip(maps.items(), shapes, strict=True):
        offsets = [end, end + len(area)]
        header[key] = {"dtype": _SAFETENSORS[dtype], "shape": shape, "data_offsets": offsets}
        end += len(area)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for area in maps.values():
            file.write(cast("bytes", area))

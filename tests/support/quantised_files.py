"""A linear layer in float8, with a scale for each block of 128 rows and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

F8 = torch.float8_e4m3fn


def write_fp8(path: Path, prefix: str, **others: torch.Tensor) -> torch.Tensor:
    """Write codes and scales, and others beside them. Return the values that they stand for."""
    codes, scale = (torch.randn(300, 200) * 20).to(F8), torch.rand(3, 2) / 1e4
    names = {f"{prefix}.weight": codes, f"{prefix}.weight_scale_inv": scale}
    save_file({**names, **others}, path)
    return apply_scale(codes, scale)


def apply_scale(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply codes by the scales of their blocks."""
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def scaling(ckpt: Any) -> Any:
    """Return the transform that the guide shows."""

    def transform(key: str, tensor: torch.Tensor) -> torch.Tensor:
        scale = ckpt.get(f"{key}_scale_inv")
        return tensor if scale is None else apply_scale(tensor, scale)

    return transform

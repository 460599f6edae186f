"""`save_consolidated`: `torchlift.save` on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from torchlift._model.ranks import has_group
from torchlift._save.saving import save


def save_consolidated(
    obj: nn.Module | Mapping[str, Any] | Sequence[Any] | torch.Tensor,
    path: str | bytes | os.PathLike[str],
    *,
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
    replicated: Literal["equal", "rank0"] = "equal",
    process_group: torch.distributed.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Save from all ranks with `torchlift.save`, also if the state has plain tensors only.

    Every rank must call this with the same path, in a folder that all ranks see. If it fails on one
    rank, it fails on all, and the old file is unchanged.

    Args:
        obj: A module, a state dict, or another state. See `torchlift.save`.
        path: A file, a folder or a URL. To a URL, several ranks save with ``format="dcp"`` only.
        format: See `torchlift.save`. Default: by suffix.
        metadata: Text for the header of safetensors. The text of the first rank counts.
        replicated: ``"equal"`` or ``"rank0"``. See `torchlift.save`.
        process_group: The ranks that save. Default: all ranks.
        storage_options: Options of a URL. See `torchlift.open`.

    Returns:
        Bytes of tensors that this rank wrote.

    Raises:
        PlacementError, CheckpointError, TypeError, ValueError: See `torchlift.save`.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> from torchlift.distributed import save_consolidated
        >>> folder = tempfile.mkdtemp()
        >>> save_consolidated(torch.nn.Linear(3, 2), os.path.join(folder, "model.safetensors"))
        32
        >>> torchlift.open(os.path.join(folder, "model.safetensors")).entries["weight"].shape
        (2, 3)
    """
    group = process_group or (torch.distributed.group.WORLD if has_group() else None)
    return save(
        obj, path, format=format, metadata=metadata, replicated=replicated, process_group=group,
        storage_options=storage_options,
    ).written  # fmt: skip

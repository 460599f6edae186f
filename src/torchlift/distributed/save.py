"""`save_consolidated`: `torchlift.save` under its name on a mesh."""

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
    """Save from a mesh: `torchlift.save` on all ranks, which returns what this one wrote.

    All ranks call it, also with plain tensors alone, of which each then writes some. See there for
    what the files are like, and what becomes of them on a fault. The folder of the path must be the
    same one on every rank.

    Args:
        obj: a module, a state dict, or whatever else `torchlift.save` saves.
        path: of the file or folder; one that exists is replaced.
        format: see `torchlift.save`; None: the suffix says.
        metadata: text to record in the header of a safetensors file; a torch file has no place.
            Rank 0's is recorded; that of the others may differ, or be None.
        replicated: ``"equal"`` or ``"rank0"``; see `torchlift.save`.
        process_group: the ranks that save, which all call this; by default all.
        storage_options: of a URL, to which several ranks save as DCP; see `torchlift.save`.

    Returns:
        Bytes of tensors that this rank wrote.

    Raises:
        CheckpointError: see `torchlift.save`.
        PlacementError: see `torchlift.save`.
        TypeError: metadata that is not text.
        ValueError: see `torchlift.save`; or metadata for another file than safetensors.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> from torchlift.distributed import save_consolidated
        >>> folder = tempfile.mkdtemp()
        >>> save_consolidated(torch.nn.Linear(3, 2), os.path.join(folder, "model.safetensors"))
        32
        >>> torchlift.open(os.path.join(folder, "model.safetensors")).entries["weight"].shape
        (2, 3)
        >>> save_consolidated(torch.nn.Linear(3, 2), os.path.join(folder, "model.pt"))
        32
        >>> torch.load(os.path.join(folder, "model.pt"), mmap=True)["weight"].shape
        torch.Size([2, 3])
    """
    group = process_group or (torch.distributed.group.WORLD if has_group() else None)
    return save(
        obj, path, format=format, metadata=metadata, replicated=replicated, process_group=group,
        storage_options=storage_options,
    ).written  # fmt: skip

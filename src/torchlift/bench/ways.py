"""The table of ways to load: one entry each. Standard library only."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Way:
    """One way to get a checkpoint's tensors into memory.

    Attributes:
        name: what ``--only`` selects.
        summary: what it does, for a reader.
        function: its name in ``torchlift.bench.loading``; called with a ``Job``, it returns the
            loaded module or state dict, or None where there is nothing to compare.
        formats: formats of `torchlift.formats.Index` that it reads; empty for all.
        needs: modules it imports, before the clock starts.
        reads: whether every byte is in memory afterwards. A mapped checkpoint is read as it is
            used, so its megabytes per second would mean nothing.
        cast: whether floating-point numbers are cast to bfloat16.
        limit: what the machine can do, not a way to load.
    """

    name: str
    summary: str
    function: str
    formats: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("torch",)
    reads: bool = True
    cast: Literal["", "bfloat16"] = ""
    limit: bool = False

    def supports(self, format: str) -> bool:
        """Whether it reads this format and what it needs is installed."""
        return (not self.formats or format in self.formats) and all(
            importlib.util.find_spec(module) for module in self.needs
        )


_TORCH = ("torch-zip", "torch-legacy")
_SAFE = ("safetensors",)
_SAFE_NEEDS = ("torch", "safetensors.torch")

#: In the order of the report; the first one that reads the file is the baseline.
WAYS: tuple[Way, ...] = (
    Way("torch-load", "torch.load", "torch_load", _TORCH),
    Way("safetensors-clone", "load_file + clone", "safetensors_clone", _SAFE, _SAFE_NEEDS),
    Way("safetensors-file", "load_file", "safetensors_file", _SAFE, _SAFE_NEEDS, reads=False),
    Way("torch-build", "build + torch.load + load_state_dict", "torch_build", _TORCH),
    Way("torch-assign", "torch.load + meta + assign", "torch_assign", _TORCH),
    Way("torch-mmap", "torch.load(mmap=True) + meta + assign", "torch_mmap", _TORCH, reads=False),
    Way(
        "safetensors-model",
        "build + load_model",
        "safetensors_model",
        _SAFE,
        _SAFE_NEEDS,
    ),
    Way("torchlift-mmap", 'torchlift.load(source="mmap")', "torchlift_mmap", reads=False),
    Way("torchlift-read", 'torchlift.load(source="read")', "torchlift_read"),
    Way("torchlift-bf16", "torchlift.load(dtype=bfloat16)", "torchlift_bf16", cast="bfloat16"),
    Way("limit-read", "raw read into warm buffers", "limit_read", limit=True),
    Way("limit-copy", "raw copy between warm buffers", "limit_copy", limit=True),
)

"""The ways to load that are compared.

This does not import torch. The functions of the ways are in ``loading``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way to get a checkpoint's tensors into memory.

    Attributes:
        name: The name that ``--only`` selects.
        summary: A description for the table.
        function: The name of a function in ``torchlift.bench.loading`` that takes a ``Job`` and
            returns the loaded module or state dict. Or your own function, which takes the ``Job``
            before the clock starts and returns the call to time.
        formats: Values of ``Index.format`` that it reads. Empty: all.
        package: A package that only this way needs.
        reads: Whether every byte is in memory afterwards. A mapped checkpoint is read when it is
            used, so a rate would be wrong.
    """

    name: str
    summary: str
    function: str | Callable[[Any], Callable[[], Any]]
    formats: tuple[str, ...] = ()
    package: str = ""
    reads: bool = True

    def obstacle(self, format: str, device: str = "cpu", cast: str = "") -> str:
        """Return the reason why it cannot take part, or an empty text."""
        if self.formats and format not in self.formats:
            return f"it reads {' or '.join(self.formats)}"
        if self.package and find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        if (cast or not device.startswith("cpu")) and not self.reads:
            return "it maps the file, so it cannot cast or load to another device"
        return ""


_TORCH = ("torch-zip", "torch-legacy", "sharded-torch")
_SAFE = ("safetensors", "sharded")

#: In the order of the report. The others are compared with the first way that reads the file.
WAYS: tuple[Way, ...] = (
    Way("torch-load", "torch.load", "torch_load", _TORCH),
    Way("torch-dcp", "torch.distributed.checkpoint.load", "torch_dcp", ("dcp",)),
    Way("safetensors-clone", "safetensors load_file + clone", "safetensors_clone", _SAFE, _SAFE[0]),
    Way("safetensors-file", "safetensors load_file", "safetensors_file", _SAFE, _SAFE[0],
        reads=False),
    Way("torch-build", "build + torch.load + load_state_dict", "torch_build", _TORCH),
    Way("torch-assign", "torch.load + meta + assign", "torch_assign", _TORCH),
    Way("torch-mmap", "torch.load(mmap=True) + meta + assign", "torch_mmap", _TORCH, reads=False),
    Way("torch-mmap-clone", "torch.load(mmap=True) + clone", "torch_mmap_clone", _TORCH[:1]),
    Way("torchlift-mmap", 'torchlift.load(source="mmap")', "torchlift_mmap", reads=False),
    Way("torchlift-read", 'torchlift.load(source="read")', "torchlift_read"),
)  # fmt: skip

"""The ways to load that are compared, and the limits of the machine that they are held against.

This does not import torch: what a way does is in ``loading``, a limit in ``machine``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal


@dataclass(frozen=True)
class Way:
    """One way to get a checkpoint's tensors into memory.

    Attributes:
        name: what ``--only`` selects.
        summary: what it does, for a reader.
        function: its name in ``torchlift.bench.loading``; called with a ``Job``, it returns the
            loaded module or state dict, or None where there is nothing to compare. Of a limit of
            the machine, its name in ``torchlift.bench.machine``.
        formats: values of ``Index.format`` that it reads; empty for all.
        package: a package that it needs and torchlift does not.
        reads: whether every byte is in memory afterwards. A mapped checkpoint is read as it is
            used, so its megabytes per second would mean nothing.
        cast: ``"bfloat16"`` where floating-point numbers are cast to it.
        peer: whether it is another library's, which is compared where it is asked for.
        needs: ``"cuda"`` where it loads to such devices only, ``"device"`` for any but the CPU.
    """

    name: str
    summary: str
    function: str
    formats: tuple[str, ...] = ()
    package: str = ""
    reads: bool = True
    cast: Literal["", "bfloat16"] = ""
    peer: bool = False
    needs: Literal["", "cuda", "device"] = ""

    def supports(self, format: str) -> bool:
        """Return whether it reads this format and what it needs is installed."""
        return not self.obstacle(format)

    def obstacle(self, format: str, device: str = "cpu", cast: str = "") -> str:
        """Return why it cannot take part, or ""."""
        kind = device.partition(":")[0]
        if self.formats and format not in self.formats:
            return f"it reads {' or '.join(self.formats)}"
        if self.package and find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        if self.needs and kind != self.needs and (self.needs == "cuda" or kind == "cpu"):
            return (
                f"it needs a device such as {'cuda' if self.needs == 'cuda' else '--device cuda'}"
            )
        if (cast or kind != "cpu") and (self.cast or (not self.reads and not self.peer)):
            return "it does not cast to this dtype, or not for this device"
        return ""


_TORCH = ("torch-zip", "torch-legacy", "sharded-torch")
_SAFE = ("safetensors", "sharded")
_ALL = (*_TORCH[:1], *_SAFE)

#: In the order of the report; the first one that reads the file is the baseline.
WAYS: tuple[Way, ...] = (
    Way("torch-load", "torch.load", "torch_load", _TORCH),
    Way("torch-dcp", "torch.distributed.checkpoint.load", "torch_dcp", ("dcp",)),
    Way("safetensors-clone", "safetensors load_file + clone", "safetensors_clone", _SAFE, _SAFE[0]),
    Way("safetensors-file", "safetensors load_file", "safetensors_file", _SAFE, _SAFE[0],
        reads=False),
    Way("safetensors-pread", 'safetensors load_file, "pread"', "safetensors_pread", _SAFE,
        _SAFE[0]),
    Way("torch-build", "build + torch.load + load_state_dict", "torch_build", _TORCH),
    Way("torch-assign", "torch.load + meta + assign", "torch_assign", _TORCH),
    Way("torch-mmap", "torch.load(mmap=True) + meta + assign", "torch_mmap", _TORCH, reads=False),
    Way("torch-mmap-clone", "torch.load(mmap=True) + clone", "torch_mmap_clone", _TORCH[:1]),
    Way("safetensors-model", "build + safetensors load_model", "safetensors_model", _SAFE,
        _SAFE[0]),
    Way("torchlift-mmap", 'torchlift.load(source="mmap")', "torchlift_mmap", reads=False),
    Way("torchlift-read", 'torchlift.load(source="read")', "torchlift_read"),
    Way("torchlift-bf16", "torchlift.load(dtype=bfloat16)", "torchlift_bf16", cast="bfloat16"),
    Way("accelerate", "accelerate load_checkpoint_in_model", "accelerate_model", _ALL, "accelerate",
        reads=False, peer=True),
    Way("transformers", "transformers from_pretrained", "transformers_model", _SAFE, "transformers",
        reads=False, peer=True),
    Way("runai", "Run:ai model streamer + clone", "runai", _SAFE, "runai_model_streamer",
        peer=True),
    Way("fastsafetensors", "fastsafetensors fastsafe_open", "fastsafetensors", _SAFE,
        "fastsafetensors", peer=True),
    Way("instanttensor", "InstantTensor safe_open", "instanttensor", _SAFE, "instanttensor",
        peer=True, needs="cuda"),
    Way("tensorizer", "tensorizer, a file of its own", "tensorizer", (), "tensorizer",
        peer=True),
    Way("limit-read", "raw read into warm buffers", "limit_read"),
    Way("limit-plain", "plain reader into new memory", "limit_plain"),
    Way("limit-copy", "raw copy between warm buffers", "limit_copy"),
    Way("limit-pinned", "copy of pinned memory", "limit_pinned", needs="device"),
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What all runs of a comparison have in common.

    Attributes:
        path: the checkpoint, as the user named it.
        root: container to load from, or None.
        files: the files that hold the tensors.
        nbytes: bytes of unique storage.
        scratch: a folder for what a library wants beside the file, or in a format of its own.
        cold: whether the files' pages are to be dropped from the page cache.
        device: where the tensors are loaded to.
        cast: dtype that floating-point numbers are cast to, or "".
    """

    path: str
    root: str | None
    files: tuple[str, ...]
    nbytes: int
    scratch: str = ""
    cold: bool = False
    device: str = "cpu"
    cast: str = ""

"""The child's side of a comparison: build the model, load it in one way, digest what was loaded."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint import open as open_checkpoint
from torchlift._load import load
from torchlift._skeleton import skeleton
from torchlift._system import leaves
from torchlift.formats import TensorEntry

State = nn.Module | Mapping[str, torch.Tensor]

_SAMPLES = 8  # elements per tensor that a checksum looks at: one page each of a mapped tensor
_READ = 8 << 20  # bytes per read of the reading limit
_AREA = 256 << 20  # bytes per buffer of the copying limit: far above any cache


class Tree(nn.Module):
    """Modules nested as the keys are, with a parameter or buffer per entry, initialised.

    A stand-in for the model of a file that came without its code. Matrices get the initialisation
    that `torch.nn.Linear` gives its weight, because that is most of what building a model costs.
    """

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        super().__init__()
        for entry in entries:
            *path, name = entry.key.split(".")
            owner: nn.Module = self
            for part in path:
                # Not add_module: it refuses names that nn.Module has for itself, such as "type".
                owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            dtype = getattr(torch, entry.dtype)
            tensor = torch.empty(entry.shape, dtype=dtype)
            if not dtype.is_floating_point:
                owner._buffers[name] = tensor.zero_()
                continue
            if len(entry.shape) >= 2 and entry.numel and entry.itemsize >= 2:
                nn.init.kaiming_uniform_(tensor, a=5**0.5)
            else:
                tensor.zero_()
            owner._parameters[name] = nn.Parameter(tensor)


class Job:
    """What one child has to load.

    Attributes:
        path: the checkpoint, as the user named it.
        root: container to load from, or None.
        entries: the tensors to load.
        has_objects: whether there are leaves that are not tensors.
        files: the files that hold the tensors.
        nbytes: bytes of unique storage.
        buffers: memory for the limits, filled in by `prepare`.
    """

    def __init__(self, path: str, root: str | None) -> None:
        self.path = path
        self.root = root
        with open_checkpoint(path, root=root) as ckpt:
            self.entries = list(ckpt.entries.values())
            self.has_objects = bool(ckpt.objects)
            self.nbytes = ckpt.nbytes
        self.files = sorted({chunk.file for entry in self.entries for chunk in entry.chunks})
        self.buffers: list[bytearray] = []

    def build(self) -> Tree:
        """Build the model; on meta inside ``with torch.device("meta")``."""
        return Tree(self.entries)

    def select(self, loaded: Any) -> dict[str, torch.Tensor]:
        """Return the tensors under the root of what `torch.load` returned, containers flattened."""
        start = "" if self.root is None else f"{self.root}."
        flat = {".".join(map(str, path)): leaf for path, leaf in leaves(loaded).items()}
        return {
            key.removeprefix(start): leaf
            for key, leaf in flat.items()
            if key.startswith(start) and isinstance(leaf, torch.Tensor)
        }


def prepare(path: str, root: str | None, function: str, package: str, cold: bool) -> Job:
    """Do everything that is not part of loading: imports, the model's shapes, a cold cache.

    Args:
        path: the checkpoint.
        root: container to load from, or None.
        function: name of the way's function in this module.
        package: the package that it needs, or "".
        cold: drop the files' pages from the page cache.

    Returns:
        the job for the way's function.
    """
    if package:
        importlib.import_module(f"{package}.torch")
    job = Job(path, root)
    # The limits use memory whose pages exist already.
    if function == "limit_copy":
        size = min(_AREA, max(job.nbytes, 1))
        job.buffers = [bytearray(b"\1") * size for _ in range(2)]
    elif function == "limit_read":
        job.buffers = [bytearray(b"\1") * _READ for _ in range(os.cpu_count() or 1)]
    # Importing torch leaves a full garbage collection due: 50 ms that would fall on whichever way
    # allocates the next few hundred objects, which is several times what mapping a file takes.
    gc.collect()
    if cold:
        drop_pages(job.files)
    return job


def drop_pages(files: Sequence[str]) -> None:
    """Ask the kernel to forget the files' cached pages.

    Raises:
        OSError: the operating system has no way to do it.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this operating system cannot drop a file's pages; leave out --cold")
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def torch_load(job: Job, mmap: bool = False) -> dict[str, torch.Tensor]:
    """Load all tensors, nothing else."""
    return job.select(torch.load(job.path, map_location="cpu", weights_only=True, mmap=mmap))


def torch_build(job: Job) -> State:
    """Load as most code does: a model with random weights, a dict, a copy between the two."""
    model = job.build()
    model.load_state_dict(torch_load(job))
    return model


def torch_assign(job: Job, mmap: bool = False) -> State:
    """Make the dict's tensors those of the model: no random weights and no copy."""
    with torch.device("meta"):
        model = job.build()
    model.load_state_dict(torch_load(job, mmap), assign=True)
    return model


#: Makes views of the mapped file the tensors of the model: nothing is read or copied.
torch_mmap = partial(torch_assign, mmap=True)


def safetensors_clone(job: Job) -> State:
    """Load all tensors into memory that the process owns, as `torch.load` does."""
    return {key: tensor.clone() for key, tensor in safetensors_file(job).items()}


def safetensors_file(job: Job) -> dict[str, torch.Tensor]:
    """Map all tensors: they are views of the file (safetensors 0.8 on Linux)."""
    from safetensors.torch import load_file

    return load_file(job.path)


def safetensors_model(job: Job) -> State:
    """Build a model with random weights, and copy into it."""
    from safetensors.torch import load_model

    model = job.build()
    load_model(model, job.path)
    return model


def _torchlift(job: Job, **options: Any) -> State:
    """Load a skeleton."""
    model = skeleton(job.build)
    # What is no tensor (a step, a learning rate) has no place in the model made up from the file.
    strict = not job.has_objects
    load(model, job.path, root=job.root, strict=strict, **options)
    return model


#: The skeleton's tensors are views of the mapped file.
torchlift_mmap = partial(_torchlift, source="mmap")
#: Every byte is read into memory that the process owns.
torchlift_read = partial(_torchlift, source="read")
#: Every tensor is cast on the way.
torchlift_bf16 = partial(_torchlift, dtype=torch.bfloat16)


def limit_read(job: Job) -> None:
    """Read the files with one thread per CPU into small buffers whose pages exist already."""
    for name in job.files:
        with open(name, "rb", buffering=0) as file, ThreadPoolExecutor(len(job.buffers)) as pool:
            read = partial(os.preadv, file.fileno())
            buffers = ([buffer] for buffer in cycle(job.buffers))
            list(pool.map(read, buffers, range(0, os.path.getsize(name), _READ)))


def limit_copy(job: Job) -> None:
    """Copy as many bytes between two buffers that no cache holds, with torch's threads."""
    source, destination = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in job.buffers)
    left = job.nbytes
    while left > 0:
        size = min(left, source.numel())
        destination[:size].copy_(source[:size])
        left -= size


def digest(state: State | None) -> dict[str, str]:
    """Return a checksum of a few elements of every tensor, as they are and as cast to bfloat16.

    Returns:
        ``exact`` and ``bfloat16``: equal for two states that hold the same values under the same
        names; empty where there is nothing to compare.
    """
    if state is None:
        return {}
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    exact, cast = [], []
    for key in sorted(tensors):
        tensor = tensors[key].detach()
        picked = _pick(tensor)
        exact.append((key, tensor.shape, tensor.dtype, picked.view(torch.uint8).tolist()))
        if picked.is_floating_point():
            picked = picked.to(torch.bfloat16)
        cast.append((key, tensor.shape, picked.view(torch.uint8).tolist()))
    sums = {"exact": repr(exact), "bfloat16": repr(cast)}
    return {kind: hashlib.sha256(text.encode()).hexdigest() for kind, text in sums.items()}


def _pick(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements, evenly spaced from the first to the last, and copy no others."""
    count = min(_SAMPLES, tensor.numel())
    places = torch.arange(count) * (tensor.numel() - 1) // max(count - 1, 1)
    return tensor[torch.unravel_index(places, tensor.shape)].flatten()

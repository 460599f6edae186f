"""The child's side of a comparison: build the model, load it one way, sum up what was loaded."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import torchlift
from torchlift.errors import FormatError
from torchlift.formats import Index, TensorEntry, read_index
from torchlift.formats.index import under

State = nn.Module | Mapping[str, torch.Tensor]

_SAMPLES = 8  # elements per tensor that a checksum looks at: one page each of a mapped tensor
_PIECE = 8 << 20  # bytes per read of the limit
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
        index: the checkpoint's index: files and entries.
    """

    def __init__(self, path: str, root: str | None) -> None:
        self.path = path
        self.root = root
        index = read_index(path)
        selected: Index | None = index if root is None else under(index, root)
        if selected is None:
            raise FormatError("there is no such container", file=path, entry=root)
        self.index = selected
        self.buffers: list[torch.Tensor] = []

    def build(self) -> Tree:
        """The model; on meta inside ``with torch.device("meta")``."""
        return Tree(list(self.index.entries.values()))

    def select(self, loaded: Any) -> dict[str, torch.Tensor]:
        """The tensors of what `torch.load` returned, containers flattened, under the root."""
        flat: dict[str, torch.Tensor] = {}
        _flatten(loaded, "", flat)
        start = "" if self.root is None else f"{self.root}."
        return {key[len(start) :]: flat[key] for key in flat if key.startswith(start)}


def _flatten(value: Any, prefix: str, into: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into[prefix] = value
        return
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in pairs:
        if isinstance(item, (torch.Tensor, Mapping, list, tuple)):
            _flatten(item, f"{prefix}.{key}" if prefix else str(key), into)


def prepare(path: str, root: str | None, function: str, needs: Sequence[str], cold: bool) -> Job:
    """Everything that is not part of loading: imports, the model's shapes, a cold cache if wanted.

    Args:
        path: the checkpoint.
        root: container to load from, or None.
        function: name of the way's function in this module.
        needs: modules to import.
        cold: drop the files' pages from the page cache.

    Returns:
        the job for the way's function.
    """
    for module in needs:
        importlib.import_module(module)
    if function.startswith("torchlift"):
        _ = torchlift.load, torchlift.skeleton  # imported lazily, like everything in the package
    job = Job(path, root)
    if function == "limit_copy":
        size = min(_AREA, max(job.index.nbytes, 1))
        job.buffers = [torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)]
    elif function == "limit_read":
        job.buffers = [torch.zeros(_PIECE, dtype=torch.uint8) for _ in range(os.cpu_count() or 1)]
    # Importing torch leaves a full garbage collection due: 50 ms that would fall on whichever way
    # allocates the next few hundred objects, which is several times what mapping a file takes.
    gc.collect()
    if cold:
        drop_pages(list(job.index.files))
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


def torch_load(job: Job) -> State:
    """All tensors, nothing else."""
    return job.select(torch.load(job.path, map_location="cpu", weights_only=True))


def torch_build(job: Job) -> State:
    """The way of most code: a model with random weights, a dict, and a copy between the two."""
    model = job.build()
    model.load_state_dict(torch_load(job))  # type: ignore[arg-type]
    return model


def torch_assign(job: Job) -> State:
    """No random weights and no copy: the dict's tensors become the model's."""
    with torch.device("meta"):
        model = job.build()
    model.load_state_dict(torch_load(job), assign=True)  # type: ignore[arg-type]
    return model


def torch_mmap(job: Job) -> State:
    """Neither reads nor copies: the tensors are views of the mapped file."""
    with torch.device("meta"):
        model = job.build()
    loaded = torch.load(job.path, map_location="cpu", weights_only=True, mmap=True)
    model.load_state_dict(job.select(loaded), assign=True)
    return model


def safetensors_clone(job: Job) -> State:
    """All tensors in memory that the process owns, as `torch.load` leaves them."""
    return {key: tensor.clone() for key, tensor in safetensors_file(job).items()}


def safetensors_file(job: Job) -> dict[str, torch.Tensor]:
    """All tensors, as views of the mapped file (safetensors 0.8 on Linux)."""
    from safetensors.torch import load_file

    return load_file(job.path)


def safetensors_model(job: Job) -> State:
    """A model with random weights, and a copy into it."""
    from safetensors.torch import load_model

    model = job.build()
    load_model(model, job.path)
    return model


def torchlift_mmap(job: Job) -> State:
    """A skeleton over the mapped file."""
    return _torchlift(job, source="mmap")


def torchlift_read(job: Job) -> State:
    """A skeleton, and every byte read into memory that the process owns."""
    return _torchlift(job, source="read")


def torchlift_bf16(job: Job) -> State:
    """The same, cast on the way."""
    return _torchlift(job, dtype=torch.bfloat16)


def _torchlift(job: Job, **options: Any) -> State:
    model = torchlift.skeleton(job.build)
    # What is no tensor (a step, a learning rate) has no place in the model made up from the file.
    strict = not job.index.objects
    torchlift.load(model, job.path, root=job.root, strict=strict, **options)
    return model


def limit_read(job: Job) -> None:
    """Read the files with one thread per CPU into small buffers whose pages exist already."""
    for file in job.index.files:
        pieces = iter(range(0, os.path.getsize(file), _PIECE))
        descriptor = os.open(file, os.O_RDONLY)

        def work(buffer: torch.Tensor, fd: int = descriptor, todo: Any = pieces) -> None:
            view = memoryview((ctypes.c_char * _PIECE).from_address(buffer.data_ptr()))
            for offset in todo:
                os.preadv(fd, [view], offset)

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in job.buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)


def limit_copy(job: Job) -> None:
    """Copy as many bytes between two buffers that no cache holds, with torch's threads."""
    source, destination = job.buffers
    left = job.index.nbytes
    while left > 0:
        size = min(left, source.numel())
        destination[:size].copy_(source[:size])
        left -= size


def digest(state: State | None) -> dict[str, str]:
    """A checksum over a few elements of every tensor, as they are and as cast to bfloat16.

    Returns:
        ``exact`` and ``bfloat16``: equal for two states that hold the same values under the same
        names; empty where there is nothing to sum up.
    """
    if state is None:
        return {}
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    exact, cast = hashlib.sha256(), hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach()
        for total in (exact, cast):
            total.update(repr((key, tuple(tensor.shape))).encode())
        picked = _pick(tensor)
        exact.update(repr((tensor.dtype, picked.view(torch.uint8).tolist())).encode())
        if picked.is_floating_point():
            picked = picked.to(torch.bfloat16)
        cast.update(repr(picked.view(torch.uint8).tolist()).encode())
    return {"exact": exact.hexdigest(), "bfloat16": cast.hexdigest()}


def _pick(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements, evenly spaced from the first to the last, without copying the tensor."""
    numel = tensor.numel()
    count = min(_SAMPLES, numel)
    places = [i * (numel - 1) // max(count - 1, 1) for i in range(count)]
    picked = []
    for place in places:
        index = []
        for size in reversed(tensor.shape):
            place, at = divmod(place, size)
            index.append(at)
        picked.append(tensor[tuple(reversed(index))])
    return torch.stack(picked) if picked else torch.empty(0, dtype=torch.uint8)

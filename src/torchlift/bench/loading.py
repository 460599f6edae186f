"""The child's side of a comparison: build the model, load it in one way, digest what was loaded."""

from __future__ import annotations

import gc
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._load.loading import load
from torchlift._skeleton.construction import skeleton
from torchlift._system.containers import leaves
from torchlift.formats.index import TensorEntry

if TYPE_CHECKING:
    from torchlift.bench.ways import Task, Way

State = nn.Module | Mapping[str, torch.Tensor]

_SAMPLES = 8  # elements per tensor that a checksum looks at: one page each of a mapped tensor


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
        ties: further names of these tensors, which safetensors files note but do not store.
        has_objects: whether there are leaves that are not tensors.
        files: the files that hold the tensors.
        nbytes: bytes of unique storage.
        device: where the tensors are loaded to.
        dtype: what floating-point numbers are cast to, or None.
        scratch: a folder for files that a way needs in addition to the checkpoint.
    """

    def __init__(self, task: Task) -> None:
        self.path, self.root, self.nbytes = task.path, task.root, task.nbytes
        # fastsafetensors and InstantTensor refuse "cuda" without a number.
        self.device, self.scratch = torch.empty(0, device=task.device).device, task.scratch
        self.dtype: torch.dtype | None = getattr(torch, task.cast) if task.cast else None
        with open_checkpoint(task.path, root=task.root) as ckpt:
            # A safetensors file stores tied names once, so other libraries see one of them.
            stores_once = ckpt.format in ("safetensors", "sharded")
            self.ties = [key for tie in ckpt.aliases for key in tie[1:] if stores_once]
            self.entries = [one for key, one in ckpt.entries.items() if key not in self.ties]
            self.has_objects = bool(ckpt.objects)
        self.files = sorted({chunk.file for entry in self.entries for chunk in entry.chunks})

    def build(self) -> Tree:
        """Build the model as it will be; on meta inside ``with torch.device("meta")``."""
        return Tree(self.entries).to(self.dtype)

    def build_on_meta(self) -> Tree:
        """Build the model without memory."""
        with torch.device("meta"):
            return self.build()

    def place(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
        """Return the tensor in the dtype and on the device that were asked for."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None, copy=copy)

    def select(self, loaded: Any) -> dict[str, torch.Tensor]:
        """Return the tensors under the root of what `torch.load` returned, containers flattened."""
        start = "" if self.root is None else f"{self.root}."
        flat = {".".join(map(str, path)): leaf for path, leaf in leaves(loaded).items()}
        return {
            key.removeprefix(start): leaf
            for key, leaf in flat.items()
            if key.startswith(start) and isinstance(leaf, torch.Tensor)
        }


def prepare(way: Way, job: Job) -> Callable[[], State | None]:
    """Do everything that is not part of loading; return the call that is.

    That is imports, the model's shapes and the start of the device.
    """
    if way.package:
        importlib.import_module(_IMPORTS.get(way.package, way.package))
    load_it = (
        partial(globals()[way.function], job)
        if isinstance(way.function, str)
        else way.function(job)
    )
    if job.device.type != "cpu":
        torch.ones(1, device=job.device).add_(1)  # starting a device takes a second
        torch.accelerator.synchronize()
    # Importing torch leaves a full garbage collection due: 50 ms that would fall on whichever way
    # allocates the next few hundred objects, which is several times what mapping a file takes.
    gc.collect()
    return partial(_run, load_it, job)


#: What is imported of a package before the clock starts, if not its top.
_IMPORTS = {"safetensors": "safetensors.torch"}


def _run(load_it: Callable[[], State | None], job: Job) -> State | None:
    """Load, and wait for the device."""
    state = load_it()
    if job.device.type != "cpu":
        torch.accelerator.synchronize()
    return state


def _torch_files(job: Job, mmap: bool = False) -> dict[str, torch.Tensor]:
    """Load all tensors of all files, as they are there."""
    found: dict[str, torch.Tensor] = {}
    for path in job.files:
        device = "cpu" if mmap else job.device
        found |= job.select(torch.load(path, map_location=device, weights_only=True, mmap=mmap))
    return found


def torch_load(job: Job) -> dict[str, torch.Tensor]:
    """Load all tensors, nothing else."""
    return {key: job.place(tensor) for key, tensor in _torch_files(job).items()}


def torch_mmap_clone(job: Job) -> dict[str, torch.Tensor]:
    """Map the file, and copy every tensor out of it."""
    return {key: job.place(tensor, copy=True) for key, tensor in _torch_files(job, True).items()}


def torch_build(job: Job) -> State:
    """Load as most code does: a model with random weights, a dict, a copy between the two."""
    with job.device:
        model = job.build()
    model.load_state_dict(_torch_files(job))
    return model


def torch_assign(job: Job) -> State:
    """Make the dict's tensors those of the model: no random weights and no copy."""
    model = job.build_on_meta()
    model.load_state_dict(torch_load(job), assign=True)
    return model


def torch_mmap(job: Job) -> State:
    """Make views of the mapped file the tensors of the model: nothing is read or copied."""
    model = job.build_on_meta()
    model.load_state_dict(_torch_files(job, mmap=True), assign=True)
    return model


def torch_dcp(job: Job) -> State:
    """Read a folder of torch's distributed checkpoints into tensors that are made for it."""
    import torch.distributed.checkpoint as dcp

    state = {
        entry.key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=job.device)
        for entry in job.entries
    }
    dcp.load(state, checkpoint_id=job.path, no_dist=True)  # type: ignore[attr-defined]
    return {key: job.place(tensor) for key, tensor in state.items()}


def _safetensors_files(job: Job, backend: str = "mmap") -> dict[str, torch.Tensor]:
    """Load all tensors of all files."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in job.files:
        found |= load_file(path, device=str(job.device), backend=backend)
    return found


#: Maps all tensors: they are views of the file (safetensors 0.8 on Linux).
safetensors_file = _safetensors_files


def safetensors_clone(job: Job) -> State:
    """Load all tensors into memory that the process owns, as `torch.load` does."""
    mapped = job.device.type == "cpu"
    return {key: job.place(tensor, mapped) for key, tensor in _safetensors_files(job).items()}


def safetensors_pread(job: Job) -> State:
    """Read every tensor by a call of its own."""
    return {key: job.place(tensor) for key, tensor in _safetensors_files(job, "pread").items()}


def safetensors_model(job: Job) -> State:
    """Build a model with random weights, and copy into it."""
    with job.device:
        model = job.build()
    model.load_state_dict(_safetensors_files(job))  # what load_model does, of all files
    return model


def _torchlift(job: Job, **options: Any) -> State:
    """Load a skeleton."""
    model = skeleton(Tree, job.entries)
    # What is no tensor (a step, a learning rate) has no place in the model made up from the file.
    options = {"dtype": job.dtype, "device": job.device, **options}
    strict = not job.has_objects
    load(model, job.path, root=job.root, strict=strict, allow_unexpected=job.ties, **options)
    return model


#: The skeleton's tensors are views of the mapped file.
torchlift_mmap = partial(_torchlift, source="mmap")
#: Every byte is read into memory that the process owns.
torchlift_read = partial(_torchlift, source="read")
#: Every tensor is cast on the way.
torchlift_bf16 = partial(_torchlift, dtype=torch.bfloat16)


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

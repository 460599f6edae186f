"""The child's side of a comparison: build the model, load it in one way, digest the values."""

from __future__ import annotations

import gc
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._load.loading import load
from torchlift._skeleton.construction import skeleton
from torchlift._system.containers import leaves
from torchlift.formats.index import TensorEntry

if TYPE_CHECKING:
    from torchlift.bench.ways import Way

State = nn.Module | Mapping[str, torch.Tensor]

_SAMPLES = 8  # elements of a tensor in a checksum: one page each of a mapped tensor


class Tree(nn.Module):
    """Modules nested like the keys, with an initialised parameter or buffer for each entry.

    It stands in for a model whose code is not known. Matrices are initialised as the weight of
    `torch.nn.Linear` is, because that is most of the time of building a model.
    """

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        super().__init__()
        for entry in entries:
            *path, name = entry.key.split(".")
            owner: nn.Module = self
            for part in path:
                # Not add_module: it refuses names of attributes of nn.Module, such as "type".
                owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            dtype = getattr(torch, entry.dtype)
            tensor = torch.empty(entry.shape, dtype=dtype)
            is_parameter = dtype.is_floating_point
            one: Any = nn.Parameter(tensor) if is_parameter else tensor
            registered: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
            if hasattr(owner, name):  # torch refuses to register it
                registered[name] = one
            elif is_parameter:
                owner.register_parameter(name, one)
            else:
                owner.register_buffer(name, one)
            # Once it is registered, as modules do it: in a skeleton it is on meta then.
            if is_parameter and len(entry.shape) >= 2 and entry.numel and entry.itemsize >= 2:
                nn.init.kaiming_uniform_(one, a=5**0.5)
            else:
                nn.init.zeros_(one)


class Job:
    """The load of one child process.

    Attributes:
        path: Path of the checkpoint.
        root: Container to load, or None.
        entries: The tensors to load.
        ties: Other names of these tensors, which safetensors files note but do not store.
        has_objects: Whether the checkpoint contains values that are not tensors.
        files: Files of the tensors.
        nbytes: Bytes of unique storage.
        device: Device to load to.
        dtype: Dtype of floating-point tensors, or None.
    """

    def __init__(
        self, path: str, root: str | None = None, device: str = "cpu", cast: str = ""
    ) -> None:
        self.path, self.root = path, root
        # fastsafetensors and InstantTensor refuse "cuda" without a number.
        self.device = torch.empty(0, device=device).device
        self.dtype: torch.dtype | None = getattr(torch, cast) if cast else None
        with open_checkpoint(path, root=root) as ckpt:
            self.nbytes = ckpt.nbytes
            # A safetensors file stores tied names once, so other libraries see one of them.
            stores_once = ckpt.format in ("safetensors", "sharded")
            self.ties = [key for tie in ckpt.aliases for key in tie[1:] if stores_once]
            self.entries = [one for key, one in ckpt.entries.items() if key not in self.ties]
            self.has_objects = bool(ckpt.objects)
        self.files = sorted({chunk.file for entry in self.entries for chunk in entry.chunks})

    def build(self) -> Tree:
        """Build the model. It is on meta inside ``with torch.device("meta")``."""
        return Tree(self.entries).to(self.dtype)

    def build_on_meta(self) -> Tree:
        """Build the model on meta."""
        with torch.device("meta"):
            return self.build()

    def place(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
        """Move a tensor to the dtype and the device of the job."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None, copy=copy)

    def select(self, loaded: Any) -> dict[str, torch.Tensor]:
        """Flatten the result of `torch.load` and return the tensors below the root."""
        start = "" if self.root is None else f"{self.root}."
        flat = {".".join(map(str, path)): leaf for path, leaf in leaves(loaded).items()}
        return {
            key.removeprefix(start): leaf
            for key, leaf in flat.items()
            if key.startswith(start) and isinstance(leaf, torch.Tensor)
        }


def prepare(way: Way, job: Job) -> Callable[[], State | None]:
    """Prepare a load (imports, shapes, start of the device) and return the call to time."""
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
    # After its import, torch leaves a full garbage collection due. It takes 50 ms, several times as
    # long as to map a file, and would count for the first way that allocates objects.
    gc.collect()
    return partial(_run, load_it, job)


#: Package -> module to import before the clock starts, if it is not the package.
_IMPORTS = {"safetensors": "safetensors.torch"}


def _run(load_it: Callable[[], State | None], job: Job) -> State | None:
    """Load and wait for the device."""
    state = load_it()
    if job.device.type != "cpu":
        torch.accelerator.synchronize()
    return state


def _torch_files(job: Job, mmap: bool = False) -> dict[str, torch.Tensor]:
    """Load all tensors of all torch files."""
    found: dict[str, torch.Tensor] = {}
    for path in job.files:
        device = "cpu" if mmap else job.device
        found |= job.select(torch.load(path, map_location=device, weights_only=True, mmap=mmap))
    return found


def torch_load(job: Job) -> dict[str, torch.Tensor]:
    """Load all tensors."""
    return {key: job.place(tensor) for key, tensor in _torch_files(job).items()}


def torch_mmap_clone(job: Job) -> dict[str, torch.Tensor]:
    """Map the file and copy every tensor."""
    return {key: job.place(tensor, copy=True) for key, tensor in _torch_files(job, True).items()}


def torch_build(job: Job) -> State:
    """Load as most code does: a model with random weights, a dict, and a copy."""
    with job.device:
        model = job.build()
    model.load_state_dict(_torch_files(job))
    return model


def torch_assign(job: Job) -> State:
    """Assign the tensors of the dict to the model, without random weights or a copy."""
    model = job.build_on_meta()
    model.load_state_dict(torch_load(job), assign=True)
    return model


def torch_mmap(job: Job) -> State:
    """Assign views of the mapped file to the model, without a copy."""
    model = job.build_on_meta()
    model.load_state_dict(_torch_files(job, mmap=True), assign=True)
    return model


def torch_dcp(job: Job) -> State:
    """Read a DCP checkpoint into new tensors."""
    import torch.distributed.checkpoint as dcp

    state = {
        entry.key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=job.device)
        for entry in job.entries
    }
    dcp.load(state, checkpoint_id=job.path, no_dist=True)  # type: ignore[attr-defined]
    return {key: job.place(tensor) for key, tensor in state.items()}


def safetensors_file(job: Job, **options: Any) -> dict[str, torch.Tensor]:
    """Load all tensors of all files, as views of the files (safetensors 0.8 on Linux)."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in job.files:
        found |= load_file(path, device=str(job.device), **options)
    return found


def safetensors_clone(job: Job) -> State:
    """Load all tensors into anonymous memory, as `torch.load` does."""
    mapped = job.device.type == "cpu"
    return {key: job.place(tensor, mapped) for key, tensor in safetensors_file(job).items()}


def _torchlift(job: Job, source: Literal["mmap", "read"]) -> State:
    """Load a skeleton."""
    model = skeleton(Tree, job.entries)
    load(
        model,
        job.path,
        root=job.root,
        dtype=job.dtype,
        device=job.device,
        source=source,
        # Plain data (a step, a learning rate) does not belong to the model.
        strict=not job.has_objects,
        allow_unexpected=job.ties,
    )
    return model


#: Views of the mapped file.
torchlift_mmap = partial(_torchlift, source="mmap")
#: Reads every byte into anonymous memory.
torchlift_read = partial(_torchlift, source="read")


def digest(state: State | None) -> str:
    """Return a checksum of a few elements of every tensor, or an empty text without a state.

    It is equal for two states with the same names, shapes, dtypes and values.
    """
    if state is None:
        return ""
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    found = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach()
        row = key, tensor.shape, tensor.dtype, _pick(tensor).view(torch.uint8).tolist()
        found.update(repr(row).encode())
    return found.hexdigest()


def _pick(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a few elements, evenly spaced from the first to the last."""
    count = min(_SAMPLES, tensor.numel())
    places = torch.arange(count) * (tensor.numel() - 1) // max(count - 1, 1)
    return tensor[torch.unravel_index(places, tensor.shape)].flatten()

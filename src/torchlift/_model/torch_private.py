"""Private names of torch. Each is in this file alone and has a test with its name.

If torch could change one without an error, the code that uses it checks that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch._utils import _rebuild_qtensor as REBUILD_QUANTIZED
from torch._utils import _rebuild_sparse_tensor as REBUILD_SPARSE
from torch._utils import _rebuild_tensor_v2 as REBUILD_V2
from torch._utils import _rebuild_tensor_v3 as REBUILD_V3
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

__all__ = [
    "REBUILD_QUANTIZED", "REBUILD_SPARSE", "REBUILD_V2", "REBUILD_V3", "IncompatibleKeys",
    "NormBase",
]  # fmt: skip

LAZY: type = UninitializedTensorMixin
LAZY_HOOK: Any = LazyModuleMixin._lazy_load_hook
#: The ``__torch_function__`` of a class that asks for none.
DISABLED: Any = torch._C._disabled_torch_function_impl
#: A recurrent layer's weak references to its own weights: their list, and the weights.
FLAT_REFERENCES, FLAT_WEIGHTS = "_flat_weight_refs", "_flat_weights"
#: Children in which torch.compile, activation checkpointing and FullyShardedDataParallel hold the
#: module that they wrap.
COMPILED, CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
FULLY_SHARDED = "_fsdp_wrapped_module"
#: Attribute that FullyShardedDataParallel gives to its parameters, flat ones and their views.
FLATTENED = "_fsdp_flattened"


#: Exchanges what two tensor objects stand for; see `torch.utils.swap_tensors`.
swap_content: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
#: Makes torch raise if somebody asks for the address of a tensor's memory.
forbid_address: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
#: What tells a storage from others. In C, because a skeleton needs it for each tensor.
key_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def make_wrapper(
    kind: type, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, grad: bool
) -> torch.Tensor:
    """Return a tensor of a wrapper class without memory of its own, on the CPU."""
    cpu = torch.device("cpu")
    make: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
    return make(kind, shape, strides=stride, dtype=dtype, device=cpu, requires_grad=grad)


def strict_of_caller() -> bool:
    """Return the `strict` of the ``nn.Module.load_state_dict`` that is being called.

    Only its frame tells: it hands True to `_load_from_state_dict` in any case.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    # The safe side without one: names that do not match are an error.
    return True if frame is None else bool(frame.f_locals["strict"])


#: Tells how many hold a tensor's content, in C++.
use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")


def hollow_storage(nbytes: int) -> Any:
    """Return a storage without memory, which a pickle says to be on the CPU."""
    made: Any = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
    made._fake_device = (
        "cpu"  # not a device, of which each pickled one would have a text of its own
    )
    return made


def typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    """Return a `hollow_storage` that is pickled as one of a dtype."""
    make: Any = torch.storage.TypedStorage
    made = make(wrap_storage=storage, dtype=dtype, _internal=True)
    made._fake_device = storage._fake_device
    return made


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key for the tensor's storage.

    Raises:
        NotImplementedError, RuntimeError, ValueError: If it has none (sparse, lazy, a wrapper).
    """
    return key_of(tensor.untyped_storage())


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return the `storage_key` of a tensor, or None where it has none."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def without_subclasses() -> AbstractContextManager[None]:
    """Keep tensor subclasses from seeing calls inside the block."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_uses(key: int) -> int:
    """Return how many hold the storage with this key."""
    return int(torch._C._storage_Use_Count(key))


#: Layouts of sparse tensors with compressed indices.
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def fits_data(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Say whether ``old.data = new`` is possible."""
    # torch allows it for compressed sparse tensors, but leaves their values as they are.
    return old.layout not in COMPRESSED and torch._has_compatible_shallow_copy_type(old, new)


def make_subclass(kind: Any, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return the tensor as one of the class, over the same memory."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    return made


def local_of(dtensor: Any) -> torch.Tensor:
    """Return a DTensor's local tensor, which autograd does not see."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def dtensor_like(like: Any, local: torch.Tensor, *, grad: bool, parameter: bool) -> Any:
    """Return a DTensor that is laid out as another, over a local tensor of any dtype."""
    from dataclasses import replace

    from torch.distributed.tensor import DTensor

    spec = like._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    # Not DTensor.from_local: it moves a shard that is offloaded to the CPU back to the mesh's
    # device, and it cannot say in which order mesh dimensions shard.
    made: Any = DTensor(local, spec, requires_grad=grad)  # type: ignore[no-untyped-call]
    if parameter:
        made._is_param = True
    return made


def shard_order(dtensor: Any) -> tuple[tuple[int, ...], ...]:
    """Return the mesh dimensions that shard each tensor dimension, in the order they do."""
    # None where its placements (`_StridedShard`) say it themselves.
    entries = getattr(dtensor._spec, "shard_order", None) or ()
    return tuple(tuple(entry.mesh_dims) for entry in entries)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to, or -1 if that is not counted."""
    return -1 if isinstance(tensor, LAZY) or tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often a tensor has been written to: back, where it has the values of that time."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def dcp_item(file: str, offset: int, nbytes: int) -> Any:
    """Return the place of an item, as a distributed checkpoint's metadata has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes)


def timeout_of(group: Any) -> timedelta | None:
    """Return a group's timeout, or None if it is torch's default."""
    from torch.distributed import constants

    options = [getattr(group._get_backend(kind), "options", None) for kind in group._device_types]
    found = [each._timeout for each in options if each is not None]
    defaults = constants.default_pg_timeout, constants.default_pg_nccl_timeout
    return next((each for each in found if each not in defaults), None)


def set_timeout(group: Any, limit: timedelta | None) -> None:
    """Set a group's timeout, or None for torch's default."""
    from torch.distributed import constants, distributed_c10d

    distributed_c10d._set_pg_timeout(limit or constants.default_pg_timeout, group)


def require_fsdp1_state(model: Any, optimizers: Any, state: Any, options: Any) -> None:
    """Check the state for optimizers of a ``FullyShardedDataParallel``, without communication.

    Raises:
        KeyError, RuntimeError, ValueError: If a state dict lacks an entry.
    """
    from torch.distributed.checkpoint import state_dict as own

    info = own._verify_options(model, optimizers, optim_only=True, options=options)
    for optimizer in optimizers:
        if "state" in state:
            own._split_optim_state_dict(model, optimizer, state, info)
        else:
            own._unflatten_optim_state_dict(optimizer, state, info)

"""Copy the state of a training run to host memory, into the memory of the last copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from torchlift._model.dtensor import is_dtensor, local_tensor, wrap
from torchlift._model.handlers import clone_of, has_memory, is_plain
from torchlift._model.slots import is_blank
from torchlift._system.containers import leaves


class Staging:
    """Copies states to host memory. Each copy overwrites the one before."""

    def __init__(self) -> None:
        # Shape, strides and dtype -> tensors with the memory of the last copy.
        self._rooms: dict[object, list[torch.Tensor]] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state. Equal views of one memory, such as tied weights, share their copy.

        Tensors without values stay as they are.

        Args:
            state: Nested containers of tensors, which may be DTensors, and of plain data.
        """
        free, self._rooms = self._rooms, {}
        made: dict[int, torch.Tensor] = {}
        shared: dict[object, torch.Tensor] = {}
        tensors = [leaf for leaf in leaves(state).values() if isinstance(leaf, torch.Tensor)]
        for leaf in tensors:
            if is_blank(leaf):
                made[id(leaf)] = leaf  # for the check of a save: torch's error would not name it
                continue
            local = local_tensor(leaf)
            is_odd = not (is_plain(local) and has_memory(local)) or local.is_quantized
            if is_odd or vars(local):
                copied = clone_of(local, torch.device("cpu"))
                rest = {key: value for key, value in vars(local).items() if key not in vars(copied)}
                vars(copied).update(copy.deepcopy(rest))
            else:
                view = _identity(local)
                if view not in shared:
                    shared[view] = self._copy(local.detach(), free)
                copied = shared[view]
            made[id(leaf)] = wrap(leaf, copied) if is_dtensor(leaf) else copied
        for device in {leaf.device for leaf in tensors if leaf.is_cuda}:
            torch.cuda.synchronize(device)
        return copy.deepcopy(dict(state), made)

    def _copy(self, tensor: torch.Tensor, free: dict[object, list[torch.Tensor]]) -> torch.Tensor:
        # A number that is expanded to a tensor stays one number.
        steps = tensor.stride()
        pairs = zip(tensor.shape, steps, strict=True)
        values = tensor.as_strided(
            [min(size, 1) if step == 0 else size for size, step in pairs], steps
        )
        key = values.shape, steps, tensor.dtype
        if not free.get(key):
            free.clear()  # so that there is never memory for two copies
            pinned = torch.cuda.is_available()
            free[key] = [torch.empty_like(values, device="cpu", pin_memory=pinned)]
        room = free[key].pop()
        self._rooms.setdefault(key, []).append(room)
        return room.copy_(values, non_blocking=values.is_cuda).expand(tensor.shape)

    def close(self) -> None:
        """Free the memory."""
        self._rooms = {}


def _identity(tensor: torch.Tensor) -> object:
    """Return a value that is equal for equal views of one memory."""
    if not tensor.numel():
        return object()  # empty tensors have no address
    kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), kind

"""Copy the tensors of a training run to host memory, into the memory of the last copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchlift._model.dtensor import is_dtensor, local_tensor, wrap
from torchlift._model.handlers import clone_of, is_plain


class Staging:
    """Copies tensors to host memory. Each copy overwrites the one before."""

    def __init__(self) -> None:
        # Shape, strides and dtype -> tensors with the memory of the last copy.
        self._rooms: dict[object, list[torch.Tensor]] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors, which may be DTensors.

        Equal views of one memory, such as tied weights, share their copy.
        """
        free, self._rooms = self._rooms, {}
        made: dict[str, torch.Tensor] = {}
        shared: dict[object, torch.Tensor] = {}
        for name, tensor in tensors.items():
            local = local_tensor(tensor).detach()
            view = _identity(local) if is_plain(local) else object()
            if not is_plain(local):  # a subclass may run code
                shared[view] = clone_of(local, torch.device("cpu"))
            elif view not in shared:
                shared[view] = self._copy(local, free)
            made[name] = wrap(tensor, shared[view]) if is_dtensor(tensor) else shared[view]
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return made

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

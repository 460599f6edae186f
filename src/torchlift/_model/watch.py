"""What a model's own code writes to its tensors: noticed, kept from before, and taken back.

Hooks get the live module, and may write to any tensor of the model through a closure. What they
write to is copied before it is written to for the first time, and nothing else is: the second copy
of a model that a plan would need otherwise is what this library is there to spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchlift._model.dtensor import local_tensor
from torchlift._model.handlers import clone_of, has_memory, inner_tensors, is_wrapper
from torchlift._model.slots import is_lazy
from torchlift._model.torch_private import memory_of, set_version, storage_key
from torchlift._system.containers import leaves

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
#: What is written through these, and what these write, leaves no trace on the tensor.
_UNCOUNTED = frozenset({
    "__array__", "__dlpack__", "batch_norm", "instance_norm", "numpy", "storage", "untyped_storage",
})  # fmt: skip
#: These change nothing, or make what is told by its memory, and are called often.
_LOOKS = frozenset({
    "__getitem__", "__len__", "chunk", "clone", "data_ptr", "detach", "dim", "element_size",
    "empty_like", "expand", "is_complex", "is_contiguous", "is_floating_point", "item", "narrow",
    "new_empty", "new_zeros", "numel", "permute", "requires_grad_", "reshape", "select", "size",
    "split", "storage_offset", "stride", "t", "to", "tolist", "transpose", "unbind", "unsqueeze",
    "view", "zeros_like",
})  # fmt: skip


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to; -1 where that is not counted."""
    return -1 if is_lazy(tensor) or tensor.is_inference() else tensor._version


@dataclass
class _Seen:
    """How a tensor was before it was written to.

    Attributes:
        version: how often it had been written to.
        layout: dtype, shape, strides, offset and whether it is a conjugate.
        view: over its memory, where it has been given another one; otherwise that would be in the
            way of exchanging its content.
    """

    version: int
    layout: tuple[Any, ...]
    view: torch.Tensor | None = None


class _Memory:
    """What tensors of the model share, and which of them do.

    Attributes:
        names: of these tensors.
        tensors: of the model, by their identity.
        before: a copy of the bytes, from before the first write; None: not written to, or on meta.
        seen: identity of a tensor -> how it was then.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.before: torch.Tensor | None = None
        self.seen: dict[int, _Seen] = {}

    def copy(self) -> torch.Tensor | None:
        """Return a copy of what is there now; None on meta."""
        tensor = next(iter(self.tensors.values()))
        if tensor.is_meta or is_lazy(tensor):
            return None
        return clone_of(_bytes(tensor) if has_memory(tensor) else tensor.detach())

    def look(self) -> dict[int, _Seen]:
        """Return how the tensors are now."""
        return {at: _Seen(version_of(t), _layout(t)) for at, t in self.tensors.items()}


class Watch(TorchFunctionMode):
    """Sees calls that get a tensor of the model, in its block, and keeps what may be written to.

    What was written by other means than a call of torch, through a NumPy array that somebody had
    before, is not seen.

    Attributes:
        moment: what is going on; for `written`.
        written: key of a memory -> the moment of the last call that may have written to it.
        counts: key of a memory -> how many such calls there were.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        undo: Callable[..., object],
    ) -> None:
        super().__init__()
        self._undo = undo
        self._memories: dict[int, _Memory] = {}
        self.moment = 0
        self.written: dict[int, int] = {}
        self.counts: Counter[int] = Counter()
        for name, tensor in tensors:
            self.add(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count one more tensor as one of the model."""
        for key, inner in _memories(tensor):
            memory = self._memories.setdefault(key, _Memory())
            memory.tensors[id(inner)] = inner
            memory.names.append(name)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        if name in _LOOKS or (name == "__get__" and func != _DATA):
            return func(*args, **kwargs)
        found = {
            key: self._memories[key]
            for leaf in leaves((args, kwargs)).values()
            if isinstance(leaf, torch.Tensor)
            for key, _ in _memories(leaf)
            if key in self._memories
        }
        if not found:
            return func(*args, **kwargs)
        if func == _DATA or name in _UNCOUNTED:
            self._keep(found)
            return func(*args, **kwargs)
        # Which functions write is not told by their names (`embedding` with ``max_norm``): one that
        # does is counted. A copy of what was only read is let go again.
        new = {key: m.copy() for key, m in found.items() if key not in self.written}
        views = {
            at: t.detach()
            for m in found.values()
            for at, t in m.tensors.items()
            if has_memory(t) and not is_lazy(t)
        }
        seen = {key: m.look() for key, m in found.items()}
        try:
            return func(*args, **kwargs)
        finally:
            for key, memory in found.items():
                now = memory.look()
                if now == seen[key]:
                    continue
                self._keep({key: memory}, new.get(key), seen[key])
                for at, view in views.items():
                    if at in now and now[at].layout != seen[key][at].layout:
                        memory.seen[at].view = memory.seen[at].view or view

    def _keep(
        self,
        found: Mapping[int, _Memory],
        before: torch.Tensor | None = None,
        seen: dict[int, _Seen] | None = None,
    ) -> None:
        """Note that something may be written, and what was there."""
        for key, memory in found.items():
            if key not in self.written:
                memory.before = memory.copy() if seen is None else before
                memory.seen = memory.look() if seen is None else seen
                self._undo(partial(_restore, memory), *memory.names)
            self.written[key] = self.moment
            self.counts[key] += 1

    def count_of(self, tensor: torch.Tensor) -> int:
        """Return how many calls may have written to a tensor."""
        return sum(self.counts[key] for key, _ in _memories(tensor))

    def moment_of(self, tensor: torch.Tensor) -> int | None:
        """Return when a tensor was last written to, or None."""
        return max(
            (self.written[key] for key, _ in _memories(tensor) if key in self.written), default=None
        )

    def is_other(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the model has other values than before."""
        for key, inner in _memories(tensor):
            memory = self._memories.get(key)
            if memory is None or memory.before is None:
                continue
            if not torch.equal(_raw(_then(memory, inner)), _raw(inner)):
                return True
        return False

    def put_back(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the values that a tensor of the model had before into one that took its place."""
        for (key, inner), (_, other) in zip(_memories(tensor), _memories(into), strict=True):
            memory = self._memories.get(key)
            if memory is not None and memory.before is not None:
                inner = _then(memory, inner)
            if inner is not other and inner.shape == other.shape:
                other.copy_(inner)


def _memories(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return what tells the memories of a tensor from others, with the tensors that have them."""
    tensor = local_tensor(tensor)
    if is_wrapper(tensor):
        return [pair for inner in inner_tensors(tensor) for pair in _memories(inner)]
    key = memory_of(tensor)
    return [(-id(tensor) if key is None else key, tensor)]  # sparse ones have several


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of the memory that a tensor looks into."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if is_lazy(tensor) or not has_memory(tensor):
        return ()
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    return tensor.dtype, shape, stride, offset, tensor.is_conj(), storage_key(tensor)


def _then(memory: _Memory, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the model as it was before the first write."""
    before, layout = memory.before, memory.seen[id(tensor)].layout
    assert before is not None
    if not layout:
        return before
    dtype, shape, stride, offset, conjugate, _ = layout
    flat = torch.empty(0, dtype=dtype, device=before.device)
    made = flat.set_(before.untyped_storage(), offset, shape, stride)
    return made.conj() if conjugate else made


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values, so that a NaN equals itself."""
    tensor = tensor.detach()
    if not has_memory(tensor):
        return tensor
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _restore(memory: _Memory) -> None:
    """Give tensors the memory and the bytes that they had, and let the writes count as none."""
    before = memory.before
    for at, tensor in memory.tensors.items():
        seen = memory.seen[at]
        if seen.view is not None and _layout(tensor) != seen.layout:
            tensor.data = seen.view
        if before is not None and seen.layout:
            storage = tensor.untyped_storage()
            if storage.nbytes() != before.numel():
                storage.resize_(before.numel())
            _bytes(tensor).copy_(before)
        elif before is not None:
            tensor.detach().copy_(before)
        if seen.version >= 0:
            set_version(tensor, seen.version)

"""Records how tensors are made, while they are made on the meta device.

A `Tape` is a torch-function mode: it sees every call of the torch API before torch does, sends
what would allocate to the meta device, and writes down the call. Tensors are told apart by their
storage and their view of it, so that `nn.Parameter(t)`, ``t.data``, views and in-place writes
through any of them need no special case: a call reads some storages and writes some.

The idea of recording a constructor and running it later for one tensor alone is that of
torchdistX's deferred initialisation. The torch-function level is chosen over the dispatch level
because the first operation under a Python dispatch mode imports hundreds of modules (sympy among
them): 1.0 s in a fresh process, against 1 ms for plain construction on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchlift import kinds
from torchlift.calls import (
    META,
    SCALARS,
    Device,
    Key,
    Op,
    Ref,
    Track,
    device_from,
    key_of,
    keys_of,
    tensors_in,
    version_of,
)
from torchlift.randomness import Randomness
from torchlift.shortcuts import shortcut


class Tape(TorchFunctionMode):
    """A mode that keeps every tensor on meta and remembers the calls that made it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.tracks: dict[Key, Track] = {}
        #: How many tensors of the finished module have their construction on this tape.
        self.tensors = 0
        self.randomness = Randomness(self.tracks)
        #: Where construction without a recorder would put a tensor, unless told otherwise.
        self.default_device = device
        self._twins: dict[Key, Key] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = shortcut(self, func, args, kwargs or {})
        if made is not NotImplemented:
            return made
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in kinds.LOOKS:
            if func in kinds.WHERE:
                return self._where(func, args[0])
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__deepcopy__:
            # The memo would keep every copied object alive; a copy of values is all it is.
            copy = self._record(torch.clone, (args[0].detach(),), {})
            return copy.requires_grad_(args[0].requires_grad)
        if func == kinds.SET_DATA and not args[0].is_meta:
            # A real tensor cannot take a meta tensor's content; writing the values does the same.
            self._record(torch.Tensor.copy_, (args[0].data, args[1]), {})
            return None
        if func in kinds.FROM_DATA and not any(tensors_in((args, kwargs))):
            return self._constant(func, args, dict(kwargs or {}))
        if func in kinds.MOVES:
            return self._move(name, *args, **(kwargs or {}))
        return self._record(func, args, dict(kwargs or {}))

    def _constant(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        given = kwargs.pop("device", None)
        # clone: as_tensor shares memory with the array it was given.
        made = self.adopt(func(*args, device="cpu", **kwargs).clone())
        key = key_of(made)
        assert key is not None
        self.tracks[key].device = self.default_device if given is None else device_from(given)
        return made

    def ref(self, tensor: torch.Tensor) -> Ref | None:
        """How to find this tensor again, or None if the tape has never seen its storage."""
        key = key_of(tensor)
        if key is None:
            return None
        if key not in self.tracks:
            if key not in self._twins:
                return None
            key = self._twins[key]
        offset = int(tensor.storage_offset())
        return Ref(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor that stands for a real one made outside the torch API.

        ``torch.Tensor(3, 4)``, ``torch.from_numpy`` and tensors older than the skeleton are such.
        The real one is kept and not written to: its values are copied when they are replayed.
        """
        key = key_of(tensor)
        assert key is not None
        if key not in self._twins:
            storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=META)
            twin = storage.untyped_storage()
            self.tracks[twin._cdata] = Track(twin, tensor.device, real=tensor.detach())
            self._twins[key] = twin._cdata
        track = self.tracks[self._twins[key]]
        made = torch.empty(0, dtype=tensor.dtype, device=META).set_(
            track.storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made

    def _where(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """The device, or the address, that a constructor would see, had it been run for real."""
        key = key_of(tensor) or 0
        if func is torch.Tensor.data_ptr:
            # Meta tensors are all at 0; equal addresses are how some constructors tell ties.
            return key + tensor.storage_offset() * tensor.element_size()
        device = self.device_of([tensor])
        if func == kinds.DEVICE:
            return device
        wanted = {kinds.IS_META: "meta", kinds.IS_CPU: "cpu", kinds.IS_CUDA: "cuda"}
        return device.type == wanted[func]

    def _move(
        self, kind: str, tensor: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """``tensor.cpu()`` or ``tensor.cuda(1)`` as the ``tensor.to(device)`` that they mean."""
        options = dict(zip(("non_blocking", "memory_format"), args, strict=False), **kwargs)
        target = device_from(kind if device is None else device)
        return self._record(torch.Tensor.to, (tensor, target), options)

    def _record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs: list[torch.Tensor] = []
        originals: dict[int, torch.Tensor] = {}
        args, kwargs = self._on_meta((args, kwargs), inputs, originals)
        args, kwargs, device = self._send_to_meta(func, args, kwargs)
        versions = [version_of(tensor) for tensor in inputs]
        # Before the call: an in-place one may change what its own arguments look like.
        seen: dict[Key, None] = {}
        recorded = self.as_recorded((args, kwargs), seen)
        if inputs and kinds.only_fills(func, inputs[0]):
            result: Any = inputs[0]
            written = keys_of([inputs[0]])
        else:
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                if "leaf Variable" in str(error):
                    raise  # values are not asked for gradients, so replaying would not object
                # What depends on data cannot be answered by meta tensors (`.item()`, a mask as an
                # index): run this one call on replayed values. A genuine error is raised by that.
                from torchlift.questions import answer

                return answer(self, func, recorded, inputs)
            written = keys_of(
                tensor
                for tensor, version in zip(inputs, versions, strict=True)
                if version_of(tensor) != version
            )
        made = self.made(result, device or self.device_of(inputs))
        if func is torch.empty_like:
            # It reads no values: what made those need not be run for it.
            (ref,) = made.values()
            func, seen = torch.empty_strided, {}
            recorded = (ref.shape, ref.stride), {"dtype": ref.dtype, "device": Device}
        self.append(func, recorded, seen, written, made)
        return originals.get(id(result), result)

    def append(
        self,
        func: Callable[..., Any],
        recorded: tuple[Any, Any],
        seen: Mapping[Key, None],
        written: list[Key],
        made: dict[int, Ref],
    ) -> None:
        """Write a call down, unless it only looked or made a view."""
        writes = tuple(dict.fromkeys(key for key in written if key in self.tracks))
        writes += tuple(ref.key for ref in made.values())
        if not writes:
            return
        random = kinds.is_random(func, recorded[1])
        stream = self.randomness.stream if random else None
        if stream is not None:
            seen = {**seen, stream: None}
        writes += self.randomness.among(seen)
        for key in writes:
            self.tracks[key].writers.append(len(self.ops))
        dtype = torch.get_default_dtype()
        op = Op(func, *recorded, tuple(seen), writes, made, dtype, random, stream)
        self.ops.append(op)

    def _on_meta(
        self, value: Any, inputs: list[torch.Tensor], originals: dict[int, torch.Tensor]
    ) -> Any:
        """`value` with real tensors replaced by their stand-ins; lists what tensors it has."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            key = key_of(value)
            if key is not None and key not in self.tracks and not value.is_meta:
                twin = self.adopt(value)
                originals[id(twin)] = value
                value = twin
            inputs.append(value)
            return value
        if kind is tuple or kind is list:
            return kind([self._on_meta(item, inputs, originals) for item in value])
        if kind is dict:
            return {k: self._on_meta(item, inputs, originals) for k, item in value.items()}
        return value

    def as_recorded(self, value: Any, seen: dict[Key, None]) -> Any:
        """`value` with tensors and devices replaced by what stands for them; lists storages."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            ref = self.ref(value)
            if ref is None:
                return value
            seen[ref.key] = None
            return ref
        if isinstance(value, torch.device):
            return Device
        if kind is torch.Generator:
            draws = self.randomness.of(value)
            seen[draws.key] = None
            return draws
        if kind is tuple or kind is list:
            return kind([self.as_recorded(item, seen) for item in value])
        if kind is dict:
            return {key: self.as_recorded(item, seen) for key, item in value.items()}
        return value

    def _send_to_meta(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
        """The arguments with the device replaced by meta, and the device that was asked for."""
        asked: torch.device | None = None
        if func in kinds.CONSTRUCTORS or "device" in kwargs:
            given = kwargs.get("device")
            if given is not None or func in kinds.CONSTRUCTORS:
                asked = self.default_device if given is None else device_from(given)
                kwargs["device"] = META
            kwargs.pop("pin_memory", None)  # a property of where it will live: replay decides
        elif func is torch.Tensor.to:
            target = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(target, torch.Tensor):
                asked = self.device_of([target])
            elif isinstance(target, (torch.device, str, int)):
                asked, args = device_from(target), (args[0], META, *args[2:])
        if func is torch.Tensor.to and asked not in (None, self.device_of(args[:1])):
            # Another device is another memory, which moving from meta to meta would not give.
            args, kwargs["copy"] = args[:4], True
        return args, kwargs, asked

    def device_of(self, inputs: Iterable[torch.Tensor]) -> torch.device:
        """Where the constructor believes the first of the tensors to be."""
        for tensor in inputs:
            track = self.tracks.get(key_of(tensor) or 0)
            if track is not None:
                return track.device
            if not tensor.is_meta:
                return tensor.device
        return self.default_device

    def made(self, result: Any, device: torch.device) -> dict[int, Ref]:
        """The storages that a call has made, by their position in its result."""
        made: dict[int, Ref] = {}
        for position, tensor in enumerate(tensors_in(result)):
            key = key_of(tensor)
            if key is not None and key not in self.tracks and tensor.is_meta:
                self.tracks[key] = Track(tensor.untyped_storage(), device)
                ref = self.ref(tensor)
                assert ref is not None
                made[position] = ref
        return made

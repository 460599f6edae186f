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
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from torchlift.calls import Device, Key, Op, Ref, Track, key_of, tensors_in

# fmt: off
_LOOK_NAMES = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "untyped_storage", "data_ptr", "is_contiguous", "is_floating_point", "is_complex",
    "is_inference", "requires_grad_", "detach", "__len__",
)
#: These overwrite their first tensor and return it; on the meta device there is nothing to write,
#: and finding that out costs 0.4 ms for one `normal_`.
_FILLS = frozenset({
    "bernoulli_", "cauchy_", "constant_", "dirac_", "exponential_", "eye_", "fill_", "geometric_",
    "kaiming_normal_", "kaiming_uniform_", "log_normal_", "normal_", "ones_", "orthogonal_",
    "random_", "sparse_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "zero_",
    "zeros_",
})
# fmt: on
#: Arguments of these types are recorded as they are; most are, so they are told apart first.
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.memory_format})
_CONSTRUCTORS = frozenset(_device_constructors())
_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu})
#: These turn Python data into tensors. The data exists already and may change later, so the tensor
#: is made at once and kept.
_FROM_DATA = frozenset({torch.as_tensor, torch.asarray, torch.tensor, torch.scalar_tensor})
_DEVICE = torch.Tensor.device.__get__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WHERE = frozenset({_DEVICE, _IS_META, _IS_CPU, _IS_CUDA})
_META = torch.device("meta")
#: These only look, or make a view, which its storage tells all about.
_LOOKS = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in _LOOK_NAMES),
        torch._C._set_grad_enabled,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)


class Tape(TorchFunctionMode):
    """A mode that keeps every tensor on meta and remembers the calls that made it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.tracks: dict[Key, Track] = {}
        #: How many tensors of the finished module have their construction on this tape.
        self.tensors = 0
        self._default_device = device
        self._twins: dict[Key, Key] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _LOOKS:
            return self._where(func, args[0]) if func in _WHERE else func(*args, **(kwargs or {}))
        if func is torch.Tensor.__deepcopy__:
            # The memo would keep every copied object alive; a copy of values is all it is.
            copy = self._record(torch.clone, (args[0].detach(),), {})
            return copy.requires_grad_(args[0].requires_grad)
        if func == _SET_DATA and not args[0].is_meta:
            # A real tensor cannot take a meta tensor's content; writing the values does the same.
            self._record(torch.Tensor.copy_, (args[0].data, args[1]), {})
            return None
        if func in _FROM_DATA and not any(tensors_in((args, kwargs))):
            return self._constant(func, args, dict(kwargs or {}))
        return self._record(func, args, dict(kwargs or {}))

    def _constant(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        given = kwargs.pop("device", None)
        # clone: as_tensor shares memory with the array it was given.
        made = self.adopt(func(*args, device="cpu", **kwargs).clone())
        key = key_of(made)
        assert key is not None
        self.tracks[key].device = self._default_device if given is None else torch.device(given)
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
            storage = torch.empty(
                tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=_META
            )
            twin = storage.untyped_storage()
            self.tracks[twin._cdata] = Track(twin, tensor.device, real=tensor.detach())
            self._twins[key] = twin._cdata
        track = self.tracks[self._twins[key]]
        made = torch.empty(0, dtype=tensor.dtype, device=_META).set_(
            track.storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made

    def _where(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """The device that a constructor would see, had it been run for real."""
        track = self.tracks.get(key_of(tensor) or 0)
        device = track.device if track is not None else tensor.device
        if func == _DEVICE:
            return device
        return device.type == {_IS_META: "meta", _IS_CPU: "cpu", _IS_CUDA: "cuda"}[func]

    def _record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs: list[torch.Tensor] = []
        originals: dict[int, torch.Tensor] = {}
        args, kwargs = self._on_meta((args, kwargs), inputs, originals)
        args, kwargs, device = self._send_to_meta(func, args, kwargs)
        versions = [_version(tensor) for tensor in inputs]
        # Before the call: an in-place one may change what its own arguments look like.
        seen: dict[Key, None] = {}
        recorded = self._as_recorded((args, kwargs), seen)
        if getattr(func, "__name__", "") in _FILLS and inputs and _may_write(func, inputs[0]):
            result: Any = inputs[0]
            written = _keys([inputs[0]])
        else:
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                # What depends on data cannot be answered by meta tensors (`.item()`, a mask as an
                # index): run this one call on replayed values. A genuine error is raised by that.
                return self._observe(func, recorded, inputs)
            written = _keys(
                tensor
                for tensor, version in zip(inputs, versions, strict=True)
                if _version(tensor) != version
            )
        made = self._made(result, device or self._device_of(inputs))
        self._append(func, recorded, seen, written, made)
        return originals.get(id(result), result)

    def _append(
        self,
        func: Callable[..., Any],
        recorded: tuple[Any, Any],
        seen: Mapping[Key, None],
        written: list[Key],
        made: dict[int, Ref],
    ) -> None:
        writes = tuple(dict.fromkeys(key for key in written if key in self.tracks))
        writes += tuple(ref.key for ref in made.values())
        if not writes:
            return  # it only looked, or made a view
        for key in writes:
            self.tracks[key].writers.append(len(self.ops))
        dtype = torch.get_default_dtype()
        self.ops.append(Op(func, *recorded, tuple(seen), writes, made, dtype))

    def _on_meta(
        self, value: Any, inputs: list[torch.Tensor], originals: dict[int, torch.Tensor]
    ) -> Any:
        """`value` with real tensors replaced by their stand-ins; lists what tensors it has."""
        kind = type(value)
        if kind in _SCALARS:
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

    def _as_recorded(self, value: Any, seen: dict[Key, None]) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            ref = self.ref(value)
            if ref is None:
                return value
            seen[ref.key] = None
            return ref
        if isinstance(value, torch.device):
            return Device
        if kind is tuple or kind is list:
            return kind([self._as_recorded(item, seen) for item in value])
        if kind is dict:
            return {key: self._as_recorded(item, seen) for key, item in value.items()}
        return value

    def _send_to_meta(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
        """The arguments with the device replaced by meta, and the device that was asked for."""
        asked: torch.device | None = None
        if func in _CONSTRUCTORS or "device" in kwargs:
            given = kwargs.get("device")
            asked = self._default_device if given is None else torch.device(given)
            if given is not None or func in _CONSTRUCTORS:
                kwargs["device"] = _META
            if kwargs.pop("pin_memory", None):
                pass  # a property of where it will live, which replay decides
        elif func in _MOVES:
            if func is not torch.Tensor.to:
                asked = torch.device(getattr(func, "__name__", "cpu"))
                return (*args[:1], _META), {}, asked
            moved = []
            for position, item in enumerate(args):
                if (position and isinstance(item, (torch.device, str))) or (
                    position == 1 and type(item) is int
                ):
                    asked, item = torch.device(item), _META
                moved.append(item)
            args = tuple(moved)
        return args, kwargs, asked

    def _device_of(self, inputs: list[torch.Tensor]) -> torch.device:
        for tensor in inputs:
            track = self.tracks.get(key_of(tensor) or 0)
            if track is not None:
                return track.device
        return self._default_device

    def _made(self, result: Any, device: torch.device) -> dict[int, Ref]:
        made: dict[int, Ref] = {}
        for position, tensor in enumerate(tensors_in(result)):
            key = key_of(tensor)
            if key is not None and key not in self.tracks and tensor.is_meta:
                self.tracks[key] = Track(tensor.untyped_storage(), device)
                ref = self.ref(tensor)
                assert ref is not None
                made[position] = ref
        return made

    def _observe(
        self, func: Callable[..., Any], recorded: tuple[Any, Any], inputs: list[torch.Tensor]
    ) -> Any:
        """Run a call on replayed values; its own writes are recorded like any other's."""
        from torchlift.replay import call_for_real

        result, real = call_for_real(self, func, *recorded)
        seen: dict[Key, None] = {}
        self._as_recorded(inputs, seen)
        written = _keys(
            t for t, (r, version) in zip(inputs, real, strict=True) if _version(r) != version
        )
        self._append(func, recorded, seen, written, {})
        back = {id(r): tensor for tensor, (r, _) in zip(inputs, real, strict=True)}
        return self._keep(result, back)

    def _keep(self, value: Any, back: Mapping[int, torch.Tensor]) -> Any:
        """`value` with real tensors replaced by meta ones that replay to exactly these values."""
        if isinstance(value, torch.Tensor):
            return back[id(value)] if id(value) in back else self.adopt(value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(self._keep(item, back) for item in value)
        return value


def _keys(tensors: Iterable[torch.Tensor]) -> list[Key]:
    return [key for key in map(key_of, tensors) if key is not None]


def _may_write(func: Callable[..., Any], tensor: torch.Tensor) -> bool:
    # Where autograd would object to the write, the call itself has to say so. The functions of
    # torch.nn.init, unlike the methods, turn it off themselves.
    if isinstance(func, FunctionType):
        return True
    return not (tensor.requires_grad and torch.is_grad_enabled())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

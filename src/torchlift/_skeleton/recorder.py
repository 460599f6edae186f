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

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)
from torch.utils._device import _device_constructors

from torchlift._model.handlers import is_plain
from torchlift._skeleton.recording import (
    META,
    SCALARS,
    Device,
    Key,
    Op,
    Recording,
    Ref,
    Track,
    device_from,
    key_of,
    keys_of,
    tensors_in,
    version_of,
)
from torchlift._skeleton.replay import Run, quiet, slice_of


class Tape(TorchFunctionMode):
    """A mode that keeps every tensor on meta and remembers the calls that made it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.recording = Recording()
        self.ops, self.tracks = self.recording.ops, self.recording.tracks
        self.randomness = self.recording.randomness
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
        if name == "__get__" or func in LOOKS:
            if func in WHERE:
                return self._where(func, args[0])
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__deepcopy__:
            # The memo would keep every copied object alive; a copy of values is all it is.
            copy = self._record(torch.clone, (args[0].detach(),), {})
            return copy.requires_grad_(args[0].requires_grad)
        if func == SET_DATA and not args[0].is_meta:
            # A real tensor cannot take a meta tensor's content; writing the values does the same.
            self._record(torch.Tensor.copy_, (args[0].data, args[1]), {})
            return None
        if func in FROM_DATA and not any(tensors_in((args, kwargs))):
            return self._constant(func, args, dict(kwargs or {}))
        if func in MOVES:
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
        if func == DEVICE:
            return device
        wanted = {IS_META: "meta", IS_CPU: "cpu", IS_CUDA: "cuda"}
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
        if inputs and only_fills(func, inputs[0]):
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
        random = is_random(func, recorded[1])
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
        if func in CONSTRUCTORS or "device" in kwargs:
            given = kwargs.get("device")
            if given is not None or func in CONSTRUCTORS:
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


# fmt: off
_LOOK_NAMES = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_inference",
    "requires_grad_", "detach", "__len__",
)
#: These overwrite their first tensor and return it; on the meta device there is nothing to write,
#: and finding that out costs 0.4 ms for one `normal_`.
_FILLS = frozenset({
    "bernoulli_", "cauchy_", "constant_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "ones_", "random_", "trunc_normal_", "uniform_", "zero_", "zeros_",
})
#: So do these, if the tensor has at least two dimensions: otherwise they raise.
_MATRIX_FILLS = frozenset({
    "kaiming_normal_", "kaiming_uniform_", "orthogonal_", "xavier_normal_", "xavier_uniform_",
})
#: Their results have as many elements as the data say.
_SHAPED_BY_DATA = frozenset({
    "__getitem__", "argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave",
    "unique", "unique_consecutive", "where",
})
#: They draw from torch's default generator, unless they are given another.
_RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "bernoulli_", "cauchy_", "dropout", "exponential_", "geometric_",
    "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "sparse_", "trunc_normal_",
    "uniform_", *_MATRIX_FILLS,
})
# fmt: on
#: These turn Python data into tensors. The data exists already and may change later, so the tensor
#: is made at once and kept.
FROM_DATA = frozenset({torch.as_tensor, torch.asarray, torch.tensor, torch.scalar_tensor})
CONSTRUCTORS = frozenset(_device_constructors())
#: Those that make one dense tensor, draw no random numbers and take none of what exists already.
ALLOCATIONS = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace}
    | {torch.ones, torch.tril_indices, torch.triu_indices, torch.zeros}
)
#: The names of calls that may do nothing but overwrite; `only_fills` decides.
OVERWRITERS = _FILLS | _MATRIX_FILLS
#: Methods that move to the kind of device they are named after.
MOVES = frozenset({torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu})
DEVICE = torch.Tensor.device.__get__
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: These ask where a tensor is, which is not where a tape keeps it.
WHERE = frozenset({DEVICE, IS_META, IS_CPU, IS_CUDA, torch.Tensor.data_ptr})
#: These only look, or make a view, which its storage tells all about.
LOOKS = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in _LOOK_NAMES),
        torch.Tensor.data_ptr,
        torch._C._set_grad_enabled,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)


def only_fills(func: Callable[..., Any], tensor: torch.Tensor) -> bool:
    """Whether the call does nothing but overwrite `tensor`, its first argument, and cannot fail."""
    name = getattr(func, "__name__", "")
    if not (name in _FILLS or (name in _MATRIX_FILLS and tensor.dim() > 1)):
        return False
    # Where autograd would object to the write, the call itself has to say so. The functions of
    # torch.nn.init, unlike the methods, turn it off themselves.
    return isinstance(func, FunctionType) or not (tensor.requires_grad and torch.is_grad_enabled())


def is_shaped_by_data(func: Callable[..., Any]) -> bool:
    """Whether other values, such as another random draw, could give results of another shape."""
    return getattr(func, "__name__", "") in _SHAPED_BY_DATA


def is_random(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from torch's default generator."""
    return getattr(func, "__name__", "") in _RANDOM and kwargs.get("generator") is None


def shortcut(
    tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The call's result if it was one of these and is recorded, else NotImplemented."""
    if func in ALLOCATIONS:
        return _allocate(tape, func, args, kwargs)
    if getattr(func, "__name__", "") in OVERWRITERS:
        return _overwrite(tape, func, args, kwargs)
    return NotImplemented


def _allocate(
    tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    device = tape.default_device
    recorded: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name == "device":
            device = device if value is None else device_from(value)
        elif type(value) not in SCALARS:
            return NotImplemented
        elif name != "pin_memory":  # a property of where it will live: replay decides
            recorded[name] = value
    if not _are_plain(args):
        return NotImplemented
    try:
        made = func(*args, **recorded, device=META)
    except (RuntimeError, TypeError, ValueError):
        return NotImplemented  # the long way knows whose error it is
    recorded["device"] = Device
    key = key_of(made)
    if key is None or key in tape.tracks:
        return NotImplemented
    ref = Ref(key, made.dtype, tuple(made.shape), made.stride(), 0)
    tape.tracks[key] = Track(made.untyped_storage(), device, [len(tape.ops)])
    dtype = torch.get_default_dtype()
    tape.ops.append(Op(func, args, recorded, (), (key,), {0: ref}, dtype))
    return made


def _overwrite(
    tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    tensor: Any = args[0] if args else kwargs.get("tensor")
    if not is_plain(tensor) or not tensor.is_meta:
        return NotImplemented
    for value in kwargs.values():
        if type(value) not in SCALARS and value is not tensor:
            return NotImplemented
    if not _are_plain(args[1:]):
        return NotImplemented
    ref = tape.ref(tensor)
    if ref is None or not only_fills(func, tensor):
        return NotImplemented
    random = is_random(func, kwargs)
    if random and tape.randomness.stream is not None:
        return NotImplemented
    if args:
        args, recorded = (ref, *args[1:]), dict(kwargs)
    else:
        recorded = {**kwargs, "tensor": ref}
    keys = (ref.key,)
    tape.tracks[ref.key].writers.append(len(tape.ops))
    dtype = torch.get_default_dtype()
    tape.ops.append(Op(func, args, recorded, keys, keys, {}, dtype, random))
    return tensor


def _are_plain(values: Iterable[Any]) -> bool:
    """Whether they hold neither tensors nor what may change later."""
    for value in values:
        kind = type(value)
        if kind not in SCALARS and not (kind is tuple and _are_plain(value)):
            return False
    return True


def answer(
    tape: Tape,
    func: Callable[..., Any],
    recorded: tuple[Any, Any],
    inputs: list[torch.Tensor],
) -> Any:
    """Run a call on replayed values; its own writes are recorded like any other's."""
    result, real = _call_for_real(tape, func, *recorded)
    seen: dict[Key, None] = {}
    tape.as_recorded(inputs, seen)
    written = keys_of(
        t for t, (r, version) in zip(inputs, real, strict=True) if version_of(r) != version
    )
    back = {id(r): tensor for tensor, (r, _) in zip(inputs, real, strict=True)}
    known = set(keys_of(r for r, _ in real))
    # What the data shape is kept as it is. Anything else is made again with the rest, so that it
    # agrees with the random numbers of that time, and takes no memory until then.
    again = not is_shaped_by_data(func)
    result = _keep(tape, result, lambda t: again and key_of(t) not in known, back)
    tape.append(func, recorded, seen, written, tape.made(result, tape.device_of(inputs)))
    return result


def _keep(
    tape: Tape,
    value: Any,
    again: Callable[[torch.Tensor], bool],
    back: Mapping[int, torch.Tensor],
) -> Any:
    """`value` with real tensors replaced by meta ones."""
    if isinstance(value, torch.Tensor):
        if id(value) in back:
            return back[id(value)]
        if again(value):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return tape.adopt(value)
    if isinstance(value, (tuple, list)):
        items = [_keep(tape, item, again, back) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _call_for_real(
    tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, list[tuple[torch.Tensor, int]]]:
    """One call on the CPU with real values, and its tensor arguments with their versions before.

    Random numbers drawn on the way are not taken from the caller's: asking does not change them.
    """
    run = Run(tape.recording, torch.device("cpu"))
    refs = list(_refs((args, kwargs)))
    with quiet(run.device), _random_state_kept():
        for at in slice_of(tape.recording, [(ref.key, len(tape.ops)) for ref in refs]):
            run.run(tape.ops[at])
        real_args, real_kwargs = run.value(args), run.value(kwargs)
        real = [(tensor, version_of(tensor)) for tensor in tensors_in((real_args, real_kwargs))]
        return func(*real_args, **real_kwargs), real


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


_lock = threading.Lock()
_recording = 0
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def recordable() -> Iterator[None]:
    """Let truncated normal initialisers and seeds be recorded inside the block."""
    global _recording
    with _lock:
        if _recording == 0:
            _patch()
        _recording += 1
    try:
        yield
    finally:
        with _lock:
            _recording -= 1
            if _recording == 0:
                while _originals:
                    setattr(*_originals.pop())


def _patch() -> None:
    _replace(nn.init, "_no_grad_trunc_normal_", _overridable)
    for holder in (torch, torch.random):
        _replace(holder, "manual_seed", _seeds)
        _replace(holder, "set_rng_state", _restores)


def _replace(holder: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = getattr(holder, name)
    _originals.append((holder, name, original))
    setattr(holder, name, wrapper(original))


def _overridable(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let `trunc_normal_` be recorded like the other initialisers, which are overridable.

    It samples until no value lies outside the bounds. Recorded call by call that is a question
    about data in a loop; recorded as one call it is one call.
    """

    @wraps(function)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if has_torch_function_unary(tensor):
            made: torch.Tensor = handle_torch_function(
                initialise, (tensor,), tensor, *args, **kwargs
            )
            return made
        return function(tensor, *args, **kwargs)

    initialise.__name__ = "trunc_normal_"
    return initialise


def _seeds(function: Callable[[int], torch.Generator]) -> Callable[[int], torch.Generator]:
    """A constructor that seeds makes the same numbers every time, so its replay must."""

    @wraps(function)
    def manual_seed(seed: int) -> torch.Generator:
        for tape in _tapes():
            tape.randomness.seed(int(seed))
        return function(seed)

    return manual_seed


def _restores(function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """`torch.random.fork_rng` ends by going back to the numbers of before."""

    @wraps(function)
    def set_rng_state(new_state: torch.Tensor) -> None:
        for tape in _tapes():
            tape.randomness.seed(None)
        function(new_state)

    return set_rng_state


def _tapes() -> list[Tape]:
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if isinstance(mode, Tape)]

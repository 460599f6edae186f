"""Record how tensors are made, while they are made on the meta device.

A `Recorder` is a torch-function mode. It sees every call of the torch API before torch does, sends
allocations to the meta device, and records the call. A tensor is identified by its storage and its
view of it. `nn.Parameter(t)`, ``t.data``, views and in-place writes therefore need no special case:
each call reads some storages and writes some.

torchdistX's deferred initialisation has the same idea: record a constructor, and run it later for
one tensor alone. The recorder works at the torch-function level, because the first operation under
a Python dispatch mode imports hundreds of modules, sympy among them. That takes 1.0 s in a fresh
process, and plain construction on meta 1 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchlift._model.handlers import has_memory
from torchlift._model.slots import ModuleTree, is_lazy
from torchlift._model.torch_private import (
    SET_GRAD_ENABLED,
    TRUNC_NORMAL,
    device_constructors,
    key_of,
    version_of,
    writes_into_leaf,
)
from torchlift._skeleton.handed_out import Outside
from torchlift._skeleton.recording import (
    META,
    Call,
    Device,
    GeneratorState,
    Key,
    Recording,
    Ref,
    Storage,
    tensors_in,
)
from torchlift._skeleton.replay import Run, is_real, lost_error, seeded_error, undisturbed
from torchlift._system.containers import map_leaves
from torchlift.errors import PlacementError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]


class Given(NamedTuple):
    """A tensor among a call's arguments.

    Attributes:
        tensor: as the call was given it.
        meta: the one on meta that takes its place, often itself.
        key: of its storage, or 0 if the recorder does not know that.
    """

    tensor: torch.Tensor
    meta: torch.Tensor
    key: Key


# fmt: off
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
#: Their results have as many elements as the data say, so that other values, such as another
#: random draw, could give results of another shape.
_SHAPED_BY_DATA = frozenset({
    "__getitem__", "argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave",
    "unique", "unique_consecutive", "where",
})
#: These only look, or make a view, which its storage tells all about.
_LOOKS = frozenset({
    *(getattr(torch.Tensor, name) for name in (
        "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size",
        "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
        "is_inference", "requires_grad_", "detach", "__len__",
    )),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor._backward_hooks.__set__,  # type: ignore[union-attr]
    SET_GRAD_ENABLED, torch.is_floating_point, torch.is_complex, torch.numel,
})
# fmt: on
#: Arguments of these types are recorded as they are. Most arguments have one of these types.
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.memory_format})
#: They give a constructor the memory of their tensor, also on meta, where there is none.
_ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.untyped_storage})
#: Python writes the elements; on meta it writes none.
_CALL_BACK = frozenset({torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_})
_CONSTRUCTORS = frozenset(device_constructors())
_QUANTISED = frozenset({torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4})
_DEVICE = torch.Tensor.device.__get__
_IS_ON: dict[Func, str] = {
    torch.Tensor.is_meta.__get__: "meta",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: "cuda",  # type: ignore[attr-defined]
}


class Recorder(TorchFunctionMode):
    """A mode that keeps every tensor on meta and remembers the calls that made it.

    Attributes:
        recording: The calls so far.
        default_device: The default device of construction without a recorder.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.recording = Recording()
        self.default_device = device
        self._storages = self.recording.storages
        self._alive: list[torch.UntypedStorage] = []  # keeps their addresses from being used again
        self._stand_ins: dict[Key, torch.UntypedStorage] = {}  # for real storages
        self._generators: dict[torch.Generator, GeneratorState] = {}
        self._seed, self._start = torch.initial_seed(), torch.default_generator.get_state()
        # torch's default generator as the constructor would find it after the calls that were run
        # to answer its questions: how many, and the states before those that drew.
        self._drawn, self._state = 0, self._start
        self._states: dict[int, torch.Tensor] = {}
        self._handed_out: dict[Key, Outside] = {}
        self._foreign: dict[Key, Outside] = {}

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS:
            return func(*args, **(kwargs or {}))
        handle = _SPECIAL.get(func)
        if handle is not None:
            return handle(self, func, args, dict(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args)
        return self._record(func, args, dict(kwargs or {}))

    def finish(self) -> None:
        """Note what the constructor has done behind torch's back."""
        self._note_seed(thorough=True)
        self._check_memory()
        self._handed_out.clear()

    def find_lost(self) -> None:
        """Note memory that torch did not make, and whose content a replay would not find."""
        for key, memory in self._foreign.items():
            if memory.has_changed():
                self.recording.lost.add(key)
            for other, beside in self._foreign.items() if memory.is_written else ():
                if other != key and memory.overlaps(beside.memory):
                    self.recording.lost |= {key, other}

    def ref(self, tensor: torch.Tensor) -> Ref | None:
        """Return how to find a tensor again, or None if its storage has never been seen."""
        key = _key_of(tensor)
        if key not in self._storages:
            if key not in self._stand_ins:
                return None
            key = key_of(self._stand_ins[key])
        return _ref(key, tensor)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a meta tensor that stands for a real one made outside the torch API.

        ``torch.Tensor(3, 4)``, ``torch.from_numpy`` and tensors older than the skeleton are such.
        The real one is kept and not written to: its values are copied when they are replayed.
        """
        _require_unquantised(tensor.dtype)
        key = _key_of(tensor)
        if key not in self._stand_ins:
            for memory in (*self._handed_out.values(), *self._foreign.values()):
                if memory.contains(tensor.untyped_storage()):
                    return memory.view_on_meta(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            storage = torch.empty(nbytes, dtype=torch.uint8, device=META).untyped_storage()
            self._storages[key_of(storage)] = Storage(tensor.device, real=tensor.detach())
            self._stand_ins[key] = storage
            if tensor.is_cpu and not tensor.untyped_storage().resizable():
                self._foreign[key_of(storage)] = Outside(tensor.untyped_storage(), storage)
        made = torch.empty(0, dtype=tensor.dtype, device=META).set_(
            self._stand_ins[key], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made

    def _locate(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Return the device that the constructor would see, run for real."""
        tensor = args[0]
        caller = sys._getframe(2)
        if caller.f_code.co_name == "__new__":
            # A wrapper is made where the tensors that it is made of are, not where they seem to be.
            return func(tensor)
        if caller.f_code is TRUNC_NORMAL:
            # It samples in a loop until all values fit, which only a tensor on meta is spared:
            # recorded call by call that is a question about data, recorded as one call it is one.
            names = TRUNC_NORMAL.co_varnames[1 : TRUNC_NORMAL.co_argcount]
            rest = {name: caller.f_locals[name] for name in names}
            self._record(nn.init.trunc_normal_, args, rest)
            return True
        device = self._device_of(tensor)
        return device if func == _DEVICE else device.type == _IS_ON[func]

    def _deepcopy(self, func: Func, args: Args, kwargs: Kwargs) -> torch.Tensor:
        # The memo would keep every copied object alive; a copy of values is all it is.
        copy: torch.Tensor = self._record(torch.clone, (args[0].detach(),), {})
        return copy.requires_grad_(args[0].requires_grad)

    def _set_data(self, func: Func, args: Args, kwargs: Kwargs) -> None:
        if args[0].is_meta:
            self._record(func, args, kwargs)
        else:  # a real tensor cannot take a meta tensor's content; writing the values does the same
            self._record(torch.Tensor.copy_, (args[0].data, args[1]), {})

    def _constant(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Make a tensor of Python data at once, and keep it: the data may change later."""
        if any(tensors_in((args, kwargs))):
            return self._record(func, args, kwargs)
        device = self._device_from(kwargs.pop("device", None))
        made = func(*args, device="cpu", **kwargs)
        if sys._getframe(2).f_globals.get("__name__") == "torch.storage":
            # `TypedStorage.__setitem__` gives its storage to such a tensor, which no mode sees.
            return made
        made = self.adopt(made)
        key = _key_of(made)
        self._storages[key] = self._storages[key]._replace(device=device)
        return made

    def _take(self, func: Func, args: Args, kwargs: Kwargs) -> torch.Tensor:
        """Keep a tensor over memory that something else has made."""
        return self.adopt(func(*args, **kwargs))

    def _move(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Record ``tensor.cpu()`` or ``tensor.cuda(1)`` as the ``.to(device)`` that they mean."""
        kwargs |= zip(("device", "non_blocking", "memory_format"), args[1:], strict=False)
        device = kwargs.pop("device", None)
        target = self._device_from(func.__name__ if device is None else device)
        return self._record(torch.Tensor.to, (args[0], target), kwargs)

    def _allocate(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Record what makes one tensor of plain arguments, as most tensors start.

        This is `_record` for half of the calls that a model is made of: 300 transformer blocks take
        0.28 s with it and 0.40 s without.
        """
        if func is torch.empty and args == ((0,),):
            # `torch.load` sets the storages that it reads into such, which no mode sees: what a
            # constructor loads is real, and adopted when it is used.
            with suppress(RuntimeError, AssertionError):  # an accelerator that is not here
                return func(*args, **kwargs)
        rest = {key: kwargs[key] for key in kwargs if key not in ("device", "pin_memory")}
        if not (_are_plain(args) and _are_plain(rest.values())):
            return self._record(func, args, kwargs)
        try:
            made = func(*args, **rest, device=META)
        except (RuntimeError, TypeError, ValueError):
            return self._record(func, args, kwargs)  # which knows whose error it is
        _require_unquantised(made.dtype)
        storage = made.untyped_storage()
        self._alive.append(storage)
        key = key_of(storage)
        self._storages[key] = Storage(self._device_from(kwargs.get("device")))
        # The result shows torch's default dtype. A replay must not set that default, because other
        # threads would see it.
        rest |= {"device": Device, "dtype": made.dtype}
        self.recording.calls.append(Call(func, args, rest, (), (key,), (_ref(key, made),)))
        return made

    def _record(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a call on meta tensors and write it down."""
        for value in (*args, *kwargs.values()):
            if type(value) is torch.dtype:  # quantize_per_tensor of a tensor on meta makes floats
                _require_unquantised(value)
        args, kwargs, device = self._send_to_meta(func, args, kwargs)
        # Before the call: an in-place one may change what its own arguments look like.
        given: list[Given] = []
        reads: dict[Key, None] = {}
        recorded = (
            self._recorded(args, given, reads),
            self._recorded(kwargs, given, reads) if kwargs else kwargs,
        )
        name = getattr(func, "__name__", "")
        if given and _only_fills(func, name, given[0].meta):
            if given[0].meta.numel():
                self._write_down(func, recorded, reads, [given[0].key], ())
            return given[0].tensor
        if any(item.meta is not item.tensor for item in given):
            metas = {id(item.tensor): item.meta for item in given}
            args, kwargs = map_leaves((args, kwargs), lambda leaf, _: metas.get(id(leaf), leaf))
        versions = [version_of(item.meta) for item in given]
        answered = func in _ADDRESSES or func in _CALL_BACK
        try:
            if not answered:
                result = func(*args, **kwargs)
                answered = isinstance(result, torch.Tensor) and result.layout is not torch.strided
        except (RuntimeError, NotImplementedError, TypeError, ValueError, BufferError) as error:
            if writes_into_leaf(error):
                raise  # values are not asked for gradients, so replaying would not object
            answered = True
        if answered:
            # What depends on data cannot be answered by meta tensors (`.item()`, a mask as an
            # index): run this one call on replayed values. A genuine error is raised by that.
            result, written = self._answer(func, recorded, given)
        else:
            other = self._with_dtype(func, args, kwargs, result)
            if other is not None:
                if device is not None and "device" in other[1]:
                    other[1]["device"] = device
                return self._record(func, *other)
            written = [
                item.key
                for item, version in zip(given, versions, strict=True)
                if version_of(item.meta) != version
            ]
        made = self._made(result, device, given)
        if func is torch.empty_like:
            # It reads no values: what made those need not be run for it.
            (ref,) = filter(None, made)
            func, reads = torch.empty_strided, {}
            recorded = (ref.shape, ref.stride), {"dtype": ref.dtype, "device": Device}
        self._write_down(func, recorded, reads, written, made)
        for item in given:
            if item.meta is result:
                return item.tensor
        return result

    def _with_dtype(
        self, func: Func, args: Args, kwargs: Kwargs, result: Any
    ) -> tuple[Args, Kwargs] | None:
        """Return arguments that give a result of the same dtype under any default of torch.

        If no argument is a floating-point tensor, a factory makes tensors of the default dtype, and
        integers, booleans and Python's numbers are promoted to it.

        Args:
            func: The function that was called.
            args: Its positional arguments on meta.
            kwargs: Its keyword arguments on meta.
            result: Its result.

        Returns:
            The arguments, or None if the present ones do, or no others do.
        """
        if not isinstance(result, torch.Tensor) or result.dtype.is_complex == (
            result.dtype.is_floating_point
        ):
            return None
        given = list(tensors_in((args, kwargs)))
        if kwargs.get("dtype") or any(isinstance(value, torch.dtype) for value in args):
            return None
        if any(t.is_floating_point() or t.is_complex() for t in given):
            return None
        dtype = result.dtype.to_real()

        def cast(leaf: Any, kinds: tuple[type, ...], truths: bool) -> Any:
            if isinstance(leaf, torch.Tensor) and (truths or leaf.dtype != torch.bool):
                return self._record(torch.Tensor.to, (leaf, dtype), {})
            if type(leaf) in kinds:
                return self._allocate(torch.full, ((), leaf), {"dtype": dtype})
            return leaf

        def ways() -> Iterator[tuple[Args, Kwargs]]:
            yield args, {**kwargs, "dtype": result.dtype}
            for kinds, truths in (((), True), ((), False), ((float,), False)):
                change = partial(cast, kinds=kinds, truths=truths)
                yield map_leaves((args, kwargs), lambda leaf, _, change=change: change(leaf))  # type: ignore[misc]

        for other in ways() if given or func in _CONSTRUCTORS else ():
            try:
                made = func(*other[0], **other[1])
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue
            explicit = other[1].get("dtype") or any(
                t.is_floating_point() for t in tensors_in(other)
            )
            if not isinstance(made, torch.Tensor):  # an operator that leaves it to the other side
                continue
            if explicit and (made.dtype, made.shape) == (result.dtype, result.shape):
                return other
        return None

    def _write_down(
        self,
        func: Func,
        recorded: tuple[Args, Kwargs],
        reads: dict[Key, None],
        written: list[Key],
        made: Sequence[Ref | None],
    ) -> None:
        """Add a call to the recording, unless it only looked or made a view."""
        writes = dict.fromkeys(filter(None, written))
        for ref in filter(None, made):
            writes[ref.key] = None
        if not writes:
            return
        self._note_seed()
        for key in reads:
            if key < 0:  # a draw changes what comes after it
                writes[key] = None
        call = Call(func, *recorded, tuple(reads), tuple(writes), tuple(made))
        self.recording.calls.append(call)
        for key in self._foreign.keys() & {*reads, *writes}:
            memory = self._foreign[key]
            memory.is_written |= key in writes
            if memory.checksum is None:  # of the first use, which a replay would have to find
                memory.note()
            elif memory.has_changed_again():  # an array that is used repeatedly may end as it began
                self.recording.lost.add(key)
        # Before the next write hides this one: a replay would give each call the last content.
        self._check_memory(self._handed_out.keys() & reads.keys())
        self._show(writes)

    def _recorded(self, value: Any, given: list[Given], reads: dict[Key, None]) -> Any:
        """Return a value with tensors, devices and generators replaced by what stands for them.

        Lists in `given` the tensors, and in `reads` the storages.
        """
        kind = type(value)
        if kind is torch.device:
            return Device
        if kind is tuple or kind is list:
            return kind(
                [v if type(v) in _SCALARS else self._recorded(v, given, reads) for v in value]
            )
        if kind is dict:
            return {
                key: item if type(item) in _SCALARS else self._recorded(item, given, reads)
                for key, item in value.items()
            }
        if isinstance(value, torch.Tensor):
            is_real = not value.is_meta and _key_of(value) != 0
            meta = self.adopt(value) if is_real else value
            ref = self.ref(meta)
            if ref is None:
                given.append(Given(value, meta, 0))
                return value
            given.append(Given(value, meta, ref.key))
            reads[ref.key] = None
            return ref
        if value is torch.default_generator:
            return None
        if isinstance(value, torch.Generator):
            state = self._generator(value)
            reads[state.key] = None
            return state
        return value

    def _note_seed(self, thorough: bool = False) -> None:
        """Note whether the constructor has seeded torch's default generator, which no mode sees.

        Another seed shows this until a `torch.random.fork_rng` ends. If the seed is the same, only
        a generator that has drawn nothing since then shows it.
        """
        generator, recording = torch.default_generator, self.recording
        if generator.initial_seed() != self._seed:
            recording.is_seeded = True
        elif thorough and not recording.is_seeded:
            seeded = torch.Generator().manual_seed(self._seed).get_state()
            is_fresh = torch.equal(generator.get_state(), seeded)
            recording.is_seeded = is_fresh and not torch.equal(self._start, seeded)

    def _generator(self, generator: torch.Generator) -> GeneratorState:
        """Return what stands for a generator of the constructor's own, in the state it is in."""
        state = generator.get_state()
        known = self._generators.get(generator)
        if known is None or not torch.equal(known.state, state):
            source = self.recording.new_source()
            known = GeneratorState(source, generator.initial_seed(), state)
            self._generators[generator] = known
        return known

    def _send_to_meta(
        self, func: Func, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs, torch.device | None]:
        """Return the arguments with meta as the device, and the device that they had."""
        asked: torch.device | None = None
        if func in _CONSTRUCTORS or "device" in kwargs:
            given = kwargs.get("device")
            if given is not None or func in _CONSTRUCTORS:
                asked = self._device_from(given)
                kwargs["device"] = META
            kwargs.pop("pin_memory", None)  # a property of where it will live: replay decides
        elif func is torch.Tensor.to:
            target = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(target, torch.Tensor):
                asked = self._device_of(target)
            elif isinstance(target, (torch.device, str, int)):
                asked, args = self._device_from(target), (args[0], META, *args[2:])
        if func is torch.Tensor.to and asked not in (None, self._device_of(args[0])):
            # Another device is another memory, which moving from meta to meta would not give.
            args, kwargs["copy"] = args[:4], True
        return args, kwargs, asked

    def _device_from(self, asked: torch.device | str | int | None) -> torch.device:
        """Return a device by name or number, which needs no accelerator here, or the default."""
        if type(asked) is int:
            return torch.device("cuda", asked)
        return self.default_device if asked is None else torch.device(asked)

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where the constructor believes a tensor to be."""
        storage = self._storages.get(_key_of(tensor))
        if storage is not None:
            return storage.device
        return self.default_device if tensor.is_meta else tensor.device

    def _made(
        self, result: Any, device: torch.device | None, given: list[Given]
    ) -> list[Ref | None]:
        """Return the storages that a call has made, each for a tensor of its result, or None."""
        made: list[Ref | None] = []
        tensors = (result,) if isinstance(result, torch.Tensor) else tensors_in(result)
        for tensor in tensors:
            key = _key_of(tensor)
            made.append(None)
            if key and key not in self._storages and tensor.is_meta:
                if device is None:
                    device = self._device_of(given[0].meta) if given else self.default_device
                self._alive.append(tensor.untyped_storage())
                self._storages[key] = Storage(device)
                made[-1] = _ref(key, tensor)
        return made

    def _answer(
        self, func: Func, recorded: tuple[Args, Kwargs], given: list[Given]
    ) -> tuple[Any, list[Key]]:
        """Run a call on replayed values. Return its result on meta, and the storages it wrote."""
        self._note_seed(thorough=True)
        self._check_memory()
        with self._numbers_kept():
            run = self._replayed([item.key for item in given if item.key])
            args, kwargs = run.value(recorded)
            real = list(tensors_in((args, kwargs)))
            pairs = list(zip(real, given, strict=True))
            self._hold(pairs, stays=func in _ADDRESSES)
            versions = [version_of(tensor) for tensor in real]
            result = func(*args, **kwargs)
        written = [
            item.key
            for (tensor, item), version in zip(pairs, versions, strict=True)
            if version_of(tensor) != version
        ]
        # What the data shape is kept as it is. Anything else is made again with the rest, so that
        # it agrees with the random numbers of that time, and takes no memory until then.
        is_shaped = getattr(func, "__name__", "") in _SHAPED_BY_DATA
        known = {id(tensor): item.meta for tensor, item in pairs}
        views = set(map(_key_of, real))

        def on_meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) in known:
                    return known[id(value)]
                _require_unquantised(value.dtype)
                if not has_memory(value):
                    return value
                if is_shaped or _key_of(value) in views:
                    return self.adopt(value)
                shape, stride = value.shape, value.stride()
                return torch.empty_strided(shape, stride, dtype=value.dtype, device=META)
            if isinstance(value, (tuple, list)):
                items: Any = map(on_meta, value)
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            return value

        result = on_meta(result)
        for key in written:  # by torch: the call is written down
            if key in self._handed_out:
                self._handed_out[key].note()
        # Whoever holds this memory from here on is the constructor.
        run.memory.clear()
        real.clear()
        pairs.clear()
        del args, kwargs
        self._check_memory()
        return result, written

    def _replayed(self, keys: Sequence[Key]) -> Run:
        """Return memory of storages with what construction, from where it began, has put there."""
        missing = [key for key in keys if key not in self._handed_out]
        lost = set[Key]().union(*map(self.recording.lost_behind, missing))
        if lost:
            raise lost_error(self._name_of(lost))
        order = self.recording.calls_behind([(key, len(self.recording.calls)) for key in missing])
        state = torch.default_generator.get_state()
        run = Run(self.recording, torch.device("cpu"))
        for _ in run.run_in_order(order, kept=set(keys)):
            pass
        if not torch.equal(state, torch.default_generator.get_state()):
            if self.recording.is_seeded:
                raise seeded_error()
            run = self._redrawn(order, set(keys))
        run.memory.update(
            (key, self._handed_out[key].memory) for key in keys if key in self._handed_out
        )
        return run

    def _name_of(self, keys: Set[Key]) -> str | None:
        """Return the name that the constructor has for a tensor in one of these storages."""
        frames: list[FrameType] = []
        for frame, _ in walk_stack(sys._getframe(1)):
            if frame.f_locals.get("recorder") is self:
                break  # the caller's modules are none of the constructor's
            frames.insert(0, frame)  # the outermost module knows the longest name
        named = [(word, value) for frame in frames for word, value in frame.f_locals.items()]
        for _, value in named:
            # Before a module's own __init__ has run, it has nothing to look through.
            if isinstance(value, nn.Module) and "_modules" in vars(value):
                for group in ModuleTree(value).groups:
                    if self._is_in(group.tensor, keys):
                        return group.fqn
        return next((word for word, value in named if self._is_in(value, keys)), None)

    def _is_in(self, value: object, keys: Set[Key]) -> bool:
        if not isinstance(value, torch.Tensor) or is_lazy(value):  # which has no storage to ask for
            return False
        ref = self.ref(value)
        return ref is not None and ref.key in keys

    def _redrawn(self, order: list[int], kept: set[Key]) -> Run:
        """Run calls with the random numbers that construction would draw for them.

        Which these are depends on all draws before: each call is run once for that, and the states
        of the generator that it drew from are kept for the next question.
        """
        generator, calls = torch.default_generator, self.recording.calls
        start, self._drawn = self._drawn, len(calls)
        new = [at for at in range(start, len(calls)) if is_real(self.recording, calls[at])]
        touched = [(key, at) for at in new for key in (*calls[at].reads, *calls[at].writes)]
        order = sorted({*order, *new, *self.recording.calls_behind(touched)})

        def set_generator(at: int) -> None:
            if at in self._states:
                generator.set_state(self._states[at])
            elif new and at == new[0]:
                generator.set_state(self._state)

        run = Run(self.recording, torch.device("cpu"))
        for at in run.run_in_order(order, kept=kept, before=set_generator):
            state = generator.get_state()
            if at >= start and not torch.equal(state, self._state):
                self._states[at], self._state = self._state, state
        return run

    @contextmanager
    def _numbers_kept(self) -> Iterator[None]:
        """Run recorded calls without taking numbers from the caller's generator."""
        state = torch.default_generator.get_state()
        try:
            with undisturbed(torch.device("cpu")):
                yield
        finally:
            torch.default_generator.set_state(state)

    def _expose(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Give the constructor the memory that its tensor would have."""
        if not args[0].is_meta or self._device_of(args[0]) == META:
            return func(*args, **kwargs)
        return self._record(func, args, kwargs)

    def _hold(self, pairs: list[tuple[torch.Tensor, Given]], stays: bool) -> None:
        """Watch the memory of real tensors from now on, as long as the constructor has it."""
        for real, item in pairs:
            if item.key and item.key not in self._handed_out:
                memory = Outside(real.untyped_storage(), item.meta.untyped_storage())
                memory.note()
                self._handed_out[item.key] = memory
            if item.key:
                self._handed_out[item.key].stays |= stays

    def _check_memory(self, keys: Iterable[Key] | None = None) -> None:
        """Note memory that the constructor wrote to, and free memory that it has dropped.

        Args:
            keys: Storages that were handed out. Default: all.
        """
        for key in [*self._handed_out] if keys is None else keys:
            memory = self._handed_out[key]
            if memory.has_changed():
                self.recording.lost.add(key)
            if not memory.is_held():
                del self._handed_out[key]

    def _show(self, keys: Mapping[Key, None]) -> None:
        """Let the constructor see in memory that it has what a recorded call has written."""
        for key in self._handed_out.keys() & keys:
            self._check_memory()
            memory = self._handed_out.pop(key, None)
            # What is lost cannot be shown, and is an error only where somebody needs the value.
            if memory is not None and not self.recording.lost_behind(key):
                with self._numbers_kept():
                    memory.memory.copy_(self._replayed([key]).memory[key])
                memory.note()
                self._handed_out[key] = memory


#: What is not simply recorded: the method of `Recorder` that answers such a call.
_SPECIAL: dict[Func, Callable[[Recorder, Func, Args, Kwargs], Any]] = {
    **dict.fromkeys((_DEVICE, *_IS_ON), Recorder._locate),
    **dict.fromkeys(_ADDRESSES, Recorder._expose),
    torch.Tensor.__deepcopy__: Recorder._deepcopy,
    torch.Tensor.data.__set__: Recorder._set_data,  # type: ignore[attr-defined]
    # These make one dense tensor, draw no random numbers and take none of what exists already.
    **dict.fromkeys(
        (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros),
        Recorder._allocate,
    ),
    **dict.fromkeys(
        (torch.as_tensor, torch.asarray, torch.tensor, torch.scalar_tensor), Recorder._constant
    ),
    **dict.fromkeys((torch.frombuffer, torch.from_file), Recorder._take),
    **dict.fromkeys((torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu), Recorder._move),
}


def _key_of(tensor: torch.Tensor) -> Key:
    """Return a key for a tensor's storage, or 0 for tensors without one storage."""
    try:
        return key_of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return 0  # sparse tensors and wrapper subclasses


def _ref(key: Key, tensor: torch.Tensor) -> Ref:
    view = key, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return tuple.__new__(Ref, view)  # NamedTuple's own is a function of Python


def _require_unquantised(dtype: torch.dtype) -> None:
    """Raise for the dtype of a quantised tensor: torch has none on meta that could be recorded."""
    if dtype in _QUANTISED:
        raise PlacementError(
            "the constructor quantises a tensor, and a skeleton cannot record that",
            found=str(dtype),
            hint="Make the skeleton without quantisation, load it, then quantise it. Or build the "
            "quantised model without torchlift.skeleton, and load into that.",
        )


def _are_plain(values: Iterable[Any]) -> bool:
    """Tell whether values hold neither tensors nor what may change later."""
    for value in values:
        kind = type(value)
        if kind not in _SCALARS and not (kind is tuple and _are_plain(value)):
            return False
    return True


def _only_fills(func: Func, name: str, tensor: torch.Tensor) -> bool:
    """Tell whether a call does nothing but overwrite its first tensor, and cannot fail."""
    if not (name in _FILLS or (name in _MATRIX_FILLS and tensor.dim() > 1)):
        return False
    # Where autograd would object to the write, the call itself has to say so. The functions of
    # torch.nn.init, unlike the methods, turn it off themselves.
    return isinstance(func, FunctionType) or not (tensor.requires_grad and torch.is_grad_enabled())

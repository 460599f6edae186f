"""`skeleton` and `materialize`: parameters on meta, and a constructor that can run again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from torchlift._model.commit import Commit, exchange_content, ordinary_tensors, successor_of
from torchlift._model.devices import usable_device
from torchlift._model.dtensor import is_dtensor, shard_of_value, wrap
from torchlift._model.handlers import clone_of, has_memory, inner_tensors
from torchlift._model.holders import find_unswappable, has_holders
from torchlift._model.slots import CONSTRUCTION, Group, ModuleTree, Slot, is_lazy, read_tree
from torchlift._model.torch_private import forbid_address, key_of, swap_content, version_of
from torchlift._system.containers import values_in
from torchlift._system.interrupts import uninterrupted
from torchlift._system.memory import collection_paused, trim
from torchlift._system.text import clipped_list
from torchlift.errors import PlacementError, did_you_mean, note

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

META = torch.device("meta")

#: Bytes of a persistent buffer whose values are kept until a load. Larger ones, such as weights of
#: quantised layers, are constructed again.
SMALL = 1 << 20


def skeleton(factory: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """Build a module whose parameters and persistent buffers are on meta.

    The constructor runs as usual. Each parameter goes to meta when a module registers it, before
    it is initialised, so weights take no memory and no time. All other values are real, such as
    buffers that no file contains. The random state of torch stays as it was.

    `materialize` and `load` run the factory again for tensors that a checkpoint does not contain,
    such as a new head. These tensors get the values of normal construction. See "A skeleton runs
    the constructor again" in the guide.

    If the factory gets a live module, such as one to adapt, it runs once and all its tensors are
    real.

    Args:
        factory: A module class, or a callable that returns a module. It may run more than once.
        args: Positional arguments of `factory`.
        kwargs: Keyword arguments of `factory`.

    Returns:
        The module. A tensor that torch cannot represent on meta is real.

    Raises:
        TypeError: If `factory` does not return a module, or an argument is an iterator.

    Example:
        >>> import torch, torchlift
        >>> model = torchlift.skeleton(torch.nn.Linear, 20_000, 20_000)  # 1.6 GB, not allocated
        >>> model.weight.device
        device(type='meta')
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(
            f"skeleton() takes a class or a function that makes a module, not {type(factory)!r}: "
            "write skeleton(Model, config) instead of skeleton(Model(config))"
        )
    for value in (*args, *kwargs.values()):
        if isinstance(value, Iterator):
            raise TypeError("an iterator cannot be passed twice: pass a list to skeleton()")
    # In a constructor it is a part of the outer skeleton, which can make it again. A live module
    # would be changed by each run, as get_peft_model does, so there is only one.
    if _building.run is not None or _gets_live_module(factory, args, kwargs):
        return _require_module(factory(*args, **kwargs), factory)
    device = torch.get_default_device()
    recipe = Recipe(
        factory,
        _copy_containers(args),
        _copy_containers(kwargs),
        # On meta by default is how people spare the memory that a skeleton spares them anyway.
        torch.device("cpu") if device == META else device,
        torch.get_default_dtype(),
    )
    with collection_paused(), _random_state_kept(recipe.device):
        model: M
        model, run = recipe.run_first(args, kwargs)
        memory: Memory = {}
        for place, group in _places(ModuleTree(model)):
            before = content = None
            if group.is_parameter and (recipe.is_whole or id(group.tensor) not in run.numbers):
                before = _blank(group)  # of a deep copy, say, which registers nothing
            elif group.persistent and not group.is_parameter:
                before = _blank(group)
                content = before if before is not None and before.nbytes <= SMALL else None
            inner = [] if group.tensor.is_meta else inner_tensors(group.tensor)
            if inner and all(one.is_meta for one in inner):
                # torchao's classes say that they are where their values seemed to be.
                exchange_content(group, successor_of(group.tensor, clone_of(group.tensor, META)))
            _remember(group, recipe, place, run.numbers.get(id(group.tensor)), content)
            _finish(group.tensor, memory, before)
        for tensor in run.tensors:
            if type(tensor) is _Blank:  # the module has replaced it, and somebody may hold it
                _finish(tensor, memory)
    trim()  # or it would count as memory that the process owns, although no page was touched
    return model


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    names: Iterable[str] | str | None = None,
) -> list[str]:
    """Construct the tensors of a skeleton that are still on meta.

    The factory runs again. Tensors that are not needed stay on meta. If you construct all tensors
    with the seed of normal construction, they get the same values. If an error occurs, the module
    is unchanged.

    Args:
        model: A skeleton, or a module that contains one.
        device: A device for the new tensors, and for the other buffers of the skeleton. Default:
            new tensors go to the CPU.
        names: A name, or several, of tensors or submodules. Default: every tensor on meta.

    Returns:
        Names of the tensors that were on meta, in the order of ``state_dict``, and of buffers that
        ``to_empty`` has left without values.

    Raises:
        TypeError: If `model` is not a module.
        PlacementError: If `skeleton` did not make one of the tensors.
        PlacementError: If a name does not exist in the module, or the device does not exist.
        PlacementError: If the factory fails, or makes another model than before.

    Example:
        >>> import torch, torchlift
        >>> model = torchlift.skeleton(torch.nn.Linear, 3, 2)
        >>> torchlift.materialize(model)
        ['weight', 'bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"materialize() takes a module that torchlift.skeleton made, not {type(model).__name__}"
        )
    where = usable_device("cpu" if device is None else device, "materialize")
    tree = read_tree(model)
    groups = [*tree.on_meta, *emptied(tree)]
    if names is not None:
        groups = _named(groups, [names] if isinstance(names, str) else list(names), tree)
    with ordinary_tensors():
        rest = [] if names is not None else made_with(groups, tree)
        wanted = [*groups, *rest]
        made = make(wanted, [where if g.tensor.is_meta else g.tensor.device for g in wanted])
        moved = [] if names is not None or device is None else _constructed(tree)
        moved = [group for group in moved if group.tensor.device != where]
        replaced = {id(group.tensor): tensor for group, tensor in zip(wanted, made, strict=True)}
        for group in moved:
            value = replaced.get(id(group.tensor), group.tensor).detach()
            replaced[id(group.tensor)] = value.to(where)
    with uninterrupted() as deliver, Commit() as commit:
        every = {id(group.tensor): group for group in [*wanted, *moved]}.values()
        unswappable = find_unswappable(every)
        for group in every:
            way = commit.assign if group.fqn in unswappable else commit.swap
            way(group, replaced[id(group.tensor)])
        deliver()  # an interrupt takes it back; one that comes later finds all of it done
        commit.finish()
        forget(tree)
    return [name for group in groups for name in group.names]


# -- one run of a factory -------------------------------------------------------------------------


class _Blank(nn.Parameter):
    """A parameter on meta while its constructor runs. Initialisers have nothing to do.

    torch would take 0.1 ms for random numbers on meta, and imports sympy for the first ones: 1 s.
    """


def _skipped(initialise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(initialise)
    def skip(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("generator") is not None:
            raise RuntimeError("the next numbers of this generator depend on a parameter")
        # Autograd refuses to write to a leaf that requires gradients.
        if self.is_meta and not (self.requires_grad and torch.is_grad_enabled()):
            return self
        return initialise(self, *args, **kwargs)

    return skip


for _one in (torch.Tensor.fill_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.zero_):
    setattr(_Blank, _one.__name__, _skipped(_one))


class _Run:
    """One run of a factory, in one thread. Parameters go to meta when a module registers them.

    A large persistent buffer goes to meta when the next tensor is registered, because the
    constructor may fill it after it has registered it, and torch says only then that it persists.

    Attributes:
        keep: Numbers of registrations whose tensors stay real. None: all of them.
        numbers: Identity of a tensor -> the number of its first registration.
        tensors: The tensors by number. They stay alive, so that an identity is unique.
        last: The module that registered a buffer last, and its name.
    """

    def __init__(self, keep: frozenset[int] | None) -> None:
        self.keep = keep
        self.numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.last: tuple[nn.Module, str] | None = None

    def register(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """Count a tensor, and move a parameter to meta unless it is to stay real."""
        if self.last is not None:
            holder, buffer = self.last
            self.last, made = None, holder._buffers.get(buffer)
            if made is not None and buffer not in holder._non_persistent_buffers_set:
                self._blank(made, (Slot(buffer, holder, buffer, True),))
        if tensor is None or self.keep is None:
            return
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            if isinstance(tensor, nn.Parameter):
                self._blank(tensor, ())
        if not isinstance(tensor, nn.Parameter) and tensor.nbytes > SMALL:
            self.last = module, name

    def _blank(self, tensor: torch.Tensor, slots: tuple[Slot, ...]) -> None:
        if self.keep is not None and self.numbers.get(id(tensor)) not in self.keep:
            _blank(Group(tensor, slots))


class _Building(threading.local):
    """The run of a factory in this thread, if there is one."""

    run: _Run | None = None


_building = _Building()
_is_hooked = False


def _on_registration(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    if _building.run is not None:
        _building.run.register(module, name, tensor)
    elif CONSTRUCTION in module.__dict__:  # somebody gives it another tensor
        module.__dict__[CONSTRUCTION].pop(name, None)


def _add_hooks() -> None:
    """Add the hooks, once for the process.

    They are never removed, because torch walks over its hooks while a module registers a tensor. To
    remove one would raise in another thread that builds a model at that moment. Outside of a run
    they cost 0.1 us a tensor.
    """
    global _is_hooked
    if not _is_hooked:
        # Twice, by two threads or after Ctrl-C, does no harm. A lock could stay locked.
        register_module_parameter_registration_hook(_on_registration)
        register_module_buffer_registration_hook(_on_registration)
        _is_hooked = True


def _blank(group: Group) -> torch.Tensor | None:
    """Move a tensor to meta, and return its content. None: it stays real, as it was.

    The object stays. A tensor that torch cannot represent on meta, or cannot exchange, is real.
    """
    tensor = group.tensor
    if tensor.is_meta or is_lazy(tensor):
        return None
    if not has_memory(tensor) or tensor.is_quantized or not tensor.is_leaf:
        return None
    stride = tensor.stride()
    blank = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=META)
    # A constructor that compares addresses, or writes to one, needs real parameters: on meta
    # torch would return 0 for all of them. With an error it gets them, see `Recipe.run_first`.
    forbid_address(blank)
    if type(tensor) is nn.Parameter and not (has_holders(tensor) or tensor.__dict__):
        # Nobody else has seen a new parameter: 3 us without the checks of an exchange, 20 with.
        content: torch.Tensor = nn.Parameter(blank, tensor.requires_grad)
        swap_content(tensor, content)
        tensor.__class__ = _Blank
        return content
    content = successor_of(tensor, blank)
    try:
        exchange_content(group, content)
    except RuntimeError:
        return None  # somebody holds it in a way that torch refuses to exchange
    return content


#: Key of a storage on meta -> itself, so that the key stays unique, and its successor.
Memory = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]


def _finish(tensor: torch.Tensor, memory: Memory, before: torch.Tensor | None = None) -> None:
    """Make a plain tensor on meta of what it was for the constructor.

    torch cannot undo `forbid_address`. Tensors that share memory still do.

    Args:
        tensor: A tensor of a finished skeleton.
        memory: The storages of all tensors of the skeleton so far.
        before: The content that it had when the constructor ended. None: the same as now.
    """
    kind: Any = nn.Parameter
    if type(tensor) is _Blank:
        tensor.__class__ = kind
    if not tensor.is_meta or is_lazy(tensor) or not has_memory(tensor):
        return
    was = tensor if before is None else before
    old, view = was.untyped_storage(), (was.storage_offset(), was.shape, was.stride())
    if key_of(old) not in memory:
        new = torch.empty(old.nbytes(), dtype=torch.uint8, device=META)
        memory[key_of(old)] = old, new.untyped_storage()
    with torch.no_grad():
        tensor.set_(memory[key_of(old)][1], *view)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the random state of the CPU, and of this device, back after the block."""
    others = [torch.get_device_module(device)] if device.type != "cpu" else []
    states = [module.get_rng_state(device) for module in others]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for module, other in zip(others, states, strict=True):
            module.set_rng_state(other, device)


def _require_module(made: M, factory: object) -> M:
    """Return what a factory made.

    Raises:
        TypeError: If it is not a module.
    """
    if not isinstance(made, nn.Module):
        raise TypeError(f"{factory!r} returned {type(made).__name__}, not a module")
    return made


def _copy_containers(value: Any) -> Any:
    """Copy the containers of arguments, which the constructor or the caller may change later."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, _copy_containers(item)) for key, item in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(_copy_containers, value))
    return copy.copy(value) if isinstance(value, (list, set)) else value


def _gets_live_module(factory: Any, args: object, kwargs: object) -> bool:
    """Return whether a factory refers to a module or a parameter with values.

    It may be an argument, an attribute of one, a global or a variable around the function. A list
    of all live tensors would find every one, but takes longer than a load that maps a file.
    """
    factory = getattr(factory, "__wrapped__", factory)
    inner: Any = getattr(factory, "func", factory)
    function = getattr(inner, "__init__", None) if isinstance(inner, type) else inner
    given = [args, kwargs, getattr(factory, "__self__", None)]
    given += [getattr(factory, name, None) for name in ("args", "keywords")]  # of a partial
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a recursive function, before it has its name
            given.append(cell.cell_contents)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    given += [known[name] for name in names if name in known]
    found = [*values_in(given)]
    # Of a configuration or a trainer, and of a class that keeps a module.
    objects = [one for one in found if not isinstance(one, (nn.Module, torch.Tensor, ModuleType))]
    found += values_in([[*vars(one).values()] for one in objects if hasattr(one, "__dict__")])
    modules = [one for one in found if isinstance(one, nn.Module) and "_modules" in vars(one)]
    tensors = [group.tensor for module in modules for group in ModuleTree(module).groups]
    tensors += [one for one in found if isinstance(one, nn.Parameter)]
    return any(not (tensor.is_meta or is_lazy(tensor)) for tensor in tensors)


# -- how a tensor is made -------------------------------------------------------------------------

#: Where a tensor is in the module of a factory: its name, and its number among those of this name,
#: because an attribute can be a list of tensors.
Place = tuple[str, int]


@dataclass(eq=False)
class Recipe:
    """How to construct a module again.

    Attributes:
        factory, args, kwargs: The call.
        device, dtype: The defaults of torch at that time.
        is_whole: Whether the constructor needs the values of its parameters.
        numbers: Place of a tensor -> the number of its registration.
        on_meta: Number of tensors on meta whose values are not kept.
    """

    factory: Callable[..., nn.Module]
    args: Any
    kwargs: Any
    device: torch.device
    dtype: torch.dtype
    is_whole: bool = False
    numbers: dict[Place, int] = field(default_factory=dict)
    on_meta: int = 0

    def __deepcopy__(self, memo: object) -> Recipe:
        return self

    def run_first(self, args: Any, kwargs: Any) -> tuple[Any, _Run]:
        """Run the factory. Return the module, and what was registered.

        If the constructor needs the values of a parameter, or the numbers that these take from a
        seed of its own, it runs for real.
        """
        state, seed = torch.get_rng_state(), torch.initial_seed()
        first: Exception | None = None
        try:
            model, run = self.run(frozenset(), args, kwargs)
            if torch.initial_seed() == seed and not _has_meta_device(model):
                return model, run
        except Exception as error:  # its own one occurs again
            first = error
        torch.set_rng_state(state)
        self.is_whole = True
        try:
            return self.run_again(None)
        except Exception as error:
            if first is not None and str(first) != str(error):
                note(error, f"the constructor ran a second time, because of {first!r}")
            raise

    def run_again(self, keep: frozenset[int] | None) -> tuple[nn.Module, _Run]:
        """Run the factory with its own containers, which it may change."""
        return self.run(keep, _copy_containers(self.args), _copy_containers(self.kwargs))

    def run(self, keep: frozenset[int] | None, args: Any, kwargs: Any) -> tuple[nn.Module, _Run]:
        """Run the factory with all but some parameters on meta, or with none on meta."""
        _add_hooks()
        run = _Run(keep)
        outer = _building.run
        # A mode costs a call of Python for each call of torch.
        where = nullcontext() if torch.get_default_device() == self.device else self.device
        try:
            _building.run = run
            with where, ordinary_tensors():
                model = _require_module(self.factory(*args, **kwargs), self.factory)
        finally:
            _building.run = outer
        return model, run

    def construct(self, wanted: Sequence[Construction]) -> dict[Place, torch.Tensor]:
        """Construct the module again, and return its tensors by place.

        Raises:
            PlacementError: If the factory fails, or a tensor is not there or has another shape.
        """
        name = wanted[0].place[0]
        if torch.get_default_dtype() != self.dtype:
            raise PlacementError(
                "cannot be constructed under another default dtype",
                entry=name,
                expected=self.dtype,
                found=torch.get_default_dtype(),
                hint="Use the default dtype under which you made the skeleton.",
            )
        for keep in self._attempts(wanted):
            state = torch.get_rng_state()
            try:
                model, run = self.run_again(keep)
            except Exception as error:
                if keep is not None:
                    torch.set_rng_state(state)
                    continue
                raise PlacementError(
                    f"the constructor failed when it ran again: {type(error).__name__}: {error}",
                    entry=name,
                    hint="Build the model without torchlift.skeleton.",
                ) from error
            found = {place: group.tensor for place, group in _places(ModuleTree(model))}
            memory: Memory = {}
            for registered in run.tensors:
                _finish(registered, memory)
            if keep is None or not any(
                one.place in found and found[one.place].is_meta for one in wanted
            ):
                break
            torch.set_rng_state(state)
        for one in wanted:
            tensor = found.get(one.place)
            if tensor is not None and tensor.is_meta:
                raise PlacementError(
                    "the constructor itself makes it on meta, or returns a tensor of its first run",
                    entry=one.place[0],
                    hint="Load it from a checkpoint, or make it on the CPU in the constructor.",
                )
            if tensor is None or tuple(tensor.shape) != one.shape:
                raise PlacementError(
                    "the constructor made another model when it ran again",
                    entry=one.place[0],
                    expected=list(one.shape),
                    found=None if tensor is None else list(tensor.shape),
                    hint="Build the model without torchlift.skeleton.",
                )
        return found

    def _attempts(self, wanted: Sequence[Construction]) -> Iterator[frozenset[int] | None]:
        """Yield the numbers of parameters to keep, from those that are needed to all."""
        if not self.is_whole and sum(one.value is None for one in wanted) < self.on_meta:
            keep = frozenset(one.number for one in wanted if one.number is not None)
            yield keep
            # A tensor that is made of parameters is most often made of those beside it.
            parents = {one.place[0].rpartition(".")[0] for one in wanted if one.number is None}
            beside = ((name.rpartition(".")[0], n) for (name, _), n in self.numbers.items())
            near = {n for parent, n in beside if parent in parents}
            if not near <= keep:
                yield keep | near
        yield None


@dataclass(frozen=True, slots=True, eq=False)
class Construction:
    """How one tensor of a skeleton is constructed.

    Attributes:
        recipe: How its module is constructed.
        place: Where it is in that module.
        number: The number of its registration. None: no module registered it as a parameter.
        dtype, shape, stride: Those of the constructor. Strides are in elements.
        value: The tensor if it is real, or the values of a small persistent buffer.
        version: The version of `value` at the end of the constructor.
        copy: An object for each deep copy of the module, whose tensors must not share memory with
            those of the original.
    """

    recipe: Recipe
    place: Place
    number: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    value: torch.Tensor | None = None
    version: int = 0
    copy: object = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> Construction:
        return replace(self, copy=memo.setdefault(Construction, object()))

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled skeleton is a plain module on meta: a factory may not fit into a file.
        return (type(None), ())


def _places(tree: ModuleTree) -> Iterator[tuple[Place, Group]]:
    """Yield every tensor of a module with its place."""
    counts: dict[str, int] = {}
    for group in [*tree.groups, *tree.attributes]:
        number = counts[group.fqn] = counts.get(group.fqn, -1) + 1
        yield (group.fqn, number), group


def _has_meta_device(model: nn.Module) -> bool:
    """Return whether a module keeps the device of a parameter, which was meta by mistake."""
    for module in model.modules():
        for name, value in vars(module).items():
            held: Iterable[object] = (value,)
            if type(value) in (dict, list, tuple) and value and name not in _REGISTRIES:
                held = values_in(value)
            if any(type(one) in (torch.device, str) and str(one) == "meta" for one in held):
                return True
    return False


#: Attributes of a module that hold its tensors and modules.
_REGISTRIES = ("_parameters", "_buffers", "_modules", CONSTRUCTION)


def _remember(
    group: Group, recipe: Recipe, place: Place, number: int | None, value: torch.Tensor | None
) -> None:
    """Attach its construction to a tensor and to the modules that hold it.

    A deep copy of a parameter loses attributes of the tensor (`torch.nn.Parameter.__deepcopy__`
    calls the class), and so does a buffer that is cast. The module keeps them.
    """
    tensor = group.tensor
    if is_lazy(tensor) or not has_memory(tensor):
        return
    if tensor.is_meta:
        recipe.on_meta += value is None
        if number is not None:
            recipe.numbers[place] = number
        if tensor.grad_fn is not None and not tensor._is_view():
            # A graph over meta tensors (the weight that weight_norm computes) leads nowhere, and it
            # would hold on to parameters that are about to get their content.
            tensor.detach_()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    value = value if tensor.is_meta else tensor
    version = 0 if value is None else version_of(value)
    made = Construction(recipe, place, number, tensor.dtype, shape, stride, value, version)
    if tensor.is_meta:
        tensor.__dict__[CONSTRUCTION] = made
    for slot in group.slots:
        if getattr(slot.module, slot.name, None) is tensor:  # and not one of a list of tensors
            vars(slot.module).setdefault(CONSTRUCTION, {})[slot.name] = made


def construction_of(group: Group) -> Construction | None:
    """Return how a tensor is made, or None if no skeleton made it."""
    own = group.tensor.__dict__.get(CONSTRUCTION)
    if isinstance(own, Construction):
        return own
    for slot in group.slots:
        kept: Construction | None = vars(slot.module).get(CONSTRUCTION, {}).get(slot.name)
        # Not if the parameter has been replaced by another one of the user's on meta.
        if kept is not None and _describes(kept, group.tensor):
            return kept
    return None


def _describes(made: Construction, tensor: torch.Tensor) -> bool:
    is_cast = made.dtype.is_floating_point and tensor.dtype.is_floating_point
    return made.shape == tuple(tensor.shape) and (is_cast or made.dtype == tensor.dtype)


def is_of_constructor(group: Group) -> bool:
    """Return whether the constructor of a skeleton gave a tensor its value."""
    made = None if group.tensor.is_meta else construction_of(group)
    return made is not None and made.value is not None


def changed_on_meta(group: Group) -> tuple[bool, tuple[int, ...] | None]:
    """Return what a tensor of a skeleton became after it was made.

    Returns:
        Whether it has another dtype (``.half()``), and its strides if they are others (channels
        last), else None.
    """
    made = construction_of(group) if group.tensor.is_meta else None
    if made is None:
        return False, None
    strides = tuple(group.tensor.stride())
    return made.dtype != group.tensor.dtype, None if made.stride == strides else strides


def constructions_of(groups: Iterable[Group]) -> list[Construction]:
    """Return how tensors are made.

    Raises:
        PlacementError: If `skeleton` did not make some of them.
    """
    found = [(group, construction_of(group)) for group in groups]
    lost = [name for group, made in found if made is None for name in group.names]
    if lost:
        are = "tensor is" if len(lost) == 1 else "tensors are"
        raise PlacementError(
            f"{len(lost)} {are} on meta, and torchlift cannot construct them: {clipped_list(lost)}",
            entry=lost[0],
            expected="a value in the checkpoint, or a module built by torchlift.skeleton",
            hint="Build the model with torchlift.skeleton(Model, ...) instead of on meta.",
        )
    return [made for _, made in found if made is not None]


def make(groups: Sequence[Group], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Construct the tensors of these groups, each on its device.

    Raises:
        PlacementError: If `skeleton` did not make a tensor, or its factory fails.
    """
    constructions = constructions_of(groups)
    made: dict[int, torch.Tensor] = {}
    batches: dict[tuple[int, int], list[int]] = {}
    running, memos = _that_run(constructions), dict[int, dict[int, Any]]()
    for position, (one, group) in enumerate(zip(constructions, groups, strict=True)):
        if one.value is None or id(one.recipe) in running:
            batches.setdefault((id(one.recipe), id(one.copy)), []).append(position)
        else:
            # As one copy, so that views of one memory share it in the copy, too.
            value = copy.deepcopy(one.value.detach(), memos.setdefault(id(one.copy), {}))
            made[position] = _like(group, value, devices[position])
    for positions in batches.values():
        recipe = constructions[positions[0]].recipe
        found = recipe.construct([constructions[position] for position in positions])
        for position in positions:
            # Each is freed as soon as it is a shard, or on its device.
            tensor = found.pop(constructions[position].place).detach()
            made[position] = _like(groups[position], tensor, devices[position])
    return [made[position] for position in range(len(groups))]


def _like(group: Group, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a constructed tensor with the layout, the dtype and the strides of a group."""
    if is_dtensor(group.tensor):
        tensor = wrap(group.tensor, shard_of_value(tensor.to(device), group.tensor, group.fqn))
    tensor = tensor.to(device)
    if tensor.is_quantized:  # torch gives it another dtype on meta
        return tensor
    if tensor.dtype != group.tensor.dtype:  # it was cast on meta
        tensor = tensor.to(group.tensor.dtype)
    return tensor if is_dtensor(tensor) else strided(tensor, group.tensor.stride())


def strided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor, or a copy of it where it has other strides, in elements, than these."""
    if tensor.stride() == stride:
        return tensor
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def emptied(tree: ModuleTree) -> list[Group]:
    """Return the buffers of a skeleton that ``to_empty`` has left without their values.

    Its sign is that other code than torchlift has put new memory into every tensor on meta.
    """
    if not any(CONSTRUCTION in module.__dict__ for module in tree.modules):
        return []
    if any(group.tensor.is_meta and construction_of(group) for group in tree.groups):
        return []
    known = ((group, construction_of(group)) for group in tree.groups)
    return [g for g, made in known if made is not None and _is_emptied(g.tensor, made.value)]


def _is_emptied(tensor: torch.Tensor, value: torch.Tensor | None) -> bool:
    """Return whether a buffer has new memory, to which nobody has written the constructor's values.

    They may be there in another dtype, or on another device.
    """
    if value is None or value is tensor or version_of(tensor) > 0:
        return False
    return not torch.equal(tensor, value.to(tensor.device, tensor.dtype))


def _constructed(tree: ModuleTree) -> list[Group]:
    """Return the real tensors of a skeleton, other than those that a load has placed."""
    found = [group for group in tree.groups if not group.tensor.is_meta]
    return [group for group in found if construction_of(group) is not None]


def made_with(groups: Iterable[Group], tree: ModuleTree) -> list[Group]:
    """Return the real tensors of the skeletons that run again for these groups.

    A random buffer, or one that belongs to a parameter, is then of the same run. Tensors that
    somebody has replaced or written to stay.
    """
    running, found = _that_run(filter(None, map(construction_of, groups))), []
    for group in [*tree.groups, *tree.attributes] if running else ():
        made = None if group.tensor.is_meta else construction_of(group)
        if made is None or made.value is not group.tensor or id(made.recipe) not in running:
            continue
        if version_of(made.value) == made.version:
            found.append(group)
    return found


def _that_run(constructions: Iterable[Construction]) -> set[int]:
    """Return identities of the recipes that have to run for some of these."""
    return {id(one.recipe) for one in constructions if one.value is None}


def _named(groups: list[Group], names: list[str], tree: ModuleTree) -> list[Group]:
    known = [name for g in [*tree.groups, *tree.attributes] for name in g.names]
    for name in names:
        if not any(_is_under(full, name) for full in known):
            modules = [prefix[:-1] for prefix, _ in tree.paths if prefix]
            raise PlacementError(
                "the module does not have a tensor or submodule of this name",
                entry=name,
                hint=did_you_mean(name, [*known, *modules]) or None,
            )
    return [
        group
        for group in groups
        if any(_is_under(full, name) for full in group.names for name in names)
    ]


def _is_under(full: str, name: str) -> bool:
    return full == name or full.startswith(name + ".") or not name


def forget(tree: ModuleTree) -> None:
    """Drop the constructions of modules whose tensors are all made."""
    for module in tree.modules:
        if CONSTRUCTION in module.__dict__:
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if not any(t is not None and t.is_meta for t in tensors):
                del module.__dict__[CONSTRUCTION]

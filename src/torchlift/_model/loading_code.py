"""Run the loading code of a model before a load is planned: hooks, overrides and extra state.

torch's own `load_state_dict` runs it, to its end. Two temporary hooks on each module, both public,
make torch put values into the slots and write nothing, and record the names that it reports. Code
that writes gets copies of live tensors, the stand-ins. What is in the slots afterwards is what is
loaded, and the live tensors are back. From there on no code of the model runs.
"""

from __future__ import annotations

import copy
from bisect import bisect, bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._model.commit import Commit, content_bytes, successor_of
from torchlift._model.dtensor import (
    is_dtensor,
    is_fsdp,
    local_tensor,
    refresh_shards,
    shard_of_value,
    wrap,
)
from torchlift._model.handlers import (
    bytes_of,
    clone_of,
    has_memory,
    inner_tensors,
    is_plain,
    is_wrapper,
)
from torchlift._model.names import wrapped_by
from torchlift._model.slots import CONSTRUCTION, ModuleTree, is_lazy, walk
from torchlift._model.state import ModuleHolder, own
from torchlift._model.torch_private import (
    LAZY_HOOK,
    NormBase,
    memory_of,
    strict_of_caller,
    version_of,
)
from torchlift._system.containers import leaves
from torchlift._system.interrupts import Interruptible
from torchlift._system.text import clipped_list
from torchlift.errors import CheckpointError, MismatchError, PlacementError, note
from torchlift.formats.flattening import EXTRA_STATE, extra_state

#: An attribute of such a type keeps no tensor.
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
#: Identities of the models whose loading code runs now.
_RUNNING: set[int] = set()

#: Called with missing names, unexpected names, and names with another shape. Returns whether the
#: load refuses them.
Refuses = Callable[[Sequence[str], Sequence[str], Sequence[str]], bool]


class LoadingCode(NamedTuple):
    """The loading code of a model for some names.

    Attributes:
        modules: (prefix, module) of the modules that have code.
        roots: (prefix, module) of the models whose `load_state_dict` is called.
        is_override: Whether a class overrides that method.
        prefixes: The prefixes of the names that code can change: of modules with code, and of those
            that share a tensor with them.
    """

    modules: Sequence[tuple[str, nn.Module]]
    roots: Sequence[tuple[str, nn.Module]]
    is_override: bool
    prefixes: Sequence[str]

    def covers(self, name: str) -> bool:
        """Return whether the code can change a name."""
        at = bisect(self.prefixes, name) - 1  # sorted, and none is inside of another
        return at >= 0 and name.startswith(self.prefixes[at])


def find_loading_code(
    tree: ModuleTree, names: Iterable[str], *, inside: bool
) -> LoadingCode | None:
    """Return the loading code of a model for these names, or None.

    torch calls the `load_state_dict` of a root only.

    Args:
        tree: The model.
        names: The names that have values.
        inside: Whether a model inside of DDP or ``torch.compile`` counts as the root.
    """
    known, kinds = set(names), {type(module) for module in tree.modules}
    plain = {kind for kind in kinds if not (_overrides_load(kind) or _takes_extra(kind))}
    modules = [
        (prefix, module)
        for prefix, module in tree.paths
        if type(module) not in plain
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        if _has_code(module, prefix, known)
    ]
    roots = [("", tree.model)]
    if isinstance(tree.model, ModuleHolder):
        roots = [(f"{name}.", module) for name, module in tree.model.items()]
    overriding = [found for root in roots if (found := _overriding(*root, inside=inside))]
    modules += overriding
    if not modules:
        return None
    begins = tuple(prefix for prefix, _ in overriding)
    rest = [root for root in roots if not any(each.startswith(root[0]) for each in begins)]
    with_code = [root for root in rest if any(p.startswith(root[0]) for p, _ in modules)]
    tied = {id(t) for _, module in modules for _, t in _places(module)}
    sharing = [p for p, module in tree.paths if any(id(t) in tied for _, t in _places(module))]
    prefixes = list[str]()
    for prefix in sorted([*sharing, *(prefix for prefix, _ in modules)]):
        if not (prefixes and prefix.startswith(prefixes[-1])):  # inside of the one before
            prefixes.append(prefix)
    return LoadingCode(modules, [*overriding, *with_code], bool(overriding), prefixes)


def _overriding(prefix: str, module: nn.Module, *, inside: bool) -> tuple[str, nn.Module] | None:
    """Return (prefix, module) of a root, or of what it wraps, whose class overrides the method."""
    while True:
        if module.load_state_dict != nn.Module.load_state_dict.__get__(module):
            method = own(module, "load_state_dict")
            if getattr(method, "__func__", method) is not nn.Module.load_state_dict:
                return prefix, module
        inner, in_keys = wrapped_by(module) if inside else (None, False)
        if inner is None:
            return None
        prefix += f"{inner}." if in_keys else ""
        module = getattr(module, inner)


def _has_code(module: nn.Module, prefix: str, names: Collection[str]) -> bool:
    if type(module)._load_from_state_dict is NormBase._load_from_state_dict:
        # Batch norm adds a counter to files of torch < 0.4.1, and otherwise loads as any module.
        has_own = prefix + "num_batches_tracked" not in names
    else:
        has_own = _overrides_load(type(module))
    before = module._load_state_dict_pre_hooks.values()
    after = module._load_state_dict_post_hooks.values()
    return (
        has_own
        or _takes_extra(type(module))
        or not all(is_fsdp(hook) or _is_lazy_hook(hook) or _is_ours(hook) for hook in before)
        or not all(is_fsdp(hook) or _is_ours(hook) for hook in after)
    )


def _overrides_load(kind: type[nn.Module]) -> bool:
    return kind._load_from_state_dict is not nn.Module._load_from_state_dict


def _takes_extra(kind: type[nn.Module]) -> bool:
    return kind.set_extra_state is not nn.Module.set_extra_state


def _is_ours(hook: Any) -> bool:
    """Return whether a copy of a module still has a hook of a run that has ended."""
    return isinstance(getattr(hook, "hook", hook), _Hook)


def _is_lazy_hook(hook: Any) -> bool:
    # It gives an uninitialised parameter its shape, which placing the tensor does anyway.
    inner = getattr(hook, "hook", hook)
    return getattr(inner, "__func__", None) is LAZY_HOOK


@dataclass(slots=True)
class Outcome:
    """What the loading code of a model left.

    Attributes:
        tensors: Name in the model -> its value.
        new: Identities of values whose memory nobody else uses.
        missing, unexpected: The names that torch reports.
        excused: Names of the model that get no value, and that torch does not report as missing.
        own: Names that got the model's own tensor on meta. They have no value.
        kept: Names of tensors that a module keeps outside of its parameters and buffers.
        is_lenient: Whether the code accepted names that the load refuses.
        error: torch's error for names that the load refuses.
        nbytes: The bytes of copies of live tensors in host memory.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    new: set[int] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    kept: list[str] = field(default_factory=list)
    is_lenient: bool = False
    error: RuntimeError | None = None
    nbytes: int = 0


class Shown(NamedTuple):
    """The part of a source that loading code of a model sees.

    Attributes:
        path: The path of the source, for errors.
        values: Name in the model -> tensor, container or plain value, as they were saved.
        tensors: Name in the model -> each of the tensors. The code may write to it.
        mapped: Names of tensors that must not stay mapped where a module keeps them.
        versions: Path of a module of the model -> its metadata in the state dict.
    """

    path: str
    values: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    mapped: Collection[str]
    versions: Mapping[str, Mapping[str, object]]


def run_loading_code(
    tree: ModuleTree,
    code: LoadingCode,
    shown: Shown,
    refuses: Refuses,
    commit: Commit,
    *,
    strict: bool,
) -> Outcome:
    """Run the loading code of a model, as `load_state_dict` does. Return what it leaves.

    Args:
        tree: The model.
        code: Its loading code.
        shown: The part of the source that the code sees.
        refuses: Whether the load refuses names. An override gets torch's RuntimeError then.
        commit: Undoes the changes of attributes, slots and extra state.
        strict: Whether names must match, for an override.

    Raises:
        PlacementError: If the code writes into a live tensor of another module or into a tensor on
            meta, or asks for a container.
        MismatchError: If the code reports an error.
    """
    if id(tree.model) in _RUNNING:
        raise PlacementError(
            "its loading code runs already, for another load of the model",
            entry=type(tree.model).__name__,
            hint="Wait until that load has ended. Inside of a load_state_dict, call that of "
            "nn.Module: super().load_state_dict(state_dict).",
        )
    commit.keep_attributes(tree.modules)
    commit.keep_flags(tree)
    given = {extra_state(name) for name in shown.values}
    for prefix, module in code.modules:
        if prefix + EXTRA_STATE in given and _takes_extra(type(module)):
            _keep_extra_state(module, commit)
    run = _Run(code, shown, refuses, strict=strict)
    for group in tree.attributes:
        if id(group.slots[0].module) in run.writing or code.covers(group.fqn):
            commit.keep_values(group.tensor, group.fqn)
    _RUNNING.add(id(tree.model))
    try:
        with run.stand_ins(), run.hooks():
            try:
                for prefix, root in code.roots:
                    with Interruptible():
                        run.call(prefix, root)
            finally:  # also if the code raises: that error would hide what it has written
                run.check_untouched()
            tree.walk()  # again: the code may have put other modules there
            run.collect(tree, commit)
    finally:
        run.keep_constructions()
        _RUNNING.discard(id(tree.model))
        refresh_shards(tree.modules)
        tree.walk()
    return run.outcome


def _keep_extra_state(module: nn.Module, commit: Commit) -> None:
    """Record the extra state of a module, which its code may replace."""
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        try:
            before = copied(module.get_extra_state())
        except Exception:  # torch does not ask for it: the attributes of the module are kept
            return
        name = f"the extra state of {type(module).__name__}"
        for buffer in module._buffers.values():  # the undo of the state may write to them
            if buffer is not None:
                commit.keep_values(buffer, name)
        commit.when_undone(lambda: module.set_extra_state(before), name)


class _Place(NamedTuple):
    """A slot of a module. `registry` is its dict of parameters or of buffers."""

    module: nn.Module
    registry: dict[str, Any]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells places apart."""
        return id(self.module), self.name

    @property
    def is_persistent(self) -> bool:
        """Whether a state dict has it."""
        return self.name not in self.module._non_persistent_buffers_set

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there."""
        if self.registry is self.module._parameters and not isinstance(tensor, nn.Parameter):
            self.registry[self.name] = tensor
        else:
            # Recurrent layers keep a list of their weights up to date in __setattr__.
            setattr(self.module, self.name, tensor)


def _places(module: nn.Module) -> Iterator[tuple[_Place, torch.Tensor]]:
    """Yield the slots of a module, and their tensors."""
    registries: list[dict[str, Any]] = [module._parameters, module._buffers]
    for registry in registries:
        for name, tensor in list(registry.items()):
            if tensor is not None:
                yield _Place(module, registry, name), tensor


class _Start(NamedTuple):
    """A tensor before the code ran.

    Attributes:
        place: Where it was.
        live: The tensor.
        made: Its stand-in, or the tensor itself.
        construction: How a skeleton makes it, as its module knows, or None.
    """

    place: _Place
    live: torch.Tensor
    made: torch.Tensor
    construction: object


class _Report(NamedTuple):
    """What one call of torch's `load_state_dict` reports, with the names of the model.

    Attributes:
        missing, unexpected: As in torch.
        errors: Texts of the code.
        is_refused: Whether the load refuses this.
    """

    missing: list[str]
    unexpected: list[str]
    errors: list[str]
    is_refused: bool


class _Hook:
    """A hook of one run. Copies of a module share it, and it does nothing after the run."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call: Callable[..., None] | None = call

    def __call__(self, *args: Any) -> None:
        if self.call is not None:
            self.call(*args)

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> Any:
        return _Hook, (None,)


class _Run:
    """A run of the loading code of a model. Modules and places are known by their identity."""

    def __init__(self, code: LoadingCode, shown: Shown, refuses: Refuses, *, strict: bool) -> None:
        self.outcome = Outcome()
        self._code, self._shown, self._refuses, self._strict = code, shown, refuses, strict
        self._modules = {id(m): m for root in code.roots for _, m in walk(root[1])}
        # Modules with code, whose tensors get stand-ins. torch copies there, and assigns elsewhere.
        self._with_code = self._find_code()
        # An override may write to all, and torch would exchange the content of live tensors.
        self._swaps = torch.__future__.get_swap_module_params_on_conversion()
        every = code.is_override or self._swaps
        self.writing = {*self._modules} if every else self._with_code
        self._copying: set[int] = set()
        self._start: dict[tuple[int, str], _Start] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._copies: dict[object, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        #: Place -> value that torch would refuse. The plan decides on it.
        self._aside: dict[tuple[int, str], Any] = {}
        #: Places with a value from torch.
        self._given: set[tuple[int, str]] = set()
        #: Place -> the value that torch copies there.
        self._copied: dict[tuple[int, str], torch.Tensor] = {}
        #: First and last address of a value, identity of the tensor that got it (0: several will
        #: get it), and its version, in order.
        self._owners: list[tuple[int, int, int, int]] = []
        self._begun: set[int] = set()
        #: Names of tensors that no code changes, and that torch could not load into themselves.
        self._outside: set[str] = set()
        self._reports: dict[int, _Report] = {}
        self._before_code = [(prefix, m, dict(vars(m))) for prefix, m in code.modules]

    # ---- stand-ins

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Put stand-ins into the slots of modules that write. In the end, put live tensors back."""
        try:
            for key, module in self._modules.items():
                writes = key in self.writing
                here = list(_places(module))
                for place, live in here:
                    if writes or is_lazy(live):
                        self._stand_in(place, live)
                    else:
                        self._note(place, live, live)
                is_blank = any(one.is_meta or is_lazy(one) for _, one in here)
                if writes and not is_blank:
                    self._copying.add(key)
            yield
        except BaseException:
            for place, live, *_ in self._start.values():
                if place.registry.get(place.name) is not live:
                    place.put(live)
            raise
        for place, live, made, _ in self._start.values():
            if made is not live and place.registry.get(place.name) is made:
                place.put(live)

    def keep_constructions(self) -> None:
        """Tell modules again how their tensors are made. They forgot it with each new tensor."""
        for place, live, _, known in self._start.values():
            if known is not None and place.registry.get(place.name) is live:
                vars(place.module).setdefault(CONSTRUCTION, {})[place.name] = known

    def _find_code(self) -> set[int]:
        """Return the modules with code, and those that share a tensor with one of them."""
        found, more = set[int](), {id(module) for _, module in self._code.modules}
        while more:
            found |= more
            tied = {id(t) for key in more for _, t in _places(self._modules[key])}
            more = {
                key
                for key, module in self._modules.items()
                if key not in found and any(id(t) in tied for _, t in _places(module))
            }
        return found

    def _stand_in(self, place: _Place, live: torch.Tensor) -> None:
        """Put a copy of a live tensor in its place. Tied tensors have one copy."""
        made = self._made.get(id(live))
        if made is None:
            if is_lazy(live):  # the code may give it a shape
                kind: Any = type(live)
                made = kind(live.requires_grad, device=live.device, dtype=live.dtype)
            else:
                made = successor_of(live, live.data if live.is_meta else self._copy(live))
            assert made is not None
            self._made[id(live)] = made
        self._note(place, live, made)
        place.put(made)

    def _copy(self, live: torch.Tensor) -> torch.Tensor:
        """Return a copy of a live tensor. Tensors over one memory have one copy."""
        key: object = id(live)
        if (memory := memory_of(live)) is not None:
            key = memory, live.storage_offset(), live.shape, live.stride(), live.dtype
        if key not in self._copies:
            self._copies[key] = clone_of(live)
            if live.device.type == "cpu":
                self.outcome.nbytes += content_bytes(local_tensor(live))
        return self._copies[key]

    def _note(self, place: _Place, live: torch.Tensor, made: torch.Tensor) -> None:
        known = vars(place.module).get(CONSTRUCTION, {}).get(place.name)
        self._start[place.key] = _Start(place, live, made, known)
        for tensor in (live, made):
            self._versions.setdefault(id(tensor), version_of(tensor))

    # ---- what torch does

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Register the two hooks on each module."""
        handles: list[Any] = []
        before, after = _Hook(self._before), _Hook(self._after)
        try:
            for module in self._modules.values():
                untyped: Any = module
                handles.append(untyped.register_load_state_dict_pre_hook(before))
                handles.append(untyped.register_load_state_dict_post_hook(after))
            yield
        finally:
            for handle in handles:
                handle.remove()
            before.call = after.call = None

    def call(self, prefix: str, root: nn.Module) -> None:
        """Call the `load_state_dict` of a root.

        Args:
            prefix: How the names of its state begin in the model.
            root: A model.
        """
        paths = [(prefix + path, module) for path, module in walk(root)]
        self._paths = {id(module): path for path, module in reversed(paths)}
        # Loaded a second time, from values that its code must not have changed.
        counts = Counter(id(module) for _, module in paths)
        self._again = {key for key, count in counts.items() if count > 1}
        self._root, self._errors = root, list[str]()
        self._note_shared()
        self._refused = ""
        self._overrides = _overriding(prefix, root, inside=False) is not None
        shown = self._shown
        state: OrderedDict[str, Any] = OrderedDict(
            (name.removeprefix(prefix), value)
            for name, value in shown.values.items()
            if name.startswith(prefix)
        )
        takers = (path[len(prefix) :] for path, module in paths if _takes_extra(type(module)))
        _nest(state, {path + EXTRA_STATE for path in takers})
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{path}."[len(prefix) : -1], dict(says))
            for path, says in shown.versions.items()
            if f"{path}.".startswith(prefix)
        )
        try:
            self._call(root, state)
        except KeyError as error:  # which alone would not say why the file seems to lack the name
            asked = f"{prefix}{error.args[0] if error.args else ''}"
            if self._overrides or not any(n.startswith(f"{asked}.") for n in shown.values):
                raise
            raise PlacementError(
                "the loading code of its module asks for a container, and those of a file are "
                "taken apart",
                file=shown.path,
                entry=asked,
                hint="Build the model without torchlift.skeleton, and load it with torch: "
                "model.load_state_dict(torch.load(path)).",
            ) from error
        for report in self._reports.values():
            self.outcome.missing += report.missing
            self.outcome.unexpected += report.unexpected
            if report.errors and not self.outcome.is_lenient:
                raise MismatchError(
                    f"a module's own loading code refused: {'; '.join(report.errors)}",
                    file=shown.path,
                    entry=self._refused or None,
                )
        self._reports.clear()

    def _call(self, root: nn.Module, state: OrderedDict[str, Any]) -> None:
        method, names = own(root, "load_state_dict"), [*state]
        try:
            # The hooks remove the names that a load refuses, except for an override.
            if self._strict and self._overrides:
                method(state)
            else:
                method(state, strict=False)
            if self._overrides and self._is_refused():
                self.outcome.is_lenient = True
        except Exception as error:
            if isinstance(error, RuntimeError) and self._is_refused():
                # The verdict of the load has all names. Its traceback would keep this run alive.
                self.outcome.error = error.with_traceback(None)
            else:
                self._explain(error, root, names)
                raise

    def _explain(self, error: Exception, root: nn.Module, names: Sequence[str]) -> None:
        """Add to an error of the code what it got, and the way out."""
        on_meta = any(start.live.is_meta for start in self._start.values())
        is_of_meta = on_meta and isinstance(error, RuntimeError)  # such as a value that it reads
        if isinstance(error, CheckpointError) or not (self._overrides or is_of_meta):
            return
        note(
            error,
            f"the load_state_dict of {type(root).__name__} raised this. It got "
            f"{clipped_list(names)}, under dotted names, as the arguments of the load leave "
            f"them. Load as torch does: {'torchlift.materialize(model), then ' * on_meta}"
            "model.load_state_dict(torchlift.open(path).tree()), or with the state dict in "
            "memory.",
        )

    def _is_refused(self) -> bool:
        return any(report.is_refused for report in self._reports.values())

    def _before(
        self, module: nn.Module, values: dict[str, Any], prefix: str, metadata: dict[str, Any],
        _strict: bool, _missing: list[str], _unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Prepare the values of a module, as the last of its pre-hooks."""
        self._errors = errors
        (self._begun.discard if prefix else self._begun.add)(id(module))
        copies = id(module) in self._copying
        metadata["assign_to_params_buffers"] = not copies
        is_inside = self._code.covers(self._paths.get(id(module), ""))
        for place, tensor in _places(module):
            name = prefix + place.name
            if not is_inside:
                if is_lazy(tensor) or tensor.is_inference() or self._swaps:
                    self._outside.add(name)
                elif place.is_persistent:
                    values[name] = tensor  # to itself, so that it is not missing
                continue
            value = values.get(name) if place.is_persistent else None
            if is_dtensor(tensor) and value is not None and _is_whole(value, tensor):
                # It was shown under another name, which does not tell the slice of this rank.
                value = values[name] = wrap(tensor, shard_of_value(value, tensor, name))
            self._aside.pop(place.key, None)
            if value is not None and _can_take(tensor, value, copies=copies):
                self._given.add(place.key)
                if copies:
                    self._copied[place.key] = value
                if not copies and has_memory(value) and value.numel():
                    # If torch copied, two tensors would not share the memory of one value.
                    live = self._start[place.key].live if place.key in self._start else tensor
                    if id(module) in self._again or self._find_owner(value, id(live)) != id(live):
                        values[name] = clone_of(value)
                continue
            if value is not None:
                self._aside[place.key] = values.pop(name)
            start = self._start.get(place.key)
            is_live = start is not None and tensor is start.live is start.made
            if is_live and not tensor.is_meta:  # post-hooks may write to it
                self._stand_in(place, tensor)

    def _note_shared(self) -> None:
        """Note that values belong to none of the tensors of the model if two of them get one."""
        lives = {
            self._paths.get(key[0], "") + start.place.name: id(start.live)
            for key, start in self._start.items()
        }
        first: dict[int, object] = {}
        for name, value in self._shown.tensors.items():
            if has_memory(value) and value.numel():
                live = lives.get(name, name)
                if first.setdefault(value.data_ptr(), live) != live:
                    self._find_owner(value, 0)

    def _find_owner(self, value: torch.Tensor, live: int) -> int:
        """Return the tensor that got a value of the same memory, or note this one."""
        steps = zip(value.shape, value.stride(), strict=True)
        first = value.data_ptr()
        end = first + (1 + sum((size - 1) * step for size, step in steps)) * value.itemsize
        at = bisect(self._owners, (first, end, 0, 0))
        for low, high, owner, version in self._owners[max(at - 1, 0) : at + 1]:
            if low < end and first < high:
                if owner == live != 0 and version != version_of(local_tensor(value)):
                    raise PlacementError(
                        "the loading code of the model writes to what it has loaded, and loads it "
                        "once more",
                        file=self._shown.path,
                        hint="Build the model without torchlift.skeleton, or call "
                        "torchlift.materialize(model) before you load.",
                    )
                return owner
        self._owners.insert(at, (first, end, live, version_of(local_tensor(value))))
        return live

    def _after(self, module: nn.Module, keys: Any) -> None:
        """Record the names that one call of torch reports, as the last of all post-hooks."""
        if self._errors and not self._refused:
            self._refused = self._paths.get(id(module), "")[:-1]
        if module is not self._root and id(module) not in self._begun:
            return
        path, errors = self._paths.get(id(module), ""), self._errors
        aside = {
            prefix + place.name: (tensor, self._aside[place.key])
            for prefix, each in (walk(module) if self._aside else ())
            for place, tensor in _places(each)
            if place.key in self._aside
        }
        others = [name for name, (_, value) in aside.items() if not _is_tensor(value)]
        misshapen = [
            path + name
            for name, (tensor, value) in aside.items()
            if _is_tensor(value) and not _fits(tensor, value)
        ]
        missing = [
            path + name
            for name in keys.missing_keys
            if name not in self._outside and (name not in aside or name in others)
        ]
        unexpected = [path + name for name in (*keys.unexpected_keys, *others)]
        is_refused = bool(errors) or self._refuses(missing, unexpected, misshapen)
        for each in module.modules():  # of an attempt before this one
            self._reports.pop(id(each), None)
        self._reports[id(module)] = _Report(missing, unexpected, [*errors], is_refused)
        if is_refused and self._overrides:  # torch raises, and the code may try again
            errors += [f"size mismatch for {name}." for name in misshapen]
            return
        errors.clear()
        if self._overrides and not strict_of_caller():
            return  # torch does not raise, and the code may look at the names
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    # ---- what it leaves

    def collect(self, tree: ModuleTree, commit: Commit) -> None:
        """Take the values out of the slots. Put tensors there that can receive them."""
        names: dict[tuple[int, str], list[str]] = {}
        places: dict[tuple[int, str], tuple[_Place, torch.Tensor]] = {}
        for prefix, module in tree.paths:
            for place, found in _places(module):
                places[place.key] = place, found
                if self._code.covers(name := prefix + place.name):
                    names.setdefault(place.key, []).append(name)
        for key, (place, found) in places.items():
            start, called = self._start.get(key), names.get(key, [])
            if key in self._aside and called:
                if _is_tensor(self._aside[key]):
                    self.outcome.tensors |= dict.fromkeys(called, self._aside[key])
            elif start is not None and found is start.made:
                self._collect_stand_in(start, called, commit)
            elif place.is_persistent and called:
                self._collect_other(place, found, start, called, commit)
            elif start is not None and self._is_shown(found):
                place.put(clone_of(found))  # of a buffer that no state dict has
        if self.outcome.is_lenient:  # torch reports what an override has written by itself
            values = self.outcome.tensors
            self.outcome.missing = [name for name in self.outcome.missing if name not in values]
        self._note_kept()

    def check_untouched(self) -> None:
        """Refuse writes to live tensors. Nothing can take them back.

        Raises:
            PlacementError: If there are some.
        """
        found = dict.fromkeys(
            self._paths.get(key[0], "") + start.place.name
            for key, start in self._start.items()
            if version_of(start.live) != self._versions[id(start.live)] and not is_lazy(start.live)
        )
        if found:
            first, *others = found
            more = f" and {len(others)} more" if others else ""
            raise PlacementError(
                f"loading code of the model writes into this tensor{more} before the load is "
                "decided, so its values may have changed",
                entry=first,
                hint="Write to it in a hook of the model itself: "
                "model.register_load_state_dict_post_hook(...).",
            )

    def _collect_stand_in(self, start: _Start, called: Sequence[str], commit: Commit) -> None:
        """Take a value that the code, or torch for it, has written to a stand-in."""
        place, live, made, _ = start
        if made is live or is_lazy(made):
            self._excuse(called)
            return
        was_filled = live.is_meta and not made.is_meta  # torch swaps on conversion
        has_blank = not was_filled and _layout(live) != _layout(made)
        # `.data` and NumPy leave no trace in the version.
        is_written = version_of(made) != self._versions[id(made)] or not has_same_bytes(live, made)
        if live.is_meta and made.is_meta:
            taken = [
                name
                for name in called
                if name in self._shown.tensors and place.key not in self._given
                if self._shown.tensors[name].shape == live.shape
                if self._code.is_override or name not in self.outcome.missing
            ]
            # A write through `.data` leaves no trace on meta: a value that the code took out of
            # the state dict has been written there, or is lost.
            if is_written or taken:
                raise written_on_meta((taken or [*called, place.name])[0], self._shown.path)
        _set_flag(live, made)
        value = self._copied.get(place.key)
        if value is not None and not has_blank and _is_cast_of(made, value):
            self._take(called, value)  # before the cast of the model
            return
        if has_blank:
            blank = torch.empty(made.shape, dtype=made.dtype, device=made.device)
            commit.set_data(live, blank, place.name)
        if not is_written:
            self._excuse(called)
        elif place.is_persistent:
            self._take(called, made, is_new=True)
        else:
            commit.keep_values(live, place.name)
            with torch.no_grad():
                local_tensor(live).copy_(local_tensor(made))

    def _collect_other(
        self,
        place: _Place,
        found: torch.Tensor,
        start: _Start | None,
        called: Sequence[str],
        commit: Commit,
    ) -> None:
        """Take a value that the code, or torch for it, has put into a slot."""
        live = start.live if start is not None else None
        if not {*called}.isdisjoint(self.outcome.missing):
            return  # a hook has put it there
        is_known = place.key in self._given or self._is_shown(found)
        if live is None and not is_known:
            if found.is_meta or {*called}.isdisjoint(self._shown.tensors):
                self._excuse(called)
            else:  # torch has copied it into a module that the code has made
                self._take(called, clone_of(found), is_new=True)
            return
        if found.is_meta and not self._is_shown(found):
            if live is None or memory_of(found) != memory_of(live):
                raise _lost_error(called[0])
            self.outcome.own |= {*called}
            place.put(live)
            return
        self._take(called, found)
        # The code may have put one tensor into two slots.
        home = self._homes.setdefault(id(found), live) if live is not None else None
        if home is not None and home is not live:
            place.put(home)
            return
        if live is not None and (is_lazy(live) or live.shape == found.shape):
            _set_flag(live, found)
            place.put(live)
            return
        # The code has decided on another shape, or on one more tensor.
        like = found if live is None else live
        blank = torch.empty(found.shape, dtype=like.dtype, device=like.device)
        place.put(successor_of(like, blank))

    def _take(self, called: Sequence[str], value: torch.Tensor, *, is_new: bool = False) -> None:
        value = value.detach()
        known = [name for name in called if name in self._shown.tensors]
        self.outcome.tensors |= dict.fromkeys(known or called, value)
        if is_new:
            self.outcome.new.add(id(value))

    def _excuse(self, called: Iterable[str]) -> None:
        self.outcome.excused |= {*called}.difference(self.outcome.missing)

    def _is_shown(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has memory of one that the code got."""
        return memory_of(tensor) in self._memories

    @cached_property
    def _homes(self) -> dict[int, torch.Tensor]:
        """Identity of what is in a slot now -> the live tensor that gets its value."""
        return {id(start.made): start.live for start in self._start.values()}

    @cached_property
    def _memories(self) -> set[int | None]:
        return {memory_of(one) for one in self._shown.tensors.values()} - {None}

    def _note_kept(self) -> None:
        """Record tensors that modules keep as attributes or extra state. Copy those of a map.

        A module that has got a slot from a value of another name has renamed it, and keeps none.
        """
        out, shown = self.outcome, self._shown
        gone = {*out.unexpected, *out.tensors}
        mapped = {memory_of(shown.tensors[name]) for name in shown.mapped} - {None}
        # Sorted: a walk over all of them for each module would cost the square of many modules.
        order, renamed = sorted(shown.tensors), sorted(out.tensors.keys() - shown.tensors.keys())
        places = {name: at for at, name in enumerate(shown.tensors)}
        for prefix, module, before in self._before_code:
            attributes = vars(module)
            changed = [name for name, value in attributes.items() if before.get(name) is not value]
            takes_extra = _takes_extra(type(module))
            if not (changed or takes_extra):
                continue
            for name in changed:
                if any(_is_of_memory(leaf, mapped) for leaf in leaves(attributes[name]).values()):
                    attributes[name] = copied(attributes[name], mapped)
            children = tuple(f"{prefix}{name}." for name in module._modules)
            slots = {prefix + place.name for place, _ in _places(module)}
            holds = any(
                not isinstance(leaf, _PLAIN)
                for name in changed
                for leaf in leaves(attributes[name]).values()
            )
            keeps = bool(changed) and not _names_under(prefix, renamed)
            for name in sorted(_names_under(prefix, order), key=places.__getitem__):
                is_extra = takes_extra and extra_state(name) == prefix + EXTRA_STATE
                is_own = (
                    keeps
                    and (holds or name[len(prefix) :].partition(".")[0] in attributes)
                    and not name.startswith(children)
                    and name not in slots
                )
                if (is_extra or is_own) and name not in gone:
                    out.kept.append(name)


def _names_under(prefix: str, order: Sequence[str]) -> Sequence[str]:
    """Return which of these sorted names begin with a prefix."""
    # It is empty or ends in a dot, and a slash is the character after that.
    end = bisect_left(order, prefix[:-1] + "/") if prefix else len(order)
    return order[bisect_left(order, prefix) : end]


def _can_take(tensor: torch.Tensor, value: object, *, copies: bool) -> bool:
    """Return whether torch takes a value for a tensor of the model."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    if not _fits(tensor, value):
        return False
    # torch cannot assign integers to a parameter that is trained. It copies them, cast.
    trains = tensor.requires_grad and not tensor.is_meta and not copies and not is_lazy(tensor)
    return not trains or value.is_floating_point() or value.is_complex()


def _is_cast_of(made: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a stand-in has a value of another dtype as torch has copied it."""
    odd = is_wrapper(local_tensor(made)) or is_wrapper(local_tensor(value))
    if made.dtype == value.dtype or odd or made.is_quantized or value.is_quantized:
        return False
    return has_same_bytes(made, value.detach().reshape(made.shape).to(made))


def _fits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    if is_lazy(tensor) or is_lazy(value):
        return True
    return not value.is_nested and (
        tensor.shape == value.shape or (tensor.dim() == 0 and value.dim() == 1 == len(value))
    )


def _is_whole(value: object, tensor: torch.Tensor) -> bool:
    """Return whether a value is a plain one of the complete shape of a sharded tensor."""
    return isinstance(value, torch.Tensor) and is_plain(value) and value.shape == tensor.shape


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _set_flag(live: torch.Tensor, made: torch.Tensor) -> None:
    """Let a live parameter be trained if the code's is. The commit knows how it was."""
    is_parameter = isinstance(live, nn.Parameter) and isinstance(made, nn.Parameter)
    if is_parameter and live.requires_grad is not made.requires_grad:
        live.requires_grad = made.requires_grad  # the method refuses lazy ones


def _is_of_memory(value: object, memories: Collection[int | None]) -> bool:
    return bool(memories) and isinstance(value, torch.Tensor) and memory_of(value) in memories


def copied(state: Any, memories: Collection[int | None] = ()) -> Any:
    """Return a copy of a value, with copies of the tensors that are in these memories."""
    tensors = [leaf for leaf in leaves(state).values() if isinstance(leaf, torch.Tensor)]
    memo = {id(t): t.clone() if _is_of_memory(t, memories) else t for t in tensors}
    try:
        return copy.deepcopy(state, memo)
    except Exception:  # a lock or a stream cannot be copied: torch copies nothing at all
        return state


def _nest(state: dict[str, Any], names: Collection[str]) -> None:
    """Join extra states that were saved without containers to nested dicts.

    Args:
        state: Name -> value.
        names: The names of extra states.
    """
    whole = {*state}
    for key in list(state):
        name = extra_state(key)
        if name not in names or name in whole:
            continue
        *path, last = key[len(name) + 1 :].split(".")
        place = state.setdefault(name, {})
        for part in path:
            place = place.setdefault(part, {})
        place[last] = state.pop(key)


def written_on_meta(name: str, file: str | None = None) -> PlacementError:
    """Return the error for code that writes into a tensor on meta."""
    return PlacementError(
        "its module's own loading code writes into it, and on meta nothing can be written",
        file=file,
        entry=name,
        hint="Build the model with torchlift.skeleton, and call "
        f"torchlift.materialize(model, names=[{name!r}]) before you load.",
    )


def _lost_error(name: str) -> PlacementError:
    return PlacementError(
        "the model's own loading code leaves it without a value on meta",
        entry=name,
        hint="Build the model with torchlift.skeleton, and call torchlift.materialize(model) "
        "before you load. Or load into a model that has values.",
    )


def has_same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, bit by bit.

    Example:
        >>> has_same_bytes(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
        True
    """
    one, two = local_tensor(one), local_tensor(two)
    if is_wrapper(one):
        return all(map(has_same_bytes, inner_tensors(one), inner_tensors(two)))
    if one.is_meta or two.is_meta or _layout(one) != _layout(two):
        return _layout(one) == _layout(two)
    # torch cannot compare sparse tensors; of these, writes that it counts are known.
    return not has_memory(one) or torch.equal(bytes_of(one), bytes_of(two))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device

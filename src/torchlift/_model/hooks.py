"""Run the loading code that modules have: hooks, overrides, extra state.

Modules may change the state dict they are loaded from (``register_load_state_dict_pre_hook``), load
themselves (``_load_from_state_dict``), keep state that is not a tensor (``set_extra_state``), or
look at the result (``register_load_state_dict_post_hook``). torch runs all of it while it writes.
Here it runs before anything is written, on a dict of mapped tensors, so that what it decides
becomes part of the plan. The module's own tensors are copies meanwhile. Code that writes into
another live tensor is refused. Hooks that look at the result run when there is one.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchlift._model.commit import Commit, successor_of
from torchlift._model.dtensor import is_fsdp
from torchlift._model.handlers import has_memory
from torchlift._model.slots import ModuleTree, is_lazy
from torchlift._model.stand_ins import (
    Change,
    StandIns,
    Untouched,
    own_tensors,
    written_on_meta,
)
from torchlift._model.torch_private import (
    LAZY_HOOK,
    IncompatibleKeys,
    NormBase,
    differs_in_shape,
    memory_of,
)
from torchlift._system.containers import leaves
from torchlift.errors import MismatchError, PlacementError
from torchlift.formats.flattening import Containers, flatten_state

_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a source that loading code of a model sees.

    Attributes:
        path: The path of the source, for errors.
        values: Name in the model -> tensor, container or plain value, as they were saved.
        tensors: Name in the model -> each of the tensors. The code may write to it.
        mapped: Names of the tensors that are mapped from a file.
        versions: Path of a module of the model -> its metadata in the state dict.
    """

    path: str
    values: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]
    mapped: Collection[str]
    versions: Mapping[str, Mapping[str, object]]


@dataclass(slots=True)
class Outcome:
    """The result of running the modules' loading code.

    Attributes:
        tensors: Name in the model -> its value after all hooks.
        excused: Names of the model that get no value and do not count as missing.
        missing, unexpected: Names that the code itself reported.
        extra: Pairs of a module and the state for its `set_extra_state`.
        taken: Names of tensors that a module keeps outside of its parameters and buffers, such as
            packed weights, attributes and extra state.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    excused: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    extra: list[tuple[nn.Module, object]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)


def hooked_modules(tree: ModuleTree, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return (prefix, module) of every module with loading code of its own for these names."""
    known, kinds = set(names), {type(module) for module in tree.modules}
    plain = {kind for kind in kinds if not (_overrides_load(kind) or _takes_extra(kind))}
    return [
        (prefix, module)
        for prefix, module in tree.paths
        if module._load_state_dict_pre_hooks or type(module) not in plain
        if _has_code(module, prefix, known)
    ]


def run_hooks(
    tree: ModuleTree,
    modules: Sequence[tuple[str, nn.Module]],
    commit: Commit,
    shown: Shown,
    own: bool,
) -> Outcome:
    """Run the loading code of modules, as `load_state_dict` would.

    Tensors under the prefix of such a module get the values that its code leaves.

    Args:
        tree: The model.
        modules: The result of `hooked_modules`.
        commit: Undoes changes of attributes and slots.
        shown: The part of the source that the code sees.
        own: Whether to copy tensors that modules keep as attributes, because the map of the file
            may end before the module.

    Raises:
        PlacementError: If the code writes into a live tensor of another module, or asks for a
            container.
    """
    commit.keep_attributes(tree.modules)
    commit.keep_flags(tree)
    untouched = Untouched.of(tree)
    counts = Counter(id(module) for _, module in modules)
    run = _Run(shown, untouched, {each for each in counts if counts[each] > 1})
    try:
        for prefix, module in modules:
            run.visit(prefix, module)
    finally:  # also if the code raises: that error would hide what it has written
        untouched.check(
            "loading code of the model",
            "Write to it in a hook of register_load_state_dict_post_hook.",
        )
    run.own(own)
    run.finish(commit)
    tree.walk()  # again: the code may have put other tensors in their slots
    return run.outcome


def _has_code(module: nn.Module, prefix: str, names: set[str]) -> bool:
    hooks = module._load_state_dict_pre_hooks
    hooked = bool(hooks) and not all(is_fsdp(h) or _is_lazy_hook(h) for h in hooks.values())
    if type(module)._load_from_state_dict is NormBase._load_from_state_dict:
        # Batch norm adds a counter to files of torch < 0.4.1, and otherwise loads as any module.
        own = prefix + "num_batches_tracked" not in names
    else:
        own = _overrides_load(type(module))
    return own or _takes_extra(type(module)) or hooked


def _overrides_load(kind: type[nn.Module]) -> bool:
    return kind._load_from_state_dict is not nn.Module._load_from_state_dict


def _is_lazy_hook(hook: Any) -> bool:
    # It gives an uninitialised parameter its shape, which placing the tensor does anyway.
    inner = getattr(hook, "hook", hook)
    return getattr(inner, "__func__", None) is LAZY_HOOK


class _Watched(OrderedDict[str, Any]):
    """A state dict that records which of its values are used."""

    def __init__(self, items: Iterable[tuple[str, Any]]) -> None:
        super().__init__(items)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.used.add(name)
        return super().pop(name, *default)


class _Run:
    """A state dict that passes through the modules with loading code of their own.

    Attributes:
        state: Name in the model -> value that the code sees.
        set: Pairs of a module and an attribute that its override sets.
        shared: Identities of modules with several names.
        stand_ins: Identity of a shared module -> its stand-ins.
        changes: Identity of a module -> changes of its stand-ins.
        order: The names of `state`, sorted: a walk over all of them for each module would cost the
            square of many modules.
        tensors: The names of the source's tensors, sorted.
        places: Name -> its place in the state dict. torch keeps that order.
    """

    def __init__(self, shown: Shown, untouched: Untouched, shared: Collection[int]) -> None:
        self.shown = shown
        self.untouched = untouched
        self.shared = shared
        self.set: list[tuple[nn.Module, str]] = []
        self.stand_ins: dict[int, StandIns] = {}
        self.changes: dict[int, Iterable[Change]] = {}
        self.outcome = Outcome()
        self.state: dict[str, Any] = {**shown.values}
        self.order, self.tensors = sorted(self.state), sorted(shown.tensors)
        self.places = {name: at for at, name in enumerate([*shown.tensors, *self.state])}
        self.memories = set(map(memory_of, shown.tensors.values())) - {None}

    def visit(self, prefix: str, module: nn.Module) -> None:
        """Run one module's code on its part of the state dict."""
        names, count = self._under(prefix, self.order), len(self.set)
        local = _Watched((name, self.state[name]) for name in names)
        # torch cannot assign integers to a parameter that is trained. It copies them, cast.
        assign = not any(
            one.requires_grad and not one.is_meta and not _can_train(self.state.get(prefix + name))
            for name, one in own_tensors(module)
        )
        metadata = {**self.shown.versions.get(prefix[:-1], {}), "assign_to_params_buffers": assign}
        if _takes_extra(type(module)):
            _nest(local, prefix + _EXTRA)
        stand_ins = self.stand_ins.get(id(module)) or StandIns([(prefix, module)])
        if id(module) in self.shared:
            self.stand_ins[id(module)] = stand_ins
        stand_ins.put_on()
        try:
            if _overrides_load(type(module)):
                self._override(prefix, module, local, metadata, stand_ins)
            else:
                self._pre_hooks(prefix, module, local, metadata)
                self.changes[id(module)] = stand_ins.take_off().values()
        except KeyError as error:  # which alone would not say why the file seems to lack the name
            asked = str(error.args[0]) if error.args else ""
            if not any(name.startswith(f"{asked}.") for name in names):
                raise
            raise PlacementError(
                "the loading code of its module asks for a container, and those of a file are "
                "taken apart",
                file=self.shown.path,
                entry=asked,
                hint="Build the model without torchlift.skeleton, and load it with torch: "
                "model.load_state_dict(torch.load(path)).",
            ) from error
        self.untouched.add((prefix + name, tensor) for name, tensor in own_tensors(module))
        self._note_taken(prefix, module, names, local.used, sets=len(self.set) > count)
        for name in names:  # the code has left something else of its part
            del self.state[name]
        # Names outside of the prefix are dropped: torch gives each child a filtered copy, too.
        kept = {name: value for name, value in local.items() if name.startswith(prefix)}
        self.state |= kept
        self.order[_range(prefix, self.order)] = sorted(kept)
        for name in kept:
            self.places.setdefault(name, len(self.places))

    def _under(self, prefix: str, order: Sequence[str]) -> list[str]:
        """Return the names that begin with a prefix, of sorted ones, as the state has them."""
        return sorted(order[_range(prefix, order)], key=self.places.__getitem__)

    def _note_taken(
        self,
        prefix: str,
        module: nn.Module,
        names: Iterable[str],
        used: Iterable[str],
        *,
        sets: bool,
    ) -> None:
        """Record the tensors that a module keeps outside of its parameters and buffers.

        Args:
            prefix: The prefix of the module's names.
            module: The module.
            names: Names of the values that its code saw.
            used: Names of values, and of containers of values, that the code used.
            sets: Whether the code set attributes. If not, it dropped the values.
        """
        children = tuple(f"{prefix}{name}." for name in module._modules)
        slots = {prefix + name for name, _ in own_tensors(module)}
        # A slot that got a value of another name was renamed from an older file: none is kept.
        sets = sets and not any(name in self.outcome.tensors for name in slots.difference(names))
        extra, inside = f"{prefix}{_EXTRA}.", tuple(f"{name}." for name in used)
        for name in self._under(prefix, self.tensors):
            is_extra = f"{name}.".startswith(extra) and _takes_extra(type(module))
            is_own = sets and not name.startswith(children) and name not in slots
            if (is_extra or is_own) and f"{name}.".startswith(inside):
                self.outcome.taken.append(name)

    def _pre_hooks(
        self, prefix: str, module: nn.Module, local: OrderedDict[str, Any], metadata: dict[str, Any]
    ) -> None:
        missing, unexpected, errors = self.outcome.missing, self.outcome.unexpected, list[str]()
        for hook in module._load_state_dict_pre_hooks.values():
            if not _is_lazy_hook(hook) and not is_fsdp(hook):
                hook(local, prefix, metadata, True, missing, unexpected, errors)  # as torch does
        self._refuse(errors, prefix)
        if not _takes_extra(type(module)):
            return
        if prefix + _EXTRA in local:
            self.outcome.extra.append((module, local.pop(prefix + _EXTRA)))
        else:
            missing.append(prefix + _EXTRA)

    def _override(
        self,
        prefix: str,
        module: nn.Module,
        local: OrderedDict[str, Any],
        metadata: dict[str, Any],
        stand_ins: StandIns,
    ) -> None:
        """Let a module load into its stand-ins, and look what it did."""
        missing, unexpected, errors = list[str](), list[str](), list[str]()
        extras: list[object] = []
        attributes, known = dict(vars(module)), dict(own_tensors(module)).keys()
        if _takes_extra(type(module)):
            object.__setattr__(module, "set_extra_state", extras.append)
        # Strict in any case: torch's own code lists no missing name otherwise, and a name that is
        # not listed counts as accepted. What becomes of the lists is for the plan to say.
        module._load_from_state_dict(local, prefix, metadata, True, missing, unexpected, errors)
        vars(module).pop("set_extra_state", None)
        # torch's line for a shape that differs: the plan lists all of them in one error.
        self._refuse([text for text in errors if not differs_in_shape(text)], prefix)
        self.outcome.extra += [(module, state) for state in extras]
        slots, changes = dict(own_tensors(module)), stand_ins.take_off()
        self.changes[id(module)] = changes.values()
        for name, found in slots.items():
            full, given = prefix + name, local.get(prefix + name)
            change, live = changes.get((id(module), name)), stand_ins.live.get((id(module), name))
            in_place = found is live or found is stand_ins.made.get((id(module), name))
            written = in_place and change is not None and change.is_written
            shown = self.shown.tensors.get(full)
            if in_place and found.is_meta and full not in missing and not is_lazy(found):
                # A write through `.data` leaves no trace on meta. A value of the right shape that
                # the code took out of the state dict has been written there, or is lost.
                was_taken = shown is not None and given is None and shown.shape == found.shape
                if written or was_taken:
                    raise written_on_meta(full, self.shown.path)
            if full in missing and not in_place:  # a hook has put it there
                continue
            if name in module._non_persistent_buffers_set:
                if not in_place and memory_of(found) in self.memories:
                    setattr(module, name, found.clone())  # nothing else gives it values
                continue
            if not in_place:
                self._replace(module, name, found, live)
            refused = any(differs_in_shape(text, full) for text in errors)
            if refused and isinstance(given, torch.Tensor):
                self.outcome.tensors[full] = given  # to be reported
            elif (written or not in_place) and full not in missing:
                self.outcome.tensors[full] = found.detach()
            elif full not in missing:
                self.outcome.excused.add(full)
        self.outcome.missing += [name for name in missing if name[len(prefix) :] not in known]
        self.outcome.unexpected += unexpected
        self.set += [
            (module, name)
            for name, value in vars(module).items()
            if name not in attributes or attributes[name] is not value
        ]
        children = tuple(prefix + name + "." for name in module._modules)
        for name in [name for name in local if not name.startswith(children)]:
            del local[name]  # the module has loaded its own level; the rest is for its children

    def _replace(
        self, module: nn.Module, name: str, found: torch.Tensor, there: torch.Tensor | None
    ) -> None:
        """Put a tensor into a slot to receive the values that the code put there."""
        parameters = isinstance(there, nn.Parameter) and isinstance(found, nn.Parameter)
        if parameters and there is not None and there.requires_grad is not found.requires_grad:
            there.requires_grad_(found.requires_grad)
        if there is not None and (is_lazy(there) or there.shape == found.shape):
            setattr(module, name, there)
        elif there is not None or memory_of(found) in self.memories:
            # The module has decided on another shape, or on one more tensor.
            like = found if there is None else there
            blank = torch.empty(found.shape, dtype=like.dtype, device=like.device)
            setattr(module, name, successor_of(like, blank))

    def _refuse(self, errors: Sequence[str], prefix: str) -> None:
        if errors:
            raise MismatchError(
                f"a module's own loading code refused: {'; '.join(errors)}",
                file=self.shown.path,
                entry=prefix[:-1] or None,
            )

    def own(self, mapped: bool) -> None:
        """Copy tensors of a file that modules keep as attributes or extra state.

        Args:
            mapped: Whether to copy them. The code has copies of a caller's tensors already.
        """
        files = {memory_of(self.shown.tensors[name]) for name in self.shown.mapped} - {None}

        def is_mapped(leaf: object) -> bool:
            return mapped and isinstance(leaf, torch.Tensor) and memory_of(leaf) in files

        def copied(state: object) -> object:
            tensors = [leaf for leaf in leaves(state).values() if isinstance(leaf, torch.Tensor)]
            memo = {id(one): one.clone() if is_mapped(one) else one for one in tensors}
            try:
                return copy.deepcopy(state, memo)
            except Exception:  # a lock or a stream cannot be copied: torch copies nothing at all
                return state

        self.outcome.extra = [(module, copied(state)) for module, state in self.outcome.extra]
        for module, name in self.set:
            value = vars(module)[name]
            if any(map(is_mapped, leaves(value).values())):
                vars(module)[name] = copied(value)

    def finish(self, commit: Commit) -> None:
        """Add everything that no override took, and change live tensors as their stand-ins were."""
        flat = flatten_state(self.state, Containers((torch.Tensor,), Mapping))
        self.outcome.tensors = {**flat.tensors, **self.outcome.tensors}
        self.outcome.unexpected += flat.objects
        for change in (change for changes in self.changes.values() for change in changes):
            change.apply(commit, values=change.name not in self.outcome.tensors)


def versions_by_name(
    names: Mapping[str, str], versions: Mapping[str, Mapping[str, object]]
) -> dict[str, Mapping[str, object]]:
    """Return path of a module of the model -> its metadata in the state dict.

    Args:
        names: Key in the source -> name in the model.
        versions: Path of a module in the source -> its metadata.
    """
    found: dict[str, Mapping[str, object]] = {}
    known: set[tuple[str, str]] = set()
    for key, name in names.items() if versions else ():
        old, new, last, other = key, name, "", ""
        # Also of the modules around it, as far as the two are called alike.
        while old and new and last == other:
            old, _, last = old.rpartition(".")
            new, _, other = new.rpartition(".")
            if (old, new) in known:
                break
            known.add((old, new))
            if old in versions:
                found[new] = versions[old]
    return found


def identity_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that no other values have as long as the tensor lives."""
    if not has_memory(tensor):
        return (id(tensor),)
    # A conjugate is the same numbers in the same place, shown otherwise.
    shown = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), shown)


def _range(prefix: str, order: Sequence[str]) -> slice:
    """Return which of these sorted names begin with a prefix."""
    if not prefix:
        return slice(0, len(order))
    # It ends in a dot, and a slash is the character after that.
    return slice(*(bisect_left(order, end) for end in (prefix, prefix[:-1] + "/")))


def _can_train(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _takes_extra(kind: type[nn.Module]) -> bool:
    return kind.set_extra_state is not nn.Module.set_extra_state


def run_post_hooks(
    tree: ModuleTree, missing: list[str], unexpected: list[str], given: Collection[str]
) -> None:
    """Call the modules' post-hooks, which may remove names from the two lists.

    The hooks run in the order of `load_state_dict`.

    Args:
        tree: The loaded model.
        missing: Missing names. Hooks may change the list.
        unexpected: Unexpected names. Hooks may change the list.
        given: Names of the model that got values. Empty if the model has no hooks of its own.

    Raises:
        PlacementError: If a hook writes into a tensor that torch would load after that, because it
            has a second name or belongs to a later module.
    """
    keys = IncompatibleKeys(missing, unexpected)
    loaded = {name: g.tensor for g in tree.groups if given for name in g.names if name in given}
    if loaded:
        untouched = Untouched((g.fqn, g.tensor) for g in tree.groups if len(g.slots) > 1)
        untouched.add(loaded.items(), values=False)  # to compare their values reads all of a file

    def visit(prefix: str, module: nn.Module) -> None:
        for name, tensor in own_tensors(module) if loaded else ():
            was = loaded.get(prefix + name)
            if was is not None and (tensor is not was or untouched.has_changed(was)):
                raise PlacementError(
                    "a post-hook of the model writes into it, and load_state_dict would load it "
                    "after that",
                    entry=prefix + name,
                    hint="Register the hook on the model itself: it runs when all is loaded.",
                )
        for name, child in list(module._modules.items()):
            if child is not None:
                visit(f"{prefix}{name}.", child)
        hooks = module._load_state_dict_post_hooks
        for hook in list(hooks.values()) if hooks else ():
            answer = hook(module, keys)
            if answer is not None:
                raise TypeError(
                    "a hook of register_load_state_dict_post_hook returned a value; it changes "
                    "the lists that it gets in place"
                )

    visit("", tree.model)


def has_post_hooks(tree: ModuleTree) -> bool:
    """Say whether any module has a post-hook that could refuse a load.

    FSDP2's hook, which registers new shards, does not count.
    """
    return any(
        not is_fsdp(hook)
        for module in tree.modules
        for hook in module._load_state_dict_post_hooks.values()
    )


def templates_by_name(
    templates: Mapping[str, object], names: Mapping[str, str]
) -> dict[str, object]:
    """Return name of a container in the model -> its containers as saved."""
    found: dict[str, object] = {}
    for key, tree in templates.items():
        for leaf in leaves(tree).values():
            name = names.get(key + leaf.key)
            if name is not None and name.endswith(leaf.key):
                found[name.removesuffix(leaf.key)] = tree
                break
    return found


def _nest(local: MutableMapping[str, Any], name: str) -> None:
    """Join values that were saved without containers to nested dicts under a name."""
    inside = [key for key in local if key.startswith(name + ".")]
    if name in local or not inside:
        return
    state: dict[str, Any] = {}
    for key in inside:
        *path, last = key[len(name) + 1 :].split(".")
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[last] = local.pop(key)
    local[name] = state

"""Run a `load_state_dict` that a model's class overrides, and load what it passes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchlift._checkpoint.tree import gathered
from torchlift._model.commit import Commit, ordinary_tensors
from torchlift._model.dtensor import is_dtensor
from torchlift._model.handlers import clone_of
from torchlift._model.hooks import (
    Shown,
    hooked_modules,
    identity_of,
    templates_by_name,
    versions_by_name,
)
from torchlift._model.own_loading import OwnLoading, PassedState
from torchlift._model.slots import ModuleTree
from torchlift._model.stand_ins import has_same_bytes
from torchlift._model.torch_private import memory_of, version_of
from torchlift._plan.names import Named
from torchlift._plan.rules import Options
from torchlift._sources.opening import Origin, flat_state
from torchlift._sources.tensors import MemoryTensor, SourceTensor
from torchlift.errors import PlacementError


class _Known(NamedTuple):
    """A tensor that code of the model got. While it lives, no other tensor has its identity."""

    one: SourceTensor
    values: torch.Tensor
    shown: torch.Tensor
    version: int


class ShownTensors:
    """The tensors of a source as code of the model gets them, and what it leaves."""

    def __init__(self) -> None:
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}
        self._known: dict[tuple[object, ...], _Known] = {}

    def show(self, one: SourceTensor, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor for the code. It may write to a private map, and to a copy.

        Args:
            one: The tensor in the source.
            values: Its values.
        """
        shown = values
        # The caller's tensors are copied. Of tensors that are one, there is one copy.
        if isinstance(one, MemoryTensor) and one.entry is None:
            shown = self._copies.setdefault(identity_of(values), clone_of(values))
        known = _Known(one, values, shown, version_of(shown))
        self._known.setdefault(identity_of(shown), known)
        return shown

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the code got this tensor."""
        return identity_of(tensor) in self._known

    def find_source(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor | None
    ) -> SourceTensor:
        """Return the source of a tensor that the code left under a name.

        Args:
            name: The name.
            tensor: The tensor.
            like: The model's tensor of that name, if there is one.
        """
        known = self._known.get(identity_of(tensor))
        is_written = known is None or version_of(tensor) != known.version
        if known is not None and known.shown is not known.values:
            # `.data` and NumPy write to a copy without a trace.
            if not is_written and has_same_bytes(tensor, known.values):
                # Code may give one tensor two names: neither may get its memory.
                one = known.one
                return replace(one, is_new=False) if isinstance(one, MemoryTensor) else one
            is_written = True
        if is_written and is_dtensor(tensor) and like is not None and is_dtensor(like):
            # An operation may return a DTensor of another layout. torch copies from any layout.
            tensor = tensor.redistribute(placements=like.placements)
        if known is None:
            return MemoryTensor(name, tensor)
        # The map has what was written to it. Reading the file again would lose that.
        entry = None if is_written else known.one.entry
        return MemoryTensor(known.one.key, tensor, known.one.keys, entry)


def show_source(
    origin: Origin,
    named: Named,
    prefixes: Iterable[str],
    values: ShownTensors,
    like: Mapping[str, torch.Tensor],
) -> Shown:
    """Return the part of a source that code of the model gets.

    Args:
        origin: The source.
        named: Its content, under names of the model.
        prefixes: The prefixes of the modules with such code.
        values: Makes the tensors.
        like: Name -> the model's tensor. If it is a DTensor, the code gets one.
    """
    begins = tuple(prefixes)
    seen = {name: one for name, one in named.candidates.items() if name.startswith(begins)}
    names = {**{one.key: name for name, one in named.candidates.items()}, **named.objects}
    tensors = {n: values.show(one, origin.shown(one, like.get(n))) for n, one in seen.items()}
    objects = {n: named.values[key] for key, n in named.objects.items() if n.startswith(begins)}
    return Shown(
        path=origin.path,
        values=gathered({**tensors, **objects}, templates_by_name(named.templates, names)),
        tensors=tensors,
        mapped=[name for name, one in seen.items() if one.entry is not None],
        versions=versions_by_name(names, origin.versions),
    )


@dataclass(frozen=True, slots=True)
class OwnCalls:
    """Calls of `load_state_dict` that wait inside the method of `nn.Module`.

    Attributes:
        calls: One call for each root whose class overrides the method.
        passed: The state that each call passes on first.
        named: The content of the source.
        shown: The tensors that the methods got.
        commit: Undoes the changes of this call.
    """

    calls: tuple[OwnLoading, ...]
    passed: list[PassedState]
    named: Named
    shown: ShownTensors
    commit: Commit

    def name_passed(
        self, passed: Sequence[PassedState], tree: ModuleTree, options: Options
    ) -> tuple[Named, Options]:
        """Return what the methods pass on, and options with their ``strict``."""
        named, strict = self.named, options.strict
        prefixes = tuple(call.prefix for call in self.calls)
        candidates = {k: v for k, v in named.candidates.items() if not k.startswith(prefixes)}
        values = {
            k: named.values[k] for k, v in named.objects.items() if not v.startswith(prefixes)
        }
        objects = {key: name for key, name in named.objects.items() if key in values}
        templates, left_out = {**named.templates}, {*named.left_out}
        like = {slot.fqn: group.tensor for group in tree.groups for slot in group.slots}
        for call, state in zip(self.calls, passed, strict=True):
            strict = strict and state.strict
            prefix = call.prefix + call.path_of(state.module)
            flat = flat_state(state.values, None)
            for name, tensor in flat.tensors.items():
                full = prefix + name
                if tensor.is_meta and not self.shown.is_known(tensor):
                    if not _is_of(like.get(full), tensor):
                        raise _lost_error(full)
                    left_out.add(full)  # the model's own tensor stays as it is
                    continue
                candidates[full] = self.shown.find_source(full, tensor, like.get(full))
            for name, value in flat.objects.items():
                values[prefix + name], objects[prefix + name] = value, prefix + name
            templates.update({prefix + name: tree for name, tree in flat.templates.items()})
            # If a method passes its state to a child, the rest of the model stays as it is.
            left_out |= {
                name
                for group in tree.groups
                for name in group.names
                if name.startswith(call.prefix) and not name.startswith(prefix)
            }
        names_of = {id(group.tensor): group.names for group in tree.groups}
        for change in (change for call in self.calls for change in call.changes):
            names = names_of.get(id(change.live), (change.name,))
            is_given = not candidates.keys().isdisjoint(names)
            if change.is_written and not is_given:
                # A tensor that the method wrote to needs no value.
                if change.live.is_meta:
                    raise _lost_error(change.name)
                left_out |= {*names}
            change.apply(self.commit, values=not is_given)
        for name, one in self.named.candidates.items():
            # A write through `.data` leaves no trace on meta, so that a value may be lost there.
            slot = like.get(name)
            if slot is None or not slot.is_meta or name in candidates or name in left_out:
                continue
            if name.startswith(prefixes) and tuple(one.shape) == tuple(slot.shape):
                raise _lost_error(name)
        named = named._replace(
            candidates=candidates, objects=objects, values=values, templates=templates,
            left_out=left_out, hooked=hooked_modules(tree, candidates),
        )  # fmt: skip
        return named, options if strict == options.strict else replace(options, strict=strict)


def _is_of(own: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Return whether a tensor on meta is the model's own, as its `state_dict` returns it."""
    return own is not None and own.shape == tensor.shape and memory_of(own) == memory_of(tensor)


def _lost_error(name: str) -> PlacementError:
    return PlacementError(
        "the load_state_dict of the model's class leaves it without a value on meta",
        entry=name,
        hint="Build the model with torchlift.skeleton, and call torchlift.materialize(model) "
        "before you load. Or load into a model that has values.",
    )


@ordinary_tensors()
def call_own_loading(
    tree: ModuleTree, origin: Origin, named: Named, options: Options, commit: Commit
) -> OwnCalls:
    """Call the `load_state_dict` of each root whose class overrides it.

    Raises:
        PlacementError: If a method does not call the method of `nn.Module`.
    """
    commit.keep_attributes(tree.modules)
    commit.keep_flags(tree)
    values = ShownTensors()
    shown = show_source(origin, named, [prefix for prefix, _ in named.own_loaders], values, {})
    calls, passed = [], []
    for prefix, module in named.own_loaders:
        state: OrderedDict[str, Any] = OrderedDict(
            (name.removeprefix(prefix), value)
            for name, value in shown.values.items()
            if name.startswith(prefix)
        )
        inside = ((path, dict(says)) for path, says in shown.versions.items())
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{path}."[len(prefix) : -1], says)
            for path, says in inside
            if f"{path}.".startswith(prefix)
        )
        calls.append(OwnLoading(prefix, module, commit))
        passed.append(calls[-1].start(state, options.strict))
    return OwnCalls(tuple(calls), passed, named, values, commit)

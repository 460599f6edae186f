"""Run a `load_state_dict` that a model's class overrides, and load what it passes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchlift._model.commit import Commit, ordinary_tensors
from torchlift._model.dtensor import is_dtensor
from torchlift._model.handlers import clone_of
from torchlift._model.hooks import (
    gather,
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
from torchlift._sources.tensors import FileTensor, MemoryTensor, SourceTensor
from torchlift.errors import PlacementError


@dataclass(frozen=True, slots=True)
class _Shown:
    """A tensor as the method sees it. While it lives, no other tensor has its identity."""

    candidate: SourceTensor
    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class OwnCalls:
    """Calls of `load_state_dict` that wait inside the method of `nn.Module`.

    Attributes:
        calls: One call for each root whose class overrides the method.
        passed: The state that each call passes on first.
        named: The content of the source.
        shown: Identity of a tensor -> what the method got.
        commit: Undoes the changes of this call.
    """

    calls: tuple[OwnLoading, ...]
    passed: list[PassedState]
    named: Named
    shown: Mapping[tuple[object, ...], _Shown]
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
                if tensor.is_meta and identity_of(tensor) not in self.shown:
                    if not _is_of(like.get(full), tensor):
                        raise _lost_error(
                            full, "passes on a tensor without values, computed from one"
                        )
                    left_out.add(full)  # the model's own tensor stays as it is
                    continue
                candidates[full] = self._candidate(full, tensor, like.get(full))
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
                    raise _lost_error(change.name, "writes into a tensor without memory, one")
                left_out |= {*names}
            change.apply(self.commit, values=not is_given)
        for name, one in self.named.candidates.items():
            # A write through `.data` leaves no trace on meta, so that a value may be lost there.
            slot = like.get(name)
            if slot is None or not slot.is_meta or name in candidates or name in left_out:
                continue
            if name.startswith(prefixes) and tuple(one.shape) == tuple(slot.shape):
                raise _lost_error(name, "does not pass on a value for a tensor")
        named = named._replace(
            candidates=candidates, objects=objects, values=values, templates=templates,
            left_out=left_out, hooked=hooked_modules(tree, candidates),
        )  # fmt: skip
        return named, options if strict == options.strict else replace(options, strict=strict)

    def _candidate(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor | None
    ) -> SourceTensor:
        """Return the tensor of the source if the method did not change it, else the new tensor."""
        shown = self.shown.get(identity_of(tensor))
        if shown is not None and version_of(tensor) == shown.version:
            original = shown.candidate
            # A caller's tensor was shown as a copy, which `.data` and NumPy may have written to.
            if isinstance(original, FileTensor) or has_same_bytes(tensor, original.tensor()):
                return original
        if like is not None and is_dtensor(tensor) and is_dtensor(like):
            # An operation may return a DTensor of another layout. torch copies from any layout.
            tensor = tensor.redistribute(placements=like.placements)
        return MemoryTensor(name, tensor)


def _is_of(own: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Return whether a tensor on meta is the model's own, as its `state_dict` returns it."""
    return own is not None and own.shape == tensor.shape and memory_of(own) == memory_of(tensor)


def _lost_error(name: str, what: str) -> PlacementError:
    return PlacementError(
        f"the load_state_dict of the model's class {what} on meta",
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
    names = {**{one.key: name for name, one in named.candidates.items()}, **named.objects}
    versions = versions_by_name(names, origin.versions)
    shown: dict[tuple[object, ...], _Shown] = {}
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    calls, passed = [], []
    for prefix, module in named.own_loaders:
        state: OrderedDict[str, Any] = OrderedDict()
        for name, one in named.candidates.items():
            if name.startswith(prefix):
                tensor = one.tensor()
                if not isinstance(one, FileTensor):  # a caller's tensors are never written to
                    tensor = copies.setdefault(identity_of(tensor), clone_of(tensor))
                shown.setdefault(identity_of(tensor), _Shown(one, tensor, version_of(tensor)))
                state[name.removeprefix(prefix)] = tensor
        for key, name in named.objects.items():
            if name.startswith(prefix):
                state[name.removeprefix(prefix)] = named.values[key]
        for name, template in templates_by_name(named.templates, names).items():
            if name.startswith(prefix):
                gather(state, name.removeprefix(prefix), {name.removeprefix(prefix): template})
        inside = ((path, dict(says)) for path, says in versions.items())
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{path}."[len(prefix) : -1], says)
            for path, says in inside
            if f"{path}.".startswith(prefix)
        )
        calls.append(OwnLoading(prefix, module, commit))
        passed.append(calls[-1].start(state, options.strict))
    return OwnCalls(tuple(calls), passed, named, shown, commit)

"""Let the loading code of a model change what is loaded: the step before the plan."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from torchlift._checkpoint.tree import gathered
from torchlift._model.commit import Commit, ordinary_tensors
from torchlift._model.dtensor import is_dtensor, local_tensor
from torchlift._model.handlers import clone_of, has_memory
from torchlift._model.loading_code import (
    Outcome,
    Shown,
    copied,
    has_same_bytes,
    run_loading_code,
)
from torchlift._model.names import wrapped_names
from torchlift._model.slots import ModuleTree
from torchlift._model.torch_private import version_of
from torchlift._plan.names import Named, templates_by_name, versions_by_name
from torchlift._plan.rules import Options, allowed
from torchlift._sources.opening import Origin
from torchlift._sources.tensors import MemoryTensor, SourceTensor
from torchlift.formats.flattening import Containers, extra_state, flatten_state


class _Known(NamedTuple):
    """A tensor that code of the model got. While it lives, no other tensor has its identity."""

    one: SourceTensor
    values: torch.Tensor
    is_copy: bool
    version: int
    shown: torch.Tensor


class _ShownTensors:
    """The tensors of a source as code of the model gets them, and what it leaves."""

    def __init__(self) -> None:
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}
        self._known: dict[tuple[object, ...], _Known] = {}

    def show(self, one: SourceTensor, values: torch.Tensor, *, copies: bool) -> torch.Tensor:
        """Return a tensor for the code. It may write to a private map, and to a copy.

        Args:
            one: The tensor in the source.
            values: Its values.
            copies: Whether to copy a map, too.
        """
        shown = values
        # The caller's tensors are copied. Of tensors that are one, there is one copy.
        is_copy = copies or (isinstance(one, MemoryTensor) and one.entry is None)
        if is_copy:
            identity = _identity_of(values)
            if identity not in self._copies:
                self._copies[identity] = clone_of(values)
            shown = self._copies[identity]
        known = _Known(one, values, is_copy, version_of(local_tensor(shown)), shown)
        self._known.setdefault(_identity_of(shown), known)
        return shown

    def find_source(
        self, name: str, tensor: torch.Tensor, like: torch.Tensor | None, *, is_new: bool
    ) -> SourceTensor:
        """Return the source of a tensor that the code left under a name.

        Args:
            name: The name.
            tensor: The tensor.
            like: The model's tensor of that name, if there is one.
            is_new: Whether nobody else uses its memory.
        """
        known = self._known.get(_identity_of(tensor))
        is_written = known is None or version_of(local_tensor(tensor)) != known.version
        if known is not None and known.is_copy:
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
            return MemoryTensor(name, tensor, is_new=is_new)
        if is_dtensor(tensor) and not is_written:
            return known.one
        # The map has what was written to it. Reading the file again would lose that.
        entry = None if is_written else known.one.entry
        return MemoryTensor(known.one.key, tensor, known.one.keys, entry)


class Changed(NamedTuple):
    """What the loading code of a model makes of a source.

    Attributes:
        named: The content that it leaves.
        outcome: What else it did.
        on_meta: Names that were on meta before.
    """

    named: Named
    outcome: Outcome
    on_meta: set[str]


@ordinary_tensors()
def through_loading_code(
    tree: ModuleTree, origin: Origin, named: Named, options: Options, commit: Commit, *, owns: bool
) -> Changed:
    """Run the loading code of a model on what a source has for it.

    Args:
        tree: The model.
        origin: The source.
        named: The content of the source, under names of the model.
        options: The caller's options.
        commit: Undoes what the code changes.
        owns: Whether nothing of the model may stay mapped.
    """
    code = named.code
    assert code is not None
    like = {slot.fqn: group.tensor for group in tree.groups for slot in group.slots}
    if (naming := wrapped_names(tree)) is not None:  # keys lack the steps of some wrappers
        like |= {naming.key(naming.canonical(name)): tensor for name, tensor in like.items()}
    values, on_meta = _ShownTensors(), {group.fqn for group in tree.on_meta}
    tensors, mapped = dict[str, torch.Tensor](), set[str]()
    for name, one in named.candidates.items():
        if code.covers(name):
            is_mapped = owns and one.entry is not None
            copies = is_mapped and bool(extra_state(name))
            tensors[name] = values.show(one, origin.shown(one, like.get(name)), copies=copies)
            if is_mapped and not copies:
                mapped.add(name)
    names = {**{one.key: name for name, one in named.candidates.items()}, **named.objects}
    # A module may keep and change its extra state, which is of the caller or of an open file.
    objects = {
        name: copied(named.values[key]) if extra_state(name) else named.values[key]
        for key, name in named.objects.items()
        if code.covers(name)
    }
    shown = Shown(
        path=origin.path,
        values=gathered({**tensors, **objects}, templates_by_name(named.templates, names)),
        tensors=tensors,
        mapped=mapped,
        versions=versions_by_name(origin.versions, names),
    )

    canonical = named.naming.canonical if named.naming is not None else str
    computed = {s.fqn for group in tree.groups for s in group.slots if not s.persistent}
    excused = named.left_out | {*map(canonical, _names_of_ties(tree, named.candidates))}
    ignored = {*map(canonical, (*computed, *(named.of_program or ())))}

    def refuses(
        missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]
    ) -> bool:
        lacking, extra = {*map(canonical, missing)}, {*map(canonical, unexpected)}
        lacking -= allowed(lacking, options.allow_missing) | excused
        extra -= allowed(extra, options.allow_unexpected) | ignored
        wrong = misshapen if options.transform is None and not options.ignore_mismatched else []
        return bool(wrong) or (options.strict and bool(lacking or extra))

    outcome = run_loading_code(tree, code, shown, refuses, commit, strict=options.strict)
    found = {name: one for name, one in named.candidates.items() if name not in tensors}
    for name, tensor in outcome.tensors.items():
        is_new = id(tensor) in outcome.new
        source = values.find_source(name, tensor, like.get(name), is_new=is_new)
        if isinstance(source, MemoryTensor) and name in named.candidates and source.key == name:
            before = named.candidates[name]
            source = replace(source, key=before.key, keys=before.keys)
        found[name] = source
    tied = _names_of_ties(tree, found.keys() - {*outcome.missing})
    outcome.missing = [name for name in outcome.missing if name not in tied]
    # A container that nobody took has the names of what is in it.
    rule = Containers((torch.Tensor,), Mapping)
    unexpected = list[str]()
    for name in outcome.unexpected:
        flat = flatten_state({name: shown.values.get(name)}, rule)
        unexpected += [*flat.tensors, *flat.objects] if name in shown.values else [name]
    outcome.unexpected = unexpected
    rest = {key: name for key, name in named.objects.items() if not code.covers(name)}
    left_out = named.left_out | outcome.own
    named = named._replace(candidates=found, objects=rest, left_out=left_out)
    return Changed(named, outcome, on_meta)


def _names_of_ties(tree: ModuleTree, found: Container[str]) -> set[str]:
    """Return the names of ties of which one name has a value. One is enough."""
    ties = (group.names for group in tree.groups if len(group.slots) > 1)
    return {name for names in ties if any(name in found for name in names) for name in names}


def _identity_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that no other values have as long as the tensor lives."""
    tensor = local_tensor(tensor)
    if not has_memory(tensor):
        return (id(tensor),)
    # A conjugate is the same numbers in the same place, shown otherwise.
    shown = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), shown)

"""Let the loading code of a model change what is loaded: the step before the plan."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from torchlift._checkpoint.tree import gathered
from torchlift._model.commit import Commit, ordinary_tensors
from torchlift._model.dtensor import is_dtensor, local_tensor
from torchlift._model.handlers import clone_of, has_memory
from torchlift._model.loading_code import (
    Shown,
    copied,
    has_same_bytes,
    run_loading_code,
)
from torchlift._model.slots import Group
from torchlift._model.torch_private import version_of
from torchlift._plan.canonical import Named, canonical_groups
from torchlift._plan.names import templates_by_name, versions_by_name
from torchlift._plan.rules import Options, allowed, owns_all
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


@ordinary_tensors()
def through_loading_code(named: Named, source: Origin, options: Options, commit: Commit) -> Named:
    """Run the loading code of a model on what a source has for it. Return what it leaves.

    Args:
        named: The model, and the content of the source. It has loading code.
        source: The source.
        options: The caller's options.
        commit: Undoes what the code changes.
    """
    code, tree = named.code, named.tree
    assert code is not None
    is_live = not any(group.tensor.is_meta for group in named.groups)
    owns = owns_all(options.source, live=is_live)
    like = {name: group.tensor for group in named.groups for name in group.names}
    values, on_meta = _ShownTensors(), {*map(named.canonical, (g.fqn for g in tree.on_meta))}
    keys = {name: named.key(name) for name in named.candidates}
    tensors, mapped = dict[str, torch.Tensor](), set[str]()
    for name, one in named.candidates.items():
        if code.covers(key := keys[name]):
            is_mapped = owns and one.entry is not None
            copies = is_mapped and bool(extra_state(key))
            tensors[key] = values.show(one, source.shown(one, like.get(name)), copies=copies)
            if is_mapped and not copies:
                mapped.add(key)
    others = {old: named.key(name) for old, name in named.objects.items()}
    to_key = {**{one.key: keys[name] for name, one in named.candidates.items()}, **others}
    # A module may keep and change its extra state, which is of the caller or of an open file.
    objects = {
        key: copied(source.objects[old]) if extra_state(key) else source.objects[old]
        for old, key in others.items()
        if code.covers(key)
    }
    shown = Shown(
        path=named.path,
        values=gathered({**tensors, **objects}, templates_by_name(source.templates, to_key)),
        tensors=tensors,
        mapped=mapped,
        versions=versions_by_name(source.versions, to_key),
    )
    computed = {s.fqn for group in named.groups for s in group.slots if not s.persistent}
    excused = named.left_out | _names_of_ties(named.groups, named.candidates)
    ignored = computed | (named.of_program or set())

    def refuses(
        missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]
    ) -> bool:
        lacking, extra = ({*map(named.canonical, names)} for names in (missing, unexpected))
        lacking -= allowed(lacking, options.allow_missing) | excused
        extra -= allowed(extra, options.allow_unexpected) | ignored
        wrong = misshapen if options.transform is None and not options.ignore_mismatched else []
        return bool(wrong) or (options.strict and bool(lacking or extra))

    outcome = run_loading_code(tree, code, shown, refuses, commit, strict=options.strict)
    groups = canonical_groups(tree.groups, named.naming)  # the code may have put others there
    found = {name: one for name, one in named.candidates.items() if keys[name] not in tensors}
    for path, tensor in outcome.tensors.items():
        name, is_new = named.canonical(path), id(tensor) in outcome.new
        one = values.find_source(name, tensor, like.get(name), is_new=is_new)
        if isinstance(one, MemoryTensor) and name in named.candidates and one.key == name:
            before = named.candidates[name]
            one = replace(one, key=before.key, keys=before.keys)
        found[name] = one
    missing = [*map(named.canonical, outcome.missing)]
    tied = _names_of_ties(groups, found.keys() - {*missing})
    # A container that nobody took has the names of what is in it.
    rule = Containers((torch.Tensor,), Mapping)
    unexpected = list[str]()
    for key in outcome.unexpected:
        flat = flatten_state({key: shown.values.get(key)}, rule)
        unexpected += [*flat.tensors, *flat.objects] if key in shown.values else [key]
    outcome = replace(
        outcome,
        missing=[name for name in missing if name not in tied],
        unexpected=[*map(named.canonical, unexpected)],
        excused={*map(named.canonical, outcome.excused)},
        own={*map(named.canonical, outcome.own)},
        kept=[*map(named.canonical, outcome.kept)],
    )
    return named._replace(
        groups=groups,
        candidates=found,
        objects={old: name for old, name in named.objects.items() if not code.covers(others[old])},
        left_out=named.left_out | outcome.own,
        outcome=outcome,
        given=named.candidates,
        on_meta=on_meta,
    )


def _names_of_ties(groups: Iterable[Group], found: Container[str]) -> set[str]:
    """Return the names of ties of which one name has a value. One is enough."""
    ties = (group.names for group in groups if len(group.slots) > 1)
    return {name for names in ties if any(name in found for name in names) for name in names}


def _identity_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that no other values have as long as the tensor lives."""
    tensor = local_tensor(tensor)
    if not has_memory(tensor):
        return (id(tensor),)
    # A conjugate is the same numbers in the same place, shown otherwise.
    shown = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), shown)

"""Which tensors of a checkpoint make which of a model: renames, merges and splits.

A merged tensor is an entry of more boxes than the ones that it is made of, and a split one of fewer
(`torchlift.formats.boxes`): a plan counts and reads both as it does what a distributed writer has
left in several files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from torchlift._model.names import Names
from torchlift._model.own_loading import OwnLoading
from torchlift._model.slots import Group
from torchlift._plan.report import Mismatch
from torchlift._plan.rules import Rename, apply_rename, rename_keys
from torchlift._sources.opening import Origin, extra_state
from torchlift._sources.tensors import SourceTensor, describe, tensor_of
from torchlift._system.text import clipped_list
from torchlift.errors import MismatchError
from torchlift.formats.index import TensorEntry
from torchlift.formats.source import errors_name


class Named(NamedTuple):
    """What a source has, by its names in the model.

    Attributes:
        candidates: name -> where its values are.
        objects: key -> name of what is not a tensor.
        values: key -> value of what is not a tensor.
        templates: key of a container -> the container as it was saved.
        noted: name that a file notes as tied to one of its tensors -> that tensor.
        left_out: names whose keys the caller left out: they may be missing.
        ignored: names of values that are blocked, and that the model does not need.
        naming: names of a wrapped model.
        hooked: (prefix, module) with loading code of its own for these names.
        own_loaders: (prefix, module) whose class overrides `load_state_dict`.
    """

    candidates: Mapping[str, SourceTensor]
    objects: Mapping[str, str]
    values: Mapping[str, object]
    templates: Mapping[str, object]
    noted: Mapping[str, SourceTensor]
    left_out: set[str]
    ignored: list[str]
    naming: Names | None
    hooked: Sequence[tuple[str, nn.Module]]
    own_loaders: Sequence[tuple[str, nn.Module]]


class Pair(NamedTuple):
    """One tensor of a model, and what a source has for it.

    Attributes:
        group: The tensor, with all its names.
        key: The first of these names that the source has.
        candidates: What the source has, under each of these names.
    """

    group: Group
    key: str
    candidates: list[SourceTensor]


@dataclass(slots=True)
class Match:
    """A model's tensors paired with what a source has.

    Attributes:
        pairs: (group, name under which the source has it, the candidates of all its names).
        unmatched: groups of the model that get nothing.
        missing, unexpected, dropped, mismatched: as in `LoadReport`.
        fits: how many pairs there are; 0 where none of them has anything of the source.
        open: whether code of the model, which sees the result, may still excuse names.
        left_out: names of the model whose keys the caller left out: they may be missing.
        hint: what would make more names fit, else None.
        candidates: name in the model -> what the source has, before code of the model sees it.
        is_renamed: whether names in the source may differ from those in the model.
        naming: the names of a wrapped model.
        canonical: gives the name that is reported, for one of the model.
        hooked: whether the model's own code looks at the result, and may refuse it.
        on_meta: what was on meta before hooks of the model ran. None: no hook ran.
        given: names of the model for which there are values, if it has post-hooks.
        extra: (module, state) for ``set_extra_state``.
        kept: name -> what the model's own code keeps outside of parameters and buffers.
        own_calls: calls of a class's own `load_state_dict`, which wait for the result.
    """

    pairs: list[Pair] = field(default_factory=list)
    unmatched: list[Group] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mismatched: dict[str, Mismatch] = field(default_factory=dict)
    fits: int = 0
    open: bool = False
    hint: str | None = None
    left_out: set[str] = field(default_factory=set)
    candidates: Mapping[str, SourceTensor] = field(default_factory=dict)
    is_renamed: bool = False
    naming: Names | None = None
    canonical: Callable[[str], str] = str
    hooked: bool = False
    on_meta: set[str] | None = None
    given: frozenset[str] = frozenset()
    extra: tuple[tuple[nn.Module, object], ...] = ()
    kept: Mapping[str, SourceTensor] = field(default_factory=dict)
    own_calls: tuple[OwnLoading, ...] = ()

    def report_canonical(self, naming: Names) -> None:
        """Give the names that are reported the form without wrappers."""
        self.naming, self.canonical = naming, naming.canonical
        self.missing = list(map(naming.canonical, self.missing))
        self.unexpected = list(map(naming.canonical, self.unexpected))
        self.dropped = list(map(naming.canonical, self.dropped))
        items = {naming.canonical(key): item for key, item in self.mismatched.items()}
        self.mismatched = {key: replace(item, key=key) for key, item in items.items()}


class Made(NamedTuple):
    """A tensor as a rename makes it.

    Attributes:
        entry: where its values are.
        keys: whose values they are, in their order.
    """

    entry: TensorEntry
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Rewriting:
    """A rename that makes one tensor of many, or many of one."""

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that values of `key` go to."""
        raise NotImplementedError

    def check(self, plain: Mapping[str, object], path: str) -> None:
        """Refuse a checkpoint that says, besides its tensors, that it is none for this rule.

        Raises:
            MismatchError: it is of another model.
        """

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor.

        Args:
            items: name in the checkpoint, or after the rename before this one -> tensor.
            path: of the checkpoint, for errors.

        Raises:
            MismatchError: they do not fit the rule.
        """
        raise NotImplementedError


def rewrite_entries(
    entries: Mapping[str, TensorEntry], rename: Rename | None, path: str
) -> dict[str, Made]:
    """Return name in the model -> the tensor that a rename, a merge or a split makes for it.

    Raises:
        MismatchError: two keys get the same name, or what is to be merged does not fit together.
    """
    items = {key: Made(entry, (key,)) for key, entry in entries.items()}
    if isinstance(rename, Rewriting):
        with errors_name(path):
            return rename.rewrite(items, path)
    return {name: items[key] for key, name in rename_keys(entries, rename, path).items()}


def rename_objects(
    keys: Iterable[str], rename: Rename | None, path: str, made: Container[str] = ()
) -> dict[str, str]:
    """Return key -> name of leaves that are no tensors, and that a rule can therefore not merge.

    Args:
        keys: theirs.
        rename: that of the tensors.
        path: of the checkpoint, for errors.
        made: names of tensors. A leaf for which a rule that merges has one of them, or the name of
            another leaf, keeps its key.

    Raises:
        MismatchError: two get the same name of another rename.
    """
    if not isinstance(rename, Rewriting):
        return rename_keys(keys, rename, path)
    names = apply_rename(keys, rename)
    counts = Counter(names.values())
    taken = {name for name, count in counts.items() if count > 1 or name in made}
    return {key: key if name in taken else name for key, name in names.items()}


def names_of_left_out(
    gone: Mapping[str, SourceTensor | None], rename: Rename | None, path: str
) -> set[str]:
    """Return the names that keys would have had, which a caller has left out."""
    names = set(apply_rename(gone, rename).values())
    names |= {whole for name in names if (whole := extra_state(name))}
    if isinstance(rename, Rewriting):
        tensors = {key: one for key, one in gone.items() if one is not None}
        entries = {key: describe(one) for key, one in tensors.items()}
        try:
            return names | rewrite_entries(entries, rename, path).keys()
        except MismatchError:  # a part without the others makes nothing that could be missing
            return names
    return names


def assemble_tensors(
    origin: Origin, rename: Rewriting
) -> tuple[dict[str, str], dict[str, SourceTensor]]:
    """Return key -> name of what stays as it is, and name -> candidate of what a rule makes.

    Raises:
        MismatchError: see `rewrite_entries`.
    """
    for ckpt in origin.checkpoints:
        rename.check(ckpt._index.plain, ckpt.path)
    candidates = {k: v for k, v in origin.candidates.items() if k not in origin.blocked}
    entries = {key: describe(one) for key, one in candidates.items()}
    names: dict[str, str] = {}
    made: dict[str, SourceTensor] = {}
    try:
        tensors = rewrite_entries(entries, rename, origin.path)
    except MismatchError as error:
        if no_tensors := [key for key in error.missing_keys if key in origin.objects]:
            error.hint = f"In the checkpoint this is no tensor: {clipped_list(no_tensors)}."
        raise
    for name, (entry, keys) in tensors.items():
        if entry is entries[keys[0]]:
            names[keys[0]] = name
        else:
            made[name] = tensor_of(entry, keys, origin.views)
    return names, made

"""Match names of a checkpoint with names of a model: records, renames, merges and splits.

A merged tensor is an entry with the boxes of several tensors, and a split tensor has a part of the
boxes of one (`torchlift.formats.boxes`). A plan counts and reads both like a tensor that a
distributed writer saved in several files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchlift._model.loading_code import LoadingCode
from torchlift._model.names import Names
from torchlift._model.slots import Group
from torchlift._plan.report import Mismatch
from torchlift._plan.rules import Rename, apply_rename, rename_keys
from torchlift._sources.opening import Origin
from torchlift._sources.tensors import SourceTensor, describe, tensor_of
from torchlift._system.containers import leaves
from torchlift._system.text import clipped_list
from torchlift.errors import MismatchError
from torchlift.formats.flattening import extra_state
from torchlift.formats.index import TensorEntry
from torchlift.formats.scales import Quantised
from torchlift.formats.source import errors_name


class Named(NamedTuple):
    """The content of a source, under names of the model.

    Attributes:
        candidates: Name -> its tensor in the source.
        objects: Key -> name, of non-tensor values.
        values: Key -> non-tensor value.
        templates: Key of a container -> the container as it was saved.
        noted: Name that a file notes as tied to one of its tensors -> that tensor.
        left_out: Names whose keys the caller left out: they may be missing.
        ignored: Names of blocked values that the model does not need.
        naming: The names of a wrapped model, or None.
        code: The loading code of the model for these names, or None.
        quantised: The quantised tensors of the source by key, also those that are left out.
        of_program: Names that a program has besides the state of its modules. None: the source is
            not a program.
    """

    candidates: Mapping[str, SourceTensor]
    objects: Mapping[str, str]
    values: Mapping[str, object]
    templates: Mapping[str, object]
    noted: Mapping[str, SourceTensor]
    left_out: set[str]
    ignored: list[str]
    naming: Names | None
    code: LoadingCode | None
    quantised: Quantised
    of_program: set[str] | None


class Pair(NamedTuple):
    """One tensor of a model, and what a source has for it.

    Attributes:
        group: The tensor, with all its names.
        key: The first of these names that the source has, as it is reported.
        candidates: Its candidates in the source, one for each of these names.
    """

    group: Group
    key: str
    candidates: list[SourceTensor]


@dataclass(slots=True)
class Match:
    """A model's tensors paired with what a source has.

    Attributes:
        pairs: The tensors of the model that the source has.
        unmatched: The tensors of the model that the source lacks.
        missing, unexpected, dropped, mismatched: As in `LoadReport`.
        fits: The number of pairs. 0 if no pair has a value of the source.
        left_out: Names of the model whose keys the caller left out: they may be missing.
        hint: The change that would match more names, or None.
        renamed: Name in the source -> name in the model, if they differ.
        naming: The names of a wrapped model, or None.
        canonical: Returns the reported name for a name of the model.
        on_meta: Names on meta before loading code of the model ran. None: none ran.
        kept: Name -> what loading code of the model keeps outside of parameters and buffers.
        copied: Bytes of copies that loading code of the model has made of live tensors.
        quantised: The quantised tensors of the source by key.
        unscaled: The quantised tensors whose scales the model does not take.
    """

    pairs: list[Pair] = field(default_factory=list)
    unmatched: list[Group] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mismatched: dict[str, Mismatch] = field(default_factory=dict)
    fits: int = 0
    hint: str | None = None
    left_out: set[str] = field(default_factory=set)
    renamed: Mapping[str, str] = field(default_factory=dict)
    naming: Names | None = None
    canonical: Callable[[str], str] = str
    on_meta: set[str] | None = None
    kept: Mapping[str, SourceTensor] = field(default_factory=dict)
    copied: int = 0
    quantised: Quantised = field(default_factory=Quantised)
    unscaled: Quantised = field(default_factory=Quantised)

    def report_canonical(self, naming: Names) -> None:
        """Give all names that callers and their rules get the form without wrappers."""
        self.naming, self.canonical = naming, naming.canonical
        self.missing = list(map(naming.canonical, self.missing))
        self.unexpected = list(map(naming.canonical, self.unexpected))
        self.dropped = list(map(naming.canonical, self.dropped))
        items = {naming.canonical(key): item for key, item in self.mismatched.items()}
        self.mismatched = {key: replace(item, key=key) for key, item in items.items()}
        self.pairs = [pair._replace(key=naming.canonical(pair.key)) for pair in self.pairs]


class Made(NamedTuple):
    """A tensor as a rename makes it.

    Attributes:
        entry: The place of its values.
        keys: The names in the checkpoint of what it is made of, in order.
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
        """Refuse a checkpoint with metadata of another model.

        Raises:
            MismatchError: If it is of another model.
        """

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor.

        Args:
            items: Name -> tensor, as the checkpoint or the rename before this one has it.
            path: The path of the checkpoint, for errors.

        Raises:
            MismatchError: If they do not match the rule.
        """
        raise NotImplementedError


def rewrite_entries(
    entries: Mapping[str, TensorEntry], rename: Rename | None, path: str
) -> dict[str, Made]:
    """Return name in the model -> the tensor that a rename, a merge or a split makes for it.

    Raises:
        MismatchError: If two keys get one name, or tensors to be merged do not match.
    """
    items = {key: Made(entry, (key,)) for key, entry in entries.items()}
    if isinstance(rename, Rewriting):
        with errors_name(path):
            return rename.rewrite(items, path)
    return {name: items[key] for key, name in rename_keys(entries, rename, path).items()}


def rename_objects(
    keys: Iterable[str], rename: Rename | None, path: str, made: Container[str] = ()
) -> dict[str, str]:
    """Return key -> name of non-tensor values. A rule cannot merge them.

    Args:
        keys: Their keys.
        rename: The rename of the tensors.
        path: The path of the checkpoint, for errors.
        made: Names of tensors. If a merging rule gives a value one of these names, or the name of
            another value, the value keeps its key.

    Raises:
        MismatchError: If another rename gives two values one name.
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
    """Return the names in the model of keys that the caller left out."""
    names = set(apply_rename(gone, rename).values())
    names |= {whole for name in names if (whole := extra_state(name))}
    if isinstance(rename, Rewriting):
        tensors = {key: one for key, one in gone.items() if one is not None}
        entries = {key: describe(one) for key, one in tensors.items()}
        try:
            return names | rewrite_entries(entries, rename, path).keys()
        except MismatchError:  # a part of what is merged makes no tensor
            return names
    return names


def assemble_tensors(
    origin: Origin, rename: Rewriting
) -> tuple[dict[str, str], dict[str, SourceTensor]]:
    """Return key -> name of unchanged tensors, and name -> tensor that a rule makes.

    Raises:
        MismatchError: See `rewrite_entries`.
    """
    for ckpt in origin.checkpoints:
        rename.check(ckpt._index.metadata, ckpt.path)
    candidates = {k: v for k, v in origin.candidates.items() if k not in origin.blocked}
    entries = {key: describe(one) for key, one in candidates.items()}
    names: dict[str, str] = {}
    made: dict[str, SourceTensor] = {}
    try:
        tensors = rewrite_entries(entries, rename, origin.path)
    except MismatchError as error:
        if no_tensors := [key for key in error.missing_keys if key in origin.objects]:
            error.hint = f"In the checkpoint this is not a tensor: {clipped_list(no_tensors)}."
        raise
    for name, (entry, keys) in tensors.items():
        if entry is entries[keys[0]]:
            names[keys[0]] = name
        else:
            made[name] = tensor_of(entry, keys, origin.views)
    return names, made


def versions_by_name(
    versions: Mapping[str, Mapping[str, object]], names: Mapping[str, str]
) -> dict[str, Mapping[str, object]]:
    """Return path of a module of the model -> its metadata in the state dict.

    Args:
        versions: Path of a module in the source -> its metadata.
        names: Key in the source -> name in the model.
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

"""Give a model and the content of a source the names of the bare model, once for a load.

From here on every name is canonical: of pairs, of steps, of rules, of errors and of the report.
Only the loading code of a model gets the keys of its own state dict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torchlift._model.dtensor import is_dtensor, spans_of
from torchlift._model.loading_code import LoadingCode, Outcome, find_loading_code
from torchlift._model.names import Names, wrapped_names
from torchlift._model.slots import Group, ModuleTree, Slot
from torchlift._plan.names import Rewriting, rename_objects, rewrite_entries
from torchlift._plan.rules import (
    Options,
    Rename,
    allowed,
    apply_rename,
    check_rename,
    check_rule,
    rename_keys,
    same_name_error,
)
from torchlift._plan.suggest import suggest_rename
from torchlift._sources.opening import Origin
from torchlift._sources.tensors import SourceTensor, describe, tensor_of
from torchlift._system.text import clipped_list
from torchlift.errors import Argument, CheckpointError, Hint, MismatchError
from torchlift.formats.flattening import extra_state
from torchlift.formats.scales import Quantised


class Named(NamedTuple):
    """A model and the content of a source, under the names of the bare model.

    Attributes:
        tree: The modules of the model.
        groups: The tensors of the model.
        path: The path of the source.
        candidates: Name -> its tensor in the source.
        objects: Key -> name, of non-tensor values.
        noted: Name that a file notes as tied to one of its tensors -> that tensor.
        left_out: Names whose keys the caller left out: they may be missing.
        ignored: Names of blocked values that the model does not need.
        quantised: The quantised tensors of the source by key, also those that are left out.
        of_program: Names that a program has besides the state of its modules. None: the source is
            not a program.
        naming: The names of a wrapped model, or None.
        keys: Name -> key of the state dict of the wrapped model. Empty for a bare model.
        code: The loading code of the model for these names, or None.
        outcome: The outcome of the loading code. None: none ran.
        given: Name -> tensor of the source before the loading code ran.
        on_meta: Names on meta before the loading code ran.
    """

    tree: ModuleTree
    groups: Sequence[Group]
    path: str
    candidates: Mapping[str, SourceTensor]
    objects: Mapping[str, str]
    noted: Mapping[str, SourceTensor]
    left_out: set[str]
    ignored: list[str]
    quantised: Quantised
    of_program: set[str] | None
    naming: Names | None
    keys: Mapping[str, str]
    code: LoadingCode | None
    outcome: Outcome | None = None
    given: Mapping[str, SourceTensor] = MappingProxyType({})
    on_meta: Collection[str] = ()

    def canonical(self, name: str) -> str:
        """Return the name in the bare model for a path in the model, or a key of its state dict."""
        return name if self.naming is None else self.naming.canonical(name)

    def key(self, name: str) -> str:
        """Return the key of the model's state dict for a name."""
        return name if self.naming is None else self.keys.get(name) or self.naming.key(name)


def canonical(
    tree: ModuleTree, source: Origin, options: Options, *, has_keys: bool = False
) -> Named:
    """Name the tensors of a model, and the content of a source, as the bare model does.

    Args:
        tree: The model.
        source: The source.
        options: The caller's options.
        has_keys: Whether the names of the source are keys of the model's state dict. If False, they
            may be names of the bare model, too.

    Raises:
        MismatchError: If a rule or a pattern matches nothing, or two keys get one name.
        UnsafeError: If a value that the model needs is blocked.
    """
    keys = {*source.candidates, *source.objects, *source.blocked} if options.rename else ()
    check_rename(options.rename, keys, source.path)
    quantised = source.find_quantised()  # before a scale is left out
    gone = source.leave_out(options.include, options.exclude)
    left_out = _names_of_left_out(gone, options.rename, source.path) if gone else set[str]()
    made: dict[str, SourceTensor] = {}
    if isinstance(options.rename, Rewriting):
        source.resolve(dict.fromkeys(source.candidates))
        names, made = _assemble_tensors(source, options.rename)
        taken = {*names.values(), *made}
        objects = rename_objects(source.objects, options.rename, source.path, taken)
    else:
        tensors = [key for key in source.candidates if key not in source.blocked]
        names = rename_keys(tensors, options.rename, source.path)
        objects = rename_keys(source.objects, options.rename, source.path)
    blocked = apply_rename(source.blocked, options.rename)
    ties = {name: key for name, key in source.noted.items() if key in names}
    noted = {new: ties[old] for old, new in apply_rename(ties, options.rename).items()}
    naming, given = wrapped_names(tree), [*names.values(), *made]
    groups = canonical_groups(tree.groups, naming)
    to_key: dict[str, str] = {}
    inside = False
    if naming is not None:
        given += objects.values()
        found = given if has_keys else naming.keys(given)
        # torch calls the method of the root alone. A file with the names of the wrapped model is
        # for the method of that model, and a file with the names of the wrapper for the wrapper's.
        inside = given != found
        renamed = _drop_wrappers(given, found, naming, source.path)
        names = {key: renamed[name] for key, name in names.items()}
        made = {renamed[name]: one for name, one in made.items()}
        objects = {key: renamed[name] for key, name in objects.items()}
        to_key = {renamed[name]: key for name, key in zip(given, found, strict=True)}
        left_out = {*map(naming.canonical, naming.keys(left_out))}
        asked = map(naming.canonical, naming.keys(blocked.values()))
        blocked = dict(zip(blocked, asked, strict=True))
        noted = dict(zip(map(naming.canonical, naming.keys(noted)), noted.values(), strict=True))
    for rule in filter(callable, (options.device, options.dtype)):
        check_rule(rule, [name for g in groups for name in g.names], present=options.present)
    there = [*names.values(), *made, *objects.values()]
    ignored = _ignore_blocked(source, blocked, groups, there, options)
    like = {slot.fqn: group.tensor for group in groups for slot in group.slots}
    # This rank needs its own slices of DTensors alone.
    needed = {key: like[name] for key, name in names.items() if name in like}
    source.resolve({k: spans_of(t, k) if is_dtensor(t) else None for k, t in needed.items()})
    code = find_loading_code(
        tree, [to_key.get(name, name) for name in (*names.values(), *made)], inside=inside
    )
    if code is not None:  # it sees values, so they are fetched now
        source.receive([k for k, name in names.items() if code.covers(to_key.get(name, name))])
    of_program = source.of_program
    if of_program is not None:
        pairs = (*names.items(), *objects.items())
        of_program = {name for key, name in pairs if key in of_program}
    return Named(
        tree=tree,
        groups=groups,
        path=source.path,
        candidates={name: source.candidates[key] for key, name in names.items()} | made,
        objects=objects,
        noted={name: source.candidates[key] for name, key in noted.items()},
        left_out=left_out,
        ignored=ignored,
        quantised=quantised,
        of_program=of_program,
        naming=naming,
        keys=to_key,
        code=code,
    )


def canonical_groups(groups: Sequence[Group], naming: Names | None) -> Sequence[Group]:
    """Return tensors of a model under the names of the bare model."""
    if naming is None:
        return groups
    return [
        Group(
            group.tensor,
            tuple(
                Slot(naming.canonical(slot.fqn), slot.module, slot.name, slot.persistent)
                for slot in group.slots
            ),
        )
        for group in groups
    ]


def _drop_wrappers(
    given: Sequence[str], keys: Sequence[str], naming: Names, path: str
) -> dict[str, str]:
    """Return name of the source -> name in the bare model.

    Args:
        given: Names of the source.
        keys: Their keys in the state dict of the wrapped model.
        naming: The names of the model.
        path: The path of the source.

    Raises:
        MismatchError: If two names are one in the bare model.
    """
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, key in zip(given, keys, strict=True):
        bare = found[name] = naming.canonical(key)
        if first.setdefault(bare, name) != name:
            raise same_name_error(bare, first[bare], name, path)
    return found


def _ignore_blocked(
    source: Origin,
    blocked: Mapping[str, str],
    groups: Iterable[Group],
    there: Iterable[str],
    options: Options,
) -> list[str]:
    """Return the names of blocked values that the model does not need.

    Args:
        source: The source.
        blocked: Key of a blocked value -> its name.
        groups: The tensors of the model.
        there: Names of the other values of the source.
        options: The caller's options.

    Raises:
        UnsafeError: If the model needs one, or the caller does not allow it to be unexpected.
    """
    ignored = list(dict.fromkeys(blocked.values()))
    if not ignored:
        return []
    excused = ignored if not options.strict else allowed(ignored, options.allow_unexpected)
    known = dict.fromkeys(name for group in groups for name in group.names)
    if refused := [key for key, name in blocked.items() if name in known or name not in excused]:
        offered = dict.fromkeys([*there, *ignored])
        lacking = [name for name in known if name not in offered]
        rest = [name for name in offered if name not in known]
        raise _blocked_error(source, refused, suggest_rename(lacking, rest, options.root))
    return ignored


def _blocked_error(source: Origin, keys: Sequence[str], found: Hint | None) -> CheckpointError:
    """Return the error for blocked values. Its hint begins with a root without them, if any."""
    error = source.refusal(keys[0], several=len(keys) > 1)
    if len(keys) > 1:
        error.lists.append(f"blocked ({len(keys)}): {clipped_list(keys)}")
    for root in found.fragments if found else ():
        if isinstance(root, Argument) and root.name == "root":
            fits = Hint("The model's names are in a container: pass ", root, " for that alone. ")
            error.hint = Hint(fits, error.hint or "")
    return error


def _names_of_left_out(
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


def _assemble_tensors(
    source: Origin, rename: Rewriting
) -> tuple[dict[str, str], dict[str, SourceTensor]]:
    """Return key -> name of unchanged tensors, and name -> tensor that a rule makes.

    Raises:
        MismatchError: See `rewrite_entries`.
    """
    for ckpt in source.checkpoints:
        rename.check(ckpt._index.metadata, ckpt.path)
    candidates = {k: v for k, v in source.candidates.items() if k not in source.blocked}
    entries = {key: describe(one) for key, one in candidates.items()}
    names: dict[str, str] = {}
    made: dict[str, SourceTensor] = {}
    try:
        tensors = rewrite_entries(entries, rename, source.path)
    except MismatchError as error:
        if no_tensors := [key for key in error.missing_keys if key in source.objects]:
            error.hint = f"In the checkpoint this is not a tensor: {clipped_list(no_tensors)}."
        raise
    for name, (entry, keys) in tensors.items():
        if entry is entries[keys[0]]:
            names[keys[0]] = name
        else:
            made[name] = tensor_of(entry, keys, source.views)
    return names, made

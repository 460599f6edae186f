"""Pair the tensors of a model with what a source has, and give the one verdict on the names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from torchlift._model.handlers import is_plain
from torchlift._model.loading_code import Outcome
from torchlift._model.slots import Group, is_lazy
from torchlift._plan.canonical import Named, canonical_groups
from torchlift._plan.rules import Options, Patterns, allowed
from torchlift._plan.suggest import (
    empty_hint,
    find_patterns,
    hint_of_computed,
    suggest_rename,
)
from torchlift._sources.opening import Origin, state_hint
from torchlift._sources.tensors import FileTensor, MemoryTensor, SourceTensor
from torchlift._system.text import clipped_list
from torchlift.errors import Argument, Hint, MismatchError, PlacementError, did_you_mean
from torchlift.formats.boxes import as_blocks
from torchlift.formats.scales import Quantised

#: ``ignore_mismatched=True`` would leave nearly all of the model as it was made.
_OTHER_SIZES = (
    "These are the shapes of another configuration. Build the model with the sizes of the "
    "checkpoint, or load the checkpoint of a model of these sizes."
)
#: A longer list of patterns is not an answer that somebody reads.
_SHOWN = 5
#: The way out for a quantised checkpoint that does not fit.
_QUANTISED = "Build the model as the library that quantised it does."


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A key with different shapes in the model and in the checkpoint.

    Attributes:
        key: Its name.
        expected: Its shape in the model. ``()`` if it is not a tensor there.
        found: Its shape in the checkpoint. ``()`` if it is not a tensor there.
        note: Which of the two is not a tensor, or None.
    """

    key: str
    expected: tuple[int, ...]
    found: tuple[int, ...]
    note: str | None = None

    def __str__(self) -> str:
        shapes = f"{self.key}: model {list(self.expected)}, checkpoint {list(self.found)}"
        return f"{self.key}: {self.note}" if self.note else shapes


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


class Pairing(NamedTuple):
    """The tensors of a model with those of a source, before anything else counts.

    Attributes:
        pairs: As in `Match`.
        unmatched: The tensors of the model that the source lacks.
        missing: Names of the model without a value.
        unexpected: Names of the source that the model lacks.
        mismatched: Name -> its two shapes.
    """

    pairs: list[Pair]
    unmatched: list[Group]
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, Mismatch]


@dataclass(frozen=True, slots=True)
class Match:
    """A model's tensors paired with what a source has.

    Attributes:
        path: The path of the source.
        groups: The tensors of the model.
        pairs: The tensors of the model that the source has.
        unmatched: The tensors of the model that the source lacks, and attributes on meta.
        missing, unexpected, dropped, mismatched: As in `LoadReport`. A name with another shape is
            not in `missing`.
        fits: The number of pairs. 0 if no pair has a value of the source.
        left_out: Names of the model whose keys the caller left out: they may be missing.
        hint: The change that would match more names, or None.
        renamed: Name in the source -> name in the model, if they differ.
        kept: Name -> what loading code of the model keeps outside of parameters and buffers.
        outcome: The outcome of the model's loading code. None: none ran.
        on_meta: Names on meta before loading code of the model ran.
        quantised: The quantised tensors of the source by key.
        unscaled: The quantised tensors whose scales the model does not take.
    """

    path: str = ""
    groups: Sequence[Group] = ()
    pairs: Sequence[Pair] = ()
    unmatched: Sequence[Group] = ()
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mismatched: Mapping[str, Mismatch] = field(default_factory=dict)
    fits: int = 0
    left_out: set[str] = field(default_factory=set)
    hint: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, SourceTensor] = field(default_factory=dict)
    outcome: Outcome | None = None
    on_meta: Collection[str] = ()
    quantised: Quantised = field(default_factory=Quantised)
    unscaled: Quantised = field(default_factory=Quantised)


#: Called with a match and the options. Raises an error if names differ.
CheckNames = Callable[[Match, Options], None]


def match(
    named: Named, source: Origin, options: Options, *, check: CheckNames | None = None
) -> Match:
    """Match the tensors of a model with those of a source, by name.

    Args:
        named: The model and the content of the source.
        source: The source.
        options: The caller's options.
        check: Raises an error if the names do not match, in place of `check_names`.

    Raises:
        MismatchError: If names or shapes do not match.
        PlacementError: If a candidate does not have a shape.
    """
    ties = _fill_noted_ties(named.groups, named.candidates, named.noted)
    found, outcome = {**named.candidates, **ties}, named.outcome
    # A transform may still change shapes, or make a tensor dense.
    pairing = pair_tensors(named.groups, found, check_shapes=options.transform is None)
    unscaled = _find_unscaled(pairing, named)
    missing, kept = pairing.missing, dict[str, SourceTensor]()
    unexpected = [*pairing.unexpected, *named.objects.values()]
    is_override = named.code is not None and named.code.is_override
    fits = len(pairing.pairs)
    if outcome is not None:
        silent = outcome.excused.difference(outcome.own)
        missing = list(dict.fromkeys([*(n for n in missing if n not in silent), *outcome.missing]))
        unexpected += outcome.unexpected
        kept = {name: named.given[name] for name in outcome.kept}
        # A hook may add values, as BatchNorm adds its counter. They do not show that a name fits.
        keys = {one.key for one in named.given.values()}
        has_any = any(one.key in keys for pair in pairing.pairs for one in pair.candidates)
        fits = (fits if is_override or has_any else 0) + len(kept)
    extra = set[str]()
    if check is None:  # for torch's own functions, such a name is unexpected
        extra = {s.fqn for group in named.groups for s in group.slots if not s.persistent}
    if named.of_program is not None:
        extra |= {*named.of_program, *_find_attributes(named)}
    renamed: Mapping[str, str] = {}
    if options.rename is not None or named.naming is not None or is_override:
        called = {one.key: name for name, one in named.candidates.items() if not one.keys}
        renamed = {key: name for key, name in called.items() if key != name}
    attributes, listed = named.tree.meta_attributes, [*unexpected, *named.ignored]
    matched = Match(
        path=named.path,
        groups=named.groups,
        pairs=pairing.pairs,
        unmatched=[*pairing.unmatched, *canonical_groups(attributes, named.naming)],
        missing=missing,
        unexpected=[name for name in listed if name not in extra],
        dropped=[name for name in listed if name in extra],
        mismatched=pairing.mismatched,
        fits=fits,
        left_out=named.left_out,
        renamed=renamed,
        kept=kept,
        outcome=outcome,
        on_meta=named.on_meta,
        quantised=named.quantised,
        unscaled=unscaled,
    )
    matched = replace(matched, hint=_hint(matched, named, source, options))
    if check is None and options.allow_missing:
        names = {name for group in named.groups for name in group.names}
        names |= {named.canonical(f"{prefix}_extra_state") for prefix, _ in named.tree.paths}
        names |= {*found, *missing, *matched.mismatched, *named.left_out}
        _require_names(options.allow_missing, names, named.path)
    if outcome is not None and outcome.is_lenient:
        options = replace(options, strict=False)
    (check or check_names)(matched, options)
    if outcome is not None and (error := outcome.error) is not None:
        outcome.error = None
        try:
            raise error
        finally:
            del error
    if options.transform is None:
        _require_scales(matched)
    return matched


def pair_tensors(
    groups: Iterable[Group], candidates: Mapping[str, SourceTensor], *, check_shapes: bool
) -> Pairing:
    """Pair tensors of a model with candidates by name. One name of a tie is enough.

    Args:
        groups: The tensors of the model.
        candidates: Name in the model -> what the source has for it.
        check_shapes: Whether shapes must be equal. False if a transform may change them.

    Raises:
        PlacementError: If a candidate does not have a shape.
    """
    result = Pairing([], [], [], [], {})
    known: set[str] = set()
    for group in groups:
        if len(group.slots) == 1 and is_plain(group.tensor):  # as nearly all tensors
            (slot,) = group.slots
            one = candidates.get(slot.fqn) if slot.persistent else None
            if type(one) is FileTensor and one.entry.shape == group.tensor.shape:
                known.add(slot.fqn)
                result.pairs.append(Pair(group, slot.fqn, [one]))
                continue
        names = [slot.fqn for slot in group.slots if slot.persistent]
        known.update(names)
        found = [
            (name, _blocks_for(candidates[name], group.tensor))
            for name in names
            if name in candidates
        ]
        for name, one in found:
            if isinstance(one, MemoryTensor) and is_lazy(one.value):
                raise PlacementError(
                    "the value does not have a shape: its lazy module never ran",
                    entry=name,
                    hint="Run the module once before you take its state dict.",
                )
            if isinstance(one, MemoryTensor) and one.value.is_nested:
                leave_out = Argument("exclude", f"[{name!r}]", (name,))
                raise PlacementError(
                    "a nested tensor cannot be loaded",
                    entry=name,
                    expected="a tensor with one shape",
                    found="a nested tensor",
                    hint=Hint("Leave it out with ", leave_out, ", and set it yourself."),
                )
        wrong = [
            Mismatch(name, tuple(group.tensor.shape), candidate.shape)
            for name, candidate in found
            if check_shapes and not _fits(group.tensor, candidate.shape)
        ]
        result.mismatched.update({item.key: item for item in wrong})
        found = [(name, one) for name, one in found if name not in result.mismatched]
        if found:  # even if another name of the tie has another shape
            result.pairs.append(Pair(group, found[0][0], [one for _, one in found]))
            continue
        if not wrong:
            result.missing.extend(names)
        result.unmatched.append(group)
    result.unexpected.extend(name for name in candidates if name not in known)
    return result


def _blocks_for(one: SourceTensor, tensor: torch.Tensor) -> SourceTensor:
    """Return the raw blocks of quantised values if the model's tensor has their size and dtype."""
    if tensor.dtype != torch.uint8 or not isinstance(one, FileTensor) or not one.entry.encoding:
        return one
    raw = as_blocks(one.entry)
    if raw is None or raw.shape != tuple(tensor.shape):
        return one
    return replace(one, entry=raw)


def _fits(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    if is_lazy(tensor):
        return True
    # torch < 0.4 saved a scalar with shape [1]. load_state_dict still accepts that.
    return tuple(tensor.shape) == shape or (tensor.dim() == 0 and shape == (1,))


def _fill_noted_ties(
    groups: Iterable[Group], found: Mapping[str, SourceTensor], noted: Mapping[str, SourceTensor]
) -> dict[str, SourceTensor]:
    """Return name in the model -> the tensor that a file notes as tied to it.

    A note counts only for a name without a value, and if the shapes are equal: it may be any text,
    and a tie of a view has another shape (keras-hub#3075).
    """
    lacking = {
        slot.fqn: tuple(group.tensor.shape)
        for group in (groups if noted else ())
        if not any(slot.fqn in found for slot in group.slots)
        for slot in group.slots
        if slot.persistent
    }
    return {name: one for name, one in noted.items() if lacking.get(name) == tuple(one.shape)}


def _find_attributes(named: Named) -> set[str]:
    """Return names of plain tensor attributes of the model, which a program saves, too."""
    return {
        named.canonical(f"{prefix}{name}")
        for prefix, module in named.tree.paths
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _find_unscaled(pairing: Pairing, named: Named) -> Quantised:
    """Return the quantised tensors whose scales the model does not take."""
    scales = named.quantised.scales
    if not scales:
        return named.quantised
    left = {*pairing.unexpected}
    taken = {
        key
        for name, one in named.candidates.items()
        if name not in left
        for key in one.keys or (one.key,)
    }
    return Quantised({key: some for key, some in scales.items() if not taken.issuperset(some)})


# ---- the verdict


def check_names(matched: Match, options: Options) -> None:
    """Refuse names and shapes that do not match, in one error that lists all of them.

    Raises:
        MismatchError: If names are missing or unexpected under ``strict=True``, or shapes differ.
    """
    missing, unexpected = _find_disallowed(matched, options)
    # A key that the caller left out is not a match, nor is one of another shape that is to be
    # ignored: otherwise a load of nothing would succeed.
    misshapen = matched.mismatched.keys() - allowed(matched.mismatched, options.allow_missing)
    left_out = [name for name in matched.missing if name in matched.left_out]
    nothing = bool(missing or misshapen or left_out) and not matched.fits
    wrong = matched.mismatched
    if options.ignore_mismatched and not nothing:
        # As soon as a name is given, others are not skipped: a body of another width is a mistake.
        wrong = {k: wrong[k] for k in wrong if options.allow_missing and k in misshapen}
    # The checkpoint has a value under such a name, and it is not a tensor.
    there = {*matched.unexpected}
    odd = [name for name in missing if name in there]
    if not (wrong or nothing or odd or (options.strict and (missing or unexpected))):
        return
    shapes = {key: (item.expected, item.found) for key, item in wrong.items()}
    names = {
        "not a tensor in the checkpoint": odd,
        "missing": [name for name in missing if name not in there],
        "left out": left_out if nothing and not missing else [],
        "unexpected": [name for name in unexpected if name not in odd],
    }
    misnamed = len(left_out) + min(len(names["missing"]), len(names["unexpected"]))
    hint = empty_hint(shapes) or matched.hint
    unscaled = matched.unscaled
    is_quantised = hint is None and (
        not unscaled.of_scales.isdisjoint(unexpected)
        or (bool(unscaled.scales) and options.transform is None)
    )
    differing = sum(item.note is None for item in wrong.values())
    if hint is None and not is_quantised and differing > 3 * matched.fits + misnamed:
        # To skip nearly all shapes would leave the model as it was made.
        hint = _OTHER_SIZES
    lists = [
        f"{title} ({len(some)}): {clipped_list(some)}" for title, some in names.items() if some
    ]
    if wrong:
        lists.append(f"mismatched ({len(wrong)}): {clipped_list(map(str, wrong.values()), '; ')}")
    fits = "nothing in the checkpoint fits" if nothing else "the checkpoint does not fit"
    reason = f"{fits} the model"
    if is_quantised:
        reason += ", because its weights are quantised with scales that the model does not take"
        hint = unscaled.hint(_QUANTISED)
        lists.append(unscaled.line)
    raise MismatchError(
        reason,
        file=matched.path,
        hint=hint or _way_out(names, options, matched if wrong else None),
        lists=lists,
        missing_keys=matched.missing,
        unexpected_keys=matched.unexpected,
        mismatched=shapes,
    )


def _way_out(
    names: Mapping[str, list[str]], options: Options, matched: Match | None
) -> Hint | None:
    """Return the arguments with which the load succeeds.

    Args:
        names: The names that do not match.
        options: The caller's options.
        matched: The match, if a shape is wrong.
    """
    may_be = "[...] with the names that may be"
    ways: dict[str, str | Argument] = {
        "not a tensor in the checkpoint": (
            "tensors under these names (torch.from_numpy converts an array)"
        ),
        "missing": Argument("allow_missing", may_be),
        "left out": Argument("include", "[...] with keys that the model has"),
        "unexpected": Argument("allow_unexpected", may_be),
    }
    found = [way for title, way in ways.items() if names[title]]
    if names["missing"] and names["unexpected"]:
        # Less would be loaded than anybody means: the names have to be brought together first.
        found = [Hint(Argument("rename"), " with the rule that brings the names together")]
    if matched is not None:
        loaded = (name for pair in matched.pairs for name in pair.group.names)
        patterns = find_patterns(matched.mismatched, loaded)
        is_short, by_name = len(patterns) < _SHOWN, ways["missing"]
        if not options.ignore_mismatched:
            found.append(Argument("ignore_mismatched", "True"))
        if by_name not in found and (is_short or options.allow_missing):
            listed = dict.fromkeys([*options.allow_missing, *patterns])
            listed_way = Argument("allow_missing", repr([*listed]), (*listed,))
            found.append(listed_way if is_short else by_name)
        found[-1] = Hint(found[-1], " to skip what has another shape")
    if not found:
        return None
    return Hint("Pass ", found[0], *(f for way in found[1:] for f in (" and ", way)), ".")


def _find_disallowed(matched: Match, options: Options) -> tuple[list[str], list[str]]:
    """Return the missing names and the unexpected names that are not allowed."""
    excused = allowed(matched.missing, options.allow_missing) | matched.left_out
    extra = allowed(matched.unexpected, options.allow_unexpected)
    missing = [name for name in matched.missing if name not in excused]
    return missing, [name for name in matched.unexpected if name not in extra]


def _require_names(patterns: Patterns, names: Collection[str], path: str) -> None:
    """Refuse a pattern of names that may be missing if nothing has such a name.

    Raises:
        MismatchError: If there is one.
    """
    for pattern in patterns:
        if pattern != "*" and not allowed(names, [pattern]):
            raise MismatchError(
                "no name of the model matches this pattern of allow_missing",
                file=path,
                entry=pattern,
                hint=did_you_mean(pattern, names) or "Correct it, or leave it out.",
            )


def _require_scales(matched: Match) -> None:
    """Refuse codes that would become values of the model without their scales.

    Raises:
        MismatchError: If there are some.
    """
    for pair in matched.pairs if matched.unscaled.scales else ():
        for one in pair.candidates:
            for key in one.keys or (one.key,):
                if key in matched.unscaled.scales:
                    raise MismatchError(
                        "it is quantised with scales that the model does not take",
                        file=matched.path,
                        entry=key,
                        expected="a model with tensors for its scales",
                        found=str(one.dtype).removeprefix("torch."),
                        hint=matched.unscaled.hint(_QUANTISED),
                        lists=[matched.unscaled.line],
                        missing_keys=matched.missing,
                        unexpected_keys=matched.unexpected,
                    )


def _hint(matched: Match, named: Named, source: Origin, options: Options) -> str | None:
    """Return the change that would match the names, or None.

    Args:
        matched: The names that match, and those that do not.
        named: The model and the content of the source.
        source: The source.
        options: The caller's options.
    """
    model, missing, unexpected = named.tree.model, matched.missing, matched.unexpected
    if not (missing or unexpected):
        return None
    if matched.fits:  # allowed names are intended, unless nothing matches
        missing, unexpected = _find_disallowed(matched, options)
    if not _is_of(model, "peft.peft_model", "PeftModel") and (
        computed := hint_of_computed(missing, unexpected)
    ):
        return computed
    if not missing or not unexpected:
        return None
    names = {*unexpected}
    values = {key: source.objects[key] for key, name in named.objects.items() if name in names}
    if hint := state_hint(values):
        return hint
    suggested = suggest_rename(missing, unexpected, options.root)
    if suggested is None and matched.unscaled.scales:
        return None  # no rename makes values of codes
    return suggested if options.rename else _library_hint(model, unexpected, suggested)


def _is_of(model: nn.Module, module: str, name: str) -> bool:
    """Return whether a class of this name is a base of the model's, without an import of it."""
    return any((base.__module__, base.__name__) == (module, name) for base in type(model).__mro__)


def _library_hint(
    model: nn.Module, unexpected: Sequence[str], suggested: Hint | None
) -> Hint | None:
    """Return the rename that knows the files of a model's library, or the suggested rename.

    A simple prefix may be the reason for names that transformers would convert, but not for others.
    """
    if _is_of(model, "peft.peft_model", "PeftModel"):
        rename = Argument("rename", "torchlift.integrations.peft.peft_names(model)")
        return Hint("PEFT renames the modules that it adapts: pass ", rename, ".")
    if not _is_of(model, "transformers.modeling_utils", "PreTrainedModel"):
        return suggested
    if "token_embd.weight" in unexpected:
        rename = Argument("rename", 'remap.from_to("gguf->transformers", model)')
        return Hint("The names are those of a GGUF file: pass ", rename, ".")
    rename = Argument("rename", "remap.transformers(model)")
    return suggested or Hint("transformers converts its files while it loads: pass ", rename, ".")

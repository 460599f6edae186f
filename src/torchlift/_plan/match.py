"""Which entry of a checkpoint belongs to which tensor of a model, and what is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from torchlift._model.slots import Group, is_lazy
from torchlift._plan.report import Mismatch
from torchlift._plan.steps import Candidate, Match
from torchlift._plan.steps import Rename as Rename
from torchlift.errors import MismatchError


def renamed(keys: Iterable[str], rename: Rename | None, path: str) -> dict[str, str]:
    """Name in the checkpoint -> name in the model, without those that `rename` drops.

    Raises:
        MismatchError: two keys get the same name.
    """
    if rename is None:
        return {key: key for key in keys}
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key in keys:
        name = rename(key)
        if name is None:
            continue
        if not isinstance(name, str):
            raise TypeError(f"rename({key!r}) returned {name!r}, which is neither str nor None")
        if name in taken:
            raise MismatchError(
                f"rename gives two keys one name, {name!r}",
                file=path,
                entry=taken[name],
                found=key,
                hint="Return None for the one that is to be dropped.",
            )
        names[key] = name
        taken[name] = key
    return names


def match(
    groups: Iterable[Group], candidates: Mapping[str, Candidate], *, check_shapes: bool
) -> Match:
    """Pair groups with candidates by name; any name of a tied group will do.

    Args:
        groups: the model's tensors.
        candidates: name in the model -> what the source has for it.
        check_shapes: False where a transform may still change shapes.
    """
    result = Match()
    known: set[str] = set()
    for group in groups:
        known.update(slot.fqn for slot in group.slots if slot.persistent)
        found = [
            (slot.fqn, candidates[slot.fqn])
            for slot in group.slots
            if slot.persistent and slot.fqn in candidates
        ]
        wrong = [
            Mismatch(name, tuple(group.tensor.shape), candidate.shape)
            for name, candidate in found
            if check_shapes and not _fits(group.tensor, candidate.shape)
        ]
        if wrong:
            result.mismatched.update({item.key: item for item in wrong})
        elif found:
            result.pairs.append((group, found[0][0], [candidate for _, candidate in found]))
            continue
        elif group.persistent:
            result.missing += [slot.fqn for slot in group.slots if slot.persistent]
        result.unmatched.append(group)
    result.unexpected = [name for name in candidates if name not in known]
    return result


def _fits(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    if is_lazy(tensor):
        return True
    # A scalar saved with shape [1] by torch < 0.4, which load_state_dict accepts to this day.
    return tuple(tensor.shape) == shape or (tensor.dim() == 0 and shape == (1,))


def suggestion(missing: Iterable[str], unexpected: Iterable[str]) -> str | None:
    """The one rename or root that would bring the two lists together, or None.

    Example:
        >>> suggestion(["fc.weight"], ["module.fc.weight"])
        "The checkpoint's names start with 'module.': pass rename=remap.strip('module.')."
    """
    lacking, extra = list(missing), list(unexpected)
    if not lacking or not extra:
        return None
    drop = _prefix(lacking, extra)
    add = _prefix(extra, lacking)
    if drop[0] and drop[1] >= add[1]:
        others = any(not name.startswith(drop[0]) for name in extra)
        root = f", or root={drop[0][:-1]!r} to leave the rest of the file out" if others else ""
        return (
            f"The checkpoint's names start with {drop[0]!r}: "
            f"pass rename=remap.strip({drop[0]!r}){root}."
        )
    if add[0]:
        return (
            f"The model's names start with {add[0]!r} and the checkpoint's do not: "
            f"pass rename=lambda key: {add[0]!r} + key."
        )
    return None


def _prefix(short: list[str], long: list[str]) -> tuple[str, int]:
    """The prefix that turns most of `short` into names of `long`, and how many."""
    names = set(short)
    votes: Counter[str] = Counter()
    for other in long:
        dot = other.find(".")
        while dot >= 0:
            if other[dot + 1 :] in names:
                votes[other[: dot + 1]] += 1
            dot = other.find(".", dot + 1)
    if not votes:
        return "", 0
    best, count = votes.most_common(1)[0]
    # A prefix that helps a minority is a coincidence (two heads of one name), not a mistake.
    return (best, count) if 2 * count > min(len(short), len(long)) else ("", 0)

"""Which rule would bring the names of a checkpoint and of a model together.

All of it is bounded: of 100,000 names that do not fit, an answer takes 0.5 s.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torchlift._model.torch_private import CHECKPOINTED, COMPILED, FULLY_SHARDED
from torchlift.errors import Argument, Hint, nearest

#: Names of each side from which rules are guessed; what they do is counted on all names.
_LOOKED_AT = 2000
#: Children in which wrappers of PyTorch hold the module that they wrap.
_WRAPPERS = dict.fromkeys(("module", COMPILED, CHECKPOINTED, FULLY_SHARDED), "")
#: What a component of names becomes; nothing, where it is taken out.
Edits = Mapping[str, str]


def suggestion(
    missing: Iterable[str], unexpected: Iterable[str], root: str | None = None
) -> Hint | None:
    r"""Return the one rename or root that would bring the two lists together, or None.

    Args:
        missing: names of the model.
        unexpected: names of the checkpoint, below `root`.
        root: the container that was asked for.

    Example:
        >>> print(suggestion(["fc.weight"], ["module.fc.weight"]))
        The checkpoint's names start with 'module.': pass rename=remap.strip('module.').
        >>> print(suggestion(["norm.weight"], ["norm.gamma"]).partition(": ")[2])
        pass rename=remap.rules([('(?<![^.])gamma(?![^.])', 'weight')]).
    """
    lacking, extra = list(missing), list(unexpected)
    drop, dropped = _prefix(lacking, extra)
    add, added = _prefix(extra, lacking)
    if drop and dropped >= added:
        rest = _edits_between(lacking, [name.removeprefix(drop) for name in extra])
        strip = _rename(rest, drop)
        if rest or all(name.startswith(drop) for name in extra):
            return Hint(f"The checkpoint's names start with {drop!r}: pass ", strip, ".")
        inner = f"{root}.{drop[:-1]}" if root else drop[:-1]
        return Hint(
            f"Of the checkpoint's names some start with {drop!r}: pass ",
            Argument("root", repr(inner), (inner,)),
            " to leave the rest of it out, or ",
            strip,
            ".",
        )
    if add:
        return Hint(
            f"The model's names start with {add!r} and the checkpoint's do not: pass ",
            Argument("rename", f"lambda key: {add!r} + key", (("^", add),)),
            ".",
        )
    edits = _edits_between(lacking, extra)
    if not edits:
        return None
    told = [
        f"{old!r} looks like {new!r}" if new else f"{old!r} is in the checkpoint's names only"
        for old, new in edits.items()
    ]
    return Hint(f"{', '.join(told)}: pass ", _rename(edits), ".")


def look_alikes(missing: Sequence[str], unexpected: Sequence[str]) -> str | None:
    """Return which of the names may mean the same, for three at most, or None."""
    by_end = defaultdict(list)
    for name in unexpected:
        by_end[name.rpartition(".")[2]].append(name)
    pairs = []
    for name in missing[:10]:
        same_end = by_end.get(name.rpartition(".")[2])
        near = nearest(name, (same_end or unexpected)[:_LOOKED_AT])
        pairs += [f"{near[0]!r} looks like {name!r}"] if near else []
    return ", ".join(pairs[:3]) or None


def _prefix(short: list[str], long: list[str]) -> tuple[str, int]:
    """Return the prefix that turns most of `short` into names of `long`, and how many."""
    names = set(short)
    votes: Counter[str] = Counter()
    for other in long[:: len(long) // _LOOKED_AT + 1]:
        at = other.find(".") + 1
        while at:
            if other[at:] in names:
                votes[other[:at]] += 1
            at = other.find(".", at) + 1
    best = max(votes, key=votes.__getitem__, default="")
    count = sum(name.startswith(best) and name[len(best) :] in names for name in long)
    # A prefix that helps a minority is a coincidence (two heads of one name), not a mistake.
    return (best, count) if best and 2 * count > min(len(short), len(long)) else ("", 0)


def _edits_between(lacking: list[str], extra: list[str]) -> Edits:
    """Return the changes of single components that turn most of `extra` into `lacking`."""
    known = set(lacking)
    wanted, others = known.difference(extra), [name for name in extra if name not in known]
    if not wanted or not others:
        return {}
    here, there = (_components(names[:_LOOKED_AT]) for names in (lacking, others))
    wrapped = {old: "" for old in _WRAPPERS if old in there and old not in here}
    unwrapped = [_edited(name, wrapped) for name in others[:_LOOKED_AT]]
    for edits in (wrapped, wrapped | _voted([n for n in lacking if n in wanted], unwrapped)):
        made = [_edited(name, edits) for name in others]
        fitting = wanted.intersection(made)
        # Where two names become one, the rule is another one.
        if 2 * len(fitting) > min(len(wanted), len(others)) and len(set(made)) == len(made):
            return edits
    return {}


def _voted(lacking: list[str], extra: list[str]) -> dict[str, str]:
    """Return for components of `extra` those of `lacking` that most often stand in their place."""
    here, there = _by_the_rest(lacking), _by_the_rest(extra)
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for rest, found in there.items():
        # Both in their order: weight and bias, gamma and beta.
        for old, new in zip(found, here.get(rest, ()), strict=False):
            votes[old][new] += 1
    return {old: counted.most_common(1)[0][0] for old, counted in votes.items()}


def _by_the_rest(names: list[str]) -> dict[tuple[object, ...], list[str]]:
    """Return the components of names by all that is around them."""
    found: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in names[:_LOOKED_AT]:
        parts = name.split(".")
        for at, part in enumerate(parts):
            # Where layers are numbered in another way, no rule for one number is right.
            if len(parts) > 1 and not part.isdecimal():
                found[(at, *parts[:at], *parts[at + 1 :])].append(part)
    return found


def _components(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in name.split(".")}


def _edited(name: str, edits: Edits) -> str:
    return ".".join(filter(None, (edits.get(part, part) for part in name.split("."))))


def _rename(edits: Edits, drop: str = "") -> Argument:
    # Whole components, which may have any character but a dot; \b ends at a hyphen.
    pairs = [
        (f"(?<![^.]){re.escape(old)}" + ("(?![^.])" if new else "[.]"), new.replace("\\", r"\\"))
        for old, new in edits.items()
    ]
    steps = [f"remap.strip({drop!r})"] * bool(drop) + [f"remap.rules({pairs!r})"] * bool(pairs)
    return Argument("rename", " | ".join(steps), (*[drop] * bool(drop), *pairs))

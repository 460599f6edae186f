"""`merge` makes one tensor of several, and `split` makes several tensors of one.

The conversions of transformers' table, as calls of these two:

- A list of experts fused into one tensor (Mixtral, Qwen2-MoE): ``merge(stack=0)``.
- The same, with the gate and up projections in one tensor: ``merge(stack=0, cat=1)``.
- Short convolutions of q, k and v in one tensor (Qwen3.5, GLM-5): ``merge(cat=0)``.
- Fused q/k/v or gate/up weights that are separated (timm, SAM, Phi-3): ``split(chunk=0)``.
- Grouped attention (Molmo): ``split(chunk=0, sizes=...)``.
- Routers that are saved transposed (Ernie 4.5 VL): ``merge(transpose=(0, 1))``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch

from torchlift._plan.names import Made, Rewriting
from torchlift._plan.rules import same_name_error
from torchlift._system.text import clipped_list
from torchlift.errors import MismatchError
from torchlift.remap.names import Renaming
from torchlift.remap.unread import MISFITS, Unfit, Unread, made_of

#: The fields of a pattern: ``*`` matches text, ``{...}`` matches a number.
_FIELD = re.compile(r"(\*|\{\w*\})")
#: The numbers of a list of modules. Others, such as 007, would not survive a round trip.
_NUMBER = "(?P<number>0|[1-9][0-9]{0,8})"
MOST_NAMED = 100  # missing members in an error


# ---- patterns


class _Place(NamedTuple):
    """The parts of a name that match the fields of a pattern.

    Attributes:
        texts: The texts that ``*`` matches. Members of one tensor have the same.
        pattern: The index of the pattern that the name matches.
        number: The number that ``{...}`` matches, or 0.
    """

    texts: tuple[str, ...]
    pattern: int
    number: int


@dataclass(frozen=True)
class _Pattern:
    """A name with fields: ``*`` for text, ``{...}`` for a number."""

    text: str

    @property
    def stars(self) -> int:
        return self.text.count("*")

    @property
    def numbers(self) -> int:
        return len(_FIELD.findall(self.text)) - self.stars

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = _FIELD.split(self.text)  # texts and fields in turn
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = ["(.*)" if field == "*" else _NUMBER for field in parts[1::2]]
        return re.compile("".join(parts), re.DOTALL)

    def find(self, key: str, index: int = 0) -> _Place | None:
        """Return the place of a key, or None if it does not match."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        texts = [*found.groups()]
        at = self._regex.groupindex.get("number")
        number = 0 if at is None else int(texts.pop(at - 1))
        return _Place(tuple(texts), index, number)

    def name(self, texts: Sequence[str], number: int = 0) -> str:
        """Fill in the fields and return the name."""
        values = iter(texts)
        return _FIELD.sub(lambda f: next(values) if f[0] == "*" else str(number), self.text)


# ---- the rule


@dataclass(frozen=True, repr=False)
class _Division(Rewriting, Renaming):
    """A rule between several tensors (the members) and one tensor (the whole).

    Attributes:
        members: Patterns of the members' names.
        whole: Pattern of the whole's name.
        stack: Dimension along which numbered members are stacked, or None.
        cat: Dimension along which members are concatenated, or None.
        sizes: Proportions of the members along `cat`. None: all are equal.
        transpose: Two dimensions of a member that are exchanged in the whole, or None.
        merges: Whether members become the whole. False: the whole becomes members.
    """

    members: tuple[_Pattern, ...]
    whole: _Pattern
    stack: int | None
    cat: int | None
    sizes: tuple[int, ...] | None
    transpose: tuple[int, int] | None
    merges: bool

    def __call__(self, key: str) -> str:
        """Return the name of the whole, or of the first member."""
        place = self._find_member(key) if self.merges else self.whole.find(key)
        if place is None:
            return key
        return (self.whole if self.merges else self.members[0]).name(place.texts)

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        # A file may have the names after the rule already.
        patterns = (*self.members, self.whole)
        return None if any(p.find(key) for key in keys for p in patterns) else self

    def names_of(self, key: str) -> list[str]:
        place = None if self.merges else self.whole.find(key)
        return [self(key)] if place is None else [p.name(place.texts) for p in self.members]

    def __repr__(self) -> str:
        several: str | list[str] = [pattern.text for pattern in self.members]
        several = several[0] if len(several) == 1 else several
        names = [several, self.whole.text] if self.merges else [self.whole.text, several]
        words = ("stack", "cat") if self.merges else ("unstack", "chunk")
        values = {
            words[0]: self.stack,
            words[1]: self.cat,
            "sizes": self.sizes,
            "transpose": self.transpose,
        }
        given = [f"{name}={value!r}" for name, value in values.items() if value is not None]
        return f"{'merge' if self.merges else 'split'}({', '.join([*map(repr, names), *given])})"

    def reversed(self) -> _Division:
        """Return the inverse: `split` for a `merge`, `merge` for a `split`."""
        if self.merges and self.sizes is None and self.is_numbered and self.stack is None:
            raise ValueError(f"{self!r} cannot be reversed without sizes=. Pass sizes= to merge")
        return replace(self, merges=not self.merges)

    @property
    def is_numbered(self) -> bool:
        """Whether one pattern matches a numbered list of members."""
        return self.members[0].numbers > 0

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name -> tensor. See `Rewriting`."""
        return self._merge(items, path) if self.merges else self._split(items, path)

    def _find_member(self, key: str) -> _Place | None:
        found = (pattern.find(key, index) for index, pattern in enumerate(self.members))
        return next((place for place in found if place is not None), None)

    def _merge(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        places = {key: self._find_member(key) for key in items}
        groups: dict[tuple[str, ...], dict[_Place, Made]] = {}
        for key, place in places.items():
            if place is not None:
                groups.setdefault(place.texts, {})[place] = items[key]
        made: dict[str, Made] = {}
        for key, place in places.items():
            if place is None:
                add(made, key, items[key], path)
            elif members := groups.pop(place.texts, None):
                name, order = self.whole.name(place.texts), self._sort(place.texts, members)
                try:
                    whole = self._join([Unread.of(item) for item in order])
                    add(made, name, made_of(whole), path)
                except MISFITS as error:
                    raise _misfit_error("merged", name, order, error) from None
        return made

    def _sort(self, texts: tuple[str, ...], members: Mapping[_Place, Made]) -> list[Made]:
        """Return the members by pattern, then by number."""
        count = 1 + max(place.number for place in members)
        order = (
            _Place(texts, index, number)
            for index in range(len(self.members))
            for number in range(count)
        )
        if len(members) == count * len(self.members):
            return [members[place] for place in order]
        lacking = (
            self.members[place.pattern].name(texts, place.number)
            for place in order
            if place not in members
        )
        raise missing_members(self.whole.name(texts), list(islice(lacking, MOST_NAMED)))

    def _join(self, members: list[torch.Tensor]) -> torch.Tensor:
        """Make the whole of all members, which are in order."""
        if self.transpose is not None:
            members = [member.transpose(*self.transpose) for member in members]
        if self.stack is not None:
            count = len(members) // len(self.members) if self.is_numbered else len(members)
            starts = range(0, len(members), count)
            members = [torch.stack(members[at : at + count], self.stack) for at in starts]
        if self.cat is not None:
            whole = torch.cat(members, self.cat)
            sizes = [member.size(self.cat) for member in members]
            shares = self.sizes or (1,) * len(sizes)
            if [sizes[0] * share for share in shares] != [size * shares[0] for size in sizes]:
                found, expected = (clipped_list(map(str, each)) for each in (sizes, shares))
                # The members of a list may be thousands.
                way = f". Pass sizes={tuple(sizes)}" if len(sizes) == len(self.members) else ""
                raise Unfit(
                    f"their sizes in dimension {self.cat} are {found}. The rule expects the "
                    f"proportions {expected}{way}"
                )
            members = [whole]
        return members[0]

    def _split(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        made: dict[str, Made] = {}
        for key, item in items.items():
            place = self.whole.find(key)
            if place is None:
                add(made, key, item, path)
                continue
            try:
                lists = self._separate(Unread.of(item))
            except MISFITS as error:
                raise _misfit_error("split", key, [item], error) from None
            for pattern, members in zip(self.members, lists, strict=True):
                for number, member in enumerate(members):
                    add(made, pattern.name(place.texts, number), made_of(member), path)
        return made

    def _separate(self, whole: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the members of each pattern."""
        parts, count = [whole], len(self.members)
        if self.cat is not None:
            shares = self.sizes or (1,) * count
            unit, rest = divmod(whole.size(self.cat), sum(shares))
            if rest:
                raise Unfit(f"dimension {self.cat} does not divide into slices of {shares}")
            parts = list(torch.split(whole, [unit * share for share in shares], self.cat))
        if self.stack is not None:
            parts = [member for part in parts for member in part.unbind(self.stack)]
        if self.transpose is not None:
            parts = [part.transpose(*self.transpose) for part in parts]
        size, rest = divmod(len(parts), count)
        if rest or not (self.is_numbered or size == 1):
            raise Unfit(f"dimension {self.stack} must be {count}, the number of names")
        return [parts[at * size : (at + 1) * size] for at in range(count)]


def _misfit_error(what: str, name: str, items: Sequence[Made], error: Exception) -> MismatchError:
    tensors = "this tensor" if len(items) == 1 else "these tensors"
    return MismatchError(
        f"{tensors} cannot be {what}: {error}",
        entry=name,
        found=clipped_list(f"{keys[0]!r}: {e.dtype} {list(e.shape)}" for e, keys in items),
    )


def add(made: dict[str, Made], name: str, item: Made, path: str) -> None:
    """Add a tensor under a new name.

    Raises:
        MismatchError: If another tensor already has the name.
    """
    if name in made:
        raise same_name_error(name, made[name].keys[0], item.keys[0], path)
    made[name] = item


def missing_members(name: str, missing: Sequence[str]) -> MismatchError:
    """Make the error that lists missing members."""
    return MismatchError(
        f"the checkpoint does not contain all its members. Missing: {clipped_list(missing)}",
        entry=name,
        hint="Add the file that contains them, or drop the other members with remap.rules.",
        missing_keys=missing,
    )


def merge(
    sources: str | Sequence[str],
    target: str,
    *,
    stack: int | None = None,
    cat: int | None = None,
    sizes: Sequence[int] | None = None,
    transpose: tuple[int, int] | None = None,
) -> Renaming:
    """Merge several tensors into one, such as a list of experts, or q, k and v.

    In a pattern, ``*`` matches any text, dots included. The target contains the same text in the
    same place. ``{...}`` matches the number of a list's member, with or without a name inside.
    Members are transposed first, then stacked, then concatenated in the order of the patterns.
    Each value is read once, directly into its slice. On a mesh, a rank reads only its shard. Keys
    that match no pattern keep their names. If some members of a tensor are missing, or no key
    matches at all, the load fails, even with ``strict=False``.

    Args:
        sources: A pattern with ``{...}`` for a list, or several patterns in order.
        target: The name of the merged tensor, with the same number of ``*``.
        stack: The dimension of the target that counts list members, as for ``torch.stack``.
        cat: The dimension along which members are concatenated, as for ``torch.cat``.
        sizes: Proportions of the patterns along ``cat``, such as ``(4, 1, 1)`` for grouped
            attention. Default: all are equal.
        transpose: Two dimensions of each source to exchange. Alone, it transposes one tensor.

    Returns:
        A rename. It composes: ``strip("model.") | merge(...)``. Its ``reversed()`` is the `split`
        that undoes it.

    Raises:
        ValueError: If the patterns and dimensions contradict each other.

    Example:
        >>> import torch, torchlift
        >>> from torchlift import remap
        >>> experts = {f"moe.{i}.w": torch.full((2, 3), float(i)) for i in range(4)}
        >>> model = torch.nn.Module()
        >>> model.moe = torch.nn.Parameter(torch.empty(4, 2, 3))
        >>> report = torchlift.load(model, experts, rename=remap.merge("*.{i}.w", "*", stack=0))
        >>> model.moe[:, 0, 0].tolist(), len(report.loaded["moe"].entries)
        ([0.0, 1.0, 2.0, 3.0], 4)
    """
    return _division("merge", sources, target, stack, cat, sizes, transpose)


def split(
    source: str,
    targets: str | Sequence[str],
    *,
    unstack: int | None = None,
    chunk: int | None = None,
    sizes: Sequence[int] | None = None,
    transpose: tuple[int, int] | None = None,
) -> Renaming:
    """Split one tensor into several, such as a fused matrix into q, k and v.

    This is the inverse of `merge`, with the same patterns. A target that is contiguous in the file
    stays mapped. Any other target is copied into memory.

    Args:
        source: The name of the tensor to split.
        targets: Patterns in order, with the same number of ``*``. ``{...}`` makes a numbered list.
        unstack: The dimension of the source that counts members, as for ``torch.unbind``.
        chunk: The dimension to cut, as for ``torch.chunk``.
        sizes: Proportions of the targets along ``chunk``. Default: all are equal.
        transpose: Two dimensions of each target to exchange at the end.

    Returns:
        A rename. Its ``reversed()`` is the `merge` that undoes it.

    Raises:
        ValueError: If the patterns and dimensions contradict each other.

    Example:
        >>> import torch, torchlift
        >>> from torchlift import remap
        >>> rename = remap.split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"], chunk=0, sizes=(2, 1, 1))
        >>> model = torch.nn.ModuleDict({"at": torch.nn.ModuleDict()})
        >>> for name, rows in zip("qkv", (4, 2, 2)):
        ...     model["at"][name] = torch.nn.Linear(3, rows, bias=False)
        >>> report = torchlift.load(model, {"at.qkv.weight": torch.ones(8, 3)}, rename=rename)
        >>> report.split
        {'at.qkv.weight': ('at.q.weight', 'at.k.weight', 'at.v.weight')}
    """
    rule = _division("split", targets, source, unstack, chunk, sizes, transpose)
    return rule.reversed()


def _division(
    what: str,
    members: str | Sequence[str],
    whole: str,
    stack: int | None,
    cat: int | None,
    sizes: Sequence[int] | None,
    transpose: tuple[int, int] | None,
) -> _Division:
    names = [members] if isinstance(members, str) else list(members)
    stacks, cats = ("stack=", "cat=") if what == "merge" else ("unstack=", "chunk=")
    patterns, one = [_Pattern(name) for name in names], _Pattern(whole)
    lists, several = any(p.numbers for p in patterns), len(patterns) > 1
    wrong = None
    if not patterns or len(set(names)) < len(names):
        wrong = "expected one pattern, or several different patterns"
    elif one.numbers or any(p.stars != one.stars for p in patterns):
        wrong = f"every pattern must contain * as often as {whole!r} does"
    elif any(p.numbers != int(lists) for p in patterns):
        wrong = "either every pattern contains one {...}, or none does"
    elif lists and several and None in (stack, cat):
        wrong = f"pass {stacks} for the numbers and {cats} for the patterns"
    elif not (lists and several) and None not in (stack, cat):
        wrong = f"pass {stacks} and {cats} together only for numbers in several patterns"
    elif (lists or several) and stack is None and cat is None:
        wrong = f"pass {stacks} or {cats}, the dimension in which they are joined"
    elif sizes is not None and (cat is None or any(size < 1 for size in sizes)):
        wrong = f"sizes= must be numbers above 0, together with {cats}"
    elif sizes is not None and several and len(sizes) != len(patterns):
        wrong = f"{len(sizes)} sizes for {len(patterns)} patterns"
    elif what == "split" and lists and stack is None and sizes is None:
        wrong = "pass sizes=, one for each member"
    if wrong:
        shown = f"{members!r}, {whole!r}" if what == "merge" else f"{whole!r}, {members!r}"
        raise ValueError(f"{what}({shown}): {wrong}")
    given = None if sizes is None else tuple(sizes)
    return _Division(tuple(patterns), one, stack, cat, given, transpose, merges=True)

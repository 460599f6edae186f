"""Renames that change how tensors are divided: `merge` makes one of many, `split` many of one.

Which conversion of transformers' table takes which: experts of a list fused into one tensor
(Mixtral, Qwen2-MoE and most of its kind) are ``merge(stack=0)``, with gate and up projection in one
tensor ``merge(stack=0, cat=1)``; short convolutions of q, k and v in one (Qwen3.5, GLM-5)
``merge(cat=0)``; fused q/k/v and gate/up weights taken apart (ViTs of timm and SAM, ModernBERT,
Phi-3) ``split(chunk=0)``; grouped attention (Molmo) ``split(chunk=0, sizes=...)``; routers saved
transposed (Ernie 4.5 VL) ``merge(transpose=(0, 1))``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any

from torchlift._plan.names import Made, Rewriting
from torchlift._plan.rules import same_name
from torchlift._system.text import clipped_list
from torchlift.errors import MismatchError, PlacementError
from torchlift.formats.boxes import at_indices, joined, permuted, squeezed, unsqueezed
from torchlift.remap.names import Renaming

#: What stands in a pattern for text, and what for a number.
_FIELD = re.compile(r"\*|\{\w*\}")
#: Numbers as a list of modules has them: of others, the way back would be another name.
_NUMBER = r"(0|[1-9][0-9]{0,8})"
MOST_NAMED = 100  # missing members in an error


# ---- what can be done to tensors that nobody has read


class Unfit(ValueError):
    """Tensors that an operation cannot take."""


def _checked(item: Made) -> Made:
    """Return a tensor of plain numbers."""
    if not item.entry.can_be_sliced:
        raise PlacementError(
            "only whole tensors of plain numbers can be merged or split",
            entry=item.keys[0],
            found=item.entry.type_name,
            hint="Load it without this rule, or save what it stands for as a plain tensor.",
        )
    return item


def _dim(item: Made, dim: int, more: int = 0) -> int:
    size = len(item.entry.shape) + more
    if not -size <= dim < size:
        raise Unfit(f"{item.keys[0]!r} of shape {list(item.entry.shape)} has no dimension {dim}")
    return dim % size


def transposed(item: Made, dims: tuple[int, int]) -> Made:
    """Return a tensor with two dimensions exchanged, as `torch.transpose` does it."""
    one, two = (_dim(_checked(item), dim) for dim in dims)
    order = list(range(len(item.entry.shape)))
    order[one], order[two] = two, one
    return item if one == two else Made(permuted(item.entry, order), item.keys)


def concatenated(items: Sequence[Made], dim: int) -> Made:
    """Return tensors one behind the other in a dimension, as `torch.cat` does it."""
    dim = _dim(items[0], dim)
    _require_alike(items, dim)
    if len(items) == 1:
        return items[0]
    keys = tuple(dict.fromkeys(key for item in items for key in item.keys))
    return Made(joined([item.entry for item in items], dim), keys)


def stacked(items: Sequence[Made], dim: int) -> Made:
    """Return tensors along a dimension of their own, as `torch.stack` does it."""
    _require_alike(items, None)
    dim = _dim(items[0], dim, 1)
    return concatenated([Made(unsqueezed(e, dim), keys) for e, keys in items], dim)


def taken(item: Made, dim: int, indices: range) -> Made:
    """Return what a tensor has at some indices of one dimension."""
    return Made(at_indices(_checked(item).entry, _dim(item, dim), indices), item.keys)


def chunked(item: Made, dim: int, sizes: Sequence[int]) -> list[Made]:
    """Return slices of a tensor, one behind the other, as `torch.split` does it."""
    edges = accumulate(sizes, initial=0)
    return [taken(item, dim, range(start, stop)) for start, stop in pairwise(edges)]


def unstacked(item: Made, dim: int) -> list[Made]:
    """Return the slices of a tensor along one dimension, without it, as `torch.unbind` does it."""
    at = _dim(_checked(item), dim)
    slices = chunked(item, at, [1] * item.entry.shape[at])
    return [Made(squeezed(entry, at), keys) for entry, keys in slices]


def reshaped(item: Made, shape: Sequence[int]) -> Made:
    """Return a tensor in another shape, as `torch.reshape` does it."""
    old, fewer = item.entry.shape, min(len(item.entry.shape), len(shape)) - 1
    if fewer < 0 or 0 in old:
        raise Unfit(f"{item.keys[0]!r} of shape {list(old)} cannot have shape {list(shape)}")
    before = next((at for at in range(fewer) if old[at] != shape[at]), fewer)
    fewer -= before
    behind = next((at for at in range(fewer) if old[-1 - at] != shape[-1 - at]), fewer)
    # The dimensions that differ become one, the last two first, and this one those of the shape.
    for dim in range(len(old) - behind - 2, before - 1, -1):
        item = concatenated(unstacked(item, dim), dim)
    for dim in range(before, len(shape) - behind - 1):
        size, rows = item.entry.shape[dim], shape[dim]
        width = size // rows
        if dim == 0 or rows < width:  # boxes of dimension 0 that follow each other become one
            ranges = [range(at, at + width) for at in range(0, size, width)]
            item = stacked([taken(item, dim, row) for row in ranges], dim)
        else:
            item = stacked(
                [taken(item, dim, range(at, size, width)) for at in range(width)], dim + 1
            )
    return item


def _require_alike(items: Sequence[Made], dim: int | None) -> None:
    """Refuse tensors that differ in more than their sizes in one dimension."""
    first = _checked(items[0])
    for item in items[1:]:
        a, b = first.entry, _checked(item).entry
        if a.dtype != b.dtype:
            raise Unfit(
                f"{first.keys[0]!r} is {a.dtype} and {item.keys[0]!r} is {b.dtype}: bring them to "
                "one dtype with torchlift.convert first"
            )
        sizes = zip(a.shape, b.shape, strict=False)
        same = len(a.shape) == len(b.shape)
        if not same or any(x != y for at, (x, y) in enumerate(sizes) if at != dim):
            raise Unfit(
                f"{first.keys[0]!r} has shape {list(a.shape)} and {item.keys[0]!r} {list(b.shape)}"
            )
    ways = [(set(e.encoding) - {"deflated"}, keys[0]) for e, keys in items if e.chunks]
    for way, key in ways:
        if way != ways[0][0]:
            shown = (f"{k!r} ({', '.join(sorted(w)) or 'plain'})" for w, k in (ways[0], (way, key)))
            raise Unfit(
                f"{' and '.join(shown)} are stored differently: write the file anew with "
                "torchlift.convert first"
            )


# ---- patterns


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
    def _kinds(self) -> list[bool]:
        """Return of every field whether it is text."""
        return [field == "*" for field in _FIELD.findall(self.text)]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        first, *others = map(re.escape, _FIELD.split(self.text))
        fields = ["(.*)" if is_text else _NUMBER for is_text in self._kinds]
        rest = (field + text for field, text in zip(fields, others, strict=True))
        return re.compile(first + "".join(rest), re.DOTALL)

    def fields(self, key: str) -> tuple[tuple[str, ...], int] | None:
        """Return the texts and the number with which a key fits, or None; 0 for no number."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        pairs = list(zip(self._kinds, found.groups(), strict=True))
        number = next((int(value) for is_text, value in pairs if not is_text), 0)
        return tuple(value for is_text, value in pairs if is_text), number

    def name(self, texts: Sequence[str], number: int) -> str:
        """Return the name with these in the fields."""
        values = iter(texts)
        return _FIELD.sub(lambda f: next(values) if f[0] == "*" else str(number), self.text)


# ---- the rule


@dataclass(frozen=True, repr=False)
class _Division(Rewriting, Renaming):
    """Tensors of several names that are one of another, read in one of both directions.

    Attributes:
        members: their names.
        whole: name of the one.
        stack, cat: dimension in which members are joined, where they are.
        sizes: of the members along `cat`, in proportion; None where all are equal.
        transpose: dimensions of a member that are exchanged in the whole.
        merges: whether many become one, and not one many.
    """

    members: tuple[_Pattern, ...]
    whole: _Pattern
    stack: int | None
    cat: int | None
    sizes: tuple[int, ...] | None
    transpose: tuple[int, int] | None
    merges: bool

    def __call__(self, key: str) -> str:
        """Return the name of the one, or of the first of many."""
        if self.merges:
            place = self._place(key)
            return key if place is None else self.whole.name(place[0], 0)
        found = self.whole.fields(key)
        return key if found is None else self.members[0].name(found[0], 0)

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
        """Return the rule for the way back: of a merge the split, of a split the merge."""
        if self.merges and self.sizes is None and self.is_numbered and self.stack is None:
            raise ValueError(f"{self!r} has no way back: pass sizes=, which say how many there are")
        return replace(self, merges=not self.merges)

    @property
    def is_numbered(self) -> bool:
        """Whether one name stands for a list of members."""
        return self.members[0].numbers > 0

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        return self._merged(items, path) if self.merges else self._divided(items, path)

    def _place(self, key: str) -> tuple[tuple[str, ...], tuple[int, int]] | None:
        """Return the texts of a member's name, and which one it is: its pattern, its number."""
        for at, part in enumerate(self.members):
            found = part.fields(key)
            if found is not None:
                return found[0], (at, found[1])
        return None

    def _merged(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        places = {key: place for key in items if (place := self._place(key)) is not None}
        groups: dict[tuple[str, ...], dict[tuple[int, int], Made]] = {}
        for key, (texts, at) in places.items():
            groups.setdefault(texts, {})[at] = items[key]
        made: dict[str, Made] = {}
        for key, item in items.items():
            if key not in places:
                add(made, key, item, path)
            elif members := groups.pop(places[key][0], None):
                texts = places[key][0]
                name = self.whole.name(texts, 0)
                add(made, name, self._joined(name, texts, members), path)
        return made

    def _joined(
        self, name: str, texts: tuple[str, ...], members: Mapping[tuple[int, int], Made]
    ) -> Made:
        count = 1 + max(number for _, number in members)
        if len(members) < count * len(self.members):
            lacking = (
                part.name(texts, number)
                for number in range(count)
                for at, part in enumerate(self.members)
                if (at, number) not in members
            )
            raise missing_members(name, list(islice(lacking, MOST_NAMED)))
        try:
            if self.transpose is not None:
                members = {at: transposed(m, self.transpose) for at, m in members.items()}
            lists = [
                [members[at, number] for number in range(count)] for at in range(len(self.members))
            ]
            if self.is_numbered and self.stack is not None:
                lists = [[stacked(row, self.stack)] for row in lists]
            together = [member for row in lists for member in row]
            if self.cat is not None:
                self._require_sizes(together, self.cat)
                return concatenated(together, self.cat)
            if self.stack is not None and not self.is_numbered:
                return stacked(together, self.stack)
            return together[0]
        except Unfit as error:
            raise MismatchError(f"what is to be merged does not fit: {error}", entry=name) from None

    def _require_sizes(self, members: Sequence[Made], cat: int) -> None:
        _require_alike(members, _dim(members[0], cat))
        sizes = [member.entry.shape[_dim(member, cat)] for member in members]
        wanted = [1] * len(sizes) if self.sizes is None else list(self.sizes)
        if _least(sizes) != _least(wanted):
            raise Unfit(
                f"{clipped_list([repr(member.keys[0]) for member in members])} have "
                f"{', '.join(map(str, sizes[:5]))} in dimension {cat}, which is not what the rule "
                f"says; pass sizes={tuple(_least(sizes))}"
            )

    def _divided(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        made: dict[str, Made] = {}
        for key, item in items.items():
            found = self.whole.fields(key)
            if found is None:
                add(made, key, item, path)
                continue
            try:
                lists = self._lists(item)
            except Unfit as error:
                raise MismatchError(f"it cannot be split: {error}", entry=key) from None
            for part, members in zip(self.members, lists, strict=True):
                for number, member in enumerate(members):
                    if self.transpose is not None:
                        member = transposed(member, self.transpose)
                    add(made, part.name(found[0], number), member, path)
        return made

    def _lists(self, item: Made) -> list[list[Made]]:
        """Return the members of every pattern."""
        count = len(self.members)
        if self.cat is None:
            if self.stack is None:
                return [[item]]
            members = unstacked(item, self.stack)
            if not self.is_numbered and len(members) != count:
                raise Unfit(
                    f"dimension {self.stack} of shape {list(item.entry.shape)} is not {count}, the "
                    "number of names"
                )
            return [members] if self.is_numbered else [[member] for member in members]
        total = item.entry.shape[_dim(item, self.cat)]
        shares = (1,) * count if self.sizes is None else self.sizes
        if total % sum(shares):
            what = f"{count} equal slices" if self.sizes is None else f"slices of {self.sizes}"
            raise Unfit(
                f"dimension {self.cat} of shape {list(item.entry.shape)} does not divide into "
                f"{what}"
            )
        members = chunked(item, self.cat, [total // sum(shares) * size for size in shares])
        if self.is_numbered and self.stack is not None:
            return [unstacked(member, self.stack) for member in members]
        return [members] if self.is_numbered else [[member] for member in members]


def _least(sizes: Sequence[int]) -> list[int]:
    """Return the same proportions in the smallest whole numbers."""
    divisor = math.gcd(*sizes) or 1
    return [size // divisor for size in sizes]


def add(made: MutableMapping[str, Any], name: str, item: Made, path: str) -> None:
    """Add a tensor under a name that no other one has.

    Raises:
        MismatchError: another one has it.
    """
    if name in made:
        other = made[name]
        first = other.keys[0] if isinstance(other, Made) else name
        raise same_name(name, first, item.keys[0], path)
    made[name] = item


def missing_members(name: str, missing: Sequence[str]) -> MismatchError:
    """Return the error that names members that are not there."""
    return MismatchError(
        f"not all that it is merged of is in the checkpoint; missing: {clipped_list(missing)}",
        entry=name,
        hint="Fetch the file that has them, or drop the others with remap.rules.",
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
    """Make one tensor of several: experts of a list fused, q, k and v in one matrix.

    In a pattern ``*`` stands for any text, dots included, which the target has in the same place;
    ``{...}``, with or without a name in it, for the number of a list's member. Each tensor is
    transposed first, where that is asked for; the members of a list are then stacked, and what
    the patterns gave is concatenated in their order. Values are read from the file straight into
    their slices of the one tensor, each once, and on a mesh only those of a rank's shard. Keys
    that fit no pattern stay as they are, and so do all of them where none fits. Where some members
    are there and others are missing, that is an error, whatever ``allow_missing=`` and
    ``strict=False`` say.

    Args:
        sources: pattern of a list's members, or patterns in their order, or both.
        target: name of the one, with as many ``*``.
        stack: dimension of the target that counts members, as for ``torch.stack``.
        cat: dimension in which they follow each other, as for ``torch.cat``.
        sizes: of the patterns along ``cat``, in proportion, such as ``(4, 1, 1)`` for grouped
            attention. None: they are equal.
        transpose: two dimensions of a source that are exchanged; alone, of a tensor that stays one.

    Returns:
        A rename, which composes: ``strip("model.") | merge(...)``. Its ``reversed()`` is the
        `split` that leads back.

    Raises:
        ValueError: the patterns and dimensions do not say what is to be done.

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
    """Make several tensors of one: a fused matrix into q, k and v, fused experts into a list.

    The way back of `merge`, with the same patterns. Rows of a file stay mapped where they are; what
    lies scattered in it is put together in memory.

    Args:
        source: name of the one.
        targets: patterns in their order, with as many ``*``; one with ``{...}`` is a list.
        unstack: dimension of the source that counts members, as for ``torch.unbind``.
        chunk: dimension in which they follow each other, as for ``torch.chunk``.
        sizes: of the targets along ``chunk``, in proportion. None: they are equal.
        transpose: two dimensions of a target that are exchanged at last.

    Returns:
        A rename; its ``reversed()`` is the `merge` that leads back.

    Raises:
        ValueError: the patterns and dimensions do not say what is to be done.

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
    if not all(isinstance(name, str) for name in (*names, whole)):
        raise TypeError(f"{what}({members!r}, {whole!r}): expected patterns, which are text")
    for word, number in ((stacks, stack), (cats, cat)):
        if number is not None and type(number) is not int:
            raise TypeError(f"{what}({word}{number!r}): expected the number of a dimension")
    for word, numbers in (("sizes=", sizes), ("transpose=", transpose)):
        if numbers is not None and not all(type(number) is int for number in numbers):
            raise TypeError(f"{what}({word}{numbers!r}): expected whole numbers")
    if transpose is not None and len(transpose) != 2:
        raise ValueError(f"{what}(transpose={transpose!r}): expected two dimensions")
    patterns, one = [_Pattern(name) for name in names], _Pattern(whole)
    lists, several = any(p.numbers for p in patterns), len(patterns) > 1
    wrong = None
    if not patterns or len(set(names)) < len(names):
        wrong = "expected one pattern, or several that differ"
    elif one.numbers or any(p.stars != one.stars for p in patterns):
        wrong = f"what names have in common is *, as often in {whole!r} as in every other pattern"
    elif any(p.numbers != int(lists) for p in patterns):
        wrong = "of the numbers {...}, every pattern has one or none has"
    elif lists and several and None in (stack, cat):
        wrong = f"{stacks} is missing for the numbers, or {cats} for the patterns"
    elif not (lists and several) and None not in (stack, cat):
        wrong = f"{stacks} and {cats} together are for numbers in several patterns"
    elif (lists or several) and stack is None and cat is None:
        wrong = f"expected {stacks} or {cats}, the dimension in which they are one"
    elif sizes is not None and (cat is None or any(size < 1 for size in sizes)):
        wrong = f"sizes= are numbers above 0, and go with {cats}"
    elif sizes is not None and several and len(sizes) != len(patterns):
        wrong = f"{len(sizes)} sizes for {len(patterns)} patterns"
    elif what == "split" and lists and stack is None and sizes is None:
        wrong = "sizes= are missing, which say how many there are"
    if wrong:
        shown = f"{members!r}, {whole!r}" if what == "merge" else f"{whole!r}, {members!r}"
        raise ValueError(f"{what}({shown}): {wrong}")
    return _Division(
        tuple(patterns), one, stack, cat,
        None if sizes is None else tuple(sizes),
        None if transpose is None else (transpose[0], transpose[1]),
        merges=True,
    )  # fmt: skip

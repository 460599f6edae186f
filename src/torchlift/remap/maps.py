"""Rules that answer per tensor: by name, by pattern, by where it was saved, by the first answer.

Each is a callable of a `TensorEntry`, for ``device=`` or ``dtype=`` of `torchlift.plan` and
`torchlift.load`. None means that the rule says nothing of the tensor, and the default applies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from torchlift._model.devices import DEVICE_TAG, DISK, Device, checked_device, usable_device
from torchlift._plan.rules import check_rule, dtype_named, full_name, is_deferred
from torchlift.errors import PlacementError, did_you_mean
from torchlift.formats.index import TensorEntry
from torchlift.remap.names import compiled

V = TypeVar("V", bound=Device | torch.dtype)

# No module is nested as deep as this, and a key of a hostile file may hold a million dots.
_DEEPEST = 64


class _Map(dict[str, V]):
    """A dict that is a rule, so that libraries that take a device map take it too."""

    def check(self, names: Collection[str], *, present: bool = True) -> None:
        """Refuse devices that this machine lacks.

        A tag that the file lacks and a pattern that finds nothing are no mistakes.

        Args:
            names: the names of the tensors that the map is for.
            present: whether the devices must exist here.

        Raises:
            PlacementError: the first entry that is wrong.
        """
        for entry, value in self.items():
            if not isinstance(value, torch.dtype) and not is_deferred(value):
                usable_device(value, entry, present=present)


class ByKey(_Map[V]):
    """Dotted prefix -> device or dtype; made by `by_key` and `fit`. The longest prefix wins."""

    def __call__(self, entry: TensorEntry) -> V | None:
        """Return what the longest prefix of the tensor's name is mapped to, or None."""
        return self.at(entry.key)

    def at(self, name: str) -> V | None:
        """Return what the longest prefix of `name` is mapped to, or None."""
        return next((self[p] for p in reversed(ancestors(name)) if p in self), None)

    def check(self, names: Collection[str], *, present: bool = True) -> None:
        """Refuse prefixes that match none of `names` too."""
        known = prefixes(names)
        tops = sorted(name for name in known if name and "." not in name)[:8]
        at_the_top = f"At the top there are: {', '.join(tops)}." if tops else None
        for prefix in self:
            if prefix and prefix not in known:
                raise PlacementError(
                    "is mapped, but no tensor has that name or is below it",
                    entry=prefix,
                    expected="a dotted prefix of a name",
                    hint=_root_left_out(self, known) or did_you_mean(prefix, known) or at_the_top,
                )
        super().check(names, present=present)

    def __repr__(self) -> str:
        return f"by_key({dict.__repr__(self)})"


def _root_left_out(mapped: Iterable[str], known: Collection[str]) -> str:
    """Return the way out where all that is mapped is known, but for one beginning; or no text."""
    first, *others = sorted(mapped) or [""]
    for root in ancestors(first)[1:-1]:
        if all(p.startswith(f"{root}.") and p[len(root) + 1 :] in known for p in (first, *others)):
            return f"The map's names begin with that of a container: remap.fit(..., root={root!r})."
    return ""


class ByLocation(_Map[Device]):
    """Location tag -> device; made by `by_location`. The most specific tag wins."""

    def __call__(self, entry: TensorEntry) -> Device | None:
        """Return what the tensor's tag is mapped to, or None."""
        kind = entry.location.partition(":")[0]
        return next((self[tag] for tag in (entry.location, kind, "") if tag in self), None)

    def __repr__(self) -> str:
        return f"by_location({dict.__repr__(self)})"


class ByPattern(_Map[V]):
    """Regular expression -> device or dtype; made by `by_pattern`. The first that is found wins."""

    def __call__(self, entry: TensorEntry) -> V | None:
        """Return what the first pattern found in the tensor's name is mapped to, or None."""
        return next((value for text, value in self.items() if re.search(text, entry.key)), None)

    def __repr__(self) -> str:
        return f"by_pattern({dict.__repr__(self)})"


@dataclass(frozen=True, repr=False)
class FirstOf(Generic[V]):
    """Rules of which the first that has an answer gives it; made by `first_of`."""

    rules: tuple[Callable[[TensorEntry], V | None] | V, ...]

    def __call__(self, entry: TensorEntry) -> V | None:
        """Return the first answer, or None."""
        answers = (rule(entry) if callable(rule) else rule for rule in self.rules)
        return next((answer for answer in answers if answer is not None), None)

    def check(self, names: Collection[str], *, present: bool = True) -> None:
        """Let every rule check itself."""
        for rule in self.rules:
            check_rule(rule, names, present=present)

    def __repr__(self) -> str:
        return f"first_of({', '.join(map(repr, self.rules))})"


def by_key(mapping: Mapping[str, V]) -> ByKey[V]:
    """Say by name where tensors go, or what they become; the longest dotted prefix wins.

    Prefixes end at dots: ``model.layers.1`` is not about ``model.layers.10``. An empty prefix is
    about everything. A tensor that no prefix is about is left to the default: a live one stays, one
    on meta goes to the CPU and keeps the checkpoint's dtype.

    Args:
        mapping: prefix of the model's names, or a whole name -> a device for ``device=``
            (``"disk"`` leaves it mapped from the file, ``"meta"`` for a later load), or a
            `torch.dtype` or its name for ``dtype=``.

    Returns:
        A dict that is a rule for ``device=`` or ``dtype=``. `torchlift.plan` and `torchlift.load`
        refuse it when a prefix matches nothing or a device is not there, before anything happens.

    Raises:
        PlacementError: a value can be no device and is no dtype.

    Example:
        >>> from torchlift import remap
        >>> rule = remap.by_key({"model.layers": "cuda:0", "": "cpu"})
        >>> rule.at("model.layers.10.weight"), rule.at("model.norm.weight")
        ('cuda:0', 'cpu')
    """
    return ByKey({key: _valued(value, key) for key, value in mapping.items()})


def by_pattern(mapping: Mapping[str, V]) -> ByPattern[V]:
    """Say by regular expression where tensors go, or what they become; the first found wins.

    Patterns are searched anywhere in the model's names, in the order given, so ``""`` at the end is
    about all the rest. A tensor in whose name none is found is left to the default.

    Args:
        mapping: pattern -> a device for ``device=``, or a `torch.dtype` or its name for ``dtype=``.

    Returns:
        A rule for ``device=`` or ``dtype=``.

    Raises:
        ValueError: a pattern does not compile; the message shows it.
        PlacementError: a value can be no device and is no dtype.

    Example:
        >>> import torch
        >>> from torchlift import remap
        >>> remap.by_pattern({r"norm": torch.float32, "": torch.bfloat16})
        by_pattern({'norm': torch.float32, '': torch.bfloat16})
    """
    for text in mapping:
        compiled(text)
    return ByPattern({text: _valued(value, text) for text, value in mapping.items()})


def by_location(mapping: Mapping[str, Device]) -> ByLocation:
    """Say by where a tensor was saved where it goes; the most specific tag wins.

    ``"cuda"`` is about ``cuda:0``, ``cuda:1`` and all others that have no entry of their own, and
    ``""`` is about every tag, and about tensors that no file holds. What no entry is about is left
    to the default: a live tensor stays, one on meta goes to the CPU. The backends that wrote the
    tags need not exist here, and a tag that the file lacks is no mistake.

    Args:
        mapping: location tag as the file has it -> device. As a device, ``"cuda"`` means the
            current device of this process.

    Returns:
        A dict that is a rule for ``device=``.

    Raises:
        PlacementError: a key can be no tag, or a value no device.

    Example:
        >>> from torchlift import remap
        >>> remap.by_location({"cuda:1": "cuda:0", "cuda": "cpu"})
        by_location({'cuda:1': 'cuda:0', 'cuda': 'cpu'})
    """
    for tag in mapping:
        if tag and not DEVICE_TAG.fullmatch(tag):
            raise PlacementError(
                "is no location tag",
                entry=tag,
                expected='a tag such as "cuda:1", or "cuda" for all of that kind',
            )
    return ByLocation({tag: checked_device(device, tag) for tag, device in mapping.items()})


def first_of(*rules: Callable[[TensorEntry], V | None] | V) -> FirstOf[V]:
    """Combine rules: the first that has something to say about a tensor decides.

    Args:
        rules: rules for ``device=`` or for ``dtype=``; a plain device or dtype answers always.

    Returns:
        A rule of the same kind.

    Example:
        >>> from torchlift import remap
        >>> remap.first_of(remap.by_key({"lm_head": "cpu"}), remap.by_location({"cuda": "cuda:0"}))
        first_of(by_key({'lm_head': 'cpu'}), by_location({'cuda': 'cuda:0'}))
    """
    return FirstOf(rules)


def ancestors(name: str) -> list[str]:
    """Return the dotted prefixes of a name, from the empty one to the name itself.

    Example:
        >>> ancestors("a.b.c")
        ['', 'a', 'a.b', 'a.b.c']
    """
    segments = name.split(".", _DEEPEST)
    return ["", *(".".join(segments[:end]) for end in range(1, len(segments) + 1))]


def prefixes(names: Iterable[str]) -> set[str]:
    """Return every dotted prefix of every name, the names themselves included."""
    return {prefix for name in names for prefix in ancestors(name)}


def is_accelerator(device: str) -> bool:
    """Return whether it is neither the host nor the disk."""
    return device.partition(":")[0] not in ("cpu", DISK)


def _valued(value: Any, entry: str) -> Any:
    """Return a dtype, also of a name; or what can be a device of some machine."""
    if isinstance(value, str):
        value = dtype_named(value) or value
    if isinstance(value, str) and full_name(value):
        raise PlacementError(
            "is mapped to something that is no dtype",
            entry=entry,
            found=repr(value),
            hint=full_name(value).removeprefix(". "),
        )
    return value if isinstance(value, torch.dtype) else checked_device(value, entry)

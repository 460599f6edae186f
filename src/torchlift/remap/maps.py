"""Rules that select the device or dtype of each tensor: by name, pattern or location tag.

A rule is a callable of a `TensorEntry`. It returns a device or dtype, or None for the default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from torchlift._model.devices import DEVICE_TAG, DISK, Device, checked_device, usable_device
from torchlift._plan.rules import check_rule, dtype_named, is_deferred
from torchlift.errors import PlacementError, did_you_mean
from torchlift.formats.index import TensorEntry
from torchlift.remap.names import compile_pattern

V = TypeVar("V", bound=Device | torch.dtype)

# No module is nested this deep. A key of a hostile file may contain a million dots.
_DEEPEST = 64


class _Map(dict[str, V]):
    """A dict that is a rule. Libraries that accept a device map accept it."""

    def check(self, names: Collection[str], *, present: bool = True) -> None:
        """Refuse devices that this machine does not have.

        A tag or a pattern that matches nothing is allowed.

        Args:
            names: The names of the tensors that the map is for.
            present: Whether the devices must exist here.

        Raises:
            PlacementError: If an entry is wrong. The error names the first one.
        """
        for entry, value in self.items():
            if not isinstance(value, torch.dtype) and not is_deferred(value):
                usable_device(value, entry, present=present)


class ByKey(_Map[V]):
    """Dotted prefix -> device or dtype, made by `by_key` and `fit`. The longest prefix wins."""

    def __call__(self, entry: TensorEntry) -> V | None:
        """Return the value of the longest prefix of the tensor's name, or None."""
        return self.at(entry.key)

    def at(self, name: str) -> V | None:
        """Return the value of the longest prefix of `name`, or None."""
        return next((self[p] for p in reversed(ancestors(name)) if p in self), None)

    def check(self, names: Collection[str], *, present: bool = True) -> None:
        """Refuse prefixes that match no name, and devices that this machine does not have."""
        known = prefixes(names)
        tops = sorted(name for name in known if name and "." not in name)[:8]
        at_the_top = f"The top-level names are: {', '.join(tops)}." if tops else None
        for prefix in self:
            if prefix and prefix not in known:
                raise PlacementError(
                    "the map contains a prefix that matches no tensor",
                    entry=prefix,
                    expected="a dotted prefix of a name",
                    hint=did_you_mean(prefix, known) or at_the_top,
                )
        super().check(names, present=present)

    def __repr__(self) -> str:
        return f"by_key({dict.__repr__(self)})"


class ByLocation(_Map[Device]):
    """Location tag -> device, made by `by_location`. The most specific tag wins."""

    def __call__(self, entry: TensorEntry) -> Device | None:
        """Return the device for the tensor's tag, or None."""
        kind = entry.location.partition(":")[0]
        return next((self[tag] for tag in (entry.location, kind, "") if tag in self), None)

    def __repr__(self) -> str:
        return f"by_location({dict.__repr__(self)})"


class ByPattern(_Map[V]):
    """Regular expression -> device or dtype, made by `by_pattern`. The first match wins."""

    def __call__(self, entry: TensorEntry) -> V | None:
        """Return the value of the first pattern that matches the tensor's name, or None."""
        return next(
            (v for text, v in self.items() if compile_pattern(text).search(entry.key)), None
        )

    def __repr__(self) -> str:
        return f"by_pattern({dict.__repr__(self)})"


@dataclass(frozen=True, repr=False)
class FirstOf(Generic[V]):
    """Several rules, made by `first_of`. The first answer wins."""

    rules: tuple[Callable[[TensorEntry], V | None] | V, ...]

    def __call__(self, entry: TensorEntry) -> V | None:
        """Return the first answer, or None."""
        answers = (rule(entry) if callable(rule) else rule for rule in self.rules)
        return next((answer for answer in answers if answer is not None), None)

    def check(self, names: Collection[str], *, present: bool = True) -> None:
        """Check every rule."""
        for rule in self.rules:
            check_rule(rule, names, present=present)

    def __repr__(self) -> str:
        return f"first_of({', '.join(map(repr, self.rules))})"


def by_key(mapping: Mapping[str, V]) -> ByKey[V]:
    """Select the device or dtype of each tensor by its name.

    The longest dotted prefix wins. Prefixes end at dots: ``model.layers.1`` does not match
    ``model.layers.10``. An empty prefix matches every tensor. If no prefix matches a tensor, a live
    tensor stays where it is, and a meta tensor goes to the CPU in the checkpoint's dtype.

    Args:
        mapping: Names or prefixes of names in the model -> devices for ``device=``, or dtypes for
            ``dtype=``. ``"disk"`` leaves a tensor mapped. ``"meta"`` leaves it for later.

    Returns:
        A dict that is a rule. `torchlift.plan` and `torchlift.load` refuse it, before anything
        changes, if a prefix matches no tensor or a device does not exist here.

    Raises:
        PlacementError: If a value is neither a device nor a dtype.

    Example:
        >>> from torchlift import remap
        >>> rule = remap.by_key({"model.layers": "cuda:0", "": "cpu"})
        >>> rule.at("model.layers.10.weight"), rule.at("model.norm.weight")
        ('cuda:0', 'cpu')
    """
    return ByKey({key: _check_value(value, key) for key, value in mapping.items()})


def by_pattern(mapping: Mapping[str, V]) -> ByPattern[V]:
    """Select the device or dtype of each tensor by regular expressions.

    A pattern may match anywhere in the name. The first match wins, so ``""`` at the end matches all
    other tensors. The default applies to a tensor that no pattern matches.

    Args:
        mapping: Patterns -> devices for ``device=``, or dtypes for ``dtype=``.

    Returns:
        A rule for ``device=`` or ``dtype=``.

    Raises:
        ValueError: If a pattern does not compile.
        PlacementError: If a value is neither a device nor a dtype.

    Example:
        >>> import torch
        >>> from torchlift import remap
        >>> remap.by_pattern({r"norm": torch.float32, "": torch.bfloat16})
        by_pattern({'norm': torch.float32, '': torch.bfloat16})
    """
    for text in mapping:
        compile_pattern(text)
    return ByPattern({text: _check_value(value, text) for text, value in mapping.items()})


def by_location(mapping: Mapping[str, Device]) -> ByLocation:
    """Select the device of each tensor by its location tag: the device that it was saved from.

    The most specific tag wins. ``"cuda"`` matches every ``cuda:N`` without an entry of its own.
    ``""`` matches every tag, and tensors that are not in a file. If no entry matches, a live tensor
    stays where it is, and a meta tensor goes to the CPU. The saved devices need not exist here.

    Args:
        mapping: Location tags of the file -> devices. The device ``"cuda"`` is the current device
            of this process. A tag that the file does not contain is allowed.

    Returns:
        A dict that is a rule for ``device=``.

    Raises:
        PlacementError: If a key is not a tag, or a value is not a device.

    Example:
        >>> from torchlift import remap
        >>> remap.by_location({"cuda:1": "cuda:0", "cuda": "cpu"})
        by_location({'cuda:1': 'cuda:0', 'cuda': 'cpu'})
    """
    for tag in mapping:
        if tag and not DEVICE_TAG.fullmatch(tag):
            raise PlacementError(
                "this key is not a location tag",
                entry=tag,
                expected='a tag such as "cuda:1", or "cuda" for all of that kind',
            )
    return ByLocation({tag: checked_device(device, tag) for tag, device in mapping.items()})


def first_of(*rules: Callable[[TensorEntry], V | None] | V) -> FirstOf[V]:
    """Combine rules. The first rule that returns a value for a tensor wins.

    Args:
        rules: Rules for ``device=`` or for ``dtype=``. A plain device or dtype always answers.

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
    """Return whether a device is neither the CPU nor the disk."""
    return device.partition(":")[0] not in ("cpu", DISK)


def _check_value(value: Any, entry: str) -> Any:
    """Return the value as a dtype, or as a device that some machine can have."""
    if isinstance(value, str):
        value = dtype_named(value) or value
    if isinstance(value, torch.dtype):
        return value
    try:
        return checked_device(value, entry)
    except PlacementError as error:
        raise PlacementError(
            "the value for it is not a device, nor a dtype",
            entry=entry,
            expected="a device such as 'cuda:1', or a dtype such as 'bfloat16'",
            found=repr(value),
        ) from error

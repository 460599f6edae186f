"""Renames: what a key of the checkpoint is called in the model. Each is a callable key -> key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torchlift._plan.names import Made, Rewriting
from torchlift._plan.rules import renamed
from torchlift._plan.steps import Rename

Replacement = str | Callable[["re.Match[str]"], str] | None


class Renaming:
    """A rename that composes: ``first | then`` applies one after the other; None stays None."""

    def __call__(self, key: str) -> str | None:
        """Return the name in the model, or None for a key that is dropped."""
        raise NotImplementedError

    def __or__(self, then: Rename) -> Renaming:
        return _chain(self, then)

    def __ror__(self, first: Rename) -> Renaming:
        return _chain(first, self)

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        """Return the step of this rename that matches none of the keys, or None."""
        return None

    def reversed(self) -> Renaming:
        """Return the rename for the way back: `split` for a `merge`, `merge` for a `split`.

        Raises:
            ValueError: If it is a `strip` or has `rules`.
        """
        raise ValueError(
            f"{self!r} has no way back: only merge and split are reversible. Write the rules for "
            "the way back as remap.rules([...])"
        )


@dataclass(frozen=True, repr=False)
class _Chain(Renaming):
    steps: tuple[Rename, ...]

    def __call__(self, key: str) -> str | None:
        name: str | None = key
        for step in self.steps:
            if name is None:
                return None
            name = step.get(name, name) if isinstance(step, Mapping) else step(name)
        return name

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        for step in self.steps:
            keys = [*keys]
            if isinstance(step, Rewriting):
                return None  # its names are known when it has seen the tensors
            if isinstance(step, Renaming) and (idle := step.find_idle(keys)) is not None:
                return idle
            one = type(self)((step,))
            keys = [name for key in keys if (name := one(key)) is not None]
        return None

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.steps))

    def reversed(self) -> Renaming:
        steps = []
        for step in reversed(self.steps):
            if not isinstance(step, Renaming):
                raise ValueError(f"{step!r} has no way back: it is a function of its own")
            steps.append(step.reversed())
        return type(self)(tuple(steps))


@dataclass(frozen=True, repr=False)
class _RewritingChain(_Chain, Rewriting):
    """Renames of which some merge or split: each sees all tensors that the one before it made."""

    def check(self, plain: Mapping[str, object], path: str) -> None:
        for step in self.steps:
            if isinstance(step, Rewriting):
                step.check(plain, path)

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        made = dict(items)
        for step in self.steps:
            if isinstance(step, Rewriting):
                made = step.rewrite(made, path)
            else:
                made = {name: made[key] for key, name in renamed(made, step, path).items()}
        return made


def _chain(*steps: Rename) -> Renaming:
    rewrites = any(isinstance(step, Rewriting) for step in steps)
    return (_RewritingChain if rewrites else _Chain)(steps)


@dataclass(frozen=True, repr=False)
class _Strip(Renaming):
    prefix: str

    def __call__(self, key: str) -> str:
        return key.removeprefix(self.prefix + ".")

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        return None if any(key.startswith(self.prefix + ".") for key in keys) else self

    def __repr__(self) -> str:
        return f"strip({self.prefix + '.'!r})"


@dataclass(frozen=True, repr=False)
class _Rules(Renaming):
    pairs: tuple[tuple[re.Pattern[str], Replacement], ...]

    def __call__(self, key: str) -> str | None:
        for pattern, replacement in self.pairs:
            if replacement is not None:
                key = pattern.sub(replacement, key)
            elif pattern.search(key):
                return None
        return key

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        # Of several pairs one is enough: a table may be for more than one version of a model.
        return None if any(self(key) != key for key in keys) else self

    def __repr__(self) -> str:
        pairs = [(pattern.pattern, replacement) for pattern, replacement in self.pairs]
        return f"rules({pairs!r})"


def strip(prefix: str) -> Renaming:
    """Take a dotted prefix off the keys that have it; leave the others as they are.

    What `torch.nn.parallel.DistributedDataParallel` (``module.``) and `torch.compile`
    (``_orig_mod.``) put in front of every name. Only whole names match: ``strip("module")`` leaves
    ``modules.0`` alone. If no key has the prefix, a load or a conversion is an error.

    Args:
        prefix: the prefix; its final dot may be left out.

    Returns:
        A rename; ``strip("_orig_mod.") | strip("module.")`` takes off one, then the other.

    Raises:
        ValueError: the prefix is empty.

    Example:
        >>> from torchlift import remap
        >>> unwrap = remap.strip("module.")
        >>> unwrap("module.fc.weight"), unwrap("modules.fc.weight")
        ('fc.weight', 'modules.fc.weight')
    """
    if not prefix.removesuffix("."):
        raise ValueError(f"strip({prefix!r}): there is nothing to strip")
    return _Strip(prefix.removesuffix("."))


def rules(pairs: Iterable[tuple[str | re.Pattern[str], Replacement]]) -> Renaming:
    r"""Rename by regular expressions: each pair in turn, as `re.sub` does it.

    If the pairs change and drop no key at all, a load or a conversion is an error.

    Args:
        pairs: (pattern, replacement). A replacement may refer to groups (``r"\1"``), or be a
            function of the match. None drops every key in which the pattern is found.

    Returns:
        A rename, which composes: ``strip("module.") | rules([...])``.

    Raises:
        ValueError: a pattern does not compile, or a replacement refers to a group that its pattern
            lacks. The message names it.

    Example:
        >>> from torchlift import remap
        >>> rename = remap.rules([(r"^encoder\.layer\.(\d+)", r"blocks.\1"), (r"^pooler\.", None)])
        >>> rename("encoder.layer.11.bias"), rename("pooler.bias")
        ('blocks.11.bias', None)
    """
    return _Rules(tuple((compiled(pattern), _checked(pattern, to)) for pattern, to in pairs))


def compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return the compiled pattern.

    Raises:
        ValueError: it does not compile; the message shows it.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def _checked(pattern: str | re.Pattern[str], replacement: Replacement) -> Replacement:
    if replacement is None or callable(replacement):
        return replacement
    source = compiled(pattern)
    # One alternative more, which matches nothing at all everywhere: so the replacement is expanded
    # here and not when a key first matches. The line break ends a comment of a verbose pattern.
    probe = re.compile(source.pattern + "\n|", source.flags)
    try:
        probe.sub(replacement, "")
    except (re.error, IndexError, TypeError) as error:
        raise ValueError(
            f"the replacement {replacement!r} does not fit its pattern {source.pattern!r}: {error}"
        ) from error
    return replacement

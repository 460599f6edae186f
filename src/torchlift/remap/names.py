"""Renames: callables that return the model's name for a checkpoint key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torchlift._plan.names import Made, Rewriting
from torchlift._plan.rules import Rename, rename_keys, renamed_key

Replacement = str | Callable[["re.Match[str]"], str] | None


class Renaming:
    """A rename that composes: ``first | then`` applies both. A dropped key stays dropped."""

    @property
    def hides_names(self) -> bool:
        """Whether the names that it gives depend on the tensors."""
        return False

    def __call__(self, key: str) -> str | None:
        """Return the name in the model, or None to drop the key."""
        raise NotImplementedError

    def __or__(self, then: Rename) -> Renaming:
        return _chain(self, then)

    def __ror__(self, first: Rename) -> Renaming:
        return _chain(first, self)

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        """Return the step of this rename that matches none of the keys, or None."""
        return None

    def names_of(self, key: str) -> list[str]:
        """Return the names that a key can get: several if it is split."""
        name = self(key)
        return [] if name is None else [name]

    def reversed(self) -> Renaming:
        """Return the inverse: `split` for a `merge`, `merge` for a `split`.

        Raises:
            ValueError: If the rename contains a `strip` or `rules`.
        """
        raise ValueError(
            f"{self!r} cannot be reversed: only merge and split can. Write the inverse with "
            "these, or as remap.rules([...])"
        )


@dataclass(frozen=True, repr=False)
class _Chain(Renaming):
    steps: tuple[Rename, ...]

    def __call__(self, key: str) -> str | None:
        name: str | None = key
        for step in self.steps:
            if name is None:
                return None
            name = renamed_key(step, name)
        return name

    def find_idle(self, keys: Iterable[str]) -> Renaming | None:
        for step in self.steps:
            keys = [*keys]
            if isinstance(step, Renaming) and (idle := step.find_idle(keys)) is not None:
                return idle
            if isinstance(step, Renaming) and step.hides_names:
                return None
            keys = [name for key in keys for name in _names_of(step, key)]
        return None

    @property
    def hides_names(self) -> bool:
        return any(isinstance(step, Renaming) and step.hides_names for step in self.steps)

    def names_of(self, key: str) -> list[str]:
        names = [key]
        for step in self.steps:
            names = [name for each in names for name in _names_of(step, each)]
        return names

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.steps))

    def reversed(self) -> Renaming:
        steps = []
        for step in reversed(self.steps):
            if not isinstance(step, Renaming):
                raise ValueError(f"{step!r} cannot be reversed: it is a function that you wrote")
            steps.append(step.reversed())
        return type(self)(tuple(steps))


@dataclass(frozen=True, repr=False)
class _RewritingChain(_Chain, Rewriting):
    """A chain in which some steps merge or split. Each step gets all tensors of the step before."""

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
                made = {name: made[key] for key, name in rename_keys(made, step, path).items()}
        return made


def _names_of(step: Rename, key: str) -> list[str]:
    """Return the names that a step of a chain can give a key."""
    if isinstance(step, Renaming):
        return step.names_of(key)
    name = renamed_key(step, key)
    return [] if name is None else [name]


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
        # One matching pair is enough: a table may serve several versions of a model.
        return None if any(self(key) != key for key in keys) else self

    def __repr__(self) -> str:
        pairs = [(pattern.pattern, replacement) for pattern, replacement in self.pairs]
        return f"rules({pairs!r})"


def strip(prefix: str) -> Renaming:
    """Remove a dotted prefix from keys.

    `torch.nn.parallel.DistributedDataParallel` puts ``module.`` in front of every name, and
    `torch.compile` puts ``_orig_mod.`` there. Only complete names match: ``strip("module")`` does
    not change ``modules.0``. A load or a conversion raises an error if no key has the prefix.

    Args:
        prefix: The prefix, with or without its final dot.

    Returns:
        A rename. ``strip("_orig_mod.") | strip("module.")`` removes both prefixes.

    Raises:
        ValueError: If the prefix is empty.

    Example:
        >>> from torchlift import remap
        >>> unwrap = remap.strip("module.")
        >>> unwrap("module.fc.weight"), unwrap("modules.fc.weight")
        ('fc.weight', 'modules.fc.weight')
    """
    if not prefix.removesuffix("."):
        raise ValueError(f"strip({prefix!r}): the prefix is empty. Pass a name such as 'module.'")
    return _Strip(prefix.removesuffix("."))


def rules(pairs: Iterable[tuple[str | re.Pattern[str], Replacement]]) -> Renaming:
    r"""Rename keys by regular expressions.

    The pairs are applied in turn, as `re.sub` does. A load or a conversion raises an error if no
    pair matches any key.

    Args:
        pairs: Tuples of a pattern and its replacement. A replacement is a text, which may refer to
            groups (``r"\1"``), or a function of the match. None drops the keys that match.

    Returns:
        A rename. It composes: ``strip("module.") | rules([...])``.

    Raises:
        ValueError: If a pattern does not compile.
        ValueError: If a replacement refers to a group that its pattern does not have.

    Example:
        >>> from torchlift import remap
        >>> rename = remap.rules([(r"^encoder\.layer\.(\d+)", r"blocks.\1"), (r"^pooler\.", None)])
        >>> rename("encoder.layer.11.bias"), rename("pooler.bias")
        ('blocks.11.bias', None)
    """
    return _Rules(
        tuple((compile_pattern(pattern), _check_replacement(pattern, to)) for pattern, to in pairs)
    )


@cache
def compile_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Compile a pattern. Python itself keeps only 512, and compiles more of them for each name.

    Raises:
        ValueError: If it does not compile.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


def _check_replacement(pattern: str | re.Pattern[str], replacement: Replacement) -> Replacement:
    if replacement is None or callable(replacement):
        return replacement
    source = compile_pattern(pattern)
    try:
        source.sub(replacement, "")  # re parses the replacement before it looks for a match
    except (re.error, IndexError, TypeError) as error:
        raise ValueError(
            f"{source.pattern!r} cannot have the replacement {replacement!r}: {error}"
        ) from error
    return replacement

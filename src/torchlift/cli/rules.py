"""Options for names and dtypes that several commands share."""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchlift.cli import UsageError

if TYPE_CHECKING:
    from torchlift.remap import ByPattern

Rename = Callable[[str], str | None]


def add_names(parser: argparse.ArgumentParser) -> None:
    """Declare the options for names."""
    names = parser.add_argument_group("names, applied in this order")
    for option, metavar, text in (
        ("--strip", "PREFIX", "remove a prefix of keys, such as module."),
        ("--rename", "REGEX=REPLACEMENT", r"replace in keys, such as '^net\.=model.'"),
        ("--drop", "REGEX", r"drop keys that match, such as '^loss\.'"),
    ):
        names.add_argument(
            option, metavar=metavar, action="append", default=[], help=f"{text}; may be repeated"
        )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Declare the option for dtypes."""
    parser.add_argument(
        "--dtype",
        metavar="[REGEX=]DTYPE",
        action="append",
        default=[],
        help="cast to this dtype, or only keys that match: 'mlp=bfloat16'",
    )


def check_names(args: argparse.Namespace) -> None:
    """Refuse wrong options for names, before torch is imported."""
    for text in args.rename:
        if "=" not in text:
            raise UsageError(f"--rename {text!r}: expected REGEX=REPLACEMENT")


def rename_of(args: argparse.Namespace) -> Rename | None:
    """Make the rule for names from the options."""
    from torchlift.remap import rules, strip

    steps: list[Rename] = [strip(prefix) for prefix in args.strip]
    pairs: list[tuple[str, str | None]] = []
    for text in args.rename:
        pattern, _, replacement = text.rpartition("=")
        pairs.append((pattern, replacement))
    pairs += [(pattern, None) for pattern in args.drop]
    steps += [rules([pair]) for pair in pairs]  # one rule each: each must match a key
    return functools.reduce(operator.or_, steps) if steps else None


def dtype_of(args: argparse.Namespace) -> ByPattern[Any] | None:
    """Make the rule for dtypes from the options."""
    from torchlift.remap import by_pattern

    named = [text.rpartition("=")[::2] for text in args.dtype]
    named.sort(key=lambda pair: not pair[0])  # the general one is last
    return by_pattern(dict(named)) if named else None

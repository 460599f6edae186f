"""Options for names and dtypes that several commands share."""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchlift.cli import UsageError
from torchlift.errors import CheckpointError

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
        help="cast to this dtype, such as bf16, or only keys that match: 'mlp=bfloat16'",
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
    """Make the rule for dtypes from the options.

    Raises:
        UsageError: If a value is not a dtype of floats.
    """
    from torchlift.remap import by_pattern

    pairs = (text.rpartition("=")[::2] for text in args.dtype)
    named = sorted(pairs, key=lambda pair: not pair[0])  # the general one is last
    for _, name in named:
        if not getattr(_parse_rule("--dtype", name), "is_floating_point", False):
            raise UsageError(f"--dtype {name!r}: expected a dtype of floats, such as bf16")
    return by_pattern(dict(named)) if named else None


def check_device(option: str, name: str) -> None:
    """Refuse the value of an option that is not a device of any machine.

    Raises:
        UsageError: If it is not one.
    """
    if hasattr(_parse_rule(option, name), "is_floating_point"):
        raise UsageError(f"{option} {name!r}: expected a device, such as cuda:1, cpu or disk")


def _parse_rule(option: str, name: str) -> object:
    """Return a dtype, or the text of a device.

    Raises:
        UsageError: If the text is neither.
    """
    from torchlift.remap import by_key

    try:
        return by_key({"": name})[""]
    except CheckpointError as error:
        raise UsageError(f"{option} {name!r}: expected {error.expected}") from error

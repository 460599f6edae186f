"""``torchlift diff``: what two checkpoints do not have in common."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

import torchlift
from torchlift.cli.output import report


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit status: 0 when they are equal, 1 when they differ, 2 for trouble, and where all is "
        "equal but for what could not be compared."
    )
    parser.set_defaults(trouble=2)
    parser.add_argument("a", metavar="A", help="a checkpoint file or directory")
    parser.add_argument("b", metavar="B", help="what to compare it with, in any format")
    parser.add_argument("--root", metavar="KEY", help="only this container of both")
    parser.add_argument("--root-a", metavar="KEY", help="only this container of A")
    parser.add_argument("--root-b", metavar="KEY", help="only this container of B")
    parser.add_argument(
        "--rtol", type=_tolerance, default=0.0, metavar="R", help="relative tolerance"
    )
    parser.add_argument(
        "--atol", type=_tolerance, default=0.0, metavar="R", help="absolute tolerance"
    )


def run(args: argparse.Namespace) -> int:
    """Print the differences; 1 when there are any."""
    with (
        torchlift.open(args.a, root=args.root_a or args.root) as a,
        torchlift.open(args.b, root=args.root_b or args.root) as b,
    ):
        found = torchlift.diff(a, b, rtol=args.rtol, atol=args.atol)
    report(args, str(found), {**asdict(found), "equal": found.equal})
    return 1 if not found.equal else 2 if found.blocked else 0


def _tolerance(text: str) -> float:
    """Return a number that is no less than 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value

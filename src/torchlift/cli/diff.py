"""``torchlift diff``: show the differences of two checkpoints."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torchlift
from torchlift.cli.output import report
from torchlift.errors import Hint


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit status: 0 if they are equal, 1 if they differ, 2 after an error, or if some values\n"
        "could not be compared and all others are equal."
    )
    parser.set_defaults(trouble=2)
    parser.add_argument("a", metavar="A", help="a checkpoint file or directory")
    parser.add_argument("b", metavar="B", help="the checkpoint to compare with, in any format")
    parser.add_argument("--root", metavar="KEY", help="compare only this container of both")
    parser.add_argument("--root-a", metavar="KEY", help="compare only this container of A")
    parser.add_argument("--root-b", metavar="KEY", help="compare only this container of B")
    parser.add_argument("--rtol", type=float, default=0.0, metavar="R", help="relative tolerance")
    parser.add_argument("--atol", type=float, default=0.0, metavar="R", help="absolute tolerance")


def run(args: argparse.Namespace) -> int:
    """Print the differences. Return 1 if there are any."""
    with (
        _open(args.a, args.root_a, args.root) as a,
        _open(args.b, args.root_b, args.root) as b,
    ):
        found = torchlift.diff(a, b, rtol=args.rtol, atol=args.atol)
    report(args, str(found), {**asdict(found), "equal": found.equal})
    return 1 if not found.equal else 2 if found.blocked else 0


def _open(path: str, own: str | None, both: str | None) -> torchlift.Checkpoint:
    """Open one of the two. An error about ``--root`` names the options for one of them."""
    try:
        return torchlift.open(path, root=own or both)
    except torchlift.FormatError as error:
        if both and not own and error.entry == both:
            way = f"If only one of the two has it, pass --root-a {both} or --root-b {both}."
            error.hint = Hint(error.hint or "", " ", way)
        raise

"""``torchlift inspect``: what a checkpoint holds, found without torch and without running it."""

from __future__ import annotations

import argparse
import sys

from torchlift._system import printable
from torchlift.cli.output import print_json
from torchlift.formats import read_index
from torchlift.formats.summary import to_json, to_text


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = "The file is read, never executed: it is safe to look at one nobody trusts."
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--rows", type=_count, default=20, metavar="N", help="tensors to list (default: 20)"
    )
    parser.add_argument("--all", action="store_true", help="list all tensors")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the summary."""
    index = read_index(args.path)
    if args.json:
        print_json(to_json(index))
    else:
        rows = sys.maxsize if args.all else args.rows
        print(printable(to_text(index, rows=rows), lines=True))
    return 0

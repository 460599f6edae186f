"""``torchlift inspect``: what a checkpoint holds, found without torch and without running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torchlift
from torchlift._system.memory import collection_paused
from torchlift._system.text import printable, progress_bar
from torchlift.cli.output import print_json
from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.flattening import select
from torchlift.formats.index import Index, matching
from torchlift.formats.summary import SORTS, sorted_by, to_json, to_text

_STATS = ("min", "max", "mean", "std", "nan", "inf")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "No code of the file runs. It is safe to inspect a file that nobody trusts.\n"
        "Exit status: 0 for success, 1 for a bad or missing file, 2 for wrong usage, 3 if the\n"
        "file would run code. Such a file is refused, or its objects are listed as blocked."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument("--root", metavar="KEY", help="show only this container of the file")
    parser.add_argument(
        "--filter",
        metavar="GLOB",
        action="append",
        help="show only keys that match, such as '*.bias'; may be repeated",
    )
    parser.add_argument("--sort", choices=list(SORTS), default="file", help="default: file")
    parser.add_argument(
        "--depth",
        type=_count,
        metavar="N",
        help="show one line for each module N levels deep, with the size of its tensors",
    )
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="show each tensor in its own line, instead of one line for tensors of alike layers",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="read the values and show min, max, mean, std, NaN and Inf of every tensor",
    )
    parser.add_argument(
        "--rows", type=_count, metavar="N", help="maximum number of lines of each list"
    )
    parser.add_argument("--all", action="store_true", help="show all lines of every list")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text!r}")
    return int(text)


@collection_paused()  # the collector would walk 100,000 entries repeatedly
def run(args: argparse.Namespace) -> int:
    """Print the summary. Return 3 if the file would run code."""
    index = whole = read_index(args.path)
    if args.root is not None:
        index = select(index, args.root)
    if args.filter:
        index = matching(index, args.filter)
    if args.sort != "file":
        index = sorted_by(index, args.sort)
    stats = _stats(index) if args.stats else {}
    rows = sys.maxsize if args.all else args.rows
    if args.json:
        found = to_json(index)
        for tensor in found["tensors"] if args.stats else ():
            known = stats[tensor["key"]]
            tensor["stats"] = {"error": known} if isinstance(known, str) else known
        print_json(found)
    elif args.tensors or args.stats:
        cells = {key: _cells(known) for key, known in stats.items()}
        extra = ((*_STATS, "values"), cells) if args.stats else ((), {})
        print(to_text(index, rows=rows, each=True, extra=extra))
    else:
        print(to_text(index, rows=rows, depth=args.depth))
    if args.filter and not (index.entries or index.objects or index.blocked_keys):
        patterns = " or ".join(map(repr, args.filter))
        _note(
            f"no key matches {patterns}. A pattern must match the complete key, such as '*layers*'"
        )
    elsewhere = [name for name in whole.blocked if name not in index.blocked]
    if elsewhere:
        _note(f"blocked elsewhere in the file: {', '.join(elsewhere[:5])}")
    return 3 if whole.names_code else 0


def _note(text: str) -> None:
    print(f"torchlift: {printable(text)}", file=sys.stderr)


def _stats(index: Index) -> Mapping[str, dict[str, Any] | str]:
    """Return the statistics of every tensor, or the reason why they are not known."""
    found: dict[str, dict[str, Any] | str] = {}
    total = sum(entry.nbytes for entry in index.entries.values())
    with (
        torchlift.Checkpoint(index) as ckpt,
        progress_bar(sys.stderr.isatty(), total, "stats") as advance,
    ):
        for key, entry in index.entries.items():
            try:
                found[key] = asdict(ckpt.stats(key))
            except FormatError as error:  # a quantisation that no installed package can decode
                found[key] = error.reason
            advance(entry.nbytes)
    return found


def _cells(known: dict[str, Any] | str) -> list[str]:
    if isinstance(known, str):
        return [*[""] * len(_STATS), known]
    counts = [f"{known[name]:,}" for name in _STATS[4:]]
    floats = [known[name] for name in _STATS[:4]]
    return [*("" if number is None else f"{number:.4g}" for number in floats), *counts, ""]

"""``torchlift bench``: the ways to load a file, compared on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from torchlift._system import parse_size, printable
from torchlift.bench import WAYS, Comparison, Result, compare
from torchlift.cli import UsageError
from torchlift.cli.output import print_json
from torchlift.measure import in_child


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    names = "\n".join(f"  {way.name:<18} {way.summary}" for way in WAYS)
    parser.epilog = f"Each run is a fresh process; imports are not timed. The ways:\n{names}"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("path", metavar="FILE", nargs="?", help="a checkpoint file or directory")
    what.add_argument(
        "--generate", type=size, metavar="SIZE", help="make a temporary one, such as 2GiB"
    )
    parser.add_argument(
        "--format", choices=["torch-zip", "safetensors"], help="of the generated one"
    )
    parser.add_argument("--root", metavar="KEY", help="load only this container of the file")
    parser.add_argument("--only", metavar="A,B", help="the ways to compare (default: all)")
    parser.add_argument("--baseline", metavar="A", help="the way to compare with (default: first)")
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="rounds (default: 5); medians are shown"
    )
    parser.add_argument(
        "--cold", action="store_true", help="drop the file from the page cache before each run"
    )
    parser.add_argument("--json", action="store_true", help="print every round as JSON")


def size(text: str) -> int:
    """A number of bytes from text such as ``2GiB``, ``500 MB`` or ``4096``.

    Raises:
        argparse.ArgumentTypeError: not such a text.

    Example:
        >>> from torchlift.cli.bench import size
        >>> size("2GiB"), size("1.5 kB")
        (2147483648, 1500)
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 when a way failed or loaded other values."""
    if args.generate is None:
        if args.format:
            raise UsageError("--format needs --generate: a file has the format it has")
        return _report(args, args.path)
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-") as folder:
        path = os.path.join(folder, "generated.ckpt")
        code = "make_checkpoint(args[0], nbytes=args[1], format=args[2])"
        setup = "from torchlift.bench import make_checkpoint"
        in_child(code, path, args.generate, args.format or "torch-zip", setup=setup)
        return _report(args, path)


def _report(args: argparse.Namespace, path: str) -> int:
    try:
        comparison = compare(
            path,
            root=args.root,
            only=args.only.split(",") if args.only else None,
            baseline=args.baseline,
            repeat=args.repeat,
            cold=args.cold,
            on_run=_progress if sys.stderr.isatty() else None,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(comparison.to_dict())
    else:
        print(printable(str(comparison), lines=True))
    return _status(comparison)


def _status(comparison: Comparison) -> int:
    failed = any(result.error for result in comparison.results.values())
    return 1 if failed or comparison.different else 0


def _progress(result: Result, turn: int) -> None:
    said = result.error or f"{result.seconds[-1]:.4f} s"
    print(f"round {turn + 1}: {result.way.summary}: {printable(said)}", file=sys.stderr)

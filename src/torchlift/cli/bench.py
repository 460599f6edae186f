"""``torchlift bench``: compare the ways to load a file on this machine."""

from __future__ import annotations

import argparse
import sys

from torchlift.bench import WAYS, compare
from torchlift.cli.output import report


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    names = "\n".join(f"  {way.name:<18} {way.summary}" for way in WAYS)
    parser.epilog = (
        f"Each run is a new process. The time of imports does not count. The ways:\n{names}"
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument("--root", metavar="KEY", help="load only this container of the file")
    parser.add_argument("--only", metavar="A,B", help="the ways to compare (default: all)")
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="rounds (default: 5), for medians"
    )
    parser.add_argument(
        "--cold", action="store_true", help="drop the file from the page cache before each run"
    )
    parser.add_argument(
        "--cast",
        choices=["bfloat16", "float16", "float32"],
        nargs="?",
        const="bfloat16",
        default="",
        help="cast floating-point tensors to this dtype (default: bfloat16)",
    )
    parser.add_argument(
        "--device", metavar="DEV", default="cpu", help="device to load to, such as cuda"
    )


def run(args: argparse.Namespace) -> int:
    """Compare and print. Return 1 if a way failed or loaded other values."""
    found = compare(
        args.path,
        root=args.root,
        only=args.only.split(",") if args.only else None,
        repeat=args.repeat,
        cold=args.cold,
        cast=args.cast,
        device=args.device,
        progress=sys.stderr.isatty(),
    )
    report(args, str(found), found.to_dict())
    failed = any(result.error for result in found.results.values()) or bool(found.different)
    return 1 if failed else 0

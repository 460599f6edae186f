"""``torchlift bench``: compare the ways to load a file on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Literal

from torchlift._system.text import parse_size, printable
from torchlift.bench import WAYS, Comparison, Result, compare
from torchlift.cli import UsageError
from torchlift.cli.output import report
from torchlift.measure import ChildError, in_child


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    names = "\n".join(f"  {way.name:<18} {way.summary}" for way in WAYS)
    parser.epilog = (
        f"Each run is a new process. The time of imports does not count. The ways:\n{names}"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("path", metavar="FILE", nargs="?", help="a checkpoint file or directory")
    what.add_argument(
        "--generate", metavar="SIZE", help="make a temporary checkpoint, such as 2GiB"
    )
    parser.add_argument(
        "--format", choices=["torch-zip", "safetensors"], help="format of the generated checkpoint"
    )
    parser.add_argument("--root", metavar="KEY", help="load only this container of the file")
    parser.add_argument("--only", metavar="A,B", help="the ways to compare (default: all)")
    parser.add_argument("--baseline", metavar="A", help="the way to compare with (default: first)")
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
    for moved in "--grow", "--peers", "--plot":
        parser.add_argument(moved, nargs="?", action=_Moved, help=argparse.SUPPRESS)


class _Moved(argparse.Action):
    """An option of an older version."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        args: object,
        value: object,
        option: str | None = None,
    ) -> None:
        raise UsageError(
            f"{option} is not an option of this command. Run `python tools/bench.py --help` in a "
            "copy of torchlift's repository: it has growth, other libraries, limits and charts"
        )


def run(args: argparse.Namespace) -> int:
    """Compare and print. Return 1 if a way failed or loaded other values."""
    if args.format and args.generate is None:
        raise UsageError("--format: pass --generate too")
    try:
        if args.generate is None:
            found = _compare(args, args.path)
        else:
            with tempfile.TemporaryDirectory(prefix="torchlift-bench-") as folder:
                suffix = ".safetensors" if args.format == "safetensors" else ".pt"
                path = os.path.join(folder, f"generated{suffix}")
                _generate(path, parse_size(args.generate), args.format or "torch-zip")
                found = _compare(args, path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    report(args, str(found), found.to_dict())
    failed = any(result.error for result in found.results.values()) or bool(found.different)
    return 1 if failed else 0


def _print_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _generate(path: str, nbytes: int, format: Literal["torch-zip", "safetensors"]) -> None:
    """Make a checkpoint in another process, so that this one need not import torch."""
    try:
        in_child(_make, path, nbytes, format)
    except ChildError as error:
        raise UsageError(f"--generate: {str(error).splitlines()[-1]}") from error


def _make(path: str, nbytes: int, format: Literal["torch-zip", "safetensors"]) -> None:
    from torchlift.bench import make_checkpoint

    make_checkpoint(path, nbytes=nbytes, format=format)


def _compare(args: argparse.Namespace, path: str) -> Comparison:
    return compare(
        path,
        root=args.root,
        only=args.only.split(",") if args.only else None,
        baseline=args.baseline,
        repeat=args.repeat,
        cold=args.cold,
        cast=args.cast,
        device=args.device,
        on_run=_progress,
    )


def _progress(result: Result, turn: int) -> None:
    outcome = result.error or f"{result.seconds[-1]:.4f} s"
    _print_progress(f"round {turn + 1}: {result.way.summary}: {printable(outcome)}")

"""``torchlift convert``: a checkpoint into another format, dtype, layout or naming."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torchlift
from torchlift.cli import UsageError
from torchlift.cli.output import report
from torchlift.cli.rules import add_dtype, add_names, check_names, dtype_of, rename_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "The suffix of DST says the format: .safetensors; .pt, .pth, .bin or .ckpt for a torch\n"
        "file; .index.json for shards. --format dcp writes a folder. DST appears when it is\n"
        "whole: after an error or a crash there is what was there before. Called again, it starts\n"
        "anew; of shards, those that were finished stay.\n"
        "Exit status: 0 when it is converted, also where the format does not keep everything,\n"
        "which is listed; 1 when a file is bad, holds nothing to write, or DST is there already;\n"
        "2 for wrong usage; 3 when a value could only be had by running code: leave it out with\n"
        "--exclude. Safetensors hold tensors only: a value without any is listed as not kept."
    )
    parser.add_argument("src", metavar="SRC", help="a checkpoint file, directory or URL")
    parser.add_argument("dst", metavar="DST", help="the file, folder or URL to write")
    parser.add_argument("--format", metavar="FORMAT", help="torch-zip, safetensors, sharded or dcp")
    parser.add_argument("--root", metavar="KEY", help="only this container of the file")
    parser.add_argument(
        "--include", metavar="GLOB", action="append", help="only keys that fit; may be repeated"
    )
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="not keys that fit"
    )
    add_names(parser)
    add_dtype(parser)
    parser.add_argument("--max-shard-size", metavar="SIZE", help="such as 5GB")
    parser.add_argument("--no-checksum", action="store_true", help="record no checksums")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the checksums of SRC"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    check_names(args)
    try:
        made = torchlift.convert(
            args.src,
            args.dst,
            format=args.format,
            root=args.root,
            rename=rename_of(args),
            dtype=dtype_of(args),
            max_shard_size=args.max_shard_size,
            overwrite=args.overwrite,
            progress=sys.stderr.isatty() and not args.dry_run,
            include=args.include or ("*",),
            exclude=args.exclude,
            checksum=not args.no_checksum,
            verify=not args.no_verify,
            dry_run=args.dry_run,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    text = f"{'would write ' * args.dry_run}{made}"
    report(args, text, {**asdict(made), "dry_run": args.dry_run})
    return 0

"""``torchlift convert``: write a checkpoint in another format, dtype, layout or naming."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace

import torchlift
from torchlift.cli.output import report, spelled
from torchlift.cli.rules import add_dtype, add_names, check_names, dtype_of, rename_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "A training's checkpoint (Lightning, or a dict with 'model' and 'optimizer') for somebody\n"
        "who needs the weights only:\n"
        "  torchlift convert last.ckpt model.safetensors --root state_dict --strip model. \\\n"
        "    --dtype bfloat16\n"
        "The suffix of DST selects the format: .safetensors; .pt, .pth, .bin or .ckpt for a torch\n"
        "file; .index.json for shards. --format dcp writes a folder. DST appears when it is\n"
        "complete. If the command fails or is killed, an old DST is unchanged.\n"
        "Exit status: 0 if it converted the checkpoint. Values that the format cannot hold are\n"
        "listed as not kept: safetensors hold tensors only. 1 if a file is damaged, if there is\n"
        "nothing to write, or if DST exists. 2 for wrong usage. 3 if a value needs code of the\n"
        "file to run: leave it out with --exclude."
    )
    parser.add_argument(
        "src",
        metavar="SRC",
        nargs="+",
        help="a checkpoint file, directory or URL; of several, a later one wins",
    )
    parser.add_argument("dst", metavar="DST", help="the file, folder or URL to write")
    parser.add_argument("--format", metavar="FORMAT", help="torch-zip, safetensors, sharded or dcp")
    parser.add_argument(
        "--root",
        metavar="KEY",
        help="convert only this container, such as model or state_dict, without its name",
    )
    parser.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        help="convert only keys that match; may be repeated",
    )
    parser.add_argument(
        "--exclude",
        metavar="GLOB",
        action="append",
        default=[],
        help="skip keys that match; may be repeated",
    )
    add_names(parser)
    add_dtype(parser)
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="write files of at most this size, such as 5GB"
    )
    parser.add_argument(
        "--check",
        metavar="finite",
        choices=["finite"],
        help="refuse NaN and infinite values after the cast; the only check is: finite",
    )
    parser.add_argument("--no-checksum", action="store_true", help="do not record checksums")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the checksums of SRC"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be written")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    check_names(args)
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
        check=args.check,
    )
    made = replace(made, hint=spelled(made.hint, args.parser._option_string_actions))
    text = f"{'would write ' * args.dry_run}{made}"
    report(args, text, {**asdict(made), "dry_run": args.dry_run})
    return 0

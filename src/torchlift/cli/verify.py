"""``torchlift verify``: recompute every checksum of a checkpoint, without torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from torchlift._system.text import progress_bar
from torchlift.cli.output import report
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index
from torchlift.formats.integrity import checksums, verify_index


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit status: 0 if the file is intact, 1 if a checksum is wrong or the file is damaged, 3\n"
        "if the file would run code or leave its directory.\n"
        "Most safetensors files do not contain checksums: only their structure is checked. The\n"
        "cache of the Hugging Face Hub records a checksum of each large file."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")


def run(args: argparse.Namespace) -> int:
    """Print the result. Return 1 if a checksum is wrong."""
    index = resolved(read_index(args.path))
    known = checksums(index)
    total = sum(each.place.nbytes for each in known)
    with progress_bar(sys.stderr.isatty(), total, "verify") as advance:
        found = verify_index(index, advance, known)
    report(args, str(found), {**asdict(found), "ok": found.ok})
    return int(not found.ok)

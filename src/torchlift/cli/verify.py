"""``torchlift verify``: recompute every checksum of a checkpoint, without torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from torchlift._system.text import progress_bar
from torchlift.cli.output import report
from torchlift.formats.integrity import checksums, parse_sha256, read_places, verify_index


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit status: 0 if the structure is right and every known checksum matches. 1 if one\n"
        "does not match, or the file is damaged or missing. 2 for wrong usage. 3 if the file\n"
        "would run code or leave its directory.\n"
        "Status 0 does not mean that bytes without a checksum are intact. They are listed as not\n"
        "checked: a changed value there is not found. Most safetensors files and all GGUF files\n"
        "lack checksums. Compare such a file with a number that its author has published:\n"
        "  torchlift verify model.safetensors --sha256 9f86d08...\n"
        "The cache of the Hugging Face Hub records a checksum of each large file."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument(
        "--sha256", metavar="HEX", help="compare the SHA-256 of the complete file with this number"
    )


def run(args: argparse.Namespace) -> int:
    """Print the result. Return 1 if a checksum is wrong."""
    published = None if args.sha256 is None else parse_sha256(args.sha256)
    index = read_places(args.path)
    known = checksums(index, published)
    total = sum(each.place.nbytes for each in known)
    with progress_bar(sys.stderr.isatty(), total, "verify") as advance:
        found = verify_index(index, advance, known)
    report(args, str(found), {**asdict(found), "ok": found.ok})
    return int(not found.ok)

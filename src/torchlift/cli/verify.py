"""``torchlift verify``: every checksum of a checkpoint computed again, without torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from torchlift._system.text import progress_bar
from torchlift.cli.output import report
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index
from torchlift.formats.integrity import checksums, hub_checksums, verify_index


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "Exit status: 0 when nothing is wrong, 1 when a checksum is or the file is damaged, 3\n"
        "when it would run code as a whole, or leads out of its directory.\n"
        "Files without checksums (most safetensors) are checked for structure only, and say so;\n"
        "those of the Hugging Face Hub, in its cache or behind hf://, have one of the whole."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")


def run(args: argparse.Namespace) -> int:
    """Print what was checked; 1 when a checksum is wrong."""
    index = resolved(read_index(args.path))
    known = checksums(index)
    total = sum(item.nbytes for some in known for item in some.values())
    stamps = {**index.guides, **index.files}
    total += sum(stamps[file].size for file in hub_checksums(index))
    with progress_bar(sys.stderr.isatty(), total, "verify") as advance:
        found = verify_index(index, advance, known)
    report(args, str(found), {**asdict(found), "ok": found.ok})
    return int(not found.ok)

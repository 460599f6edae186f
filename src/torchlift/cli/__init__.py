"""The ``torchlift`` command; each subcommand is a module with ``configure`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import torchlift
from torchlift._system import printable
from torchlift.errors import CheckpointError, UnsafeError

#: name -> (what it does, module). The module is imported only when its command is the one to run,
#: so that `inspect` neither pays for nor runs anything that belongs to another command.
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": ("say what is in a checkpoint, without loading it", "torchlift.cli.inspect"),
    "verify": ("recompute every checksum of a checkpoint", "torchlift.cli.verify"),
    "diff": ("compare two checkpoints, of any formats", "torchlift.cli.diff"),
    "plan": ("say what goes where, and what it takes", "torchlift.cli.plan"),
    "convert": ("write a checkpoint in another format, dtype or naming", "torchlift.cli.convert"),
    "bench": ("compare the ways to load a checkpoint, on this machine", "torchlift.cli.bench"),
}


class UsageError(Exception):
    """Arguments that parse but make no sense together; reported like a parser error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes them from ``sys.argv``.

    Returns:
        the exit status: 0 for success, 1 for a file that is bad or missing, 2 for wrong usage, 3
        for a file that would have run code or left its directory, 130 when interrupted, 141 when
        the reader of a pipe went away.

    Example:
        >>> from torchlift.cli import main
        >>> main(["inspect", "/nowhere/model.pt"])
        1
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    try:
        args, unknown = parser.parse_known_args(words)
        if unknown:  # `parse_args` would show how to call torchlift, and not its command
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:
        return int(stop.code or 0)
    # A key that the terminal's encoding lacks must not turn into a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        status = importlib.import_module(COMMANDS[args.command][1]).run(args)
        sys.stdout.flush()
        return int(status)
    except UsageError as error:
        print(f"{args.parser.prog}: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python flushes stdout once more as it exits; without this that prints a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, OSError) as error:
        print(f"torchlift: {printable(_describe(error))}", file=sys.stderr)
        if args.json:
            _print_error(error)
        return args.trouble or (3 if isinstance(error, UnsafeError) else 1)
    except KeyboardInterrupt:
        return 130


def _print_error(error: Exception) -> None:
    import json

    known = {"type": type(error).__name__, "message": _describe(error)}
    if isinstance(error, CheckpointError):
        known |= vars(error)
    print(json.dumps({"error": known}, indent=2, default=str))


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchlift", description="Look at, compare, convert and measure PyTorch checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"torchlift {torchlift.__version__}")
    # With `prog`, since argparse otherwise formats a usage to find it, which imports for 2 ms.
    commands = parser.add_subparsers(
        prog=parser.prog, dest="command", metavar="COMMAND", required=True
    )
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(parser=command, trouble=None)
        if name in words:
            importlib.import_module(module).configure(command)
    return parser

"""The ``torchlift`` command. Each subcommand is a module with ``configure`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torchlift
from torchlift._system.text import printable
from torchlift.cli.output import print_json, spelled
from torchlift.errors import CheckpointError, UnsafeError

#: Name -> summary. Only the module of the command that runs is imported, so `inspect` starts fast
#: and runs no code of other commands.
COMMANDS: dict[str, str] = {
    "inspect": "show the content of a checkpoint without loading it",
    "verify": "recompute every checksum of a checkpoint",
    "diff": "compare two checkpoints, of any formats",
    "plan": "show what a load would do, and the memory it needs",
    "convert": "write a checkpoint in another format, dtype or naming",
    "bench": "compare the ways to load a checkpoint on this machine",
    "completion": "print a script that completes these commands in a shell",
}


class UsageError(ValueError):
    """The arguments are wrong.

    Attributes:
        usage: How to call the command, if the arguments could not be parsed.
    """

    usage = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error, so that it is reported like every other one, also as JSON."""
        error = UsageError(message)
        error.usage = self.format_usage()
        raise error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name. Default: from ``sys.argv``.

    Returns:
        The exit status: 0 for success, 1 for a bad or missing file, 2 for wrong usage, 3 for a file
        that would run code or leave its directory, 130 after Ctrl-C, and 141 if the reader of the
        pipe has ended.

    Example:
        >>> from torchlift.cli import main
        >>> main(["inspect", "/nowhere/model.pt"])
        1
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # The terminal's encoding may lack a character of a key. That must not raise.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = argparse.Namespace(trouble=None, json="--json" in words)
    try:
        parser = make_parser(words)
        _, unknown = parser.parse_known_args(words, args)
        if unknown:  # `parse_args` would show how to call torchlift, and not its command
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        with warnings.catch_warnings():
            # torch warns about some kinds of tensors, such as sparse ones. A reader cannot act on
            # that. The filter changes only this process, which is the command's own.
            warnings.simplefilter("ignore", UserWarning)
            status = importlib.import_module(f"{__name__}.{args.command}").run(args)
        sys.stdout.flush()
        return int(status)
    except SystemExit as stop:  # --help, --version
        return int(stop.code or 0)
    except ValueError as error:  # an argument of a command, or of a function that it calls
        command = " ".join(["torchlift", *(word for word in words[:1] if word in COMMANDS)])
        usage = getattr(error, "usage", "")
        start = f"{usage}{command}: error" if usage else command
        print(f"{start}: {printable(str(error))}", file=sys.stderr)
        if args.json:
            _print_error(error)
        return 2
    except BrokenPipeError:
        # Python flushes stdout again when it exits. Without this, that prints a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, OSError) as error:
        is_ours = isinstance(error, CheckpointError)
        if isinstance(error, CheckpointError):
            error.hint = spelled(error.hint, args.parser._option_string_actions)
        # Our errors escape every name, and may have several lines.
        print(f"torchlift: {printable(_describe(error), lines=is_ours)}", file=sys.stderr)
        if args.json:
            _print_error(error)
        return args.trouble or (3 if isinstance(error, UnsafeError) else 1)
    except KeyboardInterrupt:
        return 130


def _print_error(error: Exception) -> None:
    known = {"type": type(error).__name__, "message": _describe(error)}
    if isinstance(error, CheckpointError):
        known |= vars(error)
    elif isinstance(error, OSError) and error.filename is not None:
        known["file"] = os.fsdecode(error.filename)
    print_json({"error": known})


def _describe(error: Exception) -> str:
    is_ours = isinstance(error, CheckpointError)
    if isinstance(error, OSError) and not is_ours and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser. Only commands among the words get their options."""
    parser = _Parser(
        prog="torchlift", description="Look at, compare, convert and measure PyTorch checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"torchlift {torchlift.__version__}")
    # With `prog`: else argparse formats a usage to find it, which takes 2 ms.
    commands = parser.add_subparsers(
        prog=parser.prog, dest="command", metavar="COMMAND", required=True
    )
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(parser=command, trouble=None)
        if name in words:
            importlib.import_module(f"{__name__}.{name}").configure(command)
            command.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser

"""The ``torchlift`` command; each subcommand is a module with ``configure`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torchlift
from torchlift._system.text import printable
from torchlift.cli.output import spelled
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
    "completion": ("print what completes these commands in a shell", "torchlift.cli.completion"),
}


class UsageError(Exception):
    """Arguments that make no sense.

    Attributes:
        usage: how to call the command, where they could not even be parsed.
    """

    usage = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report it where every other error is reported, as JSON too."""
        error = UsageError(message)
        error.usage = self.format_usage()
        raise error


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
    # A key that the terminal's encoding lacks must not turn into a traceback.
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
            # What torch thinks of a kind of tensor, such as a sparse one, is nothing that a reader
            # asked for. The process is the command's own.
            warnings.simplefilter("ignore", UserWarning)
            status = importlib.import_module(COMMANDS[args.command][1]).run(args)
        sys.stdout.flush()
        return int(status)
    except SystemExit as stop:  # --help, --version
        return int(stop.code or 0)
    except UsageError as error:
        command = " ".join(["torchlift", *(word for word in words[:1] if word in COMMANDS)])
        start = f"{error.usage}{command}: error" if error.usage else command
        print(f"{start}: {printable(str(error))}", file=sys.stderr)
        if args.json:
            _print_error(error)
        return 2
    except BrokenPipeError:
        # Python flushes stdout once more as it exits; without this that prints a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, OSError) as error:
        is_ours = isinstance(error, CheckpointError)
        if isinstance(error, CheckpointError):
            error.hint = spelled(error.hint, args.parser._option_string_actions)
        # Our errors escape every name, and list names on lines of their own.
        print(f"torchlift: {printable(_describe(error), lines=is_ours)}", file=sys.stderr)
        if args.json:
            _print_error(error)
        return args.trouble or (3 if isinstance(error, UnsafeError) else 1)
    except KeyboardInterrupt:
        return 130


def add_model(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Declare the options that name a model."""
    parser.add_argument("--model", metavar="MODULE:FACTORY", help=purpose)
    parser.add_argument(
        "--model-args",
        metavar="JSON",
        help="the factory's arguments by name, such as '{\"width\": 4}', or a file with them",
    )


def check_model(args: argparse.Namespace) -> None:
    """Check the options that name a model, and read its arguments.

    Raises:
        UsageError: they mean nothing.
    """
    if args.model is not None and ":" not in args.model:
        raise UsageError(f"--model {args.model!r}: expected MODULE:FACTORY")
    if args.model_args is not None and args.model is None:
        raise UsageError("--model-args: needs --model, whose arguments they are")
    args.model_args = json_object("--model-args", args.model_args or "{}")


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return a JSON object that is given as text or as the name of a file."""
    if not text.lstrip().startswith("{"):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{option}: expected a JSON object")
    return found


def _print_error(error: Exception) -> None:
    known = {"type": type(error).__name__, "message": _describe(error)}
    if isinstance(error, CheckpointError):
        known |= vars(error)
    elif isinstance(error, OSError) and error.filename is not None:
        known["file"] = os.fsdecode(error.filename)
    print(json.dumps({"error": known}, indent=2, default=str))


def _describe(error: Exception) -> str:
    is_ours = isinstance(error, CheckpointError)
    if isinstance(error, OSError) and not is_ours and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; of commands that are not among the words, it knows the names only."""
    parser = _Parser(
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
            command.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser

"""``torchlift completion``: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from torchlift.cli import COMMANDS, UsageError, make_parser
from torchlift.cli.output import print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "shtab makes the script (pip install shtab).\n"
        'eval "$(torchlift completion bash)"   in ~/.bashrc, and so for zsh in ~/.zshrc\n'
        "torchlift completion fish | source    in ~/.config/fish/config.fish"
    )
    parser.add_argument("shell", metavar="SHELL", choices=["bash", "zsh", "fish"])


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError("shtab is not installed. Run pip install shtab") from error
    parser = make_parser([*COMMANDS])
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    assert isinstance(commands, dict)
    for command in commands.values():
        for action in command._actions:
            if not action.option_strings and not action.choices:
                action.complete = shtab.FILE
    script = shtab.complete(parser, args.shell)
    if args.json:
        print_json({"script": script})
    else:
        print(script, end="")
    return 0

"""``torchlift completion``: a script that lets a shell complete the commands and their options."""

from __future__ import annotations

import argparse

from torchlift.cli import COMMANDS, make_parser

_BASH = """\
_torchlift() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}} $previous" in
{choices}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{options}
  esac
  case $current in
    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
    *) COMPREPLY=($(compgen -f -- "$current")) ;;
  esac
}}
complete -o filenames -F _torchlift torchlift
"""
# zsh takes bash's functions.
_ZSH = "autoload -U compinit bashcompinit\ncompinit\nbashcompinit\n" + _BASH


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        'eval "$(torchlift completion bash)"   in ~/.bashrc, and so for zsh in ~/.zshrc\n'
        "torchlift completion fish | source    in ~/.config/fish/config.fish"
    )
    parser.add_argument("shell", metavar="SHELL", choices=["bash", "zsh", "fish"])


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(_fish() if args.shell == "fish" else _bash(args.shell), end="")
    return 0


def _options() -> dict[str, list[argparse.Action]]:
    """Return command -> its options, as its own parser declares them."""
    (commands,) = (a for a in make_parser([*COMMANDS])._actions if a.dest == "command")
    assert isinstance(commands.choices, dict)
    return {
        name: [action for action in command._actions if action.help != argparse.SUPPRESS]
        for name, command in commands.choices.items()
    }


def _bash(shell: str) -> str:
    options, choices = [], []
    for name, actions in _options().items():
        flags = [flag for action in actions for flag in action.option_strings]
        options.append(f'    {name}) words="{" ".join(flags)}" ;;')
        for action in actions:
            if action.choices:
                before = "|".join(f'"{name} {flag}"' for flag in action.option_strings or [name])
                choices.append(f'    {before}) words="{" ".join(map(str, action.choices))}" ;;')
    return (_ZSH if shell == "zsh" else _BASH).format(
        commands=" ".join(COMMANDS), options="\n".join(options), choices="\n".join(choices)
    )


def _fish() -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"complete -c torchlift -n __fish_use_subcommand -f -a {name} -d {quoted(what)}"
        for name, (what, _) in COMMANDS.items()
    ]
    for name, actions in _options().items():
        start = f"complete -c torchlift -n '__fish_seen_subcommand_from {name}'"
        for action in actions:
            flags = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
                for flag in action.option_strings
            )
            if action.choices:
                flags += f" -x -a {quoted(' '.join(map(str, action.choices)))}"
            elif flags and action.nargs != 0:
                flags += " -r"
            if flags:
                lines.append(f"{start}{flags} -d {quoted((action.help or '').split(';')[0])}")
    return "\n".join(lines) + "\n"

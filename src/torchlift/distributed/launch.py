"""Start ranks on this machine with torch's own launcher, and leave none of them behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

# Seconds for the launcher to end its ranks: it needs a fraction of one, unless they refuse.
_PATIENCE = 10.0


def launch_command(count: int, *worker: str) -> list[str]:
    """The command that starts a script, or ``-m module``, on ranks of this machine.

    Example:
        >>> from torchlift.distributed.launch import launch_command
        >>> launch_command(2, "train.py")[1:]
        ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2', 'train.py']
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, f"--nproc-per-node={count}", *worker]


def run_and_end(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run a launcher, and end it and its ranks after `timeout` seconds; returns what it said.

    The ranks inherit a pipe as stdin, into which nothing is ever written. It is closed when this
    process is gone, in whatever way: a rank that reads from it then knows that it should leave.

    Raises:
        subprocess.TimeoutExpired: it had to be ended.
    """
    reading, writing = os.pipe()
    with (
        open(reading, "rb") as theirs,
        open(writing, "wb") as ours,
        subprocess.Popen(
            command,
            env=environment,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # An interrupt of a terminal or a notebook is for the caller, which then ends the rest.
            start_new_session=True,
        ) as launcher,
    ):
        try:
            return launcher.communicate(timeout=timeout)[0]
        finally:
            _end(launcher, ours)


def _end(launcher: subprocess.Popen[str], lifeline: IO[bytes]) -> None:
    """Do nothing if the launcher has ended."""
    # To kill its process group would not do: it starts each rank in a session of its own.
    launcher.terminate()
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(_PATIENCE)
    lifeline.close()
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(_PATIENCE)
    launcher.kill()

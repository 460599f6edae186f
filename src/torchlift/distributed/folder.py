"""The folder of a run: which checkpoints are there and complete, which is the last and the best.

It is read and swept by one process alone; nothing here waits for another.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import Literal, NamedTuple

from torchlift._checkpoint import open as open_checkpoint
from torchlift._transfer import remove_debris
from torchlift.errors import CheckpointError
from torchlift.formats import DCP_METADATA

#: What a checkpoint is called: its step, and its generation from the second one on.
_NAME = re.compile(r"step-([0-9]{9,})(?:-([0-9]+))?(\.pt)?")
#: What a process that was killed leaves of one: its temporary file.
_BEGUN = re.compile(r"\.(step-[\d-]+\.pt)\.torchlift-\w{8}\.part")


class Kept(NamedTuple):
    """A complete checkpoint.

    Attributes:
        generation: how many times the run has gone back to an earlier step before.
        step, path: its own.
    """

    generation: int
    step: int
    path: str


class RunFolder:
    """Finds the checkpoints of a run in its folder, names the next one and removes old ones.

    Args:
        directory: where; absolute.
        keep, every, best, best_is: see `Keeper`.
    """

    def __init__(
        self,
        directory: str,
        keep: int | None,
        every: int | None,
        best: str | None,
        best_is: Literal["lowest", "highest"],
    ) -> None:
        self.directory = directory
        self._keep, self._every, self._best, self._best_is = keep, every, best, best_is
        self._metrics: dict[str, tuple[object, float | None]] = {}  # path -> stamp, that of best=

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None."""
        return self._best_of(self.kept())[0]

    def kept(self) -> list[Kept]:
        """Return the complete checkpoints in the order of saving, of each step the last one.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        found: dict[int, Kept] = {}
        try:
            names = os.listdir(self.directory)
        except OSError as error:  # somebody has removed it, or its file system is not there
            raise CheckpointError(
                "the folder of the checkpoints cannot be read",
                file=self.directory,
                found=str(error),
            ) from error
        for name in names:
            match, path = _NAME.fullmatch(name), os.path.join(self.directory, name)
            # Which DCP renames to its name when all ranks have written their files.
            complete = match and (match[3] or os.path.exists(os.path.join(path, DCP_METADATA)))
            if match and complete:
                kept = Kept(int(match[2] or 0), int(match[1]), path)
                found[kept.step] = max(kept, found.get(kept.step, kept))
        return sorted(found.values())

    def _best_of(self, kept: list[Kept]) -> tuple[str | None, set[str]]:
        """Return the path of the best, and the paths of those whose metric cannot be read."""
        values: dict[str, float] = {}
        unknown: set[str] = set()
        for one in kept if self._best is not None else ():
            try:
                value = self._metric_of(one.path)
            except (CheckpointError, OSError):
                unknown.add(one.path)
                continue
            if value is not None and value == value:  # a loss that is NaN is never the best
                values[one.path] = value if self._best_is == "lowest" else -value
        return min(reversed(values), key=values.__getitem__, default=None), unknown

    def _metric_of(self, path: str) -> float | None:
        """Return the metric of a checkpoint; None where it has none that is a number.

        Raises:
            CheckpointError: the file cannot be read.
            OSError: it is gone.
        """
        facts = os.stat(path if os.path.isfile(path) else os.path.join(path, DCP_METADATA))
        stamp = facts.st_ino, facts.st_size, facts.st_mtime_ns
        known, value = self._metrics.get(path, (None, None))
        if known != stamp:  # each is opened once, not all of them at each save
            with open_checkpoint(path) as ckpt:
                found = ckpt.objects.get(f"metrics.{self._best}")
            value = float(found) if isinstance(found, (int, float)) else None
            self._metrics[path] = stamp, value
        return value

    def new_path(self, step: int, base: int | None, is_file: bool) -> tuple[str, int]:
        """Return what to call a step's checkpoint, and the last step that may have led to it."""
        kept = self.kept()
        before = step - 1 if base is None else min(step - 1, base)
        generation = 0
        if kept:
            last = kept[-1]
            is_replaced = step == last.step and is_file and last.path.endswith(".pt")
            # A run that went back; or a folder, which stays until the new one is complete.
            generation = last.generation + (last.step > before and not is_replaced)
        name = f"step-{step:09d}" + (f"-{generation}" if generation else "")
        path = os.path.join(self.directory, name)
        if os.path.lexists(path) and path not in [one.path for one in kept]:
            _remove(path)  # what a save that was killed left must not become a part of this one
        return name + (".pt" if is_file else ""), before

    def sweep(self, newest: str, before: int) -> list[str]:
        """Remove what is no longer to be kept, and what saves that were interrupted left.

        Returns:
            What could not be removed, and why.
        """
        kept = self.kept()
        # Backwards, without the steps that a run did which went back behind them.
        branch = [newest]
        for one in reversed(kept):
            if one.step <= before and one.path != newest:
                branch.append(one.path)
                before = one.step - 1
        last = [one.path for one in kept] if self._keep is None else branch[: self._keep]
        stays: set[str | None] = {*last}
        stays |= {one.path for one in kept if self._every and one.step % self._every == 0}
        best, unknown = self._best_of(kept)
        stays |= {newest, best} | unknown  # one that cannot be read today may be the best
        left = []
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if begun := _BEGUN.fullmatch(name):
                remove_debris(os.path.join(self.directory, begun[1]))
            if not _NAME.fullmatch(name) or path in stays:
                continue
            try:
                _remove(path)
            except OSError as error:
                left.append(str(error))
        return left


def _remove(path: str) -> None:
    """Remove a checkpoint; of a link, which somebody made, the link alone.

    Raises:
        OSError: it is still there.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    # First the marker: what a crash leaves of it here is no complete checkpoint.
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(path, DCP_METADATA))
    shutil.rmtree(path)

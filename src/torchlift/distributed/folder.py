"""The folder of a run: which checkpoints are complete, which are kept, and which are removed.

Any process may read it. Only the first rank of the keeper removes checkpoints. Nothing here waits
for another rank. The policies have orbax's names.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._store.places import Stamp, inside, is_url, name_of, parent, place_of, stamp_now
from torchlift._store.uploads import list_names, remove
from torchlift._system.text import clipped_list
from torchlift._transfer.write import is_there, make_durable, remove_debris
from torchlift.errors import CheckpointError, TimedOut
from torchlift.formats.table import DCP_METADATA

T = TypeVar("T")

#: The name of a checkpoint: its step, and its generation if that is not the first one.
_NAME = re.compile(r"step-([0-9]{9,})(?:-([0-9]+))?(\.pt)?")
#: The temporary file of a checkpoint, which a killed process leaves.
_UNFINISHED = re.compile(r"\.(step-[\d-]+\.pt)\.torchlift-\w{8}\.part")
#: The name of an expired checkpoint until it is deleted.
_REMOVED = re.compile(r"\.step-[\d-]+(?:\.pt)?\.removed-\w{8}")


@dataclass(order=True, unsafe_hash=True)
class Kept:
    """A complete checkpoint.

    Attributes:
        generation: How many times the run had gone back to an earlier step.
        step: The number of steps that led to it.
        path: Its file, folder or URL.
        abandoned: Whether the run has since gone back to an earlier step. The keeper sets it for
            its policies. After a restart, it follows from the steps and generations that are left.
    """

    generation: int
    step: int
    path: str
    abandoned: bool = field(default=False, compare=False)

    @cached_property
    def metrics(self) -> Mapping[str, float] | None:
        """Return its metrics that are numbers, by name, or None if they cannot be read."""
        is_file = self.path.endswith(".pt")
        try:
            stamp = stamp_now(self.path if is_file else inside(self.path, DCP_METADATA))
            return _read_metrics(self.path, stamp)
        except (CheckpointError, OSError):
            return None


@lru_cache(1 << 14)  # each checkpoint is opened once, and not at every save
def _read_metrics(path: str, _: Stamp) -> Mapping[str, float]:
    with open_checkpoint(path) as ckpt:
        return {
            key.removeprefix("metrics."): float(value)
            for key, value in ckpt.objects.items()
            if key.startswith("metrics.") and isinstance(value, (int, float))
        }


#: A function of the complete checkpoints, in the order of saving. It returns those to keep.
Policy = Callable[[Sequence[Kept]], Iterable[Kept]]


def _require_number(name: str, number: object) -> None:
    """Refuse a value that is not a number from 1 on.

    Raises:
        ValueError: If it is not.
    """
    if type(number) is not int or number < 1:
        raise ValueError(f"{name}={number!r}: expected a number from 1 on")


@dataclass(frozen=True)
class LatestN:
    """Keep the last `n` checkpoints that led to the current step, or all with None.

    Example:
        >>> from torchlift.distributed import Kept, LatestN
        >>> LatestN(2)([Kept(0, step, f"step-{step}") for step in (1, 2, 3)])[0].step
        2
    """

    n: int | None

    def __post_init__(self) -> None:
        if self.n is not None:
            _require_number("n", self.n)

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay."""
        return kept if self.n is None else [one for one in kept if not one.abandoned][-self.n :]


@dataclass(frozen=True)
class BestN:
    """Keep the `n` checkpoints with the best metric, and those whose metrics cannot be read.

    A checkpoint without that metric, or with NaN, is never the best. Of two equal ones, the later
    one is better.

    Example:
        >>> from torchlift.distributed import BestN
        >>> BestN(2, "accuracy", best_is="highest")
        BestN(n=2, metric='accuracy', best_is='highest')
    """

    n: int
    metric: str
    best_is: Literal["lowest", "highest"] = "lowest"

    def __post_init__(self) -> None:
        _require_number("n", self.n)
        if self.best_is not in ("lowest", "highest"):
            raise ValueError(f"best_is={self.best_is!r}: expected one of lowest, highest")

    def ranked(self, kept: Sequence[Kept]) -> list[Kept]:
        """Return the checkpoints that have the metric, the best first."""
        found = [
            (value if self.best_is == "lowest" else -value, one)
            for one in reversed(kept)
            if (value := (one.metrics or {}).get(self.metric, float("nan"))) == value
        ]
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay. One that cannot be read now may be the best."""
        return self.ranked(kept)[: self.n] + [one for one in kept if one.metrics is None]


@dataclass(frozen=True)
class EveryNSteps:
    """Keep each checkpoint whose step is a multiple of `n`.

    Example:
        >>> from torchlift.distributed import EveryNSteps, Kept
        >>> [one.step for one in EveryNSteps(2)([Kept(0, step, "") for step in (1, 2, 3, 4)])]
        [2, 4]
    """

    n: int

    def __post_init__(self) -> None:
        _require_number("n", self.n)

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay."""
        return [one for one in kept if one.step % self.n == 0]


class RunFolder:
    """Read the folder of a `torchlift.Keeper` from another process, such as an evaluation.

    The keeper may remove a checkpoint at any time, and to open it is a `CheckpointError` then. So
    let the keeper keep the checkpoints that you evaluate. This object names complete checkpoints
    only. It writes nothing, removes nothing, and needs no process group.

    Args:
        directory: The keeper's folder or URL.
        best: The name of the metric for `best`.
        best_is: Whether the ``"lowest"`` or the ``"highest"`` metric is the best.
        storage_options: Options of a URL. See :ref:`arg-storage-options`.

    Raises:
        ValueError: If an argument has a wrong value.

    Example:
        >>> import tempfile, torch, torchlift
        >>> folder = tempfile.mkdtemp()
        >>> with torchlift.Keeper(folder) as keeper:
        ...     keeper.save(1, model=torch.nn.Linear(2, 1))
        True
        >>> run = torchlift.distributed.RunFolder(folder)
        >>> run.steps(), run.wait_for_new() == run.latest()
        ([1], True)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = place_of(directory, storage_options)
        self._best = BestN(1, best, best_is) if best is not None else None

    def kept(self) -> list[Kept]:
        """Return the complete checkpoints in the order of saving, and of each step the last one.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        return _last_of_each_step(self._complete())

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in the order of saving.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        return [one.step for one in self.kept()]

    def latest(self) -> str | None:
        """Return the path of the last complete checkpoint, or None.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        kept = self.kept()
        return kept[-1].path if kept else None

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None.

        A warning lists those that cannot be read.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        if self._best is None:
            return None
        kept = self.kept()
        found = self._best.ranked(kept)
        exists = _is_there if is_url(self.directory) else os.path.exists
        unread = [one.path for one in kept if one.metrics is None and exists(one.path)]
        if unread:
            warnings.warn(
                f"metrics cannot be read, so another may be the best: {clipped_list(unread)}",
                RuntimeWarning,
                stacklevel=2,
            )
        return found[0].path if found else None

    def wait_for_new(self, after: str | None = None, *, timeout: float | None = None) -> str:
        """Wait for a newer checkpoint, and return the path of the last one.

        Args:
            after: The path of the last checkpoint that you know. Default: wait for any checkpoint.
                The folder need not exist yet.
            timeout: Seconds. Default: no limit.

        Raises:
            CheckpointError: If there is none in time. It is a TimeoutError, too.
            ValueError: If `after` is not the path of a checkpoint.
        """
        match = _NAME.fullmatch(name_of(after)) if after is not None else None
        if after is not None and match is None:
            raise ValueError(f"after={after!r}: expected a path that latest() returned")
        known = (int(match[2] or 0), int(match[1])) if match else (-1, -1)
        end, pause = monotonic() + (float("inf") if timeout is None else timeout), 0.05
        while True:
            is_there = is_url(self.directory) or os.path.isdir(self.directory)
            kept = self.kept() if is_there else []
            if kept and (kept[-1].generation, kept[-1].step) > known:
                return kept[-1].path
            left = end - monotonic()
            if left <= 0:
                raise TimedOut(
                    f"has no new checkpoint after {timeout:g} s",
                    file=self.directory,
                    expected=f"one after {name_of(after)}" if after else "any",
                    found=kept[-1].path if kept else None,
                )
            sleep(min(pause, left))
            pause = min(2 * pause, 1.0)

    def _complete(self) -> list[Kept]:
        """Return all complete checkpoints."""
        matches = filter(None, map(_NAME.fullmatch, self._names()))
        return [
            Kept(int(match[2] or 0), int(match[1]), self._path(match[0]))
            for match in matches
            if self._is_complete(match)
        ]

    def _path(self, name: str) -> str:
        return inside(self.directory, name)

    def _is_complete(self, match: re.Match[str]) -> bool:
        """Return whether a checkpoint of that name is complete. A folder gets its marker last."""
        marker = inside(self._path(match[0]), DCP_METADATA)
        return bool(match[3]) or self._use(_is_there, marker)

    def _names(self) -> list[str]:
        return self._use(list_names if is_url(self.directory) else os.listdir, self.directory)

    def _use(self, read: Callable[[str], T], path: str) -> T:
        """Return the result of a function that reads the folder.

        Raises:
            CheckpointError: If the folder was removed, or its file system is not mounted.
        """
        try:
            return read(path)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                "the folder of the checkpoints cannot be used",
                file=self.directory,
                found=str(error),
            ) from error


def policies_of(
    keep: int | Policy | Sequence[Policy] | None,
    every: int | None,
    best: str | None,
    best_is: Literal["lowest", "highest"],
) -> list[Policy]:
    """Return the policies for the arguments of a keeper.

    Raises:
        ValueError: If an argument has a wrong value.
    """
    found: list[Policy] = [BestN(1, best, best_is)] if best is not None else []
    if every is not None:
        _require_number("every", every)
        found.append(EveryNSteps(every))
    if isinstance(keep, int):
        _require_number("keep", keep)
    if keep is None or isinstance(keep, int):
        keep = LatestN(keep)
    if callable(keep):
        keep = [keep]
    if not isinstance(keep, (list, tuple)) or not all(map(callable, keep)):
        raise ValueError(f"keep={keep!r}: expected a number, None, or one or several policies")
    return [*found, *keep]


class KeptFolder(RunFolder):
    """The folder as its keeper uses it: it names checkpoints, and removes those that expire.

    A run that has not resumed does not remove the checkpoints of later steps. They are those of
    another run.

    Args:
        directory: Its absolute path, or a URL.
        policies: A checkpoint is kept if any of them keeps it.

    Attributes:
        metrics: The names of the metrics that each checkpoint must have.
        base: The step that was last resumed or saved, or None.
    """

    base: int | None = None

    def __init__(self, directory: str, policies: Sequence[Policy]) -> None:
        super().__init__(directory)  # a URL has its options with it
        best = [each for each in policies if isinstance(each, BestN)]
        self.policies, self.metrics = policies, [each.metric for each in best]
        self._best = best[0] if best else None
        self._is_adopted = self._is_warned = False
        # Paths of another run's later steps, and of steps that this run has gone back from.
        self._foreign: set[str] = set()
        self._abandoned: set[str] = set()

    def adopt(self) -> list[Kept]:
        """Return all complete checkpoints, which are the run's own from now on."""
        self._is_adopted, self._foreign = True, set()
        return self.kept()

    def new_path(self, step: int, *, is_file: bool) -> str:
        """Return the name of the next checkpoint, and remove a killed save of that name.

        Args:
            step: The step.
            is_file: Whether the checkpoint is a file and not a folder.
        """
        kept = self.kept()
        if not self._is_adopted:  # a save that fails may have a wrong step
            self._foreign |= {one.path for one in self._complete() if one.step > step}
        # The last step that may have led to this one, for `sweep`.
        self._before = step - 1 if self.base is None else min(step - 1, self.base)
        generation = 0
        if kept:
            last = kept[-1]
            is_replaced = step == last.step and is_file and last.path.endswith(".pt")
            # The run went back, or the old folder stays until the new one is complete.
            generation = last.generation + (last.step > self._before and not is_replaced)
        name = f"step-{step:09d}" + (f"-{generation}" if generation else "")
        path = self._path(name)
        if self._use(_is_there, path) and path not in [one.path for one in kept]:
            # Files of a killed save must not become a part of this one.
            for problem in _remove(self.directory, [path]):
                raise CheckpointError("cannot be removed", file=path, found=problem)
        return f"{name}.pt" if is_file else name

    def sweep(self, newest: str) -> list[str]:
        """Remove the checkpoints that no policy keeps, and the files of interrupted saves.

        Args:
            newest: The path of the checkpoint that was saved last.

        Returns:
            Problems, as sentences.
        """
        self._is_adopted = True
        self._foreign.discard(newest)
        problems, complete = list[str](), {one.path: one for one in self._complete()}
        own = {path: one for path, one in complete.items() if path not in self._foreign}
        kept = _last_of_each_step(own.values())
        # Walk back from the newest. A later step than the one before it was abandoned.
        self._abandoned.discard(newest)
        before = self._before
        for one in reversed(kept):
            if one.path != newest and one.path not in self._abandoned:
                if one.step > before:
                    self._abandoned.add(one.path)
                before = min(before, one.step - 1)
        for one in kept:
            one.abandoned = one.path in self._abandoned
        try:
            stays = {newest, *(one.path for policy in self.policies for one in policy(kept))}
        except Exception as error:  # the caller's function failed, after a complete save
            problems.append(f"keep= failed, so nothing is removed: {type(error).__name__}: {error}")
            stays = {*own}
        expired = list[str]()
        for name in self._names():
            path, temporary = self._path(name), _UNFINISHED.fullmatch(name)
            if temporary and not is_url(path):
                remove_debris(self._path(temporary[1]))
            is_ours = _NAME.fullmatch(name) and path not in self._foreign
            # Complete, or of a killed save. Or a removal was killed, or failed.
            if (is_ours and path not in stays) or _REMOVED.fullmatch(name):
                expired.append(path)
        if self._foreign and not self._is_warned:
            self._is_warned = True
            names = clipped_list(sorted(map(name_of, self._foreign)))
            problems.append(
                f"checkpoints of later steps are kept, because this run has not resumed: {names}. "
                "Call resume() first, or give each run a folder of its own."
            )
        failed = _remove(self.directory, expired)
        if failed:
            text = "older checkpoints cannot be removed, and the next save tries again: "
            problems.append(text + clipped_list(dict.fromkeys(failed)))
        return problems


def _last_of_each_step(kept: Iterable[Kept]) -> list[Kept]:
    return sorted({one.step: one for one in sorted(kept)}.values())


def _is_there(path: str) -> bool:
    return name_of(path) in list_names(parent(path)) if is_url(path) else is_there(path)


def _remove(directory: str, paths: Sequence[str]) -> list[str]:
    """Remove checkpoints. Return a sentence for each that cannot be removed.

    Each one first loses its name, so that it is not complete any more while it is deleted. A link
    is removed, not its target. An object store cannot rename, so the object that makes a checkpoint
    complete is removed first.
    """
    failed, left = list[str](), list[str]()
    for path in paths:
        folder, name = os.path.split(path)
        try:
            if is_url(path) and name.endswith(".pt"):
                remove(path)
            elif is_url(path):
                for each in sorted(list_names(path), key=lambda each: each != DCP_METADATA):
                    remove(inside(path, each))
            elif _REMOVED.fullmatch(name):  # by a save that was killed
                left.append(path)
            else:
                new = os.path.join(folder, f".{name}.removed-{secrets.token_hex(4)}")
                os.rename(path, new)
                left.append(new)
        except (CheckpointError, OSError) as error:
            failed.append(str(error))
    try:
        if left:
            make_durable(directory)  # a crash of the machine must not undo the renames
    except OSError as error:
        return [*failed, f"{directory}: {error}"]
    for path in left:
        try:
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
            else:
                shutil.rmtree(path)
        except OSError as error:
            if os.path.lexists(path):  # else another process has removed it
                failed.append(str(error))
    return failed

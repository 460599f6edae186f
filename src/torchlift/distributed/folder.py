"""The folder of a run: which checkpoints are complete, which are kept, and what becomes of others.

It is looked into from any process, and swept by the keeper's first; nothing here waits for another
rank. The policies are called what orbax calls them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

from torchlift._checkpoint import open as open_checkpoint
from torchlift._store import (
    FileStamp,
    UrlStamp,
    inside,
    is_url,
    listed,
    name_of,
    parent,
    place_of,
    remove,
    stamp_now,
    upload,
)
from torchlift._system.text import clipped_list
from torchlift._transfer import AtomicFile, is_there, make_durable, remove_debris
from torchlift.errors import CheckpointError
from torchlift.formats import DCP_METADATA

T = TypeVar("T")

#: What a checkpoint is called: its step, and its generation from the second one on.
_NAME = re.compile(r"step-([0-9]{9,})(?:-([0-9]+))?(\.pt)?")
#: What a process that was killed leaves of one: its temporary file.
_BEGUN = re.compile(r"\.(step-[\d-]+\.pt)\.torchlift-\w{8}\.part")
#: What a checkpoint is called when it is none any more, until it is gone.
_REMOVED = re.compile(r"\.step-[\d-]+(?:\.pt)?\.removed-\w{8}")


@dataclass(order=True, unsafe_hash=True)
class Kept:
    """A complete checkpoint.

    Attributes:
        generation: how many times the run has gone back to an earlier step before.
        step: the number of steps that it is the result of.
        path: where it is.
        abandoned: whether the run has gone back behind it since; known to the keeper's policies,
            after a restart as far as the steps and generations of what is kept tell.
    """

    generation: int
    step: int
    path: str
    abandoned: bool = field(default=False, compare=False)
    _known: dict[str, tuple[object, dict[str, float]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def _stamp(self) -> FileStamp | UrlStamp:
        is_file = self.path.endswith(".pt")
        return stamp_now(self.path if is_file else inside(self.path, DCP_METADATA))

    @property
    def time(self) -> float:
        """Return when it was complete, in seconds since 1970 by the clock of its file system."""
        return self._stamp.time

    @cached_property
    def metrics(self) -> Mapping[str, float] | None:
        """Return its metrics that are numbers, by name, or None where they cannot be read."""
        try:
            stamp = self._stamp
            known, values = self._known.get(self.path, (None, {}))
            if known != stamp:  # each is opened once, not all of them at each save
                with open_checkpoint(self.path) as ckpt:
                    values = {
                        key.removeprefix("metrics."): float(value)
                        for key, value in ckpt.objects.items()
                        if key.startswith("metrics.") and isinstance(value, (int, float))
                    }
                self._known[self.path] = stamp, values
        except (CheckpointError, OSError):
            return None
        return values


#: Which of the checkpoints that are kept, in the order of saving, stay.
Policy = Callable[[Sequence[Kept]], Iterable[Kept]]


def _require_number(number: object, *kinds: type) -> None:
    """Refuse what is no number of that kind from 1 on.

    Raises:
        ValueError: it is none.
    """
    if type(number) not in kinds or number < 1:  # type: ignore[operator]
        raise ValueError(f"n={number!r}: expected a number from 1 on")


@dataclass(frozen=True)
class LatestN:
    """Keeps the last `n` checkpoints that led to where the run is; None keeps all there are.

    Example:
        >>> from torchlift.distributed import Kept, LatestN
        >>> LatestN(2)([Kept(0, step, f"step-{step}") for step in (1, 2, 3)])[0].step
        2
    """

    n: int | None

    def __post_init__(self) -> None:
        if self.n is not None:
            _require_number(self.n, int)

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay."""
        return kept if self.n is None else [one for one in kept if not one.abandoned][-self.n :]


@dataclass(frozen=True)
class BestN:
    """Keeps the `n` checkpoints whose metric is the best, and those whose metrics are unreadable.

    One without that metric, or where it is not a number, is never the best. Of equal ones the later
    is.

    Example:
        >>> from torchlift.distributed import BestN
        >>> BestN(2, "accuracy", best_is="highest")
        BestN(n=2, metric='accuracy', best_is='highest')
    """

    n: int
    metric: str
    best_is: Literal["lowest", "highest"] = "lowest"

    def __post_init__(self) -> None:
        _require_number(self.n, int)
        if self.best_is not in ("lowest", "highest"):
            raise ValueError(f"best_is={self.best_is!r}: expected one of lowest, highest")

    def ranked(self, kept: Sequence[Kept]) -> list[Kept]:
        """Return those that have the metric, the best first."""
        found = [
            (value if self.best_is == "lowest" else -value, one)
            for one in reversed(kept)
            if (value := (one.metrics or {}).get(self.metric, float("nan"))) == value
        ]
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay; one that cannot be read today may be the best."""
        return self.ranked(kept)[: self.n] + [one for one in kept if one.metrics is None]


@dataclass(frozen=True)
class EveryNSteps:
    """Keeps each checkpoint whose step is a multiple of `n`.

    Example:
        >>> from torchlift.distributed import EveryNSteps, Kept
        >>> [one.step for one in EveryNSteps(2)([Kept(0, step, "") for step in (1, 2, 3, 4)])]
        [2, 4]
    """

    n: int

    def __post_init__(self) -> None:
        _require_number(self.n, int)

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay."""
        return [one for one in kept if one.step % self.n == 0]


@dataclass(frozen=True)
class EveryNSeconds:
    """Keeps the first checkpoint, and of the others each that is `n` seconds from the one before.

    A clock that was set back counts like one that has gone on.

    Example:
        >>> from torchlift.distributed import EveryNSeconds, LatestN
        >>> keep = [LatestN(2), EveryNSeconds(3600)]  # of a Keeper
    """

    n: float

    def __post_init__(self) -> None:
        _require_number(self.n, int, float)

    def __call__(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return those that stay."""
        stays: list[Kept] = []
        last = -float("inf")
        for one in kept:
            time = one.time
            if abs(time - last) >= self.n:
                stays.append(one)
                last = time
        return stays


class _NotYet(CheckpointError, TimeoutError):
    """There is no other checkpoint, and no more time."""


class RunFolder:
    """Looks into the folder of a `torchlift.Keeper` from another process, such as an evaluation.

    It writes nothing, removes nothing, and needs no process group. It names complete checkpoints
    only. The keeper may remove one at any time after that: to open it is a `CheckpointError` then
    or, of a file that is open already, no error at all. Let the keeper keep what you evaluate.

    Args:
        directory: that of the keeper, or its URL.
        best: the name of the metric by which `best` tells.
        best_is: whether the lowest or the highest is the best.
        storage_options: of a URL, as in `torchlift.open`.

    Raises:
        ValueError: an argument is not what it can be.

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
        self._known: dict[str, tuple[object, dict[str, float]]] = {}

    def kept(self) -> list[Kept]:
        """Return the complete checkpoints in the order of saving, of each step the last one.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return _last_of_each_step(self._complete())

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in the order of saving.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return [one.step for one in self.kept()]

    def latest(self) -> str | None:
        """Return the path of the last complete checkpoint, or None.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        kept = self.kept()
        return kept[-1].path if kept else None

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None.

        One that cannot be read is warned of.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if self._best is None:
            return None
        kept = self.kept()
        found = self._best.ranked(kept)
        look = _is_there if is_url(self.directory) else os.path.exists
        unread = [one.path for one in kept if one.metrics is None and look(one.path)]
        if unread:
            warnings.warn(
                f"metrics cannot be read, so another may be the best: {clipped_list(unread)}",
                RuntimeWarning,
                stacklevel=2,
            )
        return found[0].path if found else None

    def wait_for_new(self, after: str | None = None, *, timeout: float | None = None) -> str:
        """Return the path of the last complete checkpoint as soon as it is a newer one.

        Args:
            after: path of the one that is known; None waits for any. The folder may not be there
                yet.
            timeout: seconds; None waits for ever.

        Raises:
            CheckpointError: there is none in time; a TimeoutError, too.
            ValueError: `after` is not a path of a checkpoint.
        """
        match = _NAME.fullmatch(name_of(after)) if after is not None else None
        if after is not None and match is None:
            raise ValueError(f"after={after!r}: expected a path that latest() has returned")
        known = (int(match[2] or 0), int(match[1])) if match else (-1, -1)
        end, pause = monotonic() + (float("inf") if timeout is None else timeout), 0.05
        while True:
            is_there = is_url(self.directory) or os.path.isdir(self.directory)
            kept = self.kept() if is_there else []
            if kept and (kept[-1].generation, kept[-1].step) > known:
                return kept[-1].path
            left = end - monotonic()
            if left <= 0:
                raise _NotYet(
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
        found = [
            Kept(int(match[2] or 0), int(match[1]), self._path(match[0]))
            for match in matches
            if self._is_complete(match)
        ]
        for one in found:
            one._known = self._known
        return found

    def _path(self, name: str) -> str:
        return inside(self.directory, name)

    def _is_complete(self, match: re.Match[str]) -> bool:
        """Tell whether one of that name is: of a folder the marker is written last."""
        marker = inside(self._path(match[0]), DCP_METADATA)
        return bool(match[3]) or self._use(_is_there, marker)

    def _names(self) -> list[str]:
        return self._use(listed if is_url(self.directory) else os.listdir, self.directory)

    def _use(self, look: Callable[[str], T], path: str) -> T:
        """Return what is found there.

        Raises:
            CheckpointError: somebody has removed it, or its file system is not there.
        """
        try:
            return look(path)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                "the folder of the checkpoints cannot be used",
                file=self.directory,
                found=str(error),
            ) from error


def policies_of(
    keep: int | Policy | Iterable[Policy] | None,
    every: int | None,
    best: str | None,
    best_is: Literal["lowest", "highest"],
) -> list[Policy]:
    """Return the policies that a keeper's arguments mean."""
    found: list[Policy] = [BestN(1, best, best_is)] if best is not None else []
    if every is not None:
        found.append(EveryNSteps(every))
    if keep is None or isinstance(keep, int):
        keep = LatestN(keep)
    return [*found, keep] if callable(keep) else [*found, *keep]


class KeptFolder(RunFolder):
    """Names the next checkpoint of a run, and removes those that no policy keeps.

    Another job that saves here is told of, and loses nothing: what this one has neither saved
    itself, nor found when it resumed, stays, counts for no policy, and is never replaced.

    Args:
        directory: where; absolute.
        policies: what any of them keeps stays.
    """

    def __init__(self, directory: str, policies: Sequence[Policy]) -> None:
        super().__init__(directory)  # a URL has its options with it
        self._policies = policies
        #: Metrics that each checkpoint has to have.
        self.metrics = [each.metric for each in policies if isinstance(each, BestN)]
        self._best = next((each for each in policies if isinstance(each, BestN)), None)
        # Paths: of the run's own; that were not complete at first; of others; of other branches.
        self._own: set[str] | None = None
        self._begun: set[str] = set()
        self._others: set[str] = set()
        self._abandoned: set[str] = set()
        self._debris: set[str] = set()  # in a store, where nobody can tell what is a dead writer's
        self._claim: AtomicFile | _Claim | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchlift-remover")
        self._removing: list[Future[list[str]]] = []

    def adopt(self, until: int | None = None) -> list[Kept]:
        """Take what is here, of no later step than `until`, for the run's own; return what is kept.

        What is not complete is another job's if somebody completes it.
        """
        kept, names = self.kept(), self._names()
        found = [_NAME.fullmatch(name) for name in names]
        if until is None and is_url(self.directory):
            self._debris = {name for name in names if _BEGUN.fullmatch(name)}
        here = [match for match in found if match and (until is None or int(match[1]) <= until)]
        self._own = {self._path(match[0]) for match in here if self._is_complete(match)}
        self._begun = {self._path(match[0]) for match in here} - self._own
        return kept

    def new_path(self, step: int, base: int | None, is_file: bool) -> tuple[str, int]:
        """Return what to call a step's checkpoint, and the last step that may have led to it.

        No other job gets that name until `release`.

        Args:
            step: its own.
            base: that was last resumed or saved.
            is_file: whether it is a file, and no folder.
        """
        if self._own is None:  # a run that has not resumed may not be that of a later step
            self.adopt(step)
        assert self._own is not None
        kept = self.kept()
        before = step - 1 if base is None else min(step - 1, base)
        generation = 0
        if kept:
            last = kept[-1]
            is_replaced = step == last.step and is_file and last.path.endswith(".pt")
            # A run that went back; or a folder, which stays until the new one is complete.
            generation = last.generation + (last.step > before and not is_replaced)
        while True:
            name = f"step-{step:09d}" + (f"-{generation}" if generation else "")
            path, file = self._path(name), self._path(f"{name}.pt")
            markers = {path: inside(path, DCP_METADATA), file: file}
            self.release()
            # Before the look: of two jobs that look and then write, neither would see the other.
            claim: Callable[[str], _Claim | AtomicFile] = _Claim if is_url(file) else AtomicFile
            self._claim = self._use(claim, file)
            # And those before what is there: who is done removes its claim last.
            is_alone = self._is_alone(file)
            there = {each for each in markers if self._use(_is_there, markers[each])}
            if is_alone and there <= self._own:
                break
            generation += 1  # it is another job's
        if self._use(_is_there, path) and path not in [one.path for one in kept]:
            # What a save that was killed left must not become a part of this one.
            failed = _remove_all(self.directory, [path]) if is_url(path) else _retire(path)
            if failed:
                raise CheckpointError("cannot be removed", file=path, found=failed[0])
        path = file if is_file else path
        self._own.add(path)
        return name_of(path), before

    def _is_alone(self, file: str) -> bool:
        """Return whether nobody but this job has claimed a name."""
        assert self._claim is not None
        others = list[str]()
        if is_url(file):
            begun = ((name, _BEGUN.fullmatch(name)) for name in self._names())
            others = [self._path(name) for name, m in begun if m and m[1] == name_of(file)]
        else:
            remove_debris(os.path.realpath(file), live=others.append)
        return {*others} <= {self._claim.temporary}

    def sweep(self, newest: str, before: int) -> list[str]:
        """Remove what is no longer to be kept, and what saves that were interrupted left.

        Args:
            newest: path of the checkpoint that was saved last.
            before: the last step that may have led to it.

        Returns:
            What went wrong, in sentences.
        """
        assert self._own is not None
        told, kept = [], self._complete()
        own = _last_of_each_step(one for one in kept if one.path in self._own)
        # Backwards, without the steps that a run did which went back behind them.
        self._abandoned.discard(newest)
        for one in reversed(own):
            if one.path != newest and one.path not in self._abandoned:
                if one.step > before:
                    self._abandoned.add(one.path)
                before = min(before, one.step - 1)
        for one in own:
            one.abandoned = one.path in self._abandoned
        try:
            stays = {newest, *(one.path for policy in self._policies for one in policy(own))}
        except Exception as error:  # of the caller's function: the new checkpoint is complete
            told.append(f"keep= failed, and nothing is removed: {type(error).__name__}: {error}")
            stays = self._own
        failed, gone = [], (self._own | self._begun.difference(one.path for one in kept)) - stays
        retired = list[str]()
        for name in self._names():
            path = self._path(name)
            begun = _BEGUN.fullmatch(name)
            if begun and not is_url(path):
                remove_debris(self._path(begun[1]))
            if path in gone or (name in self._debris and is_url(path)):
                try:
                    retired += _retire(path)
                except (CheckpointError, OSError) as error:
                    failed.append(str(error))
        others = {one.path for one in kept} - self._own - self._others
        if others:
            self._others |= others
            told.append(
                "checkpoints that this run has neither saved nor resumed from stay, since another "
                f"job may need them: {clipped_list(sorted(others))}. Call resume() first; and give "
                "each job a folder of its own."
            )
        retired += [self._path(name) for name in self._names() if _REMOVED.fullmatch(name)]
        if retired:
            self._removing.append(self._thread.submit(_remove_all, self.directory, retired))
        return told + self._failures(failed, [each for each in self._removing if each.done()])

    def release(self) -> None:
        """Let other jobs have the name of the save that is done, or has failed."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def removed(self) -> list[str]:
        """Wait until all is removed that is to be; return, in a sentence, what cannot be."""
        return self._failures([], list(self._removing))

    def close(self) -> None:
        """End the thread that removes."""
        self.release()
        self._thread.shutdown()

    def _failures(self, failed: list[str], done: list[Future[list[str]]]) -> list[str]:
        for each in done:
            error = each.exception()
            failed += each.result() if error is None else [repr(error)]
            self._removing.remove(each)
        text = "older checkpoints cannot be removed; the next save tries again: "
        return [text + clipped_list(dict.fromkeys(failed))] if failed else []


def _last_of_each_step(kept: Iterable[Kept]) -> list[Kept]:
    return sorted({one.step: one for one in sorted(kept)}.values())


class _Claim:
    """An object of no bytes that tells other jobs of a name, where nothing can be locked.

    Attributes:
        temporary: its URL.
    """

    def __init__(self, path: str) -> None:
        name = f".{name_of(path)}.torchlift-{secrets.token_hex(4)}.part"
        self.temporary = inside(parent(path), name)
        with upload(self.temporary) as made:
            made.commit()

    def close(self) -> None:
        """Remove it; one that stays is removed by the next keeper."""
        with suppress(CheckpointError):
            remove(self.temporary)


def _is_there(path: str) -> bool:
    return name_of(path) in listed(parent(path)) if is_url(path) else is_there(path)


def _retire(path: str) -> list[str]:
    """Give a checkpoint a name that is none; of a link, which somebody made, the link alone.

    So that half of one is never complete, and no save waits until all of it is gone. Of a store,
    where nothing gets another name, remove what makes it complete.

    Returns:
        What is to be removed yet, and has none of those names.

    Raises:
        CheckpointError, OSError: it has its name.
    """
    if is_url(path):
        if path.endswith((".pt", ".part")):
            remove(path)
            return []
        if DCP_METADATA in listed(path):
            remove(inside(path, DCP_METADATA))
        return [path]
    folder, name = os.path.split(path)
    os.rename(path, os.path.join(folder, f".{name}.removed-{secrets.token_hex(4)}"))
    return []


def _remove_all(directory: str, paths: Sequence[str]) -> list[str]:
    """Remove files, links and folders; return which cannot be, and why."""
    failed = []
    if is_url(directory):
        for place in (inside(path, name) for path in paths for name in listed(path)):
            try:
                remove(place)
            except CheckpointError as error:
                failed.append(str(error))
        return failed
    try:
        make_durable(directory)  # a crash of the machine must not give one its old name again
    except OSError as error:
        return [f"{directory}: {error}"]
    for path in paths:
        try:
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
            else:
                shutil.rmtree(path)
        except OSError as error:
            if os.path.lexists(path):  # and no other keeper, or earlier sweep, has removed it
                failed.append(str(error))
    return failed

"""Save the checkpoints of a training run in the background, keep some of them, and resume.

The policies are those of orbax's ``CheckpointManager``. torch's stager makes the snapshot, and
`torchlift.save` writes it.
"""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from operator import and_
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._load.checks import require_intact
from torchlift._model.commit import Commit
from torchlift._model.ranks import RankGroup, StepResult, has_group, new_gloo_group, world_of
from torchlift._plan.names import Rewriting
from torchlift._plan.rules import Options, Patterns, Rename
from torchlift._save.files import make_folders
from torchlift._save.saving import SaveReport, save
from torchlift._store.places import inside, is_url, name_of, place_of
from torchlift._store.uploads import require_writable
from torchlift._system.interrupts import Interruptible, uninterrupted
from torchlift._system.text import clipped_list
from torchlift.distributed.agreements import (
    Call,
    SelectionMessage,
    require_same,
    require_same_call,
    together,
)
from torchlift.distributed.folder import KeptFolder, Policy
from torchlift.distributed.folder_lock import FolderLock
from torchlift.distributed.run_state import Head, RunObjects, Snapshot
from torchlift.distributed.selection import OnOtherRanks, Selection, read_selection
from torchlift.distributed.signals import STOPS, StopSignals
from torchlift.distributed.staging import Staging
from torchlift.errors import CheckpointError, FormatError, IntegrityError


class _Written(NamedTuple):
    """The result of a save.

    Attributes:
        report: The report of the files.
        problems: Problems with older checkpoints, as sentences.
    """

    report: SaveReport
    problems: list[str]


class _ToSave(NamedTuple):
    """The arguments of a save, checked.

    Attributes:
        head: The step and its metrics.
        run: The objects.
    """

    head: Head
    run: RunObjects


class Keeper:
    """Save the checkpoints of a training run in the background, keep some, and resume.

    One process writes a torch file for each step, ``step-000000100.pt``. The ranks of a process
    group write a DCP folder, ``step-000000100``, with one file each. `torchlift.open` and
    `torchlift.load` read both (``root="model"``), on any number of processes.

    A save copies the state to host memory. A thread then writes the copy, while training goes on.
    The next `save`, `wait` or `close` raises an error of that thread. A lock file keeps a second
    job out of the folder. A URL has no lock, so give each job a folder of its own.

    All ranks create the keeper and call its methods in the same order. An error on one rank is
    raised on all. See "On a cluster" for what each rank keeps, for signals, and for faults.

    Args:
        directory: A folder or a URL. It is created if it does not exist.
        keep: The number of latest checkpoints to keep, or None for all. Or a function of the kept
            checkpoints (`torchlift.distributed.Kept`) that returns those to keep.
        every: Also keep each checkpoint whose step is a multiple of this number.
        best: Also keep the checkpoint with the best metric of this name.
        best_is: Whether the ``"lowest"`` or the ``"highest"`` metric is the best.
        background: False writes the checkpoint before `save` returns.
        busy: If the last save is still being written, ``"wait"`` for it, or ``"skip"`` this save
            and return False.
        timeout: Seconds that ranks wait for each other, also for the slowest one to write. None:
            as long as the process group does.
        storage_options: Options of a URL. See `torchlift.open`.

    Raises:
        CheckpointError: If the folder cannot be created, another job uses it, or a rank failed.
        ValueError: If an argument has a wrong value.

    Example:
        >>> import tempfile, torch, torchlift
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> with torchlift.Keeper(folder, keep=2, background=False) as keeper:
        ...     for step in range(keeper.resume(model=model) or 0, 3):
        ...         saved = keeper.save(step + 1, model=model)
        >>> keeper.steps()
        [2, 3]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | Policy | None = 3,
        every: int | None = None,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        background: bool = True,
        busy: Literal["wait", "skip"] = "wait",
        timeout: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = place_of(directory, storage_options)
        self._background, self._skips = background, busy == "skip"
        self._rank, self._count = world_of()
        self._folder: KeptFolder
        self._staging = Staging()
        self._lock = FolderLock(self.directory)
        # A keeper that is never closed must not keep the next one of this process out.
        weakref.finalize(self, self._lock.release)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchlift-keeper")
        self._in_flight: list[Future[_Written] | None] = [None]
        weakref.finalize(self, _warn_of_failure, self._in_flight)
        self._closed = False
        self._signals: StopSignals | None = None
        self._report: SaveReport | None = None
        self._blocked = 0.0
        # Two groups of their own: an exchange of a background save must not mix with those of the
        # methods, or of the training.
        self._ranks = self._writers = RankGroup([])
        everyone = RankGroup.of_all()

        def validate_arguments() -> StepResult[None, Mapping[str, object]]:
            if busy not in ("wait", "skip"):
                raise ValueError(f"busy={busy!r}: expected 'wait' or 'skip'")
            if timeout is not None and not timeout > 0:
                raise ValueError(f"timeout={timeout!r}: expected seconds, or None")
            self._folder = KeptFolder(self.directory, keep, every, best, best_is)
            named = {"background=": background, "busy=": busy, "best=": best, "timeout=": timeout}
            return StepResult(None, named)

        try:
            with together(everyone):
                arguments = everyone.run(validate_arguments).by_rank
                names = "background=, busy=, best= and timeout="
                require_same(f"the ranks do not pass the same {names}", arguments.values())
                self._ranks, self._writers = _new_group(timeout), _new_group(timeout)
                everyone.run(self._open_folder)
        except BaseException:
            self._free()
            raise

    def _open_folder(self) -> StepResult[None, None]:
        if is_url(self.directory):
            require_writable(self.directory)
            self._folder.latest()  # two requests
        else:
            try:
                make_folders(self.directory, [])
                os.listdir(self.directory)
                if self._rank == 0:
                    self._lock.acquire()
            except CheckpointError:
                raise
            except OSError as error:
                raise CheckpointError(
                    "the folder cannot be created or read", file=self.directory, found=str(error)
                ) from error
        # A rank that cannot start the thread must fail here. Later, the others would wait for it.
        self._thread.submit(int).result()
        return StepResult(None, None)

    # ---- save

    def save(
        self,
        step: int,
        state: Mapping[str, object] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        **objects: object,
    ) -> bool:
        """Save the state of a run. All ranks call it.

        The checkpoint also contains the states of the random number generators of torch, of Python
        and, if it is loaded, of NumPy: those of each rank.

        Args:
            step: The number of steps that led to the state.
            state: A dict of objects by name: modules, optimizers of their parameters, anything with
                ``state_dict`` and ``load_state_dict``, plain data and tensors. Pass each of several
                models by its own name.
            metrics: Numbers by name, to find the best checkpoint. Those of rank 0 count.
            **objects: More objects by name.

        Returns:
            True if the state is being saved. False if the last save is not complete, with
            ``busy="skip"``.

        Raises:
            CheckpointError: If the last save failed, or this one without `background`.
            PlacementError: If `resume` could not put an object back.
            ValueError: If an argument has a wrong value.
        """
        began = perf_counter()
        with uninterrupted() as deliver:
            write = self._prepare_save(step, {**(state or {}), **objects}, metrics, deliver)
            if write is None:
                return False
            # No interrupt may stop this: the writers of all ranks wait for each other.
            self._in_flight[0] = self._thread.submit(write)
            self._blocked = perf_counter() - began
        if not self._background:
            self.wait()
            assert self._report is not None
            self._report = replace(self._report, blocked=perf_counter() - began)
        return True

    def _prepare_save(
        self,
        step: int,
        objects: Mapping[str, object],
        metrics: Mapping[str, float] | None,
        deliver: Callable[[], None],
    ) -> Callable[[], _Written] | None:
        """Take a snapshot on all ranks. Return the call that writes it in the thread.

        Returns:
            None if the last save is not complete.
        """

        def check_arguments() -> StepResult[_ToSave, Call]:
            self._require_open()
            head, run = Head(_require_step(step), _numbers(metrics)), RunObjects.of(objects)
            best = self._folder.metric
            # Without metrics, the checkpoint is no candidate: nothing was measured at this step.
            if self._rank == 0 and head.metrics and best not in (None, *head.metrics):
                raise ValueError(f"metrics= lacks {best!r}, which best= needs")
            call = Call("save", head.step, run.models, is_done=self._is_done)
            return StepResult(_ToSave(head, run), call)

        # Before the snapshot: a `state_dict` that communicates would wait for a rank that raised.
        (head, run), calls = self._ranks.run(check_arguments, require_same_call)
        if self._skips and not all(call.is_done for call in calls.values()):
            return None
        alone = self._count == 1

        def take_snapshot() -> StepResult[Snapshot, str | None]:
            # The snapshot uses the memory of the last one, so that one must be written.
            self._await_save()
            snapshot = Snapshot.of(head, run, self._staging, self.directory, is_alone=alone)
            name = None
            if self._rank == 0:
                name = self._folder.new_name(head.step, is_file=alone)
            deliver()  # the last moment at which an interrupt ends the save on all ranks
            return StepResult(snapshot, name)

        snapshot, names = self._ranks.run(take_snapshot)
        name = names[0]
        assert name is not None
        return partial(self._write, snapshot, inside(self.directory, name))

    def _write(self, snapshot: Snapshot, path: str) -> _Written:
        """Write a checkpoint, and remove those that are not kept any more."""
        format = None if self._count == 1 else "dcp"
        group = self._writers.groups[0] if self._writers.groups else None
        with self._writers.together() as agree:  # an error before `save` stops the others, too
            if format is None:
                state = snapshot.for_one_process()
            else:
                state = snapshot.for_rank(self._writers, self._rank)
            report = save(state, path, format=format, replicated="rank0", process_group=group)
            agree(False)
        try:
            problems = self._folder.sweep(path) if self._rank == 0 else []
        except (CheckpointError, OSError) as error:  # the new one is complete
            problems = [
                f"older checkpoints are not removed, and the next save tries again: {error}"
            ]
        return _Written(report, problems)

    @property
    def report(self) -> SaveReport | None:
        """Return the report of the last complete save, or None. It does not wait."""
        (saving,) = self._in_flight
        if saving is None or not saving.done() or saving.exception() is not None:
            return self._report
        return replace(saving.result().report, blocked=self._blocked)

    def should_stop(self, *, on: Iterable[int] = STOPS) -> bool:
        """Return whether any rank received a signal that asks it to stop. All ranks call it.

        The first call installs the handlers, so call it before the first step, as a ``while`` does.
        They call the handlers that were there, which `close` restores. The ranks exchange a few
        bytes: if steps are short, call it at every tenth.

        Args:
            on: Signals, for the first call. Default: SIGTERM, and the SIGUSR1 that a scheduler can
                send some minutes before it.

        Raises:
            CheckpointError: If the first call is not made in the main thread.
            ValueError: If the keeper is closed.

        Example:
            >>> import tempfile, torch, torchlift
            >>> model, step = torch.nn.Linear(2, 1), 0
            >>> with torchlift.Keeper(tempfile.mkdtemp()) as keeper:
            ...     while step < 3 and not keeper.should_stop():
            ...         step += 1
            ...     keeper.save(step, model=model)
            True
        """

        def poll_signals() -> StepResult[None, Call]:
            self._require_open()
            if self._signals is None:
                self._signals = StopSignals(on)
                weakref.finalize(self, self._signals.close)
            return StepResult(None, Call("should_stop", received=self._signals.received))

        calls = self._ranks.run(poll_signals, require_same_call).by_rank
        return any(call.received for call in calls.values())

    def wait(self) -> None:
        """Wait until nothing is being saved or removed. All ranks call it.

        Raises:
            CheckpointError: If the last save failed. Earlier checkpoints are unchanged.
        """

        def await_save() -> StepResult[None, Call]:
            self._await_save()
            return StepResult(None, Call("wait"))

        # On all ranks: one that did not raise would wait alone in the next collective.
        self._ranks.run(await_save, require_same_call)

    def _await_save(self) -> None:
        """Wait for the last save of this rank, and warn of its problems.

        Raises:
            CheckpointError: If it failed.
        """
        (saving,) = self._in_flight
        if saving is None:
            return
        with Interruptible():
            error = saving.exception()
        self._report = self.report
        # Not earlier: after an interrupted wait, the next snapshot would overwrite this one.
        self._in_flight[0] = None
        if error is not None:
            raise error
        for sentence in saving.result().problems:
            warnings.warn(sentence, RuntimeWarning, stacklevel=6)

    def close(self) -> None:
        """Wait for the last save, and free the snapshot and the folder. All ranks call it.

        Afterwards `steps`, `latest` and `best` still work, and no other method does.

        Raises:
            CheckpointError: If the last save failed.
        """
        try:
            self.wait()
        finally:
            self._free()

    def _free(self) -> None:
        self._lock.is_used = False  # another Keeper may take it, even if interrupts end this
        self._closed = True
        if self._signals is not None:
            self._signals.close()
        try:
            self._thread.shutdown()
        finally:
            groups = [*self._ranks.groups, *self._writers.groups]
            self._ranks = self._writers = RankGroup([])
            with ExitStack() as stack:
                stack.callback(self._lock.release)
                for group in groups:  # otherwise their threads and sockets stay
                    stack.callback(torch.distributed.destroy_process_group, group)
                stack.callback(self._staging.close)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not come here, so only this rank's write is finished
            self._free()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the keeper is closed")

    @property
    def _is_done(self) -> bool:
        (saving,) = self._in_flight
        return saving is None or saving.done()

    # ---- find

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in the order of saving."""
        return self._folder.steps()

    def latest(self) -> str | None:
        """Return the path of the last complete checkpoint, or None."""
        return self._folder.latest()

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None."""
        return self._folder.best()

    # ---- resume

    def resume(
        self,
        state: Mapping[str, object] | None = None,
        *,
        step: int | None = None,
        verify: bool = True,
        on_other_ranks: OnOtherRanks | None = None,
        include: Patterns = ("*",),
        exclude: Patterns = (),
        allow_missing: Patterns = (),
        allow_unexpected: Patterns = (),
        rename: Rename | None = None,
        **objects: object,
    ) -> int | None:
        """Load the last complete checkpoint. All ranks call it.

        All objects are loaded on all ranks, or none: an error leaves them as they were. Only an
        object whose ``state_dict`` fails before cannot be given back. It is loaded last, and an
        error names it. Objects that you do not pass are not loaded.

        Patterns and ``rename`` use names such as ``model.head.weight`` for tensors, ``optimizer``
        for other objects, and ``rng`` for the generators. The optimizer's state of a parameter
        follows the parameter. After a resume from an earlier step, your next save is the latest.

        Args:
            state: A dict of objects by name, as for `save`. Plain data stays as it is. A warning
                says if it was saved with another value.
            step: The step to load. Default: the last one.
            verify: Compare all checksums first. Each rank reads a part of the checkpoint.
            on_other_ranks: Functions by name of an object, for another number of ranks. A function
                gets the list of the states of all ranks that saved, and returns that of this rank.
            include: Patterns of names to load. See `torchlift.load`.
            exclude: Patterns of names to skip. They stay as they are.
            allow_missing: Patterns of names or objects that the checkpoint may lack.
            allow_unexpected: Patterns of saved names that no model needs to have, and no optimizer
                needs to hold.
            rename: A dict, a function or a rule of `torchlift.remap`. It gives the name in the
                model, or None to drop a tensor. It must not merge or split tensors.
            **objects: More objects by name.

        Returns:
            The step that was saved, or None if there is no checkpoint.

        Raises:
            CheckpointError: If a state does not fit, or each rank saved its own and now there are
                others.
            IntegrityError: If a checksum is wrong.
            MismatchError: If a pattern matches nothing, or nothing is left.
        """
        ask_rules = partial(
            Options, include=include, exclude=exclude, allow_missing=allow_missing,
            allow_unexpected=allow_unexpected, rename=rename,
        )  # fmt: skip
        # An interrupt waits until all ranks are done. An error undoes the load on all of them.
        with uninterrupted(), Commit() as commit, together(self._ranks) as deliver:

            def select_checkpoint() -> StepResult[Callable[[Checkpoint], Selection], Call]:
                if self._closed and has_group():
                    raise ValueError("the keeper is closed")
                rules = ask_rules()
                if isinstance(rules.rename, Rewriting):
                    raise TypeError(
                        f"rename={rules.rename!r}: resume cannot merge or split tensors"
                    )
                run = RunObjects.of({**(state or {}), **objects})
                self._await_save()
                names = list[str]()
                if self._rank == 0:  # alone: a checkpoint may expire in between
                    kept = self._folder.kept()
                    names = [name_of(one.path) for one in kept if step in (None, one.step)]
                found = names[-1] if names else None
                select = partial(
                    read_selection, run=run, rules=rules, on_other_ranks=on_other_ranks or {},
                    rank=self._rank, count=self._count,
                )  # fmt: skip
                return StepResult(select, Call("resume", models=run.models, checkpoint=found))

            select, calls = self._ranks.run(select_checkpoint, require_same_call)
            name = calls[0].checkpoint
            if name is None:
                if step is None:  # a new run
                    self._folder.is_ours = True
                    return None
                raise FormatError(
                    "the folder does not have a complete checkpoint of that step",
                    file=self.directory,
                    expected=f"one of {self.steps()}",
                    found=step,
                )
            selection = self._load(name, select, commit, deliver, verify=verify)
        if selection.changed:
            warnings.warn(
                f"{clipped_list(selection.changed)}: resume does not change plain data. The saved "
                "values are in torchlift.open(path).tree()",
                RuntimeWarning,
                stacklevel=2,
            )
        return selection.step

    def _load(
        self,
        name: str,
        select: Callable[[Checkpoint], Selection],
        commit: Commit,
        deliver: Callable[[], None],
        *,
        verify: bool,
    ) -> Selection:
        """Load a checkpoint, all of it or nothing."""
        path = inside(self.directory, name)
        group = self._ranks.groups[0] if self._ranks.groups else None
        with ExitStack() as stack:
            try:
                ckpt = self._ranks.run(
                    lambda: StepResult(stack.enter_context(open_checkpoint(path)), None)
                ).value
                require_intact([ckpt] if verify else [], self._ranks)
            except (FormatError, IntegrityError) as error:
                others = [one for one in self._folder.kept() if name_of(one.path) != name]
                if steps := [one.step for one in others]:
                    error.hint = (
                        f"The file is damaged. Pass step= for another of the steps {steps}."
                    )
                raise

            def read_checkpoint() -> StepResult[Selection, SelectionMessage]:
                found = select(ckpt)
                return StepResult(found, found.message())

            selection, by_rank = self._ranks.run(read_checkpoint)
            messages = by_rank.values()
            if len({message.selected for message in messages}) > 1:
                raise ValueError("the ranks do not select and rename the same names")
            separate = [
                name for name in selection.optimizers if any(name in m.separate for m in messages)
            ]
            # Before the models, whose load undoes itself. The commit undoes these.
            for name in separate:
                selection.load_optimizer(name, commit, group)

            def load_objects() -> StepResult[list[str], None]:
                last = selection.load_objects(commit)
                deliver()  # the last moment at which an interrupt changes nothing
                return StepResult(last, None)

            # Before the models, so an error here leaves the models unchanged.
            last = self._ranks.run(load_objects).value
            if selection.run.modules:
                unused = reduce(and_, (message.unexpected for message in messages))
                selection.load_models(by_rank[self._rank].unexpected, unused, separate, group)
            commit.finish()
            self._folder.is_ours = True
            # Last, because these cannot be undone.
            self._ranks.run(partial(selection.load_last, last))
        return selection


def _new_group(timeout: float | None) -> RankGroup:
    """Return a group of all ranks, if there are any, with the timeout of the job by default."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    return RankGroup([new_gloo_group(limit)] if has_group() else [])


def _require_step(step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(f"step={step!r}: expected a number from 0 on")
    return number


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (metrics or {}).items()}


def _warn_of_failure(saving: list[Future[_Written] | None]) -> None:
    """Warn of a failed save that no method has reported."""
    error = saving[0].exception() if saving[0] is not None and saving[0].done() else None
    if error is not None:
        warnings.warn(f"the last save of a Keeper failed: {error}", RuntimeWarning, stacklevel=2)
